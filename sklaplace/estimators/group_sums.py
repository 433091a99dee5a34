"""Sums over the shards of all processes of a `Group`, the same in each of them."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from sklaplace.core.distributed import Group
from sklaplace.curvature.structures import Accumulator
from sklaplace.estimators.curvature_sums import CurvatureSums
from sklaplace.networks.trained import TrainedNetwork


class OtherProcessError(RuntimeError):
    """An error in another process of the group."""


def added_over_group(
    group: Group, work: Callable[[], CurvatureSums | None], blank: Accumulator
) -> CurvatureSums:
    """Return the sums of all processes.

    Parameters
    ----------
    group : Group
        The processes.
    work : callable
        Computes the sums of this one, None if it has no samples.
    blank : Accumulator
        Without samples.

    Raises
    ------
    OtherProcessError
        If another process has failed; this one would wait for it without end.

    Notes
    -----
    Tensors that are added entry by entry are sent in one reduction; what has another
    form, such as samples that are kept, is sent to all by each.
    """
    own, error = None, None
    try:
        own = work()
    except Exception as raised:
        error = raised
    if group.size == 1:
        if error is not None:
            raise error
        assert own is not None
        return own
    _raise_together(group, error)
    return _merged(group, own, blank)


def _raise_together(group: Group, error: Exception | None) -> None:
    """Raise in all processes if one has failed."""
    found = group.gather(None if error is None else repr(error))
    if error is not None:
        raise error
    for rank, message in enumerate(found):
        if message is not None:
            raise OtherProcessError(
                f"The process of rank {rank} has failed, so that its samples are "
                f"missing: {message}."
            )


def _merged(
    group: Group, own: CurvatureSums | None, blank: Accumulator
) -> CurvatureSums:
    tensors = None if own is None else own.accumulator.summands()
    form = None if tensors is None else [tensor.shape for tensor in tensors]
    forms = group.gather(form)
    if own is None or form is None or any(other != form for other in forms):
        parts = group.gather(own)
        return _in_order([part for part in parts if part is not None])
    assert tensors is not None
    group.add_up(tensors)
    total = _in_order(group.gather(replace(own, accumulator=blank)))
    total.accumulator = own.accumulator
    return total


def _in_order(parts: list[CurvatureSums]) -> CurvatureSums:
    total = parts[0]
    for part in parts[1:]:
        total.merge(part)
    return total


def agree_on_network(group: Group, network: TrainedNetwork) -> None:
    """Raise unless all processes have the same weights, and numbers of samples.

    Buffers, such as running means of batches, are made those of the first: each process
    has seen other batches in training.
    """
    if group.size == 1:
        return
    group.agree("numbers of samples", len(network.train))
    module = network.net.module_
    group.agree("weights of the network", _hash(module.parameters()))
    own = dict(module.named_buffers())
    first = group.gather({k: v.cpu() for k, v in own.items()})[0] if own else {}
    with torch.no_grad():
        for name, value in first.items():
            own[name].copy_(value)


def _hash(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the numbers in some tensors."""
    state = hashlib.sha256()
    for tensor in tensors:
        number = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        state.update(number.numpy().tobytes())
    return state.hexdigest()[:8]
