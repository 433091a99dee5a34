"""Symmetric positive semidefinite matrices, with rounding and rank deficiency.

Governing identity: ``M = Q diag(e) Qᵀ`` with ``e >= 0``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# columns of a Gram matrix that are made at a time: fewer are slower to multiply
GRAM_COLUMNS = 256


def gram(x: Tensor) -> Tensor:
    """``xᵀ x`` of (n, p), (p, p), symmetric.

    Notes
    -----
    Wide matrices take little more than half of the 2·n·p² operations: blocks above
    the diagonal are copied.
    """
    p = x.shape[1]
    if p <= GRAM_COLUMNS:
        return x.T @ x
    found = x.new_empty(p, p)
    for start in range(0, p, GRAM_COLUMNS):
        stop = min(start + GRAM_COLUMNS, p)
        rows = torch.mm(x[:, start:stop].T, x[:, :stop], out=found[start:stop, :stop])
        found[:start, start:stop] = rows[:, :start].T
    return found


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


def solve_psd(matrix: Tensor, b: Tensor) -> Tensor:
    """``matrix⁻¹ b``, (n,); what is zero but for rounding is kept from dividing."""
    root, failed = torch.linalg.cholesky_ex(matrix)
    if not failed:
        return torch.cholesky_solve(b.unsqueeze(1), root).squeeze(1)
    values, vectors = symmetric_eigh(matrix)
    values = values.clamp(min=float(values[-1]) * 1e-15)
    solved: Tensor = vectors @ ((vectors.T @ b) / values)
    return solved


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    b: Tensor,
    max_iterations: int,
    precision: float,
) -> tuple[Tensor, int | None]:
    """Solve ``product(x) = b`` for a positive definite matrix.

    Parameters
    ----------
    product, precondition : callable
        The matrix, and an approximate inverse of it.
    b : Tensor of shape (n,)
        Right-hand side.
    max_iterations : int
        Products to spend.
    precision : float
        Share of ``b`` that may remain, in the norm of the preconditioner.

    Returns
    -------
    x : Tensor of shape (n,)
        The solution, or how far it got.
    n_iterations : int or None
        None where it did not arrive.
    """
    x, residual = torch.zeros_like(b), b
    direction = precondition(residual)
    first = rz = residual @ direction
    if not first > 0 and b.any():  # beyond what the dtype holds
        return x, None
    for n in range(max_iterations + 1):
        if rz <= precision**2 * first:
            return x, n
        image = product(direction)
        bend = direction @ image
        if not bend > 0:  # rounding has made it indefinite, or it is no number
            break
        step = rz / bend
        x = x + step * direction
        residual = residual - step * image
        z = precondition(residual)
        rz, previous = residual @ z, rz
        direction = z + (rz / previous) * direction
    return x, None
