"""RiskCoverageDisplay: mean loss of the most confident predictions."""

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, is_classifier

from sklaplace.metrics import area_under_risk_coverage, risk_coverage_curve
from sklaplace.metrics.checks import check_gaussian, misclassified
from sklaplace.plotting import axes
from sklaplace.plotting.display import Display, Style


class RiskCoverageDisplay(Display):
    """Mean loss of the most confident predictions versus their fraction.

    The display shows the benefit of leaving uncertain samples unanswered. With a useful
    confidence score, the curve rises to the right. Use `from_estimator` or
    `from_predictions` to create the display. Parameters are stored as attributes.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    coverage : ndarray of shape (m,)
        Fraction of answered samples, in ascending order.
    risk : ndarray of shape (m,)
        Mean loss of the answered samples.
    area : float
        Area under the curve (AURC).
    loss_name : str, default="loss"
        Name of the loss, whose mean is the risk.
    name : str, default=None
        Name in the legend.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes of the plot.
    figure_ : matplotlib Figure
        Figure of `ax_`.
    line_ : matplotlib Line2D
        Risk-coverage curve.

    See Also
    --------
    NoveltyDisplay : Separation of unknown samples by a score.
    sklaplace.metrics.area_under_risk_coverage : Area under the curve.
    sklaplace.metrics.risk_coverage_curve : Compute the curve.

    References
    ----------
    Geifman, El-Yaniv (2017), "Selective classification for deep neural networks",
    NeurIPS.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.naive_bayes import GaussianNB
    >>> from sklaplace.plotting import RiskCoverageDisplay
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = GaussianNB().fit(X, y)
    >>> display = RiskCoverageDisplay.from_estimator(clf, X, y)
    >>> display.risk[-1].item()
    0.04
    """

    coverage: np.ndarray
    risk: np.ndarray
    area: float
    loss_name: str = "loss"
    name: str | None = None

    @classmethod
    def from_estimator(
        cls, estimator: BaseEstimator, X: object, y: ArrayLike, **options: Any
    ) -> Self:
        """Predict with an estimator, and plot the risk.

        Parameters
        ----------
        estimator : object
            Fitted classifier with ``predict_proba``, or fitted regressor with
            ``predict(X, return_std=True)``. For a classifier, the loss is the error of
            the most probable class, and the confidence is the probability of this
            class. For a regressor, the loss is the squared error, and the confidence is
            the negative standard deviation.
        X : array-like of shape (n, ...)
            Held-out samples.
        y : array-like of shape (n,)
            Held-out targets.
        **options : dict
            `name`: name in the legend, by default the estimator's class.
            `sample_weight`, `ax` and `line_kw`: see `from_predictions`.

        Returns
        -------
        RiskCoverageDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If there are several targets, or shapes are inconsistent.
        AttributeError
            If the classifier has no ``predict_proba``.
        TypeError
            If the regressor cannot predict standard deviations.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_predictions : Plot given losses and confidences.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.naive_bayes import GaussianNB
        >>> from sklaplace.plotting import RiskCoverageDisplay
        >>> X, y = load_iris(return_X_y=True)
        >>> clf = GaussianNB().fit(X, y)
        >>> display = RiskCoverageDisplay.from_estimator(clf, X, y)
        >>> display.risk[-1].item()
        0.04
        """
        if is_classifier(estimator):
            proba = np.asarray(estimator.predict_proba(X))
            losses = misclassified(estimator, proba, y).astype(float)
            confidence, loss_name = proba.max(axis=1), "error"
        else:
            y_mean, y_std = estimator.predict(X, return_std=True)
            residuals, std = check_gaussian(y, y_mean, y_std)
            losses, confidence = residuals**2, -std  # (n, 1) for one target
            loss_name = "squared error"
        options.setdefault("name", type(estimator).__name__)
        return cls.from_predictions(losses, confidence, loss_name=loss_name, **options)

    @classmethod
    def from_predictions(
        cls,
        losses: ArrayLike,
        confidence: ArrayLike,
        *,
        sample_weight: ArrayLike | None = None,
        loss_name: str = "loss",
        name: str | None = None,
        **options: Any,
    ) -> Self:
        """Plot the risk for given losses and confidences.

        Parameters
        ----------
        losses : array-like of shape (n,)
            Loss of each sample.
        confidence : array-like of shape (n,)
            Confidence score. Samples with larger scores are answered first.
        sample_weight : array-like of shape (n,), default=None
            Sample weights.
        loss_name : str, default="loss"
            Name of the loss, whose mean is the risk.
        name : str, default=None
            Name in the legend.
        **options : dict
            `ax`: axes to plot on; a new figure by default. `line_kw`: keyword arguments
            for matplotlib's ``plot``.

        Returns
        -------
        RiskCoverageDisplay
            The display, with the plot in `ax_`.

        Raises
        ------
        ValueError
            If shapes are inconsistent, or values are not finite.
        ImportError
            If matplotlib is not installed.

        See Also
        --------
        from_estimator : Predict and plot the risk.

        Examples
        --------
        >>> from sklaplace.plotting import RiskCoverageDisplay
        >>> display = RiskCoverageDisplay.from_predictions([0, 0, 1], [0.9, 0.8, 0.6])
        >>> display.risk
        array([0.        , 0.        , 0.33333333])
        """
        weight = {"sample_weight": sample_weight}
        coverage, risk = risk_coverage_curve(losses, confidence, **weight)
        return cls(
            coverage=coverage,
            risk=risk,
            area=area_under_risk_coverage(losses, confidence, **weight),
            loss_name=loss_name,
            name=name,
        ).plot(**options)

    def _draw(self, *, line_kw: Style = None) -> None:
        """Draw the curve."""
        label = axes.curve_label(self.name, f"AURC {axes.three_digits(self.area)}")
        x, y = self.coverage, self.risk
        self.line_ = axes.draw_line(self.ax_, x, y, line_kw, label=label)
        y_label = f"risk: mean {self.loss_name}"
        self.ax_.set(xlabel="coverage", ylabel=y_label, xlim=(0, 1))
        axes.draw_legend(self.ax_)
