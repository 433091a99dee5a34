"""Metrics for Gaussian predictions ``N(mean, std²)``, quantiles and intervals."""

import numpy as np
from scipy import stats
from sklearn.utils import check_consistent_length

from sklaplace.core.checks import check_fraction
from sklaplace.metrics.checks import (
    Floats,
    Given,
    Values,
    as_floats,
    as_vector,
    average,
    check_gaussian,
    check_std,
    check_weights,
)


def gaussian_nll(
    y_true: Values, y_mean: Values, y_std: Values, *, sample_weight: Given = None
) -> float:
    """Compute the negative log density of targets under a Gaussian prediction.

    This proper scoring rule compares predictive distributions. Outliers with confident
    predictions can dominate the score; ``gaussian_crps`` is less sensitive to outliers.

    Read more in the :doc:`User Guide </user_guide/regression>`.

    Parameters
    ----------
    y_true : array-like of shape (n,) or (n, C)
        Targets.
    y_mean : array-like of shape (n,) or (n, C)
        Predicted means.
    y_std : array-like of shape (n,) or (n, C)
        Positive predicted standard deviations, including observation noise.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Score in nats per target value; lower is better.

    Raises
    ------
    ValueError
        If the shapes differ or a standard deviation is not positive.

    See Also
    --------
    gaussian_crps : Score that is less sensitive to outliers.
    neg_gaussian_nll_scorer : Scorer for model selection.

    References
    ----------
    Gneiting, Raftery (2007), "Strictly proper scoring rules, prediction, and
    estimation", Journal of the American Statistical Association 102(477).

    Examples
    --------
    >>> from sklaplace.metrics import gaussian_nll
    >>> gaussian_nll([0.0, 1.0], [0.0, 0.0], [1.0, 1.0])
    1.169
    """
    residuals, std = check_gaussian(y_true, y_mean, y_std)
    nats = 0.5 * (residuals / std) ** 2 + np.log(std) + 0.5 * np.log(2 * np.pi)
    return average(nats.mean(axis=1), sample_weight)


def gaussian_crps(
    y_true: Values, y_mean: Values, y_std: Values, *, sample_weight: Given = None
) -> float:
    """Compute the continuous ranked probability score of a Gaussian prediction.

    The score is ``∫ (F(t) − 1{t ≥ y})² dt`` for the predicted distribution function
    ``F``. This proper scoring rule grows linearly with the error. In the limit of zero
    standard deviation, it equals the absolute error.

    Read more in the :doc:`User Guide </user_guide/regression>`.

    Parameters
    ----------
    y_true : array-like of shape (n,) or (n, C)
        Targets.
    y_mean : array-like of shape (n,) or (n, C)
        Predicted means.
    y_std : array-like of shape (n,) or (n, C)
        Positive predicted standard deviations, including observation noise.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Mean score over target values, in units of the target; lower is better.

    Raises
    ------
    ValueError
        If the shapes differ or a standard deviation is not positive.

    See Also
    --------
    gaussian_nll : Logarithmic score.
    neg_gaussian_crps_scorer : Scorer for model selection.

    References
    ----------
    Gneiting, Raftery (2007), "Strictly proper scoring rules, prediction, and
    estimation", Journal of the American Statistical Association 102(477),
    section 4.2.

    Examples
    --------
    >>> from sklaplace.metrics import gaussian_crps
    >>> gaussian_crps([0.0, 1.0], [0.0, 0.0], [1.0, 1.0])
    0.418
    """
    residuals, std = check_gaussian(y_true, y_mean, y_std)
    z = residuals / std
    # closed form of the integral for a standard deviation of one
    scores = z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - np.pi**-0.5
    return average((std * scores).mean(axis=1), sample_weight)


def interval_coverage(
    y_true: Values, y_interval: Values, *, sample_weight: Given = None
) -> float:
    """Compute the fraction of targets inside their predicted intervals.

    Compare this fraction with the nominal coverage. Intervals that are too wide have a
    high coverage, so also report a proper scoring rule.

    Read more in the :doc:`User Guide </user_guide/regression>`.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Targets.
    y_interval : array-like of shape (n, 2)
        Lower and upper bounds, both inclusive.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Fraction between 0 and 1.

    Raises
    ------
    ValueError
        If shapes are inconsistent, or a lower bound exceeds its upper bound.

    See Also
    --------
    empirical_frequency : Fraction of targets below predicted quantiles.
    interval_score : Proper scoring rule for intervals.

    Examples
    --------
    >>> from sklaplace.metrics import interval_coverage
    >>> interval_coverage([0.5, 3.0], [[0.0, 1.0], [0.0, 2.0]])
    0.5
    """
    targets, lower, upper = _check_interval(y_true, y_interval)
    return average((lower <= targets) & (targets <= upper), sample_weight)


