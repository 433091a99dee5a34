"""Gauss-Hermite quadrature: expectations over Gaussian outputs."""

import numpy as np

Array = np.ndarray

# Nodes for a standard normal variable, and weights that sum to one. The rule is exact
# for polynomials up to degree 63.
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def exp_at_nodes(mean: Array, variance: Array) -> Array:
    """Return ``exp(f)`` at k nodes of each Gaussian, (..., k), or inf on overflow."""
    std = np.sqrt(np.maximum(variance, 0))
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(mean[..., None] + std[..., None] * NODES))
