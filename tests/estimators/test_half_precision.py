"""Networks in 16 bits have the posterior of the network in 32 bits.

Curvature, posterior and predictions have at least 32 bits for any dtype of the
activations. Probabilities differ by the rounding of the network's logits.
"""

import pickle

import numpy as np
import pytest
import torch
from nets import blobs, classifier, regressor, seeded, waves
from refusals import FIRST_QUICK, refused_fit
from sklearn.base import clone, is_classifier
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNet
from torch import nn

from sklaplace import LaplaceClassifier, LaplaceRegressor
from sklaplace.likelihoods import HeteroscedasticNLLLoss

X, Y = blobs(n=150)
REG = waves(n=150, n_targets=1)
NEW = blobs(n=40, seed=1)[0]


class Mixed(nn.Module):
    """A body and a head with different dtypes, or under autocast."""

    def __init__(self, n_in=2, n_out=3, body="float32", head="float32", autocast=None):
        super().__init__()
        self.first = nn.Linear(n_in, 8, dtype=getattr(torch, body))
        self.second = nn.Linear(8, 8, dtype=getattr(torch, body))
        self.head = nn.Linear(8, n_out, dtype=getattr(torch, head))
        self.autocast = autocast

    def forward(self, X):
        if self.autocast is None:
            return self.compute(X.to(self.first.weight.dtype))
        with torch.autocast("cpu", getattr(torch, self.autocast)):
            return self.compute(X)

    def compute(self, X):
        hidden = torch.tanh(self.second(torch.tanh(self.first(X))))
        return self.head(hidden.to(self.head.weight.dtype))


KINDS = {
    f"{what} {dtype}": dict.fromkeys(keys, dtype)
    for dtype in ("bfloat16", "float16")
    for what, keys in {
        "body": ["body"],
        "all": ["body", "head"],
        "autocast": ["autocast"],
    }.items()
}
STRUCTURES = [
    *(("last_layer", name) for name in ("kron", "diag", "full", "lowrank")),
    *(("all", name) for name in ("kron", "diag", "full", "gp")),
]


def of_module(params):
    return {f"module__{name}": value for name, value in params.items()}


def cast(trained, **params):
    """Return the trained net with other dtypes."""
    net = clone(trained).set_params(**of_module(params)).initialize()
    net.module_.load_state_dict(trained.module_.state_dict())
    return FrozenEstimator(net)


@torch.no_grad()
def logit_error(module, x, dtype):
    """Bound the error of the outputs from rounded weights, inputs and outputs.

    The bound is a running error analysis: tanh has a slope of at most one.
    """
    u = torch.finfo(dtype).eps / 2
    a, error = x, u * x.abs()
    for layer in (module.first, module.second, module.head):
        size = a.abs() @ layer.weight.abs().T + layer.bias.abs()
        error = (error @ layer.weight.abs().T) * (1 + u) + 3 * u * size
        a = torch.tanh(layer(a))
    return float(error.max())


@pytest.fixture(scope="module")
def trained():
    return seeded(classifier(Mixed, max_epochs=30), X, Y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("subset", "structure"), STRUCTURES)
def test_probabilities_are_those_of_the_network_in_32_bits(
    trained, kind, subset, structure
):
    options = {"subset_of_weights": subset, "hessian_structure": structure}
    model = LaplaceClassifier(cast(trained), prior_precision=1.0, random_state=0)
    expected = model.set_params(**options).fit(X, Y).predict_proba(NEW)
    variances = model.latent_mean_and_variance(NEW)[1]
    model.set_params(estimator=cast(trained, **KINDS[kind])).fit(X, Y)
    found = model.predict_proba(NEW)
    assert found.dtype == np.float64
    assert model.posterior_.mean.dtype == torch.float64
    dtype = getattr(torch, kind.split()[1])
    error = logit_error(trained.module_, torch.from_numpy(NEW), dtype)
    # of a softmax half of that of the logits; as much again for their variances
    assert np.abs(found - expected).max() <= error
    assert np.abs(found - expected).max() > 0
    # rows and curvature have errors of that size, and products of two twice that
    new = model.latent_mean_and_variance(NEW)[1]
    assert np.abs(new - variances).max() <= 4 * error * variances.max()


@pytest.mark.parametrize("kind", ["body bfloat16", "all bfloat16", "autocast bfloat16"])
def test_networks_are_trained_in_fit(kind):
    net = classifier(Mixed, max_epochs=5, **of_module(KINDS[kind]))
    model = LaplaceClassifier(net, random_state=0).fit(X, Y)
    proba = model.predict_proba(NEW)
    assert np.isfinite(proba).all()
    np.testing.assert_allclose(proba.sum(1), 1)
    assert np.isfinite(model.score_samples(NEW)).all()
    assert np.isfinite(model.log_marginal_likelihood_value_)


