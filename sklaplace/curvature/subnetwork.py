"""Criteria that select individual weights to treat as random.

A criterion scores each weight (Daxberger et al. 2021, "Bayesian deep learning via
subnetwork inference"). The weights with the highest scores are selected. Among weights
with equal scores, the earlier weights are selected first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.checks import Check
from sklaplace.curvature.accumulation import accumulate
from sklaplace.curvature.descent import SCHEDULE_CHECKS, Descent, Schedule
from sklaplace.curvature.ggn import GGN
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures.diag import DiagAccumulator
from sklaplace.networks.trained import TrainedNetwork


@dataclass(frozen=True)
class SelectionProblem:
    """Trained network and data from which weights are selected.

    Attributes
    ----------
    network : TrainedNetwork
        The trained network, with its training samples.
    layout : Layout
        Layout of all weights of the network.
    descent : Descent
        Gradient descent from the trained weights.
    batch_size : int or None
        Samples per batch.
    seed : int
        Seed of random numbers.
    """

    network: TrainedNetwork
    layout: Layout
    descent: Descent
    batch_size: int | None
    seed: int


def magnitude(problem: SelectionProblem) -> Tensor:
    """Score weights by their absolute values, (P,)."""
    return problem.layout.read(problem.network.forward().module).abs()


def random(problem: SelectionProblem) -> Tensor:
    """Score weights by uniform random numbers, (P,)."""
    generator = torch.Generator().manual_seed(problem.seed)
    p = problem.layout.n_parameters
    return torch.rand(p, dtype=torch.float64, generator=generator)


def variance(problem: SelectionProblem) -> Tensor:
    """Score weights by posterior variance, for diagonal curvature and a scalar prior.

    The scores (P,) are the negative of the curvature's diagonal, which increases with
    the variance. Weights with zero curvature, such as weights of inputs that are always
    zero, come last, since no prediction depends on them. The cost is one pass over the
    training samples (Daxberger et al. 2021, section 4).
    """
    accumulator, network = DiagAccumulator(problem.layout), problem.network
    size = problem.batch_size
    sums = accumulate(network, [network.train], GGN, accumulator, batch_size=size)
    curvature = sums.accumulator.decompose().hessian_diagonal()
    # for zero curvature, one less than the lowest score of the other weights
    return torch.where(curvature > 0, -curvature, -curvature.max() - 1)


def swag(problem: SelectionProblem, **schedule: Any) -> Tensor:
    """Score weights by their variances along stochastic gradient descent, (P,).

    The descent starts from the trained weights (Maddox et al. 2019, "A simple baseline
    for Bayesian uncertainty in deep learning"). ``schedule`` contains fields of a
    `Schedule`.
    """
    return problem.descent.moments(problem.layout, Schedule(**schedule)).variance


SCORES: dict[str, Callable[..., Tensor]] = {
    "magnitude": magnitude,
    "random": random,
    "swag": swag,
    "variance": variance,
}
# checks of the options of criteria
SCORE_CHECKS: dict[str, Mapping[str, Check]] = {"swag": SCHEDULE_CHECKS}


def choose(
    problem: SelectionProblem, by: str, n_weights: int, **options: Any
) -> Tensor:
    """Return ascending indices of the weights with the highest scores, (n_weights,).

    ``by`` is a key of ``SCORES``, and ``options`` are options of this criterion. Raise
    ValueError if a score is not finite.
    """
    scores = SCORES[by](problem, **options)
    if not scores.isfinite().all():
        raise ValueError(
            f"subset_params['by']={by!r} has no finite scores: gradient descent has "
            "diverged. Set a smaller subset_params['lr'], scale inputs and targets, or "
            "use 'magnitude' or 'random'."
        )
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:n_weights].sort().values.cpu()
