"""PriorPathDisplay: score and evidence for several prior precisions."""

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from sklaplace.core.checks import check_positive
from sklaplace.metrics.checks import last_step
from sklaplace.plotting import axes
from sklaplace.plotting.display import Display, Style


class PriorPathDisplay(Display):
    """Cross-validation score and log evidence for several prior precisions.

    The display shows how much the choice of the prior precision matters, and whether
    the two criteria agree. The evidence is the marginal likelihood. Use
    `from_estimator` to create the display. Parameters are stored as attributes.

    Read more in the :doc:`User Guide </user_guide/prior>`.

    Parameters
    ----------
    prior_precisions : ndarray of shape (G,)
        Prior precisions.
    evidence : ndarray of shape (G,)
        Log marginal likelihood of the training data for each prior precision, in nats.
    score : ndarray of shape (G,), default=None
        Mean score over folds.
    score_std : ndarray of shape (G,), default=None
        Standard deviation of the score over folds.
    chosen : float, default=None
        Fitted prior precision; None if there are several.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes of the score, or of the evidence if there is no score.
    evidence_ax_ : matplotlib Axes
        Axes of the evidence, on the right if there is a score.
    figure_ : matplotlib Figure
        Figure of `ax_`.
    evidence_line_ : matplotlib Line2D
        Line of the evidence.
    score_line_ : matplotlib Line2D or None
        Line of the score.
    score_band_ : matplotlib PolyCollection or None
        Band of one standard deviation on each side of the score.
    chosen_ : matplotlib Line2D or None
        Vertical line at the fitted prior precision.

    See Also
    --------
    sklaplace.LaplaceClassifierCV : Classifier that cross-validates the prior precision.
    sklaplace.LaplaceRegressorCV : Regressor that cross-validates the prior precision.

    Notes
    -----
    If the evidence falls steeply, the lower end of its axis is the largest evidence
    minus three times the difference between the largest and the median evidence.

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

    prior_precisions: np.ndarray
    evidence: np.ndarray
    score: np.ndarray | None = None
    score_std: np.ndarray | None = None
    chosen: float | None = None

    @classmethod
    def from_estimator(
        cls,
        estimator: BaseEstimator,
        *,
        prior_precisions: ArrayLike | None = None,
        **options: Any,
    ) -> Self:
        """Compute the evidence of each prior precision, and plot it with the scores.

        The evidence is computed from the fitted curvature, so no network is retrained.

        Parameters
        ----------
        estimator : object
            Fitted `LaplaceClassifierCV` or `LaplaceRegressorCV`, whose ``cv_results_``
            contains the scores. For a fitted `LaplaceClassifier` or `LaplaceRegressor`,
            only the evidence is plotted.
        prior_precisions : array-like of shape (G,), default=None
            Prior precisions, each used for all weights. If the estimator has
            ``cv_results_``, this parameter must be None, and the prior precisions come
            from ``cv_results_``. Otherwise, the default is 25 values from 0.001 to 1000
            times the fitted prior precision, or times the geometric mean of several
            fitted prior precisions.
        **options : dict
            `ax`: axes to plot on; a new figure by default. `score_kw` and
            `evidence_kw`: keyword arguments for matplotlib's ``plot`` of the score and
            the evidence.

        Returns
        -------
        PriorPathDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If a prior precision is not positive, if ``prior_precisions`` is given for
            an estimator with scores, or if the prior is the posterior of an earlier
            task.
        AttributeError
            If the estimator has no marginal likelihood.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        sklaplace.LaplaceClassifier.log_marginal_likelihood : Compute the evidence.

        Notes
        -----
        Each evidence is computed with the fitted noise, temperature and posterior mean.
        Each score was computed with the noise chosen for its prior precision.

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
        check_is_fitted(estimator)
        estimator, _ = last_step(estimator)
        # scores, if the prior precision was chosen by cross-validation
        results = getattr(estimator, "cv_results_", None) or {}
        if results and prior_precisions is not None:
            raise ValueError(
                "prior_precisions was given, but cv_results_ has scores for other "
                "values. Omit prior_precisions, or fit with these values."
            )
        values = results.get("param_prior_precision", prior_precisions)
        fitted, scores = np.asarray(estimator.prior_precision_), {}
        if values is None:
            # three decades on each side of the geometric mean of the fitted values
            values = np.exp(np.log(fitted).mean()) * np.logspace(-3, 3, 25)
        check_positive("prior_precisions", values, scalar=False)
        values = np.atleast_1d(np.asarray(values, dtype=np.float64))
        order = np.argsort(values)  # lines connect neighbouring values
        if results:
            scores["score"] = results["mean_test_score"][order]
            scores["score_std"] = results["std_test_score"][order]
        evidence = [estimator.log_marginal_likelihood(v) for v in values[order]]
        return cls(
            prior_precisions=values[order],
            evidence=np.array(evidence),
            # several fitted values have no common position on the axis
            chosen=float(fitted) if fitted.ndim == 0 else None,
            **scores,
        ).plot(**options)

    def _draw(self, *, score_kw: Style = None, evidence_kw: Style = None) -> None:
        """Draw the score, the evidence and the fitted prior precision.

        With a score, the evidence has its own axis on the right.
        """
        ax, x, evidence = self.ax_, self.prior_precisions, self.evidence
        self.evidence_ax_ = right = ax if self.score is None else ax.twinx()
        self.score_line_ = self.score_band_ = self.chosen_ = None
        if self.score is not None:
            style = {"label": "score", **axes.MARKED}
            line = axes.draw_line(ax, x, self.score, score_kw, **style)
            ax.set_ylabel("mean score over folds")
            self.score_line_ = line
            if self.score_std is not None:
                ends = self.score - self.score_std, self.score + self.score_std
                style = {"color": line.get_color(), "alpha": 0.15, "linewidth": 0}
                self.score_band_ = ax.fill_between(x, *ends, **style)
        style = {"color": axes.VERMILION, "linestyle": "--", "label": "log evidence"}
        self.evidence_line_ = axes.draw_line(right, x, evidence, evidence_kw, **style)
        if self.chosen is not None:
            self.chosen_ = ax.axvline(self.chosen, label="fitted", **axes.REFERENCE)
        ax.set(xscale="log", xlabel="prior precision")
        right.set_ylabel("log evidence (nats)")
        # The evidence can fall so steeply that an axis of its full range would hide all
        # other differences. The axis then ends at three times the median's distance.
        top, bottom = np.max(evidence), np.min(evidence)
        bottom = max(bottom, top - 3 * (top - np.median(evidence)))
        if bottom < top:  # not for equal values, which have no range
            # as wide as matplotlib's default margins
            pad = 0.05 * (top - bottom)
            right.set_ylim(bottom - pad, top + pad)
        lines = self.score_line_, self.evidence_line_, self.chosen_
        axes.draw_legend(ax, [line for line in lines if line is not None])
