"""Inputs and settings that once raised raw errors: refused in words, or taken."""

import copy

import numpy as np
import pytest
import torch
from nets import (
    RecordTraining,
    blobs,
    classifier,
    initialised,
    regressor,
    waves,
)
from refusals import CLASSIFIERS, REGRESSORS, refused
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetRegressor
from torch import nn
from torch.func import grad, vmap

from sklaplace import (
    LaplaceRegressor,
    MCDropoutClassifier,
    MCDropoutRegressor,
    VariationalRegressor,
)

X, Y = blobs()
X_REG, Y_REG = waves()


# ------------------------------------------------------- parameters set after fit
def rows_of(kind):
    return (X, Y) if kind in CLASSIFIERS else (X_REG, Y_REG)


@pytest.fixture(
    scope="module", params=CLASSIFIERS + REGRESSORS, ids=lambda kind: kind.__name__
)
def fitted(request):
    kind = request.param
    of_kind = classifier if kind in CLASSIFIERS else regressor
    has_dropout = kind in (MCDropoutClassifier, MCDropoutRegressor)
    net = None if has_dropout else of_kind(max_epochs=2)
    return kind(net, random_state=0).fit(*rows_of(kind))


WRONG = [("batch_size", value) for value in (-1, 0, 2.5, "a")]
WRONG += [("n_samples", value) for value in (-1, 2.5, "a", None)]
WRONG += [("n_jobs", "a")]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_predictions_refuse_what_fit_refuses(fitted, name, value):
    if name not in fitted.get_params():
        return
    model = copy.copy(fitted).set_params(**{name: value})
    data = rows_of(type(fitted))
    words = f"{name!r} parameter of", f"Got {value!r}"
    expected = refused(ValueError, words, lambda: clone(model).fit(*data))
    methods = ["predict", "latent_mean_and_variance"]
    methods += ["predict_proba"] if hasattr(model, "predict_proba") else []
    for method in methods:
        predict = getattr(model, method)
        assert refused(ValueError, words, lambda f=predict: f(data[0])) == expected


# ----------------------------------------------------------------- masked arrays
@pytest.fixture(scope="module")
def linear():
    return LaplaceRegressor(regressor(max_epochs=1), random_state=0).fit(X_REG, Y_REG)


def masked(values):
    """The values with the first entry masked."""
    hidden = np.zeros(values.shape, dtype=bool)
    hidden.flat[0] = True
    return np.ma.MaskedArray(values, hidden)


@pytest.mark.parametrize("name", ["X", "y", "sample_weight", "X_val", "y_val"])
def test_fit_refuses_masked_entries(name):
    data = {"X": X_REG, "y": Y_REG, "sample_weight": np.ones(len(Y_REG))}
    data |= {"X_val": X_REG, "y_val": Y_REG}
    data[name] = masked(data[name])
    model = LaplaceRegressor(regressor(callbacks=[RecordTraining()]))
    words = f"{name} has masked entries", f"{name}.filled(value)"
    refused(ValueError, words, lambda: model.fit(**data), model)


@pytest.mark.parametrize("of_rows", [lambda Z: Z, list, lambda Z: {"X": Z}])
def test_predictions_refuse_masked_entries(linear, of_rows):
    words = "X has masked entries", "X.filled(value)"
    given = of_rows(masked(X_REG))
    refused(ValueError, words, lambda: linear.predict(given), linear)


# ------------------------------------------------------- networks of an unusual kind
FIXED = {"prior_precision": 1.0, "sigma_noise": 0.5, "random_state": 0}


class Plain(nn.Module):
    def __init__(self, n_out=1):
        super().__init__()
        self.hidden, self.head = nn.Linear(2, 4), nn.Linear(4, n_out)

    def energy(self, x):
        return torch.tanh(self.hidden(x))

    def forward(self, x):
        return self.head(self.energy(self.before(x)))

    def before(self, x):
        return x * x.new_tensor([0.0, 2.0])


class InPlace(Plain):
    def before(self, x):
        x.mul_(2)
        x[:, 0] = 0
        return x


