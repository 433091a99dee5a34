"""Function space: ``H`` by what some rows, the *points*, make of it.

``H ≈ Rᵀ A R`` for the rows ``R = Sᵀ J`` of the points. The posterior over outputs is
then a Gaussian process with kernel ``J diag(δ)⁻¹ J'ᵀ``, conditioned on the points, and
what they do not tell stays as uncertain as the prior says. Rows are kept unmultiplied,
layer inputs beside output gradients: neither ``H`` nor a dense Jacobian is written out.

``gp``, subset of data, has ``A = I``: the curvature of the points themselves, exact
where all rows are points.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from sklaplace.core.checks import check_count
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.curvature.structures.base import Accumulator, LastCallCache, Structure
from sklaplace.curvature.structures.dual import Dual, DualForm

# points, where no number is given
N_POINTS = 100
# share of its entries by which a row may differ from a multiple of its copy
ROUNDING = 1e-12


@dataclass(frozen=True)
class FunctionSpace(DualForm):
    """Curvature ``(FR)ᵀ FR`` from the rows ``R`` of some points.

    Attributes
    ----------
    points : tuple of Jacobian
        ``R``, (m, P) in all, float64, unmultiplied, with the keys of its rows.
    root : Tensor of shape (n, m) or None
        ``F``; None: the identity.
    is_partial : bool
        Whether there were rows that are no points.
    """

    points: tuple[Jacobian, ...]
    root: Tensor | None
    is_partial: bool
    kind = "gp"
    # more points than are asked for are dropped
    is_additive = False
    priors = frozenset({"scalar", "layerwise"})

    @cached_property
    def _gram(self) -> Tensor:
        return self._gram_under(self.points[0].blocks[0].g.new_ones(()))

    def _variances(self, prior_precision: Tensor) -> Tensor:
        """``1/δ`` of each parameter tensor, (L,)."""
        return (1 / prior_precision).expand(len(self.layout.blocks))

    def _gram_under(self, prior_precision: Tensor) -> Tensor:
        parts = [self._cross(point, prior_precision) for point in self.points]
        rows = torch.cat([part.flatten(0, 1) for part in parts])  # (m, n)
        return self._rooted(rows.T).T

    def _cross(self, jacobian: Jacobian, prior_precision: Tensor) -> Tensor:
        return self._rooted(self._raw(jacobian, prior_precision))

    def _raw(self, jacobian: Jacobian, prior_precision: Tensor) -> Tensor:
        """Products with the rows of the points themselves, (b, c, m)."""
        v = self._variances(prior_precision)
        parts = [jacobian.kernel(point, v).flatten(2) for point in self.points]
        return torch.cat(parts, -1)

    def _known(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """The same, by one product with a matrix that is kept."""

        def multiplied() -> Tensor:
            inverse = self._inverse(prior_precision, scale) * scale.sqrt()
            return inverse if self.root is None else inverse @ self.root

        # L⁻¹ F, (n, m)
        both = self._products.get((prior_precision, scale), multiplied)
        return self._raw(jacobian, prior_precision) @ both.T

    @cached_property
    def _products(self) -> LastCallCache:
        return LastCallCache()

    def _rooted(self, values: Tensor) -> Tensor:
        """``values Fᵀ`` for (..., m), as (..., n)."""
        return values if self.root is None else values @ self.root.T

    def _onto(self, weights: Tensor) -> Tensor:
        parts = [point.matmul(weights.T).flatten(0, 1) for point in self.points]
        return self._rooted(torch.cat(parts).T)

    def _back(self, shares: Tensor) -> Tensor:
        given = shares if self.root is None else shares @ self.root
        sizes = [point.n_rows * point.n_columns for point in self.points]
        parts = [
            point.rmatmul(piece.T.unflatten(0, (point.n_rows, point.n_columns)))
            for point, piece in zip(self.points, given.split(sizes, -1), strict=True)
        ]
        total: Tensor = sum(parts[1:], parts[0])
        return total.T

    def __getstate__(self) -> dict[str, Any]:
        """What can be made again stays behind."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def dense(self) -> Tensor:
        """``H`` written out, (P, P)."""
        rows = self.written()
        dense: Tensor = rows.T @ rows
        return (dense + dense.T) / 2

    @property
    def n_rows(self) -> int:
        """Rows n of ``FR``."""
        if self.root is not None:
            return len(self.root)
        return sum(point.n_rows * point.n_columns for point in self.points)

    @property
    def evidence_is_biased_up(self) -> bool:
        """Whether there were rows that are no points."""
        return self.is_partial

    @property
    def is_wide(self) -> bool:
        """Whether there are more rows than parameters."""
        return self.n_rows > self.layout.n_parameters

    def written(self) -> Tensor:
        """``FR`` written out, (n, P)."""
        rows = torch.cat([point.dense().flatten(0, 1) for point in self.points])
        return self._rooted(rows.T).T

    def scaled(self, factor: Tensor) -> "FunctionSpace":
        """The points, their rows times the root of the factor."""
        points = tuple(point.times(factor.sqrt()) for point in self.points)
        return replace(self, points=points)

    def resume(self, accumulator: Accumulator) -> None:
        """The points."""
        assert isinstance(accumulator, PointsAccumulator)
        accumulator.is_partial |= self.is_partial
        for point in self.points:
            accumulator.update(point)


