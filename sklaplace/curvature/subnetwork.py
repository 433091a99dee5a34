"""Subnetworks: which single weights are worth being treated as random.

A criterion gives each weight a score, and the weights with the highest are chosen; of
equal ones, the first.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.random import counter_uniforms, row_hash
from sklaplace.core.trees import tree_rows
from sklaplace.curvature.ggn import GGN, accumulate
from sklaplace.curvature.jacobian import call_with
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures.diag import DiagAccumulator
from sklaplace.likelihoods import Likelihood, weighted
from sklaplace.networks.forward import Forward

# Steps of stochastic gradient descent whose weights are compared, their length, and the
# share of the rows that each of them sees on average.
STEPS, LEARNING_RATE, SHARE = 100, 0.01, 0.1


@dataclass(frozen=True)
class SelectionProblem:
    """What a criterion may look at.

    Attributes
    ----------
    forward : Forward
        The trained network, inside ``forward.frozen()``.
    layout : Layout
        All of its weights.
    likelihood : Likelihood
        Of the targets given the outputs.
    batches : callable
        Gives the training rows ``(x, y, weights)``, batch by batch, at each call.
    seed : int
        For what is drawn.
    """

    forward: Forward
    layout: Layout
    likelihood: Likelihood
    batches: Callable[[], Iterable[tuple[Any, Any, Tensor | None]]]
    seed: int


def magnitude(problem: SelectionProblem) -> Tensor:
    """Absolute values of the weights, (P,)."""
    return problem.layout.read(problem.forward.module).abs()


def random(problem: SelectionProblem) -> Tensor:
    """Draws that know nothing, (P,)."""
    generator = torch.Generator().manual_seed(problem.seed)
    return torch.rand(
        problem.layout.n_parameters, dtype=torch.float64, generator=generator
    )


def variance(problem: SelectionProblem) -> Tensor:
    """Posterior variances under a diagonal curvature and one prior precision, (P,).

    Up to an increasing function: the curvature itself, with its sign changed. Weights
    without any, such as those of inputs that are always zero, come last: no prediction
    feels them. One pass over the training rows (Daxberger et al. 2021, "Bayesian deep
    learning via subnetwork inference", section 4).
    """
    accumulator = DiagAccumulator(problem.layout)
    accumulate(problem.forward, problem.batches(), problem.likelihood, GGN, accumulator)
    curvature = accumulator.decompose().diagonal
    return torch.where(curvature > 0, -curvature, -curvature.max() - 1)


def swag(problem: SelectionProblem) -> Tensor:
    """Variances of the weights along stochastic gradient descent, (P,).

    From the trained weights, by steps on rows drawn at random, so that they do not
    depend on batches and order (Maddox et al. 2019, "A simple baseline for Bayesian
    uncertainty in deep learning").
    """
    weights = problem.layout.read(problem.forward.module)
    # of differences, which keep their digits
    first = second = torch.zeros_like(weights)
    moved = torch.zeros_like(weights)
    for step in range(STEPS):
        moved = moved - LEARNING_RATE * _slope(problem, weights + moved, step)
        first, second = first + moved, second + moved**2
    return second / STEPS - (first / STEPS) ** 2


def _slope(problem: SelectionProblem, weights: Tensor, step: int) -> Tensor:
    """Gradient (P,) of the mean loss of the rows that one step draws."""
    layout, likelihood = problem.layout, problem.likelihood
    total, count = torch.zeros_like(weights), 0.0
    values = layout.unflatten(weights)
    own = dict(problem.forward.module.named_parameters())
    for x, y, w in problem.batches():
        keys = row_hash(x)
        chosen = counter_uniforms(keys, 1, problem.seed + step)[:, 0] < SHARE
        rows = chosen.nonzero()[:, 0]
        if not len(rows):
            continue
        some = tree_rows(x, rows)
        with torch.enable_grad():
            leaves = {
                name: value.to(own[name]).requires_grad_()
                for name, value in values.items()
            }
            f = call_with(problem.forward, leaves, some)
            targets = likelihood.targets(y[rows], f)
            losses = likelihood.loss(f, targets)
            given = weighted(likelihood, targets, None if w is None else w[rows])
            share = torch.ones_like(losses) if given is None else given.to(losses)
            found = torch.autograd.grad(
                share @ losses, list(leaves.values()), materialize_grads=True
            )
        total += layout.flatten(found).double()
        count += float(share.sum())
    return total / count if count else total


SCORES: dict[str, Callable[[SelectionProblem], Tensor]] = {
    "magnitude": magnitude,
    "random": random,
    "swag": swag,
    "variance": variance,
}


def choose(problem: SelectionProblem, by: str, n_weights: int) -> Tensor:
    """Places of the weights with the highest scores, (n_weights,), in order."""
    scores = SCORES[by](problem)
    if not scores.isfinite().all():
        raise ValueError(
            f"subset_params['by']={by!r} gives no numbers here: gradient descent has "
            "diverged. Scale inputs and targets, or use 'magnitude' or 'random'."
        )
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:n_weights].sort().values.cpu()
