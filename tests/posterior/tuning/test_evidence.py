import math
from dataclasses import replace

import numpy as np
import pytest
import references
import torch
from cases import DOUBLE
from contracts import STRUCTURES_AND_PRIORS, assert_equal, problem
from scipy.optimize import minimize, minimize_scalar
from tuning_problems import fit, tuning_problem

from sklaplace.curvature.structures import STRUCTURES
from sklaplace.posterior.tuning import evidence
from sklaplace.posterior.tuning.evidence import LOG_BOUND, marglik, marglik_refitted
from sklaplace.posterior.tuning.task import LARGEST

every_convex = pytest.mark.parametrize("likelihood", references.CONVEX)
every_likelihood = pytest.mark.parametrize("likelihood", references.LIKELIHOODS)
every_structure = pytest.mark.parametrize("structure", STRUCTURES)
every_prior = pytest.mark.parametrize(("structure", "prior"), STRUCTURES_AND_PRIORS)

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("rng_untouched")]


# ---------------------------------------------- evidence at the network's weights
def evidence_at(posterior, log_delta, log_sigma=None):
    h = posterior.hyperparameters
    delta = torch.as_tensor(log_delta, dtype=DOUBLE).exp()
    h = replace(h, prior_precision=delta.expand(h.prior_precision.shape))
    if log_sigma is not None:
        h = replace(h, sigma_noise=torch.as_tensor(log_sigma, dtype=DOUBLE).exp())
    return float(posterior.replace(**vars(h)).log_marginal_likelihood())


def maximum(posterior, *, with_noise=False):
    """Best ``log δ`` (and ``log σ``) by scipy: the best of several starts."""
    if not with_noise:
        grid = np.linspace(-20, 20, 81)
        values = [evidence_at(posterior, x) for x in grid]
        best = grid[int(np.argmax(values))]
        found = minimize_scalar(
            lambda x: -evidence_at(posterior, x),
            bounds=(best - 0.5, best + 0.5),
            method="bounded",
            options={"xatol": 1e-7},
        )
        return np.array([found.x])
    starts = [(a, b) for a in (-6, -2, 2, 6) for b in (-2, 0)]
    found = [
        minimize(
            lambda x: -evidence_at(posterior, *x),
            start,
            method="Nelder-Mead",
            options={"xatol": 1e-7, "fatol": 1e-11, "maxiter": 2000},
        )
        for start in starts
    ]
    return min(found, key=lambda result: result.fun).x


@pytest.fixture
def evaluations(monkeypatch):
    """Counts the evaluations of the objective with its derivatives."""
    counted = []
    derivatives = evidence.NegativeEvidence.derivatives

    def count(objective, v):
        counted.append(v)
        return derivatives(objective, v)

    monkeypatch.setattr(evidence.NegativeEvidence, "derivatives", count)
    return counted


@every_structure
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("likelihood", ["Categorical", "Bernoulli"])
@pytest.mark.parametrize("start", [1e-3, 1.0, 1e4])
def test_evidence_is_maximal(start, likelihood, subset, structure, evaluations):
    fitted = fit(likelihood, structure, subset=subset, prior_precision=start)
    found = marglik(fitted.posterior)
    (best,) = maximum(fitted.posterior)
    assert abs(float(found.prior_precision.log()) - best) < 1e-4
    assert len(evaluations) <= 10
    assert torch.equal(found.mean, fitted.posterior.mean)


@every_structure
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("noise", [0.05, 0.7, 8.0])
@pytest.mark.parametrize("curvature", ["ggn", "ef"])
def test_evidence_is_maximal_with_noise(
    curvature, noise, subset, structure, evaluations
):
    options = {"curvature": curvature, "sigma_noise": noise}
    fitted = fit("Gaussian", structure, subset=subset, **options)
    found = marglik(fitted.posterior)
    log_delta, log_sigma = maximum(fitted.posterior, with_noise=True)
    assert abs(float(found.prior_precision.log()) - log_delta) < 1e-4
    assert abs(float(found.hyperparameters.sigma_noise.log()) - log_sigma) < 1e-4
    assert len(evaluations) <= 10


def test_noise_alone_and_prior_alone():
    posterior = fit("Gaussian", "full", prior_precision=0.3).posterior
    found = marglik(posterior, free_prior=False)
    assert torch.equal(found.prior_precision, posterior.prior_precision)
    best = minimize_scalar(
        lambda x: -evidence_at(posterior, math.log(0.3), x),
        bounds=(-5, 5),
        method="bounded",
        options={"xatol": 1e-8},
    )
    assert abs(float(found.hyperparameters.sigma_noise.log()) - best.x) < 1e-4
    found = marglik(posterior, free_noise=False)
    assert torch.equal(
        found.hyperparameters.sigma_noise, posterior.hyperparameters.sigma_noise
    )
    (log_delta,) = maximum(posterior)
    assert abs(float(found.prior_precision.log()) - log_delta) < 1e-4
    assert marglik(posterior, free_prior=False, free_noise=False) is posterior


