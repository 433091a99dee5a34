"""Tests of output models and of their evaluation in batches, without an estimator."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from nets import MLP, classifier, initialised
from torch import Tensor

from sklaplace.core.random import counter_uniforms, row_hash
from sklaplace.estimators.predicting.output_model import (
    BatchedOutputs,
    OutputModel,
    WeightDraws,
)
from sklaplace.likelihoods import Categorical
from sklaplace.networks.data import first_rows
from sklaplace.networks.outputs import infer_output_spec
from sklaplace.networks.trained import TrainedNetwork

X = np.random.RandomState(0).randn(23, 2)


@dataclass(frozen=True)
class UniformDraws(OutputModel):
    """Outputs plus uniform noise that is a function of the sample."""

    def draws(self, forward, x) -> Tensor:
        f = forward(x).double()
        noise = counter_uniforms(row_hash(x), f.shape[1] * self.n_samples, self.seed)
        return f.unsqueeze(-1) + noise.reshape(*f.shape, self.n_samples)


@pytest.fixture(scope="module")
def network():
    net = initialised(classifier(MLP, module__dtype=torch.float64))
    rows = first_rows(net, net.get_dataset(X))
    spec = infer_output_spec(net, rows, (Categorical,), 3, is_trained=True)
    return TrainedNetwork(net, spec)


def outputs(network, batch_size=None, n_samples=50):
    return BatchedOutputs(network, UniformDraws(n_samples, 0), batch_size)


@pytest.mark.parametrize("batch_size", [1, 7, 23, 100])
def test_batches_do_not_matter(network, batch_size):
    for get in (
        lambda found: found.latent(X),
        lambda found: found.latent(X, full_cov=True),
        lambda found: found.joint(X),
        lambda found: [found.sample(X, 4, seed=1)],
    ):
        whole, parts = get(outputs(network)), get(outputs(network, batch_size))
        for a, b in zip(whole, parts, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_moments_are_those_of_the_draws(network):
    found = outputs(network)
    draws = found.map_draws(X, lambda f: f).numpy()
    mean, cov = found.latent(X, full_cov=True)
    np.testing.assert_allclose(mean, draws.mean(-1), rtol=1e-12)
    for n in (0, 22):
        np.testing.assert_allclose(cov[n], np.cov(draws[n]), rtol=1e-10)
    _, joint = found.joint(X)
    np.testing.assert_allclose(joint[..., 1], np.cov(draws[:, 1]), rtol=1e-10)


def test_centring_removes_the_mean_over_outputs(network):
    mean, cov = outputs(network).map_gaussian(
        X, lambda m, c: (m, c), diagonal=False, centred=True
    )
    np.testing.assert_allclose(mean.sum(1), 0, atol=1e-12)
    np.testing.assert_allclose(cov.sum(1), 0, atol=1e-12)


def test_one_draw_has_no_variance(network):
    with pytest.raises(ValueError, match="n_samples=1 has no variance"):
        outputs(network, n_samples=1).latent(X)


def test_outputs_that_are_not_finite(network):
    with pytest.raises(ValueError, match="not finite for some rows"):
        outputs(network).latent(np.full_like(X, np.inf))


def test_the_network_is_left_in_its_mode(network, rng_untouched):
    module = network.net.module_
    module.train()
    outputs(network).latent(X)
    assert module.training
    assert all(p.requires_grad for p in module.parameters())
    module.eval()


def test_weights_are_drawn_once():
    class Posterior:
        calls = 0
        layout = type("Layout", (), {"n_parameters": 3})

        def sample(self, n, generator):
            self.calls += 1
            return torch.zeros(n, 3, dtype=torch.float64)

    posterior = Posterior()
    model = WeightDraws(5, 0, posterior)
    assert model.weights is model.weights
    assert posterior.calls == 1
    assert model.redrawn(2, 1).weights.shape == (2, 3)
