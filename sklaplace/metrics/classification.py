"""Metrics of class probabilities."""

from numbers import Integral
from typing import Any

import numpy as np

from sklaplace.metrics.checks import average, check_proba, check_weights


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
    proba, codes = check_proba(y_true, y_proba, labels)
    weights = check_weights(sample_weight, codes)
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
    proba, codes = check_proba(y_true, y_proba, labels)
    errors = proba.copy()
    errors[np.arange(len(codes)), codes] -= 1
    return average((errors**2).sum(axis=1), sample_weight)
