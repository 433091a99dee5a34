"""sklaplace: Bayesian uncertainty for skorch networks as scikit-learn estimators.

Most users need only `LaplaceClassifier` and `LaplaceRegressor`. The subpackages are,
from the lowest to the highest level:

* ``core``: linear algebra, Newton's method, option checks, random numbers, memory
  budget, cache
* ``metrics``: scores that are not in scikit-learn
* ``dirichlet``: Gaussians over logits, link approximations, Dirichlet distributions
* ``likelihoods``: distributions of targets given the outputs of a network
* ``networks``: skorch nets as functions, their training and their data
* ``curvature``: layouts, Jacobians, subsets of weights, structures of the Hessian
* ``posterior``: Gaussian posteriors over weights, their predictive distributions and
  their tuning
* ``variational``: mean-field posteriors of Bayes by Backprop
* ``estimators``: all classes with a ``fit`` method
* ``plotting``: displays

A module imports only from its own subpackage and from subpackages above it in this
list.
"""

from sklearn.base import BaseEstimator as _BaseEstimator

from sklaplace.core.versions import __version__, show_versions
from sklaplace.estimators.callbacks import MarglikTraining, PriorTraining
from sklaplace.estimators.classifier import LaplaceClassifier
from sklaplace.estimators.dropout import MCDropoutClassifier, MCDropoutRegressor
from sklaplace.estimators.ensemble import DeepEnsembleClassifier, DeepEnsembleRegressor
from sklaplace.estimators.ranker import BradleyTerry, LaplaceRanker
from sklaplace.estimators.regressor import LaplaceRegressor
from sklaplace.estimators.search import LaplaceClassifierCV, LaplaceRegressorCV
from sklaplace.estimators.swag import SWAGClassifier, SWAGRegressor
from sklaplace.estimators.variational import VariationalClassifier, VariationalRegressor

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
    "show_versions",
]

TRUSTED_TYPES = [
    f"{globals()[name].__module__}.{name}"
    for name in __all__
    if isinstance(globals().get(name), type)
    and issubclass(globals()[name], _BaseEstimator)
]
"""Names of the estimators, for the ``trusted`` parameter of ``skops.io.load``.

Loading these estimators does not run any code from the author of the file. Add the
names of your own modules, functions and callbacks that the file refers to.
"""
