"""Linear algebra of symmetric positive semidefinite matrices, singular ones included.

Governing identity: ``M = Q diag(e) Qᵀ`` with ``e >= 0``.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# columns of a Gram matrix per product: fewer are slower to multiply
GRAM_COLUMNS = 256

# rounding errors that outputs and derivatives of a network in half precision add up
MANY_ROUNDINGS = 8


def gram(x: Tensor) -> Tensor:
    """Return ``xᵀ x``, (p, p), of a matrix (n, p).

    Notes
    -----
    Wide matrices take little more than half of the 2·n·p² operations: blocks above
    the diagonal are copied.
    """
    p = x.shape[1]
    if p <= GRAM_COLUMNS:
        return x.T @ x
    product = x.new_empty(p, p)
    for start in range(0, p, GRAM_COLUMNS):
        stop = min(start + GRAM_COLUMNS, p)
        rows = product[start:stop, :stop]
        torch.mm(x[:, start:stop].T, x[:, :stop], out=rows)
        product[:start, start:stop] = rows[:, :start].T
    return product


def symmetric_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, clamped to be non-negative, and eigenvectors.

    Parameters
    ----------
    matrix : Tensor of shape (..., n, n)
        Symmetric and positive semidefinite up to rounding. Only its symmetric
        part counts.

    Returns
    -------
    eigenvalues : Tensor of shape (..., n)
        Ascending, never negative, float64.
    eigenvectors : Tensor of shape (..., n, n)
        One per column, float64.

    Notes
    -----
    O(n³). Always float64: the prior precision is compared with eigenvalues below
    1e-7 of the largest, which float32 does not resolve.
    """
    symmetric = (matrix.double() + matrix.double().mT) / 2
    eigenvalues, eigenvectors = torch.linalg.eigh(symmetric)
    return eigenvalues.clamp(min=0), eigenvectors


def wide_root_eigh(root: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and all eigenvectors of ``rootᵀ root``, (p, p).

    Parameters
    ----------
    root : Tensor of shape (n, p), n < p

    Returns
    -------
    eigenvalues : Tensor of shape (p,)
        Ascending, float64; the first p - n are zero.
    eigenvectors : Tensor of shape (p, p)
        One per column, float64.

    Notes
    -----
    O(n·p²): the product is not formed, so that eigenvalues are precise to ``eps²``
    times the largest, not to ``eps``.
    """
    n, p = root.shape
    basis, corner = torch.linalg.qr(root.double().mT, mode="complete")
    vectors, singular, _ = torch.linalg.svd(corner[:n])
    own = (basis[:, :n] @ vectors).flip(1)
    values = torch.cat([singular.new_zeros(p - n), singular.flip(0) ** 2])
    return values, torch.cat([basis[:, n:], own], 1)


def group_products(values: Tensor, matrices: Tensor) -> Tensor:
    """Return products of values (..., G·n), group by group, with matrices (G, n, n)."""
    rows = values.unflatten(-1, (len(matrices), -1))
    # `@` would copy the matrices for each row
    return torch.einsum("...gn,gnm->...gm", rows, matrices).flatten(-2)


def group_rows(g: Tensor, a: Tensor, basis: Tensor | None) -> Tensor:
    """Return ``Σᵣ g ⊗ (a Q)`` in each group, (b, k, G, o, i).

    Of ``g`` (b, k, r, G, o), ``a`` (b, r, G, i) and ``Q`` (G, i, i) or None, the
    identity.
    """
    inputs_first = a.shape[1] < g.shape[1] * g.shape[-1]  # r < k·o: fewer products
    if basis is not None and inputs_first:
        a = torch.einsum("brgi,gij->brgj", a, basis)
    rows = torch.einsum("bkrgo,brgi->bkgoi", g, a)
    if basis is None or inputs_first:
        return rows
    return torch.einsum("bkgoi,gij->bkgoj", rows, basis)


def all_finite(values: Tensor) -> bool:
    """Return whether no entry is infinite or NaN; one sum where that is so."""
    # as a number of Python, which is checked in one operation in place of five
    return math.isfinite(values.sum().item()) or bool(values.isfinite().all())


def agree(found: Tensor, expected: Tensor, precision: float = 0.0) -> bool:
    """Whether two tensors are equal up to rounding, relative to the largest entry.

    ``precision`` is the relative rounding error of what computed them, if known.
    """
    if found.shape != expected.shape:
        return False
    if not expected.numel():
        return True
    eps, single = torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps
    eps = max(eps, precision)
    allowed = max(10 * min(eps, single) ** 0.5, MANY_ROUNDINGS * eps)
    largest = max(float(torch.linalg.vector_norm(expected, torch.inf)), 1e-30)
    return float(torch.dist(found, expected, torch.inf)) <= allowed * largest


def solve_psd(matrix: Tensor, b: Tensor) -> Tensor:
    """Return ``matrix⁻¹ b``, (n,), with eigenvalues of at least 1e-15 the largest."""
    root, failed = torch.linalg.cholesky_ex(matrix)
    if not failed:
        return torch.cholesky_solve(b.unsqueeze(1), root).squeeze(1)
    values, vectors = symmetric_eigh(matrix)
    values = values.clamp(min=float(values[-1]) * 1e-15)
    return vectors @ ((vectors.T @ b) / values)


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
        Products of vectors with the matrix, and with an approximate inverse.
    b : Tensor of shape (n,)
        Right-hand side.
    max_iterations : int
        Steps at most until convergence; without it, one more is made. Each takes one
        product with the matrix.
    precision : float
        Norm of the residual relative to that of ``b``, both in the norm of the
        preconditioner.

    Returns
    -------
    x : Tensor of shape (n,)
        The last iterate.
    n_iterations : int or None
        None without convergence.
    """
    x, residual = torch.zeros_like(b), b
    direction = precondition(residual)
    first = rz = residual @ direction
    if not first > 0 and b.any():  # underflow or overflow
        return x, None
    for n in range(max_iterations + 1):
        if rz <= precision**2 * first:
            return x, n
        image = product(direction)
        curvature = direction @ image
        if not curvature > 0:  # indefinite by rounding, or NaN
            break
        step = rz / curvature
        x = x + step * direction
        residual = residual - step * image
        z = precondition(residual)
        rz, previous = residual @ z, rz
        direction = z + (rz / previous) * direction
    return x, None


def plain(value: Tensor) -> float | np.ndarray:
    """Return a float or an array."""
    return value.item() if value.ndim == 0 else value.cpu().numpy()
