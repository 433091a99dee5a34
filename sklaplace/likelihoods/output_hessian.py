"""Hessians ``Λ`` (c, c) of the loss with respect to the outputs, in closed form.

For a thousand classes, ``Λ`` occupies 8 MB per sample. If all samples share a linear
map ``M`` (c, o) from a layer to the outputs, the layer's curvature depends only on
``MᵀΛM``. Curvature structures need the sum of ``MᵀΛM`` over samples, or the diagonal of
each ``MᵀΛM``.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sklaplace.core.linalg import gram
from sklaplace.core.parallel import cached_property

# With more classes, products are summed in the dtype of the outputs.
_MANY_CLASSES = 256

# M, or None for the identity
Map = Tensor | None


class OutputHessian(ABC):
    """Weighted matrices ``Λ = S Sᵀ``, one for each of b samples.

    Attributes
    ----------
    n_samples, n_outputs, n_columns : int
        Numbers of samples b, outputs c, and columns k of ``S``.
    """

    n_samples: int
    n_outputs: int
    n_columns: int

    def weigh_samples(self, weights: Tensor | None) -> "OutputHessian":
        """Return ``wΛ`` for sample weights ``w`` (b,), or ``Λ`` without weights."""
        return self if weights is None else self._with_sample_weights(weights)

    def weigh_outputs(self, weights: Tensor | None) -> "OutputHessian":
        """Return ``√D Λ √D`` for output weights ``D`` (b, c), or ``Λ`` without weights.

        The weights are those of labels. They are equal for all outputs of a block, such
        as the logits of a label, so each block is multiplied by its weight.
        """
        return self if weights is None else self._with_output_weights(weights)

    @abstractmethod
    def _with_sample_weights(self, weights: Tensor) -> "OutputHessian":
        """Return ``wΛ`` for sample weights ``w`` (b,)."""

    def _with_output_weights(self, weights: Tensor) -> "OutputHessian":
        """Return ``√D Λ √D`` for output weights ``D`` (b, c)."""
        factor = self.factor()
        return Factored(factor * weights.sqrt().to(factor).unsqueeze(-1))

    @abstractmethod
    def double(self) -> "OutputHessian":
        """Return ``Λ`` in float64."""

    @abstractmethod
    def factor(self) -> Tensor:
        """Return ``S`` (b, c, k) with ``S Sᵀ = Λ``."""

    @abstractmethod
    def total(self) -> Tensor:
        """Return the sum of ``Λ`` over samples, (c, c)."""

    def moment(self, m: Map) -> Tensor:
        """Return the sum of ``MᵀΛM`` over samples, (o, o), in the dtype of `total`."""
        total = self.total()
        return total if m is None else m.to(total).T @ total @ m.to(total)

    def diagonals(self, m: Map) -> Tensor:
        """Return the diagonal of ``MᵀΛM`` per sample, (b, o)."""
        return (self.rows(m) ** 2).sum(1)

    def matrices(self, m: Map) -> Tensor:
        """Return ``MᵀΛM`` per sample, (b, o, o)."""
        g = self.rows(m)
        return g.mT @ g

    def rows(self, m: Map) -> Tensor:
        """Return the rows of the scaled Jacobian, ``SᵀM``, (b, k, o)."""
        factor = self.factor().mT
        return factor if m is None else factor @ m

    def products(self, m: Map, u: Tensor) -> Tensor:
        """Return ``MᵀΛM u``, (b, o, q), for ``u`` (b, o, q) or (1, o, q)."""
        rows = self.rows(m)
        return rows.mT @ (rows @ u)

    def _set_sizes(self, b: int, c: int, k: int) -> None:
        # subclasses are frozen, which forbids plain assignments
        for name, size in {"n_samples": b, "n_outputs": c, "n_columns": k}.items():
            object.__setattr__(self, name, size)


@dataclass(frozen=True)
class _SquareRoot(OutputHessian):
    """``Λ`` stored as square roots, with samples on the first axis."""

    sqrt: Tensor

    def __post_init__(self) -> None:
        b, c = self.sqrt.shape[:2]
        self._set_sizes(b, c, self.sqrt.shape[-1])

    def _with_sample_weights(self, weights: Tensor) -> "OutputHessian":
        """Multiply the Hessians by the samples' weights."""
        ones = [1] * (self.sqrt.ndim - 1)
        roots = weights.sqrt().to(self.sqrt).reshape(-1, *ones)
        return replace(self, sqrt=self.sqrt * roots)

    def double(self) -> "OutputHessian":
        """Return ``Λ`` in float64."""
        return replace(self, sqrt=self.sqrt.double())


