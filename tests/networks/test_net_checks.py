"""What a skorch net does besides its module."""

from types import SimpleNamespace

import pytest
import torch
from nets import (
    MLP,
    RecordTraining,
    blobs,
    classifier,
    regressor,
    waves,
)
from refusals import refused, refused_fit
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import (
    DeepEnsembleClassifier,
    LaplaceClassifier,
    LaplaceRegressor,
    MarglikTraining,
    MCDropoutClassifier,
    VariationalClassifier,
)

X, Y = blobs()


class WithEncoder(NeuralNetClassifier):
    """Two modules, of which outputs may be those of both."""

    uses_both = True

    def initialize_module(self):
        super().initialize_module()
        self.enc_ = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        return self

    def infer(self, x, **fit_params):
        return super().infer(self.enc_(x) if self.uses_both else x, **fit_params)


class WithUnusedEncoder(WithEncoder):
    uses_both = False


def two_modules(kind):
    return kind(MLP, criterion=nn.CrossEntropyLoss, max_epochs=1, verbose=0)


class OnMPS(MLP):
    """A module whose parameters are on Apple's GPU, as far as they say."""

    def parameters(self, recurse=True):
        yield SimpleNamespace(device=torch.device("mps", 0))


DEVICES = [
    {"device": "mps"},
    {"device": "mps:0"},
    {"device": torch.device("mps")},
    {"module": OnMPS(), "device": None},
]
ESTIMATORS = [
    LaplaceClassifier,
    DeepEnsembleClassifier,
    MCDropoutClassifier,
    VariationalClassifier,
]
MPS = "'mps'", "no float64", "'cpu' and 'cuda'", "device='cpu'"


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("params", DEVICES)
def test_a_device_without_float64_is_refused_before_training(estimator, params):
    net = classifier(callbacks=[RecordTraining()], **params)
    refused_fit(estimator(net), *MPS, data=(X, Y))


def test_a_frozen_net_on_a_device_without_float64_is_refused():
    net = classifier(module__n_in=2).initialize()
    net.module_ = OnMPS()
    refused_fit(LaplaceClassifier(FrozenEstimator(net)), *MPS, data=(X, Y))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 1)])
def test_a_gpu_that_is_not_there_is_refused_before_training(estimator, device):
    net = classifier(callbacks=[RecordTraining()], device=device)
    words = f"device='{device}'", "sees no GPU", "device='cpu'"
    refused_fit(estimator(net), *words, data=(X, Y))


def test_a_callback_refuses_a_device_without_float64():
    callbacks = [MarglikTraining(), RecordTraining()]
    net = classifier(module__n_in=2, callbacks=callbacks).initialize()
    net.module_ = OnMPS()
    refused(ValueError, MPS, lambda: net.partial_fit(X, Y))


def test_a_second_module_is_refused_before_training():
    model = LaplaceClassifier(two_modules(WithEncoder))
    refused_fit(model, "enc_ besides module_", "one torch.nn.Module", data=(X, Y))


def test_a_second_module_that_outputs_do_not_depend_on():
    model = LaplaceClassifier(two_modules(WithUnusedEncoder), prior_precision=1.0)
    assert model.fit(X, Y).predict_proba(X).shape == (60, 3)


def test_nonlinearities_of_the_users_own_are_refused_before_training():
    words = "predict_nonlinearity", "'auto'"
    net = classifier(predict_nonlinearity=torch.softmax, callbacks=[RecordTraining()])
    refused_fit(LaplaceClassifier(net), *words, "CrossEntropyLoss", data=(X, Y))
    net = regressor(predict_nonlinearity=torch.exp)
    refused_fit(LaplaceRegressor(net), *words, "MSELoss", data=waves())


def test_no_nonlinearity_is_that_of_the_criterion():
    plain, same = (
        LaplaceClassifier(net, prior_precision=1.0, random_state=0).fit(X, Y)
        for net in (classifier(), classifier(predict_nonlinearity=None))
    )
    assert (plain.predict_proba(X) == same.predict_proba(X)).all()
