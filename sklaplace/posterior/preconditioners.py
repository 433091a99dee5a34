"""Preconditioners: cheap approximate inverses of the curvature of a linear head.

Both are functions ``v -> M⁻¹ v`` of (P,) with ``M ≈ H + diag(ρ)``; conjugate
gradients need few iterations where ``M`` is close.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sklaplace.core.budget import BUDGET
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures.kron import Kron

# rows for each input that an output's block is made of, evenly spaced: a block of
# more is hardly better and takes as long to make as many iterations
ROWS_PER_INPUT = 8


def output_blocks(
    layout: Layout, features: Tensor, curvatures: Tensor, rho: Tensor
) -> Callable[[Tensor], Tensor] | None:
    """The blocks of each output of the head, exact but for the rows left out.

    Outputs differ in curvature by orders of magnitude where classes are told apart
    unequally well, and so may precisions, which one Kronecker product cannot follow.

    Parameters
    ----------
    layout : Layout
        Weight and, where there is one, bias of the head.
    features : Tensor of shape (N, i)
        Inputs of the head.
    curvatures : Tensor of shape (N, o)
        Second derivatives of the loss in what the head puts out.
    rho : Tensor of shape (P,)
        Added to the diagonal.

    Returns
    -------
    callable or None
        None if the blocks are too large or, by rounding, singular.

    Notes
    -----
    O(o·i³) time and o·i² numbers.
    """
    has_bias = len(layout.blocks) > 1
    n, o, i = len(features), curvatures.shape[1], features.shape[1] + has_bias
    if 3 * 8 * o * i**2 > BUDGET:
        return None
    stride = max(1, n // (ROWS_PER_INPUT * i))
    some = features[::stride]
    if has_bias:
        some = torch.cat([some, torch.ones_like(some[:, :1])], 1)
    shares = curvatures[::stride].to(some) * (n / len(some))
    blocks = torch.stack([some.T @ (some * column) for column in shares.T.unsqueeze(2)])
    blocks = blocks.double()
    blocks.diagonal(dim1=1, dim2=2).add_(_by_output(layout, rho))
    roots, failed = torch.linalg.cholesky_ex(blocks)
    if failed.any():
        return None
    inverses = torch.cholesky_inverse(roots).to(features.dtype)

    def apply(v: Tensor) -> Tensor:
        # a row times a symmetric matrix is quicker than the matrix times a column
        turned = (_by_output(layout, v).unsqueeze(1) @ inverses).squeeze(1)
        if not has_bias:
            return turned.flatten()
        return torch.cat([turned[:, :-1].flatten(), turned[:, -1]])

    return apply


def _by_output(layout: Layout, v: Tensor) -> Tensor:
    """One row of weights, and bias, for each output, (o, i)."""
    weight, *bias = layout.split(v)
    weight = weight.reshape(layout.blocks[0].factor_shape)
    return torch.cat([weight, bias[0].unsqueeze(1)], 1) if bias else weight


def kronecker(
    kron: Kron, rho: Tensor, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """A Kronecker structure under one precision, the mean of all."""
    eigenvalues = (kron.eigenvalues + rho.mean()).to(dtype)
    return lambda v: kron.from_basis(kron.to_basis(v) / eigenvalues)
