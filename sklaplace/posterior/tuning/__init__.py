"""Tuning: choose prior precision and noise, and whether to refit the linear model.

A tuner is a function ``(TuningProblem) -> GaussianPosterior``: ``marglik`` maximises
the evidence, ``validation`` scores the predictive on held-out data, and ``auto`` does
the second if there is such data, else the first. Evidence comes last because it prefers
far too weak a prior at weights that do not minimise the regularised loss, and because
training residuals of an overfitted network underestimate the noise.
"""

from collections.abc import Callable

from sklaplace.core.warn import warn_user
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.tuning.evidence import maximise_evidence
from sklaplace.posterior.tuning.levels import maximise_with_levels
from sklaplace.posterior.tuning.problem import TuningProblem
from sklaplace.posterior.tuning.validation import tune_on_validation


def auto(problem: TuningProblem) -> GaussianPosterior:
    """Tune on held-out data if there is any, else by the evidence, with a warning.

    A prior precision that was learned while the network was trained is kept.
    """
    if problem.learned is not None:
        problem = problem.under(problem.learned, refine=False)
        if not problem.free_noise:
            return problem.posterior
    if problem.has_held_out:
        return tune_on_validation(problem)
    is_kept = problem.linear_model is None or problem.refine is False
    if problem.free_noise and not is_kept:
        warn_user(_NOISE_OF_TRAINING)
    else:
        where = (
            "at the network's own weights" if is_kept else "of a refitted last layer"
        )
        warn_user(
            "There are no rows that the network did not see, so 'auto' maximises the "
            f"evidence {where}, which can make predictions worse than the network's. "
            "Pass X_val and y_val to fit."
        )
    return maximise_with_levels(problem)


_NOISE_OF_TRAINING = (
    "sigma_noise comes from the training rows, because there are no rows that the "
    "network did not see; intervals will be too narrow if the network is over-trained. "
    "Pass X_val and y_val to fit."
)


def by_evidence(problem: TuningProblem) -> GaussianPosterior:
    """Prior precision by the evidence; noise by held-out data if there is any."""
    is_asked = problem.free_noise and problem.noise_on_held_out
    if not (is_asked and problem.has_held_out):
        if is_asked:
            warn_user(_NOISE_OF_TRAINING)
        return maximise_with_levels(problem)
    posterior = maximise_evidence(problem)
    refine = posterior.is_refitted
    return tune_on_validation(problem.under(posterior.prior_precision, refine=refine))


TUNERS: dict[str, Callable[[TuningProblem], GaussianPosterior]] = {
    "auto": auto,
    "marglik": by_evidence,
    "validation": tune_on_validation,
}
