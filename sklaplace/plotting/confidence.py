"""ConfidenceDisplay: the largest class probability over a plane."""

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator

from sklaplace.plotting import axes
from sklaplace.plotting.display import Display, Style
from sklaplace.plotting.predictions import grid_over


class ConfidenceDisplay(Display):
    """Confidence of a classifier over the plane of its two features.

    Filled contours show the largest class probability, lines the decision boundaries.
    Use `from_estimator` to create the display. Parameters are stored as attributes.

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

    Notes
    -----
    The colours always span 1/K to 1, so that one colour bar serves the plots of
    different classifiers.

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

    xx0: np.ndarray
    xx1: np.ndarray
    proba: np.ndarray
    feature_names: tuple[str | None, ...] = (None, None)

    @property
    def confidence(self) -> np.ndarray:
        """Largest class probability at each point of the grid.

        See Also
        --------
        from_estimator : Predicts and plots the probabilities.

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
        classifier: BaseEstimator,
        X: ArrayLike,
        *,
        grid_resolution: int = 100,
        eps: float = 1.0,
        **options: Any,
    ) -> Self:
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
            Extension of the range of `X` on each side, in units of `X`.
        **options : dict
            `ax`: axes to plot on; None creates a figure.
            `surface_kw` and `boundary_kw`: dicts of keywords for matplotlib's
            ``contourf`` and ``contour``.

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
        plot : Plots the stored data.

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
        cls._require(classifier, "predict_proba")
        grid = grid_over(X, 2, grid_resolution, eps)
        proba = np.asarray(classifier.predict_proba(grid.points))
        return cls(
            xx0=grid.mesh[0],
            xx1=grid.mesh[1],
            proba=proba.reshape(*grid.mesh[0].shape, -1),
            feature_names=grid.names,
        ).plot(**options)

    def _draw(self, *, surface_kw: Style = None, boundary_kw: Style = None) -> None:
        """Draw the confidence and the decision boundaries."""
        proba = np.asarray(self.proba)
        n_classes = proba.shape[-1]
        # Values that rounding puts outside of [1/K, 1] would be left blank.
        confidence = self.confidence.clip(1 / n_classes, 1)
        levels = np.linspace(1 / max(n_classes, 2), 1, 11)
        style = axes.styled(surface_kw, cmap="cividis", levels=levels)
        self.surface_ = self.ax_.contourf(self.xx0, self.xx1, confidence, **style)
        style = axes.styled(boundary_kw, colors="white", linewidths=1.5)
        # Each class against the best other; of two classes, one against the other.
        ones = range(n_classes if n_classes > 2 else n_classes - 1)
        margins = [
            proba[..., k] - np.delete(proba, k, axis=-1).max(axis=-1) for k in ones
        ]
        self.boundaries_ = [
            self.ax_.contour(self.xx0, self.xx1, margin, **style | {"levels": [0.0]})
            for margin in margins
            if margin.min() < 0 < margin.max()
        ]
        axes.label_axes(self.ax_, *self.feature_names)
