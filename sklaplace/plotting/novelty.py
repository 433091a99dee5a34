"""NoveltyDisplay: separation of known from unknown samples by a score."""

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.metrics import roc_curve

from sklaplace.metrics import ood_auroc, ood_fpr
from sklaplace.metrics.checks import as_vector
from sklaplace.plotting import axes
from sklaplace.plotting.display import Display, Style

# quantiles that bound the bins of the histograms
_BIN_QUANTILES = 0.005, 0.995


class NoveltyDisplay(Display):
    """Histograms and ROC curve of a confidence score for known and unknown samples.

    Any score that should be larger for samples similar to the training data can be used
    as the confidence. Use `from_estimator` or `from_predictions` to create the display.
    Parameters are stored as attributes.

    Read more in the :ref:`User Guide <novelty>`.

    Parameters
    ----------
    confidence_in : ndarray of shape (n,)
        Confidence of known (in-distribution) samples.
    confidence_out : ndarray of shape (m,)
        Confidence of unknown (out-of-distribution) samples.
    name : str, default=None
        Label of the confidence.

    Attributes
    ----------
    auroc : float
        Area under the ROC curve.
    fpr95 : float
        False-positive rate if 95 % of the known samples are accepted.
    axes_ : list of two matplotlib Axes
        Axes of the histograms and of the ROC curve.
    figure_ : matplotlib Figure
        Figure of `axes_`.
    histograms_ : list of two tuples
        Densities, edges and patches from matplotlib's ``hist``, for known and unknown
        samples.
    roc_ : matplotlib Line2D
        ROC curve, with known samples as the positive class.
    chance_ : matplotlib Line2D
        Diagonal, which corresponds to chance.

    See Also
    --------
    RiskCoverageDisplay : Risk of the most confident predictions.
    sklaplace.metrics.ood_auroc : Area under the ROC curve.
    sklaplace.metrics.ood_fpr : False-positive rate at one threshold.

    References
    ----------
    Hendrycks, Gimpel (2017), "A baseline for detecting misclassified and
    out-of-distribution examples in neural networks", ICLR.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import LaplaceClassifier
    >>> from sklaplace.plotting import NoveltyDisplay
    >>> X, y = load_iris(return_X_y=True)
    >>> known = y < 2
    >>> clf = LaplaceClassifier(random_state=0).fit(X[known], y[known])
    >>> display = NoveltyDisplay.from_estimator(clf, X[known], X[~known])
    >>> len(display.axes_)
    2
    """

    n_axes = 2
    confidence_in: np.ndarray
    confidence_out: np.ndarray
    name: str | None = None

    @property
    def auroc(self) -> float:
        """Area under the ROC curve.

        See Also
        --------
        sklaplace.metrics.ood_auroc : Compute the area without a plot.

        Examples
        --------
        >>> from sklaplace.plotting import NoveltyDisplay
        >>> display = NoveltyDisplay.from_predictions([3.0, 2.0, 1.0], [1.5, 0.5, 0.0])
        >>> round(display.auroc, 2)
        0.89
        """
        return ood_auroc(self.confidence_in, self.confidence_out)

    @property
    def fpr95(self) -> float:
        """False-positive rate at a true-positive rate of 95 %.

        See Also
        --------
        sklaplace.metrics.ood_fpr : Compute the rate without a plot.

        Examples
        --------
        >>> from sklaplace.plotting import NoveltyDisplay
        >>> display = NoveltyDisplay.from_predictions([3.0, 2.0, 1.0], [1.5, 0.5, 0.0])
        >>> round(display.fpr95, 2)
        0.33
        """
        return ood_fpr(self.confidence_in, self.confidence_out)

    @classmethod
    def from_estimator(
        cls, estimator: BaseEstimator, X_in: object, X_out: object, **options: Any
    ) -> Self:
        """Score known and unknown samples, and plot the scores.

        Parameters
        ----------
        estimator : object
            Fitted estimator with ``score_samples``: an estimator from this package, or
            an outlier detector from scikit-learn.
        X_in : array-like of shape (n, ...)
            Held-out known samples.
        X_out : array-like of shape (m, ...)
            Unknown samples.
        **options : dict
            `ax`: axes to plot on; a new figure by default. `name`: label of the
            confidence, ``"score_samples"`` by default. `bins`, `hist_kw` and `line_kw`:
            see `from_predictions`.

        Returns
        -------
        NoveltyDisplay
            The display, with the plot in `axes_`.

        Raises
        ------
        ValueError
            If scores are not finite, or if the numbers of scores and samples differ.
        AttributeError
            If the estimator has no ``score_samples``.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_predictions : Plot given scores.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> from sklaplace.plotting import NoveltyDisplay
        >>> X, y = load_iris(return_X_y=True)
        >>> clf = LaplaceClassifier(random_state=0).fit(X[:100], y[:100])
        >>> bool(NoveltyDisplay.from_estimator(clf, X[:100], X[100:]).auroc > 0.5)
        True
        """
        options.setdefault("name", "score_samples")
        inside, outside = map(estimator.score_samples, (X_in, X_out))
        return cls.from_predictions(inside, outside, **options)

    @classmethod
    def from_predictions(
        cls,
        confidence_in: ArrayLike,
        confidence_out: ArrayLike,
        *,
        name: str | None = None,
        **options: Any,
    ) -> Self:
        """Plot the confidence of known and unknown samples.

        Parameters
        ----------
        confidence_in : array-like of shape (n,)
            Confidence of known samples, which should be larger than that of unknown
            samples.
        confidence_out : array-like of shape (m,)
            Confidence of unknown samples.
        name : str, default=None
            Label of the confidence.
        **options : dict
            `ax`: axes to plot on; a new figure by default. `bins` (default 30): number
            of bins between the 0.005 and 0.995 quantiles of all scores, or edges of the
            bins. The outer bins include all scores beyond the edges. `hist_kw` and
            `line_kw`: keyword arguments for matplotlib's ``hist`` and ``plot``.

        Returns
        -------
        NoveltyDisplay
            The display, with the plot in `axes_`.

        Raises
        ------
        ValueError
            If an input is empty, not finite or not one-dimensional.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_estimator : Compute and plot the scores.

        Examples
        --------
        >>> from sklaplace.plotting import NoveltyDisplay
        >>> display = NoveltyDisplay.from_predictions([3.0, 2.0, 1.0], [1.5, 0.5, 0.0])
        >>> round(display.auroc, 2)
        0.89
        """
        return cls(
            confidence_in=as_vector(confidence_in, "confidence_in"),
            confidence_out=as_vector(confidence_out, "confidence_out"),
            name=name,
        ).plot(**options)

    def _draw(
        self,
        *,
        bins: ArrayLike | str = 30,
        hist_kw: Style = None,
        line_kw: Style = None,
    ) -> None:
        """Draw the histograms and the ROC curve."""
        known, unknown = self.confidence_in, self.confidence_out
        scores = np.concatenate([known, unknown])
        # Without these bounds, a few extreme scores would force all others into one
        # bin.
        low, high = np.quantile(scores, _BIN_QUANTILES)
        edges = np.histogram_bin_edges(scores, bins, (low, high))
        histogram, roc = self.axes_
        self.histograms_ = []
        for values, color, label in (
            (known, axes.BLUE, "known"),
            (unknown, axes.VERMILION, "unknown"),
        ):
            style = axes.styled(hist_kw, color=color, alpha=0.5, density=True)
            style = {"label": label, "bins": edges} | style
            clipped = values.clip(edges[0], edges[-1])  # into the outer bins
            self.histograms_.append(histogram.hist(clipped, **style))
        histogram.set(xlabel=self.name or "confidence", ylabel="density")
        histogram.locator_params(axis="x", nbins=6)  # avoid overlapping labels
        truth = np.repeat([1, 0], [len(known), len(unknown)])
        fprs, tprs, _ = roc_curve(truth, scores, drop_intermediate=False)
        (self.chance_,) = roc.plot([0, 1], [0, 1], **axes.REFERENCE)
        label = f"AUROC {self.auroc:.3f}, FPR95 {self.fpr95:.3f}"
        self.roc_ = axes.draw_line(roc, fprs, tprs, line_kw, label=label)
        roc.set(xlabel="unknown accepted", ylabel="known accepted")
        for ax in self.axes_:
            axes.draw_legend(ax)
