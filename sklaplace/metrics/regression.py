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
    check_interval,
    check_quantiles,
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
    targets, lower, upper = check_interval(y_true, y_interval)
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
    targets, lower, upper = check_interval(y_true, y_interval)
    outside = np.maximum(lower - targets, 0) + np.maximum(targets - upper, 0)
    return average(upper - lower + 2 / (1 - coverage) * outside, sample_weight)


def quantile_crps(
    y_true: Values,
    y_quantiles: Values,
    levels: Values,
    *,
    sample_weight: Given = None,
) -> float:
    """Compute the continuous ranked probability score (CRPS) from quantiles.

    The score is ``2 ∫ ρ(y − q(τ), τ) dτ`` for the predicted quantiles ``q(τ)`` and the
    pinball loss ``ρ(r, τ) = max(τr, (τ − 1)r)``. It needs no assumption about the shape
    of the predicted distribution. If the median is the only quantile, the score equals
    the absolute error.

    Read more in the :ref:`User Guide <scores-of-distributions>`.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Targets.
    y_quantiles : array-like of shape (n, n_levels)
        Predicted quantiles, one column per level: ``predict_quantiles(X, levels)``.
    levels : array-like of shape (n_levels,)
        Levels of the quantiles in (0, 1), in ascending order.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Mean score over samples, in units of the target; lower is better.

    Raises
    ------
    ValueError
        If shapes are inconsistent, levels are out of range or not ascending, or
        quantiles cross.

    See Also
    --------
    gaussian_crps : The exact score of a Gaussian prediction.
    neg_quantile_crps_scorer : Scorer for model selection.
    weighted_interval_score : The same integral with equal weights of all levels.

    Notes
    -----
    The integral is a sum over levels. Each level stands for the levels in (0, 1) that
    are closer to it than to any other level. The sum is the midpoint rule for
    ``levels=(np.arange(m) + 0.5) / m``. For a calibrated Gaussian prediction, the score
    is 0.2 % too high with ``m = 20``, and 0.01 % with ``m = 100``.

    References
    ----------
    Gneiting, Ranjan (2011), "Comparing density forecasts using threshold- and
    quantile-weighted scoring rules", Journal of Business & Economic Statistics 29(3),
    eq. (8).

    Examples
    --------
    >>> from sklaplace.metrics import quantile_crps
    >>> quantile_crps([0.5, 3.0], [[0.0, 1.0], [0.0, 2.0]], levels=[0.25, 0.75])
    0.875
    """
    residuals, levels = check_quantiles(y_true, y_quantiles, levels)
    edges = np.r_[0, (levels[1:] + levels[:-1]) / 2, 1]
    return average(2 * _pinball(residuals, levels) @ np.diff(edges), sample_weight)


def weighted_interval_score(
    y_true: Values,
    y_quantiles: Values,
    levels: Values,
    *,
    sample_weight: Given = None,
) -> float:
    """Compute the weighted sum of the interval scores of several coverages.

    The levels are in pairs ``α/2`` and ``1 − α/2``, which are the bounds of central
    intervals, with or without the median. The score is the sum of the median's absolute
    error, with weight 1/2, and of the interval scores, with weights ``α/2``, divided by
    half the number of levels. This proper scoring rule is common for forecasts of
    epidemics.

    Read more in the :ref:`User Guide <scores-of-distributions>`.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Targets.
    y_quantiles : array-like of shape (n, n_levels)
        Predicted quantiles, one column per level: ``predict_quantiles(X, levels)``.
    levels : array-like of shape (n_levels,)
        Levels of the quantiles in (0, 1), in ascending order and symmetric about 0.5.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Mean score over samples, in units of the target; lower is better.

    Raises
    ------
    ValueError
        If shapes are inconsistent, levels are out of range, not ascending or not
        symmetric, or quantiles cross.

    See Also
    --------
    interval_score : Score of one coverage.
    neg_weighted_interval_score_scorer : Scorer for model selection.
    quantile_crps : The score with other weights, for any levels.

    Notes
    -----
    The score is twice the mean of the pinball losses of all levels.

    References
    ----------
    Bracher, Ray, Gneiting, Reich (2021), "Evaluating epidemic forecasts in an interval
    format", PLOS Computational Biology 17(2), eq. (1) and (2).

    Examples
    --------
    >>> from sklaplace.metrics import weighted_interval_score
    >>> quantiles = [[0.0, 0.5, 1.0], [0.0, 1.0, 2.0]]
    >>> weighted_interval_score([0.5, 3.0], quantiles, levels=[0.25, 0.5, 0.75])
    0.917
    """
    residuals, levels = check_quantiles(y_true, y_quantiles, levels)
    if not np.allclose(levels + levels[::-1], 1):
        raise ValueError(
            f"levels={levels.tolist()} are not symmetric about 0.5. Pass both levels "
            "of each interval, such as [0.05, 0.5, 0.95], or use quantile_crps."
        )
    return average(2 * _pinball(residuals, levels).mean(axis=1), sample_weight)


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


def _pinball(residuals: Floats, levels: Floats) -> Floats:
    """Return the pinball losses of the residuals ``y − q``, (n, n_levels)."""
    return np.maximum(levels * residuals, (levels - 1) * residuals)
