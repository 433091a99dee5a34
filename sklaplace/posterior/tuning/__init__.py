"""Tuning: choose prior precision and noise, and whether to refit the last layer.

Three ways, all ``(TuningProblem) -> GaussianPosterior``:

* ``marglik``: maximise the `evidence`.
* ``validation``: score the predictive on rows that the network did not see.
* ``auto``: the second where there are such rows, else the first.

Evidence at weights that are no minimum of the regularised loss prefers far too
weak a prior, and training residuals of an over-trained network say nothing about
the noise; hence the order of ``auto``.
"""

import warnings
from collections.abc import Callable

from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.tuning.evidence import maximise_evidence
from sklaplace.posterior.tuning.task import TuningProblem
from sklaplace.posterior.tuning.validation import tune_on_validation


def auto(task: TuningProblem) -> GaussianPosterior:
    """Held-out rows where there are some, else evidence, saying what it risks."""
    if task.validation is not None:
        return tune_on_validation(task)
    if task.head is None or task.refine is False:
        warnings.warn(
            "There are no rows that the network did not see, so 'auto' maximises the "
            "evidence at the network's own weights, which can make predictions worse "
            "than the network's. Pass X_val and y_val to fit.",
            UserWarning,
            stacklevel=2,
        )
    elif task.free_noise:
        warnings.warn(
            "sigma_noise comes from the training rows, because there are no rows "
            "that the network did not see; intervals will be too narrow if the "
            "network is over-trained. Pass X_val and y_val to fit.",
            UserWarning,
            stacklevel=2,
        )
    return maximise_evidence(task)


TUNERS: dict[str, Callable[[TuningProblem], GaussianPosterior]] = {
    "auto": auto,
    "marglik": maximise_evidence,
    "validation": tune_on_validation,
}
