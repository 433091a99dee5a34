"""Metrics of out-of-distribution detection by a confidence."""

from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from sklaplace.metrics.checks import as_vector


def ood_auroc(confidence_in: Any, confidence_out: Any) -> float:
    """Area under the ROC curve of out-of-distribution detection by confidence.

    The probability that the confidence of an in-distribution sample is larger than
    that of an out-of-distribution sample; ties count half.

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

    Notes
    -----
    O((n + m) log(n + m)).

    References
    ----------
    Hendrycks, Gimpel (2017), "A baseline for detecting misclassified and
    out-of-distribution examples in neural networks", ICLR.
    """
    inside = as_vector(confidence_in, "confidence_in")
    outside = as_vector(confidence_out, "confidence_out")
    is_inside = np.repeat([1, 0], [len(inside), len(outside)])
    return float(roc_auc_score(is_inside, np.concatenate([inside, outside])))
