"""Metrics of a confidence: detection of unknown samples, selective prediction."""

import numpy as np
from sklearn.metrics import roc_auc_score, roc_curve
from sklearn.utils import check_consistent_length

from sklaplace.core.checks import check_fraction
from sklaplace.metrics.checks import Floats, Given, Values, as_vector, check_weights


def ood_auroc(confidence_in: Values, confidence_out: Values) -> float:
    """Area under the ROC curve of out-of-distribution detection by confidence.

    The probability that the confidence of an in-distribution sample is larger than
    the confidence of an out-of-distribution sample; ties count half.

    Read more in the :ref:`User Guide <novelty>`.

    Parameters
    ----------
    confidence_in : array-like of shape (n,)
        Confidence of in-distribution samples: any score that should be larger for them
        than for others, such as the largest probability or the negative entropy.
    confidence_out : array-like of shape (m,)
        Confidence of out-of-distribution samples.

    Returns
    -------
    float
        Between 0 and 1 (best); 0.5 is chance.

    Raises
    ------
    ValueError
        If an input is empty, not finite or not one-dimensional.

    See Also
    --------
    ood_fpr : Error at one threshold.
    sklaplace.plotting.NoveltyDisplay : Plots both distributions and the ROC curve.

    Notes
    -----
    O((n + m) log(n + m)).

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
    return float(roc_auc_score(*_labelled(confidence_in, confidence_out)))


def ood_fpr(
    confidence_in: Values, confidence_out: Values, *, tpr: float = 0.95
) -> float:
    """False-positive rate of out-of-distribution detection at a true-positive rate.

    Of the thresholds that at least a fraction ``tpr`` of the in-distribution samples
    reach, the highest is taken; the result is the fraction of out-of-distribution
    samples that reach it, too. At the default it is known as FPR95.

    Read more in the :ref:`User Guide <novelty>`.

    Parameters
    ----------
    confidence_in : array-like of shape (n,)
        Confidence of in-distribution samples: any score that should be larger for them
        than for others, such as ``score_samples(X)``.
    confidence_out : array-like of shape (m,)
        Confidence of out-of-distribution samples.
    tpr : float, default=0.95
        Fraction of in-distribution samples to accept, in (0, 1).

    Returns
    -------
    float
        Between 0 (best) and 1; about ``tpr`` by chance.

    Raises
    ------
    ValueError
        If an input is empty, not finite or not one-dimensional, or ``tpr`` is out of
        range.

    See Also
    --------
    ood_auroc : Over all thresholds.
    sklaplace.plotting.NoveltyDisplay : Plots both distributions and the ROC curve.

    Notes
    -----
    O((n + m) log(n + m)).

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
    check_fraction("tpr", tpr, "Choose a fraction, such as 0.95.")
    truth, confidence = _labelled(confidence_in, confidence_out)
    false, true, _ = roc_curve(truth, confidence, drop_intermediate=False)
    return float(false[true >= tpr][0])


def risk_coverage_curve(
    losses: Values, confidence: Values, *, sample_weight: Given = None
) -> tuple[Floats, Floats]:
    """Mean loss of the most confident samples, by their fraction of all samples.

    Selective prediction answers only above a threshold of confidence. A good confidence
    makes the risk of few answers small.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    losses : array-like of shape (n,)
        Loss of each sample: ``y != y_pred``, a squared error, or any other.
    confidence : array-like of shape (n,)
        The larger, the earlier a sample is answered: the largest probability, minus
        the standard deviation, or any other score.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    coverage : ndarray of shape (m,)
        Fraction of samples that are answered, ascending to 1; one entry per distinct
        confidence of positive weight.
    risk : ndarray of shape (m,)
        Mean loss of the samples that are answered.

    Raises
    ------
    ValueError
        If the inputs differ in length, or are empty, not finite or not
        one-dimensional.

    See Also
    --------
    area_under_risk_coverage : The curve as one number.
    sklaplace.plotting.RiskCoverageDisplay : Plots the curve.

    Notes
    -----
    O(n log n). Samples of equal confidence are answered together.

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
    coverage, risk, _ = _risk_coverage(losses, confidence, sample_weight)
    return coverage, risk


def area_under_risk_coverage(
    losses: Values, confidence: Values, *, sample_weight: Given = None
) -> float:
    """Mean risk of selective prediction over all thresholds (AURC).

    Every sample's confidence is a threshold once. The result depends on the loss as
    well as on the order of the confidences: compare results of one model, or report
    the risk of all samples next to it.

    Read more in the :doc:`User Guide </user_guide/classification>`.

    Parameters
    ----------
    losses : array-like of shape (n,)
        Loss of each sample: ``y != y_pred``, a squared error, or any other.
    confidence : array-like of shape (n,)
        The larger, the earlier a sample is answered.
    sample_weight : array-like of shape (n,), default=None
        Sample weights.

    Returns
    -------
    float
        In the unit of the loss; lower is better. Equal to the mean loss where all
        confidences are equal.

    Raises
    ------
    ValueError
        If the inputs differ in length, or are empty, not finite or not
        one-dimensional.

    See Also
    --------
    neg_area_under_risk_coverage_scorer : For model selection.
    risk_coverage_curve : The curve.

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
    _, risk, weights = _risk_coverage(losses, confidence, sample_weight)
    return float(risk @ weights / weights.sum())


def _labelled(confidence_in: Values, confidence_out: Values) -> tuple[Floats, Floats]:
    """One for in-distribution samples and zero for others, and all confidences."""
    inside = as_vector(confidence_in, "confidence_in")
    outside = as_vector(confidence_out, "confidence_out")
    truth = np.repeat([1.0, 0.0], [len(inside), len(outside)])
    return truth, np.concatenate([inside, outside])


def _risk_coverage(
    losses: Values, confidence: Values, sample_weight: Given
) -> tuple[Floats, Floats, Floats]:
    """Coverage, risk and weight at each distinct confidence, in descending order."""
    loss = as_vector(losses, "losses")
    score = as_vector(confidence, "confidence")
    check_consistent_length(loss, score)
    weights = check_weights(sample_weight, loss)
    used = weights > 0
    _, groups = np.unique(-score[used], return_inverse=True)
    totals: Floats = np.bincount(groups, weights[used]).astype(np.float64)
    answered = totals.cumsum()
    risk = np.bincount(groups, (weights * loss)[used]).cumsum() / answered
    return answered / answered[-1], risk, totals
