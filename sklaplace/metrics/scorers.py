"""Scorers: metrics of a fitted estimator, for ``scoring=`` in model selection."""

from typing import Any

from sklaplace.metrics.regression import gaussian_nll


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
    >>> from sklaplace.metrics import neg_gaussian_nll_scorer
    >>> X, y = load_diabetes(return_X_y=True)
    >>> scores = cross_val_score(BayesianRidge(), X, y, scoring=neg_gaussian_nll_scorer)
    >>> scores.shape
    (5,)
    """
    y_mean, y_std = estimator.predict(X, return_std=True)
    return -gaussian_nll(y, y_mean, y_std, sample_weight=sample_weight)
