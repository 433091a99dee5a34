"""Full structure: all of ``H``, (P, P); the most faithful and the most expensive."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sklaplace import priors
from sklaplace.jacobians import Block, Jacobian
from sklaplace.layouts import Layout
from sklaplace.linalg import all_finite, symmetric_eigh
from sklaplace.structures.base import (
    Accumulator,
    Diagonalised,
    Projection,
    Remembered,
    RotatedProjection,
    Structure,
)
from sklaplace.structures.dual import Dual

# Rows of the Jacobian, as a share of the parameters, below which they are kept in
# place of ``H``.
DUAL_SHARE = 0.5


@dataclass(frozen=True)
class Full(Diagonalised):
    """Every correlation between the selected weights.

    A question at one prior precision takes a Cholesky factor. A scalar prior keeps
    the eigenvectors of ``H``, so that one decomposition answers for many; both are
    made when first needed.

    Attributes
    ----------
    hessian : Tensor of shape (P, P)
        ``H`` itself, float64.
    """

    hessian: Tensor
    priors = frozenset({"scalar", "layerwise", "diag"})

    @cached_property
    def _eigh(self) -> tuple[Tensor, Tensor]:
        return symmetric_eigh(self.hessian)

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of ``H``, (P,), ascending."""
        if "_eigh" in self.__dict__:
            return self._eigh[0]
        eigenvalues: Tensor = torch.linalg.eigvalsh(self.hessian)
        return eigenvalues.clamp(min=0)

    def __getstate__(self) -> dict[str, Any]:
        """What can be made again stays behind: it is as large as ``H``."""
        return {"layout": self.layout, "hessian": self.hessian}

    def rotated_blocks(self, jacobian: Jacobian) -> Iterator[Block]:
        """Rows ``J Q``, dense, in one block."""
        rows = jacobian.matmul(self._eigh[1].to(jacobian.dtype))
        yield Block(rows.unsqueeze(2))

    def unrotate(self, weights: Tensor) -> Tensor:
        """Coordinates (s, P) in the eigenbasis back to parameters."""
        return weights @ self._eigh[1].T

    def to_basis(self, weights: Tensor) -> Tensor:
        """Parameters (..., P) to coordinates in the eigenbasis."""
        return weights @ self._eigh[1]

    def squared_basis(self, values: Tensor) -> Tensor:
        """Diagonal of ``Q diag(values) Qᵀ``, (P,)."""
        return self._eigh[1] ** 2 @ values

    def dense(self) -> Tensor:
        """``H`` itself, (P, P)."""
        return self.hessian

    def _cholesky(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        delta = priors.expand(prior_precision, self.layout)
        # symmetrised, so that gradients are those of a symmetric matrix
        precision = scale * self.hessian + delta.diag()
        root: Tensor
        root, failed = torch.linalg.cholesky_ex((precision + precision.T) / 2)
        if failed:  # a prior too weak to lift what rounding has pushed below zero
            values, vectors = symmetric_eigh(precision)
            values = values.clamp(min=float(values[-1]) * 1e-16)
            triangle = torch.linalg.qr((vectors * values.sqrt()).T).R.T
            root = triangle * triangle.diagonal().sign()
        return root

    @cached_property
    def _roots(self) -> Remembered:
        return Remembered()

    def _root(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """``R`` (P, P) with ``R Rᵀ`` the posterior covariance, upper triangular."""

        def invert() -> Tensor:
            lower = self._cholesky(prior_precision, scale)
            identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
            inverse: Tensor = torch.linalg.solve_triangular(
                lower, identity, upper=False
            )
            return inverse.T

        return self._roots.get((prior_precision, scale), invert)

    def logdet(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """``log det(scale·H + diag δ)``, in nats."""
        # who differentiates asks many times; for others a Cholesky factor is cheaper
        many = prior_precision.requires_grad or scale.requires_grad
        if prior_precision.ndim == 0 and many:
            return super().logdet(prior_precision, scale)
        return 2 * self._cholesky(prior_precision, scale).diagonal().log().sum()

    def project(self, jacobian: Jacobian) -> Projection:
        """Rows in the eigenbasis; kept as they are for priors without one."""
        return _FullProjection(self, jacobian)

    def covariance(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """Functional covariance ``J (scale·H + diag δ)⁻¹ Jᵀ``, (b, c, c)."""
        rows = self._narrow_whiten(jacobian, prior_precision, scale)
        return (rows @ rows.mT).double()

    def functional_variance(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """Its diagonal, (b, c)."""
        if jacobian.is_shared:
            return self._head_variance(jacobian, prior_precision, scale)
        rows = self._narrow_whiten(jacobian, prior_precision, scale)
        return (rows * rows).sum(-1).double()

    def _narrow_whiten(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """`whiten` in the dtype of the rows, if it can hold them."""
        root = self._root(prior_precision, scale)
        dtype = jacobian.dtype
        key = prior_precision, scale, dtype
        rows = jacobian.matmul(self._narrow_roots.get(key, lambda: root.to(dtype)))
        if rows.dtype == torch.float64 or all_finite(rows):
            return rows
        return jacobian.double().matmul(root)

    @cached_property
    def _narrow_roots(self) -> Remembered:
        return Remembered()

    @cached_property
    def _head_covariances(self) -> Remembered:
        return Remembered()

    def _head_variance(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """Variances where all rows share their output gradients, (b, c).

        Then the covariance of an output's weights is one (i, i) matrix for all
        rows: i² operations a row and output in place of P².
        """
        g = jacobian.blocks[0].g

        def contract() -> Tensor:
            root = self._root(prior_precision, scale)
            outputs = g.double().reshape(g.shape[1], -1)  # (k, o)
            pieces = [
                torch.einsum(
                    "ko,oip->kip", outputs, piece.unflatten(0, (len(outputs.T), -1))
                )
                for piece in root.split(self.layout.sizes)
            ]
            rows = torch.cat(pieces, 1)  # (k, i or i + 1, P)
            covariances: Tensor = rows @ rows.mT
            return covariances

        key = prior_precision, scale, g
        covariances = self._head_covariances.get(key, contract)
        features = jacobian.features()
        wide = covariances.to(features.dtype)
        # one product for all outputs: (b, i) @ (i, k·i)
        reached = features @ wide.transpose(0, 1).flatten(1)
        found = (reached.unflatten(1, wide.shape[::2]) * features.unsqueeze(1)).sum(-1)
        variances: Tensor = found.double().clamp(min=0)
        return variances

    def whiten(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """Rows ``R`` (b, c, P) with ``R Rᵀ`` the covariance, also across rows."""
        rows: Tensor = jacobian.double().matmul(self._root(prior_precision, scale))
        return rows

    def sample(self, noise: Tensor, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Deviations from the mean, (s, P), from standard-normal noise (s, P)."""
        if prior_precision.ndim == 0:
            return super().sample(noise, prior_precision, scale)
        return noise @ self._root(prior_precision, scale).T

    def variance(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Marginal variances of the weights, (P,)."""
        return (self._root(prior_precision, scale) ** 2).sum(1)

    def effective_dimension(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Number of well-determined directions under a scalar prior, ()."""
        variances = self.variance(prior_precision, scale)
        return len(variances) - prior_precision * variances.sum()


@dataclass(frozen=True)
class _FullProjection(RotatedProjection):
    """Rows in the eigenbasis for scalar priors, as they are for others."""

    structure: Full

    def covariance(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Functional covariance, (b, c, c), float64."""
        if prior_precision.ndim == 0:
            return super().covariance(prior_precision, scale)
        return self.structure.covariance(self.jacobian, prior_precision, scale)

    def variance(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Its diagonal, (b, c), float64."""
        if prior_precision.ndim == 0:
            return super().variance(prior_precision, scale)
        return self.structure.functional_variance(self.jacobian, prior_precision, scale)


class FullAccumulator(Accumulator):
    """Sums ``rowsᵀ rows``, block pair by block pair, lower triangle only.

    Rows are kept as they come until there are too many of them for the dual form.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._hessian: Tensor | None = None
        self._kept: list[Jacobian] = []

    @staticmethod
    def n_bytes(layout: Layout, n_rows: int | None = None) -> int:
        """``H`` in float64, and three times as much to factorise it.

        In the dual form the rows, scaled and solved, and their products.
        """
        p = layout.n_parameters
        if n_rows is not None and n_rows < DUAL_SHARE * p:
            return 4 * 8 * n_rows * (p + n_rows)
        return 4 * 8 * p**2

    @staticmethod
    def row_elements(layout: Layout, n_columns: int) -> int:
        """Rows written out, twice; for a head the pairs of its inputs and outputs."""
        if layout.head is None:
            return 2 * n_columns * layout.n_parameters
        o, i = layout.blocks[0].factor_shape
        return o**2 + i**2

    def update(self, jacobian: Jacobian) -> None:
        """Add the products of the rows of one batch."""
        self._kept.append(jacobian)
        self._settle()

    def merge(self, other: Accumulator) -> None:
        """Add what another accumulator has seen."""
        assert isinstance(other, FullAccumulator)
        self._kept += other._kept
        if other._hessian is not None:
            hessian = self._writable(other._hessian.device)
            hessian += other._hessian
        self._settle()

    def decompose(self) -> Structure:
        """The matrix, or the rows that it is made of; factorised when asked."""
        if self._hessian is None:
            rows = [kept.dense().flatten(0, 1).double() for kept in self._kept]
            return Dual(self.layout, torch.cat(rows))
        lower = self._hessian.tril()
        return Full(self.layout, lower + lower.tril(-1).T)

    def _settle(self) -> None:
        """Turn kept rows into a matrix once that is the smaller form."""
        n_rows = sum(kept.n_rows * kept.n_columns for kept in self._kept)
        if self._hessian is None and n_rows < DUAL_SHARE * self.layout.n_parameters:
            return
        for kept in self._kept:
            self._add(kept)
        self._kept = []

    def _add(self, jacobian: Jacobian) -> None:
        starts = torch.tensor([0, *self.layout.sizes]).cumsum(0).tolist()
        for i, left in enumerate(jacobian.blocks):
            for j, right in enumerate(jacobian.blocks[: i + 1]):
                rows = slice(starts[i], starts[i + 1])
                columns = slice(starts[j], starts[j + 1])
                products = _products(left, right)
                self._writable(products.device)[rows, columns] += products

    def _writable(self, device: torch.device) -> Tensor:
        if self._hessian is None:
            p = self.layout.n_parameters
            self._hessian = torch.zeros(p, p, dtype=torch.float64, device=device)
        return self._hessian


def _products(left: Any, right: Any) -> Tensor:
    """``Σ leftᵀ right`` over rows and columns, (p, p'), float64.

    At one position the k columns are contracted first: ``(Σₖ g gᵀ) ⊗ (a aᵀ)``
    takes 2·b·p·p' operations instead of 2·b·k·p·p'.
    """
    grams: tuple[Tensor, Tensor] | None = left.grams(right)
    if grams is None:
        x, y = left.dense().flatten(0, 1), right.dense().flatten(0, 1)
        rows: Tensor = x.T @ y
        return rows.double()
    outputs, inputs = grams
    o, o_ = outputs.shape[1:]
    i, i_ = inputs.shape[1:]
    if left is not right:
        product = (outputs.flatten(1).T @ inputs.flatten(1)).double()
        return product.reshape(o, o_, i, i_).movedim(2, 1).reshape(o * i, o_ * i_)
    # of symmetric matrices, each pair of outputs and of inputs once
    outputs, which_output = _pairs(outputs)
    inputs, which_input = _pairs(inputs)
    product = (outputs.T @ inputs).double()
    full = product[which_output][:, :, which_input]  # (o, o, i, i)
    return full.movedim(2, 1).reshape(o * i, o * i)


def _pairs(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Lower triangles (b, n(n+1)/2), and where each entry (n, n) stands in them."""
    n = matrices.shape[-1]
    row, column = torch.tril_indices(n, n, device=matrices.device)
    where = torch.empty(n, n, dtype=torch.long, device=matrices.device)
    where[row, column] = where[column, row] = torch.arange(
        len(row), device=matrices.device
    )
    return matrices[:, row, column], where
