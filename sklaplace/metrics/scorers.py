"""Scorers: metrics of a fitted estimator, for ``scoring=`` in model selection."""

import numpy as np
from sklearn.base import BaseEstimator

from sklaplace.metrics.checks import Given, Values, last_step, misclassified
from sklaplace.metrics.classification import expected_calibration_error
from sklaplace.metrics.detection import area_under_risk_coverage
from sklaplace.metrics.regression import (
    gaussian_crps,
    gaussian_nll,
    interval_score,
    quantile_crps,
    weighted_interval_score,
)

# 0.005, 0.015, ..., 0.995: the midpoint rule
_CRPS_LEVELS = (np.arange(100) + 0.5) / 100
# of the forecasts that Bracher et al. (2021) score
_WIS_LEVELS = np.r_[0.01, 0.025, np.arange(1, 20) / 20, 0.975, 0.99]


def neg_gaussian_nll_scorer(
    estimator: BaseEstimator, X: object, y: Values, sample_weight: Given = None
) -> float:
    """Compute the mean log density of held-out targets, for use as ``scoring``.

    To choose a prior precision, prefer this scorer to R², because the prior affects
    only the standard deviation of linearised predictions, and not their mean.

    Read more in the :doc:`User Guide </user_guide/pipelines>`.

    Parameters
    ----------
    estimator : fitted regressor
        Regressor with ``predict(X, return_std=True)``. The standard deviations must
        include observation noise.
    X : array-like of shape (n, n_features)
        Held-out samples.
    y : array-like of shape (n,) or (n, C)
        Targets of the samples.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Negative ``gaussian_nll``, in nats per target value; higher is better.

    Raises
    ------
    ValueError
        If a predicted standard deviation is not positive.

    See Also
    --------
    gaussian_nll : Underlying metric.
    neg_gaussian_crps_scorer : Scorer that is less sensitive to outliers.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklearn.linear_model import BayesianRidge
    >>> from sklearn.model_selection import cross_val_score
    >>> from sklaplace.metrics import neg_gaussian_nll_scorer
    >>> X, y = load_diabetes(return_X_y=True)
    >>> scores = cross_val_score(BayesianRidge(), X, y, scoring=neg_gaussian_nll_scorer)
    >>> scores.shape
    (5,)
    """
    y_mean, y_std = estimator.predict(X, return_std=True)
    return -gaussian_nll(y, y_mean, y_std, sample_weight=sample_weight)


def neg_gaussian_crps_scorer(
    estimator: BaseEstimator, X: object, y: Values, sample_weight: Given = None
) -> float:
    """Compute the negative CRPS of held-out predictions, for use as ``scoring``.

    This scorer is less sensitive to outliers than ``neg_gaussian_nll_scorer``.

    Read more in the :doc:`User Guide </user_guide/pipelines>`.

    Parameters
    ----------
    estimator : fitted regressor
        Regressor with ``predict(X, return_std=True)``. The standard deviations must
        include observation noise.
    X : array-like of shape (n, n_features)
        Held-out samples.
    y : array-like of shape (n,) or (n, C)
        Targets of the samples.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Negative ``gaussian_crps``, in units of the target; higher is better.

    Raises
    ------
    ValueError
        If a predicted standard deviation is not positive.

    See Also
    --------
    gaussian_crps : Underlying metric.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklearn.linear_model import BayesianRidge
    >>> from sklaplace.metrics import neg_gaussian_crps_scorer
    >>> X, y = load_diabetes(return_X_y=True)
    >>> neg_gaussian_crps_scorer(BayesianRidge().fit(X, y), X, y)
    -30.5
    """
    y_mean, y_std = estimator.predict(X, return_std=True)
    return -gaussian_crps(y, y_mean, y_std, sample_weight=sample_weight)


def neg_interval_score_scorer(
    estimator: BaseEstimator, X: object, y: Values, sample_weight: Given = None
) -> float:
    """Compute the negative 90 % interval score, for use as ``scoring``.

    For another coverage ``q``, write a function of ``estimator``, ``X`` and ``y`` that
    returns ``-interval_score(y, estimator.predict_interval(X, q), coverage=q)``.

    Read more in the :doc:`User Guide </user_guide/pipelines>`.

    Parameters
    ----------
    estimator : fitted regressor
        Regressor with ``predict_interval(X, coverage)``, such as `LaplaceRegressor`, or
        a pipeline that ends with such a regressor.
    X : array-like of shape (n, n_features)
        Held-out samples.
    y : array-like of shape (n,)
        Targets of the samples.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Negative ``interval_score``, in units of the target; higher is better.

    Raises
    ------
    ValueError
        If there are several targets.

    See Also
    --------
    interval_score : Underlying metric.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklaplace import LaplaceRegressor
    >>> from sklaplace.metrics import neg_interval_score_scorer
    >>> X, y = load_diabetes(return_X_y=True)
    >>> reg = LaplaceRegressor(random_state=0).fit(X, y)
    >>> bool(-250 < neg_interval_score_scorer(reg, X, y) < -180)
    True
    """
    # a pipeline has no `predict_interval`, but its last step may have one
    predictor, X = last_step(estimator, X)
    interval = predictor.predict_interval(X, coverage=0.9)
    return -interval_score(y, interval, coverage=0.9, sample_weight=sample_weight)


