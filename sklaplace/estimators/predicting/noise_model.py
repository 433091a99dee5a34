"""NoiseModel: noise that depends on the inputs, fitted to held-out residuals.

The model has three parts for each column of targets. In the first, ``log |r|`` of a
residual r is linear in the features of the sample and the moments of its prediction;
its exponential, times a factor, is a scale of the noise. In the second, a forest gives
quantiles of residuals in units of this scale, uncertainty of the weights included. In
the third, the levels of these quantiles are corrected so that all residuals together
have the right coverage. Predicted means do not change: the quantiles are centred.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.linear_model import BayesianRidge
from torch import Tensor

from sklaplace.core.trees import Batch
from sklaplace.likelihoods.quadrature import NODES, WEIGHTS
from sklaplace.networks.default import center_and_scale

Array = NDArray[np.float64]

# Fewer residuals give no noise model.
MIN_RESIDUALS = 30
# Standardised inputs of the linear function are clipped to plus or minus this number.
CLIP = 4.0
# Smallest absolute residual to take a logarithm of, relative to the mean.
SMALLEST = 0.02
# Numbers of residuals, in all and in one leaf, at which their quantiles count as much
# as normal quantiles.
HALF, HALF_OF_LEAF = 100, 5
# Number of groups of residuals. The functions of a group are fitted to other groups.
N_GROUPS = 5
# Number of trees, and of residuals in a leaf. Twice or half as many changed the mean
# interval score of six tables by less than one per cent.
N_TREES, LEAF = 25, 40
# Residuals beyond this number of standard deviations do not direct the splits of trees.
OUTLYING = 3.0
LEVELS = np.array([0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99])
SCORES = norm.ppf(LEVELS)
# Smallest noise relative to its scale, where the weights are far more uncertain.
SMALLEST_NOISE = 0.01
# More inputs than this are not used.
MOST_INPUTS = 1000
# Bounds of the logarithm of the factor.
_LOG_BOUNDS = -12.0, 12.0


@dataclass(frozen=True)
class Predictions:
    """Predictions that a noise model takes.

    Attributes
    ----------
    features : ndarray of shape (n, i)
        Features from the network; i is zero without features.
    inputs : ndarray of shape (n, p)
        Inputs of the network; p is zero unless the inputs are one table.
    mean, variance : ndarray of shape (n, c)
        Moments of the noise-free outputs.
    """

    features: Array
    inputs: Array
    mean: Array
    variance: Array

    @classmethod
    def of(
        cls, features: Tensor | None, x: Batch, mean: Tensor, variance: Tensor
    ) -> "Predictions":
        """Return the predictions of a batch."""
        parts = [features, x if isinstance(x, Tensor) and x.ndim == 2 else None]
        known = [
            mean[:, :0] if part is None or part.shape[1] > MOST_INPUTS else part
            for part in parts
        ]
        return cls(*(t.double().cpu().numpy() for t in (*known, mean, variance)))


@dataclass(frozen=True)
class Residuals:
    """Residuals of samples that networks were not trained on.

    Attributes
    ----------
    predictions : Predictions
        Moments from networks that have not seen the samples.
    values : ndarray of shape (n, c)
        Targets minus means.
    weights : ndarray of shape (n,)
        Positive weights.
    keys : ndarray of shape (n,)
        Hashes of the samples; copies have the same hash.
    """

    predictions: Predictions
    values: Array
    weights: Array
    keys: NDArray[np.int64]


@dataclass(frozen=True)
class LogScale:
    """Linear function of standardised and clipped inputs (n, k), within bounds."""

    center: Array
    scale: Array
    coefficients: Array
    intercept: float
    bounds: tuple[float, float] = (-np.inf, np.inf)

    @classmethod
    def fit(cls, inputs: Array, target: Array, weights: Array) -> "LogScale":
        """Fit the function to targets (n,); its prior precision maximises evidence."""
        center, scale = _standardisation(inputs, weights)
        clipped = ((inputs - center) / scale).clip(-CLIP, CLIP)
        line = BayesianRidge().fit(clipped, target, weights)
        return cls(center, scale, line.coef_, float(line.intercept_))

    def __call__(self, inputs: Array) -> Array:
        """Return values (n,)."""
        clipped = ((inputs - self.center) / self.scale).clip(-CLIP, CLIP)
        values = clipped @ self.coefficients + self.intercept
        return np.asarray(values.clip(*self.bounds))


@dataclass(frozen=True)
class QuantileTree:
    """Tree with quantiles of residuals in its leaves.

    Attributes
    ----------
    children : ndarray of shape (n_nodes, 2)
        Nodes for inputs up to the threshold and above it. A leaf is its own child.
    feature, threshold : ndarray of shape (n_nodes,)
        Input that a node compares, and its threshold.
    depth : int
        Largest number of comparisons.
    quantiles : ndarray of shape (n_nodes, n_levels)
        Quantiles at `LEVELS`, for leaves.
    """

    children: NDArray[np.intp]
    feature: NDArray[np.intp]
    threshold: Array
    depth: int
    quantiles: Array

    @classmethod
    def of(cls, tree: Any, leaves: Array, z: Array, weights: Array) -> "QuantileTree":
        """Return scikit-learn's tree with quantiles of residuals (n,) in ``leaves``."""
        children = np.stack([tree.children_left, tree.children_right], axis=1)
        nodes = np.arange(len(children))[:, None]
        quantiles = np.tile(SCORES, (len(children), 1))
        share = weights.sum() / (weights.sum() + HALF)
        order = np.argsort(leaves, kind="stable")
        found, starts = np.unique(leaves[order], return_index=True)
        for leaf, rows in zip(found, np.split(order, starts[1:]), strict=True):
            probabilities, values, n = _ranked(z[rows], weights[rows])
            own = np.interp(LEVELS, probabilities, values)
            quantiles[leaf] += share * n / (n + HALF_OF_LEAF) * (own - SCORES)
        children = np.where(children < 0, nodes, children)
        feature = tree.feature.clip(0)
        return cls(children, feature, tree.threshold, tree.max_depth, quantiles)

    def __call__(self, inputs: NDArray[np.float32]) -> Array:
        """Return the quantiles (n, n_levels) of the leaves of inputs (n, k)."""
        rows = np.arange(len(inputs))
        nodes = np.zeros(len(inputs), dtype=np.intp)
        for _ in range(self.depth):
            above = inputs[rows, self.feature[nodes]] > self.threshold[nodes]
            nodes = self.children[nodes, above.astype(int)]
        return self.quantiles[nodes]


