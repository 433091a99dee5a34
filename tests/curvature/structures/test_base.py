"""Contracts of every structure, for every kind of network it must support."""

import contracts
import pytest
import references
import torch
from cases import CASES, generator
from contracts import STRUCTURES_AND_PRIORS, problem

from sklaplace.curvature.ggn import CURVATURES
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subsets import SUBSETS

APPROXIMATE = [name for name, kind in CURVATURES.items() if not kind.is_exact]
every_structure = pytest.mark.parametrize("name", STRUCTURES)
every_prior = pytest.mark.parametrize(("name", "prior"), STRUCTURES_AND_PRIORS)
every_subset = pytest.mark.parametrize("subset", SUBSETS)
every_likelihood = pytest.mark.parametrize("likelihood", references.LIKELIHOODS)
several_cases = pytest.mark.parametrize(
    "case", ["inplace", "cnn", "called_twice", "norms", "grouped"]
)

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("rng_untouched")]


def test_every_structure_has_a_reference():
    assert set(references.STRUCTURES) == set(STRUCTURES)


@every_structure
@pytest.mark.parametrize("case", CASES)
def test_hessian(case, name):
    contracts.check_dense(problem(case), name)


@every_prior
@every_subset
@every_likelihood
@pytest.mark.parametrize(
    "case", ["mlp", "inplace", "cnn", "called_twice", "conv_called_twice"]
)
def test_questions(case, likelihood, subset, name, prior):
    contracts.check_questions(problem(case, likelihood, subset), name, prior)


@every_structure
@every_subset
@every_likelihood
@pytest.mark.parametrize("curvature", APPROXIMATE)
@pytest.mark.parametrize("case", ["inplace", "cnn"])
def test_questions_of_curvatures(case, curvature, likelihood, subset, name):
    found = problem(case, likelihood, subset)
    contracts.check_questions(found, name, "scalar", curvature)


@every_prior
@pytest.mark.parametrize(
    "case", ["sequence", "residual", "tied", "lstm", "norms", "grouped"]
)
def test_questions_of_other_networks(case, name, prior):
    contracts.check_questions(problem(case), name, prior)


@every_prior
@pytest.mark.parametrize("case", ["without_bias", "called_twice"])
def test_differentiable(case, name, prior):
    subset = "last_layer" if case == "called_twice" else "all"
    contracts.check_gradients(problem(case, "Gaussian", subset), name, prior)


@every_structure
@every_likelihood
@several_cases
def test_batches_and_order(case, likelihood, name):
    contracts.check_batches(problem(case, likelihood), name)


@every_structure
@several_cases
def test_merge(case, name):
    contracts.check_merge(problem(case), name)


@every_structure
@every_subset
@several_cases
def test_resumed_scaled_and_product(case, subset, name):
    found = problem(case, subset=subset)
    contracts.check_resumed(found, name)
    contracts.check_scaled(found, name)
    contracts.check_product(found, name)


@every_prior
@every_likelihood
@pytest.mark.parametrize("case", ["mlp", "cnn", "called_twice", "norms", "grouped"])
def test_integer_weights_are_repeated_rows(case, likelihood, name, prior):
    contracts.check_weights(problem(case, likelihood), name, prior)


@every_prior
def test_questions_change_nothing(name, prior):
    contracts.check_pure(problem("cnn"), name, prior)


@every_prior
def test_draws_have_the_posterior_covariance(name, prior):
    # Each entry of an empirical covariance of s draws has the standard error
    # √((σᵢᵢ σⱼⱼ + σᵢⱼ²) / s); of some 300 entries, none is off by six of them.
    posterior = problem("mlp", "Gaussian").posterior(name, prior)
    n_draws = 20_000
    draws = posterior.sample(n_draws, generator(1)) - posterior.mean
    cov = torch.linalg.inv(posterior.precision_matrix())
    variances = cov.diagonal()
    error = ((torch.outer(variances, variances) + cov**2) / n_draws).sqrt()
    assert ((draws.T @ draws / n_draws - cov).abs() < 6 * error).all()
    assert (draws.mean(0).abs() < 6 * (variances / n_draws).sqrt()).all()


@every_structure
def test_bytes_are_known_beforehand(name):
    layout = problem("cnn").layout
    n_entries = layout.n_parameters ** (2 if name == "full" else 1)
    assert STRUCTURES[name][0].n_bytes(layout) >= 8 * n_entries
