"""NumberTargets: regression targets, in columns as the network returns them."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from sklaplace.core.checks import check_positive
from sklaplace.estimators.targets import Targets
from sklaplace.likelihoods import (
    CRITERIA,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    RegressionLikelihood,
)
from sklaplace.networks.data import InputType, TrainingData
from sklaplace.networks.default import default_regressor


@dataclass(frozen=True)
class NumberTargets(Targets):
    """Shape and dtype of the targets in fit, and the noise that was given for them.

    Attributes
    ----------
    ndim : int
        Number of axes of the targets in fit.
    n_outputs : int
        Number of target columns.
    input_type : InputType
        Dtype of the network.
    likelihood : RegressionLikelihood or None
        In place of that of the criterion.
    sigma_noise : float, array or str
        Value of the constructor.
    classifier : str
        Name of the estimator for labels, for messages.
    """

    ndim: int
    n_outputs: int
    input_type: InputType
    likelihood: RegressionLikelihood | None
    sigma_noise: Any
    classifier: str

    likelihoods: ClassVar[tuple[type, ...]] = (
        Gaussian,
        HeteroscedasticGaussian,
        Poisson,
    )

    @classmethod
    def infer(
        cls,
        y: Any,
        input_type: InputType,
        likelihood: Any,
        sigma_noise: Any,
        classifier: str,
    ) -> "NumberTargets":
        """Return the shape of the targets in fit.

        Raises
        ------
        ValueError
            If ``sigma_noise`` has another number of columns.
        """
        y = np.asarray(y)
        columns = y.reshape(len(y), -1)
        if np.ndim(sigma_noise) == 0:
            _warn_of_unequal_scales(columns)
        elif len(sigma_noise) != columns.shape[1]:
            plural = "s" if columns.shape[1] > 1 else ""
            raise ValueError(
                f"sigma_noise has shape {np.shape(sigma_noise)}, but y has "
                f"{columns.shape[1]} column{plural}. Pass one number, or one "
                "for each column."
            )
        given = input_type, likelihood, sigma_noise, classifier
        return cls(y.ndim, columns.shape[1], *given)

    def encode(self, y: Any, name: str = "y") -> np.ndarray:
        """Return targets as (n, n_outputs), in the dtype of the network."""
        y = np.asarray(y)
        columns = y.reshape(len(y), -1)
        if columns.shape[1] != self.n_outputs:
            raise ValueError(
                f"{name} has {columns.shape[1]} columns, but y has {self.n_outputs} "
                "in fit. Pass the same targets in both."
            )
        if columns.dtype.kind not in "fiub":
            raise ValueError(
                f"y has entries of type {columns.dtype}; a regressor needs numbers. "
                f"For labels use {self.classifier}."
            )
        return self.input_type.floats(columns, "y")

    def check(self, y: Any, name: str = "y") -> np.ndarray:
        """Return targets as an array."""
        return np.asarray(y)

    def drop_axis(self, values: np.ndarray) -> np.ndarray:
        """Drop the axis of outputs, the second, where targets in fit had none."""
        return values[:, 0] if self.ndim == 1 else values

    # ----------------------------------------------------------------- the network
    def adapt(self, likelihood: Likelihood) -> Likelihood:
        """Return the likelihood with the given proportions of noise levels."""
        if np.ndim(self.sigma_noise) == 0 or not isinstance(likelihood, Gaussian):
            return likelihood
        levels = np.asarray(self.sigma_noise, dtype=float)
        return Gaussian(tuple((levels / geometric_mean(levels)).tolist()))

    def default_net(self, data: TrainingData) -> Any:
        """Return the default skorch net."""
        return default_regressor(data.X, data.y, data.sample_weight)

    def check_values(self, net: Any, y: np.ndarray) -> None:
        """Raise for targets, or noise, that the likelihood does not have."""
        likelihood = self.likelihood or likelihood_of(net)
        if likelihood is None:
            return  # raises soon, naming the criterion
        likelihood.check_targets(y)
        given = self.sigma_noise
        if not (likelihood.has_noise or isinstance(given, str) or np.all(given == 1)):
            raise ValueError(
                f"sigma_noise={given!r} was given, but criterion="
                f"{type(net.criterion_).__name__} has no noise level. Leave it out."
            )


def likelihood_of(net: Any) -> RegressionLikelihood | None:
    """Return the likelihood that a net's criterion implies; None for others."""
    criterion = getattr(net, "criterion", None)
    kind = criterion if isinstance(criterion, type) else type(criterion)
    likelihood, _ = CRITERIA.get(kind, (None, ""))
    is_known = isinstance(likelihood, NumberTargets.likelihoods)
    return cast(RegressionLikelihood, likelihood) if is_known else None


def has_noise(likelihood: Any, net: Any) -> bool:
    """Whether a noise level can be chosen; True where the likelihood is unknown."""
    known = likelihood or likelihood_of(net)
    return known is None or bool(known.has_noise)


def _warn_of_unequal_scales(y: np.ndarray) -> None:
    """Warn of target columns whose scales one noise level cannot serve."""
    std = y.std(axis=0) if y.dtype.kind in "fiub" else np.ones(1)
    std = std[std > 0]
    if len(std) > 1 and std.max() > 10 * std.min():
        warnings.warn(
            f"The columns of y have standard deviations from {std.min():.3g} to "
            f"{std.max():.3g}, but one noise level is shared by all of them. "
            "Divide each column of y by its standard deviation before fit, and "
            "multiply predictions and their deviations by it; or pass an array of "
            "sigma_noise.",
            UserWarning,
            stacklevel=2,
        )


def geometric_mean(values: Any) -> float:
    """Return the geometric mean of positive numbers."""
    return float(np.exp(np.log(np.atleast_1d(values)).mean()))


def check_noise(value: Any, names: Iterable[str]) -> None:
    """Raise for a noise that is neither positive, one or one per column, nor a name."""
    check_positive("sigma_noise", value, names, scalar=np.ndim(value) == 0)
    if np.ndim(value) > 1:
        raise ValueError(
            f"sigma_noise has shape {np.shape(value)}. Pass one number, or one per "
            "column of y."
        )
