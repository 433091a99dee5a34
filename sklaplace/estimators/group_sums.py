"""Sums over the shards of all processes of a `Group`, the same in each of them.

Shards are added in their order, so that sums do not depend on the number of workers.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from sklaplace.core.distributed import Group
from sklaplace.core.parallel import ordered_map
from sklaplace.curvature.structures import Accumulator
from sklaplace.estimators.curvature_sums import CurvaturePass, CurvatureSums
from sklaplace.estimators.options import LaplaceOptions
from sklaplace.estimators.samples import draw_seed
from sklaplace.networks.data import TrainingData
from sklaplace.networks.shards import Shards
from sklaplace.networks.trained import TrainedNetwork

# Options that change no result, and may be of any code.
_OWN_OPTIONS = "n_jobs", "distributed", "likelihood", "prior"


def added_up(
    work: CurvaturePass, shards: Shards, group: Group, n_jobs: int | None
) -> CurvatureSums:
    """Return the sums over all shards, in as many passes as they need.

    Parameters
    ----------
    work : CurvaturePass
        The first pass.
    shards : Shards
        Training samples.
    group : Group
        Processes, each of which adds up a part of the shards.
    n_jobs : int or None
        Number of workers of each process, see `ordered_map`.

    Raises
    ------
    OtherProcessError
        If another process has failed; this one would wait for it without end.

    Notes
    -----
    Tensors that are added entry by entry are sent in one reduction; what has another
    form, such as samples that are kept, is sent to all by each.
    """
    total = _one_pass(work, shards, group, n_jobs)
    while total.accumulator.needs_another_pass():
        again = replace(work, accumulator=total.accumulator, is_first=False)
        total.accumulator = _one_pass(again, shards, group, n_jobs).accumulator
    return total


def _one_pass(
    work: CurvaturePass, shards: Shards, group: Group, n_jobs: int | None
) -> CurvatureSums:
    """Return the sums of one pass, over the shards of all processes."""
    with group.together():
        own_shards = group.part(shards)
        own = _in_order(ordered_map(work, own_shards, n_jobs=n_jobs, label="curvature"))
    return own if group.size == 1 else _merged(group, own, work.accumulator)


def _merged(
    group: Group, own: CurvatureSums | None, blank: Accumulator
) -> CurvatureSums:
    """Return the sums of all processes; ``own`` is None if this one has no shard."""
    tensors = None if own is None else own.accumulator.summands()
    form = None if tensors is None else [tensor.shape for tensor in tensors]
    forms = group.gather(form)
    if own is None or form is None or any(other != form for other in forms):
        return _in_order(part for part in group.gather(own) if part is not None)
    assert tensors is not None
    group.add_up(tensors)
    total = _in_order(group.gather(replace(own, accumulator=blank)))
    total.accumulator = own.accumulator
    return total


def _in_order(parts: Iterable[CurvatureSums]) -> Any:
    """Return the sum of parts, None if there are none."""
    parts = iter(parts)
    total: Any = next(parts, None)
    for part in parts:
        total.merge(part)
    return total


def agree_on_data(group: Group, data: TrainingData) -> None:
    """Raise unless all processes have the same targets and sample weights.

    Inputs may be too large to be compared, or not be known before they are read.
    """
    group.agree(
        {
            "number of samples": len(data.y),
            "targets": data.y,
            "sample_weight": data.sample_weight,
        }
    )


def agreed_seed(
    group: Group, options: LaplaceOptions, data: TrainingData, random_state: Any
) -> int:
    """Return a seed of all processes: without a random state that of the first.

    Raises an error unless all have the same options, but for those that change no
    result, targets, sample weights and random state.
    """
    group.agree({k: v for k, v in vars(options).items() if k not in _OWN_OPTIONS})
    agree_on_data(group, data)
    seed = draw_seed(random_state)
    is_plain = random_state is None or isinstance(random_state, int)
    group.agree({"random_state": random_state if is_plain else seed})
    return int(group.gather(seed)[0])


def agree_on_network(group: Group, network: TrainedNetwork) -> None:
    """Raise unless all processes have the same weights, and numbers of samples.

    Buffers, such as running means of batches, are made those of the first: each process
    has seen other batches in training.
    """
    if group.size == 1:
        return
    module = network.net.module_
    weights = [parameter.detach().cpu() for parameter in module.parameters()]
    group.agree(
        {
            "number of samples": len(network.train),
            "weights of the network": weights,
        }
    )
    own = dict(module.named_buffers())
    first = group.gather({k: v.cpu() for k, v in own.items()})[0] if own else {}
    with torch.no_grad():
        for name, value in first.items():
            own[name].copy_(value)
