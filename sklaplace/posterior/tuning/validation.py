"""Validation: the prior precision and noise with the best score on held-out samples.

Each prior precision on a path is scored with the network's own weights and with the
linear model's most probable weights.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sklaplace.core.checks import warn_user
from sklaplace.curvature import priors
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.predictive import linearised_mean
from sklaplace.posterior.tuning.candidate import Candidate
from sklaplace.posterior.tuning.evidence import marglik
from sklaplace.posterior.tuning.path_search import (
    MARGIN,
    best_refitted,
    best_unrefitted,
)
from sklaplace.posterior.tuning.problem import LinearisedBatch, TuningProblem, clamped

# Prior variances of the outputs along the path. The first prior is so strong that
# predictions do not change. The last prior is so weak that only the data matter.
PATH = 10.0 ** np.arange(-4, 6.01, 0.5)
# Predictions are uninformative if their loss is at least this fraction of the loss of
# equal class probabilities.
UNIFORM = 0.99
# Minimum number of held-out values for a σ below the training data's σ.
FEW = 10
# Noise levels along the path under a fixed prior, in descending order, as multiples of
# the network's residual on held-out samples.
NOISE_PATH = 2.0 ** np.arange(1, -4.01, -0.125)


def tune_on_validation(problem: TuningProblem) -> GaussianPosterior:
    """Find the best score on held-out samples along a path of prior precisions.

    The score is the log loss for classification and the Gaussian negative
    log-likelihood for regression. Each point of the path is scored at the network's
    weights (``refine=False``), at the weights of the refitted linear model
    (``refine=True``), or at both (``refine="auto"``). With "auto", the refitted model
    is chosen if the held-out samples are ``exp(MARGIN)`` times as probable as at the
    network's weights. Smaller gains are within the sampling noise of a hundred samples.
    In regression, a refitted model has the strongest prior whose score is within
    ``MARGIN`` of the best score.

    Layerwise and diagonal priors keep the ratios that maximise the evidence. Only a
    common factor of the prior precisions varies along the path.

    If there is noise and the curvature is of order two, a point on the path does not
    determine the refitted model, so the network's weights are kept.
    """
    return final_posterior(problem, best_candidate(problem))


def best_candidate(problem: TuningProblem) -> Candidate:
    """Return the candidate with the best score; see `tune_on_validation`.

    ``refine`` determines whether it keeps the network's weights or has a refitted
    model. If "auto", a refitted model must be better by `MARGIN`.
    """
    path = _path(problem)
    # None if no refits are asked for
    refits = best_refitted(problem, path) if problem.refine is True else None
    chosen = refits or best_unrefitted(problem, path)
    # noise and a curvature of order two: δ/scale does not determine a refitted model
    is_ambiguous = problem.posterior.curvature_order > 1 and problem.free_noise
    # all folds are scored, and the whole problem is refitted in the end
    with_folds = problem, *problem.folds
    has_model = all(part.linear_model is not None for part in with_folds)
    if problem.refine == "auto" and has_model and not is_ambiguous:
        # None if no refitted model is better than the limit; in regression, a prior
        # stronger than the best one may be returned with a score above it
        chosen = best_refitted(problem, path, chosen.score - MARGIN) or chosen
    return chosen


def final_posterior(problem: TuningProblem, chosen: Candidate) -> GaussianPosterior:
    """Return the tuned posterior for the chosen candidate.

    Raise ValueError if its score is not finite. A refitted model is fitted again,
    precisely and to all training samples. A tuned noise level is increased, because few
    held-out values determine it.
    """
    if not math.isfinite(chosen.score):
        raise ValueError(
            "No prior precision has a finite score on the held-out samples, because "
            "the network's outputs are too large or NaN. Scale the inputs or lower the "
            "learning rate."
        )
    if problem.free_prior:
        _warn_of_equal_probabilities(problem, chosen)
    posterior = chosen.posterior
    if chosen.refitted:
        posterior = problem.model.refit(posterior)
    # the correction assumes that prior and noise were both fitted, and changes both
    both_free = problem.free_noise and problem.free_prior
    return _widened(posterior, chosen.n_targets) if both_free else posterior


def _widened(posterior: GaussianPosterior, n: float) -> GaussianPosterior:
    """Return the posterior with σ corrected for estimation from ``n`` held-out values.

    Three quantities are fitted: the prior precision, σ, and the choice between kept and
    refitted weights. The unbiased variance is ``n/(n - 3)`` times the fitted variance.
    A new value has a Student t distribution with ν = n - 3 degrees of freedom, which
    multiplies the variance by ``ν/(ν - 2)``. The total factor is ``n/(n - 5)``, where n
    is taken to be at least six. A few values may be fitted well by chance. If n is
    below `FEW`, σ is therefore at least the training data's σ.
    """
    n = max(n, 6.0)
    sigma = posterior.hyperparameters.sigma_noise
    if n < FEW:
        fit = posterior.data_fit
        sigma = torch.maximum(sigma, (2 * fit.loss / fit.n_targets).sqrt())
    sigma = sigma * math.sqrt(n / (n - 5))
    # the ratio of prior to curvature has been chosen, and stays the same
    wider = posterior.replace(sigma_noise=clamped(sigma))
    ratio = posterior.prior_precision / posterior.scale
    return wider.replace(prior_precision=ratio * wider.scale)


def _warn_of_equal_probabilities(problem: TuningProblem, chosen: Candidate) -> None:
    """Warn if held-out predictions are no better than equal class probabilities.

    Equal outputs have equal class probabilities. Samples that ``fit`` split off, or
    that would have to be linearised again, are not checked.
    """
    score, batches = problem.score, problem.validation
    if score.log_proba is None or not (score.is_given and isinstance(batches, list)):
        return
    loss = problem.posterior.likelihood.loss  # of outputs (b, c), in nats
    uniform_loss = 0.0
    for batch in batches:
        losses = loss(torch.zeros_like(batch.f), batch.targets).double()
        uniform_loss += float(batch.weights.double() @ losses)
    if chosen.score >= UNIFORM * uniform_loss:
        warn_user(
            "No prior precision predicts the held-out samples better than equal class "
            "probabilities, so predictions are now nearly uniform. Either the network "
            "does not generalise to these samples, or they were preprocessed "
            "differently from X and y. A Pipeline transforms X_val only with "
            "Pipeline(steps, transform_input=['X_val'])."
        )


# ---------------------------------------------------------------------- the path
def _path(problem: TuningProblem) -> list[Tensor]:
    """Return ratios ``ρ = δ/scale`` to score, starting with the strongest prior.

    Under these priors, the held-out outputs have the mean variances of `PATH`. Several
    prior precisions keep the ratios to each other that maximise the evidence. If the
    prior is fixed, the noise level varies instead.
    """
    if not problem.free_prior:
        return _noise_path(problem)
    posterior = problem.posterior
    delta = posterior.prior_precision
    if delta.ndim:
        delta = marglik(posterior, free_noise=problem.free_noise).prior_precision
    relative = delta / delta.log().mean().exp()  # with a geometric mean of one

    def output_variance(part: TuningProblem, batch: LinearisedBatch) -> Tensor:
        """Return the prior variances of the outputs, (b, c)."""
        prior_variances = 1 / priors.expand(relative, part.posterior.layout)
        return batch.jacobian.double().variance(prior_variances)

    # under prior precisions ``relative``; times this value, they give the outputs a
    # mean variance of one. It is zero if the outputs do not depend on the weights.
    mean_variance = _held_out_mean(problem, output_variance).clamp(min=1e-30)
    return [relative * mean_variance / variance for variance in PATH]


def _noise_path(problem: TuningProblem) -> list[Tensor]:
    """Return ratios ``δ/scale`` for a fixed δ and noise levels near the residual.

    The noise levels are multiples of the network's root mean square residual. The
    ratio is ``δ σ^(2·order) T``. A fixed noise level has a single ratio.
    """
    posterior, h = problem.posterior, problem.posterior.hyperparameters
    if not problem.free_noise:
        return [h.prior_precision / posterior.scale]

    def squares(part: TuningProblem, batch: LinearisedBatch) -> Tensor:
        mean = linearised_mean(part.posterior, batch.f, batch.jacobian)
        return (mean - batch.targets) ** 2 / posterior.noise_proportions**2

    residual = float(clamped(_held_out_mean(problem, squares)).sqrt())
    powers = (residual * NOISE_PATH) ** (2 * posterior.curvature_order)
    return [h.prior_precision * h.temperature * power for power in powers]


def _held_out_mean(
    problem: TuningProblem, values: Callable[[TuningProblem, LinearisedBatch], Tensor]
) -> Tensor:
    """Return the weighted mean () of ``values`` over held-out samples and outputs.

    ``values`` maps a part of the problem and one of its batches to values (b, c).
    """
    pairs = ((part, b) for part, batches in problem.batches() for b in batches)
    batches = [(b.weights.double(), values(part, b).mean(1)) for part, b in pairs]
    weights, means = map(torch.cat, zip(*batches, strict=True))
    return weights @ means / weights.sum()
