"""Candidate: a posterior and how probable it makes held-out data."""

import math
from dataclasses import dataclass
from typing import cast

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from sklaplace.core import progress
from sklaplace.curvature.structures import projected
from sklaplace.likelihoods import ClassificationLikelihood
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.predictive import linearised_mean
from sklaplace.posterior.tuning.problem import LinearisedBatch, TuningProblem, clamped


@dataclass(frozen=True)
class Candidate:
    """A posterior with the negative log-likelihood of the held-out data, in nats.

    ``score`` is infinite where it is not a number; ``n_targets`` counts values.
    ``refitted`` are the posteriors of all parts of the problem if they were refitted.
    """

    posterior: GaussianPosterior
    score: float
    n_targets: float
    refitted: tuple[GaussianPosterior, ...] = ()


def scored(problem: TuningProblem, path: list[Tensor]) -> list[Candidate]:
    """A candidate per ratio, all with the same weights: one pass over the data."""
    posterior = problem.posterior
    n_blocks = 1 if problem.diagonal else posterior.likelihood.n_blocks
    scores: list[list[tuple[Tensor, ...]]] = [[] for _ in path]
    for part, batches in problem.batches_together():
        structure, known = part.posterior.structure, []
        for batch in batches:
            mean = linearised_mean(part.posterior, batch.f, batch.jacobian)
            known.append((batch, mean, projected(structure, batch.jacobian, n_blocks)))
        for ratio, parts in zip(path, scores, strict=True):
            progress.count("prior path")
            precision = part.precision_under(ratio)
            for batch, mean, projection in known:
                u = part.output_covariance(projection, precision)
                losses = _losses(problem, mean, u, batch)
                parts.append((batch.weights.double(), *losses))
    return [
        _candidate(problem, ratio, *map(torch.cat, zip(*parts, strict=True)))
        for ratio, parts in zip(path, scores, strict=True)
    ]


def implied_variance(posterior: GaussianPosterior, ratio: Tensor) -> Tensor:
    """σ² from ``ρ = δ/scale`` under a fixed prior, ()."""
    h = posterior.hyperparameters
    inverse_scale = (ratio / h.prior_precision).mean() / h.temperature
    return inverse_scale ** (1 / posterior.curvature_order)


def relative_variances(problem: TuningProblem, values: Tensor) -> Tensor:
    """``r²`` of noise levels ``σ r``, (c,) or (1,), of which only σ is tuned."""
    ratios = getattr(problem.posterior.likelihood, "relative", None) or (1.0,)
    return values.new_tensor(ratios) ** 2


def _losses(
    problem: TuningProblem, mean: Tensor, u: Tensor, batch: LinearisedBatch
) -> tuple[Tensor, ...]:
    """Losses (b,) of a batch, or squared residuals (b, c) and variances (b, c).

    With ``u = J (H + ρ)⁻¹ Jᵀ``, ``ρ = δ/scale``, the functional covariance is
    ``u/scale``. For Gaussian noise ``scale = 1/(σ²T)``, so that the predictive variance
    ``σ²(1 + T u)`` is proportional to σ², whose best value has a closed form. For a
    curvature of order two it is ``σ²(1 + T σ² u)``, and a search finds σ².
    """
    posterior = problem.posterior
    if problem.log_density is not None:
        targets = batch.targets.double()
        return (-problem.log_density(mean, u / posterior.scale, targets),)
    if problem.log_proba is not None:
        log_proba = problem.log_proba(mean, u / posterior.scale)
        likelihood = cast(ClassificationLikelihood, posterior.likelihood)
        return (likelihood.log_loss(log_proba, batch.targets),)
    return (mean - batch.targets) ** 2, posterior.hyperparameters.temperature * u


def _candidate(
    problem: TuningProblem, ratio: Tensor, weights: Tensor, *losses: Tensor
) -> Candidate:
    """The posterior at a ratio ``ρ = δ/scale``, with its score on held-out data."""
    posterior, n_rows = problem.posterior, float(weights.sum())
    weights = weights / n_rows
    if posterior.likelihood.has_noise:
        squares, variances = losses
        relative = relative_variances(problem, squares)
        nll = _GaussianNLL(posterior, weights, squares, variances, relative)
        if not problem.free_noise:
            variance = posterior.hyperparameters.sigma_noise**2
        elif not problem.free_prior:
            variance = implied_variance(posterior, ratio)
        else:
            variance = nll.best_variance()
        score = float(nll(variance)) * n_rows
        posterior = posterior.replace(sigma_noise=clamped(variance.sqrt()))
    else:
        score = float(weights @ losses[0]) * n_rows
    if problem.free_prior or not posterior.likelihood.has_noise:
        posterior = posterior.replace(prior_precision=ratio * posterior.scale)
    n_targets = n_rows * posterior.likelihood.n_targets(losses[0].shape[-1])
    return Candidate(posterior, score if math.isfinite(score) else math.inf, n_targets)


@dataclass(frozen=True)
class _GaussianNLL:
    """Mean Gaussian negative log-likelihood as a function of σ².

    Attributes
    ----------
    posterior : GaussianPosterior
        Its likelihood and order of the curvature are used.
    weights : Tensor of shape (n,)
        Sample weights that sum to one.
    squares : Tensor of shape (n, c)
        Squared residuals.
    variances : Tensor of shape (n, c)
        Variances of the outputs in units of ``σ^(2·order)``.
    relative : Tensor of shape (c,) or (1,)
        Variances of the columns' noise over their common factor.
    """

    posterior: GaussianPosterior
    weights: Tensor
    squares: Tensor
    variances: Tensor
    relative: Tensor

    def __call__(self, variance: Tensor) -> Tensor:
        """Score at σ², ()."""
        order = self.posterior.curvature_order
        total = variance * self.relative + variance**order * self.variances
        nll = (self.squares / total + (2 * math.pi * total).log()) / 2
        return self.weights @ nll.sum(1)

    def best_variance(self) -> Tensor:
        """σ² of the best score under a given ratio ``δ/scale``, ()."""
        scaled = self.squares / (self.relative + self.variances)
        best = clamped(self.weights @ scaled.mean(1))
        if self.posterior.curvature_order == 1:
            return best

        def score(log_variance: float) -> float:
            return float(self(torch.full_like(best, math.exp(log_variance))))

        squares = (self.squares / self.relative).mean(1)
        upper = float(clamped(self.weights @ squares).log())
        found = minimize_scalar(score, bounds=(upper - 30, upper + 1), method="bounded")
        return torch.full_like(best, math.exp(found.x))
