"""PredictiveBandDisplay: mean and intervals of a regressor over one feature.

``predict_interval`` computes the band with coverage ``q``. If the regressor does not
have this method, the band is ``mean ± z std``, where ``z`` is the normal quantile at
``(1 + q) / 2``.
"""

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import norm
from sklearn.base import BaseEstimator
from sklearn.utils import check_consistent_length, column_or_1d

from sklaplace.core.checks import as_levels
from sklaplace.metrics.checks import last_step
from sklaplace.plotting import axes
from sklaplace.plotting.display import Display, Style
from sklaplace.plotting.grid import grid_over

# opacity of the widest and the narrowest band
_OPACITY_RANGE = 0.15, 0.35
_HINT = "Choose a probability, such as 0.9."


class PredictiveBandDisplay(Display):
    """Mean of a regressor over one feature, with nested uncertainty bands.

    The regressor must have one feature and one target. Use `from_estimator` to create
    the display. Parameters are stored as attributes.

    Read more in the :doc:`User Guide </user_guide/regression>`.

    Parameters
    ----------
    x : ndarray of shape (n,)
        Feature values in ascending order.
    mean : ndarray of shape (n,)
        Predicted means.
    std : ndarray of shape (n,)
        Predicted standard deviations, in units of the target.
    coverage : float or sequence of float, default=(0.5, 0.9)
        Coverages of the bands, each in (0, 1).
    points : tuple of two ndarrays of shape (m,), default=None
        Features and targets of the data points to plot.
    feature_name : str, default=None
        Label of the horizontal axis.
    intervals : ndarray of shape (n, 2, n_levels), default=None
        Lower and upper bounds of the bands, in the order of ``coverage``. By default,
        the bands are normal intervals.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes of the plot.
    figure_ : matplotlib Figure
        Figure of `ax_`.
    line_ : matplotlib Line2D
        Line of the mean.
    bands_ : list of matplotlib PolyCollection
        Bands, from the widest to the narrowest.
    points_ : matplotlib PathCollection or None
        Data points.

    See Also
    --------
    ConfidenceDisplay : Confidence of a classifier over two features.

    Examples
    --------
    >>> import numpy as np
    >>> from sklaplace import LaplaceRegressor
    >>> from sklaplace.plotting import PredictiveBandDisplay
    >>> X = np.linspace(-1, 1, 60).reshape(-1, 1)
    >>> y = np.sin(3 * X[:, 0]) + 0.1 * np.cos(50 * X[:, 0])
    >>> reg = LaplaceRegressor(random_state=0).fit(X, y)
    >>> display = PredictiveBandDisplay.from_estimator(reg, X, y, eps=1.0)
    >>> len(display.bands_)
    2
    """

    x: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    coverage: ArrayLike = (0.5, 0.9)
    points: tuple[np.ndarray, np.ndarray] | None = None
    feature_name: str | None = None
    intervals: np.ndarray | None = None

    @classmethod
    def from_estimator(
        cls,
        regressor: BaseEstimator,
        X: ArrayLike,
        y: ArrayLike | None = None,
        *,
        coverage: ArrayLike = (0.5, 0.9),
        grid_resolution: int = 200,
        eps: float = 0.0,
        **options: Any,
    ) -> Self:
        """Predict over the range of one feature, and plot the result.

        Parameters
        ----------
        regressor : object
            Fitted regressor with ``predict(X, return_std=True)``, such as a
            `LaplaceRegressor`, a pipeline or a Bayesian regressor from scikit-learn.
        X : array-like of shape (m, 1)
            Samples that determine the plotted range.
        y : array-like of shape (m,), default=None
            Targets. If given, the samples are plotted as points.
        coverage : float or sequence of float, default=(0.5, 0.9)
            Coverages of the bands, each in (0, 1).
        grid_resolution : int, default=200
            Number of feature values at which to predict.
        eps : float, default=0.0
            Extension of the range of `X` on each side, in units of `X`.
        **options : dict
            `ax`: axes to plot on; a new figure by default. `line_kw`, `band_kw` and
            `points_kw`: keyword arguments for matplotlib's ``plot``, ``fill_between``
            and ``scatter``.

        Returns
        -------
        PredictiveBandDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If `X` has more than one feature, the regressor has more than one target, or
            an option is out of range.
        TypeError
            If the regressor cannot predict standard deviations.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        plot : Plot the stored data.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> from sklaplace.plotting import PredictiveBandDisplay
        >>> X, y = load_diabetes(return_X_y=True)
        >>> reg = LaplaceRegressor(random_state=0).fit(X[:, [2]], y)
        >>> display = PredictiveBandDisplay.from_estimator(reg, X[:, [2]], coverage=0.9)
        >>> len(display.bands_)
        1
        """
        grid = grid_over(X, 1, grid_resolution, eps)
        check_consistent_length(X, y)
        points = None if y is None else (np.ravel(X), column_or_1d(y))
        mean, std = map(column_or_1d, regressor.predict(grid.points, return_std=True))
        # a pipeline has no `predict_interval`, but its last step may have one
        (predictor, inputs), intervals = last_step(regressor, grid.points), None
        if hasattr(predictor, "predict_interval"):
            intervals = predictor.predict_interval(inputs, np.ravel(coverage))
            # also for a single coverage, which has no axis of its own
            intervals = intervals.reshape(len(mean), 2, -1)
        return cls(
            x=grid.mesh[0],
            mean=mean,
            std=std,
            coverage=coverage,
            points=points,
            feature_name=grid.names[0],
            intervals=intervals,
        ).plot(**options)

    def _draw(
        self, *, line_kw: Style = None, band_kw: Style = None, points_kw: Style = None
    ) -> None:
        """Draw the bands, the mean, and the data points, if any."""
        levels = as_levels("coverage", self.coverage, _HINT)
        mean, std = np.asarray(self.mean), np.asarray(self.std)
        bounds = self.intervals  # (n, 2, n_levels)
        if bounds is None:
            half = std[:, None] * norm.ppf((1 + levels) / 2)
            bounds = mean[:, None, None] + np.stack([-half, half], axis=1)
        self.bands_ = []
        opacities = np.linspace(*_OPACITY_RANGE, len(levels))
        # widest first, so that narrower bands are drawn on top
        for k, alpha in zip(np.argsort(levels)[::-1], opacities, strict=True):
            level, (low, high) = levels[k], bounds[:, :, k].T
            style = axes.styled(band_kw, color=axes.BLUE, alpha=alpha, linewidth=0)
            style = {"label": f"{level:.0%} interval"} | style
            self.bands_.append(self.ax_.fill_between(self.x, low, high, **style))
        self.line_ = axes.draw_line(self.ax_, self.x, mean, line_kw, label="mean")
        self.points_ = None
        if self.points is not None:
            # zorder 3 is in front of lines
            style = axes.styled(points_kw, color="black", s=8, zorder=3, label="data")
            self.points_ = self.ax_.scatter(*self.points, **style)
        self.ax_.set(xlabel=self.feature_name)
