"""Metrics of class probabilities."""

import numpy as np
from numpy.typing import NDArray

from sklaplace.core.checks import check_count, check_option
from sklaplace.metrics.checks import (
    Floats,
    Given,
    Values,
    average,
    check_proba,
    check_weights,
)

STRATEGIES = "quantile", "uniform"
KINDS = "per_class", "top_label"


def reliability_curve(
    y_true: Values,
    y_proba: Values,
    *,
    kind: str = "top_label",
    n_bins: int = 15,
    strategy: str = "uniform",
    labels: Given = None,
    sample_weight: Given = None,
) -> tuple[Floats, Floats, Floats]:
    """Compute the empirical frequency and mean predicted probability per bin.

    A reliability diagram plots the two values against each other, for two or more
    classes. For a calibrated classifier, the two values are almost equal in bins with
    many samples.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Class labels.
    y_proba : array-like of shape (n, K) or (n,)
        Probabilities, one column per class in the order of ``labels``. For two classes,
        the probabilities of the second class suffice.
    kind : {"top_label", "per_class"}, default="top_label"
        ``"top_label"`` evaluates only the most probable class. ``"per_class"``
        evaluates each class against all others.
    n_bins : int, default=15
        Number of bins.
    strategy : {"uniform", "quantile"}, default="uniform"
        ``"uniform"`` bins have equal width and are closed on the right. ``"quantile"``
        bins have equal weight. Samples with equal probability share a bin.
    labels : array-like of shape (K,), default=None
        Classes in the order of the columns, such as ``classes_``. Defaults to the
        sorted unique values of ``y_true``, which must contain all classes.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    frequency : ndarray of shape (n_bins,), or (K, n_bins) per class
        Fraction of the bin's samples that belong to the class; nan in empty bins.
    mean_proba : ndarray of the same shape
        Mean predicted probability in the bin; nan in empty bins.
    weight : ndarray of the same shape
        Number of samples in the bin, or sum of their weights.

    Raises
    ------
    ValueError
        If shapes or classes are inconsistent, ``y_proba`` does not contain
        probabilities, or an option is unknown.

    See Also
    --------
    sklaplace.plotting.ReliabilityDisplay : Plot of the curve.
    sklearn.calibration.calibration_curve : Curve for two classes, without empty bins.

    References
    ----------
    Guo, Pleiss, Sun, Weinberger (2017), "On calibration of modern neural
    networks", section 2.

    Examples
    --------
    >>> from sklaplace.metrics import reliability_curve
    >>> y_proba = [[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]]
    >>> frequency, mean_proba, weight = reliability_curve(
    ...     [0, 1, 1, 1], y_proba, n_bins=4
    ... )
    >>> frequency
    array([nan, nan, 1. , 0.5])
    >>> mean_proba
    array([ nan, nan, 0.65, 0.85])
    >>> weight
    array([0., 0., 2., 2.])
    """
    check_option("kind", kind, KINDS)
    check_option("strategy", strategy, STRATEGIES)
    n_bins = check_count("n_bins", n_bins)
    proba, codes = check_proba(y_true, y_proba, labels)
    weights = check_weights(sample_weight, codes)
    # whether each column is that of the true class, (n, K)
    hits = codes[:, None] == np.arange(proba.shape[1])
    if kind == "top_label":
        hits = (proba.argmax(axis=1) == codes)[:, None]
        proba = proba.max(axis=1, keepdims=True)
    # for each class, or only for the top label: sums of weighted hits, of weighted
    # probabilities, and of weights, per bin
    sums = []
    for hit, values in zip(hits.T, proba.T, strict=True):
        if strategy == "uniform":
            # by the inner edges, so that bins are closed on the right
            bins = np.searchsorted(np.linspace(0, 1, n_bins + 1)[1:-1], values)
        else:
            bins = _bins_of_equal_weight(values, weights, n_bins)
        summands = weights * hit, weights * values, weights
        sums.append([np.bincount(bins, summand, n_bins) for summand in summands])
    totals = np.swapaxes(sums, 0, 1)  # (3, number of curves, n_bins)
    hit_sums, proba_sums, weight = totals if kind == "per_class" else totals[:, 0]
    divisor = np.where(weight > 0, weight, np.nan)  # empty bins become nan
    return hit_sums / divisor, proba_sums / divisor, weight


