"""Uncertainty metrics that scikit-learn lacks, in the style of scikit-learn.

The classification metrics are calibration errors, sharpness and the Brier score. The
regression metrics score Gaussian predictions ``N(mean, std²)``, quantiles and
intervals. The confidence metrics score out-of-distribution detection and selective
prediction. Functions whose names end in ``_scorer`` can be passed as ``scoring=``.
"""

from sklaplace.metrics.classification import (
    adaptive_calibration_error,
    brier_score,
    class_sharpness,
    expected_calibration_error,
    maximum_calibration_error,
    reliability_curve,
)
from sklaplace.metrics.coverage import coverage_by_category
from sklaplace.metrics.detection import (
    area_under_risk_coverage,
    ood_auroc,
    ood_fpr,
    risk_coverage_curve,
)
from sklaplace.metrics.regression import (
    empirical_frequency,
    gaussian_crps,
    gaussian_nll,
    interval_coverage,
    interval_score,
    quantile_crps,
    sharpness,
    weighted_interval_score,
)
from sklaplace.metrics.scorers import (
    neg_area_under_risk_coverage_scorer,
    neg_expected_calibration_error_scorer,
    neg_gaussian_crps_scorer,
    neg_gaussian_nll_scorer,
    neg_interval_score_scorer,
    neg_quantile_crps_scorer,
    neg_weighted_interval_score_scorer,
)

__all__ = [
    "adaptive_calibration_error",
    "area_under_risk_coverage",
    "brier_score",
    "class_sharpness",
    "coverage_by_category",
    "empirical_frequency",
    "expected_calibration_error",
    "gaussian_crps",
    "gaussian_nll",
    "interval_coverage",
    "interval_score",
    "maximum_calibration_error",
    "neg_area_under_risk_coverage_scorer",
    "neg_expected_calibration_error_scorer",
    "neg_gaussian_crps_scorer",
    "neg_gaussian_nll_scorer",
    "neg_interval_score_scorer",
    "neg_quantile_crps_scorer",
    "neg_weighted_interval_score_scorer",
    "ood_auroc",
    "ood_fpr",
    "quantile_crps",
    "reliability_curve",
    "risk_coverage_curve",
    "sharpness",
    "weighted_interval_score",
]
