"""Warnings of networks that learned nothing, and of weights that are no counts."""

import warnings

import numpy as np
import pytest
import torch
from nets import MLP, blobs, classifier, seeded
from sklearn.base import clone
from sklearn.ensemble import AdaBoostClassifier, BaggingClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNet
from torch import nn

from sklaplace import (
    DeepEnsembleClassifier,
    LaplaceClassifier,
    LaplaceClassifierCV,
    MCDropoutClassifier,
    SWAGClassifier,
    VariationalClassifier,
)

X, Y = blobs(90)
WARNING = r"nats per label, is no better than the loss of guessing.*StandardScaler"


class Dropped(MLP):
    """A network with dropout."""

    def forward(self, X):
        hidden = nn.functional.relu(self.hidden(X))
        return self.head(self.dropout(hidden))

    def __init__(self, **params):
        super().__init__(**params)
        self.dropout = nn.Dropout(0.1)


SGD = {"optimizer": torch.optim.SGD, "lr": 0.01, "max_epochs": 20, "batch_size": 32}
NET = classifier(Dropped, **SGD)
FEW = {"n_samples": 4, "random_state": 0}


@pytest.mark.parametrize(
    "model",
    [
        LaplaceClassifier(NET, random_state=0),
        LaplaceClassifierCV(NET, cv=2, prior_precisions=[1.0], random_state=0),
        DeepEnsembleClassifier(NET, n_estimators=2, random_state=0),
        MCDropoutClassifier(NET, **FEW),
        SWAGClassifier(NET, **FEW),
        VariationalClassifier(NET, **FEW),
    ],
    ids=lambda model: type(model).__name__,
)
def test_inputs_of_another_size_that_are_not_learned(model):
    with pytest.warns(UserWarning, match=WARNING):
        clone(model).fit(X * np.float32(1e-4), Y)


def test_the_advice_helps_and_the_default_network_needs_none():
    large = X * np.array([1, 3000], "f4") + 5000
    net = classifier(Dropped, **SGD | {"lr": 0.1})
    with pytest.warns(UserWarning, match=WARNING):
        LaplaceClassifier(net, random_state=0).fit(large, Y)
    scaled = make_pipeline(StandardScaler(), LaplaceClassifier(net, random_state=0))
    for model in (scaled, LaplaceClassifier(random_state=0)):
        assert model.fit(large, Y).score(large, Y) > 0.6
    noise = np.random.default_rng(0).permutation(Y)
    LaplaceClassifier(random_state=0).fit(large, noise)


def test_weights_and_columns_of_labels_have_their_own_frequencies():
    small, rare = X * np.float32(1e-4), np.arange(90) % 9 == 0
    weights = np.where(rare, 8.0, 1.0)  # both classes weigh the same
    net = classifier(module__n_out=2, **SGD)
    for options in ({}, {"sample_weight": weights}):
        with pytest.warns(UserWarning, match=WARNING):
            LaplaceClassifier(net, random_state=0).fit(small, 2 - rare, **options)
    matrix = np.column_stack([rare, Y == 0, Y > 0]).astype("f4")
    net = NeuralNet(MLP, criterion=nn.BCEWithLogitsLoss, verbose=0, **SGD | {"lr": 1})
    with pytest.warns(UserWarning, match=WARNING):
        LaplaceClassifier(net, random_state=0).fit(small, matrix)


# ------------------------------------------------------------------- sample weights
FROZEN = LaplaceClassifier(
    FrozenEstimator(seeded(classifier(), X, Y)), prior_precision=1.0, random_state=0
)
RELATIVE = np.random.default_rng(0).uniform(0.5, 1.5, 90)
MESSAGE = "The mean of sample_weight is"


@pytest.fixture(autouse=True)
def none_shown(monkeypatch):
    monkeypatch.setattr("sklaplace.core.checks._SHOWN", set())


def shown(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if MESSAGE in str(w.message)]


@pytest.mark.parametrize(
    "model",
    [
        FROZEN,
        LaplaceClassifierCV(
            classifier(max_epochs=2), cv=2, prior_precisions=[1.0], random_state=0
        ),
        VariationalClassifier(classifier(max_epochs=2), random_state=0),
        DeepEnsembleClassifier(n_estimators=1, random_state=0),
    ],
    ids=lambda model: type(model).__name__,
)
def test_weights_that_sum_to_one_are_warned_of_once(model):
    found = shown(lambda: model.fit(X, Y, sample_weight=RELATIVE / RELATIVE.sum()))
    assert len(found) == 1
    assert found[0].startswith(f"{MESSAGE} 0.011")
    assert "90 samples should count as 1." in found[0]


@pytest.mark.parametrize(
    "weights",
    [
        RELATIVE,
        RELATIVE.tolist(),
        0.2 * RELATIVE,
        5 * RELATIVE,
        np.arange(90) // 89,  # counts
        np.full(90, 1000.0),
        np.where(np.arange(90) < 2, 1.0, 0.0),
        None,
    ],
    ids=["one", "list", "few", "many", "mask", "counts", "real-mask", "none"],
)
def test_others_are_not(weights):
    assert shown(lambda: FROZEN.fit(X, Y, sample_weight=weights)) == []


def test_meta_estimators_show_one_message_at_most():
    boosted = AdaBoostClassifier(FROZEN, n_estimators=4, random_state=0)
    assert len(shown(lambda: boosted.fit(X, Y))) == 1
    bagged = BaggingClassifier(FROZEN, n_estimators=2, random_state=0)
    assert shown(lambda: bagged.fit(X, Y)) == []
