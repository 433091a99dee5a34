"""Symmetric positive semidefinite matrices, with rounding and rank deficiency.

Governing identity: ``M = Q diag(e) Qᵀ`` with ``e >= 0``.
"""

import torch
from torch import Tensor


def symmetric_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, clamped to be non-negative, and eigenvectors.

    Parameters
    ----------
    matrix : Tensor of shape (..., n, n)
        Symmetric and positive semidefinite up to rounding. Only the symmetric
        part is read.

    Returns
    -------
    eigenvalues : Tensor of shape (..., n)
        Ascending, never negative, float64.
    eigenvectors : Tensor of shape (..., n, n)
        One per column, float64.

    Notes
    -----
    Costs O(n³). Always float64: eigenvalues below 1e-7 of the largest are what
    the prior precision competes with, and float32 has none of them right.
    """
    symmetric = (matrix.double() + matrix.double().mT) / 2
    eigenvalues, eigenvectors = torch.linalg.eigh(symmetric)
    return eigenvalues.clamp(min=0), eigenvectors


def all_finite(values: Tensor) -> bool:
    """Whether no entry is infinite or not a number, by one sum where that is so."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def psd_factor(matrix: Tensor) -> Tensor:
    """A factor ``F`` with ``F Fᵀ = matrix``, also where ``matrix`` is singular.

    Parameters
    ----------
    matrix : Tensor of shape (..., n, n)
        Symmetric and positive semidefinite up to rounding.

    Returns
    -------
    Tensor of shape (..., n, n)
        The symmetric square root, float64. It depends continuously on
        ``matrix`` (eigenvectors alone do not), so draws made with it are
        equal up to rounding however the rows are batched.
    """
    eigenvalues, eigenvectors = symmetric_eigh(matrix)
    return (eigenvectors * eigenvalues.sqrt().unsqueeze(-2)) @ eigenvectors.mT
