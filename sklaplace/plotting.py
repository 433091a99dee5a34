"""Displays of predictive bands and of the confidence over a plane.

They follow scikit-learn's displays: ``from_estimator`` predicts and plots, ``plot``
plots stored predictions. matplotlib is imported at the first plot.

A band of coverage ``q`` is ``mean ± z std`` with ``z`` the normal quantile at
``(1 + q) / 2``; confidence is ``max_k p_k``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from scipy.stats import norm
from sklearn.utils import check_array

from sklaplace.core.checks import as_levels, check_count

Keywords = Mapping[str, Any] | None

# blue of Okabe and Ito, distinct from black and grey for any colour vision
_COLOR = "#0072B2"
# opacity of the widest and the narrowest band
_OPACITY = 0.15, 0.35


@dataclass(eq=False, repr=False, kw_only=True)
class PredictiveBandDisplay:
    """Mean of a regression over one feature, with nested bands of uncertainty.

    For one feature and one target. Use `from_estimator` to create it. Parameters are
    stored as attributes.

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
        """
        _require_matplotlib()
        coverage = _check_coverage(coverage)
        values = _check_columns(X, 1)
        (x,) = _axes_of_grid(values, grid_resolution, eps)
        mean, std = _mean_and_std(regressor, _like(x.reshape(-1, 1), X))
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
        """
        self.figure_, self.ax_ = _axes(ax)
        levels = sorted(_check_coverage(self.coverage), reverse=True)
        self.bands_ = []
        opacities = np.linspace(*_OPACITY, len(levels))
        for level, alpha in zip(levels, opacities, strict=True):
            half = norm.ppf((1 + level) / 2) * np.asarray(self.std)
            style = {"color": _COLOR, "alpha": alpha, "linewidth": 0}
            style |= {"label": f"{level:.0%} interval"} | dict(band_kw or {})
            band = np.subtract(self.mean, half), np.add(self.mean, half)
            self.bands_.append(self.ax_.fill_between(self.x, *band, **style))
        style = {"color": _COLOR, "label": "mean"} | dict(line_kw or {})
        (self.line_,) = self.ax_.plot(self.x, self.mean, **style)
        self.points_ = None
        if self.points is not None:
            style = {"color": "black", "s": 8, "zorder": 3, "label": "data"}
            style |= dict(points_kw or {})
            self.points_ = self.ax_.scatter(*self.points, **style)
        if self.feature_name is not None:
            self.ax_.set_xlabel(self.feature_name)
        return self


@dataclass(eq=False, repr=False, kw_only=True)
class ConfidenceDisplay:
    """Confidence of a classifier over the plane of its two features.

    Filled contours show the largest class probability, lines the decision boundaries.
    Use `from_estimator` to create it. Parameters are stored as attributes.

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
        """Largest class probability at each point of the grid."""
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
        """
        _require_matplotlib()
        if not hasattr(classifier, "predict_proba"):
            raise TypeError(
                f"{type(classifier).__name__} has no predict_proba. Pass a fitted "
                "classifier that gives probabilities."
            )
        axes = _axes_of_grid(_check_columns(X, 2), grid_resolution, eps)
        xx0, xx1 = np.meshgrid(*axes)
        grid = np.stack([xx0.ravel(), xx1.ravel()], axis=1)
        proba = np.asarray(classifier.predict_proba(_like(grid, X)))
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

        Notes
        -----
        The colours always span 1/K to 1, so that one colour bar serves the plots of
        different classifiers.
        """
        self.figure_, self.ax_ = _axes(ax)
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


def _require_matplotlib() -> Any:
    """``matplotlib.pyplot``; raise with a hint if it is not installed."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            'Plots need matplotlib. Install it with: pip install "sklaplace[plot]"'
        ) from error
    return plt


def _axes(ax: Any) -> tuple[Any, Any]:
    """Figure and axes, new ones if none are given."""
    plt = _require_matplotlib()
    if ax is None:
        _, ax = plt.subplots()
    return ax.figure, ax


def _check_columns(X: Any, n_features: int) -> np.ndarray:
    """X as an array; raise unless it has ``n_features`` columns."""
    values = check_array(X, input_name="X")
    if values.shape[1] != n_features:
        raise ValueError(
            f"X has {values.shape[1]} features, but this display needs {n_features}. "
            "Fit and plot an estimator of that many features."
        )
    return values


def _check_coverage(coverage: Any) -> tuple[float, ...]:
    """One or several coverages as a tuple."""
    levels = as_levels("coverage", coverage, "Choose a probability, such as 0.9.")
    return tuple(levels.tolist())


def _axes_of_grid(values: np.ndarray, resolution: int, eps: float) -> list[np.ndarray]:
    """Evenly spaced values over the range of each column, extended by eps."""
    check_count("grid_resolution", resolution, smallest=2)
    if not isinstance(eps, Real) or not 0 <= eps < np.inf:
        raise ValueError(f"eps={eps!r} is not valid. Choose a number from 0 up.")
    dtype = values.dtype if values.dtype.kind == "f" else np.float64
    return [
        np.linspace(column.min() - eps, column.max() + eps, resolution, dtype=dtype)
        for column in values.T
    ]


def _like(grid: np.ndarray, X: Any) -> Any:
    """The grid as a data frame if X is one, for estimators that check names."""
    if not hasattr(X, "columns"):
        return grid
    names = "schema" if hasattr(X, "schema") else "columns"  # polars, pandas
    return type(X)(grid, **{names: list(X.columns)})


def _mean_and_std(regressor: Any, X: Any) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of one target, (n,) each."""
    try:
        mean, std = regressor.predict(X, return_std=True)
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


def _margins(proba: np.ndarray) -> list[np.ndarray]:
    """Margin of each class over the best other; only of the first of two classes."""
    n_classes = proba.shape[-1]
    if n_classes < 2:
        return []
    return [
        proba[..., k] - np.delete(proba, k, axis=-1).max(axis=-1)
        for k in range(1 if n_classes == 2 else n_classes)
    ]
