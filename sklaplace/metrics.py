"""Metrics of uncertainty that scikit-learn lacks, with its signatures.

Classification: calibration error, multi-class Brier score. Regression: scores of a
Gaussian prediction ``N(mean, std²)``, coverage of intervals. Out-of-distribution
detection: ``ood_auroc``.
"""

from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from sklearn import config_context
from sklearn.metrics import roc_auc_score
from sklearn.utils import check_array, check_consistent_length, column_or_1d

Floats = NDArray[np.float64]

# Sums of a thousand float32 probabilities differ from one by about 1e-6.
_SUM_TOLERANCE = 1e-4


def expected_calibration_error(
    y_true: Any,
    y_proba: Any,
    *,
    n_bins: int = 15,
    labels: Any = None,
    sample_weight: Any = None,
) -> float:
    """Mean absolute difference of confidence and accuracy over bins of confidence.

    Zero for a calibrated classifier and many samples. It is biased upwards for few
    samples per bin and does not measure accuracy, so report it next to a proper
    scoring rule (log loss, Brier score).

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Class labels.
    y_proba : array-like of shape (n, K) or (n,)
        Probabilities, one column per class in the order of ``labels``; a 1d
        array has those of the second of two classes.
    n_bins : int, default=15
        Number of bins of equal width, closed on the right.
    labels : array-like of shape (K,), default=None
        Classes in the order of the columns, such as ``classes_``. By default
        the sorted values of ``y_true``, which then must contain all classes.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Between 0 (best) and 1.

    Raises
    ------
    ValueError
        If shapes or classes are inconsistent, or ``y_proba`` has no probabilities.

    References
    ----------
    Guo, Pleiss, Sun, Weinberger (2017), "On calibration of modern neural
    networks", eq. (3).
    """
    if not isinstance(n_bins, Integral) or n_bins < 1:
        raise ValueError(f"n_bins={n_bins!r} is not valid. Use at least 1.")
    proba, codes = _check_proba(y_true, y_proba, labels)
    weights = _check_weights(sample_weight, codes)
    correct, confidence = proba.argmax(axis=1) == codes, proba.max(axis=1)
    bins = np.searchsorted(np.linspace(0, 1, n_bins + 1)[1:-1], confidence)
    # Per bin, |Σ w (correct − confidence)| is weight times difference of the means.
    gaps = np.bincount(bins, weights * (correct - confidence), minlength=n_bins)
    return float(np.abs(gaps).sum() / weights.sum())


def brier_score(
    y_true: Any, y_proba: Any, *, labels: Any = None, sample_weight: Any = None
) -> float:
    """Squared distance between probabilities and outcome, summed over classes.

    A proper scoring rule that, unlike the log loss, is bounded for confident errors.
    For two classes it is twice the Brier score of one of them.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Class labels.
    y_proba : array-like of shape (n, K) or (n,)
        Probabilities, one column per class in the order of ``labels``; a 1d
        array has those of the second of two classes.
    labels : array-like of shape (K,), default=None
        Classes in the order of the columns, such as ``classes_``. By default
        the sorted values of ``y_true``, which then must contain all classes.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Mean over samples, between 0 (best) and 2.

    Raises
    ------
    ValueError
        If shapes or classes are inconsistent, or ``y_proba`` has no probabilities.

    References
    ----------
    Brier (1950), "Verification of forecasts expressed in terms of probability",
    Monthly Weather Review 78(1).
    """
    proba, codes = _check_proba(y_true, y_proba, labels)
    errors = proba.copy()
    errors[np.arange(len(codes)), codes] -= 1
    return _average((errors**2).sum(axis=1), sample_weight)


def gaussian_nll(
    y_true: Any, y_mean: Any, y_std: Any, *, sample_weight: Any = None
) -> float:
    """Negative log density of the targets under a Gaussian prediction.

    A proper scoring rule to compare predictive distributions; dominated by outliers
    that were predicted confidently (``gaussian_crps`` less so).

    Parameters
    ----------
    y_true : array-like of shape (n,) or (n, C)
        Targets.
    y_mean : array-like of shape (n,) or (n, C)
        Predicted means.
    y_std : array-like of shape (n,) or (n, C)
        Predicted standard deviations, observation noise included; positive.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Nats per target value; lower is better.

    Raises
    ------
    ValueError
        If the shapes differ or a standard deviation is not positive.

    References
    ----------
    Gneiting, Raftery (2007), "Strictly proper scoring rules, prediction, and
    estimation", Journal of the American Statistical Association 102(477).
    """
    residuals, std = _check_gaussian(y_true, y_mean, y_std)
    nats = 0.5 * (residuals / std) ** 2 + np.log(std) + 0.5 * np.log(2 * np.pi)
    return _average(nats.mean(axis=1), sample_weight)


