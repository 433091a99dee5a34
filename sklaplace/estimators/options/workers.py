"""Group: processes of ``torch.distributed`` that fit one estimator together.

Each process sums the curvature over some of the shards. An all-reduce operation then
sends the sum over all shards to every process. Without a group, there is only one
process.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sklaplace.core.cache import fingerprint
from sklaplace.curvature.accumulation import CurvatureSums, OrderedMap, total
from sklaplace.networks.data import TrainingData
from sklaplace.networks.trained import TrainedNetwork

# Parameters that may differ between processes.
_OWN = "n_jobs", "distributed", "likelihood", "prior"


class OtherProcessError(RuntimeError):
    """Error in another process of the group."""


@dataclass(frozen=True)
class Group:
    """Group of processes that compute one result together.

    Attributes
    ----------
    rank : int
        Rank of this process.
    size : int
        Number of processes.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, distributed: bool) -> "Group":
        """Return the group of ``torch.distributed``, or a group of only this process.

        Raises
        ------
        ValueError
            If ``distributed`` is True but there is no process group.
        """
        if not distributed:
            return cls()
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "distributed=True, but torch.distributed has no process group. Start "
                "the script with torchrun, and call "
                "torch.distributed.init_process_group() before fit."
            )
        return cls(dist.get_rank(), dist.get_world_size())

    def map(
        self,
        own_map: OrderedMap,
        function: Callable[[Any], CurvatureSums],
        parts: Sequence[Any],
    ) -> Iterator[CurvatureSums]:
        """Yield the sums over each part or, with several processes, over all parts.

        Each process receives an equal share of consecutive parts.

        Parameters
        ----------
        own_map : callable
            Ordered map within this process.
        function : callable
            Function that computes the sums over a part.
        parts : sequence
            Parts to sum over.

        Raises
        ------
        OtherProcessError
            If another process failed. Without the error, this process would wait
            forever.
        """
        if self.size == 1:
            yield from own_map(function, parts)
            return
        with self.together():
            ends = [k * len(parts) // self.size for k in (self.rank, self.rank + 1)]
            own_parts = parts[slice(*ends)]
            own = total(own_map(function, own_parts)) if len(own_parts) else None
        yield self._reduced(own)

    def _reduced(self, own: CurvatureSums | None) -> CurvatureSums:
        """Return the total over all processes, some of which may have no parts.

        Tensors of equal shapes are added by all-reduce operations. Each process sends
        all other sums, such as stored samples, to all processes.
        """
        summands = None if own is None else own.accumulator.summands()
        form = None if summands is None else [some.shape for some in summands]
        forms = self.gather(form)
        if own is None or summands is None or any(other != form for other in forms):
            return total(sums for sums in self.gather(own) if sums is not None)
        for tensor in summands:
            added = tensor.to(summands[-1].device, torch.float64).contiguous()
            dist.all_reduce(added)
            tensor.copy_(added)
        first, *others = self.gather((own.data_fit, own.record))
        sums = CurvatureSums(own.accumulator, *first)
        for data_fit, record in others:
            sums.add(data_fit, record)
        return sums

    def gather(self, value: Any) -> list[Any]:
        """Return the values from all processes, ordered by rank."""
        if self.size == 1:
            return [value]
        file = io.BytesIO()
        torch.save(value, file)
        contents: list[Any] = [None] * self.size
        dist.all_gather_object(contents, file.getvalue())
        return [
            torch.load(io.BytesIO(content), _to_own_device, weights_only=False)
            for content in contents
        ]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error in all processes if any process fails.

        Otherwise, the remaining processes would wait forever for the failed process.

        Raises
        ------
        OtherProcessError
            If another process failed, but this process did not.
        """
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        messages = self.gather(None if error is None else repr(error))
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise OtherProcessError(
                    f"The process of rank {rank} has failed: {message}. Correct this "
                    "error, and start all processes again."
                )

    def agree(self, values: Mapping[str, Any]) -> None:
        """Raise an error in all processes if the values of the processes differ.

        Parameters
        ----------
        values : mapping
            Values by name. The error message contains the names. Parameters in ``_OWN``
            are not compared, because they do not affect results, or can be arbitrary
            objects.

        Raises
        ------
        ValueError
            "The processes of torch.distributed have different ..."
        """
        if self.size == 1:
            return
        compared = {k: v for k, v in values.items() if k not in _OWN}
        own = {k: fingerprint(v) for k, v in compared.items()}
        first, *others = self.gather(own)
        differing = [k for k in own if any(v[k] != first[k] for v in others)]
        if differing:
            raise ValueError(
                "The processes of torch.distributed have different "
                f"{', '.join(differing)}. Pass the same to all processes."
            )

    def agree_on_network(self, network: TrainedNetwork) -> None:
        """Raise ValueError if processes differ in their weights or number of samples.

        Buffers, such as running means, are copied from the first process, because each
        process was trained on different batches.
        """
        if self.size == 1:
            return
        module, n = network.net.module_, len(network.train)
        weights = [parameter.detach() for parameter in module.parameters()]
        self.agree({"number of samples": n, "weights of the network": weights})
        buffers = dict(module.named_buffers())
        first, *_ = self.gather({k: v.cpu() for k, v in buffers.items()})
        with torch.no_grad():
            for name, value in first.items():
                buffers[name].copy_(value)


def check_workers(distributed: bool, memory: Any) -> None:
    """Raise ValueError if several processes would share ``memory``."""
    if Group.of(distributed).size > 1 and memory is not None:
        raise ValueError(
            "distributed=True cannot be used with memory, because other processes may "
            "lack its entries. Use memory=None."
        )


def data_to_agree_on(data: TrainingData) -> dict[str, Any]:
    """Return a dict of the data that `Group.agree` compares across processes.

    The inputs are left out, because they may be too large to compare, or not yet
    loaded.
    """
    own = {"targets": data.y, "sample_weight": data.sample_weight}
    return {"number of samples": len(data.y)} | own


def _to_own_device(storage: Any, location: str) -> Any:
    """Move another process's storage to the CPU or GPU of this process."""
    return storage if location == "cpu" else storage.cuda()
