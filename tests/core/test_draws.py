import numpy as np
import pytest
import torch
from scipy import stats

from sklaplace.core.draws import counter_uniforms, row_hash

pytestmark = pytest.mark.usefixtures("rng_untouched")


def rows(n, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, *shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 5)])
def test_keys_belong_to_rows(shape, dtype):
    x = rows(50, *shape, dtype=dtype)
    keys = row_hash(x)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
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


def test_numbers_are_uniform_and_independent():
    u = counter_uniforms(row_hash(rows(400, 3)), 50).numpy()
    assert u.min() > 0
    assert u.max() < 1
    # of 20,000 numbers; the seeds are fixed
    assert stats.kstest(u.ravel(), "uniform").pvalue > 0.01
    assert abs(np.corrcoef(u.T) - np.eye(50)).max() < 5 / np.sqrt(400)


def test_seeds_differ():
    keys = row_hash(rows(5, 2))
    assert torch.equal(
        counter_uniforms(keys, 3, seed=1), counter_uniforms(keys, 3, seed=1)
    )
    assert not torch.equal(
        counter_uniforms(keys, 3, seed=1), counter_uniforms(keys, 3, seed=2)
    )


def test_zero_has_no_sign():
    x = torch.zeros(2, 3)
    assert torch.equal(row_hash(x), row_hash(-x))