def interval_score(
    y_true: Values,
    y_interval: Values,
    *,
    coverage: float = 0.9,
    sample_weight: Given = None,
) -> float:
    """Compute the width of central intervals plus a penalty for targets outside them.

    The score is ``(u − l) + 2/α (l − y)₊ + 2/α (y − u)₊`` with ``α = 1 − coverage``.
    This proper scoring rule, also known as the Winkler score, is minimised by the
    quantiles at ``α/2`` and ``1 − α/2``.

    Read more in the :doc:`User Guide </user_guide/regression>`.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Targets.
    y_interval : array-like of shape (n, 2)
        Lower and upper bounds, such as ``predict_interval(X, coverage)``.
    coverage : float, default=0.9
        Nominal coverage of the intervals, in (0, 1).
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Mean score over samples, in units of the target; lower is better.

    Raises
    ------
    ValueError
        If shapes are inconsistent, a lower bound exceeds its upper bound, or
        ``coverage`` is out of range.

    See Also
    --------
    interval_coverage : Fraction of targets inside the intervals.
    neg_interval_score_scorer : Scorer for model selection.
    sklearn.metrics.mean_pinball_loss : Score of one quantile.

    Notes
    -----
    The score is ``2/α`` times the sum of the pinball losses of both bounds.

    References
    ----------
    Gneiting, Raftery (2007), "Strictly proper scoring rules, prediction, and
    estimation", Journal of the American Statistical Association 102(477), eq. (43).

    Examples
    --------
    >>> from sklaplace.metrics import interval_score
    >>> interval_score([0.5, 3.0], [[0.0, 1.0], [0.0, 2.0]], coverage=0.5)
    3.5
    """
    hint = "Choose a probability, such as 0.9."
    coverage = check_fraction("coverage", coverage, hint)
    targets, lower, upper = _check_interval(y_true, y_interval)
    outside = np.maximum(lower - targets, 0) + np.maximum(targets - upper, 0)
    return average(upper - lower + 2 / (1 - coverage) * outside, sample_weight)


def empirical_frequency(
    y_true: Values, y_quantiles: Values, *, sample_weight: Given = None
) -> Floats:
    """Compute the fraction of targets that do not exceed their predicted quantile.

    For a calibrated regressor and many samples, this fraction equals the quantile
    level.

    Read more in the :doc:`User Guide </user_guide/regression>`.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Targets.
    y_quantiles : array-like of shape (n, n_levels)
        Predicted quantiles, one column per level: ``predict_quantiles(X, levels)``.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    ndarray of shape (n_levels,)
        Fractions between 0 and 1.

    Raises
    ------
    ValueError
        If shapes are inconsistent.

    See Also
    --------
    interval_coverage : Fraction of targets inside predicted intervals.
    sharpness : Mean predicted variance.
    sklaplace.plotting.RegressionCalibrationDisplay : Plot of the fractions.

    References
    ----------
    Kuleshov, Fenner, Ermon (2018), "Accurate uncertainties for deep learning using
    calibrated regression", ICML, section 3.5.

    Examples
    --------
    >>> from sklaplace.metrics import empirical_frequency
    >>> empirical_frequency([0.5, 3.0], [[0.0, 1.0], [0.0, 4.0]])
    array([0., 1.])
    """
    targets = as_vector(y_true, "y_true")
    quantiles = as_floats(y_quantiles, "y_quantiles", ensure_2d=True)
    check_consistent_length(targets, quantiles)
    weights = check_weights(sample_weight, targets)
    return weights @ (targets[:, None] <= quantiles) / weights.sum()


def sharpness(y_std: Values, *, sample_weight: Given = None) -> float:
    """Compute the mean predicted variance of a regressor.

    Of two calibrated regressors, the sharper one is better.

    Read more in the :doc:`User Guide </user_guide/regression>`.

    Parameters
    ----------
    y_std : array-like of shape (n,) or (n, C)
        Positive predicted standard deviations.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Mean variance, in squared units of the target; lower is sharper.

    Raises
    ------
    ValueError
        If a standard deviation is not positive.

    See Also
    --------
    class_sharpness : Sharpness of a classifier.
    empirical_frequency : Calibration of the predictions.

    References
    ----------
    Kuleshov, Fenner, Ermon (2018), "Accurate uncertainties for deep learning using
    calibrated regression", ICML, section 3.5.

    Examples
    --------
    >>> from sklaplace.metrics import sharpness
    >>> sharpness([1.0, 3.0])
    5.0
    """
    std = as_floats(y_std, "y_std")
    check_std(std)
    # (n, 1) or (n, C), to average over targets first
    return average((std.reshape(len(std), -1) ** 2).mean(axis=1), sample_weight)


def _check_interval(
    y_true: Values, y_interval: Values
) -> tuple[Floats, Floats, Floats]:
    """Return targets, lower bounds and upper bounds, each of shape (n,)."""
    # more axes are allowed here, because the message below explains them better
    interval = as_floats(y_interval, "y_interval", allow_nd=True)
    if interval.shape[1:] != (2,):
        columns = f"{interval.shape[1]} columns" if interval.ndim == 2 else ""
        raise ValueError(
            f"y_interval has {columns or f'shape {interval.shape}'}. Pass lower and "
            "upper bounds of one target and one coverage, (n, 2), such as "
            "y_interval[:, 0] with y_true[:, 0]."
        )
    targets = as_vector(y_true, "y_true")
    check_consistent_length(targets, interval)
    lower, upper = interval.T
    if (lower > upper).any():
        row = int(np.argmax(lower > upper))
        raise ValueError(
            f"y_interval has the lower bound {lower[row]} above the upper bound "
            f"{upper[row]} in row {row}. Pass bounds in ascending order."
        )
    return targets, lower, upper
