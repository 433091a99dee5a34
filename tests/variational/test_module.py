"""StochasticModule: a network with drawn weights, and the resulting network."""

import copy
import pickle

import numpy as np
import pytest
import torch
from nets import MLP, SoftmaxMLP
from torch import nn

from sklaplace.core.random import private_rng
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.variational import POSTERIORS, GaussianPrior, MeanFieldGaussian
from sklaplace.variational.elbo import Elbo
from sklaplace.variational.family import PosteriorFamily
from sklaplace.variational.module import (
    INITIAL_FRACTION,
    VariationalPosterior,
    initial_scales,
    random_weights,
)

X = torch.linspace(-1, 1, 10).reshape(5, 2)


class Tied(nn.Module):
    """A network that uses one matrix twice, and has a frozen layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.fixed = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, X):
        return self.fixed(self.second(torch.tanh(self.first(X))))


def made(kind, *args, seed=0, **kwargs):
    with private_rng(seed):
        return kind(*args, **kwargs)


def wrapped(module, posterior="gaussian", **start):
    family = PosteriorFamily(posterior)
    elbo = Elbo(family, GaussianPrior(), 1.0, "uniform", **start)
    return elbo.wrapped(module)


@pytest.fixture
def with_softmax():
    stochastic = wrapped(made(SoftmaxMLP))
    stochastic.logit_layer = "head"
    return stochastic


class TestRandomWeights:
    def test_are_those_that_require_gradients_each_once(self):
        names = [block.name for block in random_weights(Tied()).blocks]
        assert names == ["first.weight", "first.bias", "second.bias"]

    def test_lazy_layers_are_refused(self):
        with pytest.raises(ValueError, match=r"'0.weight' has no size.*layers with"):
            random_weights(nn.Sequential(nn.LazyLinear(3)))

    def test_a_network_without_any_is_refused(self):
        with pytest.raises(ValueError, match=r"no parameters.*Set requires_grad"):
            random_weights(MLP().requires_grad_(False))


class TestInitialScales:
    @pytest.mark.parametrize(
        ("values", "sizes"),
        [
            ([[3.0, -3.0], [[0.5]]], [3.0, 3.0, 0.5]),
            # zeros take the size of all, and one where all is zero
            ([[0.0, 0.0], [2.0, 2.0]], [2**0.5, 2**0.5, 2.0, 2.0]),
            ([[0.0, 0.0]], [1.0, 1.0]),
            ([[0.0, 0.0], []], [1.0, 1.0]),
        ],
    )
    def test_are_a_fraction_of_each_tensors_size(self, values, sizes):
        found = initial_scales([torch.tensor(value) for value in values])
        torch.testing.assert_close(found, INITIAL_FRACTION * torch.tensor(sizes))


@pytest.mark.parametrize("name", POSTERIORS)
class TestEveryFamily:
    def test_draws_in_training_only(self, name):
        stochastic = wrapped(made(MLP), name)
        with private_rng(0):
            assert not torch.equal(stochastic(X), stochastic(X))
            stochastic.eval()
            assert torch.equal(stochastic(X), stochastic(X))

    def test_gradients_reach_its_parameters_and_no_others(self, name):
        stochastic = wrapped(made(MLP), name)
        with private_rng(0):
            stochastic(X).sum().backward()
        for parameter in stochastic.posterior.parameters():
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()
        for parameter in stochastic._orig_mod.parameters():
            assert parameter.grad is None


class TestStochasticModule:
    def test_ties_hold_under_draws_and_afterwards(self):
        module = made(Tied)
        stochastic = wrapped(module)
        with private_rng(0):
            found = stochastic(X)
        w = stochastic.drawn[0][0].detach()
        weight, first, second = w[:4].reshape(2, 2), w[4:6], w[6:]
        hidden = torch.tanh(X @ weight.T + first) @ weight.T + second
        torch.testing.assert_close(found, module.fixed(hidden))
        network = stochastic.at_medians()
        assert network.first.weight is network.second.weight

    def test_mixed_dtypes_are_kept(self):
        module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).double())
        module[0].register_forward_hook(lambda _m, _i, out: out.double())
        stochastic = wrapped(module)
        with private_rng(0):
            assert stochastic(X).dtype == torch.float64
        dtypes = [p.dtype for p in stochastic.at_medians().parameters()]
        assert dtypes == [torch.float32] * 2 + [torch.float64] * 2

    def test_the_logits_are_kept_and_their_hook_removed(self, with_softmax):
        with private_rng(0):
            proba = with_softmax(X)
        torch.testing.assert_close(with_softmax.outputs(proba).softmax(-1), proba)
        assert not with_softmax._orig_mod.head._forward_hooks

    def test_the_hook_is_removed_when_the_network_fails(self, with_softmax):
        with pytest.raises(RuntimeError):
            with_softmax(torch.ones(3, 7))
        assert not with_softmax._orig_mod.head._forward_hooks

    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
    )
    def test_copies_in_the_midst_of_training(self, with_softmax, duplicate):
        with private_rng(0):
            with_softmax(X)
        twin = duplicate(with_softmax)
        assert torch.equal(twin.eval()(X), with_softmax.eval()(X))
        with private_rng(1):
            first = with_softmax.train()(X)
        with private_rng(1):
            assert torch.equal(twin.train()(X), first)


class TestVariationalPosterior:
    @pytest.fixture
    def posterior(self):
        layout = Layout((BlockSpec("a", (2, 2)), BlockSpec("b", (1,))))
        location = torch.linspace(-1, 1, 5)
        distribution = MeanFieldGaussian(location, torch.full_like(location, 0.3))
        return VariationalPosterior(distribution, GaussianPrior(0.5), layout)

    def test_moments_and_draws(self, posterior, rng_untouched):
        drawn = posterior.sample(20_000, torch.Generator().manual_seed(0))
        assert torch.equal(posterior.sample(20_000, random_state=0), drawn)
        assert drawn.dtype == posterior.mean.dtype == torch.float64
        # 20,000 draws: standard errors of 0.0021 and, of variances, 0.0009
        np.testing.assert_allclose(drawn.mean(0), posterior.mean, atol=0.01)
        np.testing.assert_allclose(drawn.var(0), posterior.variance(), atol=0.005)

    def test_draws_of_many_weights_are_made_a_few_at_a_time(self):
        location = torch.zeros(2**17)
        layout = Layout((BlockSpec("a", (2**17,)),))
        distribution = MeanFieldGaussian(location, torch.ones_like(location))
        posterior = VariationalPosterior(distribution, GaussianPrior(), layout)
        generator = torch.Generator().manual_seed(0)
        expected = [posterior.sample(n, generator) for n in (8, 8, 1)]
        found = posterior.sample(17, generator.manual_seed(0))
        assert torch.equal(found, torch.cat(expected))
