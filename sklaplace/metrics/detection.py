"""Confidence metrics: out-of-distribution detection and selective prediction."""

from dataclasses import dataclass

import numpy as np
from sklearn.metrics import roc_auc_score, roc_curve
from sklearn.utils import check_consistent_length

from sklaplace.core.checks import check_fraction
from sklaplace.metrics.checks import Floats, Given, Values, as_vector, check_weights


def ood_auroc(confidence_in: Values, confidence_out: Values) -> float:
    """Compute the area under the ROC curve of out-of-distribution detection.

    The area is the probability that an in-distribution sample has a larger confidence
    than an out-of-distribution sample. Ties count half.

    Read more in the :ref:`User Guide <novelty>`.

    Parameters
    ----------
    confidence_in : array-like of shape (n,)
        Confidence of in-distribution samples, such as the largest probability or the
        negative entropy. Larger values should indicate in-distribution samples.
    confidence_out : array-like of shape (m,)
        Confidence of out-of-distribution samples.

    Returns
    -------
    float
        Area between 0 and 1 (best); 0.5 corresponds to chance.

    Raises
    ------
    ValueError
        If an input is empty, not finite or not one-dimensional.

    See Also
    --------
    ood_fpr : False-positive rate at one threshold.
    sklaplace.plotting.NoveltyDisplay : Plot of both distributions and the ROC curve.

    Notes
    -----
    The cost is O((n + m) log(n + m)).

    References
    ----------
    Hendrycks, Gimpel (2017), "A baseline for detecting misclassified and
    out-of-distribution examples in neural networks", ICLR.

    Examples
    --------
    >>> from sklaplace.metrics import ood_auroc
    >>> ood_auroc([0.9, 0.8, 0.5], [0.7, 0.4])
    0.8333
    """
    truth, confidence = _labelled(confidence_in, confidence_out)
    return float(roc_auc_score(truth, confidence))


def ood_fpr(
    confidence_in: Values, confidence_out: Values, *, tpr: float = 0.95
) -> float:
    """Compute the false-positive rate of out-of-distribution detection.

    The threshold is the highest confidence that at least a fraction ``tpr`` of the
    in-distribution samples reach. The metric is the fraction of out-of-distribution
    samples that reach this threshold. For ``tpr=0.95``, it is known as FPR95.

    Read more in the :ref:`User Guide <novelty>`.

    Parameters
    ----------
    confidence_in : array-like of shape (n,)
        Confidence of in-distribution samples, such as ``score_samples(X)``. Larger
        values should indicate in-distribution samples.
    confidence_out : array-like of shape (m,)
        Confidence of out-of-distribution samples.
    tpr : float, default=0.95
        Fraction of in-distribution samples to accept, in (0, 1).

    Returns
    -------
    float
        Rate between 0 (best) and 1; about ``tpr`` for random confidences.

    Raises
    ------
    ValueError
        If an input is empty, not finite or not one-dimensional, or ``tpr`` is out of
        range.

    See Also
    --------
    ood_auroc : Area under the curve over all thresholds.
    sklaplace.plotting.NoveltyDisplay : Plot of both distributions and the ROC curve.

    Notes
    -----
    The cost is O((n + m) log(n + m)).

    References
    ----------
    Liang, Li, Srikant (2018), "Enhancing the reliability of out-of-distribution image
    detection in neural networks", ICLR.

    Examples
    --------
    >>> from sklaplace.metrics import ood_fpr
    >>> ood_fpr([0.9, 0.8, 0.5], [0.7, 0.4])
    0.5
    """
    tpr = check_fraction("tpr", tpr, "Choose a fraction, such as 0.95.")
    truth, confidence = _labelled(confidence_in, confidence_out)
    fprs, tprs, _ = roc_curve(truth, confidence, drop_intermediate=False)
    return float(fprs[tprs >= tpr][0])  # at the highest threshold; rates increase


