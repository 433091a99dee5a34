"""Networks with low or mixed precision, lazy layers, or unusual parameters."""

import pickle

import numpy as np
import pytest
import torch
from nets import (
    MLP,
    RecordTraining,
    blobs,
    classifier,
    initialised,
    regressor,
    waves,
)
from refusals import CLASSIFIERS, REGRESSORS, refused, refused_fit
from sklearn.frozen import FrozenEstimator
from torch import nn
from torch.func import grad, vmap

from sklaplace import LaplaceClassifier, LaplaceRegressor

X, Y = blobs()
X_REG, Y_REG = waves()

# what torch says of such modules
pytestmark = [
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
    pytest.mark.filterwarnings("ignore:.*weight_norm"),
    pytest.mark.filterwarnings("ignore:Lazy modules"),
]

every_subset = pytest.mark.parametrize("subset", ["last_layer", "all"])
every_structure = pytest.mark.parametrize("structure", ["kron", "diag", "full", "gp"])


class Mixed(MLP):
    """A float64 head on a float32 body."""

    def __init__(self):
        super().__init__()
        self.head.double()

    def forward(self, X):
        return self.head(self.hidden(X).tanh().double())


class WithEmptyLayers(MLP):
    """A module with layers of zero width."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(2, 0), nn.Linear(0, 6, bias=False)

    def forward(self, X):
        return self.head((self.hidden(X) + self.wide(self.narrow(X))).tanh())


class WithIntegers(MLP):
    """A module with integer parameters: an input order and quantised weights."""

    def __init__(self):
        super().__init__()
        order, mixing = torch.tensor([0, 1]), 2 * torch.eye(6, dtype=torch.int8)
        self.order = nn.Parameter(order, requires_grad=False)
        self.mixing = nn.Parameter(mixing, requires_grad=False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, X):
        hidden = self.hidden(X[:, self.order]) @ (self.mixing.float() / 2)
        return self.head(hidden.tanh())


class WithHooks(MLP):
    """A module whose weights are computed by a hook before each forward pass."""

    def __init__(self, of_head=False):
        super().__init__()
        torch.nn.utils.weight_norm(self.head if of_head else self.hidden)


class WithParametrisation(MLP):
    """A module whose weights are computed by torch's parametrisations."""

    def __init__(self, of_head=False):
        super().__init__()
        layer = self.head if of_head else self.hidden
        nn.utils.parametrizations.weight_norm(layer)


