"""Metrics of uncertainty that scikit-learn lacks, with its signatures.

Classification: calibration error, multi-class Brier score. Regression: scores of a
Gaussian prediction ``N(mean, std²)``, coverage of intervals. Out-of-distribution
detection: ``ood_auroc``.
"""

from sklaplace.metrics.classification import brier_score, expected_calibration_error
from sklaplace.metrics.detection import ood_auroc
from sklaplace.metrics.regression import gaussian_crps, gaussian_nll, interval_coverage
from sklaplace.metrics.scorers import neg_gaussian_nll_scorer

__all__ = [
    "brier_score",
    "expected_calibration_error",
    "gaussian_crps",
    "gaussian_nll",
    "interval_coverage",
    "neg_gaussian_nll_scorer",
    "ood_auroc",
]
