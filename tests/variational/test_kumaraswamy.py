"""The Kumaraswamy posterior."""

import math

import numpy as np
import pytest
import torch
from densities import generator, set_kumaraswamy
from scipy.special import betaln, digamma

from sklaplace.variational import Kumaraswamy
from sklaplace.variational import kumaraswamy as module

pytestmark = pytest.mark.usefixtures("rng_untouched")

# a and b that double precision can hold in the usual formulas
A = torch.tensor([0.3, 1.0, 2.0, 40.0], dtype=torch.float64)
B = torch.tensor([0.7, 3.0, 1e4, 900.0], dtype=torch.float64)


def usual(a=A, b=B, dtype=torch.float64):
    """Return a posterior with given a and b on (−2, 2)."""
    zero = torch.zeros(len(a), dtype=dtype)
    found = Kumaraswamy(zero, torch.ones_like(zero), 2.0)
    set_kumaraswamy(found, a, b)
    return found


# Against the usual formulas


def test_log_prob_is_that_of_the_textbook():
    found = usual()
    w = found.sample(50, generator())[0].detach()
    x = (w / 2 + 1) / 2
    wanted = A.log() + B.log() + (A - 1) * x.log() + (B - 1) * torch.log1p(-(x**A))
    # log(1 − x^a) and with it b have lost digits where x^a is near one: 1e-12
    torch.testing.assert_close(
        found.log_prob(w).detach(), wanted - math.log(4), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("log_b", [2.9, 3.1, 6.8, 7.0])
def test_moments_are_those_of_the_textbook(log_b):
    """This includes the range where a series replaces the gamma functions."""
    a, b = A.numpy(), math.exp(log_b)
    first, second = (b * np.exp(betaln(1 + n / a, b)) for n in (1, 2))
    found = usual(A, torch.full_like(A, b))
    np.testing.assert_allclose(found.mean().detach(), 4 * first - 2, rtol=1e-9)
    wanted = 16 * (second - first**2)
    np.testing.assert_allclose(found.variance().detach(), wanted, rtol=1e-9)


@pytest.mark.parametrize("factor", [1, 1e6, 1e9, 1e12])
def test_entropy_is_that_of_the_textbook(factor):
    """This includes the range where a logarithm replaces the digamma function."""
    start = int(factor > 1)
    a, b = A.numpy()[start:], B.numpy()[start:] * factor
    wanted = (
        1 - 1 / b + (1 - 1 / a) * (digamma(b + 1) + np.euler_gamma) - np.log(a * b)
    ) + math.log(4)
    found = usual(torch.tensor(a), torch.tensor(b)).closed_form()[0]
    np.testing.assert_allclose(found.detach(), wanted, rtol=1e-9)


@pytest.mark.parametrize("log_b", [2.9, 3.1, 6.8, 7.0, 30.0])
@pytest.mark.parametrize("d", [0.003, 1.0, 7.0])
def test_gamma_functions_join(log_b, d):
    """Compare both sides of the switch to Stirling's series with integrals."""
    b = math.exp(log_b)
    found, more = (
        float(module._log_gamma_ratio(*torch.tensor([log_b, k], dtype=torch.float64)))
        for k in (d, d + 1)
    )
    # Γ(b + d + 2) = (b + d + 1) Γ(b + d + 1)
    assert found - more == pytest.approx(math.log1p(b + d), rel=1e-11)
    wanted = betaln(1 + b, d) - math.lgamma(d)
    # what rounding leaves of the difference of two logarithms of size b log b
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-15 * b * abs(math.log(b)))


