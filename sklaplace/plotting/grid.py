"""Grids over the ranges of features."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils import check_array

from sklaplace.core.checks import check_count


@dataclass(frozen=True)
class Grid:
    """Evenly spaced points over the ranges of d features.

    Attributes
    ----------
    mesh : list of d ndarrays of shape (resolution,) * d
        Values of each feature.
    points : ndarray or data frame of shape (resolution ** d, d)
        All points, as a data frame if the samples are a data frame.
    names : tuple of d str or None
        Names of the features, if known.
    """

    mesh: list[np.ndarray]
    points: ArrayLike
    names: tuple[str | None, ...]


def grid_over(X: ArrayLike, n_features: int, resolution: int, eps: float) -> Grid:
    """Return an evenly spaced grid over the extended range of each feature.

    Parameters
    ----------
    X : array-like of shape (m, d)
        Samples that determine the range and dtype of the grid.
    n_features : int
        Required number of features, d.
    resolution : int
        Number of values per feature.
    eps : float
        Extension of the range on each side, in units of ``X``.

    Returns
    -------
    Grid
        The points, as a data frame if ``X`` is a data frame.
    """
    samples = check_array(X, dtype=[np.float64, np.float32], input_name="X")
    if samples.shape[1] != n_features:
        raise ValueError(
            f"X has {samples.shape[1]} features, but this display needs {n_features}. "
            "Fit and plot an estimator with that many features."
        )
    resolution = check_count("grid_resolution", resolution, smallest=2)
    low, high = samples.min(axis=0) - float(eps), samples.max(axis=0) + float(eps)
    # (d, resolution)
    axis_values = np.linspace(low, high, resolution, dtype=samples.dtype, axis=1)
    mesh = list(np.meshgrid(*axis_values))
    points = np.stack([coordinate.ravel() for coordinate in mesh], axis=1)
    if not hasattr(X, "columns"):
        return Grid(mesh, points, (None,) * n_features)
    # Estimators check feature names, so the points must also be a data frame.
    keyword = "schema" if hasattr(X, "schema") else "columns"  # polars, pandas
    frame: Any = type(X)
    points = frame(points, **{keyword: list(X.columns)})
    return Grid(mesh, points, tuple(X.columns))
