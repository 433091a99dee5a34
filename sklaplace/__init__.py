"""sklaplace: Bayesian uncertainty for skorch networks as scikit-learn estimators.

`LaplaceClassifier` and `LaplaceRegressor` are all that most people need. Below
them, from the ground up:

* pure maths: ``linalg``, ``logits``, ``dirichlet``, ``points``, ``independent``,
  ``links``, ``metrics``
* the statistical model: ``likelihoods``, ``priors``
* from a network to its curvature: ``layouts``, ``forward``, ``jacobians``,
  ``subsets``, ``structures``, ``curvature``, ``subnetworks``
* inference: ``posterior``, ``predictive``, ``heads``, ``tuning``
* the estimators: ``networks``, ``holdout``, ``training``, ``data``, ``labelling``,
  ``settings``, ``inspection``, ``prediction``, ``simplex``, ``fitting``, ``base``,
  ``classifier``, ``preferences``, ``regressor``, ``selection``, ``callbacks``
* pictures: ``plotting``

A module imports only from modules above it in this list.
"""

from sklaplace.callbacks import MarglikTraining, PriorTraining
from sklaplace.classifier import LaplaceClassifier
from sklaplace.preferences import BradleyTerry, LaplaceRanker
from sklaplace.regressor import LaplaceRegressor
from sklaplace.selection import LaplaceClassifierCV, LaplaceRegressorCV

__version__ = "0.1.0"

__all__ = [
    "BradleyTerry",
    "LaplaceClassifier",
    "LaplaceClassifierCV",
    "LaplaceRanker",
    "LaplaceRegressor",
    "LaplaceRegressorCV",
    "MarglikTraining",
    "PriorTraining",
    "__version__",
]
