"""Metrics of Gaussian predictions ``N(mean, std²)`` and of intervals."""

from typing import Any

import numpy as np
from scipy import stats
from sklearn.utils import check_consistent_length

from sklaplace.metrics.checks import as_floats, as_vector, average, check_gaussian


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
    residuals, std = check_gaussian(y_true, y_mean, y_std)
    nats = 0.5 * (residuals / std) ** 2 + np.log(std) + 0.5 * np.log(2 * np.pi)
    return average(nats.mean(axis=1), sample_weight)


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
    residuals, std = check_gaussian(y_true, y_mean, y_std)
    z = residuals / std
    scores = z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - np.pi**-0.5
    return average((std * scores).mean(axis=1), sample_weight)


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
    targets = as_vector(y_true, "y_true")
    interval = as_floats(y_interval, "y_interval", ensure_2d=True)
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
    return average((lower <= targets) & (targets <= upper), sample_weight)
