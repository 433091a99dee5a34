"""The linear function of the noise model, compared with separate fits."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import BayesianRidge

from sklaplace.core.evidence import VARIANCE_BOUNDS, most_probable
from sklaplace.noise.log_scale import CLIP, LogScale


def problem(kind, seed=0):
    """Return inputs, targets, weights and groups of samples."""
    rng = np.random.default_rng(seed)
    n, k = (45, 80) if kind == "wide" else (300, 20)
    inputs, weights = 3 + rng.standard_normal((n, k)), np.ones(n)
    if kind == "constant":
        inputs[:, 4] = 7.0
    if kind == "duplicated":
        inputs[:, 10:] = inputs[:, :10]
    if kind == "weights":
        weights = rng.uniform(0.5, 2, n)
    group = rng.integers(2 if kind == "two groups" else 5, size=n)
    target = 5 + inputs @ rng.standard_normal(k) / k**0.5 + rng.standard_normal(n)
    return inputs, target, weights, group


def standardised(inputs, weights):
    mean = np.average(inputs, axis=0, weights=weights)
    std = np.average((inputs - mean) ** 2, axis=0, weights=weights) ** 0.5
    return ((inputs - mean) / np.where(std > 1e-9, std, 1)).clip(-CLIP, CLIP)


def values_of_separate_fit(Z, target, weights, unit):
    """Return values (n,) of a dense fit to the samples of positive weight."""
    seen, root = weights > 0, np.sqrt(weights[weights > 0])
    mean = np.average(Z, axis=0, weights=weights)
    origin = np.average(target, weights=weights)
    F, y = (Z - mean)[seen] * root[:, None], (target - origin)[seen] / unit * root
    U, s, _ = np.linalg.svd(F, full_matrices=False)
    projections = (s * (U.T @ y)) ** 2
    best = most_probable(s**2, projections[:, None], np.array([y @ y]), weights.sum())
    w = np.linalg.solve(F.T @ F + best.ridge * np.eye(F.shape[1]), F.T @ y)
    return origin + unit * ((Z - mean) @ w)


KINDS = ["plain", "wide", "constant", "duplicated", "weights", "two groups"]


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_groups_are_those_of_separate_fits(kind):
    inputs, target, weights, group = problem(kind)
    of_all, logs = LogScale.fit(inputs, target, weights, group)
    Z = standardised(inputs, weights)
    mean = np.average(target, weights=weights)
    unit = np.average((target - mean) ** 2, weights=weights) ** 0.5
    low, high = target.min(), target.max()
    for g in np.unique(group):
        expected = values_of_separate_fit(Z, target, weights * (group != g), unit)
        expected = expected[group == g].clip(low, high)
        np.testing.assert_allclose(logs[group == g], expected, rtol=1e-7)
    expected = values_of_separate_fit(Z, target, weights, unit)
    found = of_all(torch.from_numpy(inputs))
    np.testing.assert_allclose(found, expected.clip(logs.min(), logs.max()), rtol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_close_to_those_of_bayesian_ridge(kind):
    inputs, target, weights, group = problem(kind)
    found = LogScale.fit(inputs, target, weights, group)[0]
    Z = standardised(inputs, weights)
    ridge = BayesianRidge(tol=1e-8, max_iter=1000).fit(Z, target, weights)
    expected = ridge.predict(Z).clip(*found.bounds)
    # priors of the precisions, and the smallest variance, change values slightly
    error = 10 * VARIANCE_BOUNDS[0] ** 0.5 * target.std()
    np.testing.assert_allclose(found(torch.from_numpy(inputs)), expected, atol=error)


def test_values_are_within_bounds_far_from_the_inputs():
    inputs, target, weights, group = problem("plain")
    found, logs = LogScale.fit(inputs, target, weights, group)
    far = found(torch.from_numpy(1e9 * inputs))
    assert far.min() >= logs.min()
    assert far.max() <= logs.max()
    assert target.min() <= logs.min() <= logs.max() <= target.max()
