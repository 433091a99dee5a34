"""RegressionCalibrationDisplay: empirical versus nominal coverage of a regressor."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import norm
from sklearn.base import BaseEstimator
from sklearn.utils import check_consistent_length

from sklaplace.core.checks import as_levels, check_option
from sklaplace.metrics import empirical_frequency, sharpness
from sklaplace.metrics.checks import as_vector, last_step
from sklaplace.plotting import axes
from sklaplace.plotting.display import Display, Style

_LABELS = {
    "interval": ("nominal coverage", "empirical coverage"),
    "quantile": ("quantile level", "empirical frequency"),
}


class RegressionCalibrationDisplay(Display):
    """Empirical versus nominal coverage of a regressor, with its sharpness.

    Intervals are too narrow if the curve is below the diagonal, and too wide if it is
    above the diagonal. The regressor must have one target. Use `from_estimator` or
    `from_predictions` to create the display. Parameters are stored as attributes.

    Read more in the :doc:`User Guide </user_guide/regression>`.

    Parameters
    ----------
    levels : ndarray of shape (n_levels,)
        Nominal coverages or quantile levels, in ascending order.
    frequency : ndarray of shape (n_levels,)
        Fraction of targets inside the intervals, or not above the quantiles, per level.
    sharpness : float
        Mean predicted variance.
    kind : {"interval", "quantile"}, default="interval"
        Whether ``levels`` are coverages of intervals or levels of quantiles.
    name : str, default=None
        Name in the legend.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes of the plot.
    figure_ : matplotlib Figure
        Figure of `ax_`.
    line_ : matplotlib Line2D
        Calibration curve.
    reference_ : matplotlib Line2D
        Diagonal of perfect calibration.

    See Also
    --------
    PredictiveBandDisplay : Intervals over one feature.
    sklaplace.metrics.empirical_frequency : Compute the curve for quantiles.
    sklaplace.metrics.sharpness : Compute the sharpness without a plot.

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

    levels: np.ndarray
    frequency: np.ndarray
    sharpness: float
    kind: str = "interval"
    name: str | None = None

    @classmethod
    def from_estimator(
        cls, regressor: BaseEstimator, X: object, y: ArrayLike, **options: Any
    ) -> Self:
        """Predict quantiles, and plot the calibration curve.

        Parameters
        ----------
        regressor : object
            Fitted regressor with ``predict(X, return_std=True)``. Quantiles come from
            ``predict_quantiles`` if this method exists, otherwise from a normal
            distribution.
        X : array-like of shape (n, ...)
            Held-out samples.
        y : array-like of shape (n,)
            Held-out targets.
        **options : dict
            `name`: name in the legend, by default the estimator's class. `kind`,
            `levels`, `sample_weight`, `ax` and `line_kw`: see `from_predictions`.

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
        from_predictions : Plot given predictions.

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
        mean, std = regressor.predict(X, return_std=True)
        options.setdefault("name", type(regressor).__name__)
        predictor, X = last_step(regressor, X)
        if hasattr(predictor, "predict_quantiles"):
            # a function, because `from_predictions` chooses the levels
            options["quantiles"] = partial(predictor.predict_quantiles, X)
        return cls.from_predictions(y, mean, std, **options)

    @classmethod
    def from_predictions(
        cls,
        y_true: ArrayLike,
        y_mean: ArrayLike,
        y_std: ArrayLike,
        *,
        kind: str = "interval",
        levels: ArrayLike | None = None,
        quantiles: Callable[[np.ndarray], ArrayLike] | None = None,
        sample_weight: ArrayLike | None = None,
        name: str | None = None,
        **options: Any,
    ) -> Self:
        """Plot the calibration curve of predictions, which are Gaussian by default.

        Parameters
        ----------
        y_true : array-like of shape (n,)
            Targets.
        y_mean, y_std : array-like of shape (n,)
            Predicted means and standard deviations, including observation noise.
        kind : {"interval", "quantile"}, default="interval"
            Coverage of central intervals, or frequency of targets below quantiles.
            Quantiles also show whether targets are too often above or below them.
        levels : array-like of shape (n_levels,), default=None
            Nominal coverages or quantile levels, each in (0, 1). The default is 0.05,
            0.1, ..., 0.95.
        quantiles : callable, default=None
            Function that maps levels (m,) to predicted quantiles (n, m). By default,
            the quantiles are Gaussian.
        sample_weight : array-like of shape (n,), default=None
            Sample weights.
        name : str, default=None
            Name in the legend.
        **options : dict
            `ax`: axes to plot on; a new figure by default. `line_kw`: keyword arguments
            for matplotlib's ``plot``.

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
        from_estimator : Predict and plot the calibration.

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
        sharp = sharpness(y_std, sample_weight=sample_weight)
        mean, std = as_vector(y_mean, "y_mean"), as_vector(y_std, "y_std")
        check_consistent_length(mean, std)
        check_option("kind", kind, _LABELS)
        hint = "Choose probabilities, such as 0.9."
        levels = np.arange(1, 20) / 20 if levels is None else levels
        levels = np.sort(as_levels("levels", levels, hint))
        # for intervals, the levels of all lower bounds come before those of all upper
        # bounds
        ends = [levels] if kind == "quantile" else [(1 - levels) / 2, (1 + levels) / 2]
        quantile_levels = np.concatenate(ends)
        if quantiles is None:
            bounds = mean[:, None] + std[:, None] * norm.ppf(quantile_levels)
        else:
            bounds = np.asarray(quantiles(quantile_levels)).reshape(len(mean), -1)
        frequency = empirical_frequency(y_true, bounds, sample_weight=sample_weight)
        if kind == "interval":
            # targets inside are those below the upper but not below the lower bound
            lower, upper = np.split(frequency, 2)
            frequency = upper - lower
        return cls(
            levels=levels, frequency=frequency, sharpness=sharp, kind=kind, name=name
        ).plot(**options)

    def _draw(self, *, line_kw: Style = None) -> None:
        """Draw the curve and the diagonal."""
        self.reference_ = axes.draw_diagonal(self.ax_)
        number = f"sharpness {axes.three_digits(self.sharpness)}"
        label = axes.curve_label(self.name, number)
        x, y, style = self.levels, self.frequency, {"label": label, **axes.MARKED}
        self.line_ = axes.draw_line(self.ax_, x, y, line_kw, **style)
        x_label, y_label = _LABELS[self.kind]
        self.ax_.set(xlabel=x_label, ylabel=y_label, xlim=(0, 1), ylim=(0, 1))
        axes.draw_legend(self.ax_)
