"""ReliabilityDisplay: empirical frequency against predicted probability."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from sklaplace.metrics import reliability_curve
from sklaplace.plotting.axes import (
    BLUE,
    Keywords,
    class_style,
    draw_diagonal,
    draw_legend,
    new_axes,
    require_matplotlib,
    require_proba,
)

_LABELS = {
    "top_label": ("confidence", "accuracy"),
    "per_class": ("predicted probability", "empirical frequency"),
}
# curves that can be told apart on one plot
_MOST_CLASSES = 5


@dataclass(eq=False, repr=False, kw_only=True)
class ReliabilityDisplay:
    """Reliability diagram of a classifier, with the number of samples per bin.

    For two or more classes: of the most probable class, or of each. Use
    `from_estimator` or `from_predictions` to create it. Parameters are stored as
    attributes.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    frequency : ndarray of shape (n_bins,) or (K, n_bins)
        Empirical frequency per bin, for each class if there are two axes; nan in
        empty bins.
    mean_proba : ndarray of the same shape
        Mean predicted probability per bin.
    weight : ndarray of the same shape
        Number of samples per bin, or their sum of weights.
    class_names : sequence of K str, default=None
        Names of the classes in the legend.
    name : str, default=None
        Name in the legend where there is one curve.

    Attributes
    ----------
    calibration_error : float
        Mean difference of frequency and probability, weighted by the bins. Of the most
        probable class it is the expected calibration error.
    ax_ : matplotlib Axes
        Axes of the plot.
    count_ax_ : matplotlib Axes
        Axes of the counts, which share the horizontal axis.
    figure_ : matplotlib Figure
        The figure of `ax_`.
    lines_ : list of matplotlib Line2D
        One curve, or one per class that is plotted.
    reference_ : matplotlib Line2D
        The diagonal.
    bars_ : list of matplotlib BarContainer
        Numbers of samples, for each curve.

    See Also
    --------
    sklaplace.metrics.expected_calibration_error : The curve as one number.
    sklaplace.metrics.reliability_curve : What is plotted.
    sklearn.calibration.CalibrationDisplay : For two classes, without counts.

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

    frequency: Any
    mean_proba: Any
    weight: Any
    class_names: Any = None
    name: str | None = None

    @property
    def calibration_error(self) -> float:
        """Mean difference of frequency and probability, weighted by the bins.

        See Also
        --------
        sklaplace.metrics.expected_calibration_error : Without a plot.

        Examples
        --------
        >>> from sklaplace.plotting import ReliabilityDisplay
        >>> display = ReliabilityDisplay(frequency=[0.8], mean_proba=[0.9], weight=[10])
        >>> round(display.calibration_error, 2)
        0.1
        """
        gaps = np.nan_to_num(np.subtract(self.frequency, self.mean_proba))
        return float((np.abs(gaps) * self.weight).sum() / np.sum(self.weight))

    @classmethod
    def from_estimator(
        cls,
        classifier: Any,
        X: Any,
        y: Any,
        *,
        kind: str = "top_label",
        n_bins: int = 10,
        strategy: str = "uniform",
        sample_weight: Any = None,
        classes: Any = None,
        name: str | None = None,
        ax: Any = None,
        line_kw: Keywords = None,
        bar_kw: Keywords = None,
    ) -> "ReliabilityDisplay":
        """Predict probabilities and plot the reliability diagram.

        Parameters
        ----------
        classifier : object
            Fitted, with ``predict_proba`` and ``classes_``.
        X : array-like of shape (n, ...)
            Samples that the classifier was not trained on.
        y : array-like of shape (n,)
            Their labels.
        kind : {"top_label", "per_class"}, default="top_label"
            Of the most probable class, or of each class against all others.
        n_bins : int, default=10
            Number of bins.
        strategy : {"uniform", "quantile"}, default="uniform"
            Bins of equal width, or of equal weight.
        sample_weight : array-like of shape (n,), default=None
            Sample weights.
        classes : array-like, default=None
            Classes to plot with ``kind="per_class"``. By default all, or, of more than
            five, the five of the largest calibration error.
        name : str, default=None
            Name in the legend; that of the class of the estimator by default.
        ax : matplotlib Axes, default=None
            Axes to plot on. A new figure by default.
        line_kw, bar_kw : dict, default=None
            Keywords for matplotlib's ``plot`` and ``bar``.

        Returns
        -------
        ReliabilityDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If shapes or classes are inconsistent, or an option is not known.
        TypeError
            If the classifier has no ``predict_proba``.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_predictions : Of given probabilities.

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
        require_matplotlib()
        require_proba(classifier)
        return cls.from_predictions(
            y,
            classifier.predict_proba(X),
            labels=classifier.classes_,
            kind=kind,
            n_bins=n_bins,
            strategy=strategy,
            sample_weight=sample_weight,
            classes=classes,
            name=type(classifier).__name__ if name is None else name,
            ax=ax,
            line_kw=line_kw,
            bar_kw=bar_kw,
        )

    @classmethod
    def from_predictions(
        cls,
        y_true: Any,
        y_proba: Any,
        *,
        labels: Any = None,
        kind: str = "top_label",
        n_bins: int = 10,
        strategy: str = "uniform",
        sample_weight: Any = None,
        classes: Any = None,
        name: str | None = None,
        ax: Any = None,
        line_kw: Keywords = None,
        bar_kw: Keywords = None,
    ) -> "ReliabilityDisplay":
        """Plot the reliability diagram of predicted probabilities.

        Parameters
        ----------
        y_true : array-like of shape (n,)
            Class labels.
        y_proba : array-like of shape (n, K) or (n,)
            Probabilities, one column per class in the order of ``labels``; a 1d
            array has those of the second of two classes.
        labels : array-like of shape (K,), default=None
            Classes in the order of the columns. By default the sorted values of
            ``y_true``.
        kind, n_bins, strategy, sample_weight, classes, name, ax, line_kw, bar_kw
            As for `from_estimator`; ``name`` is None by default.

        Returns
        -------
        ReliabilityDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If shapes or classes are inconsistent, or an option is not known.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_estimator : Predicts the probabilities.

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
        require_matplotlib()
        frequency, mean_proba, weight = reliability_curve(
            y_true,
            y_proba,
            kind=kind,
            n_bins=n_bins,
            strategy=strategy,
            labels=labels,
            sample_weight=sample_weight,
        )
        known = np.unique(y_true) if labels is None else np.asarray(labels)
        display = cls(
            frequency=frequency,
            mean_proba=mean_proba,
            weight=weight,
            class_names=[str(label) for label in known.tolist()],
            name=name,
        )
        return display.plot(ax, classes=classes, line_kw=line_kw, bar_kw=bar_kw)

    def plot(
        self,
        ax: Any = None,
        *,
        classes: Any = None,
        line_kw: Keywords = None,
        bar_kw: Keywords = None,
    ) -> "ReliabilityDisplay":
        """Plot the curves, and numbers of samples in the lower third, on a log scale.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Axes to plot on. A new figure by default.
        classes : array-like, default=None
            As for `from_estimator`.
        line_kw, bar_kw : dict, default=None
            Keywords for matplotlib's ``plot`` and ``bar``.

        Returns
        -------
        ReliabilityDisplay
            The display.

        Raises
        ------
        ValueError
            If ``classes`` has one that is not known, or the display has one curve.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_predictions : Computes the curve as well.

        Examples
        --------
        >>> import numpy as np
        >>> from sklaplace.plotting import ReliabilityDisplay
        >>> values = np.array([0.2, 0.9])
        >>> display = ReliabilityDisplay(
        ...     frequency=values, mean_proba=values, weight=np.array([5, 10])
        ... )
        >>> len(display.plot().lines_)
        1
        """
        per_class = np.ndim(self.frequency) == 2
        names, drawn = self._names(per_class), self._positions(per_class, classes)
        stored = self.frequency, self.mean_proba, self.weight
        curves = [np.atleast_2d(a)[drawn] for a in stored]
        self.figure_, self.ax_ = new_axes(ax)
        self.reference_ = draw_diagonal(self.ax_)
        self.count_ax_ = self.ax_.twinx()
        self.lines_, self.bars_ = [], []
        for k, (frequency, mean_proba, weight) in enumerate(zip(*curves, strict=True)):
            used = weight > 0  # a line stops at nan
            style = class_style(k) | {"marker": "o", "markersize": 4}
            style |= {"label": names[drawn[k]]} | dict(line_kw or {})
            self.lines_ += self.ax_.plot(mean_proba[used], frequency[used], **style)
            style = {"color": class_style(k)["color"] if per_class else BLUE}
            style |= {"alpha": 0.25, "width": 0.02} | dict(bar_kw or {})
            bars = self.count_ax_.bar(mean_proba[used], weight[used], **style)
            self.bars_.append(bars)
        x_label, y_label = _LABELS["per_class" if per_class else "top_label"]
        if len(drawn) < len(names):
            x_label += f" ({len(drawn)} of {len(names)} classes)"
        limits = -0.03, 1.03  # markers at zero and one are seen in full
        self.ax_.set(xlabel=x_label, ylabel=y_label, xlim=limits, ylim=limits)
        self._scale_counts(curves[-1])
        self.ax_.set_zorder(self.count_ax_.get_zorder() + 1)  # lines before bars
        self.ax_.patch.set_visible(False)
        draw_legend(self.ax_)
        return self

    def _scale_counts(self, weight: np.ndarray) -> None:
        """Let the counts take the lower third of the plot."""
        fewest, most = weight[weight > 0].min(), weight.max()
        low = fewest / 2
        self.count_ax_.set(yscale="log", ylim=(low, low * (most / low) ** 3))
        self.count_ax_.set_ylabel("samples per bin", loc="bottom")
        decades = 10.0 ** np.arange(np.ceil(np.log10(low)), np.log10(most) + 1e-9)
        ticks = decades if len(decades) > 1 else np.unique([fewest, most])
        self.count_ax_.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        self.count_ax_.set_yticks([], minor=True)

    def _names(self, per_class: bool) -> list[str]:
        """Labels of the curves."""
        if not per_class:
            error = f"ECE {self.calibration_error:.3f}"
            return [error if self.name is None else f"{self.name} ({error})"]
        if self.class_names is None:
            return [str(k) for k in range(len(self.frequency))]
        return list(self.class_names)

    def _positions(self, per_class: bool, classes: Any) -> list[int]:
        """Rows of the curves to draw."""
        names = self._names(per_class)
        if classes is None:
            gaps = np.atleast_2d(np.subtract(self.frequency, self.mean_proba))
            errors = (np.abs(np.nan_to_num(gaps)) * self.weight).sum(axis=1)
            return sorted(np.argsort(-errors, kind="stable")[:_MOST_CLASSES].tolist())
        chosen = [str(label) for label in np.asarray(classes).ravel().tolist()]
        if not per_class:
            raise ValueError(
                f"classes={chosen} was given, but the curve is that of the most "
                "probable class. Pass kind='per_class' with it."
            )
        unknown = sorted(set(chosen) - set(names))
        if unknown or not chosen:
            raise ValueError(
                f"classes={chosen} has {unknown or 'no class'}. Choose among {names}."
            )
        return [names.index(label) for label in chosen]
