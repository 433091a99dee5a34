"""Check targets, predictions and weights."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn import config_context
from sklearn.base import BaseEstimator
from sklearn.pipeline import Pipeline
from sklearn.utils import check_array, check_consistent_length, column_or_1d

Floats = NDArray[np.float64]
# types of required and optional arguments
Values = ArrayLike
Given = ArrayLike | None

# The sum of a thousand float32 probabilities differs from one by about 1e-6.
_SUM_TOLERANCE = 1e-4


def average(values: np.ndarray, sample_weight: Given) -> float:
    """Return the weighted mean of the values over the samples."""
    return float(np.average(values, weights=check_weights(sample_weight, values)))


def last_step(estimator: Any, X: Any = None) -> tuple[Any, Any]:
    """Return the last step of a fitted pipeline, and X transformed by the other steps.

    Pipelines and searches lack methods such as ``predict_interval``. All other
    estimators are returned unchanged. If ``X`` is None, the second return value is
    None.
    """
    estimator = getattr(estimator, "best_estimator_", estimator)
    while isinstance(estimator, Pipeline) and len(estimator) > 0:
        if X is not None and len(estimator) > 1:
            X = estimator[:-1].transform(X)
        estimator = getattr(estimator[-1], "best_estimator_", estimator[-1])
    return estimator, X


def check_weights(sample_weight: Given, values: np.ndarray) -> Floats:
    """Return weights (by default, ones); raise ValueError if their sum is zero."""
    if sample_weight is None:
        return np.ones(len(values))
    weights = as_vector(sample_weight, "sample_weight", ensure_non_negative=True)
    check_consistent_length(values, weights)
    if weights.sum() == 0:
        raise ValueError("sample_weight sums to zero. At least one must be positive.")
    return weights


def check_proba(
    y_true: Values, y_proba: Values, labels: Given
) -> tuple[Floats, NDArray[np.intp]]:
    """Return probabilities (n, K) and the columns of the true classes (n,).

    Raise ValueError unless ``y_proba`` has probabilities, with a column per class.
    """
    proba = as_floats(y_proba, "y_proba")
    if proba.ndim == 1:  # of the second of two classes
        proba = np.column_stack([1 - proba, proba])
    truth = as_column(y_true)
    check_consistent_length(truth, proba)
    _check_sums(proba)
    return proba, encode(truth, labels, "y_proba", proba.shape[1])


def _check_sums(proba: Floats) -> None:
    """Raise ValueError unless the rows are probabilities."""
    sums = proba.sum(axis=1)
    is_between = proba.min() >= 0 and proba.max() <= 1 + _SUM_TOLERANCE
    if not is_between or np.abs(sums - 1).max() > _SUM_TOLERANCE:
        raise ValueError(
            f"y_proba has values between {proba.min():.4g} and {proba.max():.4g}, and "
            f"row sums between {sums.min():.4g} and {sums.max():.4g}. "
            "Pass probabilities, not logits, and divide each row by its sum."
        )


def encode(
    truth: np.ndarray, labels: Given, name: str, n_columns: int
) -> NDArray[np.intp]:
    """Return the column of each true class; raise ValueError for unknown classes."""
    classes = np.unique(truth) if labels is None else as_column(labels)
    if len(classes) != n_columns:
        source = "y_true" if labels is None else "labels"
        raise ValueError(
            f"{name} has {n_columns} columns, but {source} has {len(classes)} "
            "classes. Pass labels=estimator.classes_, one label per column."
        )
    # Columns need not be sorted. Positions are clipped, because an unknown class can be
    # larger than all others.
    order = np.argsort(classes)
    position = np.searchsorted(classes, truth, sorter=order).clip(max=n_columns - 1)
    codes = order[position]
    if unknown := truth[classes[codes] != truth].tolist():
        raise ValueError(
            f"y_true has the class {unknown[0]!r}, which is not in labels. "
            "Pass labels=estimator.classes_, one label per column."
        )
    return codes


def check_gaussian(
    y_true: Values, y_mean: Values, y_std: Values
) -> tuple[Floats, Floats]:
    """Return residuals and standard deviations, each of shape (n, C)."""
    named = {"y_true": y_true, "y_mean": y_mean, "y_std": y_std}
    arrays = [as_floats(values, name) for name, values in named.items()]
    truth, mean, std = (a.reshape(-1, 1) if a.ndim == 1 else a for a in arrays)
    check_consistent_length(truth, mean, std)
    # Broadcasting (n, 1) against (n, C) would mix up targets.
    if not truth.shape == mean.shape == std.shape:
        raise ValueError(
            f"y_true, y_mean and y_std have {truth.shape[1]}, {mean.shape[1]} and "
            f"{std.shape[1]} columns. All three need one column per target."
        )
    check_std(std)
    return truth - mean, std


def check_std(std: Floats) -> None:
    """Raise ValueError unless all standard deviations are positive."""
    if std.min() <= 0:
        raise ValueError(
            f"y_std has the value {std.min()}. Standard deviations must be positive "
            "and include the observation noise."
        )


def check_interval(
    y_true: Values, y_interval: Values, name: str = "y_interval"
) -> tuple[Floats, Floats, Floats]:
    """Return targets, lower bounds and upper bounds, each of shape (n,)."""
    # more axes are allowed here, because the message below explains them better
    interval = as_floats(y_interval, name, allow_nd=True)
    if interval.shape[1:] != (2,):
        columns = f"{interval.shape[1]} columns" if interval.ndim == 2 else ""
        raise ValueError(
            f"{name} has {columns or f'shape {interval.shape}'}. Pass lower and "
            "upper bounds of one target and one coverage, (n, 2), such as "
            f"{name}[:, 0] with y_true[:, 0]."
        )
    targets = as_vector(y_true, "y_true")
    check_consistent_length(targets, interval)
    lower, upper = interval.T
    if (lower > upper).any():
        row = int(np.argmax(lower > upper))
        raise ValueError(
            f"{name} has the lower bound {lower[row]} above the upper bound "
            f"{upper[row]} in row {row}. Pass bounds in ascending order."
        )
    return targets, lower, upper


def check_quantiles(
    y_true: Values, y_quantiles: Values, levels: Values
) -> tuple[Floats, Floats]:
    """Return residuals ``y − q`` (n, n_levels) and levels (n_levels,)."""
    targets, order = as_vector(y_true, "y_true"), as_vector(levels, "levels")
    quantiles = as_floats(y_quantiles, "y_quantiles", ensure_2d=True)
    check_consistent_length(targets, quantiles)
    if order[0] <= 0 or order[-1] >= 1 or (np.diff(order) <= 0).any():
        raise ValueError(
            f"levels={order.tolist()} are not ascending numbers between 0 and 1. "
            "Pass the levels of the quantiles, such as [0.05, 0.5, 0.95]."
        )
    if quantiles.shape[1] != len(order):
        raise ValueError(
            f"y_quantiles has {quantiles.shape[1]} columns, but there are {len(order)} "
            "levels. Pass one column per level: predict_quantiles(X, levels)."
        )
    if (crossed := (np.diff(quantiles) < 0).any(axis=1)).any():
        raise ValueError(
            f"y_quantiles has quantiles that cross in row {int(np.argmax(crossed))}. "
            "Pass quantiles in ascending order, such as np.sort(y_quantiles, axis=1)."
        )
    return targets[:, None] - quantiles, order


def as_floats(values: Values, name: str, **options: object) -> Floats:
    """Return values as a float64 array; raise ValueError unless all are finite."""
    options = {"ensure_2d": False, "input_name": name} | options
    with config_context(array_api_dispatch=False):  # tensors become arrays
        return check_array(values, dtype=np.float64, **options)


def as_vector(values: Values, name: str, **options: object) -> Floats:
    """Return values as a float64 vector; raise ValueError unless all are finite."""
    return as_column(as_floats(values, name, **options))


def as_column(values: Values) -> np.ndarray:
    """Return values of any dtype as a vector."""
    with config_context(array_api_dispatch=False):
        return column_or_1d(values)


def misclassified(
    classifier: BaseEstimator, proba: np.ndarray, y: Values
) -> NDArray[np.bool_]:
    """Return whether the most probable class differs from the true class, (n,)."""
    labels = as_column(y)
    check_consistent_length(labels, proba)
    predicted = np.asarray(classifier.classes_)[proba.argmax(axis=1)]
    return np.asarray(labels != predicted)
