"""Group: the processes of ``torch.distributed`` that compute one result together.

Each computes a part, and all get the sum. Without a group there is one process.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sklaplace.core.cache import fingerprint

T = TypeVar("T")
# Types of the values that a message shows.
_SHOWN = int, float, bool, str, type(None)


class OtherProcessError(RuntimeError):
    """An error in another process of the group."""


@dataclass(frozen=True)
class Group:
    """Processes that compute one result together.

    Attributes
    ----------
    rank : int
        Number of this process.
    size : int
        Number of processes.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, is_distributed: Any) -> "Group":
        """Return the default group of ``torch.distributed``, or this process alone.

        Raises
        ------
        ValueError
            If there is no such group.
        """
        if not is_distributed:
            return cls()
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "distributed=True, but torch.distributed has no process group. Start "
                "the script by torchrun, and call "
                "torch.distributed.init_process_group() before fit."
            )
        return cls(dist.get_rank(), dist.get_world_size())

    def part(self, items: Sequence[T]) -> Sequence[T]:
        """Return the items of this process: consecutive ones, as many as of others."""
        ends = [k * len(items) // self.size for k in (self.rank, self.rank + 1)]
        return items[slice(*ends)]

    def gather(self, value: Any, device: torch.device | str = "cpu") -> list[Any]:
        """Return the values of all processes, in their order, on a device here."""
        if self.size == 1:
            return [value]
        file = io.BytesIO()
        torch.save(value, file)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, file.getvalue())
        return [
            torch.load(io.BytesIO(content), map_location=device, weights_only=False)
            for content in found
        ]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all processes, in one reduction."""
        if self.size == 1 or not tensors:
            return
        device = tensors[-1].device
        flat = [tensor.to(device, torch.float64).flatten() for tensor in tensors]
        total = torch.cat(flat)
        dist.all_reduce(total)
        parts = total.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.reshape(tensor.shape))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error in all processes if there is one in any of them.

        Each would wait without end for one that has failed and does not take part in
        what comes next.

        Raises
        ------
        OtherProcessError
            If another process has failed, and this one has not.
        """
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        found = self.gather(None if error is None else repr(error))
        if error is not None:
            raise error
        for rank, message in enumerate(found):
            if message is not None:
                raise OtherProcessError(
                    f"The process of rank {rank} has failed: {message}. All processes "
                    "compute one result together: see to that error, and start all of "
                    "them again."
                )

    def agree(self, values: Mapping[str, Any]) -> None:
        """Raise an error in all processes if one has other values.

        Parameters
        ----------
        values : mapping
            By their names, which the message has.

        Raises
        ------
        ValueError
            "The processes of torch.distributed have different ..."
        """
        if self.size == 1:
            return
        found = self.gather({name: _shown(value) for name, value in values.items()})
        differing = [
            name for name in values if any(v[name] != found[0][name] for v in found)
        ]
        if differing:
            shown = [[own[name] for name in differing] for own in found]
            raise ValueError(
                "The processes of torch.distributed have different "
                f"{', '.join(differing)}: {shown}, by rank. With distributed=True each "
                "has to be given the same."
            )


def _shown(value: Any) -> Any:
    """Return a value as a message shows it: itself, or the first digits of a hash."""
    return value if isinstance(value, _SHOWN) else fingerprint(value)[:8]
