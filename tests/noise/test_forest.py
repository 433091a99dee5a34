"""Quantiles of the leaves of the noise model's forest."""

import numpy as np
import pytest

from sklaplace.noise.forest import (
    HALF,
    HALF_OF_LEAF,
    QuantileForest,
    _leaf_quantiles,
)
from sklaplace.noise.interpolation import LEVELS, SCORES


@pytest.mark.parametrize("is_weighted", [False, True])
def test_quantiles_of_a_leaf_are_those_of_its_residuals(is_weighted):
    rng = np.random.default_rng(0)
    z = rng.standard_normal(200)
    weights = rng.integers(1, 4, 200) if is_weighted else np.ones(200, int)
    # two trees, whose leaves are the nodes 1, 3, 4 and 6, 7
    leaves = np.column_stack([rng.choice([1, 3, 4], 200), rng.choice([6, 7], 200)])
    found = _leaf_quantiles(leaves, 9, z, weights.astype(float))
    np.testing.assert_array_equal(found[[0, 2, 5, 8]], np.tile(SCORES, (4, 1)))
    for leaf in (1, 3, 4, 6, 7):
        members = (leaves == leaf).any(1)
        values = np.sort(np.repeat(z[members], weights[members]))
        n, total = len(values), weights.sum()
        quantiles = np.interp(LEVELS, np.arange(1, n + 1) / (n + 1), values)
        share = total / (total + HALF) * n / (n + HALF_OF_LEAF)
        expected = share * quantiles + (1 - share) * SCORES
        np.testing.assert_allclose(found[leaf], expected, atol=1e-10)


def test_quantiles_of_a_residual_do_not_depend_on_its_group():
    rng = np.random.default_rng(0)
    inputs, z = rng.standard_normal((300, 2)), rng.standard_normal(300)
    # the last two groups are empty
    weights, group = rng.uniform(0.5, 2, 300), rng.integers(3, size=300)
    _, quantiles = QuantileForest.fit(inputs, z, weights, group)
    members = group == 1
    z_changed = np.where(members, 9 * z, z)
    _, changed = QuantileForest.fit(inputs, z_changed, weights, group)
    np.testing.assert_array_equal(changed[members], quantiles[members])
    assert (changed[~members] != quantiles[~members]).any()
