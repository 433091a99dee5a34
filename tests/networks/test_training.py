"""Training: skorch's behaviour is kept, and nothing is left behind."""

import pickle

import numpy as np
import pytest
import torch
from nets import (
    BatchNormMLP,
    RecordTraining,
    SoftmaxMLP,
    binary_classifier,
    blobs,
    classifier,
    regressor,
    waves,
)
from sklearn.base import clone
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, EpochScoring
from skorch.dataset import ValidSplit

from sklaplace import LaplaceClassifier, LaplaceRegressor
from sklaplace.core.random import private_rng

FIXED = {"prior_precision": 1.0, "random_state": 0}
WEIGHTS = np.linspace(0.5, 2, 60)
X, Y = blobs()
weighted_or_not = pytest.mark.parametrize("weights", [None, WEIGHTS])


# ----------------------------------------------------------- skorch's own behaviour
def states(net):
    return [value.clone() for value in net.module_.state_dict().values()]


class Sees(Callback):
    """Callback that keeps its arguments from the beginning of training."""

    def on_train_begin(self, net, X=None, y=None, **kwargs):
        self.X_, self.y_ = X, y


def skorch_defaults(*callbacks, **settings):
    """Return a net with skorch's default split and scores."""
    options = {"max_epochs": 3, "verbose": 0, "callbacks": [*callbacks], **settings}
    return NeuralNetClassifier(SoftmaxMLP, **options)


class TestFit:
    @pytest.mark.parametrize("weights", [None, np.ones(60)])
    def test_is_that_of_skorch(self, weights):
        net = classifier(BatchNormMLP, batch_size=16, iterator_train__shuffle=True)
        model = LaplaceClassifier(net, **FIXED).fit(X, Y, sample_weight=weights)
        with private_rng(model._seed):
            # the estimator peeks at the module, and at rows, outside of this state
            own = clone(net).fit(X, Y)
        for found, expected in zip(states(model.estimator_), states(own), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    @weighted_or_not
    def test_callbacks_see_the_rows(self, weights):
        net = classifier(callbacks=[("sees", Sees())])
        model = LaplaceClassifier(net, **FIXED).fit(X, Y, sample_weight=weights)
        seen = dict(model.estimator_.callbacks_)["sees"]
        np.testing.assert_array_equal(seen.X_, X)
        np.testing.assert_array_equal(seen.y_, Y)

    def test_nothing_is_left_on_the_net(self):
        model = LaplaceClassifier(classifier(), **FIXED).fit(X, Y, WEIGHTS)
        own = classifier().fit(X, Y)
        assert type(model.estimator_) is NeuralNetClassifier
        assert sorted(vars(model.estimator_)) == sorted(vars(own))
        assert model.estimator_.criterion_.reduction == "mean"
        assert model.estimator_.train_split is None
        # and it is usable by itself
        net = pickle.loads(pickle.dumps(model.estimator_))
        np.testing.assert_array_equal(net.predict(X), model.estimator_.predict(X))
        net.partial_fit(X, Y)


class TestWeightedLoss:
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("kind", ["classifier", "binary", "regressor"])
    def test_is_the_weighted_mean_or_sum(self, kind, reduction):
        make, estimator, (X, y) = {
            "classifier": (classifier, LaplaceClassifier, blobs()),
            "binary": (binary_classifier, LaplaceClassifier, (blobs()[0], 1 * (Y > 0))),
            "regressor": (regressor, LaplaceRegressor, waves()),
        }[kind]
        net = make(max_epochs=1, lr=0.0, criterion__reduction=reduction)
        settings = {"sigma_noise": 0.2} if kind == "regressor" else {}
        model = estimator(net, **FIXED, **settings).fit(X, y, sample_weight=WEIGHTS)
        trained = model.estimator_
        with torch.no_grad():
            f = trained.infer(torch.tensor(X))
        targets = torch.tensor(y)
        if kind != "classifier":
            targets = targets.to(f.dtype).reshape(f.shape)
        losses = type(trained.criterion_)(reduction="none")(f, targets)
        losses = losses.reshape(60, -1).sum(1)
        total = (losses * torch.tensor(WEIGHTS)).sum()
        expected = total / WEIGHTS.sum() if reduction == "mean" else total
        assert trained.history[-1, "batches", 0, "train_loss"] == pytest.approx(
            float(expected), rel=1e-5
        )

    def test_batches_share_one_normaliser(self):
        # so that the expected step is that of the whole data, whatever the batches
        heavy = np.where(np.arange(60) < 10, 5.0, 0.5)
        options = {"lr": 1e-3, "batch_size": 10, "optimizer": torch.optim.SGD}
        net = classifier(max_epochs=1, **options)
        model = LaplaceClassifier(net, **FIXED).fit(X, Y, sample_weight=heavy)
        losses = model.estimator_.history[-1, "batches", :, "train_loss"]
        # the first batch has four times the mean weight, the others .4 times
        assert losses[0] == pytest.approx(4 / 0.4 * np.mean(losses[1:]), rel=0.5)

    def test_validation_rows_of_skorch_are_not_trained_on(self):
        RecordTraining.steps.clear()
        net = skorch_defaults(RecordTraining(), max_epochs=1)
        LaplaceClassifier(net, random_state=0).fit(X, Y, sample_weight=WEIGHTS)
        assert sum(RecordTraining.steps) == 48


@pytest.mark.parametrize("on_train", [False, True])
def test_uncached_scores_see_weighted_rows(on_train):
    scoring = EpochScoring("accuracy", on_train=on_train, use_caching=False, name="s")
    net = classifier(callbacks=[scoring], train_split=ValidSplit(4))
    model = LaplaceClassifier(net, random_state=0).fit(X, Y, sample_weight=WEIGHTS)
    assert all(0 <= score <= 1 for score in model.estimator_.history[:, "s"])
