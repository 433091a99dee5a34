import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import references
import tasks
import torch
from cases import DOUBLE, normal, positive
from contracts import STRUCTURES_AND_PRIORS, assert_equal, problem
from scipy.optimize import minimize, minimize_scalar
from tasks import fit, held_out, task

from sklaplace import tuning
from sklaplace.jacobians import backpropagate
from sklaplace.structures import STRUCTURES
from sklaplace.tuning import (
    LARGEST,
    LOG_BOUND,
    TUNERS,
    marglik,
    marglik_refitted,
    validation,
)

every_likelihood = pytest.mark.parametrize("likelihood", references.LIKELIHOODS)
every_structure = pytest.mark.parametrize("structure", STRUCTURES)
every_prior = pytest.mark.parametrize(("structure", "prior"), STRUCTURES_AND_PRIORS)

pytestmark = pytest.mark.usefixtures("rng_untouched")


# ------------------------------------------------- evidence at the network's head
def evidence_at(posterior, log_delta, log_sigma=None):
    h = posterior.hyperparameters
    delta = torch.as_tensor(log_delta, dtype=DOUBLE).exp()
    h = replace(h, prior_precision=delta.expand(h.prior_precision.shape))
    if log_sigma is not None:
        h = replace(h, sigma_noise=torch.as_tensor(log_sigma, dtype=DOUBLE).exp())
    return float(posterior.log_marginal_likelihood(h))


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
    derivatives = tuning._derivatives

    def count(objective, v):
        counted.append(v)
        return derivatives(objective, v)

    monkeypatch.setattr(tuning, "_derivatives", count)
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
def test_evidence_is_maximal_with_noise(noise, subset, structure, evaluations):
    fitted = fit("Gaussian", structure, subset=subset, sigma_noise=noise)
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
            posterior.hyperparameters,
            prior_precision=torch.as_tensor(x[:2]).exp(),
        )
        if free_noise:
            h = replace(h, sigma_noise=torch.as_tensor(x[2]).exp())
        return -float(posterior.log_marginal_likelihood(h))

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
        value = -posterior.log_marginal_likelihood(h)
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
    monkeypatch.setattr(tuning, "MAX_NEWTON_SIZE", 2)
    found = marglik(fit("Gaussian", "kron", "layerwise", subset="all").posterior)
    assert_equal(found.prior_precision.log(), expected.prior_precision.log(), 1e-3)


# ------------------------------------------------- evidence at the refitted head
def group_sums(values, posterior):
    shape = posterior.prior_precision.shape
    if shape == ():
        return values.sum()
    if len(values) == len(posterior.prior_precision):
        return values
    return torch.stack([part.sum() for part in posterior.layout.split(values)])


@every_likelihood
@every_prior
def test_fixed_point_at_the_refitted_head(structure, prior, likelihood):
    fitted = fit(likelihood, structure, prior, temperature=1.2, prior_mean=0.1)
    found = marglik_refitted(task(fitted))
    h, head = found.hyperparameters, fitted.head
    delta = references.expand(h.prior_precision, found.layout)
    mean = h.prior_mean.expand_as(found.mean)
    _, slope, _ = head.objective(found.mean, delta / found.scale, mean)
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
def test_one_of_prior_and_noise_at_the_refitted_head(likelihood):
    fitted = fit(likelihood, "full", prior_precision=0.4, sigma_noise=0.9)
    found = marglik_refitted(task(fitted, free_noise=False))
    assert found.hyperparameters.sigma_noise == 0.9
    assert found.is_refitted
    if fitted.likelihood.has_noise:
        found = marglik_refitted(task(fitted, free_prior=False))
        assert found.prior_precision == 0.4
        assert found.hyperparameters.sigma_noise != 0.9


@every_likelihood
def test_nothing_free_at_the_refitted_head(likelihood):
    fitted = fit(likelihood)
    found = marglik_refitted(task(fitted, free_prior=False, free_noise=False))
    assert_equal(found.mean, fitted.head.refit(fitted.posterior).mean, 1e-12)