def gaussian_crps(
    y_true: Any, y_mean: Any, y_std: Any, *, sample_weight: Any = None
) -> float:
    """Continuous ranked probability score of a Gaussian prediction.

    ``∫ (F(t) − 1{t ≥ y})² dt`` for the predicted distribution function ``F``: a
    proper scoring rule that grows linearly with the error, and equals the absolute
    error for a standard deviation of zero.

    Parameters
    ----------
    y_true : array-like of shape (n,) or (n, C)
        Targets.
    y_mean : array-like of shape (n,) or (n, C)
        Predicted means.
    y_std : array-like of shape (n,) or (n, C)
        Predicted standard deviations, observation noise included; positive.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Mean over target values, in the unit of the target; lower is better.

    Raises
    ------
    ValueError
        If the shapes differ or a standard deviation is not positive.

    References
    ----------
    Gneiting, Raftery (2007), "Strictly proper scoring rules, prediction, and
    estimation", Journal of the American Statistical Association 102(477),
    section 4.2.
    """
    residuals, std = _check_gaussian(y_true, y_mean, y_std)
    z = residuals / std
    scores = z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - np.pi**-0.5
    return _average((std * scores).mean(axis=1), sample_weight)


def interval_coverage(
    y_true: Any, y_interval: Any, *, sample_weight: Any = None
) -> float:
    """Fraction of targets inside their predicted intervals.

    To be compared with the nominal coverage. Wide intervals have a high coverage, too,
    so report it next to a proper scoring rule.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Targets.
    y_interval : array-like of shape (n, 2)
        Lower and upper bounds, both included.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Between 0 and 1.

    Raises
    ------
    ValueError
        If shapes are inconsistent or a lower bound lies above its upper bound.
    """
    targets = _vector(y_true, "y_true")
    interval = _floats(y_interval, "y_interval", ensure_2d=True)
    check_consistent_length(targets, interval)
    if interval.shape[1] != 2:
        raise ValueError(
            f"y_interval has {interval.shape[1]} columns. Give it two: the bounds."
        )
    lower, upper = interval.T
    if (lower > upper).any():
        row = int(np.argmax(lower > upper))
        raise ValueError(
            f"y_interval has the lower bound {lower[row]} above the upper bound "
            f"{upper[row]} in row {row}. Give bounds in ascending order."
        )
    return _average((lower <= targets) & (targets <= upper), sample_weight)


def ood_auroc(confidence_in: Any, confidence_out: Any) -> float:
    """Area under the ROC curve of out-of-distribution detection by confidence.

    The probability that the confidence of an in-distribution sample is larger than
    that of an out-of-distribution sample; ties count half.

    Parameters
    ----------
    confidence_in : array-like of shape (n,)
        Confidence of in-distribution samples: any score that should be larger for them
        than for others, such as the largest probability or the negative entropy.
    confidence_out : array-like of shape (m,)
        Confidence of out-of-distribution samples.

    Returns
    -------
    float
        Between 0 and 1 (best); 0.5 is chance.

    Raises
    ------
    ValueError
        If an input is empty, not finite or not one-dimensional.

    Notes
    -----
    O((n + m) log(n + m)).

    References
    ----------
    Hendrycks, Gimpel (2017), "A baseline for detecting misclassified and
    out-of-distribution examples in neural networks", ICLR.
    """
    inside = _vector(confidence_in, "confidence_in")
    outside = _vector(confidence_out, "confidence_out")
    is_inside = np.repeat([1, 0], [len(inside), len(outside)])
    return float(roc_auc_score(is_inside, np.concatenate([inside, outside])))


def neg_gaussian_nll_scorer(
    estimator: Any, X: Any, y: Any, sample_weight: Any = None
) -> float:
    """Log density of held-out targets, a ``scoring`` for model selection.

    Prefer it to R² for the selection of a prior precision: in linearised predictions
    only the standard deviation depends on the prior.

    Parameters
    ----------
    estimator : fitted regressor
        One whose ``predict`` takes ``return_std=True``, with standard
        deviations that include observation noise.
    X : array-like of shape (n, n_features)
        Held-out samples.
    y : array-like of shape (n,) or (n, C)
        Their targets.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Minus ``gaussian_nll``: nats per target value; higher is better.

    Raises
    ------
    ValueError
        If a predicted standard deviation is not positive.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklearn.linear_model import BayesianRidge
    >>> from sklearn.model_selection import cross_val_score
    >>> X, y = load_diabetes(return_X_y=True)
    >>> scores = cross_val_score(BayesianRidge(), X, y, scoring=neg_gaussian_nll_scorer)
    >>> scores.shape
    (5,)
    """
    y_mean, y_std = estimator.predict(X, return_std=True)
    return -gaussian_nll(y, y_mean, y_std, sample_weight=sample_weight)


