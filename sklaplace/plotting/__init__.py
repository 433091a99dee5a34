"""Displays of predictions and their uncertainty.

The displays work as in scikit-learn: ``from_estimator`` predicts and plots,
``from_predictions`` plots given predictions, and ``plot`` plots the stored data again.
matplotlib is imported when a display is first plotted.
"""

from sklaplace.plotting.bands import PredictiveBandDisplay
from sklaplace.plotting.novelty import NoveltyDisplay
from sklaplace.plotting.planes import ConfidenceDisplay, UncertaintyDisplay
from sklaplace.plotting.prior_path import PriorPathDisplay
from sklaplace.plotting.regression_calibration import RegressionCalibrationDisplay
from sklaplace.plotting.reliability import ReliabilityDisplay
from sklaplace.plotting.risk_coverage import RiskCoverageDisplay
from sklaplace.plotting.simplex import DirichletDisplay
from sklaplace.plotting.weights import WeightPosteriorDisplay

__all__ = [
    "ConfidenceDisplay",
    "DirichletDisplay",
    "NoveltyDisplay",
    "PredictiveBandDisplay",
    "PriorPathDisplay",
    "RegressionCalibrationDisplay",
    "ReliabilityDisplay",
    "RiskCoverageDisplay",
    "UncertaintyDisplay",
    "WeightPosteriorDisplay",
]
