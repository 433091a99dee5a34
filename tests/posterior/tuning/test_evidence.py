import math
from dataclasses import replace
from functools import partial
from itertools import cycle, product

import numpy as np
import pytest
import references
import torch
from cases import DOUBLE
from contracts import STRUCTURES_AND_PRIORS, assert_equal
from scipy.optimize import minimize, minimize_scalar
from sklearn.exceptions import ConvergenceWarning
from tuning_problems import fit, tuning_problem

from sklaplace.curvature.structures import STRUCTURES
from sklaplace.posterior.last_layer import LastLayerModel
from sklaplace.posterior.tuning import evidence
from sklaplace.posterior.tuning.evidence import LOG_BOUND, marglik, marglik_refitted
from sklaplace.posterior.tuning.problem import LARGEST

every_convex = pytest.mark.parametrize("likelihood", references.CONVEX)
every_likelihood = pytest.mark.parametrize("likelihood", references.LIKELIHOODS)
every_structure = pytest.mark.parametrize("structure", STRUCTURES)
every_prior = pytest.mark.parametrize(("structure", "prior"), STRUCTURES_AND_PRIORS)

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("rng_untouched")]


# ---------------------------------------------- evidence at the network's weights
def negative_evidence(posterior, log_delta, log_sigma=None):
    h = posterior.hyperparameters
    delta = torch.as_tensor(log_delta, dtype=DOUBLE).exp()
    values = {"prior_precision": delta.expand(h.prior_precision.shape)}
    if log_sigma is not None:
        values["sigma_noise"] = torch.as_tensor(log_sigma, dtype=DOUBLE).exp()
    return -posterior.replace(**values).log_marginal_likelihood()


def minimum(loss, low, high):
    """Return the minimum of a function of one number between two bounds."""
    options = {"method": "bounded", "options": {"xatol": 1e-8}}
    return minimize_scalar(lambda x: float(loss(x)), bounds=(low, high), **options).x


def minimum_by_simplex(loss, start):
    """Return the minimum of a function of a few numbers; ``fun`` is its value."""
    options = {"xatol": 1e-8, "fatol": 1e-12, "maxiter": 4000}
    values = {"method": "Nelder-Mead", "options": options}
    return minimize(lambda x: float(loss(*x)), start, **values)


def maximum(posterior):
    """Return the best ``log δ`` by scipy, starting from the best of a grid."""
    loss = partial(negative_evidence, posterior)
    best = min(np.linspace(-20, 20, 81), key=loss)
    return minimum(loss, best - 0.5, best + 0.5)


def maximum_with_noise(posterior):
    """Return the best ``log δ`` and ``log σ`` by scipy from several starts."""
    loss = partial(negative_evidence, posterior)
    starts = product((-6, -2, 2, 6), (-2, 0))
    found = [minimum_by_simplex(loss, start) for start in starts]
    return min(found, key=lambda result: result.fun).x


def assert_log(value, log, tolerance=1e-4):
    assert abs(float(value.log()) - log) < tolerance


@every_structure
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("likelihood", ["Categorical", "Bernoulli"])
@pytest.mark.parametrize("start", [1e-3, 1.0, 1e4])
def test_evidence_is_maximal(start, likelihood, subset, structure):
    fitted = fit(likelihood, structure, subset=subset, prior_precision=start)
    found = marglik(fitted.posterior)
    assert_log(found.prior_precision, maximum(fitted.posterior))
    assert torch.equal(found.mean, fitted.posterior.mean)


@every_structure
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("noise", [0.05, 0.7, 8.0])
@pytest.mark.parametrize("curvature", ["ggn", "ef"])
def test_evidence_is_maximal_with_noise(curvature, noise, subset, structure):
    options = {"curvature": curvature, "sigma_noise": noise}
    fitted = fit("Gaussian", structure, subset=subset, **options)
    found = marglik(fitted.posterior)
    log_delta, log_sigma = maximum_with_noise(fitted.posterior)
    assert_log(found.prior_precision, log_delta)
    assert_log(found.hyperparameters.sigma_noise, log_sigma)


def test_noise_alone_and_prior_alone():
    posterior = fit("Gaussian", "full", prior_precision=0.3).posterior
    found = marglik(posterior, free_prior=False)
    assert torch.equal(found.prior_precision, posterior.prior_precision)
    best = minimum(partial(negative_evidence, posterior, math.log(0.3)), -5, 5)
    assert_log(found.hyperparameters.sigma_noise, best)
    found = marglik(posterior, free_noise=False)
    given = posterior.hyperparameters.sigma_noise
    assert torch.equal(found.hyperparameters.sigma_noise, given)
    assert_log(found.prior_precision, maximum(posterior))
    assert marglik(posterior, free_prior=False, free_noise=False) is posterior


@every_likelihood
def test_number_of_rows_does_not_blunt_the_search(likelihood):
    """A constant in the evidence, such as many rows add, changes no optimum."""
    posterior = fit(likelihood, "full").posterior
    large = replace(posterior.data_fit, loss=posterior.data_fit.loss + 1e7)
    found = marglik(replace(posterior, data_fit=large), free_noise=False)
    expected = marglik(posterior, free_noise=False)
    # Values of 1e7 are rounded to 1e-9, which hides steps of some 1e-4.
    assert_log(found.prior_precision, float(expected.prior_precision.log()), 1e-3)