@dataclass(frozen=True)
class Compact(Dual):
    """The same where there are more rows than parameters: no more than these.

    Attributes
    ----------
    points : FunctionSpace
        What the rows were made of, to which more can be added.
    """

    points: FunctionSpace
    kind = "gp"
    is_additive = False

    @classmethod
    def of(cls, points: FunctionSpace, **more: Tensor) -> "Compact":
        """With as many rows as parameters, from the triangle of their QR."""
        rows = points.written()
        triangle: Tensor = torch.linalg.qr(rows, mode="r").R
        return cls(points.layout, triangle, points, **more)

    def __getstate__(self) -> dict[str, Any]:
        """What can be made again stays behind."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def scaled(self, factor: Tensor) -> "Compact":
        """Rows and points of ``factor·H``."""
        points = self.points.scaled(factor)
        return replace(self, rows=self.rows * factor.sqrt(), points=points)

    @property
    def evidence_is_biased_up(self) -> bool:
        """Whether there were rows that are no points."""
        return self.points.evidence_is_biased_up

    def resume(self, accumulator: Accumulator) -> None:
        """The points."""
        self.points.resume(accumulator)


class PointsAccumulator(Accumulator):
    """Keeps the rows of some points: those of the smallest keys.

    Keys are made of a row's content, so that batches and the order of rows do not
    matter. Equal rows count as one point.

    Parameters
    ----------
    layout : Layout
        The selected parameters.
    n_points : int
        Different rows of the data to keep, at most.
    """

    checks: ClassVar = {"n_points": check_count}
    takes_keys = True

    def __init__(self, layout: Layout, n_points: int = N_POINTS) -> None:
        super().__init__(layout)
        self.n_points = n_points
        self._pieces: list[Jacobian] = []
        self._keys = torch.zeros(0, dtype=torch.long)
        self._bound: int | None = None
        self.is_partial = False

    @staticmethod
    def n_bytes(
        layout: Layout,
        n_rows: int | None = None,
        n_points: int = N_POINTS,
        n_columns: int = 1,
        **options: Any,
    ) -> int:
        """Rows of the points, and their products with each other."""
        n = n_points * n_columns
        n = n if n_rows is None else min(n, n_rows)
        widths = sum(_width(block, n_columns) for block in layout.blocks)
        return 8 * (n * widths // n_columns + 4 * n**2)

    @staticmethod
    def row_elements(
        layout: Layout, n_columns: int, n_points: int = N_POINTS, **options: Any
    ) -> int:
        """Products of a row's columns with those of all points, and wide rows."""
        wide = [block.size for block in layout.blocks if len(block.shape) > 2]
        return 3 * n_points * n_columns**2 + 2 * n_columns * max(wide, default=0)

    def update(self, jacobian: Jacobian) -> None:
        """Keep the rows of one batch that are points; drop those that are no more."""
        assert jacobian.keys is not None
        keys = jacobian.keys.cpu()
        self._admit(keys)
        if places := self._places(keys):
            self._pieces.append(jacobian.take(torch.tensor(places)).shortest())
        if sum(piece.n_rows for piece in self._pieces) > 2 * self.n_points:
            self._pieces = list(self.points())  # equal rows, as one

    def _places(self, keys: Tensor) -> list[int]:
        """Where rows are points, as far as is known."""
        if self._bound is None:
            return list(range(len(keys)))
        found: list[int] = (keys <= self._bound).nonzero().flatten().tolist()
        return found

    def _admit(self, keys: Tensor) -> None:
        """Lower the bound on keys to where so many rows are below it."""
        seen = torch.cat([self._keys, keys]).unique()
        self.is_partial |= len(seen) > self.n_points
        self._keys = seen[: self.n_points]
        bound = int(self._keys[-1])
        if len(self._keys) == self.n_points and bound != self._bound:
            self._bound = bound
            self._pieces = self._below(self._pieces)

    def _below(self, pieces: list[Jacobian]) -> list[Jacobian]:
        """What of some rows are points."""
        kept = []
        for piece in pieces:
            assert piece.keys is not None
            places = self._places(piece.keys.cpu())
            if len(places) == len(piece.keys):
                kept.append(piece)
            elif places:
                kept.append(piece.take(torch.tensor(places)))
        return kept

    def merge(self, other: Accumulator) -> None:
        """Add what another accumulator has seen."""
        assert isinstance(other, PointsAccumulator)
        self.is_partial |= other.is_partial
        self._admit(other._keys)
        self._pieces += self._below(other._pieces)

    def points(self) -> tuple[Jacobian, ...]:
        """The rows of all points, those of one form together, ordered by keys."""
        groups: dict[Any, list[Jacobian]] = {}
        for piece in self._pieces:
            groups.setdefault(_form(piece), []).append(piece)
        merged = [one for form in sorted(groups) for one in _merged(groups[form])]
        return tuple(merged)

    def decompose(self) -> Structure:
        """The frozen rows."""
        found = FunctionSpace(self.layout, self.points(), None, self.is_partial)
        return Compact.of(found) if found.is_wide else found


