from dataclasses import replace

import pytest
import references
import torch
from cases import CASES, DOUBLE, generator, normal
from contracts import N_ROWS, STRUCTURES_AND_PRIORS, assert_equal, problem

from sklaplace.jacobians import backpropagate
from sklaplace.predictive import PREDICTIVES, glm, linearised_mean

every_prior = pytest.mark.parametrize(("name", "prior"), STRUCTURES_AND_PRIORS)

pytestmark = pytest.mark.usefixtures("rng_untouched")


@every_prior
@pytest.mark.parametrize("case", ["inplace", "cnn", "norms"])
def test_glm_is_the_push_forward_of_the_posterior(case, name, prior):
    found = problem(case, "Gaussian")
    posterior = found.posterior(name, prior)
    shift = 0.1 * normal(found.layout.n_parameters, seed=30)
    posterior = replace(posterior, mean=posterior.weights + shift)
    mean, cov = glm(posterior, found.forward, found.x)
    f, J = found.forward(found.x).detach(), found.parts.J
    P = posterior.precision_matrix()
    assert_equal(mean, f + J @ shift, 1e-12)
    expected = torch.einsum("ncp,pq,ndq->ncd", J, torch.linalg.inv(P), J)
    assert_equal(cov, expected)


@pytest.mark.parametrize("predictive", PREDICTIVES.values(), ids=PREDICTIVES.keys())
def test_rows_are_independent_of_their_batch(predictive):
    found = problem("cnn")
    posterior = found.posterior("kron")
    mean, cov = predictive(posterior, found.forward, found.x)
    for n in range(N_ROWS):
        one_mean, one_cov = predictive(
            posterior, found.forward, references.row(found.x, n)
        )
        assert_equal(one_mean[0], mean[n], 1e-12)
        assert_equal(one_cov[0], cov[n], 1e-12)


def test_mean_is_the_networks_where_nothing_was_refitted():
    found = problem("cnn")
    f, jacobian = backpropagate(found.forward, found.x, found.layout)
    mean = linearised_mean(found.posterior("diag"), f, jacobian)
    assert mean.dtype == DOUBLE
    assert torch.equal(mean, found.forward(found.x).detach())


def test_linear_networks_are_linearised_exactly():
    """Weights drawn for a linear network give draws of the linearised outputs."""
    case = CASES["linear_only"]
    found = problem("linear_only", "Gaussian")
    posterior = found.posterior("full")
    weights = posterior.sample(1, generator(2))[0]
    f, jacobian = backpropagate(found.forward, found.x, found.layout)
    moved = replace(posterior, mean=weights)
    module = case.forward(2).module
    torch.nn.utils.vector_to_parameters(weights, module.parameters())
    expected = module(found.x).detach()
    assert_equal(linearised_mean(moved, f, jacobian), expected, 1e-13)
