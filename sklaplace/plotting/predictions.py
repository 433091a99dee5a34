"""Grids over the range of features, and predictions of a regressor."""

from numbers import Real
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from sklearn.utils import check_array, column_or_1d

from sklaplace.core.checks import check_count


class Grid(NamedTuple):
    """Grid of evenly spaced points over the range of d features.

    Attributes
    ----------
    samples : ndarray of shape (m, d)
        Samples that determine the range of the grid.
    mesh : tuple of d ndarrays of shape (resolution,) * d
        Values of each feature.
    points : ndarray or data frame of shape (resolution ** d, d)
        All points, as a data frame if the samples are a data frame.
    names : tuple of d str or None
        Names of the features; None for arrays.
    """

    samples: np.ndarray
    mesh: tuple[np.ndarray, ...]
    points: ArrayLike
    names: tuple[str | None, ...]


def grid_over(X: ArrayLike, n_features: int, resolution: int, eps: float) -> Grid:
    """Return the grid over the range of each feature, plus eps on each side."""
    samples = check_array(X, input_name="X")
    if samples.shape[1] != n_features:
        raise ValueError(
            f"X has {samples.shape[1]} features, but this display needs {n_features}. "
            "Fit and plot an estimator of that many features."
        )
    check_count("grid_resolution", resolution, smallest=2)
    if not isinstance(eps, Real) or not 0 <= eps < np.inf:
        raise ValueError(f"eps={eps!r} is not valid. Choose a number from 0 up.")
    dtype = samples.dtype if samples.dtype.kind == "f" else np.float64
    low, high = samples.min(axis=0) - eps, samples.max(axis=0) + eps
    mesh = np.meshgrid(*np.linspace(low, high, resolution, dtype=dtype, axis=1))
    points = np.stack([values.ravel() for values in mesh], axis=1)
    if not hasattr(X, "columns"):
        return Grid(samples, tuple(mesh), points, (None,) * n_features)
    # Estimators check feature names, so the points also become a data frame.
    keyword = "schema" if hasattr(X, "schema") else "columns"  # polars, pandas
    names = {keyword: list(X.columns)}
    return Grid(samples, tuple(mesh), type(X)(points, **names), tuple(X.columns))


def mean_and_std(regressor: BaseEstimator, X: object) -> tuple[np.ndarray, np.ndarray]:
    """Predict means (n,) and standard deviations (n,)."""
    try:
        mean, std = regressor.predict(X, return_std=True)
    except NotFittedError:  # also an AttributeError
        raise
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"{type(regressor).__name__} does not predict standard deviations. Pass a "
            "fitted regressor whose predict takes return_std=True."
        ) from error
    return column_or_1d(mean), column_or_1d(std)
