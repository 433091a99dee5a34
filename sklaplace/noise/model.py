"""NoiseModel: noise that depends on the inputs, fitted to held-out residuals.

The model has three parts for each column of targets:

1. For residuals r, ``log |r|`` is modelled as a linear function of the features and
   of the moments of the prediction. The exponential of this function, times a factor,
   is the scale of the noise.
2. A forest predicts quantiles of residuals in units of this scale. The residuals
   include the uncertainty of the weights.
3. A correction of the quantile levels ensures the nominal coverage over all residuals.

Predicted means do not change, because the quantiles are centred.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor

from sklaplace.core.parallel import one_blas_thread
from sklaplace.core.trees import Batch
from sklaplace.likelihoods.quadrature import NODES
from sklaplace.noise.forest import HALF, QuantileForest
from sklaplace.noise.interpolation import (
    SCORES,
    Interpolation,
    empirical_distribution,
    interpolated,
)
from sklaplace.noise.log_scale import LogScale
from sklaplace.noise.residuals import Predictions, Residuals
from sklaplace.noise.standardisation import standardisation

Array = NDArray[np.float64]

# Minimum number of residuals for a noise model.
MIN_RESIDUALS = 30
# Smallest absolute residual in a logarithm, relative to the mean absolute residual. The
# logarithms of tiny residuals, which are coincidences, would dominate a fit.
SMALLEST_RESIDUAL = 0.02
# Smallest ratio of the noise to its scale, which is reached if the weights of the
# network are much more uncertain than the targets.
SMALLEST_NOISE_TO_SCALE = 0.01
# Bounds for the logarithm of the factor, which is usually near zero.
_LOG_BOUNDS = -12.0, 12.0


@dataclass(frozen=True)
class ColumnInputs:
    """Inputs of the functions that predict the noise of one column of targets.

    Attributes
    ----------
    column : int
        Index of the column.
    level : float
        Constant level of the noise.
    origin, unit : float
        Mean and standard deviation of predicted means.
    """

    column: int
    level: float
    origin: float
    unit: float

    def of_log_scale(self, predictions: Predictions) -> Tensor:
        """Return the inputs (n, i + 4) of a `LogScale`.

        These are the features, and functions of the predicted moments. As a linear
        function of them, the noise can rise with the prediction, with its distance from
        the average prediction, and with the predicted standard deviation of targets.
        """
        mean = (predictions.mean[:, self.column] - self.origin) / self.unit
        variance = predictions.variance[:, self.column] + self.level**2
        moments = torch.stack([mean, mean**2, mean.abs(), variance.log() / 2], 1)
        return torch.cat([predictions.features, moments], 1)

    def of_forest(self, predictions: Predictions, logs: Tensor) -> Tensor:
        """Return the inputs (n, p + 3) of a forest; ``logs`` are from a `LogScale`."""
        mean = predictions.mean[:, self.column]
        std = predictions.variance[:, self.column].sqrt()
        return torch.cat([predictions.inputs, torch.stack([mean, std, logs], 1)], 1)


@dataclass(frozen=True)
class Correction:
    """Increasing function of normal scores, which corrects the levels of quantiles.

    Attributes
    ----------
    nominal, corrected : ndarray of shape (m,)
        Normal scores, and the values of the function.
    """

    nominal: Array
    corrected: Array

    @classmethod
    def of(cls, scores: Array, weights: Array) -> "Correction":
        """Return the correction from the normal scores (n,) of residuals.

        The score of a residual is its place among the predicted quantiles. If these
        were calibrated, the scores would be standard normal. The function maps normal
        quantiles to the quantiles of the scores, so with many residuals, the corrected
        quantiles have the nominal coverage. With few, it is shrunk to the identity.
        """
        one_group = np.zeros(len(scores), dtype=int)
        probabilities, scores, _ = empirical_distribution(scores, weights, one_group)
        # the normal scores of probabilities of zero and one would be infinite
        nominal = norm.ppf(probabilities.clip(1e-9, 1 - 1e-9))
        share = weights.sum() / (weights.sum() + HALF)
        return cls(nominal, nominal + share * (scores - nominal))

    def __call__(self, scores: Array) -> Array:
        """Return corrected scores (n, s)."""
        return interpolated(scores, self.nominal, self.corrected)

    def inverse(self, scores: Array) -> Array:
        """Return the scores (n, s) whose corrections are given."""
        return interpolated(scores, self.corrected, self.nominal)


@dataclass(frozen=True)
class ColumnNoise:
    """Noise of one column of targets; see `NoiseModel`.

    Attributes
    ----------
    inputs : ColumnInputs
        Inputs of ``log_scale`` and ``forest``.
    log_scale : LogScale
        Function that predicts the logarithm of the noise, without ``log_factor``.
    log_factor : float
        Logarithm of the factor by which the noise is multiplied.
    forest : QuantileForest
        Quantiles of standardised residuals.
    correction : Correction
        Correction of the levels of these quantiles.
    at_nodes : Interpolation
        Values of the distribution at quadrature nodes.
    """

    inputs: ColumnInputs
    log_scale: LogScale
    log_factor: float
    forest: QuantileForest
    correction: Correction
    at_nodes: Interpolation

    @classmethod
    def fit(cls, residuals: Residuals, column: int, level: float) -> "ColumnNoise":
        """Fit the noise of a column to residuals, of which at least one is nonzero.

        The three parts are fitted one after the other; see the module's docstring. Each
        part uses values of the earlier parts for groups to which these were not fitted.
        """
        # residuals r, weights w and groups, (n,)
        r, w, group = residuals.values[:, column], residuals.weights, residuals.group
        predictions = residuals.predictions
        mean = predictions.mean[:, [column]].numpy()
        (origin,), (unit,) = standardisation(mean, w)
        inputs = ColumnInputs(column, level, float(origin), float(unit))
        size = np.abs(r)
        # the logarithm of zero would be infinite
        target = np.log(size + SMALLEST_RESIDUAL * np.average(size, weights=w))
        linear_inputs = inputs.of_log_scale(predictions).numpy()
        log_scale, logs = LogScale.fit(linear_inputs, target, w, group)
        # variances of the noise without the factor, and of the noise-free outputs
        noise, variance = np.exp(2 * logs), predictions.variance[:, column].numpy()

        def excess(log_factor: float) -> float:
            """Return the mean square of standardised residuals, minus one."""
            total = variance + np.exp(2 * log_factor) * noise
            return float(np.average(r**2 / total, weights=w)) - 1

        # with this factor, standardised residuals have a mean square of one; it is the
        # lower bound if the uncertainty of the weights alone exceeds the residuals (at
        # the upper bound, the noise exceeds all residuals)
        low, high = _LOG_BOUNDS
        log_factor = brentq(excess, low, high) if excess(low) > 0 else low
        z = r / np.sqrt(variance + np.exp(2 * log_factor) * noise)
        forest_inputs = inputs.of_forest(predictions, torch.from_numpy(logs)).numpy()
        forest, quantiles = QuantileForest.fit(forest_inputs, z, w, group)
        # centre the quantiles, so that the noise does not change predicted means
        mean_of_noise, _ = Interpolation.at(NODES).moments(torch.from_numpy(quantiles))
        quantiles = quantiles - mean_of_noise.numpy()[:, None]
        # the place of each residual among its quantiles
        scores = interpolated(z[:, None], quantiles, SCORES)[:, 0]
        correction = Correction.of(scores, w)
        return cls(
            inputs=inputs,
            log_scale=log_scale,
            log_factor=log_factor,
            forest=forest,
            correction=correction,
            at_nodes=Interpolation.at(correction(NODES[None])[0]),
        )

    def distribution(self, predictions: Predictions) -> tuple[Tensor, Tensor]:
        """Return the noise (n,) relative to the level, and quantiles (n, n_levels).

        The quantiles are those of residuals, divided by ``√(variance + scale²)`` as in
        `fit`, minus their mean.
        """
        logs = self.log_scale(self.inputs.of_log_scale(predictions))
        quantiles = self.forest(self.inputs.of_forest(predictions, logs))
        mean, std = self.at_nodes.moments(quantiles)
        variance = predictions.variance[:, self.inputs.column]
        scale = (logs + self.log_factor).exp()
        # standardised residuals have the variance std², so that the total variance is
        # std² times (variance + scale²), of which the weights explain `variance`
        noise = std**2 * (variance + scale**2) - variance
        smallest = (SMALLEST_NOISE_TO_SCALE * scale) ** 2
        noise = torch.maximum(noise, smallest).sqrt()
        return noise / self.inputs.level, quantiles - mean.unsqueeze(1)

    def at(self, scores: Array) -> Interpolation:
        """Return the interpolation at corrected normal scores, for scores (s,)."""
        return Interpolation.at(self.correction(scores[None])[0])

    def standardised(self, quantiles: Array, scores: Array) -> Array:
        """Return standardised targets (n, s) for normal scores (n, s).

        Standardised targets are deviations from the predicted mean, divided by the
        predicted standard deviation. ``quantiles`` are those of `distribution`.
        """
        values = interpolated(self.correction(scores), SCORES, quantiles)
        return values / self._std(quantiles)

    def scores(self, quantiles: Array, standardised: Array) -> Array:
        """Return the normal scores (n,) of targets (n,); inverts `standardised`."""
        values = standardised[:, None] * self._std(quantiles)
        scores = interpolated(values, quantiles, SCORES)
        return self.correction.inverse(scores)[:, 0]

    def _std(self, quantiles: Array) -> Array:
        """Return the standard deviation (n, 1) of targets with these quantiles."""
        return self.at_nodes.moments(torch.from_numpy(quantiles))[1].numpy()[:, None]


@dataclass(frozen=True)
class NoiseModel:
    """Noise that depends on the inputs, relative to a constant level per column.

    Attributes
    ----------
    columns : sequence of ColumnNoise
        Noise of each column of targets.
    """

    columns: Sequence[ColumnNoise]

    @classmethod
    @one_blas_thread()
    def fit(cls, residuals: Residuals, levels: Array) -> "NoiseModel | None":
        """Fit a model to residuals, or return None if there are too few residuals.

        ``levels`` (c,) contains the standard deviations of constant noise. Fitting also
        needs at least two groups of residuals, as each part is fitted to other groups,
        and a nonzero residual in each column, as noise has a logarithm.

        Notes
        -----
        For each column, fitting costs O(n k min(n, k)) for n residuals and k features,
        plus the fit of a forest.
        """
        if (
            len(residuals.values) < MIN_RESIDUALS
            or len(np.unique(residuals.keys)) < 2
            or not residuals.values.any(axis=0).all()
        ):
            return None
        return cls([ColumnNoise.fit(residuals, k, s) for k, s in enumerate(levels)])

    def of_batch(
        self, features: Tensor | None, x: Batch, mean: Tensor, variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the noise (b, c) relative to the levels, and quantiles (b, c, q).

        The arguments are those of `Predictions.of`: features (b, i) or None, the
        network's inputs, and the moments (b, c) of its outputs.
        """
        predictions = Predictions.of(features, x, mean, variance)
        on_cpu = {name: tensor.cpu() for name, tensor in vars(predictions).items()}
        return self.distributions(Predictions(**on_cpu))

    def distributions(self, predictions: Predictions) -> tuple[Tensor, Tensor]:
        """Return the noise (b, c) relative to the levels, and quantiles (b, c, q)."""
        pairs = [column.distribution(predictions) for column in self.columns]
        noise, quantiles = (torch.stack(v, 1) for v in zip(*pairs, strict=True))
        return noise, quantiles

    def standardised(self, quantiles: Array, scores: Array) -> Array:
        """Return standardised targets (n, c, s) for normal scores (n, c, s)."""
        values = [
            column.standardised(quantiles[:, k], scores[:, k])
            for k, column in enumerate(self.columns)
        ]
        return np.stack(values, axis=1)

    def scores(self, quantiles: Array, standardised: Array) -> Array:
        """Return the normal scores (n, c) of standardised targets (n, c)."""
        scores = [
            column.scores(quantiles[:, k], standardised[:, k])
            for k, column in enumerate(self.columns)
        ]
        return np.stack(scores, axis=1)
