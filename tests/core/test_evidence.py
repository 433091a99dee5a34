"""Evidence of linear regression, compared with scikit-learn's BayesianRidge."""

import numpy as np
import pytest
from sklearn.linear_model import BayesianRidge

from sklaplace.core.evidence import VARIANCE_BOUNDS, most_probable


def problem(kind, seed):
    """Return centred features, centred targets of variance one, and weights."""
    rng = np.random.default_rng(seed)
    n, p = (40, 90) if kind == "wide" else (200, 30)
    X, weights = rng.standard_normal((n, p)), np.ones(n)
    if kind == "constant":
        X[:, 3] = 1.0
    if kind == "duplicated":
        X[:, 15:] = X[:, :15]
    if kind == "weights":
        weights = rng.integers(1, 4, n).astype(float)
    signal = 0.0 if kind == "no signal" else 1.0
    y = signal * X @ rng.standard_normal(p) / p**0.5 + rng.standard_normal(n)
    X = X - np.average(X, axis=0, weights=weights)
    y = y - np.average(y, weights=weights)
    return X, y / np.average(y**2, weights=weights) ** 0.5, weights


def log_evidence(X, y, weights, precision, variance):
    """Return the log marginal likelihood, from the determinant of the posterior."""
    root = np.sqrt(weights)
    X, y, n, p = X * root[:, None], y * root, weights.sum(), X.shape[1]
    posterior = precision * np.eye(p) + X.T @ X / variance
    w = np.linalg.solve(posterior, X.T @ y / variance)
    squares = ((y - X @ w) ** 2).sum() / variance + precision * (w @ w)
    log_det = np.linalg.slogdet(posterior)[1] - p * np.log(precision)
    return -0.5 * (squares + log_det + n * np.log(2 * np.pi * variance))


def spectrum(X, y, weights):
    """Return the arguments of `most_probable`, without eigenvalues that are zero."""
    root = np.sqrt(weights)
    U, s, _ = np.linalg.svd(X * root[:, None], full_matrices=False)
    projections = (s * (U.T @ (y * root))) ** 2
    return s**2, projections[:, None], np.array([weights @ y**2]), weights.sum()


KINDS = ["plain", "wide", "constant", "duplicated", "weights", "no signal"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_evidence_is_at_least_that_of_bayesian_ridge(kind, seed):
    X, y, weights = problem(kind, seed)
    found = most_probable(*spectrum(X, y, weights))
    ridge = BayesianRidge().fit(X, y, weights)
    variance = np.clip(1 / ridge.alpha_, *VARIANCE_BOUNDS)
    expected = log_evidence(X, y, weights, ridge.lambda_, variance)
    actual = log_evidence(X, y, weights, found.precision[0], found.variance[0])
    # rounding of a sum of about n + p numbers
    assert actual >= expected - 1e-12 * abs(expected) - 1e-9


@pytest.mark.parametrize("kind", ["plain", "weights"])
def test_most_probable_values_are_a_maximum(kind):
    X, y, weights = problem(kind, 0)
    found = most_probable(*spectrum(X, y, weights))
    best = np.log([found.precision[0], found.variance[0]])
    for step in (0.01, -0.01):
        for change in step * np.eye(2):
            near = log_evidence(X, y, weights, *np.exp(best + change))
            assert near < log_evidence(X, y, weights, *np.exp(best))


def test_columns_of_targets_are_independent():
    X, y, weights = problem("plain", 0)
    other = problem("plain", 1)[1]
    U, s, _ = np.linalg.svd(X, full_matrices=False)
    Y = np.column_stack([y, other])
    both = most_probable(s**2, (s[:, None] * (U.T @ Y)) ** 2, (Y**2).sum(0), 200.0)
    alone = most_probable(*spectrum(X, y, weights))
    np.testing.assert_allclose(both.precision[0], alone.precision[0])
    np.testing.assert_allclose(both.ridge[0], alone.precision[0] * alone.variance[0])


def test_exact_and_constant_targets_stay_within_bounds():
    X, _, weights = problem("plain", 0)
    for y, variance in ((X[:, 0], VARIANCE_BOUNDS[0]), (0 * X[:, 0], 1e-6)):
        found = most_probable(*spectrum(X, y, weights))
        assert found.variance[0] == variance
        assert np.isfinite(found.precision).all()