@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("pred_type", ["glm", "nn"])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_network_may_write_to_its_input(subset, pred_type, is_frozen):
    found = []
    for module in (InPlace, Plain):
        net = initialised(regressor(module, max_epochs=2))
        net = FrozenEstimator(net) if is_frozen else net.set_params(module=net.module_)
        params = {"subset_of_weights": subset, "pred_type": pred_type, **FIXED}
        Z = X_REG.copy()
        model = LaplaceRegressor(net, **params).fit(Z, Y_REG)
        found.append([*model.predict(Z, return_std=True), model.score_samples(Z)])
        if pred_type == "glm":
            x = torch.tensor(Z, requires_grad=True)
            mean, cov = model.predictive(x)
            (slope,) = torch.autograd.grad(mean.sum() + cov.sum(), x)
            found[-1] += [mean.detach(), cov.detach(), slope]
            np.testing.assert_array_equal(x.detach(), X_REG)
        np.testing.assert_array_equal(Z, X_REG)
    for own, plain in zip(*found, strict=True):
        np.testing.assert_allclose(own, plain, rtol=1e-5, atol=1e-6)


class Force(Plain):
    """Its outputs are made of derivatives of a layer in its inputs."""

    def energy(self, x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        hidden = torch.tanh(self.hidden(x))
        (slope,) = torch.autograd.grad(hidden[:, 0].sum(), x, create_graph=True)
        return torch.cat([hidden[:, :2], slope], 1)


class ForceOfTorchFunc(Force):
    def one(self, x):
        return torch.tanh(self.hidden(x))

    def energy(self, x):
        slope = vmap(grad(lambda row: self.one(row)[0]))(x)
        return torch.cat([self.one(x)[:, :2], slope], 1)


class ForceInClosedForm(Plain):
    def energy(self, x):
        hidden = torch.tanh(self.hidden(x))
        slope = (1 - hidden[:, :1] ** 2) * self.hidden.weight[:1]
        return torch.cat([hidden[:, :2], slope], 1)


@pytest.mark.parametrize("module", [Force, ForceOfTorchFunc])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_a_network_may_differentiate_inside(module, subset, pred_type):
    found = []
    for kind in (module, ForceInClosedForm):
        net = initialised(regressor(kind))
        params = {"subset_of_weights": subset, "pred_type": pred_type, **FIXED}
        model = LaplaceRegressor(FrozenEstimator(net), **params).fit(X_REG, Y_REG)
        found.append([*model.predict(X_REG, return_std=True)])
        assert np.isfinite(model.score_samples(X_REG)).all()
    for own, closed in zip(*found, strict=True):
        np.testing.assert_allclose(own, closed, rtol=1e-4, atol=1e-5)


def test_predictive_says_which_derivatives_it_takes():
    net = FrozenEstimator(initialised(regressor(Force)))
    model = LaplaceRegressor(net, **FIXED).fit(X_REG, Y_REG)
    words = "requires_grad_", "torch.func.grad"
    refused(ValueError, words, lambda: model.predictive(torch.tensor(X_REG)), model)
    net = FrozenEstimator(initialised(regressor(ForceOfTorchFunc)))
    model = LaplaceRegressor(net, **FIXED).fit(X_REG, Y_REG)
    assert model.predictive(torch.tensor(X_REG))[0].isfinite().all()


# -------------------------------------------------------------------- TorchScript
def scripted():
    return torch.jit.script(nn.Linear(2, 1))


def traced():
    return torch.jit.trace(nn.Linear(2, 1), torch.zeros(3, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("make", [scripted, traced])
@pytest.mark.parametrize("way", ["instance", "frozen", "function", "submodule"])
def test_modules_of_torchscript_are_refused(make, way):
    module = make if way == "function" else make()
    if way == "submodule":
        module = nn.Sequential(nn.Linear(2, 2), module)
    net = NeuralNetRegressor(module, callbacks=[RecordTraining()], verbose=0)
    if way == "frozen":
        net = FrozenEstimator(net.initialize())
    where = "submodule '1'" if way == "submodule" else "The module of the net, a Linear"
    words = where, "TorchScript", "original torch.nn.Module"
    for kind in (LaplaceRegressor, VariationalRegressor):
        model = kind(net, random_state=0)
        refused(TypeError, words, lambda m=model: m.fit(X_REG, Y_REG), model)


# -------------------------------------------------------------- intervals and rows
@pytest.mark.parametrize("coverage", [1 - 1e-16, [0.5, 1 - 1e-16]])
def test_intervals_of_almost_all_targets_name_coverage(linear, coverage):
    words = ("coverage",)
    call = lambda: linear.predict_interval(X_REG, coverage)  # noqa: E731
    assert "alpha" not in refused(ValueError, words, call, linear)
    assert np.isfinite(linear.predict_interval(X_REG, 1 - 1e-15)).all()