def test_nothing_to_choose_without_noise():
    posterior = fit("Categorical").posterior
    assert marglik(posterior, free_prior=False) is posterior


@every_likelihood
def test_number_of_rows_does_not_blunt_the_search(likelihood):
    """A constant in the evidence, such as that of many rows, changes no optimum."""
    posterior = fit(likelihood, "full").posterior
    large = replace(posterior.data_fit, loss=posterior.data_fit.loss + 1e7)
    found = marglik(replace(posterior, data_fit=large), free_noise=False)
    expected = marglik(posterior, free_noise=False)
    difference = found.prior_precision.log() - expected.prior_precision.log()
    # Values of 1e7 are rounded to 1e-9, which hides steps of some 1e-4.
    assert abs(float(difference)) < 1e-3


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("likelihood", ["Categorical", "Gaussian"])
def test_layerwise_evidence_falls_apart_into_layers(likelihood, structure, evaluations):
    """Without noise to choose, each block has a maximum of its own."""
    fitted = fit(likelihood, structure, "layerwise", subset="all")
    posterior, layout = fitted.posterior, fitted.layout
    found = marglik(posterior, free_noise=False)
    H = posterior.scale * posterior.structure.dense()
    start = 0
    for value, block in zip(found.prior_precision, layout.blocks, strict=True):
        rows = slice(start, start + block.size)
        e = torch.linalg.eigvalsh(H[rows, rows]).clamp(min=0)
        theta = posterior.mean[rows]

        def loss(x, e=e, theta=theta):
            delta = math.exp(x)
            terms = torch.log1p(e / delta).sum() + delta * (theta**2).sum()
            return float(terms) / 2

        best = minimize_scalar(
            loss, bounds=(-20, 20), method="bounded", options={"xatol": 1e-8}
        )
        assert abs(float(value.log()) - best.x) < 1e-4
        start += block.size
    assert len(evaluations) <= 10


@pytest.mark.parametrize("likelihood", ["Categorical", "Gaussian"])
def test_layerwise_evidence_of_the_full_structure(likelihood, evaluations):
    posterior = fit(likelihood, "full", "layerwise").posterior
    free_noise = posterior.likelihood.has_noise
    found = marglik(posterior)

    def loss(x):
        h = replace(
            posterior.hyperparameters, prior_precision=torch.as_tensor(x[:2]).exp()
        )
        if free_noise:
            h = replace(h, sigma_noise=torch.as_tensor(x[2]).exp())
        return -float(posterior.replace(**vars(h)).log_marginal_likelihood())

    best = minimize(
        loss,
        [0.0, 0.0] + [0.0] * free_noise,
        method="Nelder-Mead",
        options={"xatol": 1e-8, "fatol": 1e-12, "maxiter": 4000},
    )
    h = found.hyperparameters
    logs = [*h.prior_precision.log()] + [h.sigma_noise.log()] * free_noise
    np.testing.assert_allclose(logs, best.x, atol=1e-4)
    assert len(evaluations) <= 10


@pytest.mark.parametrize("likelihood", ["Categorical", "Gaussian"])
@pytest.mark.parametrize("case", ["mlp", "inplace"])
def test_diagonal_prior_of_the_diagonal_structure(case, likelihood):
    """Each weight has the closed-form maximum of ½(log δ - log(e + δ) - δ m²)."""
    fitted = fit(likelihood, "diag", "diag", subset="all", case=case)
    found = marglik(fitted.posterior, free_noise=False)
    e = fitted.posterior.scale * fitted.posterior.structure.eigenvalues
    m2 = fitted.posterior.mean**2
    # positive root of m² δ² + m² e δ - e = 0, in a form that does not cancel
    delta = 2 * e / (m2 * e + (m2**2 * e**2 + 4 * m2 * e).sqrt())
    assert (found.prior_precision.log() - delta.log()).abs().max() < 1e-3
    best = fitted.posterior.replace(prior_precision=delta).log_marginal_likelihood()
    assert best - found.log_marginal_likelihood() < 1e-6


@pytest.mark.parametrize("likelihood", ["Categorical", "Gaussian"])
def test_diagonal_prior_of_the_full_structure(likelihood):
    posterior = fit(likelihood, "full", "diag").posterior
    found = marglik(posterior)

    def loss(x):
        v = torch.as_tensor(x).requires_grad_()
        n = posterior.layout.n_parameters
        h = replace(posterior.hyperparameters, prior_precision=v[:n].exp())
        if posterior.likelihood.has_noise:
            h = replace(h, sigma_noise=v[-1].exp())
        value = -posterior.replace(**vars(h)).log_marginal_likelihood()
        (slope,) = torch.autograd.grad(value, v)
        return value.item(), slope.numpy()

    best = minimize(
        loss,
        np.zeros(posterior.layout.n_parameters + posterior.likelihood.has_noise),
        jac=True,
        method="BFGS",
        options={"gtol": 1e-7, "maxiter": 2000},
    )
    assert float(found.log_marginal_likelihood()) > -best.fun - 1e-4


