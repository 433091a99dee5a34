"""The density posterior."""

import numpy as np
import pytest
import torch
from densities import check_finite, generator, posterior

from sklaplace.variational import Density
from sklaplace.variational.base import positive

pytestmark = pytest.mark.usefixtures("rng_untouched")


def log_density(z, heights, layers=()):
    """Return one weight's unnormalised log-density at the nodes, by the formula."""
    centres = np.linspace(-2.5, 2.5, len(heights))
    units = np.exp(-((z[:, None] - centres) ** 2) / 2)
    for mixing, offsets in layers:
        units = np.tanh(units @ mixing + offsets)
    return -(z**2) / 2 + units @ heights


def dense(heights, layers=(), n_nodes=16, n=1_000_001):
    """Return a fine grid, with the density and distribution function on the grid."""
    nodes = np.linspace(-4, 4, n_nodes)
    log_p = log_density(nodes, heights, layers)
    z = np.linspace(-4, 4, n)
    p = np.interp(z, nodes, np.exp(log_p - log_p.max()))
    areas = (p[1:] + p[:-1]) / 2 * (z[1] - z[0])
    below = np.concatenate([[0], areas.cumsum()])
    return z, p / below[-1], below / below[-1]


@pytest.mark.parametrize("setting", [None, 0, 1, "deep"])
def test_draws_are_those_of_a_dense_table(setting):
    found = posterior("density", setting)
    further = zip(found.mixing, found.offsets, strict=True)
    layers = [[x.detach().numpy() for x in layer] for layer in further]
    assert len(layers) == 2 * (setting == "deep")
    w, log_q = (x.detach().numpy() for x in found.sample(500, generator()))
    u = found.noise(500, generator()).numpy()
    location = found.location.detach().numpy()
    scale = positive(found.raw_scale).detach().numpy()
    for p in range(4):
        heights = found.heights[:, p].detach().numpy()
        z, density, below = dense(heights, layers, 12 if layers else 16)
        wanted = np.interp(u[:, p], below, z)
        # the floor raises the density by 1e-7 of its largest value, and moves
        # quantiles by that over the density; a table of 1e6 rows errs less
        at = np.interp(wanted, z, density)
        np.testing.assert_array_less(
            np.abs((w[:, p] - location[p]) / scale[p] - wanted), 1e-6 / at + 1e-9
        )
        wanted = np.log(at / scale[p])
        np.testing.assert_allclose(log_q[:, p], wanted, rtol=0, atol=1e-5 / at.min())


def test_extreme_quantiles_are_the_edges():
    found = posterior("density", 0)
    u = torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, 4)
    w, log_q = found.transform(u)
    reach = 4 * positive(found.raw_scale)
    torch.testing.assert_close(w[0], found.location - reach, rtol=1e-12, atol=0)
    torch.testing.assert_close(w[1], found.location + reach, rtol=1e-9, atol=0)
    assert log_q.isfinite().all()


def test_no_density_beyond_four_scales():
    found = posterior("density", 0)
    reach = 4.001 * positive(found.raw_scale)
    for w in (found.location - reach, found.location + reach):
        log_q = found.log_prob(w.detach())
        assert (log_q == -torch.inf).all()
        found.zero_grad()
        log_q.masked_fill(log_q.isinf(), 0).sum().backward()
        assert all(p.grad.isfinite().all() for p in found.parameters())
    inside = found.location + reach * (3.999 / 4.001)
    assert found.log_prob(inside.detach()).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("raw_scale", [-1e3, -50.0, 0.0, 30.0, 1e15])
@pytest.mark.parametrize("heights", [0.0, 30.0, 1e4, 1e15])
def test_finite_at_extreme_parameters(dtype, raw_scale, heights):
    location = torch.tensor([0.0, 1e-30, -1e6, 1e10], dtype=dtype)
    found = Density(location, torch.ones_like(location))
    signs = torch.randn(found.heights.shape, generator=generator(), dtype=dtype)
    with torch.no_grad():
        found.raw_scale.fill_(raw_scale)
        found.heights.copy_(heights * signs)
    check_finite(found)
    assert (found.variance() >= 0).all()
