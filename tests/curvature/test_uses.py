"""Networks that behave differently for rare samples: correct, or refused by name."""

import numpy as np
import pytest
import torch
from nets import QUIET, RecordTraining
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetBinaryClassifier, NeuralNetClassifier, NeuralNetRegressor
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sklaplace import LaplaceClassifier, LaplaceRegressor, VariationalClassifier

N, N_RARE = 300, 5
FIXED = {"prior_precision": 0.7, "sigma_noise": 0.8, "residual": "none"}


@pytest.fixture(autouse=True)
def seeded(rng_untouched):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield


def samples(seed=0):
    """Return inputs (n, 3); the first entry exceeds 2 for a few samples."""
    X = np.random.RandomState(seed).uniform(-1, 1, (N, 3))
    # none of them among those that a fit infers the structure from
    rare = np.arange(N_RARE) * 47 + 29
    X[rare, 0] = 2.5
    return X, rare


class Parts(nn.Module):
    """A float64 network with several layers."""

    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.double()


class RareHead(Parts):
    """A few samples get their outputs from another layer."""

    def forward(self, x):
        h = self.body(x).tanh()
        out, rare = self.a(h).clone(), x[:, 0] > 2
        if rare.any():
            out[rare] = self.b(h[rare])
        return out


class AddedHead(Parts):
    """A few samples get the output of an additional layer."""

    def forward(self, x):
        h = self.body(x).tanh()
        rare = x[:, :1] > 2
        return self.a(h) + torch.where(rare, self.b(h), 0) if rare.any() else self.a(h)


class RareUse(Parts):
    """A few samples use the weight of the first layer a second time."""

    def forward(self, x):
        h, rare = self.body(x).tanh(), x[:, 0] > 2
        if rare.any():
            h = h.clone()
            h[rare] = functional.linear(x[rare], self.body.weight).sin()
        return self.a(h)


class RareUseBelow(Parts):
    """A few samples use the weight of the last layer in an earlier layer, too."""

    def forward(self, x):
        h, rare = self.body(x).tanh(), x[:, :1] > 2
        if rare.any():
            h = h + torch.where(rare, self.a.weight[0], 0)
        return self.a(h)


class RareUseAbove(Parts):
    """A few samples use the weight of the last layer a second time."""

    def forward(self, x):
        h, rare = self.body(x).tanh(), x[:, 0] > 2
        f = self.a(h)
        again = functional.linear(h.sin(), self.a.weight)
        return torch.where(rare[:, None], f * again, f) if rare.any() else f


def frozen(module, net=NeuralNetRegressor):
    return FrozenEstimator(net(module, **QUIET).initialize())


# networks, subsets, and the layers that some samples use in a new way
every_network = pytest.mark.parametrize(
    ("module", "subset", "layer"),
    [
        (RareHead, "last_layer", "b"),
        (AddedHead, "last_layer", "b"),
        (RareUse, "all", "body"),
        (RareUseBelow, "last_layer", "a"),
        (RareUseAbove, "last_layer", "a"),
        (RareUseAbove, "all", "a"),
    ],
)


@every_network
def test_a_path_of_a_few_training_samples_is_refused(module, subset, layer):
    X, _ = samples()
    model = LaplaceRegressor(
        frozen(module), subset_of_weights=subset, batch_size=40, **FIXED
    )
    with pytest.raises(ValueError, match=f"path through '{layer}'"):
        model.fit(X, X[:, :2])
    assert not hasattr(model, "posterior_")


def test_a_path_of_the_first_batch_is_refused_before_training():
    X, _ = samples()
    RecordTraining.steps.clear()
    net = NeuralNetRegressor(RareHead, **QUIET | {"callbacks": [RecordTraining]})
    with pytest.raises(ValueError, match="path through 'b'"):
        LaplaceRegressor(net, random_state=0).fit(X, X[:, :2])
    assert not RecordTraining.steps


@every_network
def test_a_path_that_no_training_sample_takes_is_refused(module, subset, layer):
    X, rare = samples()
    usual = np.delete(X, rare, 0)
    model = LaplaceRegressor(frozen(module), subset_of_weights=subset, **FIXED)
    model.fit(usual, usual[:, :2])
    before = model.latent_mean_and_variance(usual)[1]
    message = f"path through '{layer}'.*training samples"
    with pytest.raises(ValueError, match=message):
        model.latent_mean_and_variance(X)
    np.testing.assert_array_equal(model.latent_mean_and_variance(usual)[1], before)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_all_predictions_refuse_a_head_that_no_training_sample_used(pred_type):
    X, rare = samples()
    usual = np.delete(X, rare, 0)
    model = LaplaceRegressor(frozen(RareHead), pred_type=pred_type, **FIXED)
    model.fit(usual, usual[:, :2])
    for predict in (model.predict, model.sample_y):
        with pytest.raises(ValueError, match="path through 'b'"):
            predict(X, **{"return_std": True} if predict == model.predict else {})
    if pred_type == "glm":
        with pytest.raises(ValueError, match="path through 'b'"):
            model.predictive(torch.as_tensor(X))


