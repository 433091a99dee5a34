"""The Gaussian of SWAG, compared with its closed form."""

import pytest
import torch
from cases import generator

from sklaplace.curvature.descent import WeightMoments
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.posterior.swag import SWAGPosterior

pytestmark = pytest.mark.usefixtures("rng_untouched")
P, K = 4, 3


@pytest.fixture(scope="module")
def posterior():
    layout = Layout((BlockSpec("weight", (P,)),))
    moments = WeightMoments(torch.ones(P, dtype=torch.float64), K)
    for vector in torch.randn(6, P, generator=generator(0), dtype=torch.float64):
        moments.update(vector)
    deviations = torch.stack([*moments.deviations])
    return SWAGPosterior(moments.mean, moments.variance, deviations, layout)


def covariance(posterior):
    """Return ``½ diag(v) + ½ D Dᵀ / (K - 1)``, (P, P)."""
    D = posterior.deviations.T
    return posterior.diagonal.diag() / 2 + D @ D.T / (2 * (K - 1))


def test_draws_are_those_of_equation_1(posterior):
    noise = generator(3)
    z1 = torch.randn(5, P, generator=noise, dtype=torch.float64)
    z2 = torch.randn(5, K, generator=noise, dtype=torch.float64)
    found = posterior.sample(5, generator(3))
    for n in range(5):
        single = 0.5**0.5 * posterior.diagonal.sqrt() * z1[n]
        shared = posterior.deviations.T @ z2[n] / (2 * (K - 1)) ** 0.5
        torch.testing.assert_close(found[n], posterior.mean + single + shared)
    assert torch.equal(posterior.sample(5, random_state=3), found)


def test_draws_have_the_moments_of_the_gaussian(posterior):
    n = 200_000
    draws, cov = posterior.sample(n, generator(1)), covariance(posterior)
    errors = (cov.diagonal() / n).sqrt()
    assert ((draws.mean(0) - posterior.mean).abs() < 5 * errors).all()
    # Var of a sample covariance: (C_ij² + C_ii C_jj) / n
    errors = ((cov**2 + torch.outer(cov.diagonal(), cov.diagonal())) / n).sqrt()
    assert ((draws.T.cov() - cov).abs() < 5 * errors).all()


def test_variances_are_the_diagonal(posterior):
    expected = covariance(posterior).diagonal()
    torch.testing.assert_close(posterior.variance(), expected)


def test_shown_in_one_line(posterior):
    assert repr(posterior) == "SWAGPosterior(4 weights, rank 3)"