def test_scalar_evidence_at_the_refitted_head_is_nearly_maximal():
    """For Gaussian noise curvature is constant: the fixed point is the maximum."""
    fitted = fit("Gaussian", "full")
    found = marglik_refitted(task(fitted))

    def loss(x):
        delta, sigma = torch.as_tensor(x).exp()
        template = fitted.posterior.replace(prior_precision=delta, sigma_noise=sigma)
        return -float(fitted.head.refit(template).log_marginal_likelihood())

    best = minimize(loss, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-6})
    h = found.hyperparameters
    logs = [float(h.prior_precision.log()), float(h.sigma_noise.log())]
    np.testing.assert_allclose(logs, best.x, atol=1e-3)


def test_refitting_needs_a_head():
    fitted = fit("Categorical", subset="all")
    with pytest.raises(ValueError, match="refine=True needs outputs that are linear"):
        marglik_refitted(task(replace(fitted, head=None)))


# -------------------------------------------------------------- validation path
def total_score(held, posterior):
    """Negative log predictive density of all rows, by the dense formulas."""
    mean = held.f + held.J @ (posterior.mean - posterior.weights)
    cov = held.J @ torch.linalg.inv(posterior.precision_matrix()) @ held.J.mT
    if posterior.likelihood.has_noise:
        variances = cov.diagonal(dim1=1, dim2=2)
        std = (variances + posterior.hyperparameters.sigma_noise**2).sqrt()
        score = -torch.distributions.Normal(mean, std).log_prob(held.y).sum(1)
    else:
        log_proba = tasks.log_proba(posterior.likelihood)(mean, cov)
        score = -log_proba.gather(1, held.y.reshape(-1, 1).long()).squeeze(1)
    return float(held.weights @ score)


def kept_heads(fitted, the_task):
    """Every point of the path with the network's head."""
    return [
        fitted.posterior.replace(prior_precision=ratio * fitted.posterior.scale)
        for ratio in tuning._path(the_task)
    ]


def refitted_heads(fitted, the_task):
    """Every point of the path with its most probable head."""
    return [fitted.head.refit(posterior) for posterior in kept_heads(fitted, the_task)]


def same_choice(found, expected):
    """Same head, the same ``δ/scale`` and noise, up to the search's precision."""
    assert found.is_refitted == expected.is_refitted
    # gradients end below 1e-7, and no precision ρ on these paths is below 1e-5
    assert_equal(found.mean, expected.mean, 1e-2)
    assert_equal(
        found.prior_precision.log() - found.scale.log(),
        expected.prior_precision.log() - expected.scale.log(),
        1e-9,
    )
    noise = found.hyperparameters.sigma_noise.log()
    assert_equal(noise, expected.hyperparameters.sigma_noise.log(), 1e-4)


def naive_choice(fitted, the_task, score):
    """The best of the path; a refitted head only where it is clearly better."""
    kept = min(kept_heads(fitted, the_task), key=score)
    if the_task.refine is False:
        return kept
    refitted = min(refitted_heads(fitted, the_task), key=score)
    gain = score(kept) - score(refitted)
    return refitted if the_task.refine is True or gain > tuning.MARGIN else kept


@every_prior
@pytest.mark.parametrize("likelihood", ["Categorical", "Bernoulli"])
@pytest.mark.parametrize("refine", [True, False, "auto"])
def test_best_score_on_held_out_rows(refine, likelihood, structure, prior):
    fitted = fit(likelihood, structure, prior, temperature=0.8)
    held = held_out(fitted, weights=3 * positive(30))
    the_task = task(fitted, validation=held.rows, refine=refine)
    found = validation(the_task)
    same_choice(found, naive_choice(fitted, the_task, lambda p: total_score(held, p)))
    assert found.hyperparameters.temperature == 0.8


