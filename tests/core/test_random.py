import math

import numpy as np
import pytest
import torch
from cases import generator, normal
from conftest import global_rng_states
from scipy import stats

from sklaplace.core.random import (
    cached_sobol_normals,
    counter_uniforms,
    private_rng,
    row_hash,
    sobol_normals,
)

pytestmark = pytest.mark.usefixtures("rng_untouched")


def rows(n, *shape, dtype=torch.float32):
    return normal(n, *shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 5)])
def test_keys_belong_to_rows(shape, dtype):
    x = rows(50, *shape, dtype=dtype)
    keys = row_hash(x)
    order = torch.randperm(50, generator=generator(1))
    assert torch.equal(row_hash(x[order]), keys[order])
    assert torch.equal(torch.cat([row_hash(row) for row in x.split(7)]), keys)
    if dtype != torch.bool:
        assert len(keys.unique()) == 50


def test_every_part_of_a_row_counts():
    left, right = rows(4, 3), rows(4, 2)
    keys = row_hash({"left": left, "right": right})
    assert torch.equal(row_hash([left, right]), keys)
    assert torch.equal(row_hash({"right": right, "left": left}), keys)
    for part in (left, right):
        changed = part.clone()
        changed[2, 1] += 1
        whole = {"left": left, "right": right}
        whole["left" if part is left else "right"] = changed
        assert (row_hash(whole) != keys).tolist() == [False, False, True, False]
    assert (row_hash(left.flip(1)) != row_hash(left)).all()


@pytest.mark.parametrize(
    ("x", "key"),
    [
        (torch.arange(60, dtype=torch.uint8).reshape(3, 20), -3753109436274459814),
        (torch.arange(-30, 30).reshape(3, 20), 8811153604054724751),
        # of several blocks, and not contiguous
        (torch.arange(210_003.0).reshape(3, 70_001) / 64, -3656362227911777442),
        ((torch.arange(24.0).reshape(4, 3, 2) / 64).mT, 4250952304569543459),
    ],
    ids=["uint8", "int64", "blocks", "strided"],
)
def test_hashes_are_the_same_everywhere_and_leave_the_samples_alone(x, key):
    """Folds, draws and stored results of earlier versions depend on them."""
    before = x.clone()
    assert row_hash(x)[1].item() == key
    assert torch.equal(x, before)


def test_numbers_are_uniform_and_independent():
    u = counter_uniforms(row_hash(rows(400, 3)), 50).numpy()
    assert u.min() > 0
    assert u.max() < 1
    # of 20,000 numbers; the seeds are fixed
    assert stats.kstest(u.ravel(), "uniform").pvalue > 0.01
    assert abs(np.corrcoef(u.T) - np.eye(50)).max() < 5 / np.sqrt(400)


def test_seeds_differ():
    keys = row_hash(rows(5, 2))
    one, same, other = (counter_uniforms(keys, 3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_zero_has_no_sign():
    x = torch.zeros(2, 3)
    assert torch.equal(row_hash(x), row_hash(-x))


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
    with pytest.raises(ValueError, match=r"n_samples=0 is not positive"):
        sobol_normals(0, 3, 0)


class TestPrivateRng:
    def draw(self):
        numbers = np.random.rand(3)  # noqa: NPY002
        return [*numbers, *torch.rand(3).tolist()]

    # None goes on from the global state, and puts it back
    @pytest.mark.parametrize("seed", [0, None])
    def test_is_seeded_inside_and_put_back(self, seed):
        with private_rng(seed):
            first = self.draw()
        with private_rng(seed):
            assert self.draw() == first
        with private_rng(1):
            assert self.draw() != first

    def test_is_put_back_when_something_raises(self):
        with pytest.raises(KeyError), private_rng(0):
            raise KeyError(self.draw())

    def test_nests(self):
        with private_rng(0):
            before = global_rng_states()
            with private_rng(1):
                self.draw()
            assert global_rng_states() == before


def test_points_that_are_kept_have_gradients_after_inference_mode():
    weights = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        points = cached_sobol_normals(5, 3, 123_456)
    assert cached_sobol_normals(5, 3, 123_456) is points
    (points @ weights).sum().backward()
    torch.testing.assert_close(weights.grad, points.sum(0))
