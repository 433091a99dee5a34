"""Divergence of posteriors from priors."""

import math
import re

import pytest
import torch
from densities import CASES, KINDS, expectation, generator, posterior

from sklaplace.variational import (
    POSTERIORS,
    GaussianPrior,
    ScaleMixturePrior,
    UniformPrior,
)
from sklaplace.variational.divergence import (
    check_support,
    divergence,
    exact_divergence,
)

pytestmark = pytest.mark.usefixtures("rng_untouched")

N = 20_000


def terms(found, prior, n=N):
    """Return ``Σ (log q − log p)`` of each draw, (s,)."""
    w, log_q = (x.detach() for x in found.sample(n, generator()))
    return (log_q - prior.log_prob(w)).sum(-1)


WIDE = GaussianPrior(0.5), ScaleMixturePrior(1.0, 0.4, 0.1)
BOUNDED = UniformPrior(3.0), UniformPrior(5.0)


@pytest.mark.parametrize(
    ("name", "setting", "prior"),
    [
        (name, setting, prior)
        for name, setting in CASES
        for prior in (WIDE + BOUNDED if name == "kumaraswamy" else WIDE)
    ],
)
def test_draws_average_to_the_integral_and_closed_forms_are_it(name, setting, prior):
    found = posterior(name, setting)

    def integrand(w):
        log_q = found.log_prob(w)
        return torch.where(log_q.isfinite(), log_q - prior.log_prob(w), 0)

    values, integral = terms(found, prior), expectation(found, integrand).sum()
    error = values.std() / N**0.5
    assert abs(values.mean() - integral) < 5 * error
    exact = exact_divergence(found, prior)
    if exact is not None:
        torch.testing.assert_close(exact, integral, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_only_cheap_closed_forms_replace_draws(name):
    found, prior = posterior(name, 0), GaussianPrior()
    w, log_q = found.sample(1, generator())
    ignored = divergence(found, prior, w + 1, log_q + 1)
    is_same = bool(ignored == divergence(found, prior, w, log_q))
    assert is_same == (name == "gaussian")


@pytest.mark.parametrize("prior", [GaussianPrior(), ScaleMixturePrior()])
@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_finite_in_single_precision(name, prior):
    for location, scale in [(2.999, 1e-6), (-2.999, 2.0), (0.0, 1e-12), (1e-20, 1e3)]:
        start = torch.full((1000,), location)
        found = KINDS[name](start, torch.full_like(start, scale))
        w, log_q = found.sample(2, generator())
        kl = divergence(found, prior, w, log_q)
        kl.backward()
        gradients = [p.grad for p in found.parameters() if p.grad is not None]
        assert all(value.isfinite().all() for value in (kl, *gradients))


# Supports


@pytest.mark.parametrize("name", ["density", "gaussian", "quantile"])
def test_unbounded_posteriors_are_refused_by_a_bounded_prior(name):
    message = re.escape(
        f"posterior={name!r} has no bounds, but prior='uniform' is bounded, so their "
        "divergence is infinite. Choose posterior='kumaraswamy', or one of 'gaussian', "
        "'scale_mixture' as prior."
    )
    for found in (POSTERIORS[name], posterior(name)):
        with pytest.raises(ValueError, match=message):
            check_support(found, UniformPrior(3.0))


def test_a_larger_bound_than_the_prior_is_refused():
    found = posterior("kumaraswamy")
    message = "bound=3 exceeds prior='uniform' with bound=2, .* at most 2"
    with pytest.raises(ValueError, match=message):
        check_support(found, UniformPrior(2.0))
    w, log_q = found.sample(200, generator())
    assert divergence(found, UniformPrior(2.0), w, log_q) == math.inf


@pytest.mark.parametrize("name", KINDS)
def test_supports_that_fit(name):
    for prior in (GaussianPrior(), ScaleMixturePrior()):
        check_support(KINDS[name], prior)
        check_support(posterior(name), prior)
    check_support(posterior("kumaraswamy"), UniformPrior(3.0))
    check_support(POSTERIORS["kumaraswamy"], UniformPrior(2.0))
