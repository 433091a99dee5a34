"""Networks in 16 bits have the posterior of the network in 32 bits.

Curvature, posterior and predictions have at least 32 bits for any dtype of the
activations. Probabilities differ by the rounding of the network's logits.
"""

import numpy as np
import pytest
import torch
from nets import blobs, classifier, seeded
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from torch import nn

from sklaplace import LaplaceClassifier

X, Y = blobs(n=150)
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