@pytest.mark.parametrize("error", [0.0, 2.0])
def test_auto_keeps_a_good_head_and_refits_a_bad_one(error):
    """Labels are drawn from the network itself, and then its bias is spoilt."""
    fitted = fit("Categorical", "full")
    held = held_out(fitted)
    shift = torch.tensor([error, 0.0, 0.0], dtype=DOUBLE)
    spoilt = [replace(batch, f=batch.f + shift) for batch in held.rows]
    head = replace(fitted.head, outputs=fitted.head.outputs + shift)
    found = validation(task(replace(fitted, head=head), validation=spoilt))
    assert found.is_refitted == bool(error)


@every_prior
@pytest.mark.parametrize("refine", [True, False, "auto"])
@pytest.mark.parametrize("free", ["both", "prior", "noise"])
def test_best_score_with_noise(free, refine, structure, prior):
    fitted = fit(
        "Gaussian",
        structure,
        prior,
        temperature=0.8,
        sigma_noise=0.6,
        prior_precision=0.5,
    )
    held = held_out(fitted, weights=positive(30))
    the_task = task(
        fitted,
        validation=held.rows,
        refine=refine,
        free_prior=free != "noise",
        free_noise=free != "prior",
    )
    found = validation(the_task)

    def noisy(posterior):
        return with_noise(posterior, free, held)

    def score(posterior):
        return total_score(held, noisy(posterior))

    expected = noisy(naive_choice(fitted, the_task, score))
    h = found.hyperparameters
    if free == "both":
        # δ, σ and the head were fitted, and a new value follows a Student t
        n = 2 * float(held.weights.sum())
        wider = expected.hyperparameters.sigma_noise * math.sqrt(n / (n - 5))
        expected = at_noise(expected, wider)
    elif free == "prior":
        assert math.isclose(h.sigma_noise, 0.6, rel_tol=1e-12)
    else:
        fixed = torch.full_like(h.prior_precision, 0.5)
        assert_equal(h.prior_precision, fixed, 1e-12)
    same_choice(found, expected)


def at_noise(posterior, sigma):
    """Other noise under the same ``δ/scale``."""
    ratio = posterior.prior_precision / posterior.scale
    noisy = posterior.replace(sigma_noise=torch.as_tensor(sigma, dtype=DOUBLE))
    return noisy.replace(prior_precision=ratio * noisy.scale)


def with_noise(posterior, free, held):
    """The candidate's noise: fixed, from ``ρ = δσ²T``, or best by a search."""
    if free == "prior":
        return posterior
    if free == "noise":
        ratio = posterior.prior_precision / posterior.scale
        temperature = posterior.hyperparameters.temperature
        return at_noise(posterior, ((ratio / 0.5).mean() / temperature).sqrt())
    best = minimize_scalar(
        lambda v: total_score(held, at_noise(posterior, math.exp(v))),
        bracket=(-1.0, 0.0),
        tol=1e-9,
    )
    return at_noise(posterior, math.exp(best.x))


def test_single_candidate_where_all_is_fixed():
    fitted = fit("Gaussian", prior_precision=0.5)
    held = held_out(fitted)
    options = {"validation": held.rows, "free_prior": False, "free_noise": False}
    found = validation(task(fitted, refine=False, **options))
    assert_equal(found.prior_precision, torch.tensor(0.5, dtype=DOUBLE), 1e-12)
    assert not found.is_refitted
    assert validation(task(fitted, refine=True, **options)).is_refitted


def test_path_starts_where_the_prior_leaves_the_network_alone():
    fitted = fit("Categorical", "full")
    held = held_out(fitted)
    the_task = task(fitted, validation=held.rows, refine=False)
    path = tuning._path(the_task)
    assert all(a > b for a, b in pairwise(path))
    strongest = total_score(held, kept_heads(fitted, the_task)[0])
    softmax = held.f.log_softmax(-1)
    alone = -float(softmax.gather(1, held.y.reshape(-1, 1)).sum())
    assert math.isclose(strongest, alone, rel_tol=1e-3)


