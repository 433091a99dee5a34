"""Diagonal structure ``diag(h)``, with ``h = Σ (SᵀJ)²`` over samples and columns."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.rows import LayerRows
from sklaplace.curvature.structures import base


@dataclass(frozen=True)
class Diag(base.Diagonalised):
    """``H ≈ diag(h)`` with independent weights, so ``Q = I``.

    Attributes
    ----------
    diagonal : Tensor of shape (P,)
        ``h``, the diagonal of ``H``.
    """

    diagonal: Tensor
    name = "diag"
    keeps_factors = True
    priors = frozenset({"scalar", "layerwise", "diag"})

    @property
    def eigenvalues(self) -> Tensor:
        """The diagonal, (P,)."""
        return self.diagonal

    def rounding(self, eps: float) -> float:
        """Return zero, because sums of squares do not cancel."""
        return 0.0

    def rotated_layers(self, jacobian: Jacobian) -> Iterator[LayerRows]:
        """Return the layers of ``J``."""
        return iter(jacobian.layers)

    def times_basis(self, w: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``w`` unchanged, because ``Q = I``."""
        return w

    def dense(self) -> Tensor:
        """Return ``diag(h)``, (P, P)."""
        return self.diagonal.diag()

    def scaled(self, factor: Tensor) -> "Diag":
        """Return the diagonal of ``factor·H``."""
        return Diag(self.layout, factor * self.diagonal)

    def with_output_factors(self, factors: Tensor) -> "Diag":
        """Return the diagonal of ``D H D``, where ``D`` multiplies the weights."""
        squares = self.layout.expand_outputs(factors) ** 2
        return Diag(self.layout, self.diagonal * squares)

    def add_to(self, accumulator: base.Accumulator) -> None:
        """Put the diagonal into an empty accumulator."""
        assert isinstance(accumulator, DiagAccumulator)
        accumulator.sums = self.diagonal.clone()


class DiagAccumulator(base.SumAccumulator):
    """Sum of the squared rows of ``SᵀJ``, which needs O(P) memory."""

    @classmethod
    def n_bytes(cls, layout: Layout, n_rows: int | None = None, **_: object) -> int:
        """Return the bytes of the diagonal, eight per parameter."""
        return 8 * layout.n_parameters

    def update(self, jacobian: Jacobian) -> None:
        """Add the squares of one batch."""
        squares = torch.cat([block.squares() for block in jacobian.tensors()])
        self._add(squares.double())

    def decompose(self) -> Diag:
        """Return the diagonal structure."""
        assert self.sums is not None
        return Diag(self.layout, self.sums.clone())
