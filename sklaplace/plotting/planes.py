"""Displays of a classifier over two features."""

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator

from sklaplace.metrics.checks import last_step
from sklaplace.plotting import axes
from sklaplace.plotting.display import Display, Style
from sklaplace.plotting.grid import grid_over

TITLES = ("total", "aleatoric", "epistemic")


class ConfidenceDisplay(Display):
    """Confidence of a classifier over two features.

    Filled contours show the largest class probability, and lines show the decision
    boundaries. Use `from_estimator` to create the display. Parameters are stored as
    attributes.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    xx0, xx1 : ndarray of shape (grid_resolution, grid_resolution)
        First and second features on the grid.
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
        Figure of `ax_`.
    surface_ : matplotlib QuadContourSet
        Filled contours, for use in ``figure.colorbar``.
    boundaries_ : list of matplotlib QuadContourSet
        Decision boundaries: one for two classes, otherwise one per class.

    See Also
    --------
    PredictiveBandDisplay : Mean and bands of a regressor.
    sklearn.inspection.DecisionBoundaryDisplay : Predicted classes.

    Notes
    -----
    The colour scale always ranges from 1/K to 1, so plots of different classifiers can
    share a colour bar.

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
        from_estimator : Predict and plot the probabilities.

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
        """Predict on a grid over two features, and plot the confidence.

        Parameters
        ----------
        classifier : object
            Fitted classifier with ``predict_proba``, such as a `LaplaceClassifier`, a
            pipeline or a skorch net.
        X : array-like of shape (m, 2)
            Samples that determine the range and dtype of the grid.
        grid_resolution : int, default=100
            Number of values per feature.
        eps : float, default=1.0
            Extension of the range of `X` on each side, in units of `X`.
        **options : dict
            `ax`: axes to plot on; a new figure by default. `surface_kw` and
            `boundary_kw`: keyword arguments for matplotlib's ``contourf`` and
            ``contour``.

        Returns
        -------
        ConfidenceDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If `X` does not have two features, or an option is out of range.
        AttributeError
            If the classifier has no ``predict_proba``.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        plot : Plot the stored data.

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
        grid = grid_over(X, 2, grid_resolution, eps)
        xx0, xx1 = grid.mesh
        proba = np.asarray(classifier.predict_proba(grid.points))
        proba = proba.reshape(*xx0.shape, -1)
        display = cls(xx0=xx0, xx1=xx1, proba=proba, feature_names=grid.names)
        return display.plot(**options)

    def _draw(self, *, surface_kw: Style = None, boundary_kw: Style = None) -> None:
        """Draw the confidence and the decision boundaries."""
        proba = np.asarray(self.proba)
        n_classes = proba.shape[-1]
        # Values that rounding moves outside [1/K, 1] would be left blank.
        confidence = self.confidence.clip(1 / n_classes, 1)
        # Eleven levels bound ten colours. They must differ, even for a single class.
        levels = np.linspace(1 / max(n_classes, 2), 1, 11)
        style = axes.styled(surface_kw, cmap="cividis", levels=levels)
        self.surface_ = self.ax_.contourf(self.xx0, self.xx1, confidence, **style)
        style = axes.styled(boundary_kw, colors="white", linewidths=1.5)
        # Compare each class with the best other class. Two classes have one boundary.
        n_compared = n_classes if n_classes > 2 else n_classes - 1
        margins = [
            proba[..., k] - np.delete(proba, k, axis=-1).max(axis=-1)
            for k in range(n_compared)
        ]
        self.boundaries_ = [
            self.ax_.contour(self.xx0, self.xx1, margin, **style | {"levels": [0.0]})
            for margin in margins
            if margin.min() < 0 < margin.max()  # matplotlib warns of empty contours
        ]
        self.ax_.set(xlabel=self.feature_names[0], ylabel=self.feature_names[1])


