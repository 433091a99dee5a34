"""Candidate: a posterior and its score on held-out samples."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from sklaplace.curvature.structures import projected
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.predictive import linearised_mean
from sklaplace.posterior.tuning.problem import LinearisedBatch, TuningProblem, clamped


@dataclass(frozen=True)
class Candidate:
    """Posterior with the negative log-likelihood of the held-out samples, in nats.

    A NaN ``score`` is replaced by infinity. ``n_targets`` is the number of target
    values. ``refitted`` contains the posteriors of all parts of the problem if they
    were refitted.
    """

    posterior: GaussianPosterior
    score: float
    n_targets: float
    refitted: tuple[GaussianPosterior, ...] = ()


def scored(problem: TuningProblem, path: list[Tensor]) -> list[Candidate]:
    """Score one candidate per ratio for fixed weights, in one pass over the data.

    Parameters
    ----------
    problem : TuningProblem
        Problem whose posterior has the fixed weights.
    path : list of Tensor of shape (), (L,) or (P,)
        Ratios ``ρ = δ/scale``.

    Returns
    -------
    list of Candidate
        Candidates in the order of ``path``.

    Notes
    -----
    Each batch is projected once and then used for all ratios.
    """
    posterior, diagonal = problem.posterior, problem.score.diagonal
    # variances are the same with or without blocks of outputs
    n_blocks = 1 if diagonal else posterior.likelihood.n_blocks
    # for each ratio, the errors of all batches
    by_ratio: list[list[_Errors]] = [[] for _ in path]
    for part, batches in problem.batches():
        structure, projections = part.posterior.structure, []
        for batch in batches:
            mean = linearised_mean(part.posterior, batch.f, batch.jacobian)
            projection = projected(structure, batch.jacobian, n_blocks)
            projections.append((batch, mean, projection))
        for ratio, errors in zip(path, by_ratio, strict=True):
            # this P is H + ρ, so covariances are in units of 1/scale
            precision = structure.precision(
                ratio, torch.ones_like(part.posterior.scale)
            )
            for batch, mean, projection in projections:
                cov = projection.covariance(precision, diagonal=diagonal)
                errors.append(_Errors.of(problem, mean, cov, batch))
    # each field of the errors of all batches is concatenated
    joined = (_Errors(*map(torch.cat, zip(*each, strict=True))) for each in by_ratio)
    pairs = zip(path, joined, strict=True)
    return [_candidate(problem, ratio, errors) for ratio, errors in pairs]


def implied_variance(posterior: GaussianPosterior, ratio: Tensor) -> Tensor:
    """Return the noise variance σ², (), that a fixed δ and ``ρ = δ/scale`` imply."""
    h = posterior.hyperparameters
    # scale = σ^(-2·order) / T, and all weights have the same ρ/δ
    power = (ratio / h.prior_precision).mean() / h.temperature  # σ^(2·order)
    return power ** (1 / posterior.curvature_order)


class _Errors(NamedTuple):
    """Errors of predictions for n held-out samples.

    Attributes
    ----------
    weights : Tensor of shape (n,)
        Sample weights.
    n_targets : Tensor of shape (n,)
        Numbers of observed values.
    losses : Tensor of shape (n,)
        Negative log-likelihoods in nats; without meaning if there is noise.
    squares, variances : Tensor of shape (n, c) or (n, 0)
        If there is noise, squared residuals and variances of the outputs in units of
        ``σ^(2·order)``, which determine the losses for each noise level σ.
    """

    weights: Tensor
    n_targets: Tensor
    losses: Tensor
    squares: Tensor
    variances: Tensor

    @classmethod
    def of(
        cls, problem: TuningProblem, mean: Tensor, cov: Tensor, batch: LinearisedBatch
    ) -> "_Errors":
        """Return the errors of a batch, given ``cov = J (H + ρ)⁻¹ Jᵀ``.

        With ``ρ = δ/scale``, the functional covariance is ``cov/scale``. For Gaussian
        noise, ``scale = 1/(σ²T)``. The predictive variance ``σ²(1 + T cov)`` is then
        proportional to σ², and the best σ² has a closed form. For a curvature of order
        two, the predictive variance is ``σ²(1 + T σ² cov)``, and σ² is found by a
        numerical search.
        """
        posterior, weights = problem.posterior, batch.weights.double()
        # losses without meaning if there is noise, else empty squares and variances
        losses, squares, variances = weights, mean[:, :0], mean[:, :0]
        if posterior.likelihood.has_noise:
            squares = (mean - batch.targets) ** 2
            variances = posterior.hyperparameters.temperature * cov
        else:
            losses = problem.score.losses(
                posterior, mean, cov / posterior.scale, batch.targets
            )
        n_targets = posterior.likelihood.n_targets(mean.shape[1])
        return cls(
            weights=weights,
            n_targets=torch.full_like(weights, n_targets),
            losses=losses,
            squares=squares,
            variances=variances,
        )


def _candidate(problem: TuningProblem, ratio: Tensor, errors: _Errors) -> Candidate:
    """Return the posterior at a ratio ``ρ = δ/scale``, and its score.

    If there is noise, its level is fixed, implied by the ratio, or chosen to minimise
    the score. The score is the sum of the weighted losses of all samples.
    """
    posterior, total = problem.posterior, float(errors.weights.sum())
    shares = errors.weights / total
    if posterior.likelihood.has_noise:
        variance, mean_loss = _noise_and_loss(
            problem, ratio, shares, errors.squares, errors.variances
        )
        posterior = posterior.replace(sigma_noise=clamped(variance.sqrt()))
    else:
        mean_loss = shares @ errors.losses
    score = float(mean_loss) * total
    # the prior follows from the ratio and the scale, which contains the new noise
    # level; a fixed prior satisfies the ratio by its noise level, if there is noise
    if problem.free_prior or not posterior.likelihood.has_noise:
        posterior = posterior.replace(prior_precision=ratio * posterior.scale)
    return Candidate(
        posterior=posterior,
        score=score if math.isfinite(score) else math.inf,
        n_targets=float(errors.weights @ errors.n_targets),
    )


def _noise_and_loss(
    problem: TuningProblem,
    ratio: Tensor,
    weights: Tensor,
    squares: Tensor,
    variances: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return σ² and the mean Gaussian negative log-likelihood in nats, both ().

    The variance of a target is ``σ² r² + σ^(2·order) v``, with the output's noise
    proportion ``r`` and its variance ``v``.

    Parameters
    ----------
    problem : TuningProblem
        Determines whether σ is fixed, follows from the prior, or is optimised.
    ratio : Tensor of shape (), (L,) or (P,)
        ``ρ = δ/scale``.
    weights : Tensor of shape (n,)
        Sample weights that sum to one.
    squares : Tensor of shape (n, c)
        Squared residuals.
    variances : Tensor of shape (n, c)
        Variances of the outputs in units of ``σ^(2·order)``.
    """
    posterior = problem.posterior
    # squares r² of the noise proportions, (c,) or (1,)
    order, relative = posterior.curvature_order, posterior.noise_proportions**2

    def loss(variance: Tensor) -> Tensor:
        total = variance * relative + variance**order * variances
        nll = (squares / total + (2 * math.pi * total).log()) / 2
        return weights @ nll.sum(1)

    def loss_at(log_variance: float) -> float:
        return float(loss(ratio.new_tensor(math.exp(log_variance))))

    if not problem.free_noise:
        variance = posterior.hyperparameters.sigma_noise**2
    elif not problem.free_prior:
        variance = implied_variance(posterior, ratio)
    elif order == 1:  # the sum is proportional to σ²
        variance = clamped(weights @ (squares / (relative + variances)).mean(1))
    else:
        # log σ² if noise alone explains the residuals
        upper = float(clamped(weights @ (squares / relative).mean(1)).log())
        # σ² is smaller if the outputs' variances explain some of them; exp(-30) of it
        # is no noise, and the margin of one lets the search reach the upper end
        bounds = upper - 30, upper + 1
        minimum = minimize_scalar(loss_at, bounds=bounds, method="bounded")
        variance = ratio.new_tensor(math.exp(minimum.x))
    return variance, loss(variance)