def test_hyperparameters_stay_within_bounds():
    """Weights at the prior mean ask for an infinite precision, and get a finite one."""
    posterior = fit("Categorical", "diag").posterior
    at_mean = posterior.replace(prior_mean=posterior.mean)
    found = marglik(at_mean)
    assert 15 < float(found.prior_precision.log()) <= math.log(LARGEST) + LOG_BOUND
    assert torch.isfinite(found.log_marginal_likelihood())


@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1e6])
def test_unit_of_the_targets_changes_nothing(unit):
    """Weights, outputs and targets times ``unit`` : δ by its square, σ by itself."""
    posterior = fit("Gaussian", "full").posterior
    scaled = replace(
        posterior,
        mean=posterior.mean * unit,
        weights=posterior.weights * unit,
        data_fit=replace(posterior.data_fit, loss=posterior.data_fit.loss * unit**2),
    ).replace(sigma_noise=posterior.hyperparameters.sigma_noise * unit)
    found, expected = (
        marglik(scaled).hyperparameters,
        marglik(posterior).hyperparameters,
    )
    delta, sigma = found.prior_precision * unit**2, found.sigma_noise / unit
    assert_equal(delta.log(), expected.prior_precision.log(), 1e-6)
    assert_equal(sigma.log(), expected.sigma_noise.log(), 1e-6)


def test_prior_mean_and_temperature_take_part():
    posterior = fit("Categorical", "kron", prior_mean=0.5, temperature=0.2).posterior
    (best,) = maximum(posterior)
    assert abs(float(marglik(posterior).prior_precision.log()) - best) < 1e-4


@every_prior
def test_tuning_is_pure(structure, prior):
    posterior = fit("Gaussian", structure, prior).posterior
    h = posterior.hyperparameters
    values = [h.prior_precision.clone(), h.sigma_noise.clone()]
    value = posterior.log_marginal_likelihood()
    marglik(posterior)
    assert posterior.hyperparameters is h
    assert torch.equal(h.prior_precision, values[0])
    assert torch.equal(h.sigma_noise, values[1])
    assert torch.equal(posterior.log_marginal_likelihood(), value)
    assert not marglik(posterior).prior_precision.requires_grad


def test_more_precisions_than_newton_takes(monkeypatch):
    expected = marglik(fit("Gaussian", "kron", "layerwise", subset="all").posterior)
    monkeypatch.setattr(evidence, "MAX_NEWTON_SIZE", 2)
    found = marglik(fit("Gaussian", "kron", "layerwise", subset="all").posterior)
    assert_equal(found.prior_precision.log(), expected.prior_precision.log(), 1e-3)


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


@pytest.mark.parametrize("likelihood", ["Categorical", "Gaussian"])
def test_one_of_prior_and_noise_at_the_refitted_model(likelihood):
    fitted = fit(likelihood, "full", prior_precision=0.4, sigma_noise=0.9)
    found = marglik_refitted(tuning_problem(fitted, free_noise=False))
    assert found.hyperparameters.sigma_noise == 0.9
    assert found.is_refitted
    if fitted.likelihood.has_noise:
        found = marglik_refitted(tuning_problem(fitted, free_prior=False))
        assert found.prior_precision == 0.4
        assert found.hyperparameters.sigma_noise != 0.9


@every_convex
def test_nothing_free_at_the_refitted_model(likelihood):
    fitted = fit(likelihood)
    found = marglik_refitted(tuning_problem(fitted, free_prior=False, free_noise=False))
    assert_equal(found.mean, fitted.linear_model.refit(fitted.posterior).mean, 1e-12)


def test_scalar_evidence_at_the_refitted_model_is_nearly_maximal():
    """For Gaussian noise curvature is constant: the fixed point is the maximum."""
    fitted = fit("Gaussian", "full")
    found = marglik_refitted(tuning_problem(fitted))

    def loss(x):
        delta, sigma = torch.as_tensor(x).exp()
        template = fitted.posterior.replace(prior_precision=delta, sigma_noise=sigma)
        return -float(fitted.linear_model.refit(template).log_marginal_likelihood())

    best = minimize(loss, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-6})
    h = found.hyperparameters
    logs = [float(h.prior_precision.log()), float(h.sigma_noise.log())]
    np.testing.assert_allclose(logs, best.x, atol=1e-3)


def test_refitting_needs_a_linear_model():
    fitted = fit("Categorical", subset="all")
    with pytest.raises(ValueError, match="refine=True needs outputs that are linear"):
        marglik_refitted(tuning_problem(replace(fitted, linear_model=None)))


def test_evidence_of_a_network_with_all_weights():
    """The same search serves every structure and kind of network."""
    for case in ("cnn", "called_twice", "norms"):
        for structure in STRUCTURES:
            posterior = problem(case, "Gaussian").posterior(structure)
            found = marglik(posterior, free_noise=False)
            (best,) = maximum(posterior)
            assert abs(float(found.prior_precision.log()) - best) < 1e-4
