"""sklaplace: Bayesian uncertainty for skorch networks as scikit-learn estimators.

`LaplaceClassifier` and `LaplaceRegressor` are all that most people need. The
subpackages that they are made of, from the lowest:

* ``core``: linear algebra, Newton's method, option checks, random numbers, memory
  budget, cache
* ``metrics``: scores that scikit-learn lacks
* ``dirichlet``: Gaussians over logits, links, Dirichlet distributions
* ``likelihoods``: targets given the outputs of a network
* ``networks``: a skorch net as a function, its training and its data
* ``curvature``: layouts, Jacobians, subsets of weights, structures of the Hessian
* ``posterior``: the Gaussian over weights, its predictives and its tuning; variational
  posteriors
* ``estimators``: everything with ``fit``
* ``plotting``: displays

A module imports only from its own subpackage and from those above it in this
list.
"""

from sklearn.base import BaseEstimator as _BaseEstimator

from sklaplace.estimators.callbacks import MarglikTraining, PriorTraining
from sklaplace.estimators.classifier import LaplaceClassifier
from sklaplace.estimators.dropout import MCDropoutClassifier, MCDropoutRegressor
from sklaplace.estimators.ensemble import DeepEnsembleClassifier, DeepEnsembleRegressor
from sklaplace.estimators.predicting.streaming import iter_predictions
from sklaplace.estimators.ranker import BradleyTerry, LaplaceRanker
from sklaplace.estimators.regressor import LaplaceRegressor
from sklaplace.estimators.search import LaplaceClassifierCV, LaplaceRegressorCV
from sklaplace.estimators.swag import SWAGClassifier, SWAGRegressor
from sklaplace.estimators.variational import VariationalClassifier, VariationalRegressor

__version__ = "0.1.0"

__all__ = [
    "TRUSTED_TYPES",
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
    "SWAGClassifier",
    "SWAGRegressor",
    "VariationalClassifier",
    "VariationalRegressor",
    "__version__",
    "iter_predictions",
]

TRUSTED_TYPES = [
    f"{globals()[name].__module__}.{name}"
    for name in __all__
    if isinstance(globals().get(name), type)
    and issubclass(globals()[name], _BaseEstimator)
]
"""Names of the estimators, for the ``trusted`` of ``skops.io.load``.

To load one of them runs no code of whoever made the file. Add the names of your own
modules and functions, which the file refers to.
"""
