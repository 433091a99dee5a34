"""Poisson-log-normal distribution, compared with sums over fine log-rate grids."""

import math

import numpy as np
import pytest
import torch
from scipy.special import gammaln, logsumexp, pdtr
from scipy.stats import norm, poisson

from sklaplace.likelihoods import counts
from sklaplace.likelihoods.regression import Poisson

LEVELS = np.array([0.05, 0.5, 0.95])
# mean and variance of the log-rate: rates near zero, ordinary, and very uncertain ones
ORDINARY = [(-800.0, 0.1), (-3.0, 4.0), (1.0, 0.0), (2.0, 1.0), (3.0, 9.0), (7.0, 1e-4)]
# log-rates, up to where double precision ends
LARGE = [20.0, 40.0, 50.0, 200.0, 700.0]


def sum_of_probabilities(y, mean, variance):
    """Return ``P(Y ≤ y)`` by the trapezoidal rule with 40,001 nodes."""
    z = np.linspace(-9, 9, 40_001)
    weights = norm.pdf(z) / norm.pdf(z).sum()
    return pdtr(y, np.exp(mean + math.sqrt(variance) * z)) @ weights


@pytest.mark.parametrize(("mean", "variance"), ORDINARY)
@pytest.mark.parametrize("y", [-1.0, 0.0, 1.0, 30.0, 1100.0])
def test_distribution_function(mean, variance, y):
    found = counts.cdf(*map(np.array, (y, mean, variance)))
    expected = sum_of_probabilities(y, mean, variance) if y >= 0 else 0.0
    assert abs(found - expected) < 1e-8


@pytest.mark.parametrize(("mean", "variance"), ORDINARY)
def test_quantiles_are_the_first_counts_that_reach_their_levels(mean, variance):
    found = counts.quantiles(np.array(mean), np.array(variance), LEVELS)
    assert (found == np.round(found)).all()
    for y, level in zip(found, LEVELS, strict=True):
        below = sum_of_probabilities(y - 1, mean, variance) if y else 0.0
        assert below < level <= sum_of_probabilities(y, mean, variance) + 1e-8


@pytest.mark.parametrize("mean", LARGE)
@pytest.mark.parametrize("variance", [1e-6, 0.1])
def test_quantiles_of_large_rates_are_those_of_log_normal_ones(mean, variance):
    """The Poisson distribution adds 1/rate to the variance of the log-rate."""
    found = counts.quantiles(np.array(mean), np.array(variance), LEVELS)
    expected = mean + math.sqrt(variance + math.exp(-mean)) * norm.ppf(LEVELS)
    np.testing.assert_allclose(np.log(found), expected, rtol=0, atol=1e-6)


def test_quantiles_beyond_double_precision_are_infinite():
    found = counts.quantiles(*map(np.array, ([800.0], [1.0], [0.5])))
    assert found == np.inf


@pytest.mark.parametrize("rate", [0.0, 1e-3, 7.0, 1e5, 9.9e7])
def test_quantiles_of_poisson_variables(rate):
    found = counts.poisson_quantiles(np.array(rate), LEVELS)
    assert (found == poisson.ppf(LEVELS, rate)).all()


@pytest.mark.parametrize("rate", [1.01e8, 1e12, 1e17])
def test_quantiles_of_large_poisson_variables(rate):
    """scipy's search returns NaN for some of these."""
    found = counts.poisson_quantiles(np.array(rate), LEVELS)
    error = pdtr(found, rate) - LEVELS
    assert (abs(error) < 1 / math.sqrt(rate) + 1e-8).all()


@pytest.mark.parametrize("rate", [3.0, 1e15, 1e30])
def test_draws_have_mean_and_variance_of_the_rate(rate):
    draws = counts.draw(np.full(10_000, rate), np.random.default_rng(0))
    z = (draws - rate) / math.sqrt(rate)
    assert abs(z.mean()) < 5 / 100
    assert abs(z.var() - 1) < 0.1


@pytest.mark.parametrize(
    ("mean", "variance", "y"),
    [
        (0.0, 1.0, 0.0),
        (0.0, 4.0, 500.0),
        (0.0, 1e-4, 30.0),
        (5.0, 1.0, 0.0),
        (0.0, 100.0, 0.0),
        (-3.0, 100.0, 1.0),
        (100.0, 1.0, 3.0),
        (70.0, 1.0, 0.0),
    ],
)
def test_log_probabilities(mean, variance, y):
    """The counts are near and far from the mean; the grid covers the integrand."""
    f = np.linspace(min(mean, 0.0) - 90, 40, 4_000_001)
    prior = -((f - mean) ** 2) / variance / 2 - math.log(2 * math.pi * variance) / 2
    with np.errstate(under="ignore"):
        terms = y * f - np.exp(f) - gammaln(y + 1) + prior
    expected = logsumexp(terms) + math.log(f[1] - f[0])
    found = counts.log_mass(*torch.tensor((y, mean, variance), dtype=torch.float64))
    assert abs(float(found) - expected) < 1e-7 * max(1, abs(expected))


@pytest.mark.parametrize("mean", LARGE)
def test_log_probabilities_of_large_counts(mean):
    """The reference is a normal density of the log-rate; the Jacobian is the count."""
    log_y, variance = mean + 0.3, 0.1
    y = torch.tensor(log_y, dtype=torch.float64).exp()
    found = counts.log_mass(y, *torch.tensor((mean, variance), dtype=torch.float64))
    expected = norm.logpdf(log_y, mean, math.sqrt(variance)) - log_y
    assert abs(float(found) - expected) < 1e-7


@pytest.mark.parametrize(
    ("mean", "variance"), [(-800.0, 0.01), (0.0, 100.0), (45.0, 0.01), (700.0, 0.01)]
)
def test_large_and_small_rates_have_finite_predictions(mean, variance):
    likelihood, generator = Poisson(), np.random.default_rng(0)
    outputs, variances = np.full((3, 1), mean), np.full((3, 1), variance)
    assert np.isfinite(likelihood.quantiles(outputs, variances, 1.0, LEVELS)).all()
    assert np.isfinite(likelihood.sample(outputs[..., None], 1.0, generator)).all()
    u = torch.tensor([[0.1], [0.5], [0.9]], dtype=torch.float64)
    assert likelihood.draw(torch.from_numpy(outputs), u).isfinite().all()