def assert_stationary(found):
    """Check that the gradient in the logarithms of δ and σ vanishes."""
    log_delta = found.prior_precision.log().requires_grad_()
    log_sigma = found.hyperparameters.sigma_noise.log().requires_grad_()
    value = found.replace(
        prior_precision=log_delta.exp(), sigma_noise=log_sigma.exp()
    ).log_marginal_likelihood()
    gradients = torch.autograd.grad(value, [log_delta, log_sigma], allow_unused=True)
    inside = log_delta.abs() < LOG_BOUND - 0.1
    assert (gradients[0][inside].abs() < 1e-3).all()
    if found.likelihood.has_noise:
        assert abs(float(gradients[1])) < 1e-3


@every_prior
@pytest.mark.parametrize("likelihood", ["Categorical", "Gaussian"])
def test_the_gradient_of_the_evidence_vanishes(likelihood, structure, prior):
    """Prior mean and temperature take part."""
    options = {"prior_mean": 0.5, "temperature": 0.2}
    fitted = fit(likelihood, structure, prior, subset="all", **options)
    assert_stationary(marglik(fitted.posterior))


def test_more_precisions_than_newton_takes():
    fitted = fit("Categorical", "diag", "diag", case="cnn", subset="all")
    assert fitted.layout.n_parameters > evidence.MAX_NEWTON_SIZE
    assert_stationary(marglik(fitted.posterior))


def test_hyperparameters_stay_within_bounds():
    """At the prior mean the best precision is infinite, so a bound applies."""
    posterior = fit("Categorical", "diag").posterior
    at_mean = posterior.replace(prior_mean=posterior.mean)
    found = marglik(at_mean)
    assert 15 < float(found.prior_precision.log()) <= math.log(LARGEST) + LOG_BOUND
    assert torch.isfinite(found.log_marginal_likelihood())


@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1e6])
def test_unit_of_the_targets_changes_nothing(unit):
    """Scaling weights, outputs and targets scales δ by 1/unit² and σ by unit."""
    posterior = fit("Gaussian", "full").posterior
    scaled = replace(
        posterior,
        mean=posterior.mean * unit,
        weights=posterior.weights * unit,
        data_fit=replace(posterior.data_fit, loss=posterior.data_fit.loss * unit**2),
    ).replace(sigma_noise=posterior.hyperparameters.sigma_noise * unit)
    found, expected = (marglik(p).hyperparameters for p in (scaled, posterior))
    delta, sigma = found.prior_precision * unit**2, found.sigma_noise / unit
    assert_equal(delta.log(), expected.prior_precision.log(), 1e-6)
    assert_equal(sigma.log(), expected.sigma_noise.log(), 1e-6)


# ------------------------------------------- evidence at the refitted linear model
def group_sums(values, posterior):
    shape = posterior.prior_precision.shape
    if shape == ():
        return values.sum()
    if len(values) == len(posterior.prior_precision):
        return values
    return torch.stack([part.sum() for part in posterior.layout.split(values)])


@every_convex
@every_prior
def test_fixed_point_at_the_refitted_model(structure, prior, likelihood):
    fitted = fit(likelihood, structure, prior, temperature=1.2, prior_mean=0.1)
    found = marglik_refitted(tuning_problem(fitted))
    h, model = found.hyperparameters, fitted.linear_model
    delta = references.expand(h.prior_precision, found.layout)
    mean = h.prior_mean.expand_as(found.mean)
    _, slope, _ = model.objective(found.mean, delta / found.scale, mean)
    assert slope.abs().max() < 1e-6
    cov = torch.linalg.inv(found.precision_matrix())
    gamma = 1 - delta * cov.diagonal()
    scatter = group_sums((found.mean - mean) ** 2, found)
    ratio = group_sums(gamma, found) / scatter / h.prior_precision
    inside = h.prior_precision.log().abs() < LOG_BOUND - 0.1
    # logarithms are iterated to 1e-4
    assert (ratio.log().abs()[inside] < 1e-3).all()
    if fitted.likelihood.has_noise:
        n = found.data_fit.n_targets
        variance = 2 * found.data_fit.loss / (n - gamma.sum()) / h.temperature
        error = variance.log() / 2 - h.sigma_noise.log()
        assert abs(float(error)) < 1e-3


@every_convex
def test_nothing_free_at_the_refitted_model(likelihood):
    fitted = fit(likelihood)
    found = marglik_refitted(tuning_problem(fitted, free_prior=False, free_noise=False))
    assert_equal(found.mean, fitted.linear_model.refit(fitted.posterior).mean, 1e-12)


def test_scalar_evidence_at_the_refitted_model_is_nearly_maximal():
    """For Gaussian noise, curvature is constant, so the fixed point is the maximum."""
    fitted = fit("Gaussian", "full")
    found = marglik_refitted(tuning_problem(fitted))

    def loss(*logs):
        delta, sigma = torch.as_tensor(logs).exp()
        template = fitted.posterior.replace(prior_precision=delta, sigma_noise=sigma)
        return -fitted.linear_model.refit(template).log_marginal_likelihood()

    log_delta, log_sigma = minimum_by_simplex(loss, [0.0, 0.0]).x
    assert_log(found.prior_precision, log_delta, 1e-3)
    assert_log(found.hyperparameters.sigma_noise, log_sigma, 1e-3)


class Restless(LastLayerModel):
    """A model whose refitted weights never settle."""

    sizes = cycle([1.0, 1.3, 0.7])

    def refit(self, *args, **options):
        found = super().refit(*args, **options)
        return replace(found, mean=found.mean * next(self.sizes))


def test_a_fixed_point_that_is_not_reached_is_warned_of():
    problem = tuning_problem(fit("Categorical"))
    restless = Restless(**vars(problem.linear_model))
    with pytest.warns(ConvergenceWarning, match="fixed point of the evidence was not"):
        found = marglik_refitted(replace(problem, linear_model=restless))
    assert found.log_marginal_likelihood().isfinite()
