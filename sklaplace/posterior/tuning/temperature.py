"""Temperature: the value that maximises the likelihood of held-out data."""

import math
from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import minimize_scalar

from sklaplace.core.checks import warn_user
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.tuning.candidate import Candidate
from sklaplace.posterior.tuning.problem import TuningProblem
from sklaplace.posterior.tuning.validation import accepted, best_candidate

# Logarithms of the temperatures to score. A bounded search around the best temperature
# finds the minimum to this precision.
LOG_GRID = np.log(4.0) * np.arange(-4, 5)
PRECISION = 0.02
# A temperature other than one must raise the total log-likelihood of the held-out data
# by this many nats (Akaike 1974: one per parameter). With negligible variances, all
# temperatures are equivalent.
GAIN = 1.0


def tune_temperature(problem: TuningProblem) -> GaussianPosterior:
    """Return the posterior at the temperature with the best score on held-out data.

    Free prior precision and noise are tuned at each temperature. Bayes' rule, a
    temperature of one, is kept unless another temperature is clearly better.
    """
    candidates: dict[float, Candidate] = {}

    def tempered(log_temperature: float) -> TuningProblem:
        posterior = problem.posterior
        value = torch.full_like(posterior.scale, math.exp(log_temperature))
        return replace(problem, posterior=posterior.replace(temperature=value))

    def score(log_temperature: float) -> float:
        if log_temperature not in candidates:
            candidates[log_temperature] = best_candidate(tempered(log_temperature))
        return candidates[log_temperature].score

    best = min(LOG_GRID, key=score)
    step = LOG_GRID[1] - LOG_GRID[0]
    bounds = best - step, best + step
    options = {"xatol": PRECISION}
    minimize_scalar(score, bounds=bounds, method="bounded", options=options)
    best = min(candidates, key=score)
    if score(best) > score(0.0) - GAIN:
        best = 0.0
    if abs(best) > LOG_GRID[-1]:
        end = round(math.exp(LOG_GRID[-1]))
        warn_user(
            f"The temperature that X and y choose is {math.exp(best):.2g}, at the end "
            f"of the search, beyond 1/{end} to {end}: they do not determine one. They "
            "may be rows that the network was trained on, or too few. Pass more rows "
            "that it was not trained on, or choose other parameters than the "
            "temperature."
        )
    return accepted(tempered(best), candidates[best])
