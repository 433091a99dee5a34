"""Full structure: all of ``H``, (P, P); the most faithful and the most expensive."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.linalg import all_finite, symmetric_eigh
from sklaplace.curvature import priors
from sklaplace.curvature.blocks import Block
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures.base import (
    Accumulator,
    Diagonalised,
    LastCallCache,
    Projection,
    RotatedProjection,
    Structure,
)
from sklaplace.curvature.structures.dual import Dual

# Rows of the Jacobian, as a share of the parameters, below which they are kept in
# place of ``H``.
DUAL_SHARE = 0.5
# Largest eigenvalue of the curvature over the smallest prior precision for which rows
# of float32 are multiplied in float32: variances lose eps times the root of it.
MAX_CONDITION = 1e6

# Eigenvalues of a Hessian that rounding in double precision may have pushed below
# zero, as a share of the largest.
ROUNDING = 1e-10
INDEFINITE = (
    "The exact Hessian is not positive definite under this prior precision: its "
    "smallest eigenvalue is {:.3g}, so the weights are no minimum of the loss. Use "
    "curvature='ggn', which always is, or a larger prior_precision, such as the weight "
    "decay that the network was trained with."
)


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
    is_semidefinite : bool
        Whether negative eigenvalues can only be rounding. Where they are not, the
        prior has to make up for them.
    """

    hessian: Tensor
    is_semidefinite: bool = True
    kind = "full"
    priors = frozenset({"scalar", "layerwise", "diag"})

    @cached_property
    def _eigh(self) -> tuple[Tensor, Tensor]:
        if self.is_semidefinite:
            return symmetric_eigh(self.hessian)
        values, vectors = torch.linalg.eigh(self.hessian)
        return values, vectors

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of ``H``, (P,), ascending."""
        if "_eigh" in self.__dict__:
            return self._eigh[0]
        eigenvalues: Tensor = torch.linalg.eigvalsh(self.hessian)
        return eigenvalues.clamp(min=0) if self.is_semidefinite else eigenvalues

    def __getstate__(self) -> dict[str, Any]:
        """What can be made again stays behind: it is as large as ``H``."""
        names = "layout", "hessian", "is_semidefinite"
        return {name: getattr(self, name) for name in names}

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

    def scaled(self, factor: Tensor) -> "Full":
        """``factor·H``."""
        return Full(self.layout, factor * self.hessian, self.is_semidefinite)

    def product(self, vector: Tensor) -> Tensor:
        """``H v``, (P,)."""
        return self.hessian @ vector

    def solve(self, vector: Tensor, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """``(scale·H + diag δ)⁻¹ v``, (P,)."""
        root = self._root(prior_precision, scale)
        return root @ (root.T @ vector)

    def resume(self, accumulator: Accumulator) -> None:
        """The matrix."""
        accumulator.add_matrix(self.hessian, is_semidefinite=self.is_semidefinite)

    def _cholesky(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        delta = priors.expand(prior_precision, self.layout)
        # symmetrised, so that gradients are those of a symmetric matrix
        precision = scale * self.hessian + delta.diag()
        root: Tensor
        root, failed = torch.linalg.cholesky_ex((precision + precision.T) / 2)
        if failed and not self.is_semidefinite:
            raise ValueError(INDEFINITE.format(float(scale * self.eigenvalues[0])))
        if failed:  # a prior too weak to lift what rounding has pushed below zero
            values, vectors = self._eigh
            known = (vectors * (scale * values).sqrt()).T
            # of the sum of two squares, never formed: no smaller than the prior
            both = torch.cat([known, delta.sqrt().diag()])
            triangle = torch.linalg.qr(both).R.T
            root = triangle * triangle.diagonal().sign()
        return root

    @cached_property
    def _roots(self) -> LastCallCache:
        return LastCallCache()

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

    def covariance_of_rows(
        self, rows: Tensor, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """`covariance` of rows written out, (b, c, P), and in their graph."""
        whitened = rows @ self._root(prior_precision, scale)
        covariance: Tensor = whitened @ whitened.mT
        return covariance

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
        """`whiten` in the dtype of the rows, if its digits are enough."""
        root = self._root(prior_precision, scale)
        key = prior_precision, scale, jacobian.dtype
        narrow = self._narrow_roots.get(key, lambda: self._narrow(*key, root))
        if narrow is not None:
            rows = jacobian.matmul(narrow)
            if rows.dtype == torch.float64 or all_finite(rows):
                return rows
        return jacobian.double().matmul(root)

    def _narrow(
        self, prior_precision: Tensor, scale: Tensor, dtype: torch.dtype, root: Tensor
    ) -> Tensor | None:
        """The root in a dtype; None where variances would lose their digits."""
        condition = scale * self.hessian.norm() / prior_precision.min()
        if dtype != torch.float64 and condition > MAX_CONDITION:
            return None
        return root.to(dtype)

    @cached_property
    def _narrow_roots(self) -> LastCallCache:
        return LastCallCache()

    @cached_property
    def _head_covariances(self) -> LastCallCache:
        return LastCallCache()

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
        # terms of opposite sign cancel here
        features = jacobian.features().double()
        # one product for all outputs: (b, i) @ (i, k·i)
        reached = features @ covariances.transpose(0, 1).flatten(1)
        reached = reached.unflatten(1, covariances.shape[::2])
        variances: Tensor = (reached * features.unsqueeze(1)).sum(-1)
        return variances.clamp(min=0)

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

    takes_matrices = True

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        # of two blocks, each pair of outputs times each pair of inputs
        self._sums: dict[tuple[int, int], _Products] = {}
        self._kept: list[Jacobian] = []
        self._is_semidefinite = True

    @staticmethod
    def n_bytes(layout: Layout, n_rows: int | None = None, **options: Any) -> int:
        """``H`` in float64, and three times as much to factorise it.

        In the dual form the rows, scaled and solved, and their products.
        """
        p = layout.n_parameters
        if n_rows is not None and n_rows < DUAL_SHARE * p:
            return 4 * 8 * n_rows * (p + n_rows)
        return 4 * 8 * p**2

    @staticmethod
    def row_elements(layout: Layout, n_columns: int, **options: Any) -> int:
        """Rows written out, twice; for a head the pairs of its inputs and outputs."""
        shapes = [block.factor_shape for block in layout.blocks]
        pairs = max(o for o, _ in shapes) ** 2 + max(i for _, i in shapes) ** 2
        if layout.head is not None:
            return pairs
        return max(2 * n_columns * layout.n_parameters, pairs)

    def update(self, jacobian: Jacobian) -> None:
        """Add the products of the rows of one batch."""
        self._kept.append(jacobian)
        self._settle()

    def add_matrix(self, hessian: Tensor, *, is_semidefinite: bool = False) -> None:
        """Add a symmetric (P, P)."""
        self._is_semidefinite &= is_semidefinite
        rows = hessian.double().split(self.layout.sizes)
        for i, strip in enumerate(rows):
            pieces = strip.split(self.layout.sizes, 1)
            for j, piece in enumerate(pieces[: i + 1]):
                self._add_products((i, j), _Products(piece))

    def merge(self, other: Accumulator) -> None:
        """Add what another accumulator has seen."""
        assert isinstance(other, FullAccumulator)
        self._is_semidefinite &= other._is_semidefinite
        self._kept += other._kept
        for where, products in other._sums.items():
            self._add_products(where, products)
        self._settle()

    def decompose(self) -> Structure:
        """The matrix, or the rows that it is made of; factorised when asked."""
        if not self._sums:
            kept = [some.dense().flatten(0, 1).double() for some in self._kept]
            return Dual(self.layout, torch.cat(kept))
        starts = torch.tensor([0, *self.layout.sizes]).cumsum(0).tolist()
        p, device = self.layout.n_parameters, self._sums[0, 0].sums.device
        hessian = torch.empty(p, p, dtype=torch.float64, device=device)
        for (i, j), products in self._sums.items():
            rows = slice(starts[i], starts[i + 1])
            columns = slice(starts[j], starts[j + 1])
            dense = products.dense()
            if i == j:  # without the asymmetry that rounding leaves
                hessian[rows, rows] = dense.tril() + dense.tril(-1).T
            else:
                hessian[rows, columns], hessian[columns, rows] = dense, dense.T
        return Full(self.layout, hessian, self._is_semidefinite or _is_psd(hessian))

    def _settle(self) -> None:
        """Turn kept rows into products once those are the smaller form."""
        n_rows = sum(kept.n_rows * kept.n_columns for kept in self._kept)
        if not self._sums and n_rows < DUAL_SHARE * self.layout.n_parameters:
            return
        for kept in self._kept:
            # products of rounded rows would push eigenvalues below zero
            blocks = kept.double().blocks
            for i, left in enumerate(blocks):
                for j, right in enumerate(blocks[: i + 1]):
                    self._add_products((i, j), _products(left, right))
        self._kept = []

    def _add_products(self, where: tuple[int, int], products: "_Products") -> None:
        known = self._sums.get(where)
        if known is None:
            self._sums[where] = replace(products, sums=products.sums.clone())
        elif known.shape == products.shape:
            known.sums.add_(products.sums)
        else:
            both = known.dense() + products.dense()
            self._sums[where] = _Products(both)


@dataclass(frozen=True)
class _Products:
    """``Σ leftᵀ right`` over rows and columns for two blocks.

    Attributes
    ----------
    sums : Tensor
        (o·o', i·i') over pairs of outputs and of inputs; of a block with itself each
        pair once. (p, p') if ``shape`` is None.
    shape : tuple of int or None
        ``(o, o', i, i')``.
    """

    sums: Tensor
    shape: tuple[int, int, int, int] | None = None
    is_symmetric: bool = False

    def dense(self) -> Tensor:
        """Written out, (p, p')."""
        if self.shape is None:
            return self.sums
        o, o_, i, i_ = self.shape
        products = self.sums
        if self.is_symmetric:
            which_output, which_input = (_places(n, products.device) for n in (o, i))
            products = products[which_output][:, which_input]
        return products.reshape(o, o_, i, i_).movedim(2, 1).reshape(o * i, o_ * i_)


def _is_psd(hessian: Tensor) -> bool:
    """Whether what eigenvalues are below zero can be rounding."""
    eigenvalues = torch.linalg.eigvalsh(hessian)
    return bool(eigenvalues[0] >= -ROUNDING * eigenvalues[-1].abs())


def _products(left: Any, right: Any) -> _Products:
    """Sums over the rows of one batch, float64.

    At one position the k columns are contracted first: ``(Σₖ g gᵀ) ⊗ (a aᵀ)``
    takes 2·b·p·p' operations instead of 2·b·k·p·p', and half of that for a block
    with itself.
    """
    grams: tuple[Tensor, Tensor, Tensor] | None = left.grams(right)
    if grams is None:
        x, y = left.dense().flatten(0, 1), right.dense().flatten(0, 1)
        return _Products(x.T @ y)
    outputs, here, there = grams
    shape = (*outputs.shape[1:], here.shape[1], there.shape[1])
    if left is right:
        row, column = torch.tril_indices(*shape[:2], device=outputs.device)
        sums = outputs[:, row, column].T @ _pairs(here)
        return _Products(sums, shape, is_symmetric=True)
    pairs = (here.unsqueeze(2) * there.unsqueeze(1)).flatten(1)
    return _Products(outputs.flatten(1).T @ pairs, shape)


def _pairs(a: Tensor) -> Tensor:
    """Products of each pair of columns of (b, n), (b, n(n+1)/2), row by row."""
    b, n = a.shape
    pairs = a.new_empty(b, n * (n + 1) // 2)
    start = 0
    for row in range(n):
        stop = start + row + 1
        torch.mul(a[:, : row + 1], a[:, row : row + 1], out=pairs[:, start:stop])
        start = stop
    return pairs


def _places(n: int, device: torch.device) -> Tensor:
    """Where each entry of a symmetric (n, n) stands among its pairs, (n²,)."""
    row, column = torch.tril_indices(n, n, device=device)
    places = torch.empty(n, n, dtype=torch.long, device=device)
    places[row, column] = places[column, row] = torch.arange(len(row), device=device)
    return places.flatten()
