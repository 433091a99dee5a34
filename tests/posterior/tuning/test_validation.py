import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import tuning_problems
from cases import DOUBLE, positive
from contracts import STRUCTURES_AND_PRIORS, assert_equal
from scipy.optimize import minimize_scalar
from tuning_problems import fit, held_out, tuning_problem

from sklaplace.posterior.tuning import validation

every_prior = pytest.mark.parametrize(("structure", "prior"), STRUCTURES_AND_PRIORS)

pytestmark = pytest.mark.usefixtures("rng_untouched")


# -------------------------------------------------------------- validation path
def total_score(held, posterior):
    """Return the negative log predictive density of all rows, by dense formulas."""
    mean = held.f + held.J @ (posterior.mean - posterior.weights)
    cov = held.J @ torch.linalg.inv(posterior.precision_matrix()) @ held.J.mT
    if posterior.likelihood.has_noise:
        variances = cov.diagonal(dim1=1, dim2=2)
        std = (variances + posterior.hyperparameters.sigma_noise**2).sqrt()
        score = -torch.distributions.Normal(mean, std).log_prob(held.y).sum(1)
    else:
        log_proba = tuning_problems.log_proba(posterior.likelihood)(mean, cov)
        score = -log_proba.gather(1, held.y.reshape(-1, 1).long()).squeeze(1)
    return float(held.weights @ score)


def kept_candidates(fitted, problem):
    """Return every point of the path, with the network's weights."""
    return [
        fitted.posterior.replace(prior_precision=ratio * fitted.posterior.scale)
        for ratio in validation._path(problem)
    ]


def same_choice(found, expected):
    """Check weights, ``δ/scale`` and noise, up to the precision of the search."""
    assert found.is_refitted == expected.is_refitted
    # gradients end below 1e-7, and no precision ρ on these paths is below 1e-5
    assert_equal(found.mean, expected.mean, 1e-2)
    ratios = [p.prior_precision.log() - p.scale.log() for p in (found, expected)]
    assert_equal(*ratios, 1e-9)
    noises = [p.hyperparameters.sigma_noise.log() for p in (found, expected)]
    assert_equal(*noises, 1e-4)


def naive_choice(fitted, problem, score):
    """Return the best of the path; a refitted model only if it is clearly better.

    In regression, take the strongest prior that is not clearly worse.
    """
    candidates = kept_candidates(fitted, problem)
    kept = min(candidates, key=score)
    if problem.refine is False:
        return kept
    models = list(map(fitted.linear_model.refit, candidates))
    scores = list(map(score, models))
    best = int(np.argmin(scores))
    gain = score(kept) - scores[best]
    if problem.refine == "auto" and gain <= validation.MARGIN:
        return kept
    if problem.score.log_proba is None and problem.free_prior:
        highest = scores[best] + validation.MARGIN
        while best and scores[best - 1] <= highest:
            best -= 1
    return models[best]


@every_prior
@pytest.mark.parametrize("likelihood", ["Categorical", "Bernoulli"])
@pytest.mark.parametrize("refine", [True, False, "auto"])
def test_best_score_on_held_out_rows(refine, likelihood, structure, prior):
    fitted = fit(likelihood, structure, prior, temperature=0.8)
    held = held_out(fitted, weights=3 * positive(30))
    problem = tuning_problem(fitted, validation=held.rows, refine=refine)
    found = validation.tune_on_validation(problem)
    same_choice(found, naive_choice(fitted, problem, lambda p: total_score(held, p)))
    assert found.hyperparameters.temperature == 0.8


@pytest.mark.parametrize("likelihood", ["Poisson", "HeteroscedasticGaussian"])
def test_strongest_prior_near_the_best_score_without_noise(likelihood):
    fitted = fit(likelihood, prior_mean=1.0)
    held = held_out(fitted, weights=torch.full((30,), 0.5, dtype=DOUBLE))
    problem = tuning_problem(fitted, validation=held.rows, refine=True)

    def score(posterior):
        mean = held.f + held.J @ (posterior.mean - posterior.weights)
        cov = held.J @ torch.linalg.inv(posterior.precision_matrix()) @ held.J.mT
        variances = cov.diagonal(dim1=1, dim2=2)
        return float(held.weights @ -problem.score.log_density(mean, variances, held.y))

    found = validation.tune_on_validation(problem)
    same_choice(found, naive_choice(fitted, problem, score))


