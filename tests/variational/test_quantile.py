"""The quantile posterior."""

import numpy as np
import pytest
import torch
from densities import check_finite, posterior
from scipy.optimize import brentq
from scipy.stats import norm

from sklaplace.variational import Quantile
from sklaplace.variational.base import positive

pytestmark = pytest.mark.usefixtures("rng_untouched")


def parameters(found):
    """Return ``μ, σ (P,), v (K, P), s, c (K,)`` as arrays."""
    raw = (found.location, positive(found.raw_scale), positive(found.raw_heights))
    shared = (positive(found.raw_slopes), found.centres)
    return [x.detach().numpy() for x in (*raw, *shared)]


def quantile(e, v, s, c, layers=()):
    """Return the quantile function of one weight at one number, and its slope."""
    units = np.tanh(s * (e - c))
    slopes = s * (1 - units**2)
    for mixing, offsets in layers:
        units = np.tanh(mixing @ units - offsets)
        slopes = (1 - units**2) * (mixing @ slopes)
    return e + v @ units, 1 + v @ slopes


@pytest.mark.parametrize("setting", [0, 1, "deep"])
def test_density_is_that_of_the_formula(setting):
    """Compare with a solver for the noise, also far in the tails."""
    found = posterior("quantile", setting)
    location, scale, v, s, c = parameters(found)
    further = zip(found.raw_mixing, found.offsets, strict=True)
    layers = [
        (positive(raw).detach().numpy(), o.detach().numpy()) for raw, o in further
    ]
    assert len(layers) == 2 * (setting == "deep")
    for z in (-30.0, -2.0, 0.1, 5.0):
        w = torch.tensor(location + z * scale)
        log_q = found.log_prob(w).detach()
        for p in range(len(location)):
            own = v[:, p], s, c, layers
            e = brentq(
                lambda e, own=own, z=z: quantile(e, *own)[0] - z,
                z - 50,
                z + 50,
                xtol=1e-14,
            )
            wanted = norm.logpdf(e) - np.log(scale[p] * quantile(e, *own)[1])
            assert float(log_q[p]) == pytest.approx(wanted, rel=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("raw_scale", [-1e3, -50.0, 0.0, 30.0, 1e15])
@pytest.mark.parametrize("raw_height", [-1e3, 0.0, 1e3])
@pytest.mark.parametrize("raw_slope", [-1e3, 0.0, 1e3])
def test_finite_at_extreme_parameters(dtype, raw_scale, raw_height, raw_slope):
    location = torch.tensor([0.0, 1e-30, -1e6, 1e10], dtype=dtype)
    found = Quantile(location, torch.ones_like(location))
    with torch.no_grad():
        found.raw_scale.fill_(raw_scale)
        found.raw_heights.fill_(raw_height)
        found.raw_slopes.fill_(raw_slope)
    check_finite(found)
    assert not found.mean().isnan().any()
