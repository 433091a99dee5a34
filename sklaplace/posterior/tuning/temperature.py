"""Temperature: the value that maximises the likelihood of held-out samples."""

import math
from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import minimize_scalar

from sklaplace.core.checks import warn_user
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.tuning.candidate import Candidate
from sklaplace.posterior.tuning.problem import TuningProblem
from sklaplace.posterior.tuning.validation import best_candidate, final_posterior

# Logarithms of the temperatures to score, and precision of the bounded search around
# the best temperature.
LOG_GRID = np.log(4.0) * np.arange(-4, 5)
PRECISION = 0.02
# A temperature other than one must increase the total log-likelihood of the held-out
# samples by this many nats (Akaike 1974: one per parameter). If the variances are
# negligible, all temperatures are equivalent.
GAIN = 1.0


def tune_temperature(problem: TuningProblem) -> GaussianPosterior:
    """Return the posterior at the temperature with the best score on held-out samples.

    The prior precision and the noise, if free, are tuned at each temperature. A grid of
    temperatures is scored first, then temperatures around the best of them. A value of
    one (Bayes' rule) is kept unless another temperature is clearly better. The result
    is refitted if its candidate was. A temperature outside the grid causes a warning.
    """
    candidates: dict[float, Candidate] = {}  # by the logarithm of the temperature

    def tempered(log_temperature: float) -> TuningProblem:
        posterior = problem.posterior
        value = torch.full_like(posterior.scale, math.exp(log_temperature))
        return replace(problem, posterior=posterior.replace(temperature=value))

    def score(log_temperature: float) -> float:
        """Return the best score at a temperature, and record its candidate."""
        if log_temperature not in candidates:
            candidates[log_temperature] = best_candidate(tempered(log_temperature))
        return candidates[log_temperature].score

    best = min(LOG_GRID, key=score)
    step = LOG_GRID[1] - LOG_GRID[0]
    bounds = best - step, best + step
    options = {"xatol": PRECISION}
    # only to add candidates, of which the best may be a point of the grid
    minimize_scalar(score, bounds=bounds, method="bounded", options=options)
    best = min(candidates, key=score)
    if score(best) > score(0.0) - GAIN:  # not clearly better than Bayes' rule
        best = 0.0
    if abs(best) > LOG_GRID[-1]:
        end = round(math.exp(LOG_GRID[-1]))
        warn_user(
            f"The best temperature for X and y, {math.exp(best):.2g}, is outside the "
            f"range from 1/{end} to {end}, so X and y do not determine the "
            "temperature. They may be training samples, or too few samples. Pass more "
            "held-out samples, or do not tune the temperature."
        )
    return final_posterior(tempered(best), candidates[best])
