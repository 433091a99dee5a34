import copy
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import DOUBLE, call, generator, normal
from contracts import STRUCTURES_AND_PRIORS, assert_equal, problem
from torch._C._functorch import is_batchedtensor
from torch.autograd import gradcheck

from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.networks.forward import Forward
from sklaplace.posterior.predictive import (
    differentiable_moments,
    glm,
    linearised_draws,
    moments,
    network_draws,
)

every_predictive = pytest.mark.parametrize(
    "draw", [linearised_draws, network_draws], ids=["glm", "nn"]
)
every_prior = pytest.mark.parametrize(("name", "prior"), STRUCTURES_AND_PRIORS)

pytestmark = pytest.mark.usefixtures("rng_untouched")


def refitted(found, name, prior):
    """Return a posterior, and the distance of its mean from the network's weights."""
    posterior = found.posterior(name, prior)
    shift = 0.1 * normal(found.layout.n_parameters, seed=30)
    return replace(posterior, mean=posterior.weights + shift), shift


@every_prior
@pytest.mark.parametrize("case", ["inplace", "cnn", "norms"])
def test_glm_is_the_push_forward_of_the_posterior(case, name, prior):
    found = problem(case, "Gaussian")
    posterior, shift = refitted(found, name, prior)
    mean, cov = glm(posterior, found.forward, found.x)
    f, J = found.forward(found.x).detach(), found.parts.J
    P = posterior.precision_matrix()
    assert_equal(mean, f + J @ shift, 1e-12)
    expected = torch.einsum("ncp,pq,ndq->ncd", J, torch.linalg.inv(P), J)
    assert_equal(cov, expected)


@every_predictive
@pytest.mark.parametrize("subset", SUBSETS)
def test_small_steps_of_the_weights_move_both_alike(draw, subset):
    """They agree to second order: a step of 1e-5 leaves about 1e-10."""
    found = problem("inplace", subset=subset)
    posterior = found.posterior("diag")
    shift = 1e-5 * normal(3, found.layout.n_parameters, seed=31)
    weights = posterior.weights + shift
    draws = draw(posterior, found.forward, found.x, weights)
    f = found.forward(found.x).detach()
    expected = f.unsqueeze(-1) + torch.einsum("ncp,sp->ncs", found.parts.J, shift)
    assert_equal(draws, expected, 1e-8)


@pytest.mark.parametrize("case", ["mlp", "cnn", "norms", "tied", "lstm", "dictionary"])
@pytest.mark.parametrize("subset", ["all", "subnetwork"])
def test_network_draws_are_networks_with_those_weights(case, subset):
    found = problem(case, subset=subset)
    posterior = found.posterior("diag")
    own = found.forward.module
    before = [p.clone() for p in own.parameters()]
    weights = posterior.sample(2, generator(1))
    draws = network_draws(posterior, found.forward, found.x, weights)
    assert all(map(torch.equal, before, own.parameters()))
    for vector, expected in zip(weights, draws.movedim(-1, 0), strict=True):
        module = copy.deepcopy(own)
        for name, value in found.layout.unflatten(vector, module).items():
            module.get_parameter(name).data = value
        assert_equal(call(module, found.x).detach(), expected, 1e-13)


class Noting(torch.nn.Module):
    """A module that keeps its last output, as some modules keep attention weights."""

    def __init__(self, refuses=False):
        super().__init__()
        self.linear = torch.nn.utils.skip_init(torch.nn.Linear, 3, 2).double()
        self.refuses, self.last, self.n_calls = refuses, None, 0

    def forward(self, x):
        self.n_calls += 1
        if self.refuses and float(self.linear.weight.sum()) > 1e9:
            return x
        self.last = self.linear(x)
        return self.last


def drawn(module, x, weights):
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    layout = Layout(tuple(BlockSpec(*pair) for pair in shapes.items()))
    forward = Forward(module, module)
    with forward.frozen():
        posterior = SimpleNamespace(layout=layout)
        return forward, network_draws(posterior, forward, x, weights)


@pytest.mark.parametrize("refuses", [False, True])
def test_draws_are_made_in_one_pass_where_the_module_lets_them(refuses):
    module = Noting(refuses)
    weights, x = normal(5, 8), normal(4, 3, seed=1)
    forward, draws = drawn(module, x, weights)
    assert module.n_calls == (5 if refuses else 0)  # notes of the pass are gone
    assert forward.takes_many is not refuses  # so that other batches do not try again
    assert module.last is None or not is_batchedtensor(module.last)
    for vector, found in zip(weights, draws.unbind(-1), strict=True):
        expected = x @ vector[:6].reshape(2, 3).T + vector[6:]
        assert_equal(found, expected, 1e-14)


def test_operators_that_torch_loops_over_are_not_the_users_business():
    bag = torch.nn.utils.skip_init(torch.nn.EmbeddingBag, 5, 2).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, draws = drawn(bag, torch.tensor([[0, 1], [2, 4]]), normal(3, 10))
    assert draws.shape == (2, 2, 3)


@pytest.mark.parametrize("n_rows", [4, 40_000, 90_000])
def test_number_of_draws_at_a_time_changes_nothing(n_rows):
    """All draws, a few or one fit into the cache."""
    weights, x = normal(5, 8), normal(n_rows, 3, seed=1)
    _, draws = drawn(Noting(), x, weights)
    expected = x @ weights[:, :6].reshape(5, 2, 3).mT + weights[:, None, 6:]
    assert_equal(draws, expected.movedim(0, -1), 1e-13)


def test_moments():
    draws = normal(5, 3, 400)
    mean, cov = moments(draws, diagonal=False, centred=False)
    for n in range(5):
        assert_equal(cov[n], torch.cov(draws[n]), 1e-12)
    assert_equal(mean, draws.mean(-1), 1e-12)
    _, variances = moments(draws, diagonal=True, centred=False)
    assert_equal(variances, cov.diagonal(dim1=1, dim2=2), 1e-12)
    C = torch.eye(3, dtype=DOUBLE) - 1 / 3
    mean, centred = moments(draws, diagonal=False, centred=True)
    assert_equal(centred, C @ cov @ C, 1e-12)
    assert mean.sum(1).abs().max() < 1e-14
    _, none = moments(draws[..., :1], diagonal=True, centred=False)
    assert (none == 0).all()


@every_prior
@pytest.mark.parametrize("case", ["inplace", "cnn", "norms", "affine_head"])
@pytest.mark.parametrize("subset", ["all", "last_layer", "subnetwork"])
def test_differentiable_moments(case, subset, name, prior):
    """The values equal those outside the graph; finite differences check gradients."""
    found = problem(case, "Gaussian", subset)
    posterior, _ = refitted(found, name, prior)
    mean, cov = glm(posterior, found.forward, found.x)
    in_mean, in_cov = differentiable_moments(posterior, found.forward, found.x)
    assert_equal(in_mean, mean, 1e-10)
    assert_equal(in_cov, cov)


@every_prior
def test_gradients_in_the_inputs(name, prior):
    found = problem("mlp", "Gaussian")
    posterior = found.posterior(name, prior)
    x = found.x[:2].clone().requires_grad_()
    assert gradcheck(lambda x: differentiable_moments(posterior, found.forward, x), [x])
