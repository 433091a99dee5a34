"""Grid: points over the range of one or two features."""

from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.utils import check_array

from sklaplace.core.checks import check_count


class Grid(NamedTuple):
    """Evenly spaced points over the range of d features.

    Attributes
    ----------
    samples : ndarray of shape (m, d)
        Samples whose range the grid covers.
    mesh : tuple of d ndarrays of shape (resolution,) * d
        Values of each feature.
    points : ndarray or data frame of shape (resolution ** d, d)
        All points, as a data frame if the samples are one.
    names : tuple of d str or None
        Names of the features; None for arrays.
    """

    samples: NDArray[Any]
    mesh: tuple[NDArray[Any], ...]
    points: Any
    names: tuple[str | None, ...]

    def reshaped(self, values: Any) -> NDArray[Any]:
        """Arrange values of all points (n, ...) as the mesh is."""
        values = np.asarray(values)
        return values.reshape(*self.mesh[0].shape, *values.shape[1:])


def grid_over(X: Any, n_features: int, resolution: int, eps: float) -> Grid:
    """Return the grid over the range of each feature, extended by eps on each side."""
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
    names = tuple(getattr(X, "columns", [None] * n_features))
    return Grid(samples, tuple(mesh), _as_frame_like(points, X), names)


def _as_frame_like(points: NDArray[Any], X: Any) -> Any:
    """Return a data frame if X is one, for estimators that check names."""
    if not hasattr(X, "columns"):
        return points
    names = "schema" if hasattr(X, "schema") else "columns"  # polars, pandas
    return type(X)(points, **{names: list(X.columns)})
