"""Subnetworks: criteria that select the single weights to treat as random.

A criterion gives each weight a score (Daxberger et al. 2021, "Bayesian deep learning
via subnetwork inference"): the weights with the highest scores are selected, and of
equal ones the first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.checks import Check
from sklaplace.curvature.accumulation import accumulate
from sklaplace.curvature.descent import SCHEDULE_CHECKS, Descent, Schedule
from sklaplace.curvature.ggn import GGN
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures.diag import DiagAccumulator
from sklaplace.networks.streams import Samples
from sklaplace.networks.trained import TrainedNetwork


@dataclass(frozen=True)
class SelectionProblem:
    """A trained network and its data, from which weights are selected.

    Attributes
    ----------
    network : TrainedNetwork
        The trained network.
    samples : Dataset
        Training samples.
    layout : Layout
        All of the network's weights.
    descent : Descent
        Gradient descent from the trained weights.
    batch_size : int or None
        Samples per batch.
    seed : int
        Of random numbers.
    """

    network: TrainedNetwork
    samples: Samples
    layout: Layout
    descent: Descent
    batch_size: int | None
    seed: int


def magnitude(problem: SelectionProblem) -> Tensor:
    """Absolute values of the weights, (P,)."""
    return problem.layout.read(problem.network.forward().module).abs()


def random(problem: SelectionProblem) -> Tensor:
    """Uniform random numbers, (P,)."""
    generator = torch.Generator().manual_seed(problem.seed)
    p = problem.layout.n_parameters
    return torch.rand(p, dtype=torch.float64, generator=generator)


def variance(problem: SelectionProblem) -> Tensor:
    """Posterior variances under a diagonal curvature and a scalar prior, (P,).

    Up to an increasing function: the negative diagonal of the curvature. Weights with
    zero curvature, such as those of inputs that are always zero, come last: no
    prediction depends on them. One pass over the training samples (Daxberger et al.
    2021, section 4).
    """
    accumulator, size = DiagAccumulator(problem.layout), problem.batch_size
    parts = [problem.samples]
    sums = accumulate(problem.network, parts, GGN, accumulator, batch_size=size)
    curvature = sums.accumulator.decompose().hessian_diagonal()
    return torch.where(curvature > 0, -curvature, -curvature.max() - 1)


def swag(problem: SelectionProblem, **schedule: Any) -> Tensor:
    """Variances of the weights along stochastic gradient descent, (P,).

    From the trained weights (Maddox et al. 2019, "A simple baseline for Bayesian
    uncertainty in deep learning"); ``schedule`` are fields of a `Schedule`.
    """
    return problem.descent.moments(problem.layout, Schedule(**schedule)).variance


@dataclass(frozen=True)
class Criterion:
    """A way to score weights: ``score(problem, **options) -> Tensor`` (P,).

    ``checks`` has a check of the value of each option.
    """

    score: Callable[..., Tensor]
    checks: Mapping[str, Check] = field(default_factory=dict)

    def __call__(self, problem: SelectionProblem, **options: Any) -> Tensor:
        """Scores of all weights, (P,)."""
        return self.score(problem, **options)


SCORES: dict[str, Criterion] = {
    "magnitude": Criterion(magnitude),
    "random": Criterion(random),
    "swag": Criterion(swag, SCHEDULE_CHECKS),
    "variance": Criterion(variance),
}


def choose(
    problem: SelectionProblem, by: str, n_weights: int, **options: Any
) -> Tensor:
    """Indices of the weights with the highest scores, (n_weights,), ascending."""
    scores = SCORES[by](problem, **options)
    if not scores.isfinite().all():
        raise ValueError(
            f"subset_params['by']={by!r} gives no numbers here: gradient descent has "
            "diverged. Set a smaller subset_params['lr'], scale inputs and targets, or "
            "use 'magnitude' or 'random'."
        )
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:n_weights].sort().values.cpu()
