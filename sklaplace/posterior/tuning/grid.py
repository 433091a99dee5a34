"""Grid: the scores of given prior precisions on the held-out samples of folds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from scipy.optimize import minimize_scalar

from sklaplace.core import progress
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.tuning.candidate import Candidate, scored
from sklaplace.posterior.tuning.path_search import refitted
from sklaplace.posterior.tuning.problem import TuningProblem
from sklaplace.posterior.tuning.validation import NOISE_PATH, best_candidate

# Precision of the logarithm of the noise level.
NOISE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class GridPoint:
    """Prior precision of a grid, with its scores.

    Attributes
    ----------
    posterior : GaussianPosterior
        Posterior of the whole problem under the prior precision and its noise level,
        before any refit.
    is_refitted : bool
        Whether the weights are refitted under the prior precision.
    scores : list of float
        Score of each fold.
    """

    posterior: GaussianPosterior
    is_refitted: bool
    scores: list[float]


def score_grid(
    problem: TuningProblem,
    prior_precisions: Sequence[float],
    fold_score: Callable[[int, GaussianPosterior], float] | None = None,
) -> list[GridPoint]:
    """Score each prior precision on the folds of a problem.

    For each prior precision, `best_candidate` chooses a free noise level, and whether
    to refit the linear model's weights if ``refine="auto"``. Both choices maximise the
    likelihood of the held-out samples of all folds together.

    Parameters
    ----------
    problem : TuningProblem
        Problem with folds.
    prior_precisions : sequence of float
        Prior precisions. Each applies to all weights.
    fold_score : callable or None
        Score of a fold's posterior, given the index of the fold. If None, use the mean
        log-likelihood.
    """
    points = []
    for value in progress.tracked(
        prior_precisions, "prior path", len(prior_precisions)
    ):
        delta = torch.full_like(problem.posterior.prior_precision, value)
        fixed = problem.with_fixed_prior(delta, refine=problem.refine)
        chosen = _precise_candidate(fixed, best_candidate(fixed))
        # the whole problem and all folds use the noise level that the folds chose
        noise = chosen.posterior.hyperparameters.sigma_noise
        posterior, *folds = (
            part.posterior.replace(sigma_noise=noise) for part in (fixed, *fixed.folds)
        )
        # `refitted` is empty if the candidate keeps the networks' weights
        posteriors = enumerate(chosen.refitted or folds)
        if fold_score is None:
            scores = [
                _mean_log_likelihood(problem.folds[index], of_fold)
                for index, of_fold in posteriors
            ]
        else:
            scores = [fold_score(index, of_fold) for index, of_fold in posteriors]
        points.append(GridPoint(posterior, bool(chosen.refitted), scores))
    return points


def _mean_log_likelihood(fold: TuningProblem, posterior: GaussianPosterior) -> float:
    """Return the mean log-likelihood of a fold's held-out samples, in nats.

    A candidate's score is the sum of negative log-likelihoods times sample weights.
    """
    fixed = replace(fold, posterior=posterior, free_prior=False, free_noise=False)
    (candidate,) = scored(fixed, [posterior.prior_precision / posterior.scale])
    weights = [float(batch.weights.double().sum()) for batch in fold.held_out()]
    return -candidate.score / sum(weights)


def _precise_candidate(problem: TuningProblem, chosen: Candidate) -> Candidate:
    """Return the candidate with the best noise level nearby, and with precise refits.

    The prior precision is fixed, so the noise level determines ``ρ = δ/scale``. The
    search covers the logarithms of noise levels between the neighbours of the chosen
    level on `NOISE_PATH`. If the chosen candidate has a refitted model, refits start at
    this model. Otherwise, the network's weights are kept.
    """
    h, order = problem.posterior.hyperparameters, problem.posterior.curvature_order
    step = math.log(NOISE_PATH[0] / NOISE_PATH[1])

    def with_noise(change: float) -> Candidate:
        """Return the candidate with a change in ``log σ``, with precise refits."""
        # the scale is proportional to σ^(-2·order)
        scale = chosen.posterior.scale * math.exp(-2 * order * change)
        ratio = h.prior_precision / scale
        if chosen.refitted:
            return refitted(problem, ratio, chosen)
        return scored(problem, [ratio])[0]

    if not problem.free_noise:
        return with_noise(0.0) if chosen.refitted else chosen
    change = minimize_scalar(
        lambda change: with_noise(change).score,
        bounds=(-step, step),
        method="bounded",
        options={"xatol": NOISE_TOLERANCE},
    ).x
    return with_noise(change)
