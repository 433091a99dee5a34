"""PredictiveBandDisplay: mean and intervals of a regression over one feature.

A band of coverage ``q`` is ``mean ± z std`` with ``z`` the normal quantile at
``(1 + q) / 2``.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm
from sklearn.exceptions import NotFittedError
from sklearn.utils import check_array

from sklaplace.core.checks import as_levels
from sklaplace.plotting.axes import BLUE, Keywords, new_axes, require_matplotlib
from sklaplace.plotting.grid import as_frame_like, axes_of_grid, check_columns

# opacity of the widest and the narrowest band
_OPACITY = 0.15, 0.35


@dataclass(eq=False, repr=False, kw_only=True)
class PredictiveBandDisplay:
    """Mean of a regression over one feature, with nested bands of uncertainty.

    For one feature and one target. Use `from_estimator` to create it. Parameters are
    stored as attributes.

    Read more in the :doc:`User Guide </user_guide/regression>`.

    Parameters
    ----------
    x : ndarray of shape (n,)
        Values of the feature, ascending.
    mean : ndarray of shape (n,)
        Predicted means.
    std : ndarray of shape (n,)
        Predicted standard deviations, in units of the target.
    coverage : sequence of float, default=(0.5, 0.9)
        Coverages of the bands, each in (0, 1).
    points : tuple of two ndarrays of shape (m,), default=None
        Feature and target of data points.
    feature_name : str, default=None
        Label of the horizontal axis.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes of the plot.
    figure_ : matplotlib Figure
        The figure of `ax_`.
    line_ : matplotlib Line2D
        The mean.
    bands_ : list of matplotlib PolyCollection
        The bands, from the widest to the narrowest.
    points_ : matplotlib PathCollection or None
        The data points.

    See Also
    --------
    ConfidenceDisplay : Confidence of a classifier over a plane.

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

    x: Any
    mean: Any
    std: Any
    coverage: Any = (0.5, 0.9)
    points: tuple[Any, Any] | None = None
    feature_name: str | None = None

    @classmethod
    def from_estimator(
        cls,
        regressor: Any,
        X: Any,
        y: Any = None,
        *,
        coverage: Any = (0.5, 0.9),
        grid_resolution: int = 200,
        eps: float = 0.0,
        ax: Any = None,
        line_kw: Keywords = None,
        band_kw: Keywords = None,
        points_kw: Keywords = None,
    ) -> "PredictiveBandDisplay":
        """Predict over the range of one feature and plot the result.

        Parameters
        ----------
        regressor : object
            Fitted, with ``predict(X, return_std=True)``: a `LaplaceRegressor`, a
            pipeline that ends in one, or one of scikit-learn's Bayesian regressors.
        X : array-like of shape (m, 1)
            Samples whose range is plotted.
        y : array-like of shape (m,), default=None
            Targets of the samples. If given, they are plotted as points.
        coverage : float or sequence of float, default=(0.5, 0.9)
            Coverages of the bands, each in (0, 1).
        grid_resolution : int, default=200
            Number of values at which to predict.
        eps : float, default=0.0
            Extension of the range of `X` on either side, in its units.
        ax : matplotlib Axes, default=None
            Axes to plot on. A new figure by default.
        line_kw, band_kw, points_kw : dict, default=None
            Keywords for matplotlib's ``plot``, ``fill_between`` and ``scatter``.

        Returns
        -------
        PredictiveBandDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If `X` has more than one feature, the regressor more than one target,
            or an option is out of range.
        TypeError
            If the regressor cannot predict standard deviations.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        plot : Plots what is stored.

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
        require_matplotlib()
        coverage = _check_coverage(coverage)
        values = check_columns(X, 1)
        (x,) = axes_of_grid(values, grid_resolution, eps)
        mean, std = mean_and_std(regressor, as_frame_like(x.reshape(-1, 1), X))
        points = None
        if y is not None:
            targets = check_array(y, ensure_2d=False, input_name="y").ravel()
            if len(targets) != len(values):
                raise ValueError(
                    f"y has {len(targets)} entries, but X has {len(values)} rows. "
                    "Pass one target per row, or no y."
                )
            points = values[:, 0], targets
        name = getattr(X, "columns", [None])[0]
        display = cls(
            x=x, mean=mean, std=std, coverage=coverage, points=points, feature_name=name
        )
        return display.plot(ax, line_kw=line_kw, band_kw=band_kw, points_kw=points_kw)

    def plot(
        self,
        ax: Any = None,
        *,
        line_kw: Keywords = None,
        band_kw: Keywords = None,
        points_kw: Keywords = None,
    ) -> "PredictiveBandDisplay":
        """Plot mean and bands, and the data points if there are any.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Axes to plot on. A new figure by default.
        line_kw, band_kw, points_kw : dict, default=None
            Keywords for matplotlib's ``plot``, ``fill_between`` and ``scatter``.

        Returns
        -------
        PredictiveBandDisplay
            The display.

        Raises
        ------
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_estimator : Predicts as well.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> from sklaplace.plotting import PredictiveBandDisplay
        >>> X, y = load_diabetes(return_X_y=True)
        >>> reg = LaplaceRegressor(random_state=0).fit(X[:, [2]], y)
        >>> display = PredictiveBandDisplay.from_estimator(reg, X[:, [2]], coverage=0.9)
        >>> len(display.plot().bands_)
        1
        """
        self.figure_, self.ax_ = new_axes(ax)
        levels = sorted(_check_coverage(self.coverage), reverse=True)
        self.bands_ = []
        opacities = np.linspace(*_OPACITY, len(levels))
        for level, alpha in zip(levels, opacities, strict=True):
            half = norm.ppf((1 + level) / 2) * np.asarray(self.std)
            style = {"color": BLUE, "alpha": alpha, "linewidth": 0}
            style |= {"label": f"{level:.0%} interval"} | dict(band_kw or {})
            band = np.subtract(self.mean, half), np.add(self.mean, half)
            self.bands_.append(self.ax_.fill_between(self.x, *band, **style))
        style = {"color": BLUE, "label": "mean"} | dict(line_kw or {})
        (self.line_,) = self.ax_.plot(self.x, self.mean, **style)
        self.points_ = None
        if self.points is not None:
            style = {"color": "black", "s": 8, "zorder": 3, "label": "data"}
            style |= dict(points_kw or {})
            self.points_ = self.ax_.scatter(*self.points, **style)
        if self.feature_name is not None:
            self.ax_.set_xlabel(self.feature_name)
        return self


def _check_coverage(coverage: Any) -> tuple[float, ...]:
    """One or several coverages as a tuple."""
    levels = as_levels("coverage", coverage, "Choose a probability, such as 0.9.")
    return tuple(levels.tolist())


def mean_and_std(regressor: Any, X: Any) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of one target, (n,) each."""
    try:
        mean, std = regressor.predict(X, return_std=True)
    except NotFittedError:  # which is an AttributeError
        raise
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"{type(regressor).__name__} does not predict standard deviations. Pass a "
            "fitted regressor whose predict takes return_std=True."
        ) from error
    mean, std = np.asarray(mean), np.asarray(std)
    if mean.size != len(mean):
        raise ValueError(
            f"The regressor predicts {mean.shape[1]} targets, but one can be plotted. "
            "Fit one target, or create a display of each from its mean and std."
        )
    return mean.ravel(), std.ravel()
