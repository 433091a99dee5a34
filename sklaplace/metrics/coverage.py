"""Coverage of intervals and sets, for each category of samples."""

import numpy as np
from sklearn.utils import check_consistent_length

from sklaplace.metrics.checks import (
    Floats,
    Given,
    Values,
    as_column,
    as_floats,
    check_interval,
    check_weights,
    encode,
)


def coverage_by_category(
    y_true: Values,
    y_pred: Values,
    categories: Values,
    *,
    labels: Given = None,
    sample_weight: Given = None,
) -> tuple[np.ndarray, Floats, Floats, Floats]:
    """Compute the coverage and the mean size of intervals or sets per category.

    Intervals that cover 90 % of all targets can cover fewer targets in some categories
    and more in others.

    Read more in the :ref:`User Guide <conformal>`.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Targets, or class labels for sets.
    y_pred : array-like of shape (n, 2) or (n, K)
        Lower and upper bounds, both inclusive, such as ``predict_interval(X)``.
        A Boolean array has sets of classes, such as ``predict_set(X)``.
    categories : array-like of shape (n,)
        Category of each sample.
    labels : array-like of shape (K,), default=None
        Classes in the order of the columns of sets, such as ``classes_``. Defaults to
        the sorted unique values of ``y_true``. Ignored for intervals.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    names : ndarray of shape (n_categories,)
        Sorted unique categories.
    coverage : ndarray of shape (n_categories,)
        Fraction of targets inside their intervals or sets; nan without weight.
    size : ndarray of shape (n_categories,)
        Mean width of intervals, in units of the target, or mean number of classes in
        sets; nan without weight.
    weight : ndarray of shape (n_categories,)
        Number of samples in the category, or sum of their weights.

    Raises
    ------
    ValueError
        If shapes or classes are inconsistent, or a lower bound exceeds its upper bound.

    See Also
    --------
    interval_coverage : Coverage of all samples.

    References
    ----------
    Vovk (2012), "Conditional validity of inductive conformal predictors", Asian
    Conference on Machine Learning, section 2.

    Examples
    --------
    >>> from sklaplace.metrics import coverage_by_category
    >>> interval = [[0.0, 1.0], [0.0, 2.0], [0.0, 4.0]]
    >>> names, coverage, size, weight = coverage_by_category(
    ...     [0.5, 3.0, 1.0], interval, ["a", "b", "b"]
    ... )
    >>> names
    array(['a', 'b'], dtype='<U1')
    >>> coverage
    array([1. , 0.5])
    >>> size
    array([1., 3.])
    >>> weight
    array([1., 2.])
    """
    if np.asarray(y_pred).dtype == bool:
        sets = as_floats(y_pred, "y_pred", ensure_2d=True)
        truth = as_column(y_true)
        check_consistent_length(truth, sets)
        codes = encode(truth, labels, "y_pred", sets.shape[1])
        covered, sizes = sets[np.arange(len(sets)), codes], sets.sum(axis=1)
    else:
        targets, lower, upper = check_interval(y_true, y_pred, "y_pred")
        covered = ((lower <= targets) & (targets <= upper)).astype(float)
        sizes = upper - lower
    named = as_column(categories)
    check_consistent_length(named, sizes)
    weights = check_weights(sample_weight, sizes)
    names, rows = np.unique(named, return_inverse=True)
    summands = weights * covered, weights * sizes, weights
    inside, total, weight = np.array([np.bincount(rows, s) for s in summands])
    divisor = np.where(weight > 0, weight, np.nan)
    return names, inside / divisor, total / divisor, weight