@pytest.mark.parametrize("likelihood", ["Categorical", "Gaussian"])
def test_final_head_is_refitted_to_full_precision(likelihood):
    """Heads along the path may be rougher than the one that is returned."""
    fitted = fit(likelihood, "kron")
    held = held_out(fitted)
    found = validation(task(fitted, validation=held.rows, refine=True))
    rho = (found.prior_precision / found.scale).expand_as(found.mean)
    _, slope, _ = fitted.head.objective(found.mean, rho, torch.zeros_like(rho))
    assert slope.abs().max() < 1e-6


@every_likelihood
def test_weights_of_held_out_rows_are_repetitions(likelihood):
    fitted = fit(likelihood)
    weights = torch.arange(30).remainder(3).add(1).double()
    held = held_out(fitted, weights=weights)
    copies = [
        replace(
            batch,
            f=batch.f.repeat_interleave(batch.weights.long(), 0),
            targets=batch.targets.repeat_interleave(batch.weights.long(), 0),
            jacobian=backpropagate(
                fitted.forward,
                part.repeat_interleave(batch.weights.long(), 0),
                fitted.layout,
            )[1],
            weights=torch.ones(int(batch.weights.sum()), dtype=DOUBLE),
        )
        for batch, part in zip(
            held.rows, normal(30, 2, seed=50).split([7, 23]), strict=True
        )
    ]
    # one path for both: its scale is the mean over rows, not over weights
    found = [
        tuning._scored(task(fitted, validation=given), [positive()])[0].score
        for given in (held.rows, copies)
    ]
    assert math.isclose(*found, rel_tol=1e-10)


def test_validation_needs_rows():
    with pytest.raises(ValueError, match=r"there are none\. Pass X_val and y_val"):
        validation(task(fit()))


def test_no_finite_score_is_an_error():
    fitted = fit("Categorical")
    held = held_out(fitted)
    rows = [replace(batch, f=batch.f * torch.nan) for batch in held.rows]
    with pytest.raises(ValueError, match="No prior precision gives a finite score"):
        validation(task(fitted, validation=rows))


# ------------------------------------------------------------------------ tuners
def test_auto_prefers_held_out_rows():
    fitted = fit("Categorical")
    held = held_out(fitted)
    the_task = task(fitted, validation=held.rows)
    found, expected = TUNERS["auto"](the_task), validation(the_task)
    assert torch.equal(found.prior_precision, expected.prior_precision)
    assert torch.equal(found.mean, expected.mean)


def test_auto_without_rows_refits():
    the_task = task(fit("Categorical"))
    found, expected = TUNERS["auto"](the_task), marglik_refitted(the_task)
    assert torch.equal(found.mean, expected.mean)
    assert found.is_refitted


def test_auto_says_what_it_risks():
    with pytest.warns(UserWarning, match="sigma_noise comes from the training rows"):
        TUNERS["auto"](task(fit("Gaussian")))
    with pytest.warns(UserWarning, match="maximises the evidence at the network's own"):
        found = TUNERS["auto"](task(fit("Categorical"), refine=False))
    assert not found.is_refitted
    with pytest.warns(UserWarning, match="maximises the evidence at the network's own"):
        TUNERS["auto"](task(fit("Categorical"), head=None))


def test_marglik_keeps_the_head_where_it_must():
    fitted = fit("Categorical")
    kept = TUNERS["marglik"](task(fitted, refine=False))
    assert not kept.is_refitted
    assert torch.equal(kept.prior_precision, marglik(fitted.posterior).prior_precision)
    assert not TUNERS["marglik"](task(fitted, head=None)).is_refitted
    assert TUNERS["marglik"](task(fitted)).is_refitted


def test_evidence_of_a_network_with_all_weights():
    """The same search serves every structure and kind of network."""
    for case in ("cnn", "called_twice", "norms"):
        for structure in STRUCTURES:
            posterior = problem(case, "Gaussian").posterior(structure)
            found = marglik(posterior, free_noise=False)
            (best,) = maximum(posterior)
            assert abs(float(found.prior_precision.log()) - best) < 1e-4
