"""Tuning: choose prior precision and noise, and whether to refit the linear model.

A tuner is a function ``(TuningProblem) -> GaussianPosterior``: ``marglik`` maximises
the evidence, ``validation`` scores the predictive on held-out data, and ``auto`` does
the second if there is such data, else the first. Evidence comes last because it prefers
far too weak a prior at weights that do not minimise the regularised loss, and because
training residuals of an overfitted network underestimate the noise.
"""

import warnings
from collections.abc import Callable

from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.tuning.evidence import maximise_evidence
from sklaplace.posterior.tuning.problem import TuningProblem
from sklaplace.posterior.tuning.validation import tune_on_validation


def auto(problem: TuningProblem) -> GaussianPosterior:
    """Tune on held-out data if there is any, else by the evidence, with a warning."""
    if problem.validation is not None:
        return tune_on_validation(problem)
    message = ""
    if problem.linear_model is None or problem.refine is False:
        message = (
            "There are no rows that the network did not see, so 'auto' maximises the "
            "evidence at the network's own weights, which can make predictions worse "
            "than the network's. Pass X_val and y_val to fit."
        )
    elif problem.free_noise:
        message = (
            "sigma_noise comes from the training rows, because there are no rows "
            "that the network did not see; intervals will be too narrow if the "
            "network is over-trained. Pass X_val and y_val to fit."
        )
    if message:
        warnings.warn(message, UserWarning, stacklevel=2)
    return maximise_evidence(problem)


TUNERS: dict[str, Callable[[TuningProblem], GaussianPosterior]] = {
    "auto": auto,
    "marglik": maximise_evidence,
    "validation": tune_on_validation,
}
