"""Diagonal structure: ``H ≈ diag(Σ rows²)``; the eigenbasis is the identity."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sklaplace.curvature.blocks import Block
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures.base import Accumulator, Diagonalised


@dataclass(frozen=True)
class Diag(Diagonalised):
    """Weights are independent; cheapest, and blind to correlations.

    Attributes
    ----------
    diagonal : Tensor of shape (P,)
        Diagonal of ``H``.
    """

    diagonal: Tensor
    kind = "diag"
    priors = frozenset({"scalar", "layerwise", "diag"})

    @property
    def eigenvalues(self) -> Tensor:
        """The diagonal itself, (P,)."""
        return self.diagonal

    def rotated_blocks(self, jacobian: Jacobian) -> Iterator[Block]:
        """Rows as they are."""
        yield from jacobian.blocks

    def unrotate(self, weights: Tensor) -> Tensor:
        """Coordinates as they are."""
        return weights

    def to_basis(self, weights: Tensor) -> Tensor:
        """Parameters as they are."""
        return weights

    def squared_basis(self, values: Tensor) -> Tensor:
        """Values as they are."""
        return values

    def dense(self) -> Tensor:
        """``H`` written out, (P, P)."""
        return self.diagonal.diag()

    def scaled(self, factor: Tensor) -> "Diag":
        """The diagonal of ``factor·H``."""
        return Diag(self.layout, factor * self.diagonal)

    def resume(self, accumulator: Accumulator) -> None:
        """The diagonal itself."""
        assert isinstance(accumulator, DiagAccumulator)
        accumulator._sums = self.layout.split(self.diagonal)


class DiagAccumulator(Accumulator):
    """Sums squared rows; O(P) memory."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._sums: list[Tensor] = []

    @staticmethod
    def n_bytes(layout: Layout, n_rows: int | None = None, **options: Any) -> int:
        """Eight bytes per parameter."""
        return 8 * layout.n_parameters

    def update(self, jacobian: Jacobian) -> None:
        """Add squared rows of one batch."""
        squares = [block.squares() for block in jacobian.blocks]
        self._sums = _added(self._sums, squares)

    def merge(self, other: Accumulator) -> None:
        """Add what another accumulator has seen."""
        assert isinstance(other, DiagAccumulator)
        self._sums = _added(self._sums, other._sums)

    def decompose(self) -> Diag:
        """The frozen diagonal."""
        return Diag(self.layout, torch.cat(self._sums))


def _added(sums: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    if not (sums and more):
        return sums or more
    return [total + piece for total, piece in zip(sums, more, strict=True)]