def test_narrow_posteriors_have_a_b_beyond_floats():
    """``log x ≈ (log E − log b)/a`` has a Gumbel distribution with known moments."""
    location = torch.zeros(3, dtype=torch.float64)
    scale = torch.tensor([1e-2, 1e-4, 1e-6], dtype=torch.float64)
    found = Kumaraswamy(location, scale, 3.0)
    log_b = found._shape(torch.float64)[1]
    assert (log_b > 200).all()
    assert log_b.exp()[1:].isinf().all()
    # rounding of 1e-16 next to relative variances of (1e-6/3)² = 1e-13
    torch.testing.assert_close(
        found.variance().sqrt().detach(), scale, rtol=5e-3, atol=0
    )
    # entropy of a Gumbel variable of deviation σ: log σ √6/π + γ + 1
    wanted = (scale * math.sqrt(6) / math.pi).log() + np.euler_gamma + 1
    # x = m e^{...} is not quite linear in the Gumbel variable: γ/a
    torch.testing.assert_close(
        found.closed_form()[0].detach(), wanted, rtol=0, atol=0.01
    )
    log_q = found.sample(20_000, generator())[1]
    error = log_q.std(0) / 20_000**0.5
    assert ((-log_q.mean(0) - found.closed_form()[0]).abs() < 5 * error).all()


# Single precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_wherever_training_may_lead(dtype):
    logit, log_a = torch.cartesian_prod(
        torch.tensor([-1e30, -1e3, -90.0, -20.0, 0.0, 20.0, 90.0, 1e3, 1e30]),
        torch.tensor([-1e30, -50.0, -10.0, 0.0, 5.0, 15.0, 50.0, 1e30]),
    ).T
    found = usual(torch.ones(len(logit)), torch.ones(len(logit)), dtype)
    with torch.no_grad():
        found.logit_median.copy_(logit)
        found.log_a.copy_(log_a)
    check_finite(found)


def check_finite(found):
    """Check that draws, densities, gradients and moments are finite."""
    w, log_q = found.sample(1000, generator())
    for value in (w, log_q, *found.closed_form(), found.mean()):
        assert value.isfinite().all()
        found.zero_grad()
        value.sum().backward(retain_graph=True)
        assert found.log_a.grad.isfinite().all()
        assert found.logit_median.grad.isfinite().all()
    assert (w.abs() <= found.bound).all()
    assert (found.variance() >= 0).all()


def test_densities_stay_right_where_draws_round_to_a_bound():
    """With a = b = 0.1, 18 % of the draws round to a bound."""
    a = torch.full((1,), 0.1)
    w, log_q = usual(a, a, torch.float32).sample(50_000, generator())
    share = float((w == 2).float().mean())
    assert 0.1 < share < 0.3
    assert log_q[w == 2].isfinite().all()
    # −E[log q] is the entropy, although a fifth of the draws is where log_prob is −inf
    found = usual(a.double(), a.double())
    error = log_q.std().item() / 50_000**0.5
    assert abs(-log_q.mean().item() - found.closed_form()[0].item()) < 5 * error


# The rest


def test_log_prob_is_minus_infinity_from_the_bounds_on():
    w = torch.tensor([-2.5, -2.0, 2.0, 7.0], dtype=torch.float64)
    found = usual()
    log_q = found.log_prob(w)
    assert (log_q == -math.inf).all()
    log_q.masked_fill(log_q.isinf(), 0).sum().backward()
    assert found.log_a.grad.isfinite().all()


@pytest.mark.parametrize("location", [3.0, -3.0, 4.5])
def test_locations_have_to_be_within_the_bound(location):
    start = torch.tensor([0.0, location])
    message = rf"magnitude {abs(location):g}, .*bound=3\. Choose a larger bound, such"
    with pytest.raises(ValueError, match=message):
        Kumaraswamy(start, torch.full((2,), 0.1))


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("location", [-2.9, -1.0, 0.0, 0.5, 2.0])
def test_scales_to_start_with(location, scale):
    found = Kumaraswamy(
        torch.tensor([location], dtype=torch.float64),
        torch.tensor([scale], dtype=torch.float64),
    )
    # where the median and the deviation can be had together, they are
    limit = 0.5 * (3 - abs(location))
    # (and rounding of 1e-16 next to relative variances of (1e-6/3)² = 1e-13)
    rtol = 0.4 if scale > limit else 5e-3 if scale < 1e-5 else 1e-3
    assert found.variance().sqrt().item() == pytest.approx(scale, rel=rtol)