@dataclass(frozen=True)
class Factored(_SquareRoot):
    """``Λ = S Sᵀ`` stored as the factor ``S``.

    Attributes
    ----------
    sqrt : Tensor of shape (b, c, k)
        Factor ``S``.
    """

    def factor(self) -> Tensor:
        """Return ``S`` (b, c, k) with ``S Sᵀ = Λ``."""
        return self.sqrt

    def total(self) -> Tensor:
        """Return the sum of ``Λ`` over samples, (c, c)."""
        return gram(self.sqrt.mT.flatten(0, 1))


@dataclass(frozen=True)
class Diagonal(_SquareRoot):
    """``Λ = diag(d)``, for a loss that is a sum over outputs.

    Attributes
    ----------
    sqrt : Tensor of shape (b, c)
        Square roots ``√d``.
    """

    def _with_output_weights(self, weights: Tensor) -> "Diagonal":
        return Diagonal(self.sqrt * weights.sqrt().to(self.sqrt))

    def factor(self) -> Tensor:
        """Return ``diag(√d)``, (b, c, c)."""
        return self.sqrt.diag_embed()

    def total(self) -> Tensor:
        """Return the sum of ``Λ`` over samples, (c, c), float64."""
        return (self.sqrt.double() ** 2).sum(0).diag()

    def diagonals(self, m: Map) -> Tensor:
        """Return the diagonal of ``MᵀΛM`` per sample, (b, o)."""
        return self.sqrt**2 if m is None else self.sqrt**2 @ m**2

    def rows(self, m: Map) -> Tensor:
        """Return the rows of the scaled Jacobian, ``SᵀM``, (b, k, o)."""
        return self.factor() if m is None else self.sqrt.unsqueeze(-1) * m