# ------------------------------------------------------ inputs of bfloat16 networks
class Plain(nn.Module):
    """A network that computes in its own dtype and does not cast its inputs."""

    def __init__(self, n_in=2, n_out=3, dtype="bfloat16", returned="bfloat16"):
        super().__init__()
        self.returned = getattr(torch, returned)
        self.first = nn.Linear(n_in, 8, dtype=getattr(torch, dtype))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, n_out, dtype=getattr(torch, dtype))

    def forward(self, X):
        return self.head(self.dropout(torch.tanh(self.first(X)))).to(self.returned)


class Casting(Plain):
    """The same network, which casts its inputs."""

    def forward(self, X):
        return super().forward(X.to(self.first.weight.dtype))


SMALL = {"n_estimators": 2, "n_snapshots": 3, "n_samples": 5}


@pytest.mark.parametrize("kind", FIRST_QUICK)
def test_networks_in_bfloat16_take_numbers(kind):
    """As a network that casts its inputs does, bit by bit, also from a file."""
    made, (x, y) = (classifier, (X, Y)) if is_classifier(kind()) else (regressor, REG)
    params = {"module__n_in": x.shape[1], "module__n_out": 3 if y is Y else 1}
    if made is regressor:
        # torch 2.6 has no gradient of MSELoss for bfloat16 outputs and float32 targets
        params["module__returned"] = "float32"
    options = {k: v for k, v in SMALL.items() if k in kind().get_params()}
    if hasattr(kind(), "prior_precisions"):
        options |= {"prior_precisions": [1.0, 10.0], "cv": 2}
    found, expected = (
        kind(made(module, max_epochs=2, **params), random_state=0, **options).fit(x, y)
        for module in (Plain, Casting)
    )
    loaded = pickle.loads(pickle.dumps(found))
    predict = "predict_proba" if made is classifier else "predict"
    for model in (found, loaded):
        np.testing.assert_array_equal(
            getattr(model, predict)(x[:20]), getattr(expected, predict)(x[:20])
        )


def test_a_frozen_network_in_bfloat16_takes_numbers_and_stays_as_it_was():
    net = classifier(Plain, module__n_in=2).initialize()
    model = LaplaceClassifier(FrozenEstimator(net), random_state=0)
    model.fit(X[50:], Y[50:], X_val=X[:50], y_val=Y[:50])
    assert not net.module_._forward_pre_hooks
    expected = model.predict_proba(NEW)
    loaded = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(loaded.predict_proba(NEW), expected)
    model.partial_fit(X, Y)
    mean = model.to_module()(torch.from_numpy(NEW))[0]
    found = model.latent_mean_and_variance(NEW)[0]
    np.testing.assert_allclose(mean.detach(), found, atol=0.02)  # a rounding


@pytest.mark.parametrize("module", [Plain, Casting])
def test_a_network_in_bfloat16_refuses_rows_of_another_size(module):
    net = classifier(module, module__n_in=3)
    refused_fit(LaplaceClassifier(net), "cannot be applied to rows", data=(X, Y))


class ByName(Plain):
    def forward(self, left, right):
        return super().forward(torch.cat([left, right], 1))


@pytest.mark.parametrize(
    ("criterion", "n_out", "y"),
    [
        (nn.BCEWithLogitsLoss, 1, Y % 2),
        (nn.BCEWithLogitsLoss, 2, np.stack([Y % 2, Y == 2], 1)),
        (nn.CrossEntropyLoss, 3, Y),
    ],
)
def test_dicts_and_labels_for_networks_in_bfloat16(criterion, n_out, y):
    net = NeuralNet(
        ByName, module__n_out=n_out, criterion=criterion, max_epochs=2, verbose=0,
        train_split=None,
    )  # fmt: skip
    inputs = {"left": X[:, :1], "right": X[:, 1:]}
    model = LaplaceClassifier(net, random_state=0).fit(inputs, y, np.ones(len(y)))
    assert np.isfinite(model.predict_proba(inputs)).all()


@pytest.mark.parametrize("criterion", [nn.PoissonNLLLoss, HeteroscedasticNLLLoss])
def test_other_targets_for_networks_in_bfloat16(criterion):
    x, y = REG
    n_out = 1 + (criterion is HeteroscedasticNLLLoss)
    net = regressor(Plain, criterion=criterion, module__n_out=n_out)
    model = LaplaceRegressor(net, random_state=0).fit(x, abs(y).round())
    assert np.isfinite(model.predict(x)).all()