def risk_coverage_curve(
    losses: Values, confidence: Values, *, sample_weight: Given = None
) -> tuple[Floats, Floats]:
    """Compute the mean loss of the most confident samples at each coverage.

    In selective prediction, a model answers only if its confidence exceeds a threshold.
    With a good confidence score, the loss is small if only the most confident samples
    are answered.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    losses : array-like of shape (n,)
        Loss of each sample, such as ``y != y_pred`` or a squared error.
    confidence : array-like of shape (n,)
        Confidence score, such as the largest probability or the negative standard
        deviation. Samples with larger scores are answered first.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    coverage : ndarray of shape (m,)
        Fraction of answered samples, in ascending order up to 1. There is one entry for
        each distinct confidence with positive weight.
    risk : ndarray of shape (m,)
        Mean loss of the answered samples.

    Raises
    ------
    ValueError
        If inputs are empty, not finite, not one-dimensional or of different lengths.

    See Also
    --------
    area_under_risk_coverage : Area under the curve.
    sklaplace.plotting.RiskCoverageDisplay : Plot of the curve.

    Notes
    -----
    The cost is O(n log n). Samples with equal confidence are answered together.

    References
    ----------
    Geifman, El-Yaniv (2017), "Selective classification for deep neural networks",
    NeurIPS.

    Examples
    --------
    >>> from sklaplace.metrics import risk_coverage_curve
    >>> coverage, risk = risk_coverage_curve([0, 1, 0, 1], [0.9, 0.6, 0.8, 0.7])
    >>> coverage
    array([0.25, 0.5 , 0.75, 1.  ])
    >>> risk
    array([0.  , 0.  , 0.33, 0.5 ])
    """
    curve = _risk_coverage(losses, confidence, sample_weight)
    return curve.coverage, curve.risk


def area_under_risk_coverage(
    losses: Values, confidence: Values, *, sample_weight: Given = None
) -> float:
    """Compute the mean risk of selective prediction over all thresholds (AURC).

    Each sample's confidence serves as a threshold once. The result depends on the loss
    and on the order of the confidences. Therefore, compare results only for the same
    model, or also report the mean loss over all samples.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    losses : array-like of shape (n,)
        Loss of each sample, such as ``y != y_pred`` or a squared error.
    confidence : array-like of shape (n,)
        Confidence score. Samples with larger scores are answered first.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        Area in units of the loss; lower is better. If all confidences are equal, the
        area is the mean loss.

    Raises
    ------
    ValueError
        If inputs are empty, not finite, not one-dimensional or of different lengths.

    See Also
    --------
    neg_area_under_risk_coverage_scorer : Scorer for model selection.
    risk_coverage_curve : Risk at each coverage.

    References
    ----------
    Geifman, Uziel, El-Yaniv (2019), "Bias-reduced uncertainty estimation for deep
    neural classifiers", ICLR, section 2.

    Examples
    --------
    >>> from sklaplace.metrics import area_under_risk_coverage
    >>> area_under_risk_coverage([0, 1, 0, 1], [0.9, 0.6, 0.8, 0.7])
    0.208
    """
    curve = _risk_coverage(losses, confidence, sample_weight)
    return float(curve.risk @ curve.weight / curve.weight.sum())


def _labelled(confidence_in: Values, confidence_out: Values) -> tuple[Floats, Floats]:
    """Return labels (1 for in-distribution samples, 0 otherwise) and confidences."""
    inside = as_vector(confidence_in, "confidence_in")
    outside = as_vector(confidence_out, "confidence_out")
    truth = np.repeat([1.0, 0.0], [len(inside), len(outside)])
    return truth, np.concatenate([inside, outside])


@dataclass(frozen=True)
class _RiskCoverage:
    """Coverage, risk and weight at the distinct confidences, highest first."""

    coverage: Floats
    risk: Floats
    weight: Floats


def _risk_coverage(
    losses: Values, confidence: Values, sample_weight: Given
) -> _RiskCoverage:
    """Return the curve of mean losses at the distinct confidences.

    Samples with the same confidence are answered together.
    Samples without weight are left out. Otherwise, the risk of the first samples could
    be a division by zero.
    """
    loss = as_vector(losses, "losses")
    score = as_vector(confidence, "confidence")
    check_consistent_length(loss, score)
    weights = check_weights(sample_weight, loss)
    used = weights > 0
    # numbers of the distinct confidences, counted from the highest
    _, groups = np.unique(-score[used], return_inverse=True)
    totals: Floats = np.bincount(groups, weights[used]).astype(np.float64)
    answered = totals.cumsum()
    risk = np.bincount(groups, (weights * loss)[used]).cumsum() / answered
    return _RiskCoverage(answered / answered[-1], risk, totals)
