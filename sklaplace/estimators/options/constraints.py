"""Constraints on constructor parameters, validated by scikit-learn.

A parameter has the same meaning in all estimators. Each estimator uses `CONSTRAINTS`,
with some changes, as its ``_parameter_constraints``. Views of the keys of registries
include entries that are added later.
"""

from collections import ChainMap
from collections.abc import KeysView, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from sklearn.utils._param_validation import Interval, StrOptions

from sklaplace.curvature.ggn import CURVATURES
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.dirichlet import APPROXIMATIONS
from sklaplace.dirichlet.links import LINKS
from sklaplace.estimators.predicting.glm_outputs import OUTPUT_MODELS
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.residual import RESIDUALS
from sklaplace.posterior.tuning import TUNERS
from sklaplace.posterior.variational.elbo import KL_SCHEDULES

Constraints = dict[str, list[object]]


class Number(Interval):
    """Interval of numbers that excludes booleans."""

    def is_satisfied_by(self, val: object) -> bool:
        """Return whether a value is a number in the interval."""
        return not isinstance(val, bool) and bool(super().is_satisfied_by(val))


class Finite(Interval):
    """Finite number above a bound, or an array of such numbers.

    ``ndims`` lists the allowed numbers of axes. Numbers, and arrays or tensors of shape
    (), have zero axes. An array of shape (1,) counts as a number.
    """

    def __init__(
        self, shown: str, low: float | None = None, ndims: Sequence[int] = range(64)
    ) -> None:
        super().__init__(Real, low, None, closed="neither")
        self.shown, self.ndims = shown, ndims

    def is_satisfied_by(self, val: object) -> bool:
        """Return whether a value has an allowed shape and only allowed numbers."""
        if val is None or isinstance(val, str | bool):
            return False
        try:
            numbers = np.asarray(val, dtype=float)
        except (TypeError, ValueError, RuntimeError):
            return False
        are_in = np.isfinite(numbers) & (self.left is None or numbers > self.left)
        is_shaped = numbers.ndim in self.ndims or getattr(val, "shape", None) == (1,)
        return is_shaped and numbers.size > 0 and bool(are_in.all())

    def __str__(self) -> str:
        return self.shown


def keys_and(registry: dict[str, Any], name: str) -> KeysView[str]:
    """Return a view of the keys of a registry, and another name."""
    return ChainMap[str, Any](registry, {name: None}).keys()


COUNT = Number(Integral, 1, None, closed="left")
TWO_OR_MORE = Number(Integral, 2, None, closed="left")
FRACTION = Number(Real, 0, 1, closed="neither")
POSITIVE = Finite("a positive number", 0, [0])
LEVELS = Finite("a positive number or one per column", 0, [0, 1])
POSITIVE_ARRAY = Finite("a positive number or array", 0)
MATRIX = Finite("a finite matrix", ndims=[2])
AUTO = StrOptions({"auto"})

CONSTRAINTS: Constraints = {
    "subset_of_weights": [StrOptions(SUBSETS.keys()), list, tuple],
    "subset_params": [Mapping, None],
    "hessian_structure": [StrOptions(STRUCTURES.keys())],
    "structure_params": [Mapping, None],
    "curvature": [StrOptions(CURVATURES.keys())],
    "curvature_params": [Mapping, None],
    # a matrix raises an error that suggests ``prior``
    "prior_precision": [StrOptions(TUNERS.keys()), POSITIVE_ARRAY, MATRIX],
    "prior_structure": [StrOptions(PRIOR_STRUCTURES.keys()), list, tuple],
    "prior_mean": [Finite("a finite number or array")],
    "prior": [GaussianPosterior, MATRIX, None],
    "refine": ["boolean", AUTO],
    "residual": [StrOptions(set(RESIDUALS)), POSITIVE],
    "temperature": [POSITIVE],
    "validation_fraction": [FRACTION],
    "sigma_noise": [
        StrOptions(keys_and(TUNERS, "homoscedastic")),
        LEVELS,
    ],
    "normalize_y": ["boolean"],
    "class_weight": [StrOptions({"balanced"}), Mapping, None],
    "pred_type": [StrOptions(OUTPUT_MODELS.keys())],
    "link_approx": [StrOptions(keys_and(LINKS, "auto"))],
    "dirichlet_approx": [StrOptions(APPROXIMATIONS.keys())],
    "n_samples": [COUNT],
    "batch_size": [COUNT, None],
    "n_jobs": [COUNT, Number(Integral, None, -1, closed="right"), None],
    "random_state": [
        Number(Integral, 0, 2**32 - 1, closed="both"),
        np.random.RandomState,
        None,
    ],
    "verbose": ["verbose"],
    # searches over priors
    "prior_precisions": [Finite("an array of positive numbers", 0, [1]), None],
    "scoring": [str, callable, None],
    # ensembles, SWAG and Bayes by Backprop
    "n_estimators": [COUNT],
    "max_rank": [TWO_OR_MORE],
    "n_snapshots": [TWO_OR_MORE],
    "steps_per_snapshot": [COUNT],
    "lr": [POSITIVE],
    "prior_scale": [POSITIVE],
    "kl_weight": [POSITIVE],
    "kl_schedule": [StrOptions(KL_SCHEDULES.keys())],
    "bound": [POSITIVE],
    # `MarglikTraining`
    "n_burnin": [Number(Integral, 0, None, closed="left")],
    "every": [COUNT],
    "damping": [Number(Real, 0, 1, closed="left")],
}