def _width(block: BlockSpec, n_columns: int) -> int:
    """Numbers that a row of the data takes: of convolutions, at most those of dense."""
    if block.layer is None or len(block.shape) > 2:
        return n_columns * block.size
    o, i = block.factor_shape
    return i + n_columns * o


def _merged(parts: list[Jacobian]) -> Iterator[Jacobian]:
    """Rows of one form, ordered by their keys; equal ones as one where they can be.

    Copies have gradients that are multiples of each other, unless their targets have a
    say in ``S``: then those of further copies stay, as other columns of the same row.
    """
    rows = Jacobian.stacked(parts)
    assert rows.keys is not None
    rest: Jacobian | None = rows.take(rows.keys.sort(stable=True).indices)
    while rest is not None:
        one, rest = _first_copies(rest)
        yield one


def _first_copies(rows: Jacobian) -> tuple[Jacobian, Jacobian | None]:
    """One row for each key, in which its multiples are, and what is no multiple."""
    assert rows.keys is not None
    names, owner = rows.keys.unique(return_inverse=True)
    if len(names) == len(rows.keys):
        return rows, None
    flat = torch.cat([g.flatten(1) for g in rows.gradients()], 1)  # (n, k·r·o)
    places = torch.arange(len(owner), device=owner.device)
    first = torch.full_like(names, len(owner)).scatter_reduce(0, owner, places, "amin")
    lead = flat[first][owner]
    squares = (lead**2).sum(1)
    ratio = torch.where(squares > 0, (flat * lead).sum(1) / squares, 0)
    gap = (flat - ratio[:, None] * lead).abs().amax(1)
    same = gap <= ROUNDING * flat.abs().amax(1)
    shares = torch.where(same, ratio**2, 0).masked_fill(places == first[owner], 1)
    total = flat.new_zeros(len(names)).index_add_(0, owner, shares)
    merged = rows.take(first).times(total.sqrt()[:, None, None, None])
    others = (~same & (places != first[owner])).nonzero().flatten()
    return merged, rows.take(others) if len(others) else None


def _form(rows: Jacobian) -> tuple[tuple[int, ...], ...]:
    """Shapes that rows have to share to be put together."""
    shapes = []
    for block in rows.blocks:
        a = () if block.a is None else tuple(block.a.shape[1:])
        shapes += [tuple(block.g.shape[1:]), a]
    return tuple(shapes)
