"""RegressionCalibrationDisplay: empirical against nominal coverage of a regression."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import norm

from sklaplace.core.checks import as_levels, check_option
from sklaplace.metrics import empirical_frequency, sharpness
from sklaplace.plotting.axes import (
    BLUE,
    Keywords,
    draw_diagonal,
    draw_legend,
    new_axes,
    require_matplotlib,
    with_number,
)
from sklaplace.plotting.bands import mean_and_std

_LABELS = {
    "interval": ("nominal coverage", "empirical coverage"),
    "quantile": ("quantile level", "empirical frequency"),
}


@dataclass(eq=False, repr=False, kw_only=True)
class RegressionCalibrationDisplay:
    """Empirical against nominal coverage of a regression, with its sharpness.

    Below the diagonal intervals are too narrow, above it too wide. For one target.
    Use `from_estimator` or `from_predictions` to create it. Parameters are stored as
    attributes.

    Read more in the :doc:`User Guide </user_guide/regression>`.

    Parameters
    ----------
    levels : ndarray of shape (n_levels,)
        Nominal coverages, or levels of quantiles, ascending.
    frequency : ndarray of shape (n_levels,)
        Fraction of targets inside the intervals, or at most the quantiles.
    sharpness : float
        Mean predicted variance.
    kind : {"interval", "quantile"}, default="interval"
        What the levels are.
    name : str, default=None
        Name in the legend.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes of the plot.
    figure_ : matplotlib Figure
        The figure of `ax_`.
    line_ : matplotlib Line2D
        The curve.
    reference_ : matplotlib Line2D
        The diagonal.

    See Also
    --------
    PredictiveBandDisplay : The intervals themselves.
    sklaplace.metrics.empirical_frequency : What is plotted for quantiles.
    sklaplace.metrics.sharpness : The number in the legend.

    References
    ----------
    Kuleshov, Fenner, Ermon (2018), "Accurate uncertainties for deep learning using
    calibrated regression", ICML.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklearn.linear_model import BayesianRidge
    >>> from sklaplace.plotting import RegressionCalibrationDisplay
    >>> X, y = load_diabetes(return_X_y=True)
    >>> reg = BayesianRidge().fit(X[:300], y[:300])
    >>> display = RegressionCalibrationDisplay.from_estimator(
    ...     reg, X[300:], y[300:], levels=[0.5, 0.9]
    ... )
    >>> display.frequency
    array([0.549, 0.908 ])
    """

    levels: Any
    frequency: Any
    sharpness: float
    kind: str = "interval"
    name: str | None = None

    @classmethod
    def from_estimator(
        cls,
        regressor: Any,
        X: Any,
        y: Any,
        *,
        kind: str = "interval",
        levels: Any = None,
        sample_weight: Any = None,
        name: str | None = None,
        ax: Any = None,
        line_kw: Keywords = None,
    ) -> "RegressionCalibrationDisplay":
        """Predict quantiles and plot how many targets are below them.

        Parameters
        ----------
        regressor : object
            Fitted, with ``predict(X, return_std=True)``. Quantiles are those of its
            ``predict_quantiles`` if it has one, else of a Gaussian.
        X : array-like of shape (n, ...)
            Samples that the regressor was not trained on.
        y : array-like of shape (n,)
            Their targets.
        kind : {"interval", "quantile"}, default="interval"
            Coverage of central intervals, or frequency of targets below quantiles. The
            second also shows whether targets are too often on one side.
        levels : array-like of shape (n_levels,), default=None
            Nominal coverages or levels, each in (0, 1). 0.05, 0.1 and so on to 0.95 by
            default.
        sample_weight : array-like of shape (n,), default=None
            Sample weights.
        name : str, default=None
            Name in the legend; that of the class of the estimator by default.
        ax : matplotlib Axes, default=None
            Axes to plot on. A new figure by default.
        line_kw : dict, default=None
            Keywords for matplotlib's ``plot``.

        Returns
        -------
        RegressionCalibrationDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If the regressor has more than one target, or an option is out of range.
        TypeError
            If the regressor cannot predict standard deviations.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_predictions : Of given means and standard deviations.

        Examples
        --------
        >>> from sklearn.datasets import load_diabetes
        >>> from sklaplace import LaplaceRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = LaplaceRegressor(random_state=0).fit(X, y)
        >>> from sklaplace.plotting import RegressionCalibrationDisplay
        >>> display = RegressionCalibrationDisplay.from_estimator(model, X, y)
        >>> display.frequency.shape == display.levels.shape
        True
        """
        require_matplotlib()
        levels = _check_levels(levels)
        tails = _tails(kind, levels)
        mean, std = mean_and_std(regressor, X)
        if hasattr(regressor, "predict_quantiles"):
            quantiles = np.asarray(regressor.predict_quantiles(X, tails))
            quantiles = quantiles.reshape(len(mean), -1)
        else:
            quantiles = _gaussian_quantiles(mean, std, tails)
        frequency = _frequency(kind, y, quantiles, sample_weight)
        display = cls(
            levels=levels,
            frequency=frequency,
            sharpness=sharpness(std, sample_weight=sample_weight),
            kind=kind,
            name=type(regressor).__name__ if name is None else name,
        )
        return display.plot(ax, line_kw=line_kw)

    @classmethod
    def from_predictions(
        cls,
        y_true: Any,
        y_mean: Any,
        y_std: Any,
        *,
        kind: str = "interval",
        levels: Any = None,
        sample_weight: Any = None,
        name: str | None = None,
        ax: Any = None,
        line_kw: Keywords = None,
    ) -> "RegressionCalibrationDisplay":
        """Plot the calibration of Gaussian predictions.

        Parameters
        ----------
        y_true : array-like of shape (n,)
            Targets.
        y_mean, y_std : array-like of shape (n,)
            Predicted means and standard deviations, observation noise included.
        kind, levels, sample_weight, name, ax, line_kw
            As for `from_estimator`; ``name`` is None by default.

        Returns
        -------
        RegressionCalibrationDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If shapes differ, a standard deviation is not positive, or an option is
            out of range.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_estimator : Predicts them.

        Examples
        --------
        >>> import numpy as np
        >>> from sklaplace.plotting import RegressionCalibrationDisplay
        >>> y = np.random.default_rng(0).normal(size=100)
        >>> display = RegressionCalibrationDisplay.from_predictions(
        ...     y, np.zeros(100), np.ones(100)
        ... )
        >>> display.frequency.shape == display.levels.shape
        True
        """
        require_matplotlib()
        levels = _check_levels(levels)
        sharp = sharpness(y_std, sample_weight=sample_weight)
        mean, std = (np.asarray(values, dtype=float) for values in (y_mean, y_std))
        if mean.ndim != 1 or mean.shape != std.shape:
            raise ValueError(
                f"y_mean and y_std have shapes {mean.shape} and {std.shape}. Pass one "
                "number per sample in each; plot several targets one by one."
            )
        quantiles = _gaussian_quantiles(mean, std, _tails(kind, levels))
        display = cls(
            levels=levels,
            frequency=_frequency(kind, y_true, quantiles, sample_weight),
            sharpness=sharp,
            kind=kind,
            name=name,
        )
        return display.plot(ax, line_kw=line_kw)

    def plot(
        self, ax: Any = None, *, line_kw: Keywords = None
    ) -> "RegressionCalibrationDisplay":
        """Plot the curve.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Axes to plot on. A new figure by default.
        line_kw : dict, default=None
            Keywords for matplotlib's ``plot``.

        Returns
        -------
        RegressionCalibrationDisplay
            The display.

        Raises
        ------
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_predictions : Creates the display as well.

        Examples
        --------
        >>> import numpy as np
        >>> from sklaplace.plotting import RegressionCalibrationDisplay
        >>> y = np.random.default_rng(0).normal(size=100)
        >>> display = RegressionCalibrationDisplay.from_predictions(
        ...     y, np.zeros(100), np.ones(100)
        ... )
        >>> display.plot().ax_.get_xlabel()
        'nominal coverage'
        """
        self.figure_, self.ax_ = new_axes(ax)
        self.reference_ = draw_diagonal(self.ax_)
        label = with_number(self.name, "sharpness", self.sharpness)
        style = {"color": BLUE, "marker": "o", "markersize": 4, "label": label}
        style |= dict(line_kw or {})
        (self.line_,) = self.ax_.plot(self.levels, self.frequency, **style)
        x_label, y_label = _LABELS[self.kind]
        self.ax_.set(xlabel=x_label, ylabel=y_label, xlim=(0, 1), ylim=(0, 1))
        draw_legend(self.ax_)
        return self


def _check_levels(levels: Any) -> np.ndarray:
    """Levels in ascending order, some twenty by default."""
    if levels is None:
        return np.arange(1, 20) / 20
    return np.sort(as_levels("levels", levels, "Choose probabilities, such as 0.9."))


def _tails(kind: str, levels: np.ndarray) -> np.ndarray:
    """Levels of the quantiles to predict: of intervals, all lower before all upper."""
    check_option("kind", kind, _LABELS)
    if kind == "quantile":
        return levels
    return np.concatenate([(1 - levels) / 2, (1 + levels) / 2])


def _gaussian_quantiles(
    mean: np.ndarray, std: np.ndarray, tails: np.ndarray
) -> np.ndarray:
    """Quantiles of Gaussians, (n, n_levels)."""
    return mean[:, None] + std[:, None] * norm.ppf(tails)


def _frequency(
    kind: str, y: Any, quantiles: np.ndarray, sample_weight: Any
) -> np.ndarray:
    """Fraction of targets at most the quantiles, or between two."""
    below = empirical_frequency(y, quantiles, sample_weight=sample_weight)
    if kind == "quantile":
        return below
    lower, upper = np.split(below, 2)
    return upper - lower
