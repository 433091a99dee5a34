"""skorch callbacks: the posterior uses the weights that the callbacks leave."""

import copy

import numpy as np
import pytest
import torch
from nets import blobs, classifier
from skorch.callbacks import Callback, Checkpoint, EarlyStopping
from skorch.dataset import ValidSplit
from torch.optim.swa_utils import AveragedModel

from sklaplace import LaplaceClassifier

X, Y = blobs(200)
WEIGHTS = np.linspace(0.5, 1.5, 200)


def fitted(*callbacks, weights=None, **params):
    params = {"max_epochs": 12, "train_split": ValidSplit(4, stratified=True)} | params
    net = classifier(callbacks=list(callbacks), **params)
    return LaplaceClassifier(net, random_state=0).fit(X, Y, weights)


def vector(module):
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def assert_at_the_weights_of_the_net(model):
    """Check the mean of the linearised predictive distribution without refitting."""
    head = model.estimator_.module_.head
    selected = torch.cat([head.weight.ravel(), head.bias]).detach().double()
    assert torch.equal(model.posterior_.weights.double(), selected)


def losses(model):
    return np.array(model.estimator_.history[:, "valid_loss"])


def test_early_stopping(figure):
    model = fitted(EarlyStopping(patience=3), lr=0.2, max_epochs=100)
    assert model.n_iter_ < 100
    assert model.n_iter_ == losses(model).argmin() + 4
    figure(epochs=model.n_iter_)


def test_early_stopping_with_the_best_weights():
    model = fitted(EarlyStopping(patience=3, load_best=True), lr=0.2, max_epochs=100)
    best = int(losses(model).argmin()) + 1
    assert best > 1
    expected = fitted(lr=0.2, max_epochs=best)
    found = vector(model.estimator_.module_)
    assert torch.equal(found, vector(expected.estimator_.module_))
    assert_at_the_weights_of_the_net(model)
    np.testing.assert_allclose(model.predict_proba(X), expected.predict_proba(X))


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_checkpoint(weights, tmp_path):
    files = {"dirname": tmp_path, "f_pickle": "net.pkl", "load_best": True}
    model = fitted(Checkpoint(**files), weights=weights, lr=0.5)
    stored = torch.load(tmp_path / "params.pt")
    for name, value in model.estimator_.module_.state_dict().items():
        assert torch.equal(value, stored[name])
    assert_at_the_weights_of_the_net(model)


class WeightAveraging(Callback):
    """Stochastic weight averaging by torch, from a given epoch to the last."""

    def __init__(self, start=6):
        self.start = start

    def on_epoch_end(self, net, **kwargs):
        epoch = len(net.history)
        if epoch == self.start:
            self.averaged_ = AveragedModel(net.module_)
        if epoch >= self.start:
            self.averaged_.update_parameters(net.module_)
            self.seen_ = [*getattr(self, "seen_", []), copy.deepcopy(net.module_)]

    def on_train_end(self, net, **kwargs):
        net.module_.load_state_dict(self.averaged_.module.state_dict())


def test_weight_averaging():
    model = fitted(("swa", WeightAveraging()))
    callback = dict(model.estimator_.callbacks_)["swa"]
    assert len(callback.seen_) == 7
    average = torch.stack([vector(module) for module in callback.seen_]).mean(0)
    found = vector(model.estimator_.module_)
    torch.testing.assert_close(found, average)
    assert not torch.allclose(found, vector(callback.seen_[-1]))
    assert_at_the_weights_of_the_net(model)
