"""scikit-learn's checks, for the defaults and for a user's network."""

import pytest
import torch
from nets import MLP, SizeToData
from refusals import CLASSIFIERS, REGRESSORS
from sklearn.utils.estimator_checks import parametrize_with_checks
from skorch import NeuralNetClassifier, NeuralNetRegressor
from torch import nn

from sklaplace import LaplaceClassifier, LaplaceRegressor

# The checks use tables of 10 to 40 rows, too few to set any aside for the noise.
# Some have so few distinct rows that five folds cannot be made either.
pytestmark = [
    pytest.mark.filterwarnings("ignore:sigma_noise is estimated from training"),
    pytest.mark.filterwarnings("ignore:There are no held-out samples"),
    # of hundreds, around networks in the units of a check
    pytest.mark.filterwarnings("ignore:The network predicts its training targets"),
    # whether it is found for networks that interpolate depends on their seed
    pytest.mark.filterwarnings("ignore:The fixed point of the evidence"),
]


# which train no networks of folds
FIXED = [
    LaplaceClassifier(prior_precision=1.0),
    LaplaceRegressor(prior_precision=1.0, sigma_noise=1.0),
]
# of searches, and of snapshots
FEWER = {
    "CV": {"prior_precisions": [0.1, 1.0, 10.0], "cv": 2},
    "SWAG": {"n_snapshots": 10, "steps_per_snapshot": 2},
}
EVERY = [
    kind(**next((few for part, few in FEWER.items() if part in kind.__name__), {}))
    for kind in CLASSIFIERS + REGRESSORS
]


@parametrize_with_checks(FIXED)
def test_given_prior_and_noise(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([*EVERY, LaplaceRegressor(normalize_y=True)])
def test_defaults(estimator, check):
    check(estimator)


class DoubleMLP(MLP):
    def __init__(self, n_in=2, n_out=3, width=6):
        super().__init__(n_in, n_out, width, torch.float64)


def minibatch_nets():
    """Use networks that are trained in small batches, and sized when training begins.

    They compute in float64, because scikit-learn compares predictions to 1e-7, twice
    the epsilon of float32.
    """
    settings = {
        "module__width": 16,
        "max_epochs": 30,
        "batch_size": 16,
        "optimizer": torch.optim.Adam,
        "lr": 0.02,
        "train_split": None,
        "callbacks": [SizeToData()],
        "verbose": 0,
    }
    classifier = NeuralNetClassifier(
        DoubleMLP, criterion=nn.CrossEntropyLoss, **settings
    )
    regressor = NeuralNetRegressor(DoubleMLP, **settings)
    return [LaplaceClassifier(classifier), LaplaceRegressor(regressor)]


def expected_failures(estimator):
    reason = (
        "Repeated rows make other mini-batches than weighted rows do, so that the "
        "network itself is another."
    )
    kinds = "dense", "sparse"
    return {f"check_sample_weight_equivalence_on_{kind}_data": reason for kind in kinds}


@pytest.mark.slow
# some checks have random labels or weights of 1000 and 0.0001 for the classes
@pytest.mark.filterwarnings("ignore:The network's training loss, .* of guessing")
@parametrize_with_checks(minibatch_nets(), expected_failed_checks=expected_failures)
def test_around_a_minibatch_network(estimator, check):
    check(estimator)