# ------------------------------------------------------------------- logit layers
class Fallback(nn.Module):
    """A few samples have constant probabilities."""

    def __init__(self, n_outputs=3):
        super().__init__()
        self.head, self.n_outputs = nn.Linear(3, n_outputs), n_outputs
        self.last = nn.Softmax(1) if n_outputs > 1 else nn.Sigmoid()
        nn.init.normal_(self.head.weight)

    def forward(self, x):
        constant = torch.full((), 1 / max(2, self.n_outputs))
        return torch.where(x[:, :1] > 2, constant, self.last(self.head(x)))


class BinaryNet(NeuralNetBinaryClassifier):
    """A net whose module returns probabilities."""

    def __init__(self, module, *, criterion=nn.BCELoss, **options):
        super().__init__(module, criterion=criterion, **options)


@pytest.mark.parametrize("n_outputs", [1, 2, 3])
def test_probabilities_that_are_not_of_the_logit_layer_are_kept(n_outputs):
    X, rare = samples()
    X = X.astype("float32")
    y = (X[:, 1] > 0).astype(int) if n_outputs < 3 else np.arange(N) % 3
    if n_outputs == 1:
        net = BinaryNet(Fallback, module__n_outputs=1, **QUIET)
    else:
        net = NeuralNetClassifier(Fallback, module__n_outputs=n_outputs, **QUIET)
    options = {"prior_precision": 1.0, "residual": "none"}
    model = LaplaceClassifier(FrozenEstimator(net.initialize()), **options)
    model.fit(np.delete(X, rare, 0), np.delete(y, rare))
    assert model.network_spec_.logit_layer == "head"
    found = model.predict_proba(X[rare])
    np.testing.assert_allclose(found, 1 / max(2, n_outputs), atol=1e-6)


def test_a_variational_fit_keeps_probabilities_that_are_not_of_the_logit_layer():
    X, rare = samples()
    y = (X[:, 1] > 0).astype(int)
    net = NeuralNetClassifier(Fallback, module__n_outputs=2, max_epochs=3, verbose=0)
    model = VariationalClassifier(net, random_state=0).fit(X.astype("float32"), y)
    found = model.predict_proba(X[rare].astype("float32"))
    np.testing.assert_allclose(found, 0.5, atol=1e-6)


# -------------------------------------------------- gradients that are no derivatives
class Complex(nn.Module):
    """A layer with complex weights."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head((x.to(torch.complex64) @ self.w).abs())


class Embedded(nn.Module):
    """Repeated tokens in an embedding or an embedding bag."""

    def __init__(self, kind):
        super().__init__()
        self.tokens = kind(5, 4, scale_grad_by_freq=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        h = self.tokens(x)
        return self.head((h.sum(1) if h.ndim == 3 else h).tanh())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_that_are_scaled_by_frequency(kind):
    X = np.random.RandomState(0).randint(0, 3, (30, 6))
    net = NeuralNetRegressor(Embedded, module__kind=kind, **QUIET).initialize()
    net.module_.double()
    options = {"subset_of_weights": "all", "hessian_structure": "full", **FIXED}
    model = LaplaceRegressor(FrozenEstimator(net), **options).fit(X, X[:, :1] * 1.0)
    assert net.module_.tokens.scale_grad_by_freq
    assert model.estimator_.module_.tokens.scale_grad_by_freq
    found = model.latent_mean_and_variance(X)[1]
    # as without the scaling, for which `test_zoo` has a dense reference
    net.module_.tokens.scale_grad_by_freq = False
    expected = model.fit(X, X[:, :1] * 1.0).latent_mean_and_variance(X)[1]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


class Merging(nn.Linear):
    """A low-rank adapter that is merged into the weight in evaluation mode."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.A = nn.Parameter(torch.randn(2, self.in_features))
        self.B = nn.Parameter(torch.randn(self.out_features, 2))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            sign = -1 if mode else 1
            self.weight.data += sign * (self.B @ self.A).detach()
            self.merged = not mode
        return self

    def forward(self, x):
        out = super().forward(x)
        return out if self.merged else out + x @ self.A.T @ self.B.T


