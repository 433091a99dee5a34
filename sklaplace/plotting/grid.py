"""Grids over the range of one or two features."""

from numbers import Real
from typing import Any

import numpy as np
from sklearn.utils import check_array

from sklaplace.core.checks import check_count


def check_columns(X: Any, n_features: int) -> np.ndarray:
    """X as an array; raise unless it has ``n_features`` columns."""
    values = check_array(X, input_name="X")
    if values.shape[1] != n_features:
        raise ValueError(
            f"X has {values.shape[1]} features, but this display needs {n_features}. "
            "Fit and plot an estimator of that many features."
        )
    return values


def axes_of_grid(values: np.ndarray, resolution: int, eps: float) -> list[np.ndarray]:
    """Evenly spaced values over the range of each column, extended by eps."""
    check_count("grid_resolution", resolution, smallest=2)
    if not isinstance(eps, Real) or not 0 <= eps < np.inf:
        raise ValueError(f"eps={eps!r} is not valid. Choose a number from 0 up.")
    dtype = values.dtype if values.dtype.kind == "f" else np.float64
    return [
        np.linspace(column.min() - eps, column.max() + eps, resolution, dtype=dtype)
        for column in values.T
    ]


def as_frame_like(grid: np.ndarray, X: Any) -> Any:
    """The grid as a data frame if X is one, for estimators that check names."""
    if not hasattr(X, "columns"):
        return grid
    names = "schema" if hasattr(X, "schema") else "columns"  # polars, pandas
    return type(X)(grid, **{names: list(X.columns)})
