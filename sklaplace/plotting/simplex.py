"""DirichletDisplay: density of a Dirichlet distribution over three probabilities."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator

from sklaplace.core.checks import check_count
from sklaplace.dirichlet import log_density, mean
from sklaplace.metrics.checks import last_step
from sklaplace.plotting import axes
from sklaplace.plotting.display import Display, Style

# corners of an equilateral triangle, at each of which one class has probability one
_CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(0.75)]])


class DirichletDisplay(Display):
    """Density of a Dirichlet distribution over the probabilities of three classes.

    Each point of the triangle represents three probabilities. The corners represent
    certainty, and the centre represents ``(1/3, 1/3, 1/3)``. Use `from_estimator` or
    `from_predictions` to create the display. Parameters are stored as attributes.

    Read more in the :ref:`User Guide <dirichlet>`.

    Parameters
    ----------
    proba : ndarray of shape (n, 3)
        Points on the simplex.
    log_density : ndarray of shape (n,)
        Logarithm of the density at the points `proba`, with respect to the Lebesgue
        measure of the first two probabilities.
    mean : ndarray of shape (3,)
        Mean of the Dirichlet.
    class_names : sequence of three str, default=("0", "1", "2")
        Labels of the corners.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes of the plot.
    figure_ : matplotlib Figure
        Figure of `ax_`.
    surface_ : matplotlib TriContourSet
        Filled contours, for use in ``figure.colorbar``.
    mean_ : matplotlib Line2D
        Point at the mean.
    edges_ : matplotlib Line2D
        Edges of the triangle.
    texts_ : list of matplotlib Text
        Labels of the corners.

    See Also
    --------
    UncertaintyDisplay : Uncertainty of a classifier over two features.
    sklaplace.dirichlet.log_density : Compute the log-density.

    Notes
    -----
    The colours show the density divided by its largest value on the grid. The grid
    excludes the edges, because the density is infinite on an edge if a concentration is
    below one. A distribution narrower than ``1 / grid_resolution`` is drawn with this
    width.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import LaplaceClassifier
    >>> from sklaplace.plotting import DirichletDisplay
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = LaplaceClassifier(random_state=0).fit(X, y)
    >>> display = DirichletDisplay.from_estimator(clf, X[100:101])
    >>> [text.get_text() for text in display.texts_]
    ['0', '1', '2']
    """

    proba: np.ndarray
    log_density: np.ndarray
    mean: np.ndarray
    class_names: Sequence[object] = ("0", "1", "2")

    @classmethod
    def from_estimator(
        cls,
        classifier: BaseEstimator,
        X: object,
        *,
        method: str | None = None,
        **options: Any,
    ) -> Self:
        """Predict and plot the Dirichlet distribution of one sample.

        Parameters
        ----------
        classifier : object
            Fitted classifier with ``predict_dirichlet`` and three classes.
        X : array-like of shape (1, ...)
            Sample to predict.
        method : str, default=None
            Passed to ``predict_dirichlet``.
        **options : dict
            `grid_resolution`, `ax`, `surface_kw` and `point_kw`: see
            `from_predictions`.

        Returns
        -------
        DirichletDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If the number of classes is not three, `X` does not contain exactly one
            sample, or an option is unknown.
        AttributeError
            If the classifier has no ``predict_dirichlet``.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_predictions : Plot the density for given concentrations.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> from sklaplace.plotting import DirichletDisplay
        >>> X, y = load_iris(return_X_y=True)
        >>> clf = LaplaceClassifier(random_state=0).fit(X, y)
        >>> display = DirichletDisplay.from_estimator(clf, X[70:71])
        >>> display.mean.shape
        (3,)
        """
        classifier, X = last_step(classifier, X)
        alpha = np.asarray(classifier.predict_dirichlet(X, method=method))
        if len(alpha) == 1:  # otherwise, `from_predictions` raises an error
            alpha = alpha[0]
        names = [str(label) for label in classifier.classes_]
        return cls.from_predictions(alpha, class_names=names, **options)

    @classmethod
    def from_predictions(
        cls,
        alpha: ArrayLike,
        *,
        class_names: Sequence[object] = ("0", "1", "2"),
        grid_resolution: int = 100,
        **options: Any,
    ) -> Self:
        """Plot the density for given concentrations.

        Parameters
        ----------
        alpha : array-like of shape (3,)
            Positive concentrations.
        class_names : sequence of three str, default=("0", "1", "2")
            Labels of the corners.
        grid_resolution : int, default=100
            Number of points along an edge.
        **options : dict
            `ax`: axes to plot on; a new figure by default. `surface_kw` and `point_kw`:
            keyword arguments for matplotlib's ``tricontourf`` and for the ``plot`` of
            the mean.

        Returns
        -------
        DirichletDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If the number of concentrations is not three, or one of them is not
            positive.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_estimator : Predict the concentrations and plot the density.

        Examples
        --------
        >>> from sklaplace.plotting import DirichletDisplay
        >>> DirichletDisplay.from_predictions([6.0, 3.0, 1.0]).mean
        array([0.6, 0.3, 0.1])
        """
        n = check_count("grid_resolution", grid_resolution, smallest=2)
        alpha = np.asarray(alpha, dtype=np.float64)
        if alpha.shape != (3,) or len(class_names) != 3:
            raise ValueError(
                f"alpha has shape {alpha.shape} and class_names has {len(class_names)} "
                "names. Pass three concentrations of one sample and three names."
            )
        proba = _inner_points(n)
        return cls(
            proba=proba,
            log_density=log_density(alpha, proba),
            mean=mean(alpha),
            class_names=class_names,
        ).plot(**options)

    def _draw(self, *, surface_kw: Style = None, point_kw: Style = None) -> None:
        """Draw the density, the mean, and the labelled triangle."""
        x, y = (np.asarray(self.proba) @ _CORNERS).T
        # Divided by the largest value, because the densities of narrow distributions
        # underflow.
        density = np.exp(self.log_density - np.max(self.log_density))
        style = axes.styled(surface_kw, cmap="cividis", levels=np.linspace(0, 1, 21))
        self.surface_ = self.ax_.tricontourf(x, y, density, **style)
        corners = _CORNERS[[0, 1, 2, 0]].T  # a closed line
        (self.edges_,) = self.ax_.plot(*corners, color="black", linewidth=1)
        style = axes.MARKED | {"color": axes.VERMILION, "linestyle": ""}
        x, y = np.asarray(self.mean) @ _CORNERS
        self.mean_ = axes.draw_line(self.ax_, x, y, point_kw, label="mean", **style)
        # distance of each label from its corner, and side of the label at that distance
        sides = [(-0.04, "top"), (-0.04, "top"), (0.03, "bottom")]
        labels = zip(_CORNERS, sides, self.class_names, strict=True)
        self.texts_ = [
            self.ax_.text(x, y + gap, str(name), ha="center", va=side)
            for (x, y), (gap, side), name in labels
        ]
        self.ax_.set(aspect="equal", xlim=(-0.1, 1.1), ylim=(-0.14, 1.0))
        self.ax_.set_axis_off()


def _inner_points(resolution: int) -> np.ndarray:
    """Return evenly spaced points (n, 3) inside the simplex.

    Points are all triples of whole numbers from zero with the sum ``resolution - 1``.
    Adding a third to each number moves the point away from the edges. The numbers are
    then divided by their sum.
    """
    edge = np.arange(resolution)
    pairs = np.argwhere(np.add.outer(edge, edge) < resolution)
    triples = np.column_stack([pairs, resolution - 1 - pairs.sum(axis=1)])
    return (triples + 1 / 3) / resolution
