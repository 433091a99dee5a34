"""NumberTargets: regression targets, encoded as columns for the network."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.sparse import issparse
from skorch import NeuralNet
from torch import Tensor

from sklaplace.core.checks import warn_user
from sklaplace.data.arrays import as_numbers, check_finite
from sklaplace.data.dataset import InputType, TrainingData
from sklaplace.estimators.targets.base import Targets, likelihood_of
from sklaplace.likelihoods import (
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    RegressionLikelihood,
)
from sklaplace.networks.default import Size, center_and_scale, default_regressor

Array = np.ndarray


@dataclass(frozen=True)
class TargetScaling:
    """Map ``y = center + scale · z`` for each column of targets.

    ``y`` contains the targets passed to ``fit``, and ``z`` the targets that the network
    is trained on.

    Attributes
    ----------
    center, scale : float or ndarray of shape (n_outputs,)
        Floats for a single column. The defaults leave targets unchanged.
    """

    center: float | np.ndarray = 0.0
    scale: float | np.ndarray = 1.0

    @classmethod
    def of(cls, y: Array, weights: Array | None) -> "TargetScaling":
        """Return the scaling with the mean and standard deviation of each column.

        ``y`` has the shape (n, n_outputs). The scale of a constant column is one.
        ``weights`` must be positive.
        """
        counts = np.ones(len(y)) if weights is None else weights
        center, scale = center_and_scale(y.astype(np.float64), counts)
        return cls(center, scale) if len(scale) > 1 else cls(center[0], scale[0])

    def normalized(self, y: Array) -> Array:
        """Return ``z`` for targets ``y``, (n, n_outputs)."""
        return np.asarray((y - self.center) / self.scale)

    def restored(self, z: Array) -> Array:
        """Return ``y`` for targets ``z``, (n, n_outputs) or (n, n_outputs, m)."""
        shape = (-1, *(1,) * (z.ndim - 2))
        center, scale = (np.reshape(v, shape) for v in (self.center, self.scale))
        return np.asarray(center + scale * z)

    def restored_variance(self, variance: Array) -> Array:
        """Return variances or covariances in units of ``y``, (..., n_outputs)."""
        return np.asarray(variance * self.scale**2)


# Bounds for the largest absolute target. Within these bounds, results do not depend on
# the unit of ``y``. `sklaplace.posterior.tuning.problem` sets bounds for the noise and
# prior precision.
SMALLEST, LARGEST = 1e-15, 1e20
# Warn if the size of the targets is above the first number or below its inverse, and
# the network's loss is at least the second number times the loss of the mean.
LARGEST_UNIT, NOTABLE_LOSS = 10.0, 0.99


@dataclass(frozen=True)
class NumberTargets(Targets):
    """Shape, dtype, scaling and noise of the training targets.

    Attributes
    ----------
    ndim : int
        Number of axes of the training targets.
    n_outputs : int
        Number of target columns.
    input_type : InputType
        Dtype of the network.
    likelihood : RegressionLikelihood or None
        Likelihood that overrides the criterion's likelihood.
    sigma_noise : float, array or str
        Parameter of the estimator.
    classifier : str
        Name of the classifier that messages suggest if the targets are labels.
    distribution : TargetScaling
        Mean and standard deviation of the columns of the training targets.
    normalizes : bool
        Whether the network is trained on normalised targets.
    """

    ndim: int
    n_outputs: int
    input_type: InputType
    likelihood: RegressionLikelihood | None
    sigma_noise: str | ArrayLike
    classifier: str
    distribution: TargetScaling
    normalizes: bool

    likelihoods: ClassVar[tuple[type, ...]] = (
        Gaussian,
        HeteroscedasticGaussian,
        Poisson,
    )
    example_net = "skorch.NeuralNetRegressor({}, criterion=torch.nn.MSELoss)"

    @classmethod
    def infer(
        cls,
        y: ArrayLike,
        input_type: InputType,
        likelihood: Any,
        sigma_noise: str | ArrayLike,
        classifier: str,
        *,
        sample_weight: np.ndarray | None = None,
        normalizes: bool = False,
    ) -> "NumberTargets":
        """Infer the shape, mean and standard deviation of the training targets.

        Samples with zero weight do not count. Warn if columns that share one noise
        level have very different scales.

        Returns
        -------
        NumberTargets
            Encoder of these and later targets.

        Raises
        ------
        ValueError
            If ``sigma_noise`` and ``y`` have different numbers of columns.
        """
        y = _as_numbers(y, "y", classifier)
        _check_size(y, "y", SMALLEST, np.inf)  # `encode` checks the upper bound
        columns = y.reshape(len(y), -1)
        if np.ndim(sigma_noise) == 0:  # the same for all columns, or a name
            # normalised columns have equal scales
            if not normalizes:
                _warn_of_unequal_scales(columns)
        elif np.shape(sigma_noise) != columns.shape[1:]:
            raise ValueError(
                f"sigma_noise has shape {np.shape(sigma_noise)}, but y has "
                f"{columns.shape[1]} columns. Pass one number, or one per column."
            )
        n_outputs = columns.shape[1]
        if sample_weight is not None:
            is_weighted = sample_weight > 0
            columns, sample_weight = columns[is_weighted], sample_weight[is_weighted]
        distribution = TargetScaling.of(columns, sample_weight)
        return cls(
            ndim=y.ndim,
            n_outputs=n_outputs,
            input_type=input_type,
            likelihood=likelihood,
            sigma_noise=sigma_noise,
            classifier=classifier,
            distribution=distribution,
            normalizes=normalizes,
        )

    # ------------------------------------------------------------------- units of y
    @property
    def scaling(self) -> TargetScaling:
        """Map from the network's targets to the targets passed to ``fit``."""
        return self.distribution if self.normalizes else TargetScaling()

    @property
    def noise_unit(self) -> float:
        """Noise level in units of ``y``, divided by that of the likelihood.

        The noise level of several columns is their geometric mean.
        """
        return geometric_mean(self.scaling.scale)

    def restored_outputs(
        self, likelihood: Any, mean: Tensor, cov: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return means (b, q·c) and covariances of outputs in units of ``y``.

        Covariances have the shape (b, q·c, q·c), or (b, c) if diagonal. There are b
        groups of q samples with a joint covariance, and c outputs of each sample.
        """
        if not self.normalizes:
            return mean, cov
        # outputs become shift + factor · outputs, with a shift and a factor for each
        affine_map = likelihood.rescaled_outputs(*self._columns(self.scaling))
        shift, factor = (torch.as_tensor(v).to(mean) for v in affine_map)
        n_joint = mean.shape[1] // len(shift)  # q
        shift, factor = shift.repeat(n_joint), factor.repeat(n_joint)
        cov = cov * factor**2 if cov.ndim == 2 else cov * factor * factor[:, None]
        return shift + factor * mean, cov

    def _columns(self, scaling: TargetScaling) -> tuple[np.ndarray, np.ndarray]:
        """Return the center and scale of each column, (n_outputs,)."""
        n = self.n_outputs
        return np.full(n, scaling.center), np.full(n, scaling.scale)

    def encode(self, y: ArrayLike, name: str = "y") -> np.ndarray:
        """Return targets as (n, n_outputs), in the dtype of the network.

        Targets are normalised if the network is trained on normalised targets. ``name``
        is that of ``y`` in messages.
        """
        y = self.check(y, name)
        columns = y.reshape(len(y), -1)
        if columns.shape[1] != self.n_outputs:
            raise ValueError(
                f"{name} has {columns.shape[1]} columns, but y has {self.n_outputs} in "
                "fit. Pass the target columns used in fit."
            )
        # normalise before rounding to the network's dtype, which could lose digits
        values = self.input_type.floats(self.scaling.normalized(columns), name)
        # only fit rejects small targets, because some later targets may be small. In
        # fit, `infer` has checked "y". Only fit passes other names, such as "y_val"
        _check_size(columns, name, 0.0 if name == "y" else SMALLEST, LARGEST)
        return values

    def check(self, y: ArrayLike, name: str = "y") -> np.ndarray:
        """Return targets as an array of finite numbers."""
        return _as_numbers(y, name, self.classifier)

    def drop_axis(self, values: np.ndarray) -> np.ndarray:
        """Drop the second axis (of the outputs) if the training targets were 1D."""
        return values[:, 0] if self.ndim == 1 else values

    # ----------------------------------------------------------------- the network
    def adapt(self, likelihood: Likelihood) -> Likelihood:
        """Return the likelihood with the given ratios between noise levels.

        Only an array of levels, one per column, has ratios. The geometric mean of the
        levels remains a hyperparameter.
        """
        if isinstance(self.sigma_noise, str) or not isinstance(likelihood, Gaussian):
            return likelihood
        levels = np.asarray(self.sigma_noise, dtype=float) / self.scaling.scale
        if np.ndim(levels) == 0:
            return likelihood
        return Gaussian(tuple((levels / geometric_mean(levels)).tolist()))

    def default_net(self, data: TrainingData, size: Size) -> NeuralNet:
        """Return the default skorch net.

        Its module maps the outputs of its head to the scale of the targets. Normalised
        targets need no such map.
        """
        net = default_regressor(data, size)
        if self.normalizes:
            net.set_params(module__target_center=0.0, module__target_scale=1.0)
        return net

    def match(self, net: NeuralNet, y: np.ndarray) -> None:
        """Raise an error for targets or noise that the likelihood does not support.

        Warn about constant targets, whose tuned noise would be zero. ``y`` contains
        encoded targets.
        """
        likelihood = self.likelihood or likelihood_of(net)
        if not isinstance(likelihood, RegressionLikelihood):
            return  # a later check raises an error that names the criterion
        n, kind = self.n_outputs, type(likelihood).__name__
        # only whether the result is None matters: any center and scale would do
        has_unit = likelihood.rescaled_outputs(np.zeros(n), np.ones(n)) is not None
        if self.normalizes and not has_unit:
            raise ValueError(
                f"normalize_y=True cannot be used with {kind}, whose targets have no "
                "unit. Use normalize_y=False, or criterion=torch.nn.MSELoss."
            )
        likelihood.check_targets(y)
        sigma = self.sigma_noise
        # without noise, a name has nothing to tune, and 1 is the default
        if not (likelihood.has_noise or isinstance(sigma, str) or np.all(sigma == 1)):
            raise ValueError(
                f"sigma_noise={sigma!r} was passed, but criterion="
                f"{type(net.criterion_).__name__} has no noise level. Leave it out."
            )
        is_constant = len(y) > 1 and (y == y[0]).all(axis=0).any()
        if likelihood.has_noise and isinstance(sigma, str) and is_constant:
            warn_user(
                "y or one of its columns is constant, so standard deviations will be "
                "close to zero. Pass sigma_noise as a number, or targets that vary."
            )

    def check_loss(self, likelihood: RegressionLikelihood, loss: float) -> None:
        """Warn if the network learned nothing and the targets are far from unit size.

        ``loss`` is the mean of `Likelihood.loss` over the training targets.
        """
        if self.normalizes or not likelihood.has_noise:
            return
        center, std = self._columns(self.distribution)
        size = float(np.sqrt(np.mean(center**2 + std**2)))  # root mean square of y
        # on average, the mean of the targets has the loss of a residual of one standard
        # deviation, summed over columns; ``loss`` is per column
        residual = torch.as_tensor(std)[None]
        loss_of_mean = likelihood.loss(torch.zeros_like(residual), residual)
        is_usual = 1 / LARGEST_UNIT <= size <= LARGEST_UNIT
        if is_usual or loss < NOTABLE_LOSS * float(loss_of_mean) / self.n_outputs:
            return
        warn_user(
            "The network predicts its training targets no better than their mean "
            f"does. Their root mean square is {size:.3g}, but an untrained network has "
            "outputs of about one. Use normalize_y=True, or train longer."
        )

    @property
    def are_plain(self) -> bool:
        """Whether targets are not normalised."""
        return not self.normalizes


def check_normalize_y(value: bool, is_frozen: bool) -> None:
    """Raise ValueError for ``normalize_y`` with a frozen net, which is not trained."""
    if value and is_frozen:
        raise ValueError(
            "normalize_y=True cannot be used with a frozen network, which predicts in "
            "the units of its training targets. Pass the net without FrozenEstimator, "
            "or use normalize_y=False."
        )


def _as_numbers(y: ArrayLike, name: str, classifier: str) -> np.ndarray:
    """Return targets as an array of finite numbers."""
    if issparse(y):
        raise TypeError(f"{name} is sparse. Use {name}.toarray().")
    numbers = as_numbers(y, name, f"For labels, use {classifier}.")
    check_finite(numbers, name)
    return numbers


def has_noise(likelihood: Any, net: NeuralNet) -> bool:
    """Return whether the noise can be tuned, or True if the likelihood is unknown."""
    likelihood = likelihood or likelihood_of(net)
    return likelihood is None or bool(likelihood.has_noise)


def _check_size(y: np.ndarray, name: str, low: float, high: float) -> None:
    """Raise ValueError if the size of targets makes variances or priors inaccurate.

    The size is the largest absolute value, which must be from ``low`` to ``high``.
    Targets that are all zero are accepted.
    """
    size = float(np.abs(y.astype(np.float64)).max(initial=0))
    if size and not low <= size <= high:
        raise ValueError(
            f"{name} has values up to {size:.0e}, but sizes from {SMALLEST:.0e} to "
            f"{LARGEST:.0e} are supported. Scale y, for example with "
            "sklearn.compose.TransformedTargetRegressor."
        )


def _warn_of_unequal_scales(y: np.ndarray) -> None:
    """Warn about target columns whose scales differ too much for a single loss.

    Errors of the column with ten times the scale have a hundred times the weight in a
    squared loss. Constant columns do not count.
    """
    with np.errstate(over="ignore"):  # sizes are checked later
        # complex numbers raise an error later
        std = y.std(axis=0) if y.dtype.kind in "fiub" else np.ones(1)
    std = std[std > 0]
    if len(std) > 1 and std.max() > 10 * std.min():
        warn_user(
            f"The columns of y have standard deviations from {std.min():.3g} to "
            f"{std.max():.3g}, but their errors have equal weight in the loss. Use "
            "normalize_y=True. For a frozen net, normalise y before training.",
        )


def geometric_mean(values: ArrayLike) -> float:
    """Return the geometric mean of positive numbers."""
    return float(np.exp(np.log(np.atleast_1d(values)).mean()))