class UncertaintyDisplay(Display):
    """Uncertainty of a classifier over two features.

    The display has three maps with a common colour scale. Total uncertainty is the sum
    of aleatoric and epistemic uncertainty. More training samples reduce only the
    epistemic uncertainty. Use `from_estimator` to create the display. Parameters are
    stored as attributes.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    xx0, xx1 : ndarray of shape (grid_resolution, grid_resolution)
        First and second features on the grid.
    uncertainty : ndarray of shape (grid_resolution, grid_resolution, 3)
        Total, aleatoric and epistemic uncertainty in nats.
    feature_names : tuple of two str, default=(None, None)
        Labels of the axes.

    Attributes
    ----------
    axes_ : list of three matplotlib Axes
        Axes of total, aleatoric and epistemic uncertainty.
    figure_ : matplotlib Figure
        Figure of `axes_`.
    surfaces_ : list of three matplotlib QuadContourSet
        Filled contours.
    colorbar_ : matplotlib Colorbar or None
        Colour bar of all three maps, in nats; None if ``colorbar=False``.

    See Also
    --------
    ConfidenceDisplay : Largest class probability.
    DirichletDisplay : Distribution of the probabilities of one sample.
    sklearn.inspection.DecisionBoundaryDisplay : Predicted classes.

    Notes
    -----
    The colour scale ranges from zero to the largest total uncertainty on the grid.

    References
    ----------
    Depeweg, Hernández-Lobato, Doshi-Velez and Udluft (2018), "Decomposition of
    uncertainty in Bayesian deep learning for efficient and risk-sensitive learning",
    ICML.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> from sklaplace import LaplaceClassifier
    >>> from sklaplace.plotting import UncertaintyDisplay
    >>> X, y = make_moons(100, noise=0.1, random_state=0)
    >>> clf = LaplaceClassifier(random_state=0).fit(X, y)
    >>> display = UncertaintyDisplay.from_estimator(clf, X, grid_resolution=20)
    >>> display.uncertainty.shape
    (20, 20, 3)
    """

    n_axes = 3
    xx0: np.ndarray
    xx1: np.ndarray
    uncertainty: np.ndarray
    feature_names: tuple[str | None, ...] = (None, None)

    @classmethod
    def from_estimator(
        cls,
        classifier: BaseEstimator,
        X: ArrayLike,
        *,
        method: str | None = None,
        grid_resolution: int = 100,
        eps: float = 1.0,
        **options: Any,
    ) -> Self:
        """Predict on a grid over two features, and plot the uncertainty.

        Parameters
        ----------
        classifier : object
            Fitted classifier with ``predict_uncertainty`` and one label per sample,
            such as `LaplaceClassifier`.
        X : array-like of shape (m, 2)
            Samples that determine the range and dtype of the grid.
        method : str, default=None
            Passed to ``predict_uncertainty``.
        grid_resolution : int, default=100
            Number of values per feature.
        eps : float, default=1.0
            Extension of the range of `X` on each side, in units of `X`.
        **options : dict
            `ax`: axes to plot on; a new figure by default. `colorbar` (default True):
            whether to draw the colour bar. `surface_kw`: keyword arguments for
            matplotlib's ``contourf``.

        Returns
        -------
        UncertaintyDisplay
            The display, with the plot in `axes_`.

        Raises
        ------
        ValueError
            If `X` does not have two features, samples have several labels, or an option
            is out of range.
        AttributeError
            If the classifier has no ``predict_uncertainty``.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        sklaplace.LaplaceClassifier.predict_uncertainty : Compute the uncertainty.

        Examples
        --------
        >>> from sklearn.datasets import make_moons
        >>> from sklaplace import LaplaceClassifier
        >>> from sklaplace.plotting import UncertaintyDisplay
        >>> X, y = make_moons(100, noise=0.1, random_state=0)
        >>> clf = LaplaceClassifier(random_state=0).fit(X, y)
        >>> display = UncertaintyDisplay.from_estimator(clf, X, grid_resolution=5)
        >>> display.uncertainty.shape
        (5, 5, 3)
        """
        grid = grid_over(X, 2, grid_resolution, eps)
        xx0, xx1 = grid.mesh
        classifier, points = last_step(classifier, grid.points)
        entropy = np.asarray(classifier.predict_uncertainty(points, method=method))
        if entropy.ndim != 2:  # (number of points, 3) for one label per sample
            raise ValueError(
                f"The uncertainty of a sample has shape {entropy.shape[1:]}, but only "
                "one label can be plotted. Fit one label per sample."
            )
        maps = entropy.reshape(*xx0.shape, 3)
        display = cls(xx0=xx0, xx1=xx1, uncertainty=maps, feature_names=grid.names)
        return display.plot(**options)

    def _draw(self, *, colorbar: bool = True, surface_kw: Style = None) -> None:
        """Draw the three maps and the colour bar."""
        # A positive maximum keeps the levels distinct. Rounding can make values
        # negative.
        top = max(float(np.max(self.uncertainty)), np.finfo(np.float64).tiny)
        # one map for each title, (3, grid_resolution, grid_resolution)
        values = np.moveaxis(np.clip(self.uncertainty, 0, top), -1, 0)
        style = axes.styled(surface_kw, cmap="cividis", levels=np.linspace(0, top, 11))
        self.surfaces_ = []
        for ax, title, surface in zip(self.axes_, TITLES, values, strict=True):
            self.surfaces_.append(ax.contourf(self.xx0, self.xx1, surface, **style))
            ax.set(title=title, xlabel=self.feature_names[0])
        self.ax_.set(ylabel=self.feature_names[1])
        self.colorbar_ = None
        if colorbar:
            self.colorbar_ = self.figure_.colorbar(
                self.surfaces_[0], ax=self.axes_, format="%.2f"
            )
            self.colorbar_.set_label("uncertainty (nats)")
