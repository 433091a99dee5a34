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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.ensemble import ExtraTreesRegressor
from torch import Tensor

from sklaplace.core.evidence import most_probable
from sklaplace.core.parallel import one_blas_thread
from sklaplace.core.trees import Batch
from sklaplace.likelihoods.quadrature import NODES, WEIGHTS
from sklaplace.networks.default import center_and_scale

Array = NDArray[np.float64]

# Minimum number of residuals for a noise model.
MIN_RESIDUALS = 30
# Standardised inputs of the linear function are clipped to plus or minus this value.
CLIP = 4.0
# Smallest absolute residual in a logarithm, relative to the mean absolute residual.
SMALLEST = 0.02
# Numbers of residuals, in total and per leaf, at which the quantiles of residuals have
# the same weight as normal quantiles.
HALF, HALF_OF_LEAF = 100, 5
# Number of groups of residuals. Functions for a group are fitted to the other groups.
N_GROUPS = 5
# Number of trees, and of residuals in a leaf. Doubling or halving these numbers changed
# the mean interval score of six tables by less than one per cent.
N_TREES, LEAF = 25, 40
# For the splits of trees, residuals are clipped at this number of deviations.
OUTLYING = 3.0
LEVELS = np.array([0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99])
SCORES = norm.ppf(LEVELS)
# Smallest noise relative to its scale, if the weights are much more uncertain.
SMALLEST_NOISE = 0.01
# With more inputs than this, the model ignores all inputs.
MOST_INPUTS = 1000
# Bounds for the logarithm of the factor.
_LOG_BOUNDS = -12.0, 12.0


@dataclass(frozen=True)
class Predictions:
    """Predictions from which a noise model computes the noise.

    Attributes
    ----------
    features : Tensor of shape (n, i)
        Features from the network. If the network has no features, i is 0.
    inputs : Tensor of shape (n, p)
        Inputs of the network. Unless the inputs are a single table, p is 0.
    mean, variance : Tensor of shape (n, c)
        Moments of the noise-free outputs.
    """

    features: Tensor
    inputs: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def of(
        cls, features: Tensor | None, x: Batch, mean: Tensor, variance: Tensor
    ) -> "Predictions":
        """Return the predictions of a batch."""
        none = mean[:, :0].double()
        inputs = x if isinstance(x, Tensor) and x.ndim == 2 else none
        features = none if features is None else features
        return cls(
            features=none if features.shape[1] > MOST_INPUTS else features.double(),
            inputs=none if inputs.shape[1] > MOST_INPUTS else inputs.double(),
            mean=mean.double(),
            variance=variance.double(),
        )


@dataclass(frozen=True)
class Residuals:
    """Residuals of held-out samples.

    Attributes
    ----------
    predictions : Predictions
        Moments predicted by networks that were not trained on the samples.
    values : ndarray of shape (n, c)
        Targets minus means.
    weights : ndarray of shape (n,)
        Positive sample weights.
    keys : ndarray of shape (n,)
        Hashes of the groups or, without groups, of the inputs.
    """

    predictions: Predictions
    values: Array
    weights: Array
    keys: NDArray[np.integer]

    @property
    def group(self) -> NDArray[np.integer]:
        """Numbers (n,) from 0 to `N_GROUPS`; equal keys have equal numbers."""
        return np.unique(self.keys, return_inverse=True)[1] % N_GROUPS


