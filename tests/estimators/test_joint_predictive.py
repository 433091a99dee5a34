"""Joint covariances over samples and outputs, and joint draws.

`predictive(x, joint=True)` handles groups of samples in a graph.
`latent_mean_and_variance(X, joint=True)` and `sample_latent` handle all samples.
"""

import numpy as np
import pytest
import torch
from nets import TwoInputs, classifier, regressor, seeded, waves
from numpy.testing import assert_allclose
from refusals import refused
from sklearn.frozen import FrozenEstimator

from sklaplace import LaplaceClassifier, LaplaceRegressor

X, Y = waves(n_targets=2, dtype=np.float64)
GROUPS = X[:12].reshape(4, 3, 2)
SETTINGS = {"prior_precision": 2.0, "sigma_noise": 0.5, "random_state": 0}
DOUBLE = {"module__dtype": torch.float64}


def fitted(structure="full", subset="all", n_targets=1, **settings):
    net = regressor(**DOUBLE, module__n_out=n_targets)
    net = FrozenEstimator(seeded(net, X, Y[:, :n_targets]))
    settings = {"hessian_structure": structure, "subset_of_weights": subset} | settings
    return LaplaceRegressor(net, **SETTINGS | settings).fit(X, Y[:, :n_targets])


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank", "gp"])
@pytest.mark.parametrize("n_targets", [1, 2])
def test_equals_the_covariance_of_predict(structure, subset, n_targets):
    model = fitted(structure, subset, n_targets)
    mean, cov = model.predictive(torch.tensor(GROUPS), joint=True)
    assert mean.shape == (4, 3 * n_targets)
    for group, m, c in zip(GROUPS, mean.numpy(), cov.numpy(), strict=True):
        expected, across = model.predict(group, return_cov=True)
        assert_allclose(m, expected.ravel(), atol=1e-10)
        outputs = c.reshape(3, n_targets, 3, n_targets)
        noise = model.sigma_noise_**2 * np.eye(3)
        for k in range(n_targets):
            wanted = across.reshape(3, 3, n_targets)[..., k] - noise
            assert_allclose(outputs[:, k, :, k], wanted, rtol=1e-8, atol=1e-9)
        _, own = model.latent_mean_and_variance(group, full_cov=True)
        for n in range(3):
            assert_allclose(outputs[n, :, n], own[n], rtol=1e-8, atol=1e-9)


def test_gradients_are_finite_differences():
    model = fitted()
    x = torch.tensor(GROUPS[:2], requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: model.predictive(x, joint=True), x)


def test_dicts_of_tensors():
    rng = np.random.default_rng(0)
    data = {"left": rng.normal(size=(30, 2)), "right": rng.normal(size=(30, 3))}
    data = {name: values.astype(np.float32) for name, values in data.items()}
    net = classifier(TwoInputs, max_epochs=2)
    options = {"prior_precision": 1.0, "random_state": 0}
    model = LaplaceClassifier(net, **options).fit(data, np.arange(30) % 2)
    x = {name: torch.tensor(values[:6]) for name, values in data.items()}
    pairs = {name: values.unflatten(0, (3, 2)) for name, values in x.items()}
    mean, cov = model.predictive(pairs, joint=True)
    single, own = model.predictive(x)
    assert_allclose(mean, single.reshape(3, 4))
    assert_allclose(cov[:, :2, :2], own[::2], rtol=1e-6)
    assert_allclose(cov[:, 2:, 2:], own[1::2], rtol=1e-6)


@pytest.mark.parametrize("shape", [(6,), (2, 0, 2)])
def test_refuses_what_has_no_groups(shape):
    model, x = fitted(), torch.zeros(shape)
    words = ["x", "(b, q, ...)"]
    refused(ValueError, words, lambda: model.predictive(x, joint=True), model)


# ------------------------------------------------------------- all samples at once