@dataclass(frozen=True)
class QuantileForest:
    """Means over trees of quantiles of residuals.

    Attributes
    ----------
    trees : sequence of QuantileTree
        Trees.
    center, scale : ndarray of shape (k,)
        Standardisation of the inputs, which trees compare in single precision.

    References
    ----------
    Meinshausen (2006), "Quantile regression forests", here with a mean of quantiles.
    """

    trees: Sequence[QuantileTree]
    center: Array
    scale: Array

    @classmethod
    def fit(cls, inputs: Array, z: Array, weights: Array) -> "QuantileForest":
        """Fit trees to standardised residuals ``z`` (n,) and their sizes."""
        bounded = z.clip(-OUTLYING, OUTLYING)
        forest = ExtraTreesRegressor(
            N_TREES,
            min_weight_fraction_leaf=min(LEAF / weights.sum(), 0.5),
            random_state=0,
        )
        center, scale = _standardisation(inputs, weights)
        rounded = _single((inputs - center) / scale)
        forest.fit(rounded, np.column_stack([bounded, np.abs(bounded)]), weights)
        parts = zip(forest.estimators_, forest.apply(rounded).T, strict=True)
        trees = [QuantileTree.of(t.tree_, own, z, weights) for t, own in parts]
        return cls(trees, center, scale)

    def __call__(self, inputs: Array) -> Array:
        """Return quantiles (n, n_levels) at `LEVELS`, in increasing order."""
        rounded = _single((inputs - self.center) / self.scale)
        return np.asarray(np.mean([tree(rounded) for tree in self.trees], axis=0))