def expected_calibration_error(
    y_true: Values,
    y_proba: Values,
    *,
    n_bins: int = 15,
    labels: Given = None,
    sample_weight: Given = None,
) -> float:
    """Compute the mean absolute difference between confidence and accuracy over bins.

    For a calibrated classifier, the error tends to zero as the number of samples grows.
    The error is biased upwards if bins have few samples, and it does not measure
    accuracy. Therefore, also report a proper scoring rule (log loss or Brier score).

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Class labels.
    y_proba : array-like of shape (n, K) or (n,)
        Probabilities, one column per class in the order of ``labels``. For two classes,
        the probabilities of the second class suffice.
    n_bins : int, default=15
        Number of bins of equal width, closed on the right.
    labels : array-like of shape (K,), default=None
        Classes in the order of the columns, such as ``classes_``. Defaults to the
        sorted unique values of ``y_true``, which must contain all classes.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Error between 0 (best) and 1.

    Raises
    ------
    ValueError
        If shapes or classes are inconsistent, or ``y_proba`` does not contain
        probabilities.

    See Also
    --------
    adaptive_calibration_error : Error over all classes, with bins of equal weight.
    maximum_calibration_error : Largest difference instead of the mean difference.
    reliability_curve : Frequency and mean probability per bin.

    References
    ----------
    Guo, Pleiss, Sun, Weinberger (2017), "On calibration of modern neural
    networks", eq. (3).

    Examples
    --------
    >>> from sklaplace.metrics import expected_calibration_error
    >>> y_proba = [[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]]
    >>> expected_calibration_error([0, 1, 1, 1], y_proba, n_bins=4)
    0.35
    """
    frequency, confidence, weight = reliability_curve(
        y_true, y_proba, n_bins=n_bins, labels=labels, sample_weight=sample_weight
    )
    return float(np.nansum(np.abs(frequency - confidence) * weight) / weight.sum())


def maximum_calibration_error(
    y_true: Values,
    y_proba: Values,
    *,
    n_bins: int = 15,
    labels: Given = None,
    sample_weight: Given = None,
) -> float:
    """Compute the largest difference between confidence and accuracy over bins.

    Use this metric if every confidence must be reliable. A bin with few samples can
    determine the result, so also check the sample counts in a `ReliabilityDisplay`.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Class labels.
    y_proba : array-like of shape (n, K) or (n,)
        Probabilities, one column per class in the order of ``labels``. For two classes,
        the probabilities of the second class suffice.
    n_bins : int, default=15
        Number of bins of equal width, closed on the right.
    labels : array-like of shape (K,), default=None
        Classes in the order of the columns, such as ``classes_``. Defaults to the
        sorted unique values of ``y_true``, which must contain all classes.
    sample_weight : array-like of shape (n,), default=None
        Sample weights. Bins with zero weight are ignored.

    Returns
    -------
    float
        Error between 0 (best) and 1. It is at least the expected calibration error.

    Raises
    ------
    ValueError
        If shapes or classes are inconsistent, or ``y_proba`` does not contain
        probabilities.

    See Also
    --------
    expected_calibration_error : Mean difference.
    sklaplace.plotting.ReliabilityDisplay : Plot of the differences.

    References
    ----------
    Guo, Pleiss, Sun, Weinberger (2017), "On calibration of modern neural
    networks", eq. (5).

    Examples
    --------
    >>> from sklaplace.metrics import maximum_calibration_error
    >>> y_proba = [[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]]
    >>> maximum_calibration_error([0, 1, 1, 1], y_proba, n_bins=4)
    0.35
    """
    frequency, confidence, _ = reliability_curve(
        y_true, y_proba, n_bins=n_bins, labels=labels, sample_weight=sample_weight
    )
    return float(np.nanmax(np.abs(frequency - confidence)))


def adaptive_calibration_error(
    y_true: Values,
    y_proba: Values,
    *,
    n_bins: int = 15,
    labels: Given = None,
    sample_weight: Given = None,
) -> float:
    """Compute the mean calibration error over all classes and bins of equal weight.

    If most probabilities are close to zero or one, most bins of equal width are nearly
    empty, and the expected calibration error depends on few samples. The adaptive
    calibration error uses bins of equal weight, and includes all classes.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Class labels.
    y_proba : array-like of shape (n, K) or (n,)
        Probabilities, one column per class in the order of ``labels``. For two classes,
        the probabilities of the second class suffice.
    n_bins : int, default=15
        Number of bins per class. Samples with equal probability share a bin, so the
        result does not depend on the order of the samples.
    labels : array-like of shape (K,), default=None
        Classes in the order of the columns, such as ``classes_``. Defaults to the
        sorted unique values of ``y_true``, which must contain all classes.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Error between 0 (best) and 1. Each bin is weighted by the total weight of its
        samples. These totals can differ if there are ties or if n is not a multiple of
        ``n_bins``.

    Raises
    ------
    ValueError
        If shapes or classes are inconsistent, or ``y_proba`` does not contain
        probabilities.

    See Also
    --------
    expected_calibration_error : Error of the most probable class, bins of equal width.
    reliability_curve : Frequency and mean probability per bin.

    Notes
    -----
    The cost is O(K n log n).

    References
    ----------
    Nixon, Dusenberry, Zhang, Jerfel, Tran (2019), "Measuring calibration in deep
    learning", CVPR workshops, section 3.

    Examples
    --------
    >>> from sklaplace.metrics import adaptive_calibration_error
    >>> y_proba = [[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]]
    >>> adaptive_calibration_error([0, 1, 1, 1], y_proba, n_bins=2)
    0.35
    """
    frequency, mean_proba, weight = reliability_curve(
        y_true,
        y_proba,
        kind="per_class",
        n_bins=n_bins,
        strategy="quantile",
        labels=labels,
        sample_weight=sample_weight,
    )
    return float(np.nansum(np.abs(frequency - mean_proba) * weight) / weight.sum())


