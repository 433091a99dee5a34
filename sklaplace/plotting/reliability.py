"""ReliabilityDisplay: empirical frequency versus predicted probability."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator

from sklaplace.metrics import reliability_curve
from sklaplace.plotting import axes
from sklaplace.plotting.display import Display, Style

# maximum number of curves that are distinguishable on one plot
_MAX_CURVES = 5


class ReliabilityDisplay(Display):
    """Reliability diagram of a classifier, with the number of samples per bin.

    The diagram shows the most probable class, or each class against all others. Use
    `from_estimator` or `from_predictions` to create the display. Parameters are stored
    as attributes.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    frequency : ndarray of shape (n_bins,) or (K, n_bins)
        Empirical frequency per bin, or per class and bin; nan in empty bins.
    mean_proba : ndarray of the same shape
        Mean predicted probability per bin.
    weight : ndarray of the same shape
        Number of samples per bin, or sum of their weights.
    class_names : sequence of K str, default=None
        Names of the classes in the legend.
    name : str, default=None
        Name in the legend if there is only one curve.

    Attributes
    ----------
    calibration_error : float
        Weighted mean absolute difference between frequency and probability. For the
        most probable class, this is the expected calibration error.
    ax_ : matplotlib Axes
        Axes of the plot.
    count_ax_ : matplotlib Axes
        Axes of the sample counts, which share the horizontal axis.
    figure_ : matplotlib Figure
        Figure of `ax_`.
    lines_ : list of matplotlib Line2D
        One curve, or one per plotted class.
    reference_ : matplotlib Line2D
        Diagonal of perfect calibration.
    bars_ : list of matplotlib BarContainer
        Bars of the sample counts for each curve.

    See Also
    --------
    sklaplace.metrics.expected_calibration_error : Summary of the curve.
    sklaplace.metrics.reliability_curve : Compute the curves.
    sklearn.calibration.CalibrationDisplay : Display for two classes, without counts.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.naive_bayes import GaussianNB
    >>> from sklaplace.plotting import ReliabilityDisplay
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = GaussianNB().fit(X, y)
    >>> display = ReliabilityDisplay.from_estimator(clf, X, y, n_bins=5)
    >>> display.weight
    array([  0.,   0.,   2.,   4., 144.])
    """

    frequency: np.ndarray
    mean_proba: np.ndarray
    weight: np.ndarray
    class_names: Sequence[str] | None = None
    name: str | None = None

    @property
    def calibration_error(self) -> float:
        """Weighted mean absolute difference between frequency and probability.

        See Also
        --------
        sklaplace.metrics.expected_calibration_error : Compute the error without a plot.

        Examples
        --------
        >>> from sklaplace.plotting import ReliabilityDisplay
        >>> display = ReliabilityDisplay(frequency=[0.8], mean_proba=[0.9], weight=[10])
        >>> round(display.calibration_error, 2)
        0.1
        """
        return float(self._errors().sum() / np.sum(self.weight))

    @classmethod
    def from_estimator(
        cls, classifier: BaseEstimator, X: object, y: ArrayLike, **options: Any
    ) -> Self:
        """Predict probabilities, and plot the reliability diagram.

        Parameters
        ----------
        classifier : object
            Fitted classifier with ``predict_proba`` and ``classes_``.
        X : array-like of shape (n, ...)
            Held-out samples.
        y : array-like of shape (n,)
            Held-out labels.
        **options : dict
            `name`: name in the legend, by default the estimator's class. `kind`,
            `n_bins`, `strategy`, `sample_weight`, `ax`, `classes`, `line_kw` and
            `bar_kw`: see `from_predictions`.

        Returns
        -------
        ReliabilityDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If shapes or classes are inconsistent, or an option is unknown.
        AttributeError
            If the classifier has no ``predict_proba``.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_predictions : Plot given probabilities.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.naive_bayes import GaussianNB
        >>> from sklaplace.plotting import ReliabilityDisplay
        >>> X, y = load_iris(return_X_y=True)
        >>> clf = GaussianNB().fit(X, y)
        >>> ReliabilityDisplay.from_estimator(clf, X, y, kind="per_class").class_names
        ['0', '1', '2']
        """
        proba = classifier.predict_proba(X)
        options.setdefault("name", type(classifier).__name__)
        return cls.from_predictions(y, proba, labels=classifier.classes_, **options)

    @classmethod
    def from_predictions(
        cls,
        y_true: ArrayLike,
        y_proba: ArrayLike,
        *,
        labels: ArrayLike | None = None,
        kind: str = "top_label",
        n_bins: int = 10,
        strategy: str = "uniform",
        sample_weight: ArrayLike | None = None,
        name: str | None = None,
        **options: Any,
    ) -> Self:
        """Plot the reliability diagram of predicted probabilities.

        Parameters
        ----------
        y_true : array-like of shape (n,)
            Class labels.
        y_proba : array-like of shape (n, K) or (n,)
            Probabilities, one column per class in the order of ``labels``. For two
            classes, the probabilities of the second class suffice.
        labels : array-like of shape (K,), default=None
            Classes in the order of the columns. Defaults to the sorted unique values of
            ``y_true``.
        kind : {"top_label", "per_class"}, default="top_label"
            Diagram of the most probable class, or of each class against all others.
        n_bins : int, default=10
            Number of bins.
        strategy : {"uniform", "quantile"}, default="uniform"
            Bins of equal width (``"uniform"``) or equal weight (``"quantile"``).
        sample_weight : array-like of shape (n,), default=None
            Sample weights.
        name : str, default=None
            Name in the legend.
        **options : dict
            `ax`: axes to plot on; a new figure by default. `classes`: classes to plot
            with ``kind="per_class"``. Defaults to the five classes with the largest
            calibration errors. `line_kw` and `bar_kw`: keyword arguments for
            matplotlib's ``plot`` and ``bar``.

        Returns
        -------
        ReliabilityDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If shapes or classes are inconsistent, or an option is unknown.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_estimator : Predict and plot the probabilities.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.naive_bayes import GaussianNB
        >>> from sklaplace.plotting import ReliabilityDisplay
        >>> X, y = load_iris(return_X_y=True)
        >>> clf = GaussianNB().fit(X, y)
        >>> display = ReliabilityDisplay.from_predictions(y, clf.predict_proba(X))
        >>> round(display.calibration_error, 2)
        0.02
        """
        frequency, mean_proba, weight = reliability_curve(
            y_true,
            y_proba,
            kind=kind,
            n_bins=n_bins,
            strategy=strategy,
            labels=labels,
            sample_weight=sample_weight,
        )
        classes = np.unique(y_true) if labels is None else np.asarray(labels)
        return cls(
            frequency=frequency,
            mean_proba=mean_proba,
            weight=weight,
            class_names=[str(label) for label in classes.tolist()],
            name=name,
        ).plot(**options)

    def _draw(
        self,
        *,
        classes: ArrayLike | None = None,
        line_kw: Style = None,
        bar_kw: Style = None,
    ) -> None:
        """Draw the curves, and the sample counts on a log scale in the lower third."""
        ax, is_single = self.ax_, np.ndim(self.frequency) == 1
        if is_single:
            names = [axes.curve_label(self.name, f"ECE {self.calibration_error:.3f}")]
        else:
            names = list(self.class_names or map(str, range(len(self.frequency))))
        rows = self._rows(classes, names)  # of the curves to draw
        # one row per curve, (number of curves, n_bins)
        probas, frequencies, weights = (
            np.atleast_2d(values)[rows]
            for values in (self.mean_proba, self.frequency, self.weight)
        )
        self.reference_ = axes.draw_diagonal(ax)
        self.count_ax_ = ax.twinx()
        self.lines_, self.bars_ = [], []
        for k, weight in enumerate(weights):
            used = weight > 0  # empty bins contain nan, which would interrupt the line
            x, y = probas[k, used], frequencies[k, used]
            color = axes.PALETTE[k % len(axes.PALETTE)]
            style = axes.MARKED | {"color": color, "label": names[rows[k]]}
            self.lines_.append(axes.draw_line(ax, x, y, line_kw, **style))
            style = axes.styled(bar_kw, width=0.02, color=color, alpha=0.25)
            self.bars_.append(self.count_ax_.bar(x, weight[used], **style))
        x_label = "confidence" if is_single else "predicted probability"
        if len(rows) < len(names):
            x_label += f" ({len(rows)} of {len(names)} classes)"
        y_label = "accuracy" if is_single else "empirical frequency"
        limits = -0.03, 1.03  # do not clip markers at zero and one
        ax.set(xlabel=x_label, ylabel=y_label, xlim=limits, ylim=limits)
        self._scale_counts(weights)
        ax.set_zorder(self.count_ax_.get_zorder() + 1)  # lines in front of bars
        ax.patch.set_visible(False)  # the background would hide the bars
        axes.draw_legend(ax)

    def _errors(self) -> np.ndarray:
        """Return the sum of weighted differences for each curve, (K,) or ()."""
        # empty bins have nan, and count as zero
        gaps = np.nan_to_num(np.subtract(self.frequency, self.mean_proba))
        return np.asarray((np.abs(gaps) * self.weight).sum(axis=-1))

    def _rows(self, classes: ArrayLike | None, names: list[str]) -> list[int]:
        """Return the row indices of the curves to draw.

        By default, these are the curves with the largest calibration errors.
        """
        if classes is None:
            worst = np.argsort(-np.atleast_1d(self._errors()), kind="stable")
            return sorted(worst[:_MAX_CURVES].tolist())
        chosen = [str(label) for label in np.ravel(classes).tolist()]
        if np.ndim(self.frequency) == 1 or not chosen or not set(chosen) <= set(names):
            raise ValueError(
                f"classes={chosen} is not valid. Pass kind='per_class', and choose "
                f"from {self.class_names}."
            )
        return [names.index(label) for label in chosen]

    def _scale_counts(self, weight: np.ndarray) -> None:
        """Scale the axes of the counts so that the bars fill the lower third."""
        ax, fewest, most = self.count_ax_, weight[weight > 0].min(), weight.max()
        # On the log scale, the largest bar has a third of the axes' height. Half the
        # smallest count as the lower end keeps the smallest bar visible.
        low = fewest / 2
        ax.set(yscale="log", ylim=(low, low * (most / low) ** 3))
        ax.set_ylabel("samples per bin", loc="bottom")
        ticks = np.unique([fewest, most])
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        ax.set_yticks([], minor=True)
