"""PriorPathDisplay: score and evidence along prior precisions."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from sklaplace.core.checks import check_positive
from sklaplace.plotting.axes import (
    BLUE,
    VERMILION,
    Keywords,
    draw_legend,
    new_axes,
    require_matplotlib,
)


@dataclass(eq=False, repr=False, kw_only=True)
class PriorPathDisplay:
    """Score of cross-validation and log evidence along prior precisions.

    Shows how much the choice of the prior precision matters, and whether both criteria
    agree. Use `from_estimator` to create it. Parameters are stored as attributes.

    Read more in the :doc:`User Guide </user_guide/prior>`.

    Parameters
    ----------
    prior_precisions : ndarray of shape (G,)
        Prior precisions.
    evidence : ndarray of shape (G,)
        Log marginal likelihood of the training data under each, in nats.
    score : ndarray of shape (G,), default=None
        Mean score over folds.
    score_std : ndarray of shape (G,), default=None
        Its standard deviation over folds.
    chosen : float, default=None
        The fitted prior precision; None where there are several.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes of the score if there is one, else of the evidence.
    evidence_ax_ : matplotlib Axes
        Axes of the evidence, on the right if there is a score.
    figure_ : matplotlib Figure
        The figure of `ax_`.
    evidence_line_ : matplotlib Line2D
        The evidence.
    score_line_ : matplotlib Line2D or None
        The score.
    score_band_ : matplotlib PolyCollection or None
        One standard deviation on either side.
    chosen_ : matplotlib Line2D or None
        The fitted prior precision, as a vertical line.

    See Also
    --------
    sklaplace.LaplaceClassifierCV : Chooses the prior precision by cross-validation.
    sklaplace.LaplaceRegressorCV : The same for a regression.

    References
    ----------
    MacKay (1992), "Bayesian interpolation", Neural Computation 4(3).

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import LaplaceClassifierCV
    >>> from sklaplace.plotting import PriorPathDisplay
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = LaplaceClassifierCV(
    ...     prior_precisions=[0.01, 0.1, 1.0, 10.0], cv=3, random_state=0
    ... ).fit(X, y)
    >>> display = PriorPathDisplay.from_estimator(clf)
    >>> display.score.shape, display.evidence.shape
    ((4,), (4,))
    """

    prior_precisions: Any
    evidence: Any
    score: Any = None
    score_std: Any = None
    chosen: float | None = None

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        *,
        prior_precisions: Any = None,
        ax: Any = None,
        score_kw: Keywords = None,
        evidence_kw: Keywords = None,
    ) -> "PriorPathDisplay":
        """Compute the evidence along prior precisions and plot it with the scores.

        Nothing is trained: the evidence is that of the fitted network and curvature.

        Parameters
        ----------
        estimator : object
            A fitted `LaplaceClassifierCV` or `LaplaceRegressorCV`, whose
            ``cv_results_`` has the scores, or a fitted `LaplaceClassifier` or
            `LaplaceRegressor`, of which the evidence alone is plotted.
        prior_precisions : array-like of shape (G,), default=None
            Prior precisions, each one for all weights. None takes those of
            ``cv_results_``, and cannot be replaced there; else 25 from a thousandth of
            the fitted one to a thousand times, of several of their geometric mean.
        ax : matplotlib Axes, default=None
            Axes to plot on. A new figure by default.
        score_kw, evidence_kw : dict, default=None
            Keywords for matplotlib's ``plot`` of score and evidence.

        Returns
        -------
        PriorPathDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If a prior precision is not positive, is given for an estimator that has
            scores of others, or the prior is the posterior of an earlier task.
        TypeError
            If the estimator has no evidence.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        sklaplace.LaplaceClassifier.log_marginal_likelihood : The evidence.

        Notes
        -----
        Noise, temperature and the mean of the posterior are the fitted ones under every
        prior precision, in the evidence; scores have the noise that was chosen with
        each.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import LaplaceClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = LaplaceClassifier(random_state=0).fit(X, y)
        >>> from sklaplace.plotting import PriorPathDisplay
        >>> PriorPathDisplay.from_estimator(model).evidence.shape
        (25,)
        """
        require_matplotlib()
        if not hasattr(estimator, "log_marginal_likelihood"):
            raise TypeError(
                f"{type(estimator).__name__} has no log_marginal_likelihood. Pass a "
                "fitted Laplace estimator; of a pipeline, its last step."
            )
        check_is_fitted(estimator)
        results = getattr(estimator, "cv_results_", {})
        if results and prior_precisions is not None:
            raise ValueError(
                "prior_precisions was given, but cv_results_ has scores of others. "
                "Leave it out, or fit with prior_precisions."
            )
        path = _path(estimator, results, prior_precisions)
        evidence = [estimator.log_marginal_likelihood(value) for value in path]
        fitted = np.asarray(estimator.prior_precision_)
        display = cls(
            prior_precisions=path,
            evidence=np.array(evidence),
            score=_sorted_by_prior(results, "mean_test_score"),
            score_std=_sorted_by_prior(results, "std_test_score"),
            chosen=float(fitted) if fitted.ndim == 0 else None,
        )
        return display.plot(ax, score_kw=score_kw, evidence_kw=evidence_kw)

    def plot(
        self,
        ax: Any = None,
        *,
        score_kw: Keywords = None,
        evidence_kw: Keywords = None,
    ) -> "PriorPathDisplay":
        """Plot score and evidence.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Axes to plot on. A new figure by default.
        score_kw, evidence_kw : dict, default=None
            Keywords for matplotlib's ``plot`` of score and evidence.

        Returns
        -------
        PriorPathDisplay
            The display.

        Raises
        ------
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_estimator : Computes the evidence as well.

        Notes
        -----
        Where the evidence falls steeply, the axis ends at three times the difference of
        its largest and its median value, below the largest.

        Examples
        --------
        >>> import numpy as np
        >>> from sklaplace.plotting import PriorPathDisplay
        >>> display = PriorPathDisplay(
        ...     prior_precisions=np.array([0.1, 1.0, 10.0]),
        ...     evidence=np.array([-3.0, -1.0, -2.0]),
        ... )
        >>> display.plot().ax_.get_xlabel()
        'prior precision'
        """
        self.figure_, self.ax_ = new_axes(ax)
        self.evidence_ax_ = self.ax_
        self.score_line_ = self.score_band_ = self.chosen_ = None
        lines: list[Any] = []
        if self.score is not None:
            self.evidence_ax_ = self.ax_.twinx()
            self._plot_score(score_kw)
            lines.append(self.score_line_)
        style = {"color": VERMILION, "linestyle": "--", "label": "log evidence"}
        style |= dict(evidence_kw or {})
        (self.evidence_line_,) = self.evidence_ax_.plot(
            self.prior_precisions, self.evidence, **style
        )
        lines.append(self.evidence_line_)
        if self.chosen is not None:
            style = {"color": "grey", "linestyle": ":", "label": "fitted"}
            self.chosen_ = self.ax_.axvline(self.chosen, **style)
            lines.append(self.chosen_)
        self.ax_.set(xscale="log", xlabel="prior precision")
        self.evidence_ax_.set_ylabel("log evidence (nats)")
        top, middle = np.max(self.evidence), np.median(self.evidence)
        bottom = max(np.min(self.evidence), top - 3 * (top - middle))
        if bottom < top:
            pad = 0.05 * (top - bottom)
            self.evidence_ax_.set_ylim(bottom - pad, top + pad)
        draw_legend(self.ax_, lines)
        return self

    def _plot_score(self, score_kw: Keywords) -> None:
        """Plot the mean score, and its deviation over folds."""
        style = {"color": BLUE, "marker": "o", "markersize": 4, "label": "score"}
        style |= dict(score_kw or {})
        (self.score_line_,) = self.ax_.plot(self.prior_precisions, self.score, **style)
        if self.score_std is not None:
            band = self.score - self.score_std, self.score + self.score_std
            style = {"color": self.score_line_.get_color(), "alpha": 0.15}
            self.score_band_ = self.ax_.fill_between(
                self.prior_precisions, *band, linewidth=0, **style
            )
        self.ax_.set_ylabel("mean score over folds")


def _path(estimator: Any, results: Any, given: Any) -> np.ndarray:
    """Prior precisions to plot, ascending."""
    if results:
        given = results["param_prior_precision"]
    if given is None:
        centre = np.exp(np.log(estimator.prior_precision_).mean())
        return centre * np.logspace(-3, 3, 25)
    check_positive("prior_precisions", given, scalar=False)
    return np.sort(np.atleast_1d(np.asarray(given, dtype=np.float64)))


def _sorted_by_prior(results: Any, column: str) -> Any:
    """Column of ``cv_results_`` in the order of prior precisions, None without."""
    if not results:
        return None
    order = np.argsort(results["param_prior_precision"])
    return np.asarray(results[column])[order]