@dataclass(frozen=True)
class BlockDiagonal(OutputHessian):
    """Block-diagonal ``Λ``, for a loss that is a sum over r groups of outputs.

    Attributes
    ----------
    blocks : OutputHessian
        All b·r blocks. The blocks of each sample are contiguous.
    n_blocks : int
        Number of groups, r.
    """

    blocks: OutputHessian
    n_blocks: int

    def __post_init__(self) -> None:
        inner, r = self.blocks, self.n_blocks
        self._set_sizes(inner.n_samples // r, r * inner.n_outputs, r * inner.n_columns)

    def _with_sample_weights(self, weights: Tensor) -> "BlockDiagonal":
        block_weights = weights.repeat_interleave(self.n_blocks)
        return replace(self, blocks=self.blocks.weigh_samples(block_weights))

    def _with_output_weights(self, weights: Tensor) -> "BlockDiagonal":
        block_weights = weights.reshape(-1, self.blocks.n_outputs)
        return replace(self, blocks=self.blocks.weigh_outputs(block_weights))

    def double(self) -> "BlockDiagonal":
        """Return ``Λ`` in float64."""
        return replace(self, blocks=self.blocks.double())

    @cached_property
    def _factors(self) -> Tensor:
        """Return the factors of the r blocks of each sample, (b, r, K, j).

        A block has K outputs, and its factor has j columns.
        """
        factors = self.blocks.factor()
        return factors.reshape(self.n_samples, self.n_blocks, *factors.shape[1:])

    def factor(self) -> Tensor:
        """Return the block-diagonal ``S``, (b, r·K, r·j), for r blocks (K, j)."""
        blocks = self._factors.movedim(1, -1)  # (b, K, j, r)
        # the axis of blocks becomes two, one for rows and one for columns: (b, r, K, r,
        # j), with zeros unless both are the same block
        return blocks.diag_embed(dim1=1, dim2=3).flatten(3).flatten(1, 2)

    def total(self) -> Tensor:
        """Return the sum of ``Λ`` over samples, (c, c), float64."""
        factors = self._factors.double()  # (b, r, K, j), with Λ = S Sᵀ in each block
        return torch.block_diag(*torch.einsum("brkj,brlj->rkl", factors, factors))

    def diagonals(self, m: Map) -> Tensor:
        """Return the diagonal of ``MᵀΛM`` per sample, (b, o)."""
        if m is None:
            return self.blocks.diagonals(None).reshape(self.n_samples, -1)
        return super().diagonals(m)

    def rows(self, m: Map) -> Tensor:
        """Return the rows of the scaled Jacobian, ``SᵀM``, (b, k, o).

        ``S`` is the factor of ``Λ``, and ``m`` is M (c, o), or None for the identity.
        """
        if m is None:
            return self.factor().mT
        groups = m.unflatten(0, (self.n_blocks, -1))  # (r, K, o)
        return torch.einsum("brkj,rko->brjo", self._factors, groups).flatten(1, 2)


@dataclass(frozen=True)
class Softmax(OutputHessian):
    """``Λ = w (diag p - p pᵀ)`` for class probabilities ``p``.

    Attributes
    ----------
    p : Tensor of shape (b, c)
        Probabilities, float64. In float32, ``p (1 - p)`` vanishes for confident
        predictions.
    weights : Tensor of shape (b,)
        Weights ``w``.
    dtype : torch.dtype
        Dtype of the outputs, in which large products are also computed.
    """

    p: Tensor
    weights: Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        b, c = self.p.shape
        self._set_sizes(b, c, max(1, c - 1))

    def _with_sample_weights(self, weights: Tensor) -> "Softmax":
        return replace(self, weights=self.weights * weights.to(self.weights))

    def double(self) -> "Softmax":
        """Return ``Λ`` in float64."""
        return replace(self, dtype=torch.float64)

    def factor(self) -> Tensor:
        """Return an exact factor with c - 1 columns, (b, c, c - 1).

        With ``q = √p``, ``diag p - p pᵀ = diag(q) (I - q qᵀ) diag(q)``. A Householder
        reflection maps the first unit vector to ``-q``. Its last c - 1 columns are an
        orthonormal basis of the orthogonal complement of ``q``. For a single class, the
        factor is a column of zeros.
        """
        if self.p.shape[-1] == 1:
            return torch.zeros_like(self.p, dtype=self.dtype).unsqueeze(-1)
        q = self.p.sqrt().to(self.dtype)  # unit vectors (b, c)
        identity = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
        # The reflection is I - (q + e) (q + e)ᵀ / (1 + q₁), where e = (1, 0, …) is the
        # first unit vector. Only the first column needs the last e, and is dropped.
        ratios = (q + identity[0]) / (1 + q[:, :1])
        reflection = identity - torch.einsum("bk,bj->bkj", ratios, q)
        scales = self.weights.sqrt().to(q).reshape(-1, 1, 1)
        return (scales * q.unsqueeze(-1) * reflection)[:, :, 1:]

    def total(self) -> Tensor:
        """Return ``diag(Σ w p) - Pᵀ diag(w) P``, (c, c), float64.

        The diagonal is computed as a sum of ``w p (1 - p)``, because the difference
        loses all digits for confident predictions. With many classes, the off-diagonal
        entries are summed in the dtype of the outputs. The variance of a shift common
        to all logits is then accurate only under a strong prior. The softmax does not
        depend on this shift.
        """
        scales = self.weights.sqrt().unsqueeze(1)
        dtype = torch.float64 if self.n_outputs <= _MANY_CLASSES else self.dtype
        total = gram((self.p * scales).to(dtype)).neg_().double()  # gram(A) is AᵀA
        total.diagonal().copy_((self.p * (1 - self.p)).T @ self.weights)
        return total

    def diagonals(self, m: Map) -> Tensor:
        """Return ``w`` times the variances of columns of ``M`` under ``p``, (b, o)."""
        if m is None:
            variances = self.p * (1 - self.p)
        else:
            m = m.double()
            variances = (self.p @ m**2 - (self.p @ m) ** 2).clamp(min=0)
        return (variances * self.weights.unsqueeze(1)).to(self.dtype)

    def matrices(self, m: Map) -> Tensor:
        """Return ``MᵀΛM`` per sample, (b, o, o).

        Each row of ``Λ`` sums to zero, so the diagonal follows from the other entries.
        The formula ``w p (1 - p)`` would lose digits.
        """
        if m is not None:
            return super().matrices(m)
        weighted_p = self.p * self.weights.neg()[:, None]  # -w p
        matrices = weighted_p[:, None] * self.p[:, :, None]  # -w p pᵀ, (b, c, c)
        # changes of this view of the diagonal change the matrices
        diagonal = matrices.diagonal(dim1=1, dim2=2).zero_()
        diagonal.copy_(matrices.sum(1).neg_())
        return matrices.to(self.dtype)

    def products(self, m: Map, u: Tensor) -> Tensor:
        """Return ``MᵀΛM u``, (b, o, q), for ``u`` (b, o, q) or (1, o, q), in O(b·c·q).

        Adding a constant to ``u`` does not change ``Λ u``. For ``p`` close to one,
        ``p ∘ u - p pᵀu`` is a difference of large terms. To avoid this difference, the
        entry of the most probable class is first subtracted from ``u``.
        """
        u = u if m is None else m.to(u) @ u  # (b or 1, c, q)
        p = self.p.to(self.dtype).unsqueeze(2)  # (b, c, 1)
        most_probable = p.argmax(1, keepdim=True)
        u = u - u.expand(len(p), -1, -1).take_along_dim(most_probable, 1)
        product = p * u  # in place from here on, to save memory
        product -= p * product.sum(1, keepdim=True)
        product *= self.weights.to(p).reshape(-1, 1, 1)  # w (p ∘ u - p pᵀu)
        return product if m is None else m.to(u).T @ product