class Merged(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = Merging(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.first(x).tanh())


class Cached(nn.Module):
    """A network that caches the product of two weights in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 4)
        self.head, self.products = nn.Linear(4, 1), {}

    def train(self, mode=True):
        self.products.clear()
        return super().train(mode)

    def forward(self, x):
        product = self.products.get("w")
        if product is None:
            product = self.two.weight @ self.one.weight
            if not self.training:
                self.products["w"] = product.detach()
        return self.head((x @ product.T).tanh())


class Reentrant(nn.Module):
    """A network that recomputes the first activations in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = checkpoint(self.first, x, use_reentrant=True)
        return self.head(h.tanh())


class WithoutGradient(nn.Module):
    """A network with a pretrained body without gradients."""

    def __init__(self, detaches=False):
        super().__init__()
        self.body, self.head, self.detaches = nn.Linear(3, 4), nn.Linear(4, 1), detaches

    def forward(self, x):
        if self.detaches:
            return self.head(self.body(x).detach().tanh())
        with torch.no_grad():
            h = self.body(x)
        return self.head(h.tanh())


def detaching():
    return WithoutGradient(detaches=True)


class OnlyInTraining(nn.Module):
    """A network that adds noise of learned scale to its outputs during training."""

    def __init__(self):
        super().__init__()
        self.head, self.scale = nn.Linear(3, 1), nn.Linear(3, 1)
        self.double()

    def forward(self, x):
        f = self.head(x)
        return f + self.scale(x) * torch.randn_like(f) if self.training else f


REFUSED = {
    "no_grad": (WithoutGradient, "all", "'body.*no_grad"),
    "detach": (detaching, "all", "'body.*'trainable'.*detach"),
    "complex": (Complex, "all", "complex weights 'w'.*view_as_complex"),
    "merged": (Merged, "all", "'first.A', 'first.B'.*evaluation mode.*merged"),
    "merged-names": (Merged, ["first.A"], "'first.A'.*evaluation mode.*merged"),
    "cached": (Cached, "all", "'one.weight', 'two.weight'.*evaluation mode.*cached"),
    "reentrant": (Reentrant, "all", "'first.weight'.*use_reentrant=False"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_hidden_gradients_are_refused_before_training(name, is_frozen):
    module, subset, message = REFUSED[name]
    X = samples()[0].astype("float32")
    RecordTraining.steps.clear()
    net = NeuralNetRegressor(module, **QUIET | {"callbacks": [RecordTraining]})
    net = FrozenEstimator(net.initialize()) if is_frozen else net
    before = None
    if is_frozen:
        weights = net.estimator.module_.state_dict()
        before = {key: value.clone() for key, value in weights.items()}
    with pytest.raises(ValueError, match=message):
        LaplaceRegressor(net, subset_of_weights=subset).fit(X, X[:, :1])
    assert not RecordTraining.steps
    if is_frozen:
        after = net.estimator.module_.state_dict()
        assert all(torch.equal(after[key], before[key]) for key in before)


def test_weights_that_only_training_uses_have_their_prior():
    X = samples()[0]
    net = frozen(OnlyInTraining)
    model = LaplaceRegressor(net, subset_of_weights="all", **FIXED).fit(X, X[:, :1])
    alone = LaplaceRegressor(net, subset_of_weights=["head"], **FIXED).fit(X, X[:, :1])
    expected = alone.latent_mean_and_variance(X)[1]
    np.testing.assert_allclose(model.latent_mean_and_variance(X)[1], expected)


class CountsItself(RareHead):
    """A network that counts its calls in a parameter, and adds integers."""

    def __init__(self):
        super().__init__()
        self.counter = nn.Parameter(torch.zeros(1).double(), requires_grad=False)
        self.table = nn.Parameter(torch.arange(2), requires_grad=False)

    def forward(self, x):
        self.counter.add_(1)
        return super().forward(x) + self.table


def test_a_network_that_writes_to_a_parameter_keeps_its_checks():
    X, rare = samples()
    usual = np.delete(X, rare, 0)
    net = frozen(CountsItself)
    model = LaplaceRegressor(net, **FIXED).fit(usual, usual[:, :2])
    assert not net.estimator.module_.counter.requires_grad
    assert net.estimator.module_.a.weight.requires_grad
    with pytest.raises(ValueError, match="path through 'b'"):
        model.latent_mean_and_variance(X[rare])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("module", [Complex, Merged, Cached, Reentrant])
def test_the_last_layer_of_such_networks_is_treated(module):
    X = samples()[0].astype("float32")
    model = LaplaceRegressor(frozen(module), **FIXED).fit(X, X[:, :1])
    assert (model.latent_mean_and_variance(X)[1] > 0).all()