def neg_quantile_crps_scorer(
    estimator: BaseEstimator, X: object, y: Values, sample_weight: Given = None
) -> float:
    """Compute the negative CRPS of held-out quantiles, for use as ``scoring``.

    The score uses the hundred levels 0.005, 0.015, ..., 0.995. Unlike
    ``neg_gaussian_crps_scorer``, it depends on the shape of the predicted distribution.

    Read more in the :doc:`User Guide </user_guide/pipelines>`.

    Parameters
    ----------
    estimator : fitted regressor
        Regressor with ``predict_quantiles(X, levels)``, such as `LaplaceRegressor`, or
        a pipeline that ends with such a regressor.
    X : array-like of shape (n, n_features)
        Held-out samples.
    y : array-like of shape (n,)
        Targets of the samples.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Negative ``quantile_crps``, in units of the target; higher is better.

    Raises
    ------
    ValueError
        If there are several targets.

    See Also
    --------
    quantile_crps : Underlying metric.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklaplace import LaplaceRegressor
    >>> from sklaplace.metrics import neg_quantile_crps_scorer
    >>> X, y = load_diabetes(return_X_y=True)
    >>> reg = LaplaceRegressor(random_state=0).fit(X, y)
    >>> bool(-35 < neg_quantile_crps_scorer(reg, X, y) < -25)
    True
    """
    levels = _CRPS_LEVELS
    predictor, X = last_step(estimator, X)
    quantiles = predictor.predict_quantiles(X, levels)
    return -quantile_crps(y, quantiles, levels, sample_weight=sample_weight)


def neg_weighted_interval_score_scorer(
    estimator: BaseEstimator, X: object, y: Values, sample_weight: Given = None
) -> float:
    """Compute the negative weighted interval score, for use as ``scoring``.

    The score uses the median and the central intervals with coverages of 10 %, 20 %,
    ..., 90 %, 95 % and 98 %, as Bracher et al. (2021).

    Read more in the :doc:`User Guide </user_guide/pipelines>`.

    Parameters
    ----------
    estimator : fitted regressor
        Regressor with ``predict_quantiles(X, levels)``, such as `LaplaceRegressor`, or
        a pipeline that ends with such a regressor.
    X : array-like of shape (n, n_features)
        Held-out samples.
    y : array-like of shape (n,)
        Targets of the samples.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Negative ``weighted_interval_score``, in units of the target; higher is better.

    Raises
    ------
    ValueError
        If there are several targets.

    See Also
    --------
    weighted_interval_score : Underlying metric.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklaplace import LaplaceRegressor
    >>> from sklaplace.metrics import neg_weighted_interval_score_scorer
    >>> X, y = load_diabetes(return_X_y=True)
    >>> reg = LaplaceRegressor(random_state=0).fit(X, y)
    >>> bool(-35 < neg_weighted_interval_score_scorer(reg, X, y) < -25)
    True
    """
    levels = _WIS_LEVELS
    predictor, X = last_step(estimator, X)
    quantiles = predictor.predict_quantiles(X, levels)
    return -weighted_interval_score(y, quantiles, levels, sample_weight=sample_weight)


def neg_expected_calibration_error_scorer(
    estimator: BaseEstimator, X: object, y: Values, sample_weight: Given = None
) -> float:
    """Compute the negative expected calibration error, for use as ``scoring``.

    Use this scorer to compare calibration across folds. It is not a proper scoring
    rule. Prefer ``"neg_log_loss"`` for model selection.

    Read more in the :doc:`User Guide </user_guide/pipelines>`.

    Parameters
    ----------
    estimator : fitted classifier
        Classifier with ``predict_proba`` and ``classes_``.
    X : array-like of shape (n, n_features)
        Held-out samples.
    y : array-like of shape (n,)
        Labels of the samples.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Negative ``expected_calibration_error`` with 15 bins; higher is better.

    Raises
    ------
    ValueError
        If a label is not one of the classes.

    See Also
    --------
    expected_calibration_error : Underlying metric.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.naive_bayes import GaussianNB
    >>> from sklaplace.metrics import neg_expected_calibration_error_scorer
    >>> X, y = load_iris(return_X_y=True)
    >>> neg_expected_calibration_error_scorer(GaussianNB().fit(X, y), X, y)
    -0.033
    """
    proba, labels = estimator.predict_proba(X), estimator.classes_
    return -expected_calibration_error(
        y, proba, labels=labels, sample_weight=sample_weight
    )


def neg_area_under_risk_coverage_scorer(
    estimator: BaseEstimator, X: object, y: Values, sample_weight: Given = None
) -> float:
    """Compute the negative AURC of a classifier, for use as ``scoring``.

    The loss is the error of the most probable class, and the confidence is the
    probability of this class. AURC is the area under the risk-coverage curve.

    Read more in the :doc:`User Guide </user_guide/pipelines>`.

    Parameters
    ----------
    estimator : fitted classifier
        Classifier with ``predict_proba`` and ``classes_``.
    X : array-like of shape (n, n_features)
        Held-out samples.
    y : array-like of shape (n,)
        Labels of the samples.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Negative ``area_under_risk_coverage``; higher is better.

    Raises
    ------
    ValueError
        If ``X`` and ``y`` differ in the number of samples.

    See Also
    --------
    area_under_risk_coverage : Underlying metric.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.naive_bayes import GaussianNB
    >>> from sklaplace.metrics import neg_area_under_risk_coverage_scorer
    >>> X, y = load_iris(return_X_y=True)
    >>> neg_area_under_risk_coverage_scorer(GaussianNB().fit(X, y), X, y)
    -0.0034
    """
    proba = estimator.predict_proba(X)
    losses = misclassified(estimator, proba, y)
    return -area_under_risk_coverage(
        losses, proba.max(axis=1), sample_weight=sample_weight
    )
