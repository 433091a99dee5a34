"""SWAGClassifier and SWAGRegressor, beyond the tests in test_sampling."""

import numpy as np
import pytest
import torch
from nets import (
    MLP,
    BatchNormMLP,
    RecordTraining,
    blobs,
    classifier,
    regressor,
    seeded,
    waves,
)
from refusals import refused_fit
from sklearn.frozen import FrozenEstimator
from torch.func import functional_call

from sklaplace import MarglikTraining, SWAGClassifier, SWAGRegressor
from sklaplace.curvature.descent import Descent, Schedule, weight_decays

pytestmark = pytest.mark.usefixtures("rng_untouched")
X, Y = blobs()
X_REG, Y_REG = waves(60)
FEW = {"n_snapshots": 8, "steps_per_snapshot": 2, "n_samples": 6, "random_state": 0}


def frozen(module=MLP, **params):
    return seeded(classifier(module, **params), X, Y)


def weights_of(net):
    return {k: v.clone() for k, v in net.module_.state_dict().items()}


def test_posterior_has_the_moments_of_the_iterates():
    net = frozen()
    model = SWAGClassifier(FrozenEstimator(net), lr=0.05, max_rank=3, **FEW).fit(X, Y)
    layout = model.posterior_.layout
    descent = Descent(net, net.get_dataset(X, Y), weight_decays(net), model._seed)
    iterates = descent.iterates(layout, Schedule(8, 2, 0.05))
    found = torch.stack(list(iterates))
    posterior = model.posterior_
    exact = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(posterior.mean, found.mean(0), **exact)
    expected = found.var(0, correction=0)
    torch.testing.assert_close(posterior.diagonal, expected, rtol=1e-6, atol=1e-15)
    last = found[-1] - found.mean(0)
    torch.testing.assert_close(posterior.deviations[-1], last, **exact)
    assert posterior.deviations.shape == (3, layout.n_parameters)


@pytest.mark.parametrize("module", [MLP, BatchNormMLP])
def test_probabilities_are_means_over_drawn_networks(module):
    model = SWAGClassifier(FrozenEstimator(frozen(module)), lr=0.1, **FEW).fit(X, Y)
    posterior, network = model.posterior_, model.estimator_.module_.eval()
    state = {k: v.detach() for k, v in network.state_dict().items()}
    draws = posterior.sample(6, torch.Generator().manual_seed(model._seed))
    found = []
    for draw in draws.float():
        values = {**state, **posterior.layout.unflatten(draw)}
        with torch.no_grad():
            found.append(functional_call(network, values, torch.from_numpy(X)))
    expected = torch.stack(found).softmax(-1)
    assert expected.std(0).max() > 1e-3
    np.testing.assert_allclose(model.predict_proba(X), expected.mean(0), atol=1e-6)


@pytest.mark.parametrize("module", [MLP, BatchNormMLP])
def test_the_copy_of_a_frozen_net_has_the_mean(module):
    net = frozen(module)
    before = weights_of(net)
    model = SWAGClassifier(FrozenEstimator(net), lr=0.1, **FEW).fit(X, Y)
    own = model.estimator_.module_
    mean = model.posterior_.layout.unflatten(model.posterior_.mean)
    for name, value in own.state_dict().items():
        expected = mean[name].float() if name in mean else before[name]
        assert torch.equal(value, expected)
    assert all(p.requires_grad for p in own.parameters())


def test_parameters_without_gradients_stay():
    net = frozen()
    net.module_.hidden.requires_grad_(False)
    model = SWAGClassifier(FrozenEstimator(net), lr=0.1, **FEW).fit(X, Y)
    names = [block.name for block in model.posterior_.layout.blocks]
    assert names == ["head.weight", "head.bias"]
    hidden = model.estimator_.module_.hidden
    assert torch.equal(hidden.weight, net.module_.hidden.weight)
    net.module_.requires_grad_(False)
    words = "no parameters that require gradients", "Set requires_grad"
    refused_fit(SWAGClassifier(FrozenEstimator(net)), *words, data=(X, Y))


def test_weight_decay_of_a_frozen_net_counts():
    plain, decayed = frozen(), frozen(optimizer__weight_decay=0.5)
    decayed.module_.load_state_dict(plain.module_.state_dict())
    means = []
    for net in (plain, decayed):
        model = SWAGClassifier(FrozenEstimator(net), lr=0.1, **FEW).fit(X, Y)
        means.append(model.posterior_.mean.norm())
    assert means[1] < 0.9 * means[0]


def test_more_deviations_than_fit_into_memory(little_memory):
    little_memory(5_000)
    net = classifier(callbacks=[RecordTraining()])
    model = SWAGClassifier(net, n_samples=1, batch_size=1)
    refused_fit(model, "max_rank=20 deviations", "smaller max_rank", data=(X, Y))


def test_callbacks_of_a_prior_are_refused():
    net = classifier(callbacks=[MarglikTraining(), RecordTraining()])
    refused_fit(SWAGClassifier(net), "MarglikTraining", "weight_decay", data=(X, Y))


@pytest.mark.parametrize("lr", [1e3, 1e30])
def test_divergence_is_named_and_leaves_the_earlier_fit(lr):
    net = seeded(regressor(), X_REG, Y_REG[:, None].astype(np.float32))
    model = SWAGRegressor(FrozenEstimator(net), **FEW).fit(X_REG, Y_REG)
    expected, before = model.predict(X_REG), weights_of(net)
    model.set_params(lr=lr, n_snapshots=20)
    with pytest.raises(
        ValueError, match=rf"lr={lr:g} is too large".replace("+", r"\+")
    ):
        model.fit(X_REG, Y_REG)
    model.set_params(lr=0.01)
    np.testing.assert_array_equal(model.predict(X_REG), expected)
    for name, value in net.module_.state_dict().items():
        assert torch.equal(value, before[name])


def test_divergence_to_finite_weights_is_warned_of():
    net = frozen()
    with pytest.warns(UserWarning, match=r"the loss of guessing.*Lower lr=1000, or"):
        model = SWAGClassifier(FrozenEstimator(net), lr=1e3, **FEW).fit(X, Y)
    assert model.posterior_.mean.isfinite().all()


def test_default_regressor_in_any_units():
    """The loss and the learning rate depend on the units of the targets."""
    small = SWAGRegressor(**FEW).fit(X_REG, Y_REG)
    large = SWAGRegressor(**FEW).fit(X_REG, 1e4 * Y_REG)
    found = np.divide(large.predict(X_REG, return_std=True), 1e4)
    expected = small.predict(X_REG, return_std=True)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
