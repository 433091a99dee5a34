"""ConfidenceDisplay: the largest class probability over a plane."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from sklaplace.plotting.axes import (
    Keywords,
    new_axes,
    require_matplotlib,
    require_proba,
)
from sklaplace.plotting.grid import as_frame_like, axes_of_grid, check_columns


@dataclass(eq=False, repr=False, kw_only=True)
class ConfidenceDisplay:
    """Confidence of a classifier over the plane of its two features.

    Filled contours show the largest class probability, lines the decision boundaries.
    Use `from_estimator` to create it. Parameters are stored as attributes.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    xx0, xx1 : ndarray of shape (grid_resolution, grid_resolution)
        First and second feature on the grid.
    proba : ndarray of shape (grid_resolution, grid_resolution, K)
        Class probabilities on the grid.
    feature_names : tuple of two str, default=(None, None)
        Labels of the axes.

    Attributes
    ----------
    confidence : ndarray of shape (grid_resolution, grid_resolution)
        Largest class probability.
    ax_ : matplotlib Axes
        Axes of the plot.
    figure_ : matplotlib Figure
        The figure of `ax_`.
    surface_ : matplotlib QuadContourSet
        The filled contours, to pass to ``figure.colorbar``.
    boundaries_ : list of matplotlib QuadContourSet
        Decision boundaries: one for two classes, else one per class.

    See Also
    --------
    PredictiveBandDisplay : Mean and bands of a regression.
    sklearn.inspection.DecisionBoundaryDisplay : Predicted classes.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> from sklaplace import LaplaceClassifier
    >>> from sklaplace.plotting import ConfidenceDisplay
    >>> X, y = make_moons(100, noise=0.1, random_state=0)
    >>> clf = LaplaceClassifier(random_state=0).fit(X, y)
    >>> display = ConfidenceDisplay.from_estimator(clf, X, grid_resolution=20)
    >>> display.confidence.shape
    (20, 20)
    """

    xx0: Any
    xx1: Any
    proba: Any
    feature_names: tuple[str | None, str | None] = (None, None)

    @property
    def confidence(self) -> np.ndarray:
        """Largest class probability at each point of the grid.

        See Also
        --------
        from_estimator : Predicts and plots it.

        Examples
        --------
        >>> from sklearn.datasets import make_moons
        >>> from sklearn.naive_bayes import GaussianNB
        >>> from sklaplace.plotting import ConfidenceDisplay
        >>> X, y = make_moons(100, noise=0.1, random_state=0)
        >>> clf = GaussianNB().fit(X, y)
        >>> display = ConfidenceDisplay.from_estimator(clf, X, grid_resolution=5)
        >>> bool((display.confidence >= 0.5).all())
        True
        """
        return np.asarray(self.proba).max(axis=-1)

    @classmethod
    def from_estimator(
        cls,
        classifier: Any,
        X: Any,
        *,
        grid_resolution: int = 100,
        eps: float = 1.0,
        ax: Any = None,
        surface_kw: Keywords = None,
        boundary_kw: Keywords = None,
    ) -> "ConfidenceDisplay":
        """Predict over a plane and plot the confidence.

        Parameters
        ----------
        classifier : object
            Fitted, with ``predict_proba``: a `LaplaceClassifier`, a pipeline, a skorch
            net or any other classifier.
        X : array-like of shape (m, 2)
            Samples whose range is plotted. The grid has their dtype.
        grid_resolution : int, default=100
            Number of values per feature.
        eps : float, default=1.0
            Extension of the range of `X` on each side, in its units.
        ax : matplotlib Axes, default=None
            Axes to plot on. A new figure by default.
        surface_kw, boundary_kw : dict, default=None
            Keywords for matplotlib's ``contourf`` and ``contour``.

        Returns
        -------
        ConfidenceDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If `X` does not have two features, or an option is out of range.
        TypeError
            If the classifier has no ``predict_proba``.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        plot : Plots what is stored.

        Examples
        --------
        >>> from sklearn.datasets import make_moons
        >>> from sklearn.naive_bayes import GaussianNB
        >>> from sklaplace.plotting import ConfidenceDisplay
        >>> X, y = make_moons(100, noise=0.1, random_state=0)
        >>> clf = GaussianNB().fit(X, y)
        >>> display = ConfidenceDisplay.from_estimator(clf, X, grid_resolution=5)
        >>> display.confidence.shape
        (5, 5)
        """
        require_matplotlib()
        require_proba(classifier)
        axes = axes_of_grid(check_columns(X, 2), grid_resolution, eps)
        xx0, xx1 = np.meshgrid(*axes)
        grid = np.stack([xx0.ravel(), xx1.ravel()], axis=1)
        proba = np.asarray(classifier.predict_proba(as_frame_like(grid, X)))
        proba = proba.reshape(*xx0.shape, -1)
        names = tuple(getattr(X, "columns", [None, None]))
        display = cls(xx0=xx0, xx1=xx1, proba=proba, feature_names=names)
        return display.plot(ax, surface_kw=surface_kw, boundary_kw=boundary_kw)

    def plot(
        self,
        ax: Any = None,
        *,
        surface_kw: Keywords = None,
        boundary_kw: Keywords = None,
    ) -> "ConfidenceDisplay":
        """Plot confidence and decision boundaries.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Axes to plot on. A new figure by default.
        surface_kw, boundary_kw : dict, default=None
            Keywords for matplotlib's ``contourf`` and ``contour``.

        Returns
        -------
        ConfidenceDisplay
            The display.

        Raises
        ------
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_estimator : Predicts as well.

        Notes
        -----
        The colours always span 1/K to 1, so that one colour bar serves the plots of
        different classifiers.

        Examples
        --------
        >>> from sklearn.datasets import make_moons
        >>> from sklearn.naive_bayes import GaussianNB
        >>> from sklaplace.plotting import ConfidenceDisplay
        >>> X, y = make_moons(100, noise=0.1, random_state=0)
        >>> clf = GaussianNB().fit(X, y)
        >>> display = ConfidenceDisplay.from_estimator(clf, X, grid_resolution=5)
        >>> len(display.plot().figure_.axes)
        1
        """
        self.figure_, self.ax_ = new_axes(ax)
        style: dict[str, Any]
        proba = np.asarray(self.proba)
        n_classes = proba.shape[-1]
        # without it, values outside [1/K, 1] by rounding would be left blank
        confidence = self.confidence.clip(1 / n_classes, 1)
        levels = np.linspace(1 / max(n_classes, 2), 1, 11)
        style = {"cmap": "cividis", "levels": levels} | dict(surface_kw or {})
        self.surface_ = self.ax_.contourf(self.xx0, self.xx1, confidence, **style)
        style = {"colors": "white", "linewidths": 1.5} | dict(boundary_kw or {})
        style["levels"] = [0.0]
        self.boundaries_ = [
            self.ax_.contour(self.xx0, self.xx1, margin, **style)
            for margin in _margins(proba)
            if margin.min() < 0 < margin.max()
        ]
        for name, label in zip(self.feature_names, "xy", strict=True):
            if name is not None:
                self.ax_.set(**{f"{label}label": name})
        return self


def _margins(proba: np.ndarray) -> list[np.ndarray]:
    """Margin of each class over the best other; only of the first of two classes."""
    n_classes = proba.shape[-1]
    if n_classes < 2:
        return []
    return [
        proba[..., k] - np.delete(proba, k, axis=-1).max(axis=-1)
        for k in range(1 if n_classes == 2 else n_classes)
    ]