@pytest.mark.parametrize("error", [0.0, 2.0])
def test_auto_keeps_a_good_last_layer_and_refits_a_bad_one(error):
    """The labels are drawn from the network; then its bias is spoilt."""
    fitted = fit("Categorical", "full")
    held = held_out(fitted)
    shift = torch.tensor([error, 0.0, 0.0], dtype=DOUBLE)
    spoilt = [replace(batch, f=batch.f + shift) for batch in held.rows]
    model = replace(fitted.linear_model, outputs=fitted.linear_model.outputs + shift)
    found = validation.tune_on_validation(
        tuning_problem(replace(fitted, linear_model=model), validation=spoilt)
    )
    assert found.is_refitted == bool(error)


@every_prior
@pytest.mark.parametrize(
    ("curvature", "refine"),
    [("ggn", True), ("ggn", False), ("ggn", "auto"), ("ef", False)],
)
@pytest.mark.parametrize("free", ["both", "prior", "noise"])
def test_best_score_with_noise(curvature, free, refine, structure, prior):
    given = {"temperature": 0.8, "sigma_noise": 0.6, "prior_precision": 0.5}
    fitted = fit("Gaussian", structure, prior, curvature=curvature, **given)
    held = held_out(fitted, weights=positive(30))
    options = {"free_prior": free != "noise", "free_noise": free != "prior"}
    problem = tuning_problem(fitted, validation=held.rows, refine=refine, **options)
    found = validation.tune_on_validation(problem)

    def score(posterior):
        return total_score(held, with_noise(posterior, free, held))

    expected = with_noise(naive_choice(fitted, problem, score), free, held)
    h = found.hyperparameters
    if free == "both":
        # δ, σ and the weights were chosen, and a new value follows a Student t
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
    """Return the candidate with other noise and the same ``δ/scale``."""
    ratio = posterior.prior_precision / posterior.scale
    noisy = posterior.replace(sigma_noise=torch.as_tensor(sigma, dtype=DOUBLE))
    return noisy.replace(prior_precision=ratio * noisy.scale)


def with_noise(posterior, free, held):
    """Set the noise: fixed, from ``ρ = δσ²T`` (σ⁴), or the best by a search."""
    if free == "prior":
        return posterior
    if free == "noise":
        ratio = posterior.prior_precision / posterior.scale
        temperature = posterior.hyperparameters.temperature
        order = posterior.curvature_order
        sigma = ((ratio / 0.5).mean() / temperature) ** (0.5 / order)
        return at_noise(posterior, sigma)
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
    kept, refitted = (
        validation.tune_on_validation(tuning_problem(fitted, refine=refine, **options))
        for refine in (False, True)
    )
    assert_equal(kept.prior_precision, torch.tensor(0.5, dtype=DOUBLE), 1e-12)
    assert not kept.is_refitted
    assert refitted.is_refitted


def test_path_starts_where_the_prior_leaves_the_network_alone():
    fitted = fit("Categorical", "full")
    held = held_out(fitted)
    problem = tuning_problem(fitted, validation=held.rows, refine=False)
    path = validation._path(problem)
    assert all(a > b for a, b in pairwise(path))
    strongest = total_score(held, kept_candidates(fitted, problem)[0])
    softmax = held.f.log_softmax(-1)
    alone = -float(softmax.gather(1, held.y.reshape(-1, 1)).sum())
    assert math.isclose(strongest, alone, rel_tol=1e-3)


@pytest.mark.parametrize("likelihood", ["Categorical", "Gaussian"])
def test_final_model_is_refitted_to_full_precision(likelihood):
    """Models along the path may be less precise than the returned model."""
    fitted = fit(likelihood, "kron")
    held = held_out(fitted)
    found = validation.tune_on_validation(
        tuning_problem(fitted, validation=held.rows, refine=True)
    )
    rho = (found.prior_precision / found.scale).expand_as(found.mean)
    _, slope, _ = fitted.linear_model.objective(found.mean, rho, torch.zeros_like(rho))
    assert slope.abs().max() < 1e-6


def test_validation_needs_rows():
    with pytest.raises(ValueError, match=r"there are none\. Pass X_val and y_val"):
        validation.tune_on_validation(tuning_problem(fit()))


def test_no_finite_score_is_an_error():
    fitted = fit("Categorical")
    held = held_out(fitted)
    rows = [replace(batch, f=batch.f * torch.nan) for batch in held.rows]
    with pytest.raises(ValueError, match="No prior precision has a finite score"):
        validation.tune_on_validation(tuning_problem(fitted, validation=rows))
