"""The split of a trained net, recognised by the losses in its history."""

from functools import partial

import numpy as np
import pytest
import torch
from nets import MLP, blobs, classifier, regressor, seeded, waves
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetClassifier
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import predefined_split
from torch import nn
from torch.utils.data import Subset

from sklaplace import LaplaceClassifier, LaplaceRegressor
from sklaplace.estimators.training.laplace import FEW
from sklaplace.networks.history import recorded_split

pytestmark = pytest.mark.usefixtures("rng_untouched")
X, Y = blobs()
X_REG, Y_REG = waves()
TARGETS = Y_REG[:, None]
SPLITS = {
    "default": ValidSplit(5),
    "stratified": ValidSplit(4, stratified=True),
    "at random": ValidSplit(0.3, random_state=0),
    "given": predefined_split(Dataset(X[1::3], Y[1::3])),
}


def held_out(net, *data):
    parts = recorded_split(net, *(data or (X, Y)))
    return None if parts is None else np.stack([row for row, _ in parts[1]])


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("callbacks", ["disable", None])
def test_the_split_of_the_training_is_found(name, callbacks):
    net = seeded(classifier(train_split=SPLITS[name], callbacks=callbacks), X, Y)
    expected = np.stack([row for row, _ in SPLITS[name](Dataset(X, Y), Y)[1]])
    np.testing.assert_array_equal(held_out(net), expected)


class FlatMLP(MLP):
    """A network with outputs (b,)."""

    def forward(self, X):
        return super().forward(X)[:, 0]


@pytest.mark.filterwarnings("error:Using a target size")
def test_the_split_of_a_net_without_an_axis_of_outputs_is_found():
    module = partial(FlatMLP, n_out=1)
    net = seeded(regressor(module, train_split=ValidSplit(5)), X_REG, Y_REG)
    assert held_out(net, X_REG, TARGETS) is not None


# draws anew whenever it is called
DRAWN = ValidSplit(0.3, random_state=np.random.RandomState(0))
NOT_PROVEN = {
    "no split": (classifier(), X, Y),
    "another order": (classifier(train_split=ValidSplit(5)), X[::-1].copy(), Y[::-1]),
    "other samples": (classifier(train_split=ValidSplit(5)), X[:50], Y[:50]),
    "other inputs": (classifier(train_split=ValidSplit(5)), X + 0.01, Y),
    "other targets": (classifier(train_split=ValidSplit(5)), X, (Y + 1) % 3),
    "another random split": (classifier(train_split=DRAWN), X, Y),
    "other features": (classifier(train_split=ValidSplit(5)), X[:, :1], Y),
    "too few samples": (classifier(train_split=ValidSplit(5)), X[:3], Y[:3]),
}


LOST = "ignore:The frozen net held out samples"


@pytest.mark.filterwarnings(LOST)
@pytest.mark.parametrize("case", NOT_PROVEN)
def test_no_split_is_found_unless_the_losses_agree(case):
    net, *data = NOT_PROVEN[case]
    assert held_out(seeded(net, X, Y), *data) is None


@pytest.mark.filterwarnings(LOST)
def test_no_split_is_found_after_further_training():
    net = seeded(classifier(train_split=ValidSplit(5)), X, Y)
    net.set_params(train_split=None)
    with torch.random.fork_rng(devices=[]):
        net.partial_fit(X, Y)
    net.train_split = ValidSplit(5)
    assert held_out(net) is None


# ------------------------------------------------------------------------- estimators
@pytest.mark.parametrize("kind", [LaplaceClassifier, LaplaceRegressor])
def test_frozen_nets_are_tuned_on_what_they_held_out(kind):
    """There is no warning, and the results equal a fit with ``X_val``."""
    net, data = classifier(train_split=ValidSplit(5)), blobs(FEW)
    if kind is LaplaceRegressor:
        x, y = waves(FEW)
        net, data = regressor(train_split=ValidSplit(5)), (x, y[:, None])
    net = seeded(net, *data)
    found = kind(FrozenEstimator(net), random_state=0).fit(*data)
    train, valid = ValidSplit(5)(Dataset(*data), data[1])
    rest, own = (
        [np.stack(part) for part in zip(*subset, strict=True)]
        for subset in (train, valid)
    )
    model = kind(FrozenEstimator(net), random_state=0)
    expected = model.fit(*rest, X_val=own[0], y_val=own[1])
    assert found.prior_precision_ == pytest.approx(expected.prior_precision_, rel=1e-6)
    np.testing.assert_allclose(found.predict(data[0]), expected.predict(data[0]))
    same = kind(FrozenEstimator(net), prior_precision="validation", random_state=0)
    assert same.fit(*data).prior_precision_ == found.prior_precision_


@pytest.mark.parametrize("kind", ["rows", "dataset"])
@pytest.mark.filterwarnings("ignore:There are no held-out samples")
def test_a_split_that_is_lost_is_said_and_what_to_do(kind):
    net, order = (
        seeded(classifier(train_split=ValidSplit(5)), X, Y),
        np.arange(60)[::-1],
    )
    x, y = X[order], Y[order]
    model = LaplaceClassifier(FrozenEstimator(net), random_state=0)
    with pytest.warns(UserWarning, match=r"does not repeat that split.*X_val"):
        model.fit(Dataset(x, y) if kind == "dataset" else x, y)
    model.fit(Dataset(X, Y) if kind == "dataset" else X, Y)  # no warning
    model.fit(x, y, X_val=X[:12], y_val=Y[:12])


class EveryFourth(NeuralNetClassifier):
    """A net that overrides skorch's split."""

    def get_split_datasets(self, X, y=None, **params):
        dataset, rows = self.get_dataset(X, y), np.arange(len(X))
        parts = rows[rows % 4 > 0], rows[rows % 4 == 0]
        return tuple(Subset(dataset, part) for part in parts)


def test_the_split_of_an_own_method_is_found():
    net = EveryFourth(MLP, criterion=nn.CrossEntropyLoss, verbose=0)
    np.testing.assert_array_equal(held_out(seeded(net, X, Y)), X[::4])
    net.set_params(train_split=None)
    np.testing.assert_array_equal(held_out(net), X[::4])


@pytest.mark.filterwarnings(LOST)
def test_a_split_that_was_removed_is_not_found():
    net = seeded(classifier(train_split=ValidSplit(5)), X, Y)
    assert held_out(net.set_params(train_split=None)) is None


def test_samples_with_weights_are_not_recognised():
    net = seeded(regressor(train_split=ValidSplit(5)), X_REG, TARGETS)
    model = LaplaceRegressor(FrozenEstimator(net), random_state=0)
    with pytest.warns(UserWarning, match="no held-out samples"):
        model.fit(X_REG, TARGETS, np.ones(len(X_REG)))
