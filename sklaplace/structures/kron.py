"""Kronecker structure (KFAC): per weight tensor ``H ≈ B ⊗ A``.

``B = Σ g gᵀ`` over rows, columns and positions; ``A`` is the mean of ``a aᵀ``
over rows and positions ("expand" form for convolutions; Martens and Grosse
2015; Grosse and Martens 2016). A bias, and rows without a layer form, are blocks
``B`` of their own, which is exact within the block. Both factors are
diagonalised once, so that the prior precision is added to the products of their
eigenvalues exactly (Ritter, Botev and Barber 2018).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sklaplace.jacobians import Block, Jacobian
from sklaplace.layouts import Layout
from sklaplace.linalg import symmetric_eigh
from sklaplace.structures.base import Accumulator, Structure

# A factor wider than this keeps its diagonal only: the eigenvectors of a denser
# one take 8 n² bytes and about 10 n³ operations.
MAX_FACTOR = 8192


@dataclass(frozen=True)
class _Factor:
    """Eigenvalues (n,) and eigenvectors (n, n) of a factor; None: the identity."""

    values: Tensor
    vectors: Tensor | None

    def apply(self, x: Tensor) -> Tensor:
        """Coordinates on the last axis back to the original basis."""
        return x if self.vectors is None else x @ self.vectors.T

    def apply_transposed(self, x: Tensor) -> Tensor:
        """Coordinates on the last axis into the eigenbasis."""
        return x if self.vectors is None else x @ self.vectors

    def apply_squared(self, x: Tensor) -> Tensor:
        """The same with squared eigenvectors."""
        return x if self.vectors is None else x @ (self.vectors**2).T

    def dense(self) -> Tensor:
        """The factor, (n, n)."""
        if self.vectors is None:
            return self.values.diag()
        return (self.vectors * self.values) @ self.vectors.T


@dataclass(frozen=True)
class Kron(Structure):
    """Correlations within each layer, as a product of two small matrices.

    Attributes
    ----------
    factors : tuple of (output factor, input factor)
        One pair per block.
    """

    factors: tuple[tuple[_Factor, _Factor], ...]
    priors = frozenset({"scalar", "layerwise"})

    @property
    def eigenvalues(self) -> Tensor:
        """Products of the factors' eigenvalues, (P,), output-major."""
        return torch.cat(
            [torch.outer(b.values, a.values).flatten() for b, a in self.factors]
        )

    def rotate(self, jacobian: Jacobian) -> Jacobian:
        """``a`` and ``g`` in the eigenbases of their factors, float64."""
        pairs = zip(jacobian.double().blocks, self.factors, strict=True)
        return Jacobian([block.rotate(b.vectors, a.vectors) for block, (b, a) in pairs])

    def unrotate(self, weights: Tensor) -> Tensor:
        """Coordinates (s, P) in the eigenbasis back to parameters."""
        return self._map(weights, "apply")

    def to_basis(self, weights: Tensor) -> Tensor:
        """Parameters (..., P) to coordinates in the eigenbasis."""
        return self._map(weights, "apply_transposed")

    def squared_basis(self, values: Tensor) -> Tensor:
        """Diagonal of ``Q diag(values) Qᵀ``, (P,)."""
        return self._map(values, "apply_squared")

    def _map(self, vector: Tensor, method: str) -> Tensor:
        pieces = []
        for (b, a), piece in zip(self.factors, self.layout.split(vector), strict=True):
            matrix = piece.unflatten(-1, (len(b.values), len(a.values)))
            turned = getattr(b, method)(getattr(a, method)(matrix).mT).mT
            pieces.append(turned.flatten(-2))
        return torch.cat(pieces, -1)

    def dense(self) -> Tensor:
        """``H`` written out, (P, P)."""
        blocks = [torch.kron(b.dense(), a.dense()) for b, a in self.factors]
        dense: Tensor = torch.block_diag(*blocks)
        return dense


class KronAccumulator(Accumulator):
    """Sums ``g gᵀ`` and ``a aᵀ``; memory Σ (o² + i²) over layers."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._outputs: list[Tensor] = []
        self._inputs: list[Tensor] = []
        self._n_positions: list[Tensor] = []

    @staticmethod
    def n_bytes(layout: Layout) -> int:
        """Factors, their eigenvectors and the workspace of the largest one."""
        widths = [n for block in layout.blocks for n in block.factor_shape]
        dense = [n for n in widths if n <= MAX_FACTOR]
        return 8 * (2 * sum(n * n for n in dense) + 3 * max([1, *dense]) ** 2)

    def update(self, jacobian: Jacobian) -> None:
        """Add the factors of one batch."""
        weights = jacobian.weights
        found = [_factors(block, weights) for block in jacobian.blocks]
        outputs, inputs, n_positions = map(list, zip(*found, strict=True))
        self._add(outputs, inputs, n_positions)

    def merge(self, other: Accumulator) -> None:
        """Add what another accumulator has seen."""
        assert isinstance(other, KronAccumulator)
        self._add(other._outputs, other._inputs, other._n_positions)

    def _add(
        self, outputs: list[Tensor], inputs: list[Tensor], n_positions: list[Tensor]
    ) -> None:
        if not outputs:
            return
        if not self._outputs:
            self._outputs, self._inputs = outputs, inputs
            self._n_positions = n_positions
            return
        self._outputs = [x + y for x, y in zip(self._outputs, outputs, strict=True)]
        self._inputs = [x + y for x, y in zip(self._inputs, inputs, strict=True)]
        counts = zip(self._n_positions, n_positions, strict=True)
        self._n_positions = [x + y for x, y in counts]

    def decompose(self) -> Kron:
        """The frozen eigendecompositions."""
        sums = zip(self._outputs, self._inputs, self._n_positions, strict=True)
        factors = tuple(
            (_decompose(b), _decompose(a / n.clamp(min=torch.finfo(n.dtype).tiny)))
            for b, a, n in sums
        )
        return Kron(self.layout, factors)


def _factors(block: Block, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of ``g gᵀ`` and ``a aᵀ`` and the weighted number of positions."""
    g = block.g.flatten(0, 2)
    outputs = _second_moment(g)
    if block.a is None:
        one = torch.ones(1, 1, dtype=torch.float64, device=g.device)
        return outputs, one, one[0, 0]
    a = block.a
    row_weights = torch.ones(len(a), device=a.device) if weights is None else weights
    n_positions = row_weights.double().sum() * a.shape[1]
    if weights is not None:
        a = a * weights.sqrt().to(a).reshape(-1, 1, 1)
    return outputs, _second_moment(a.flatten(0, 1)), n_positions


def _second_moment(x: Tensor) -> Tensor:
    """``xᵀ x`` (n, n), or its diagonal (n,) where that would be too wide."""
    if x.shape[-1] > MAX_FACTOR:
        return (x**2).sum(0).double()
    return (x.T @ x).double()


def _decompose(moment: Tensor) -> _Factor:
    if moment.ndim == 1:
        return _Factor(moment, None)
    return _Factor(*symmetric_eigh(moment))
