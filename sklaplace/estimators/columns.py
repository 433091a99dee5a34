"""ColumnTargets: numbers to predict, in columns as the network gives them."""

import warnings
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import numpy as np
from sklearn.base import RegressorMixin

from sklaplace.core.checks import check_positive
from sklaplace.estimators.fitting import NetworkFitter
from sklaplace.estimators.settings import sibling
from sklaplace.likelihoods import (
    CRITERIA,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    RegressionLikelihood,
)
from sklaplace.networks.data import TrainingData
from sklaplace.networks.default import default_regressor


class ColumnTargets(RegressorMixin, NetworkFitter):  # type: ignore[misc]
    """The part of regressors that takes targets; not for direct use."""

    _likelihoods: tuple[type, ...] = (Gaussian, HeteroscedasticGaussian, Poisson)
    _target_options: ClassVar[dict[str, Any]] = {
        "multi_output": True,
        "y_numeric": True,
    }
    sigma_noise: Any
    _n_targets: int
    _y_ndim: int

    def _encode(self, y: Any, *, reset: bool, name: str = "y") -> np.ndarray:
        """Targets as (n, n_outputs), in the dtype of the network."""
        y = np.asarray(y)
        columns = y.reshape(len(y), -1)
        if reset:
            self._y_ndim, self._n_targets = y.ndim, columns.shape[1]
            if np.ndim(self.sigma_noise) == 0:
                _warn_of_unequal_scales(columns)
        elif columns.shape[1] != self._n_targets:
            raise ValueError(
                f"{name} has {columns.shape[1]} columns, but y has {self._n_targets} "
                "in fit. Pass the same targets in both."
            )
        if columns.dtype.kind not in "fiub":
            raise ValueError(
                f"y has entries of type {columns.dtype}; a regressor needs numbers. "
                f"For labels use {sibling(self)}."
            )
        return self._input_type.floats(columns, "y")

    def _n_outputs(self) -> int:
        return int(self._n_targets)

    def _default_net(self, data: TrainingData) -> Any:
        return default_regressor(data.X, data.y, data.sample_weight)

    def _check_targets(self, net: Any, y: np.ndarray) -> None:
        likelihood = self.likelihood or likelihood_of(net)
        if likelihood is None:
            return  # refused by name soon
        likelihood.check_targets(y)
        given = self.sigma_noise
        if not (likelihood.has_noise or isinstance(given, str) or np.all(given == 1)):
            raise ValueError(
                f"sigma_noise={given!r} was given, but criterion="
                f"{type(net.criterion_).__name__} has no noise level. Leave it out."
            )

    def _relative_noise(self) -> tuple[float, ...] | None:
        """Noise of each output over their geometric mean, if there are several."""
        if np.ndim(self.sigma_noise) == 0:
            return None
        levels = np.asarray(self.sigma_noise, dtype=float)
        if len(levels) != self._n_targets:
            raise ValueError(
                f"sigma_noise has shape {levels.shape}, but y has {self._n_targets} "
                f"column{'s' if self._n_targets > 1 else ''}. Pass one number, or one "
                "for each column."
            )
        return tuple((levels / geometric_mean(levels)).tolist())

    def _adapted(self, likelihood: Likelihood) -> Likelihood:
        relative = self._relative_noise()
        if relative is None or not isinstance(likelihood, Gaussian):
            return likelihood
        return Gaussian(relative)


def likelihood_of(net: Any) -> RegressionLikelihood | None:
    """The likelihood that a net's criterion stands for; None for others."""
    criterion = getattr(net, "criterion", None)
    kind = criterion if isinstance(criterion, type) else type(criterion)
    likelihood, _ = CRITERIA.get(kind, (None, ""))
    is_known = isinstance(likelihood, ColumnTargets._likelihoods)
    return cast(RegressionLikelihood, likelihood) if is_known else None


def _warn_of_unequal_scales(y: np.ndarray) -> None:
    """Warn of target columns whose spreads one noise level cannot serve."""
    spreads = y.std(axis=0) if y.dtype.kind in "fiub" else np.ones(1)
    spreads = spreads[spreads > 0]
    if len(spreads) > 1 and spreads.max() > 10 * spreads.min():
        warnings.warn(
            f"The columns of y have standard deviations from {spreads.min():.3g} to "
            f"{spreads.max():.3g}, but one noise level is shared by all of them. "
            "Divide each column of y by its standard deviation before fit, and "
            "multiply predictions and their deviations by it; or pass an array of "
            "sigma_noise.",
            UserWarning,
            stacklevel=2,
        )


def geometric_mean(values: np.ndarray) -> float:
    """The level of positive numbers that stand in proportions."""
    return float(np.exp(np.log(values).mean()))


def check_noise(value: Any, names: Iterable[str]) -> None:
    """Refuse what is neither positive, one number or one per column, nor a name."""
    check_positive("sigma_noise", value, names, scalar=np.ndim(value) == 0)
    if np.ndim(value) > 1:
        raise ValueError(
            f"sigma_noise has shape {np.shape(value)}. Pass one number, or one per "
            "column of y."
        )