class Lazy(MLP):
    """A module whose layers infer their sizes from the first batch."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.LazyLinear(6), nn.LazyLinear(3)


def trained(module, **params):
    torch.manual_seed(0)
    return classifier(module, train_split=None, **params).fit(X, Y)


def with_weights_of(net, module, **params):
    """Copy the weights to another module, which keeps its own precision."""
    other = classifier(module, **params).initialize()
    values, names = net.module_.state_dict(), other.module_.state_dict().keys()
    other.module_.load_state_dict({name: values[name] for name in names})
    return other


def fit(net, subset="last_layer", structure="kron", **params):
    params = {"prior_precision": 1.0} | params
    model = LaplaceClassifier(
        FrozenEstimator(net),
        subset_of_weights=subset,
        hessian_structure=structure,
        random_state=0,
        **params,
    )
    return model.fit(X, Y)


def assert_equal_predictions(found, expected, tolerance):
    """Check probabilities, and variances and evidence with relative tolerance."""
    variances = [m.latent_mean_and_variance(X)[1] for m in (found, expected)]
    size = variances[1].max()
    np.testing.assert_allclose(*variances, rtol=0, atol=tolerance * size)
    probabilities = [m.predict_proba(X) for m in (found, expected)]
    np.testing.assert_allclose(*probabilities, rtol=0, atol=tolerance)
    evidences = [m.log_marginal_likelihood_value_ for m in (found, expected)]
    np.testing.assert_allclose(*evidences, rtol=tolerance)


SAME_FUNCTION = [Mixed, WithEmptyLayers, WithIntegers]


@pytest.mark.parametrize("module", SAME_FUNCTION)
@pytest.mark.parametrize("subset", ["last_layer", "all", "trainable", ["hidden"]])
@every_structure
def test_of_networks_of_the_same_function(module, subset, structure):
    net = trained(module)
    expected = fit(with_weights_of(net, MLP), subset, structure, refine=False)
    found = fit(net, subset, structure, refine=False)
    assert_equal_predictions(found, expected, 1e-5)


@pytest.mark.parametrize("of_head", [False, True])
@every_subset
def test_weights_computed_by_a_hook(of_head, subset):
    net = trained(WithHooks, module__of_head=of_head)
    reference = classifier(WithParametrisation, module__of_head=of_head).initialize()
    with torch.no_grad():
        for name in ("hidden", "head"):
            old, new = (getattr(n.module_, name) for n in (net, reference))
            new.bias.copy_(old.bias)
            if hasattr(old, "weight_g"):
                new.parametrizations.weight.original0.copy_(old.weight_g)
                new.parametrizations.weight.original1.copy_(old.weight_v)
            else:
                new.weight.copy_(old.weight)
    before = pickle.dumps(net.module_.state_dict())
    found, expected = (fit(n, subset, "full", refine=False) for n in (net, reference))
    assert_equal_predictions(found, expected, 1e-4)
    assert pickle.dumps(net.module_.state_dict()) == before
    copy = pickle.loads(pickle.dumps(found))
    np.testing.assert_array_equal(copy.predict_proba(X), found.predict_proba(X))


def test_lazy_layers_get_their_sizes_before_the_checks():
    net = classifier(Lazy, train_split=None)
    model = LaplaceClassifier(net, prior_precision=1.0, random_state=0).fit(X, Y)
    assert model.posterior_.layout.n_parameters == 21
    assert not hasattr(net, "module_")
    again = fit(model.estimator_)
    np.testing.assert_allclose(again.predict_proba(X), model.predict_proba(X))


def test_lazy_layers_of_a_network_without_weights_are_refused():
    model = LaplaceClassifier(FrozenEstimator(classifier(Lazy).initialize()))
    refused_fit(model, "hidden.weight", "lazy", "Fit the net", data=(X, Y))


@pytest.mark.parametrize("subset", [["narrow"], ["order"]])
def test_parameters_that_are_no_weights_are_refused(subset):
    module = WithEmptyLayers if subset == ["narrow"] else WithIntegers
    model = LaplaceClassifier(classifier(module), subset_of_weights=subset)
    words = subset[0], "hidden.weight", "Integer and empty tensors"
    refused_fit(model, *words, data=(X, Y))


def test_a_last_layer_without_weights_is_refused():
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(2, 0), nn.Linear(0, 3, bias=False)

        def forward(self, X):
            return self.head(self.first(X))

    refused_fit(LaplaceClassifier(classifier(Empty)), "no weights", data=(X, Y))


# --------------------------------------------- that write to inputs, or differentiate
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
    """A module whose outputs are derivatives of a layer in its inputs."""

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


# ------------------------------------------------------------------- random outputs
class Dropping(MLP):
    """Dropout in every mode."""

    def forward(self, X):
        hidden = torch.tanh(self.hidden(X))
        return self.head(nn.functional.dropout(hidden, 0.5, True))


class Noisy(MLP):
    def forward(self, X):
        hidden = torch.tanh(self.hidden(X))
        return self.head(hidden + 0.1 * torch.randn_like(hidden))


@pytest.mark.parametrize("kind", CLASSIFIERS + REGRESSORS)
@pytest.mark.parametrize("module", [Dropping, Noisy])
def test_networks_that_draw_in_evaluation_mode_are_refused(kind, module):
    is_classifier = kind in CLASSIFIERS
    net = (classifier if is_classifier else regressor)(
        module, callbacks=[RecordTraining()]
    )
    data = (X, Y) if is_classifier else (X_REG, Y_REG)
    words = "random in evaluation mode", "self.training", "MCDropout"
    refused_fit(kind(net, random_state=0), *words, data=data)


def test_a_frozen_network_that_draws_in_evaluation_mode_is_refused():
    model = LaplaceClassifier(FrozenEstimator(initialised(classifier(Noisy))))
    refused_fit(model, "random in evaluation mode", data=(X, Y))