def _average(values: NDArray[Any], sample_weight: Any) -> float:
    """Weighted mean over samples."""
    weights = _check_weights(sample_weight, values)
    return float(values @ weights / weights.sum())


def _check_weights(sample_weight: Any, values: NDArray[Any]) -> Floats:
    """One weight per value, ones by default; raise unless their sum is positive."""
    if sample_weight is None:
        return np.ones(len(values))
    weights = _vector(sample_weight, "sample_weight", ensure_non_negative=True)
    check_consistent_length(values, weights)
    if weights.sum() == 0:
        raise ValueError("sample_weight sums to zero. Give some row a positive weight.")
    return weights


def _check_proba(
    y_true: Any, y_proba: Any, labels: Any
) -> tuple[Floats, NDArray[np.intp]]:
    """Probabilities (n, K) and the columns of the true classes (n,)."""
    proba = _floats(y_proba, "y_proba")
    if proba.ndim == 1:
        proba = np.column_stack([1 - proba, proba])
    truth = _column(y_true)
    check_consistent_length(truth, proba)
    _check_sums(proba)
    return proba, _encode(truth, labels, proba.shape[1])


def _check_sums(proba: Floats) -> None:
    """Raise unless the rows are probabilities."""
    if proba.min() < 0 or proba.max() > 1 + _SUM_TOLERANCE:
        raise ValueError(
            f"y_proba has values between {proba.min():.4g} and {proba.max():.4g}. "
            "Give probabilities, not logits."
        )
    sums = proba.sum(axis=1)
    if np.abs(sums - 1).max() > _SUM_TOLERANCE:
        raise ValueError(
            f"The rows of y_proba sum to values between {sums.min():.4g} and "
            f"{sums.max():.4g}. Divide each row by its sum."
        )


def _encode(truth: NDArray[Any], labels: Any, n_columns: int) -> NDArray[np.intp]:
    """Column of each true class; raise where labels and columns differ."""
    classes = np.unique(truth) if labels is None else _column(labels)
    if len(classes) != n_columns:
        source = "y_true" if labels is None else "labels"
        raise ValueError(
            f"y_proba has {n_columns} columns, but {source} has {len(classes)} "
            "classes. Give labels=estimator.classes_, one per column."
        )
    order = np.argsort(classes)
    position = np.searchsorted(classes, truth, sorter=order).clip(max=n_columns - 1)
    codes = order[position]
    if unknown := truth[classes[codes] != truth].tolist():
        raise ValueError(
            f"y_true has the class {unknown[0]!r}, which is not in labels. "
            "Give labels=estimator.classes_, one per column."
        )
    return codes


def _check_gaussian(y_true: Any, y_mean: Any, y_std: Any) -> tuple[Floats, Floats]:
    """Residuals and standard deviations, (n, C) each."""
    given = {"y_true": y_true, "y_mean": y_mean, "y_std": y_std}
    arrays = [_floats(values, name) for name, values in given.items()]
    truth, mean, std = (a.reshape(-1, 1) if a.ndim == 1 else a for a in arrays)
    check_consistent_length(truth, mean, std)
    # Broadcasting (n, 1) against (n, C) would compare different targets.
    if not truth.shape == mean.shape == std.shape:
        raise ValueError(
            f"y_true, y_mean and y_std have {truth.shape[1]}, {mean.shape[1]} and "
            f"{std.shape[1]} columns. Give all three one column per target."
        )
    if std.min() <= 0:
        raise ValueError(
            f"y_std has the value {std.min()}. Standard deviations are positive; "
            "include the observation noise."
        )
    return truth - mean, std


def _floats(values: Any, name: str, **options: Any) -> Floats:
    """Finite numbers as a float64 array."""
    options = {"ensure_2d": False, "input_name": name} | options
    with config_context(array_api_dispatch=False):  # tensors become arrays
        return check_array(values, dtype=np.float64, **options)


def _vector(values: Any, name: str, **options: Any) -> Floats:
    """Finite numbers as a float64 vector."""
    return _column(_floats(values, name, **options))


def _column(values: Any) -> NDArray[Any]:
    """Values of any type as a vector."""
    with config_context(array_api_dispatch=False):
        return column_or_1d(values)
