"""sklaplace: Bayesian uncertainty for skorch networks as scikit-learn estimators.

`LaplaceClassifier` and `LaplaceRegressor` are all that most people need. Below
them, from the ground up:

* pure maths: ``linalg``, ``logits``, ``dirichlet``, ``points``,
  ``variational``, ``independent``, ``links``, ``metrics``
* the statistical model: ``likelihoods``, ``priors``
* from a network to its curvature: ``layouts``, ``forward``, ``jacobians``,
  ``subsets``, ``structures``, ``curvature``, ``subnetworks``
* inference: ``posterior``, ``predictive``, ``heads``, ``tuning``
* skorch nets in training and prediction: ``networks``, ``noisy_networks``,
  ``holdout``, ``training``, ``data``, ``labelling``, ``settings``, ``reading``,
  ``outputs``, ``fitting``
* what all estimators take and answer: ``classes``, ``probabilities``, ``simplex`` for
  labels, ``columns``, ``bands`` for numbers
* the Laplace estimators: ``inspection``, ``prediction``, ``laplace``, ``base``,
  ``classifier``, ``preferences``, ``regressor``, ``selection``, ``callbacks``
* estimators that predict from draws: ``sampling``, ``stochastic``, ``elbo``,
  ``backprop``, ``bayes_by_backprop``, ``dropout``, ``ensembles``
* pictures: ``plotting``

A module imports only from modules above it in this list.
"""

from sklaplace.bayes_by_backprop import VariationalClassifier, VariationalRegressor
from sklaplace.callbacks import MarglikTraining, PriorTraining
from sklaplace.classifier import LaplaceClassifier
from sklaplace.dropout import MCDropoutClassifier, MCDropoutRegressor
from sklaplace.ensembles import DeepEnsembleClassifier, DeepEnsembleRegressor
from sklaplace.preferences import BradleyTerry, LaplaceRanker
from sklaplace.regressor import LaplaceRegressor
from sklaplace.selection import LaplaceClassifierCV, LaplaceRegressorCV

__version__ = "0.1.0"

__all__ = [
    "BradleyTerry",
    "DeepEnsembleClassifier",
    "DeepEnsembleRegressor",
    "LaplaceClassifier",
    "LaplaceClassifierCV",
    "LaplaceRanker",
    "LaplaceRegressor",
    "LaplaceRegressorCV",
    "MCDropoutClassifier",
    "MCDropoutRegressor",
    "MarglikTraining",
    "PriorTraining",
    "VariationalClassifier",
    "VariationalRegressor",
    "__version__",
]
