"""Hessians ``Λ`` (b, c, c) of the loss in the outputs, without writing them out.

For a thousand classes one row of ``Λ`` takes 8 MB. Where the outputs are the same
linear map ``M`` (c, o) of a layer for all rows, its curvature is made of
``MᵀΛM`` alone, and of that a structure needs a sum over rows or the diagonals.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sklaplace.core.linalg import gram

# classes above which their products are not worth double precision
MANY_CLASSES = 256

# M, or None for the identity
Map = Tensor | None


class OutputHessian(ABC):
    """One matrix ``Λ``, times a weight, for each of b rows.

    Attributes
    ----------
    n_rows, n_outputs, n_columns : int
        Sizes b, c and k.
    """

    n_rows: int
    n_outputs: int
    n_columns: int

    @abstractmethod
    def weighted(self, weights: Tensor | None) -> "OutputHessian":
        """The same with each row times its weight (b,)."""

    def scaled(self, weights: Tensor | None) -> "OutputHessian":
        """``√D Λ √D``, ``D`` the weights (b, c) of the outputs."""
        if weights is None:
            return self
        factor = self.factor()
        return Factored(factor * weights.sqrt().to(factor).unsqueeze(-1))

    @abstractmethod
    def double(self) -> "OutputHessian":
        """The same in float64."""

    @abstractmethod
    def factor(self) -> Tensor:
        """``S`` (b, c, k) with ``S Sᵀ = Λ``."""

    @abstractmethod
    def total(self) -> Tensor:
        """Sum over rows, (c, c)."""

    @abstractmethod
    def diagonals(self, m: Map) -> Tensor:
        """Diagonal of ``MᵀΛM`` for each row, (b, o)."""

    def moment(self, m: Map) -> Tensor:
        """``Σ MᵀΛM`` over rows, (o, o)."""
        total = self.total()
        return total if m is None else m.T @ total @ m

    def grams(self, m: Map) -> Tensor:
        """``MᵀΛM`` for each row, (b, o, o)."""
        g = self.rows(m)
        return g.mT @ g

    def rows(self, m: Map) -> Tensor:
        """``SᵀM``, (b, k, o)."""
        factor = self.factor().mT
        return factor if m is None else factor @ m


def _set_sizes(hessian: OutputHessian, b: int, c: int, k: int) -> None:
    for name, size in {"n_rows": b, "n_outputs": c, "n_columns": k}.items():
        object.__setattr__(hessian, name, size)


@dataclass(frozen=True)
class Factored(OutputHessian):
    """Given by its root ``S`` (b, c, k)."""

    root: Tensor

    def __post_init__(self) -> None:
        _set_sizes(self, *self.root.shape)

    def weighted(self, weights: Tensor | None) -> "Factored":
        """The same with each row times its weight (b,)."""
        if weights is None:
            return self
        return Factored(self.root * weights.sqrt().to(self.root).reshape(-1, 1, 1))

    def double(self) -> "Factored":
        """The same in float64."""
        return Factored(self.root.double())

    def factor(self) -> Tensor:
        """``S`` itself."""
        return self.root

    def total(self) -> Tensor:
        """Sum over rows, (c, c)."""
        flat = self.root.mT.flatten(0, 1)
        return gram(flat)

    def diagonals(self, m: Map) -> Tensor:
        """Diagonal of ``MᵀΛM`` for each row, (b, o)."""
        return (self.rows(m) ** 2).sum(1)


@dataclass(frozen=True)
class Constant(OutputHessian):
    """The identity for every row, times its weight.

    Attributes
    ----------
    roots : Tensor of shape (b,)
        Square roots of the weights.
    n_outputs : int
        Number c of outputs.
    """

    roots: Tensor
    n_outputs: int

    def __post_init__(self) -> None:
        _set_sizes(self, len(self.roots), self.n_outputs, self.n_outputs)

    def weighted(self, weights: Tensor | None) -> "Constant":
        """The same with each row times its weight (b,)."""
        if weights is None:
            return self
        return replace(self, roots=self.roots * weights.sqrt().to(self.roots))

    def double(self) -> "Constant":
        """The same in float64."""
        return replace(self, roots=self.roots.double())

    def _identity(self) -> Tensor:
        roots = self.roots
        return torch.eye(self.n_outputs, dtype=roots.dtype, device=roots.device)

    def factor(self) -> Tensor:
        """``√w I``, (b, c, c)."""
        return self.roots.reshape(-1, 1, 1) * self._identity()

    def total(self) -> Tensor:
        """``Σw I``, (c, c)."""
        return self._identity() * (self.roots**2).sum()

    def diagonals(self, m: Map) -> Tensor:
        """Diagonal of ``w MᵀM`` for each row, (b, o)."""
        squares = (self._identity() if m is None else m) ** 2
        return torch.outer(self.roots**2, squares.sum(0))


@dataclass(frozen=True)
class Diagonal(OutputHessian):
    """A diagonal matrix for every row: outputs with losses of their own.

    Attributes
    ----------
    roots : Tensor of shape (b, c)
        Square roots of the diagonal.
    """

    roots: Tensor

    def __post_init__(self) -> None:
        b, c = self.roots.shape
        _set_sizes(self, b, c, c)

    def weighted(self, weights: Tensor | None) -> "Diagonal":
        """The same with each row times its weight (b,)."""
        return self.scaled(None if weights is None else weights.unsqueeze(1))

    def scaled(self, weights: Tensor | None) -> "Diagonal":
        """The same with each entry times its weight, (b, c) or (b, 1)."""
        if weights is None:
            return self
        return Diagonal(self.roots * weights.sqrt().to(self.roots))

    def double(self) -> "Diagonal":
        """The same in float64."""
        return Diagonal(self.roots.double())

    def factor(self) -> Tensor:
        """The roots on the diagonal, (b, c, c)."""
        return self.roots.diag_embed()

    def total(self) -> Tensor:
        """Sum over rows, (c, c), float64."""
        return (self.roots.double() ** 2).sum(0).diag()

    def moment(self, m: Map) -> Tensor:
        """``Σ MᵀΛM`` over rows, (o, o), float64."""
        total = self.total()
        return total if m is None else m.double().T @ total @ m.double()

    def diagonals(self, m: Map) -> Tensor:
        """Diagonal of ``MᵀΛM`` for each row, (b, o)."""
        return self.roots**2 if m is None else self.roots**2 @ m**2

    def rows(self, m: Map) -> Tensor:
        """``SᵀM``, (b, k, o)."""
        return self.factor() if m is None else self.roots.unsqueeze(-1) * m


@dataclass(frozen=True)
class BlockDiagonal(OutputHessian):
    """Blocks on the diagonal: outputs in groups with losses of their own.

    Attributes
    ----------
    blocks : OutputHessian
        One matrix for each group of each row, row by row.
    n_blocks : int
        Number r of groups.
    """

    blocks: OutputHessian
    n_blocks: int

    def __post_init__(self) -> None:
        inner, r = self.blocks, self.n_blocks
        _set_sizes(self, inner.n_rows // r, r * inner.n_outputs, r * inner.n_columns)

    def weighted(self, weights: Tensor | None) -> "BlockDiagonal":
        """The same with each row times its weight (b,)."""
        if weights is None:
            return self
        of_blocks = weights.repeat_interleave(self.n_blocks)
        return replace(self, blocks=self.blocks.weighted(of_blocks))

    def scaled(self, weights: Tensor | None) -> "BlockDiagonal":
        """``√D Λ √D``, ``D`` the weights (b, c) of the outputs."""
        if weights is None:
            return self
        of_blocks = weights.reshape(-1, self.blocks.n_outputs)
        return replace(self, blocks=self.blocks.scaled(of_blocks))

    def double(self) -> "BlockDiagonal":
        """The same in float64."""
        return replace(self, blocks=self.blocks.double())

    @cached_property
    def _roots(self) -> Tensor:
        """Roots of the blocks, (b, r, K, j)."""
        roots = self.blocks.factor()
        return roots.reshape(self.n_rows, self.n_blocks, *roots.shape[1:])

    def factor(self) -> Tensor:
        """The roots on the diagonal, (b, r·K, r·j)."""
        roots = self._roots
        b, r, n, j = roots.shape
        places = torch.arange(r, device=roots.device)
        factor = roots.new_zeros(b, r, n, r, j)
        factor[:, places, :, places] = roots.movedim(1, 0)
        return factor.reshape(b, r * n, r * j)

    def total(self) -> Tensor:
        """Sum over rows, (c, c), float64."""
        roots = self._roots.double()
        total: Tensor = torch.block_diag(*torch.einsum("brkj,brlj->rkl", roots, roots))
        return total

    def moment(self, m: Map) -> Tensor:
        """``Σ MᵀΛM`` over rows, (o, o), float64."""
        total = self.total()
        return total if m is None else m.double().T @ total @ m.double()

    def diagonals(self, m: Map) -> Tensor:
        """Diagonal of ``MᵀΛM`` for each row, (b, o)."""
        if m is None:
            return self.blocks.diagonals(None).reshape(self.n_rows, -1)
        return (self.rows(m) ** 2).sum(1)

    def rows(self, m: Map) -> Tensor:
        """``SᵀM``, (b, k, o)."""
        if m is None:
            return self.factor().mT
        groups = m.unflatten(0, (self.n_blocks, -1))  # (r, K, o)
        return torch.einsum("brkj,rko->brjo", self._roots, groups).flatten(1, 2)


@dataclass(frozen=True)
class Softmax(OutputHessian):
    """``w (diag p - p pᵀ)`` of class probabilities.

    Attributes
    ----------
    p : Tensor of shape (b, c)
        Probabilities, float64: ``1 - p`` is what is left of a row of which the
        network is certain.
    weights : Tensor of shape (b,)
    dtype : torch.dtype
        Of the outputs, in which large products are taken.
    """

    p: Tensor
    weights: Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        b, c = self.p.shape
        _set_sizes(self, b, c, max(1, c - 1))

    def weighted(self, weights: Tensor | None) -> "Softmax":
        """The same with each row times its weight (b,)."""
        if weights is None:
            return self
        return replace(self, weights=self.weights * weights.to(self.weights))

    def double(self) -> "Softmax":
        """The same in float64."""
        return replace(self, dtype=torch.float64)

    def factor(self) -> Tensor:
        """Exact root with c - 1 columns, (b, c, c - 1).

        With ``q = √p``, ``diag p - p pᵀ = diag(q) (I - q qᵀ) diag(q)``, and the
        last c - 1 columns of the Householder reflection that sends the first
        axis to ``-q`` are an orthonormal basis of the complement of ``q``.
        A single class has no curvature, in one column of zeros.
        """
        if self.p.shape[-1] == 1:
            return torch.zeros_like(self.p, dtype=self.dtype).unsqueeze(-1)
        q = self.p.sqrt().to(self.dtype)
        first = torch.zeros_like(q)
        first[:, 0] = 1
        identity = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
        reflection = identity - torch.einsum(
            "bk,bj->bkj", (q + first) / (1 + q[:, :1]), q
        )
        roots = self.weights.sqrt().to(q).reshape(-1, 1, 1)
        return (roots * q.unsqueeze(-1) * reflection)[:, :, 1:]

    def total(self) -> Tensor:
        """``diag(Σ w p) - Pᵀ diag(w) P``, (c, c), float64.

        The diagonal is summed as ``w p (1 - p)``: taken as the difference it would
        be rounding alone where the network is certain. Of many classes the rest is
        summed in the dtype of the outputs: variances of a shift of all logits, which
        a softmax does not see, are then right only as far as the prior is strong.
        """
        roots = self.weights.sqrt().unsqueeze(1)
        dtype = torch.float64 if self.n_outputs <= MANY_CLASSES else self.dtype
        total = gram((self.p * roots).to(dtype)).neg_().double()
        total.diagonal().copy_((self.p * (1 - self.p)).T @ self.weights)
        return total

    def moment(self, m: Map) -> Tensor:
        """``Σ MᵀΛM`` over rows, (o, o), float64."""
        total = self.total()
        return total if m is None else m.double().T @ total @ m.double()

    def diagonals(self, m: Map) -> Tensor:
        """Variance of ``M`` under ``p``, times ``w``, for each row, (b, o)."""
        if m is None:
            return self._variances
        m = m.double()
        variances = (self.p @ m**2 - (self.p @ m) ** 2).clamp(min=0)
        return (variances * self.weights.unsqueeze(1)).to(self.dtype)

    @cached_property
    def _variances(self) -> Tensor:
        """``w p (1 - p)``, which weight and bias both ask for."""
        return (self.p * (1 - self.p) * self.weights.unsqueeze(1)).to(self.dtype)
