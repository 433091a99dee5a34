"""Interpolation between quantiles, compared with numpy's interpolation of one row."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from sklaplace.likelihoods.quadrature import NODES
from sklaplace.noise.interpolation import (
    LEVELS,
    SCORES,
    Interpolation,
    empirical_distribution,
    interpolated,
)


def expected_values(values, x, y):
    """Return values (n, s) at which each row is interpolated on its own."""
    x, y = (np.broadcast_to(v, (len(values), v.shape[-1])) for v in (x, y))
    rows = [np.interp(*row) for row in zip(values, x, y, strict=True)]
    below = np.minimum(values - x[:, :1], 0)
    return np.array(rows) + below + np.maximum(values - x[:, -1:], 0)


@pytest.mark.parametrize("x_of_rows", [False, True])
@pytest.mark.parametrize("y_of_rows", [False, True])
def test_rows_are_interpolated_and_extrapolated(x_of_rows, y_of_rows):
    rng = np.random.default_rng(0)
    x, y = (
        np.sort(rng.standard_normal((40, 11) if of_rows else 11), axis=-1)
        for of_rows in (x_of_rows, y_of_rows)
    )
    values = 2 * rng.standard_normal((40, 30))
    values[:, :11] = x  # at the knots
    found = interpolated(values, x, y)
    np.testing.assert_allclose(found, expected_values(values, x, y), atol=1e-12)
    again = interpolated(found, y, x)
    np.testing.assert_allclose(again, values, atol=1e-10)


@pytest.mark.parametrize("of_rows", [False, True])
def test_knots_may_coincide(of_rows):
    x, y = np.repeat([0.0, 1.0, 3.0], 2), np.repeat([0.0, 2.0, 4.0], 2)
    values = np.array([[-1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0]])
    x = x[None] if of_rows else x
    found = interpolated(values, x, y)
    np.testing.assert_allclose(found, [[-1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])


def test_fixed_scores_are_an_affine_function_of_quantiles():
    scores = np.linspace(-4, 4, 23)
    quantiles = np.sort(np.random.default_rng(0).standard_normal((9, len(LEVELS))))
    found = Interpolation.at(scores)(torch.from_numpy(quantiles))
    expected = interpolated(np.tile(scores, (9, 1)), SCORES, quantiles)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_moments_of_normal_quantiles_are_those_of_the_normal_distribution():
    quantiles = torch.from_numpy(2 + 1.0 * SCORES)[None]
    mean, std = Interpolation.at(NODES).moments(quantiles)
    assert float(mean) == pytest.approx(2)
    assert float(std) == pytest.approx(1)


def test_probabilities_follow_ranks_in_each_group():
    values = np.array([3.0, 1.0, 2.0, 9.0, 8.0])
    weights, group = np.array([1.0, 2.0, 1.0, 1.0, 1.0]), np.array([0, 0, 0, 2, 2])
    probabilities, found, of_group = empirical_distribution(values, weights, group)
    np.testing.assert_array_equal(found, np.repeat([1.0, 2.0, 3.0, 8.0, 9.0], 2))
    np.testing.assert_array_equal(of_group, np.repeat([0, 0, 0, 2, 2], 2))
    expected = [1 / 5, 2 / 5, 3 / 5, 3 / 5, 4 / 5, 4 / 5, 1 / 3, 1 / 3, 2 / 3, 2 / 3]
    np.testing.assert_allclose(probabilities, expected)
    assert norm.cdf(SCORES) == pytest.approx(LEVELS)
