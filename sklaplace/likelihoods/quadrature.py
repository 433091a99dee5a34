"""Gauss-Hermite quadrature: expectations over Gaussian outputs."""

import numpy as np

Array = np.ndarray

# Nodes of a standard normal variable and their weights, which sum to one: exact for
# polynomials of degree 63.
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def exp_at_nodes(mean: Array, variance: Array) -> Array:
    """``exp(f)`` at the nodes k of Gaussians (...), as (..., k); infinite if large."""
    std = np.sqrt(np.maximum(variance, 0))
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(mean[..., None] + std[..., None] * NODES))
