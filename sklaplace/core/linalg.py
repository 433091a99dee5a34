"""Linear algebra of symmetric positive semidefinite matrices, possibly singular.

Governing identity: ``M = Q diag(e) Qᵀ`` with ``e >= 0``.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# columns of a Gram matrix per product; narrower blocks are slower
GRAM_COLUMNS = 256

# number of rounding errors that accumulate in half-precision outputs and derivatives
MANY_ROUNDINGS = 8


def gram(x: Tensor) -> Tensor:
    """Return ``xᵀ x``, (p, p), for a matrix (n, p).

    Notes
    -----
    For wide matrices, blocks above the diagonal are copied from blocks below. The
    product then takes slightly more than half of the 2·n·p² operations.
    """
    p = x.shape[1]
    if p <= GRAM_COLUMNS:
        return x.T @ x
    product = x.new_empty(p, p)
    for start in range(0, p, GRAM_COLUMNS):
        stop = min(start + GRAM_COLUMNS, p)
        rows = product[start:stop, :stop]  # a view, up to the diagonal
        torch.mm(x[:, start:stop].T, x[:, :stop], out=rows)
        product[:start, start:stop] = rows[:, :start].T
    return product


def symmetric_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, clamped to be non-negative, and eigenvectors.

    Parameters
    ----------
    matrix : Tensor of shape (..., n, n)
        Symmetric and positive semidefinite up to rounding. Only the symmetric
        part is used.

    Returns
    -------
    eigenvalues : Tensor of shape (..., n)
        Ascending, never negative, float64.
    eigenvectors : Tensor of shape (..., n, n)
        One per column, float64.

    Notes
    -----
    The cost is O(n³). The computation uses float64, because the prior precision is
    compared with eigenvalues below 1e-7 times the largest eigenvalue, which float32
    cannot resolve.
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
    The cost is O(n·p²). The product is not formed. Relative to the largest eigenvalue,
    eigenvalues therefore have errors of ``eps²`` instead of ``eps``. With the QR
    decomposition ``rootᵀ = basis @ corner``, only the first n rows of the corner are
    not zero, and their singular values are those of the root.
    """
    n, p = root.shape
    # the first n columns of the basis span the rows of the root
    basis, corner = torch.linalg.qr(root.double().mT, mode="complete")
    vectors, singular, _ = torch.linalg.svd(corner[:n])
    row_space = (basis[:, :n] @ vectors).flip(1)  # ascending eigenvalues
    values = torch.cat([singular.new_zeros(p - n), singular.flip(0) ** 2])
    return values, torch.cat([basis[:, n:], row_space], 1)


def group_products(values: Tensor, matrices: Tensor) -> Tensor:
    """Multiply values (..., G·n) by matrices (G, n, n), one matrix per group."""
    rows = values.unflatten(-1, (len(matrices), -1))
    # `@` would copy the matrices for each row
    return torch.einsum("...gn,gnm->...gm", rows, matrices).flatten(-2)


def group_rows(g: Tensor, a: Tensor, basis: Tensor | None) -> Tensor:
    """Return Jacobian rows ``Σᵣ g ⊗ (a Q)`` of each convolution group, (b, k, G, o, i).

    The sum is over r positions, for each of G groups. The shapes are ``g`` (b, k, r, G,
    o), ``a`` (b, r, G, i) and ``Q`` (G, i, i). If ``basis`` is None, ``Q`` is the
    identity. ``Q`` multiplies the inputs before or the sums afterwards, whichever takes
    fewer operations.
    """
    inputs_first = a.shape[1] < g.shape[1] * g.shape[-1]  # r < k·o: fewer products
    if basis is not None and inputs_first:
        a = torch.einsum("brgi,gij->brgj", a, basis)
    rows = torch.einsum("bkrgo,brgi->bkgoi", g, a)
    if basis is None or inputs_first:
        return rows
    return torch.einsum("bkgoi,gij->bkgoj", rows, basis)


def all_finite(values: Tensor) -> bool:
    """Return whether all entries are finite, at the cost of one sum if they are."""
    # a Python float is checked in one operation instead of five
    return math.isfinite(values.sum().item()) or bool(values.isfinite().all())


def agree(actual: Tensor, expected: Tensor, precision: float = 0.0) -> bool:
    """Return whether two tensors are equal up to rounding of the largest entry.

    ``precision`` is the relative rounding error of the tensors, if known; otherwise, it
    is that of their dtype. The largest difference may be ten times the square root of
    this error: about half of the digits must agree, since networks amplify rounding
    errors. In half precision, this would allow almost any values. The square root is
    therefore that of float32, or a few errors are allowed if these are larger.
    """
    if actual.shape != expected.shape:
        return False
    if not expected.numel():
        return True
    eps, single = torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps
    eps = max(eps, precision)
    allowed = max(10 * min(eps, single) ** 0.5, MANY_ROUNDINGS * eps)
    # if all expected entries are zero, only entries close to underflow are allowed
    largest = max(float(torch.linalg.vector_norm(expected, torch.inf)), 1e-30)
    return float(torch.dist(actual, expected, torch.inf)) <= allowed * largest


def solve_psd(matrix: Tensor, b: Tensor) -> Tensor:
    """Return ``matrix⁻¹ b``, (n,), for a positive semidefinite matrix.

    If the Cholesky decomposition fails, because the matrix is singular up to rounding,
    eigenvalues are clamped to 1e-15 of the largest.
    """
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
        Multiply a vector by the matrix and by an approximate inverse, respectively.
    b : Tensor of shape (n,)
        Right-hand side.
    max_iterations : int
        Maximum number of steps until convergence. Without convergence, one more step is
        made. Each step requires one product with the matrix.
    precision : float
        Required norm of the residual relative to the norm of ``b``. Both norms are
        defined by the preconditioner.

    Returns
    -------
    x : Tensor of shape (n,)
        The last iterate.
    n_iterations : int or None
        Number of iterations, or None without convergence.
    """
    x, residual = torch.zeros_like(b), b
    direction = precondition(residual)
    # squared norms of the residual, as defined by the preconditioner
    first = squared = residual @ direction
    if not first > 0 and b.any():  # underflow or overflow
        return x, None
    for n in range(max_iterations + 1):
        if squared <= precision**2 * first:
            return x, n
        image = product(direction)
        curvature = direction @ image
        if not curvature > 0:  # indefinite due to rounding, or NaN
            break
        step = squared / curvature
        x = x + step * direction
        residual = residual - step * image
        z = precondition(residual)
        squared, previous = residual @ z, squared
        # the new direction is conjugate to all earlier ones
        direction = z + (squared / previous) * direction
    return x, None


def as_number(value: Tensor) -> Tensor:
    """Return a tensor, reshaped from (1,) to () if needed."""
    return value.squeeze(0) if value.shape == (1,) else value


def plain(value: Tensor) -> float | np.ndarray:
    """Convert a tensor to a float or a numpy array."""
    return value.item() if value.ndim == 0 else value.cpu().numpy()