@dataclass(frozen=True)
class Interpolation:
    """Values at s normal scores, as an affine function of the quantiles at `LEVELS`.

    Attributes
    ----------
    weights : Tensor of shape (n_levels, s)
        Weights of the quantiles.
    shifts : Tensor of shape (s,)
        Signed distances of the scores from the range of normal scores at `LEVELS`.
    """

    weights: Tensor
    shifts: Tensor

    @classmethod
    def at(cls, scores: Array) -> "Interpolation":
        """Return the interpolation at the given normal scores (s,)."""
        identity = np.eye(len(LEVELS))
        weights = _values_at(np.tile(scores, (len(LEVELS), 1)), identity)
        shifts = _beyond(scores, SCORES[0], SCORES[-1])
        return cls(torch.from_numpy(weights - shifts), torch.from_numpy(shifts))

    def __call__(self, rows: Tensor) -> Tensor:
        """Return values (n, s) for quantiles (n, n_levels)."""
        return rows @ self.weights + self.shifts

    def moments(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and standard deviations (n,); the scores must be `NODES`."""
        values, weights = self(rows), rows.new_tensor(WEIGHTS)
        mean = values @ weights
        return mean, ((values - mean.unsqueeze(1)) ** 2 @ weights).sqrt()


@dataclass(frozen=True)
class LogScale:
    """Linear function of standardised, clipped inputs (n, k), within bounds."""

    center: Tensor
    scale: Tensor
    coefficients: Tensor
    intercept: float
    bounds: tuple[float, float]

    @classmethod
    def fit(
        cls, inputs: Array, target: Array, weights: Array, group: NDArray[np.integer]
    ) -> tuple["LogScale", Array]:
        """Fit the function to targets (n,).

        Return the function, and the values (n,) of functions that are fitted to the
        targets of all other groups.

        Notes
        -----
        The coefficients are most probable under a normal prior. The prior precision and
        the variance of the targets maximise the evidence within bounds, without further
        priors; see `most_probable`.
        """
        center, scale = _standardisation(inputs, weights)
        (origin,), (unit,) = _standardisation(target[:, None], weights)
        coordinates = ((inputs - center) / scale).clip(-CLIP, CLIP)
        basis = np.eye(len(center))
        if len(inputs) < len(center):
            # the coefficients are in the subspace that the samples span
            basis, triangle = np.linalg.qr(coordinates.T)
            coordinates = triangle.T
        ones = np.ones(len(inputs))
        rows = np.column_stack([ones, coordinates, (target - origin) / unit])
        products = np.zeros((N_GROUPS, rows.shape[1], rows.shape[1]))
        for g in range(N_GROUPS):
            of_group = rows[group == g]
            products[g] = of_group.T @ (weights[group == g, None] * of_group)
        logs = np.empty(len(inputs))
        for g in range(N_GROUPS):
            line = _most_probable_line(np.delete(products, g, axis=0).sum(0))
            logs[group == g] = origin + unit * (rows[group == g, :-1] @ line)
        logs = logs.clip(target.min(), target.max())
        line = _most_probable_line(products.sum(0))
        of_all = cls(
            center=torch.from_numpy(center),
            scale=torch.from_numpy(scale),
            coefficients=torch.from_numpy(unit * (basis @ line[1:])),
            intercept=float(origin + unit * line[0]),
            bounds=(logs.min(), logs.max()),
        )
        return of_all, logs

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return values (n,)."""
        clipped = ((inputs - self.center) / self.scale).clamp(-CLIP, CLIP)
        return (clipped @ self.coefficients + self.intercept).clamp(*self.bounds)


@dataclass(frozen=True)
class QuantileForest:
    """Quantiles of residuals, averaged over trees.

    Attributes
    ----------
    roots : Tensor of shape (n_trees,)
        First node of each tree.
    below, above : Tensor of shape (n_nodes,)
        Next node for inputs up to the threshold, and next node for larger inputs. The
        next node of a leaf is the leaf itself.
    feature, threshold : Tensor of shape (n_nodes,)
        Index of the input that a node compares with its threshold, and this threshold.
    quantiles : Tensor of shape (n_nodes, n_levels)
        Quantiles at `LEVELS` for each leaf.
    depth : int
        Maximum number of comparisons per sample in a tree.
    center, scale : Tensor of shape (k,)
        Standardisation of the inputs. Trees compare inputs in single precision.

    References
    ----------
    Meinshausen (2006), "Quantile regression forests". Here, quantiles are averaged over
    trees.
    """

    roots: Tensor
    below: Tensor
    above: Tensor
    feature: Tensor
    threshold: Tensor
    quantiles: Tensor
    depth: int
    center: Tensor
    scale: Tensor

    @classmethod
    def fit(cls, inputs: Array, z: Array, weights: Array) -> "QuantileForest":
        """Fit trees to standardised residuals ``z`` (n,) and their absolute values."""
        bounded = z.clip(-OUTLYING, OUTLYING)
        forest = ExtraTreesRegressor(
            N_TREES,
            min_weight_fraction_leaf=min(LEAF / weights.sum(), 0.5),
            random_state=0,
        )
        moments = _standardisation(inputs, weights)
        center, scale = map(torch.from_numpy, moments)
        rounded = _single((torch.from_numpy(inputs) - center) / scale).numpy()
        forest.fit(rounded, np.column_stack([bounded, np.abs(bounded)]), weights)
        trees = [tree.tree_ for tree in forest.estimators_]
        roots = np.cumsum([0, *(tree.node_count for tree in trees)])
        offsets = np.repeat(roots[:-1], np.diff(roots))

        def joined(name: str) -> Array:
            return np.concatenate([getattr(tree, name) for tree in trees])

        def next_nodes(name: str) -> Tensor:
            children, nodes = joined(name), np.arange(len(offsets))
            return torch.from_numpy(np.where(children < 0, nodes, children + offsets))

        leaves = forest.apply(rounded) + roots[:-1]
        return cls(
            torch.from_numpy(roots[:-1]),
            next_nodes("children_left"),
            next_nodes("children_right"),
            torch.from_numpy(joined("feature").clip(0)),
            torch.from_numpy(joined("threshold")),
            torch.from_numpy(_leaf_quantiles(leaves, len(offsets), z, weights)),
            max(tree.max_depth for tree in trees),
            center,
            scale,
        )

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return quantiles (n, n_levels) at `LEVELS`, in increasing order."""
        rounded = _single((inputs - self.center) / self.scale).double()
        nodes = self.roots + torch.zeros_like(rounded[:, :1], dtype=torch.long)
        for _ in range(self.depth):
            is_above = rounded.gather(1, self.feature[nodes]) > self.threshold[nodes]
            nodes = torch.where(is_above, self.above[nodes], self.below[nodes])
        return self.quantiles[nodes].mean(1)


def _leaf_quantiles(leaves: Any, n_nodes: int, z: Array, weights: Array) -> Array:
    """Return quantiles (n_nodes, n_levels) of residuals (n,) in leaves (n, n_trees)."""
    quantiles = np.tile(SCORES, (n_nodes, 1))
    share = weights.sum() / (weights.sum() + HALF)
    for of_tree in leaves.T:
        order = np.argsort(of_tree, kind="stable")
        labels, starts = np.unique(of_tree[order], return_index=True)
        for leaf, rows in zip(labels, np.split(order, starts[1:]), strict=True):
            probabilities, values, n = _ranked(z[rows], weights[rows])
            of_leaf = np.interp(LEVELS, probabilities, values)
            quantiles[leaf] += share * n / (n + HALF_OF_LEAF) * (of_leaf - SCORES)
    return quantiles


@dataclass(frozen=True)
class ColumnNoise:
    """Noise of one column of targets; see the module docstring.

    Attributes
    ----------
    level : float
        Constant level of the noise.
    origin, unit : float
        Mean and standard deviation of predicted means.
    log_scale : LogScale
        Function that predicts the logarithm of the noise, without ``log_factor``.
    log_factor : float
        Logarithm of the factor by which the noise is multiplied.
    forest : QuantileForest
        Quantiles of standardised residuals.
    normal_scores, corrected : ndarray of shape (m,)
        Standard normal quantiles, and the corresponding normal scores of the forest's
        levels.
    at_nodes : Interpolation
        Values of the distribution at quadrature nodes.
    """

    level: float
    origin: float
    unit: float
    log_scale: LogScale
    log_factor: float
    forest: QuantileForest
    normal_scores: Array
    corrected: Array
    at_nodes: Interpolation

    @classmethod
    def fit(cls, residuals: Residuals, column: int, level: float) -> "ColumnNoise":
        """Fit the noise of a column to residuals, of which at least one is nonzero."""
        r, w = residuals.values[:, column], residuals.weights
        predictions = residuals.predictions
        variance = predictions.variance[:, column].numpy()
        size = np.abs(r)
        target = np.log(size + SMALLEST * np.average(size, weights=w))
        (origin,), (unit,) = _standardisation(predictions.mean[:, [column]].numpy(), w)
        origin, unit = float(origin), float(unit)
        inputs = _line_inputs(predictions, column, level, origin, unit).numpy()
        line, logs = LogScale.fit(inputs, target, w, residuals.group)
        noise = np.exp(2 * logs)

        def excess(log_factor: float) -> float:
            total = variance + np.exp(2 * log_factor) * noise
            return float(np.average(r**2 / total, weights=w)) - 1

        # with this factor, standardised residuals have a mean square of one
        low, high = _LOG_BOUNDS
        log_factor = brentq(excess, low, high) if excess(low) > 0 else low
        z = r / np.sqrt(variance + np.exp(2 * log_factor) * noise)
        inputs = _forest_inputs(predictions, column, torch.from_numpy(logs)).numpy()
        rows = np.empty((len(z), len(LEVELS)))
        for g in range(N_GROUPS):
            others, members = residuals.group != g, residuals.group == g
            forest = QuantileForest.fit(inputs[others], z[others], w[others])
            rows[members] = forest(torch.from_numpy(inputs[members])).numpy()
        nodes = np.tile(NODES, (len(rows), 1))
        rows = rows - (_values_at(nodes, rows) @ WEIGHTS)[:, None]
        probabilities, scores, n = _ranked(_scores_of(z, rows), w)
        normal = norm.ppf(probabilities.clip(1e-9, 1 - 1e-9))
        corrected = normal + n / (n + HALF) * (scores - normal)
        forest = QuantileForest.fit(inputs, z, w)
        at_nodes = Interpolation.at(_interpolated(NODES, normal, corrected))
        return cls(
            level=level,
            origin=origin,
            unit=unit,
            log_scale=line,
            log_factor=log_factor,
            forest=forest,
            normal_scores=normal,
            corrected=corrected,
            at_nodes=at_nodes,
        )

    def distribution(
        self, predictions: Predictions, column: int
    ) -> tuple[Tensor, Tensor]:
        """Return the noise (n,) relative to the level, and quantiles (n, n_levels)."""
        inputs = _line_inputs(predictions, column, self.level, self.origin, self.unit)
        logs = self.log_scale(inputs)
        rows = self.forest(_forest_inputs(predictions, column, logs))
        mean, std = self.at_nodes.moments(rows)
        variance = predictions.variance[:, column]
        scale = (logs + self.log_factor).exp()
        # with this noise, the variance is std² times the sum of the variances
        noise = std**2 * (variance + scale**2) - variance
        noise = torch.maximum(noise, (SMALLEST_NOISE * scale) ** 2).sqrt()
        return noise / self.level, rows - mean.unsqueeze(1)

    def at(self, scores: Array) -> Interpolation:
        """Return the interpolation at normal scores (s,)."""
        levels = _interpolated(scores, self.normal_scores, self.corrected)
        return Interpolation.at(levels)

    def standardised(self, rows: Array, scores: Array) -> Array:
        """Return standardised targets (n, s) for normal scores (n, s)."""
        levels = _interpolated(scores, self.normal_scores, self.corrected)
        return _values_at(levels, rows) / self._std(rows)

    def scores(self, rows: Array, standardised: Array) -> Array:
        """Return the normal scores (n,) of standardised targets (n,)."""
        levels = _scores_of(standardised * self._std(rows)[:, 0], rows)
        return _interpolated(levels, self.corrected, self.normal_scores)

    def _std(self, rows: Array) -> Array:
        """Return the standard deviation (n, 1) of scaled targets."""
        return self.at_nodes.moments(torch.from_numpy(rows))[1].numpy()[:, None]


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

        ``levels`` (c,) contains the standard deviations of constant noise.

        Notes
        -----
        For each column, fitting costs O(n k min(n, k)) for n residuals and k features,
        plus the fits of six forests.
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

        The arguments are the same as those of `Predictions.of`.
        """
        predictions = Predictions.of(features, x, mean, variance)
        on_cpu = {name: tensor.cpu() for name, tensor in vars(predictions).items()}
        return self.distributions(Predictions(**on_cpu))

    def distributions(self, predictions: Predictions) -> tuple[Tensor, Tensor]:
        """Return the noise (b, c) relative to the levels, and quantiles (b, c, q)."""
        pairs = [c.distribution(predictions, k) for k, c in enumerate(self.columns)]
        noise, quantiles = (torch.stack(v, 1) for v in zip(*pairs, strict=True))
        return noise, quantiles

    def standardised(self, rows: Array, scores: Array) -> Array:
        """Return standardised targets (n, c, s) for normal scores (n, c, s)."""
        columns = zip(
            self.columns, rows.swapaxes(0, 1), scores.swapaxes(0, 1), strict=True
        )
        return np.stack([c.standardised(r, s) for c, r, s in columns], axis=1)

    def scores(self, rows: Array, standardised: Array) -> Array:
        """Return the normal scores (n, c) of standardised targets (n, c)."""
        columns = zip(self.columns, rows.swapaxes(0, 1), standardised.T, strict=True)
        return np.stack([c.scores(r, z) for c, r, z in columns], axis=1)


def _line_inputs(
    predictions: Predictions, column: int, level: float, origin: float, unit: float
) -> Tensor:
    """Return the inputs (n, i + 4) of the linear function."""
    mean = (predictions.mean[:, column] - origin) / unit
    deviation = (predictions.variance[:, column] + level**2).log() / 2
    moments = torch.stack([mean, mean**2, mean.abs(), deviation], 1)
    return torch.cat([predictions.features, moments], 1)


def _forest_inputs(predictions: Predictions, column: int, logs: Tensor) -> Tensor:
    """Return the inputs (n, p + 3) of the forest."""
    std = predictions.variance[:, column].sqrt()
    moments = torch.stack([predictions.mean[:, column], std, logs], 1)
    return torch.cat([predictions.inputs, moments], 1)


def _standardisation(inputs: Array, weights: Array) -> tuple[Array, Array]:
    """Return each column's weighted mean and standard deviation (1 if constant)."""
    center, scale = center_and_scale(inputs, weights)
    return center, np.where(scale > 1e-9 * np.abs(center), scale, 1.0)


def _single(values: Tensor) -> Tensor:
    """Convert values to finite single-precision values."""
    return values.clamp(-1e30, 1e30).float()


def _most_probable_line(products: Array) -> Array:
    """Return the intercept and the coefficients (k + 1,) that maximise the evidence.

    ``products`` (k + 2, k + 2) contains weighted sums over samples, of products of the
    number one, the k inputs and the target.
    """
    n_samples, sums = products[0, 0], products[0, 1:]
    centred = products[1:, 1:] - np.outer(sums, sums) / n_samples
    eigenvalues, vectors = np.linalg.eigh(centred[:-1, :-1])
    eigenvalues = eigenvalues.clip(0)
    projections = vectors.T @ centred[:-1, -1:]
    best = most_probable(eigenvalues, projections**2, centred[-1:, -1], n_samples)
    shrunk = projections / (eigenvalues[:, None] + best.ridge)
    coefficients = (vectors @ shrunk)[:, 0]
    intercept = (sums[-1] - sums[:-1] @ coefficients) / n_samples
    return np.append(intercept, coefficients)


def _ranked(values: Array, weights: Array) -> tuple[Array, Array, float]:
    """Return probabilities (2n,), sorted values (2n,) and the sum of weights.

    The i-th smallest of n values has the probability i / (n + 1). A value of weight two
    is equivalent to two values.
    """
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    half, n = np.maximum(weights - 1, 0) / 2, weights.sum()
    middle = np.cumsum(weights) - weights / 2 + 0.5
    ends = np.stack([middle - half, middle + half], axis=1)
    return ends.ravel() / (n + 1), np.repeat(values, 2), n


def _interpolated(values: Array, x: Array, y: Array) -> Array:
    """Interpolate ``y`` between increasing ``x``; extrapolate with a slope of one."""
    inside = np.interp(values, x, y)
    return np.asarray(inside + _beyond(values, x[0], x[-1]))


def _beyond(values: Array, low: Any, high: Any) -> Array:
    """Return the signed distances of values from an interval."""
    return np.asarray(np.minimum(values - low, 0) + np.maximum(values - high, 0))


def _values_at(scores: Array, quantiles: Array) -> Array:
    """Return values (n, s) at normal scores (n, s), given quantiles (n, q)."""
    pairs = zip(scores, quantiles, strict=True)
    inside = np.array([np.interp(score, SCORES, row) for score, row in pairs])
    return inside + _beyond(scores, SCORES[0], SCORES[-1])


def _scores_of(values: Array, quantiles: Array) -> Array:
    """Return normal scores (n,) of values (n,), given quantiles (n, q)."""
    pairs = zip(values, quantiles, strict=True)
    inside = np.array([np.interp(value, row, SCORES) for value, row in pairs])
    return inside + _beyond(values, quantiles[:, 0], quantiles[:, -1])