@dataclass(frozen=True)
class ColumnNoise:
    """Noise of one column of targets; see the module's description.

    Attributes
    ----------
    level : float
        Constant level of the noise.
    origin, unit : float
        Mean and standard deviation of predicted means.
    log_scale : LogScale
        Logarithm of the noise, up to ``log_factor``.
    log_factor : float
        Logarithm of the factor.
    forest : QuantileForest
        Quantiles of standardised residuals.
    normal_scores, corrected : ndarray of shape (m,)
        Standard normal quantiles, and the normal scores of the forest's levels that
        they correspond to.
    """

    level: float
    origin: float
    unit: float
    log_scale: LogScale
    log_factor: float
    forest: QuantileForest
    normal_scores: Array
    corrected: Array

    @classmethod
    def fit(cls, residuals: Residuals, column: int, level: float) -> "ColumnNoise":
        """Fit the noise of a column to residuals, at least one of them nonzero."""
        r, w = residuals.values[:, column], residuals.weights
        given = residuals.predictions
        variance = given.variance[:, column]
        size = np.abs(r)
        target = np.log(size + SMALLEST * np.average(size, weights=w))
        (origin,), (unit,) = _standardisation(given.mean[:, [column]], w)
        inputs = _line_inputs(given, column, level, origin, unit)
        logs = _across_groups(LogScale.fit, inputs, target, residuals)
        logs = logs.clip(target.min(), target.max())
        bounds = logs.min(), logs.max()
        line = replace(LogScale.fit(inputs, target, w), bounds=bounds)
        noise = np.exp(2 * logs)

        def excess(log_factor: float) -> float:
            total = variance + np.exp(2 * log_factor) * noise
            return float(np.average(r**2 / total, weights=w)) - 1

        # the factor under which standardised residuals have a mean square of one
        low, high = _LOG_BOUNDS
        log_factor = brentq(excess, low, high) if excess(low) > 0 else low
        z = r / np.sqrt(variance + np.exp(2 * log_factor) * noise)
        inputs = _forest_inputs(given, column, logs)
        rows = _across_groups(QuantileForest.fit, inputs, z, residuals)
        rows = rows - (_values_at(_nodes(rows), rows) @ WEIGHTS)[:, None]
        probabilities, scores, n = _ranked(_scores_of(z, rows), w)
        normal = norm.ppf(probabilities.clip(1e-9, 1 - 1e-9))
        corrected = normal + n / (n + HALF) * (scores - normal)
        forest = QuantileForest.fit(inputs, z, w)
        own = level, origin, unit
        return cls(*own, line, log_factor, forest, normal, corrected)

    def distribution(self, given: Predictions, column: int) -> tuple[Array, Array]:
        """Return the noise (n,) relative to the level, and quantiles (n, n_levels)."""
        own = self.level, self.origin, self.unit
        logs = self.log_scale(_line_inputs(given, column, *own))
        rows = self.forest(_forest_inputs(given, column, logs))
        mean, std = self._moments(rows)
        variance, scale = given.variance[:, column], np.exp(logs + self.log_factor)
        # with this noise, std² times the sum of the variances is the variance
        noise = std**2 * (variance + scale**2) - variance
        noise = np.sqrt(np.maximum(noise, (SMALLEST_NOISE * scale) ** 2))
        return noise / self.level, rows - mean[:, None]

    def standardised(self, rows: Array, scores: Array) -> Array:
        """Return standardised targets (n, s) for normal scores (n, s)."""
        _, std = self._moments(rows)
        return _values_at(self._levels(scores), rows) / std[:, None]

    def scores(self, rows: Array, standardised: Array) -> Array:
        """Return the normal scores (n,) of standardised targets (n,)."""
        _, std = self._moments(rows)
        scores, x = _scores_of(standardised * std, rows), self.corrected
        inside = np.interp(scores, x, self.normal_scores)
        return np.asarray(inside + _beyond(scores, x[0], x[-1]))

    def _moments(self, rows: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation (n,) of scaled targets."""
        values = _values_at(self._levels(_nodes(rows)), rows)
        mean = values @ WEIGHTS
        return mean, np.sqrt((values - mean[:, None]) ** 2 @ WEIGHTS)

    def _levels(self, scores: Array) -> Array:
        """Return the normal scores of the forest's levels for normal scores."""
        x = self.normal_scores
        inside = np.interp(scores, x, self.corrected)
        return inside + _beyond(scores, x[0], x[-1])


@dataclass(frozen=True)
class NoiseModel:
    """Noise that depends on the inputs, relative to constant levels.

    Attributes
    ----------
    columns : sequence of ColumnNoise
        Noise of each column of targets.
    """

    columns: Sequence[ColumnNoise]

    @classmethod
    def fit(cls, residuals: Residuals, levels: Array) -> "NoiseModel | None":
        """Fit a model to residuals; return None if there are too few.

        ``levels`` (c,) are the standard deviations of constant noise.

        Notes
        -----
        Costs O(n k min(n, k)) for n residuals and k features, and six forests.
        """
        if (
            residuals.weights.sum() < MIN_RESIDUALS
            or not residuals.values.any(axis=0).all()
        ):
            return None
        return cls([ColumnNoise.fit(residuals, k, s) for k, s in enumerate(levels)])

    def of_batch(self, *batch: Any) -> tuple[Tensor, ...]:
        """Return the noise (b, c) relative to the levels, and quantiles (b, c, q).

        The arguments are those of `Predictions.of`.
        """
        given = Predictions.of(*batch)
        parts = [c.distribution(given, k) for k, c in enumerate(self.columns)]
        noise, rows = (np.stack(values, axis=1) for values in zip(*parts, strict=True))
        return torch.from_numpy(noise), torch.from_numpy(rows)

    def standardised(self, rows: Array, scores: Array) -> Array:
        """Return standardised targets (n, c, s) for normal scores (n, c, s)."""
        parts = [
            column.standardised(rows[:, k], scores[:, k])
            for k, column in enumerate(self.columns)
        ]
        return np.stack(parts, axis=1)

    def scores(self, rows: Array, standardised: Array) -> Array:
        """Return the normal scores (n, c) of standardised targets (n, c)."""
        parts = [
            column.scores(rows[:, k], standardised[:, k])
            for k, column in enumerate(self.columns)
        ]
        return np.stack(parts, axis=1)


def _line_inputs(
    given: Predictions, column: int, level: float, origin: float, unit: float
) -> Array:
    """Return the inputs (n, i + 4) of the linear function."""
    mean = (given.mean[:, column] - origin) / unit
    deviation = np.log(given.variance[:, column] + level**2) / 2
    moments = mean, mean**2, np.abs(mean), deviation
    return np.column_stack([given.features, *moments])


def _forest_inputs(given: Predictions, column: int, logs: Array) -> Array:
    """Return the inputs (n, p + 3) of the forest."""
    std = np.sqrt(given.variance[:, column])
    return np.column_stack([given.inputs, given.mean[:, column], std, logs])


def _standardisation(inputs: Array, weights: Array) -> tuple[Array, Array]:
    """Return weighted mean and standard deviation of columns; one if constant."""
    center, scale = center_and_scale(inputs, weights)
    return center, np.where(scale > 1e-9 * np.abs(center), scale, 1.0)


def _single(values: Array) -> NDArray[np.float32]:
    """Return finite values in single precision."""
    return np.asarray(values.clip(-1e30, 1e30), dtype=np.float32)


def _across_groups(
    fit: Callable[..., Callable[[Array], Array]],
    inputs: Array,
    target: Array,
    residuals: Residuals,
) -> Array:
    """Return predictions for each group of samples, fitted to the other groups."""
    group = np.unique(residuals.keys, return_inverse=True)[1] % N_GROUPS
    parts, rows = [], []
    for k in range(N_GROUPS):
        seen, own = group != k, np.flatnonzero(group == k)
        model = fit(inputs[seen], target[seen], residuals.weights[seen])
        parts.append(model(inputs[own]))
        rows.append(own)
    return np.asarray(np.concatenate(parts)[np.argsort(np.concatenate(rows))])


def _ranked(values: Array, weights: Array) -> tuple[Array, Array, float]:
    """Return probabilities (2n,), sorted values (2n,) and the sum of weights.

    The i-th of n values has the probability i / (n + 1). A value of weight two equals
    two values.
    """
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    half, n = np.maximum(weights - 1, 0) / 2, weights.sum()
    middle = np.cumsum(weights) - weights / 2 + 0.5
    ends = np.stack([middle - half, middle + half], axis=1)
    return ends.ravel() / (n + 1), np.repeat(values, 2), n


def _nodes(rows: Array) -> Array:
    """Return the nodes of the quadrature for each row of quantiles."""
    return np.broadcast_to(NODES, (len(rows), len(NODES)))


def _beyond(values: Array, low: Any, high: Any) -> Array:
    """Return the signed distance of values to an interval."""
    return np.asarray(np.minimum(values - low, 0) + np.maximum(values - high, 0))


def _values_at(scores: Array, quantiles: Array) -> Array:
    """Return values (n, s) at normal scores (n, s), given quantiles (n, q)."""
    k = (np.searchsorted(SCORES, scores) - 1).clip(0, len(SCORES) - 2)
    share = ((scores - SCORES[k]) / (SCORES[k + 1] - SCORES[k])).clip(0, 1)
    low, high = (np.take_along_axis(quantiles, i, axis=1) for i in (k, k + 1))
    return low + share * (high - low) + _beyond(scores, SCORES[0], SCORES[-1])


def _scores_of(values: Array, quantiles: Array) -> Array:
    """Return normal scores (n,) of values (n,), given quantiles (n, q)."""
    k = ((quantiles <= values[:, None]).sum(1) - 1).clip(0, len(SCORES) - 2)[:, None]
    low, high = (np.take_along_axis(quantiles, i, axis=1)[:, 0] for i in (k, k + 1))
    share = ((values - low) / np.maximum(high - low, 1e-12)).clip(0, 1)
    inside = SCORES[k[:, 0]] + share * (SCORES[k[:, 0] + 1] - SCORES[k[:, 0]])
    return np.asarray(inside + _beyond(values, quantiles[:, 0], quantiles[:, -1]))
