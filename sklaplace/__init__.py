"""sklaplace: Bayesian uncertainty for skorch networks as scikit-learn estimators."""

from sklaplace.classifier import LaplaceClassifier
from sklaplace.regressor import LaplaceRegressor

__version__ = "0.1.0"

__all__ = ["LaplaceClassifier", "LaplaceRegressor", "__version__"]
