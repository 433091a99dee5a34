"""Modules that return logits among other outputs, like transformers models."""

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nets import (
    MLP,
    RecordTraining,
    blobs,
    classifier,
    initialised,
    seeded,
)
from refusals import refused_fit
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNet, NeuralNetClassifier
from skorch.callbacks import Callback
from torch import nn

from sklaplace import (
    DeepEnsembleClassifier,
    LaplaceClassifier,
    SWAGClassifier,
    VariationalClassifier,
)

X, Y = blobs()
QUICK = {"max_epochs": 3}

pytestmark = pytest.mark.usefixtures("rng_untouched")


@dataclass
class Output:
    """An output object that is neither a sequence nor a mapping."""

    logits: torch.Tensor
    hidden: torch.Tensor


class ModelOutput(OrderedDict):
    """A mapping whose entries are also attributes, as in transformers."""

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


KINDS = {
    "dict": dict,
    "model output": lambda **given: ModelOutput(loss=None, **given),
    "object": Output,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Wrapped(MLP):
    """A network whose output is not a tensor."""

    def __init__(self, kind="dict", **sizes):
        super().__init__(**sizes)
        self.kind = kind

    def forward(self, X):
        f = super().forward(X)
        return KINDS[self.kind](hidden=f + 1, logits=f)


def pair(model, **params):
    """Return one model for each of the two modules."""
    nets = classifier(MLP, **params), classifier(Wrapped, **params)
    return [clone(model).set_params(estimator=net) for net in nets]


STEPS = {"n_snapshots": 4, "steps_per_snapshot": 2}
MODELS = {
    "last_layer": LaplaceClassifier(random_state=0),
    "all": LaplaceClassifier(subset_of_weights="all", random_state=0),
    "subnetwork": LaplaceClassifier(
        subset_of_weights="subnetwork",
        hessian_structure="full",
        subset_params={"by": "swag", "n_weights": 9, **STEPS},
        random_state=0,
    ),
    "swag": SWAGClassifier(random_state=0, n_samples=5, **STEPS),
    "ensemble": DeepEnsembleClassifier(n_estimators=2, random_state=0),
    "variational": VariationalClassifier(random_state=0, n_samples=5),
}


class Predicts(Callback):
    """Callback that predicts between epochs, as scoring callbacks do, and pickles."""

    def on_epoch_end(self, net, **kwargs):
        assert net.predict_proba(X).shape == (len(X), 3)
        pickle.dumps(net)


@pytest.mark.parametrize("name", MODELS)
def test_training_and_predictions_are_those_of_the_logits(name):
    """This includes sample weights and skorch's validation scores."""
    plain, wrapped = pair(MODELS[name], callbacks=[Predicts()], **QUICK)
    weights = np.linspace(0.5, 1.5, len(X))
    for model in (plain, wrapped):
        model.fit(X, Y, sample_weight=weights)
    expected = plain.predict_proba(X)
    np.testing.assert_array_equal(wrapped.predict_proba(X), expected)


@every_kind
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_frozen_networks(kind, subset):
    net = seeded(classifier(**QUICK), X, Y)
    wrapped = initialised(classifier(Wrapped, module__kind=kind))
    wrapped.module_.load_state_dict(net.module_.state_dict())
    settings = {"subset_of_weights": subset, "prior_precision": 1.0, "random_state": 0}
    plain, other = (
        LaplaceClassifier(FrozenEstimator(each), **settings).fit(X, Y)
        for each in (net, wrapped)
    )
    np.testing.assert_array_equal(other.predict_proba(X), plain.predict_proba(X))
    np.testing.assert_array_equal(other.score_samples(X), plain.score_samples(X))
    x = torch.tensor(X[:4])
    for found, expected in zip(other.predictive(x), plain.predictive(x), strict=True):
        assert torch.equal(found, expected)


class OwnLoss(NeuralNetClassifier):
    """A loss that extracts the logits, as plain skorch training needs."""

    def get_loss(self, y_pred, y_true, *args, **kwargs):
        return super().get_loss(y_pred["logits"], y_true, *args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, np.ones(len(X))])
def test_a_net_with_a_loss_of_its_own_gets_what_the_module_returns(weights):
    params = classifier(Wrapped, **QUICK).get_params(deep=False)
    own = OwnLoss(**{k: v for k, v in params.items() if not k.startswith("_")})
    found = LaplaceClassifier(own, random_state=0).fit(X, Y, sample_weight=weights)
    (expected, _) = pair(LaplaceClassifier(random_state=0), **QUICK)
    expected.fit(X, Y, sample_weight=weights)
    np.testing.assert_array_equal(found.predict_proba(X), expected.predict_proba(X))
    # trained by skorch alone
    model = LaplaceClassifier(FrozenEstimator(seeded(own, X, Y)), prior_precision=1.0)
    assert model.fit(X, Y).predict_proba(X).shape == (len(X), 3)


class Returns(MLP):
    """A module that returns outputs without logits."""

    def __init__(self, kind="hidden"):
        super().__init__()
        self.kind = kind

    def forward(self, X):
        f = super().forward(X)
        returned = {
            "hidden": {"last_hidden_state": f},
            "numbers": {"logits": 1.0},
            "object": SimpleNamespace(logits=f.tolist()),
            "none": None,
        }
        return returned[self.kind]


@pytest.mark.parametrize("kind", ["hidden", "numbers", "object", "none"])
def test_outputs_without_a_tensor_of_logits(kind):
    net = classifier(Returns, module__kind=kind, callbacks=[RecordTraining()])
    model = LaplaceClassifier(net)
    refused_fit(model, "The network returns a", "named logits", error=TypeError)


def test_probabilities_among_outputs():
    """The criterion reads the probabilities as logits; skorch rejects such outputs."""
    net = classifier(Wrapped, criterion=nn.NLLLoss, callbacks=[RecordTraining()])
    refused_fit(LaplaceClassifier(net), "criterion=NLLLoss", "CrossEntropyLoss")


class Pair(Wrapped):
    """A module whose first output is the logits."""

    def forward(self, X):
        f = MLP.forward(self, X)
        return f, f + 1


class OwnStep(NeuralNetClassifier):
    """A net whose training step uses the first entry."""

    def train_step_single(self, batch, **fit_params):
        x, y = batch
        self.module_.train()
        outputs, _ = self.infer(x, **fit_params)
        loss = self.get_loss(outputs, y, X=x, training=True)
        loss.backward()
        return {"loss": loss, "y_pred": outputs}


@pytest.mark.slow
def test_a_net_with_a_step_of_its_own_gets_the_tuple():
    params = classifier(Pair, **QUICK).get_params(deep=False)
    own = OwnStep(**{k: v for k, v in params.items() if not k.startswith("_")})
    found = LaplaceClassifier(own, random_state=0).fit(X, Y)
    (expected, _) = pair(LaplaceClassifier(random_state=0), **QUICK)
    np.testing.assert_array_equal(
        found.predict_proba(X), expected.fit(X, Y).predict_proba(X)
    )


def test_two_classes_by_one_logit():
    """The test follows the advice of the message about skorch's binary classifier."""
    params = {"criterion": nn.BCEWithLogitsLoss, "module__n_out": 1, **QUICK}
    params |= {"verbose": 0, "train_split": None}
    plain, wrapped = (
        LaplaceClassifier(NeuralNet(module, **params), random_state=0).fit(X, Y == 1)
        for module in (MLP, Wrapped)
    )
    np.testing.assert_array_equal(wrapped.predict_proba(X), plain.predict_proba(X))
