"""Subnetworks: criteria that select the single weights to treat as random.

A criterion gives each weight a score (Daxberger et al. 2021, "Bayesian deep learning
via subnetwork inference"): the weights with the highest scores are selected, and of
equal ones the first.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.random import counter_uniforms, row_hash
from sklaplace.core.trees import tree_rows
from sklaplace.curvature.derivatives import call_with
from sklaplace.curvature.ggn import GGN, accumulate
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures.diag import DiagAccumulator
from sklaplace.likelihoods import Likelihood, weighted
from sklaplace.networks.forward import Forward

# Steps of stochastic gradient descent, the learning rate, and the mean fraction of the
# training samples in a batch.
STEPS, LEARNING_RATE, FRACTION = 100, 0.01, 0.1


@dataclass(frozen=True)
class SelectionProblem:
    """A trained network and its data, from which weights are selected.

    Attributes
    ----------
    forward : Forward
        The trained network, inside ``forward.frozen()``.
    layout : Layout
        All of its weights.
    likelihood : Likelihood
        Of the targets given the outputs.
    batches : callable
        Returns an iterable over the training samples, in batches ``(x, y, weights)``.
    seed : int
        Of random numbers.
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
    accumulator = DiagAccumulator(problem.layout)
    accumulate(problem.forward, problem.batches(), problem.likelihood, GGN, accumulator)
    curvature = accumulator.decompose().diagonal
    return torch.where(curvature > 0, -curvature, -curvature.max() - 1)


def swag(problem: SelectionProblem) -> Tensor:
    """Variances of the weights along stochastic gradient descent, (P,).

    From the trained weights, on samples drawn by hashes of their inputs, so that
    neither batches nor order matter (Maddox et al. 2019, "A simple baseline for
    Bayesian uncertainty in deep learning").
    """
    weights = problem.layout.read(problem.forward.module)
    # moments of the differences from the trained weights, against cancellation
    first = second = moved = torch.zeros_like(weights)
    for step in range(STEPS):
        moved = moved - LEARNING_RATE * _gradient(problem, weights + moved, step)
        first, second = first + moved, second + moved**2
    return second / STEPS - (first / STEPS) ** 2


def _gradient(problem: SelectionProblem, weights: Tensor, step: int) -> Tensor:
    """Gradient (P,) of the mean loss of the samples that one step draws."""
    layout, likelihood = problem.layout, problem.likelihood
    total, count = torch.zeros_like(weights), 0.0
    own = dict(problem.forward.module.named_parameters())
    values = layout.unflatten(weights)
    leaves = {k: value.to(own[k]).requires_grad_() for k, value in values.items()}
    for x, y, w in problem.batches():
        uniforms = counter_uniforms(row_hash(x), 1, problem.seed + step)[:, 0]
        drawn = (uniforms < FRACTION).nonzero()[:, 0]
        if not len(drawn):
            continue
        with torch.enable_grad():
            f = call_with(problem.forward, leaves, tree_rows(x, drawn))
            targets = likelihood.targets(y[drawn], f)
            losses = likelihood.loss(f, targets)
            given = weighted(likelihood, targets, None if w is None else w[drawn])
            given = torch.ones_like(losses) if given is None else given.to(losses)
            loss, own_leaves = given @ losses, list(leaves.values())
            found = torch.autograd.grad(loss, own_leaves, materialize_grads=True)
        total += layout.flatten(found).double()
        count += float(given.sum())
    return total / count if count else total


SCORES = {"magnitude": magnitude, "random": random, "swag": swag, "variance": variance}


def choose(problem: SelectionProblem, by: str, n_weights: int) -> Tensor:
    """Indices of the weights with the highest scores, (n_weights,), ascending."""
    scores = SCORES[by](problem)
    if not scores.isfinite().all():
        raise ValueError(
            f"subset_params['by']={by!r} gives no numbers here: gradient descent has "
            "diverged. Scale inputs and targets, or use 'magnitude' or 'random'."
        )
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:n_weights].sort().values.cpu()
