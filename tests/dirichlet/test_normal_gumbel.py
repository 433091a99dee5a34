import math

import pytest
import torch
from cases import DOUBLE

from sklaplace.dirichlet.normal_gumbel import HIGHEST, LOWEST, NormalGumbel

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("rng_untouched")]

every_variance = pytest.mark.parametrize(
    "variance", [0.0, *(10.0 ** torch.arange(-3, 9.1, 0.5)).tolist()]
)


def one(variance):
    mean = torch.zeros(1, dtype=DOUBLE)
    return NormalGumbel(mean, torch.full_like(mean, variance))


def exact_minus_log(t, variance):
    """Return ``-log F`` by the trapezoidal rule over the narrower variable."""
    std = math.sqrt(variance)
    if variance < 1:
        z = torch.linspace(-12, 12, 2001, dtype=DOUBLE)
        log_density = -(z**2) / 2 - math.log(2 * math.pi) / 2
        minus_logs = (std * z - t.unsqueeze(1)).exp()
        log_above = (-torch.expm1(-minus_logs)).clamp(min=1e-300).log()
        log_above = torch.where(minus_logs < 1e-8, minus_logs.log(), log_above)
        log_below = -minus_logs
    else:
        z = torch.linspace(-6, 60, 6001, dtype=DOUBLE)
        log_density = -z - (-z).exp()
        x = (t.unsqueeze(1) - z) / std
        log_below, log_above = map(torch.special.log_ndtr, (x, -x))
    log_density = log_density + (z[1] - z[0]).log()
    below, above = ((log_density + v).logsumexp(1) for v in (log_below, log_above))
    return torch.where(above < -1, -torch.log1p(-above.exp()), -below)


@every_variance
def test_error_between_the_bounds(variance):
    found = one(variance)
    t = torch.lerp(found.lower, found.upper, torch.linspace(0, 1, 301, dtype=DOUBLE))
    exact = exact_minus_log(t, variance)
    errors = (found.minus_log(t) / exact - 1).abs()
    assert errors[(exact > 1e-3) & (exact < 2)].max() < 0.0025
    assert errors[exact < 2].max() < 0.01
    # of the probability itself
    assert ((-found.minus_log(t)).exp() - (-exact).exp()).abs().max() < 0.001
    ends = -exact[[0, -1]].log()
    assert abs(ends[0] - LOWEST) < 0.05
    assert abs(ends[1] - HIGHEST) < 0.02


@pytest.mark.parametrize("variance", [0.0, 0.1, 1.0, 3.0])
def test_far_tails_of_small_variances_are_exponential(variance):
    """The expected value is ``E[exp(-(t - f))]``, a log-normal mean, over e^200."""
    t = torch.tensor([20.0, 60.0, 200.0], dtype=DOUBLE)
    found = one(variance).minus_log(t).log()
    assert (found - (variance / 2 - t)).abs().max() < 0.02


@every_variance
def test_the_distribution_increases_from_end_to_end(variance):
    found = one(variance)
    std = math.sqrt(variance + 1)
    t = torch.linspace(-30, 100, 2001, dtype=DOUBLE) * std
    steps = found.minus_log(t).diff()
    assert (steps <= 0).all()
    assert (steps[t[1:].abs() < 5 * std] < 0).all()


@every_variance
@pytest.mark.parametrize("n", [2, 30, 1000])
def test_upper_end_is_that_of_the_largest_of_many(n, variance):
    found = one(variance)
    at_end = float(found.minus_log(found.upper_end(n)))
    assert at_end == pytest.approx(math.exp(-HIGHEST) / n, rel=0.02)
