"""Group: the processes of ``torch.distributed`` that compute one result together.

Each computes a part, and all get the sum. Without a group there is one process.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


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

    def agree(self, subject: str, value: Any) -> None:
        """Raise an error in all processes if one has another value.

        Raises
        ------
        ValueError
            "The processes of torch.distributed have different ``subject``."
        """
        found = self.gather(value)
        if any(other != found[0] for other in found):
            raise ValueError(
                f"The processes of torch.distributed have different {subject}: "
                f"{found}. With distributed=True each has to be given the same."
            )