def class_sharpness(
    y_true: Values,
    y_proba: Values,
    *,
    labels: Given = None,
    sample_weight: Given = None,
) -> Floats:
    """Compute the mean predicted probability of each class over samples of this class.

    The sharpness is one for a classifier that is certain and correct. Also check the
    calibration: of two calibrated classifiers, the sharper one is better.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Class labels.
    y_proba : array-like of shape (n, K) or (n,)
        Probabilities, one column per class in the order of ``labels``. For two classes,
        the probabilities of the second class suffice.
    labels : array-like of shape (K,), default=None
        Classes in the order of the columns, such as ``classes_``. Defaults to the
        sorted unique values of ``y_true``, which must contain all classes.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    ndarray of shape (K,)
        Sharpness between 0 and 1 (sharpest); nan for classes without samples.

    Raises
    ------
    ValueError
        If shapes or classes are inconsistent, or ``y_proba`` does not contain
        probabilities.

    See Also
    --------
    reliability_curve : Calibration of the probabilities.
    sharpness : Mean predicted variance of a regressor.

    References
    ----------
    Kuleshov, Fenner, Ermon (2018), "Accurate uncertainties for deep learning using
    calibrated regression", ICML.

    Examples
    --------
    >>> from sklaplace.metrics import class_sharpness
    >>> y_proba = [[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]]
    >>> class_sharpness([0, 1, 1, 1], y_proba)
    array([0.9, 0.5])
    """
    proba, codes = check_proba(y_true, y_proba, labels)
    weights = check_weights(sample_weight, codes)
    n_classes, true_proba = proba.shape[1], proba[np.arange(len(codes)), codes]
    totals = np.bincount(codes, weights, minlength=n_classes)
    sums = np.bincount(codes, weights * true_proba, minlength=n_classes)
    # nan for a class without samples
    return sums / np.where(totals > 0, totals, np.nan)


def brier_score(
    y_true: Values,
    y_proba: Values,
    *,
    labels: Given = None,
    sample_weight: Given = None,
) -> float:
    """Compute the squared error of the probabilities, summed over classes.

    The Brier score is a proper scoring rule. Unlike the log loss, it is bounded even
    for confident errors. For two classes, it is twice the Brier score of a single
    class. It equals ``sklearn.metrics.brier_score_loss`` with ``scale_by_half=False``.
    Unlike ``brier_score_loss``, this function accepts columns in any order.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Class labels.
    y_proba : array-like of shape (n, K) or (n,)
        Probabilities, one column per class in the order of ``labels``. For two classes,
        the probabilities of the second class suffice.
    labels : array-like of shape (K,), default=None
        Classes in the order of the columns, such as ``classes_``. Defaults to the
        sorted unique values of ``y_true``, which must contain all classes.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Mean score over samples, between 0 (best) and 2.

    Raises
    ------
    ValueError
        If shapes or classes are inconsistent, or ``y_proba`` does not contain
        probabilities.

    See Also
    --------
    sklearn.metrics.brier_score_loss : Brier score in scikit-learn.
    expected_calibration_error : Measure of calibration only.

    References
    ----------
    Brier (1950), "Verification of forecasts expressed in terms of probability",
    Monthly Weather Review 78(1).

    Examples
    --------
    >>> from sklaplace.metrics import brier_score
    >>> y_proba = [[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]]
    >>> brier_score([0, 1, 1, 1], y_proba)
    0.45
    """
    proba, codes = check_proba(y_true, y_proba, labels)
    errors = proba.copy()  # minus one-hot labels
    errors[np.arange(len(codes)), codes] -= 1
    return average((errors**2).sum(axis=1), sample_weight)


def _bins_of_equal_weight(
    values: Floats, weights: Floats, n_bins: int
) -> NDArray[np.intp]:
    """Return the bin (n,) of each value, so that bins have nearly equal weight.

    A value belongs to bin k of ``n_bins`` if the midpoint of its interval of cumulative
    weight is in the k-th of ``n_bins`` equal parts.
    """
    _, groups = np.unique(values, return_inverse=True)  # equal values share a bin
    totals = np.bincount(groups, weights)
    middles = (totals.cumsum() - totals / 2) / totals.sum()
    bins = np.floor(n_bins * middles).astype(np.intp)
    # the midpoint of a last value without weight is one, which is past the last bin
    return bins.clip(max=n_bins - 1)[groups]
