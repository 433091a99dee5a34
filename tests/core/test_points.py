import math

import pytest
import torch

from sklaplace.core.points import sobol_normals


@pytest.mark.parametrize("n_samples", [1, 2, 7, 100])
@pytest.mark.parametrize("dim", [1, 3, 200])
def test_draws_are_mirrored_and_reproducible(n_samples, dim):
    draws = sobol_normals(n_samples, dim, 5)
    assert draws.shape == (n_samples, dim)
    assert draws.dtype == torch.float64
    assert draws.isfinite().all()
    half = (n_samples + 1) // 2
    assert torch.equal(draws[half:], -draws[: n_samples - half])
    assert torch.equal(draws, sobol_normals(n_samples, dim, 5))
    assert not torch.equal(draws, sobol_normals(n_samples, dim, 6))


def test_draws_are_standard_normal():
    draws = sobol_normals(4096, 5, 0)
    identity = torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(draws.mT @ draws / 4096, identity, rtol=0, atol=1e-12)
    kurtosis = (draws**4).mean(0)
    torch.testing.assert_close(kurtosis, 3 * identity.sum(0), rtol=0.05, atol=0)


def test_draws_beyond_the_tabulated_dimensions():
    draws = sobol_normals(3, 21_202, 0)
    assert draws.shape == (3, 21_202)
    assert torch.equal(draws, sobol_normals(3, 21_202, 0))
    assert torch.equal(draws[2], -draws[0])
    assert abs(draws[0].std() - 1) < 5 / math.sqrt(2 * 21_202)


@pytest.mark.parametrize("point", [0.0, 1.0])
def test_draws_are_finite_where_quantiles_are_not(monkeypatch, point):
    def draw(engine, n, dtype):
        return torch.full((n, engine.dimension), point, dtype=dtype)

    monkeypatch.setattr(torch.quasirandom.SobolEngine, "draw", draw)
    assert sobol_normals(4, 2, 0).isfinite().all()


def test_draws_are_some():
    with pytest.raises(ValueError, match=r"n_samples=0 gives no draws. Use at least 1"):
        sobol_normals(0, 3, 0)
