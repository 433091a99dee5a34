"""Function-space structures, which store ``H`` as the Jacobian rows of some samples.

``H ≈ (FR)ᵀ FR`` with the rows ``R = SᵀJ`` of some samples, called *points*. The
posterior over outputs is a Gaussian process with kernel ``J diag(δ)⁻¹ J'ᵀ``,
conditioned on the points. Directions outside the span of the points keep the prior
variance. The Jacobian of the points is stored as layer inputs and output gradients.
Neither ``H`` nor a dense Jacobian is formed.

``gp`` (subset of data) has ``F = I``. It uses only the curvature of the points, so it
is exact if all samples are points.

``nystrom`` projects the curvature of all samples onto the span of the points:
``H ≈ U (UᵀHU) Uᵀ`` with an orthonormal basis ``U`` of the span. A first pass finds the
points, and a second pass sums ``UᵀHU``. With ``R Rᵀ = V diag(λ) Vᵀ``, the basis is
``U = Rᵀ V diag(λ)^-½``. The method is ELLA (Deng, Zhou and Zhu 2022, "Accelerated
linearized Laplace approximation for Bayesian deep learning"), but keeps the prior
variance outside the span.

The relative error of products with ``U`` is at most ``ε √(λ_max/λ_min)``, since the
rounding error of products with ``R`` is divided by a small ``√λ``. The coordinates of
the points in the basis ``U`` have no such error, because they are the rows of
``V diag(λ)^½`` and are not computed as products.

``variational`` derives the posterior of ``nystrom`` from a bound. Among all Gaussians
with precision ``diag δ + RᵀAR``, this posterior has the smallest Kullback-Leibler
divergence from the Laplace posterior with the full ``H``, as in VaLLA (Ortega,
Rodríguez-Santana and Hernández-Lobato 2024, "Variational linearized Laplace
approximation for Bayesian deep learning"). The bound on the evidence is tight up to
``scale/δ tr(H - UUᵀH)`` (Titsias 2009, "Variational learning of inducing variables in
sparse Gaussian processes"). This bound is used in place of the evidence. Points are
chosen greedily to reduce the trace ``tr(H - UUᵀH)``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from sklaplace.core.checks import check_count
from sklaplace.core.linalg import symmetric_eigh
from sklaplace.core.parallel import cached_property
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.curvature.structures.base import Accumulator, Structure
from sklaplace.curvature.structures.dual import DualForm, DualPrecision
from sklaplace.curvature.structures.root import DenseRoot, PointRoot, Root
from sklaplace.curvature.structures.rounding import check_finite

# default number of points
N_POINTS = 100
# maximum relative difference of a row from a multiple of another row
MAX_DIFFERENCE_OF_MULTIPLES = 1e-12
# eigenvalues of ``R Rᵀ`` below this fraction of the largest are rounding errors
MIN_RELATIVE_EIGENVALUE = 1e-14
# number of candidates for each greedily chosen point
CANDIDATES_PER_POINT = 4


@dataclass(frozen=True)
class FunctionSpace(DualForm):
    """Curvature ``(FR)ᵀ FR`` from the rows ``R`` of some points.

    Attributes
    ----------
    points : PointRoot
        ``FR``.
    is_partial : bool
        Whether the points are only some of the samples.
    """

    points: PointRoot
    is_partial: bool
    name = "gp"
    # points beyond the maximum number are dropped
    is_additive = False
    priors = frozenset({"scalar", "layerwise"})

    @cached_property
    def root(self) -> Root:
        """``FR``, or its triangular QR factor if ``FR`` has more rows than columns."""
        if self.points.n_rows <= self.layout.n_parameters:
            return self.points
        return DenseRoot(self.layout, torch.linalg.qr(self.points.dense(), mode="r").R)

    @property
    def evidence_is_biased_up(self) -> bool:
        """Whether the points are only some of the samples."""
        return self.is_partial

    def scaled(self, factor: Tensor) -> "FunctionSpace":
        """Return the structure of ``factor·H``."""
        return replace(self, points=self.points.scaled(factor))

    def add_to(self, accumulator: Accumulator) -> None:
        """Add the points to an empty accumulator.

        If the points are only some of the samples, so are those of the sum.
        """
        assert isinstance(accumulator, PointsAccumulator)
        accumulator.is_partial |= self.is_partial
        for point in self.points.jacobians:
            accumulator.update(point)


@dataclass(frozen=True)
class Nystrom(FunctionSpace):
    """``U (UᵀHU) Uᵀ``, the curvature of all samples in the span of the points.

    Attributes
    ----------
    unexplained : Tensor of shape ()
        ``tr(H - UUᵀH)``, the part of the trace that the points do not explain.
    """

    unexplained: Tensor
    name = "nystrom"
    # each summand keeps its own points
    is_additive = True
    priors = frozenset({"scalar"})

    def trace(self) -> Tensor:
        """Return ``tr RᵀR``, from the product ``R Rᵀ``, which is computed anyway."""
        return self.gram.trace()

    def scaled(self, factor: Tensor) -> "Nystrom":
        """Return the structure of ``factor·H``."""
        points, unexplained = self.points.scaled(factor), factor * self.unexplained
        return replace(self, points=points, unexplained=unexplained)

    def add_to(self, accumulator: Accumulator) -> None:
        """Add ``H`` to an empty accumulator; new samples get their own points."""
        assert isinstance(accumulator, NystromAccumulator)
        accumulator.summands_of_others.append(self)


class Variational(Nystrom):
    """`Nystrom` with a lower bound instead of the evidence."""

    name = "variational"
    is_spectral = False
    # the bound includes the trace that the points do not explain
    evidence_is_biased_up = False

    # the bound on the log-determinant does not use a decomposition
    _is_decomposable = False

    def precision(self, prior_precision: Tensor, scale: Tensor) -> "BoundPrecision":
        """Return ``P = scale·UUᵀHUUᵀ + δ``, with a bound on the log-determinant."""
        return BoundPrecision(self, prior_precision, scale)


class BoundPrecision(DualPrecision):
    """Precision whose `logdet` is an upper bound on `logdet` for the full ``H``."""

    structure: Variational

    def logdet(self) -> Tensor:
        """Return ``log det P + scale/δ tr(H - UUᵀH)``, in nats, ()."""
        return super().logdet() + self.trace_correction()

    def trace_correction(self) -> Tensor:
        """Return ``scale/δ tr(H - UUᵀH)``, ()."""
        return self.scale / self.prior_precision * self.structure.unexplained


class PointsAccumulator(Accumulator):
    """Rows ``SᵀJ`` of the points: the samples with the smallest hashes.

    Hashes depend only on the content of a sample, so the points do not depend on the
    batches or on the order of samples. Equal samples count as one point.

    Parameters
    ----------
    layout : Layout
        The selected parameters.
    n_points : int
        Maximum number of distinct samples selected as points.
    """

    checks: ClassVar = {"n_points": check_count}
    takes_keys = True
    candidates_per_point: ClassVar[int] = 1
    """Number of candidates to keep for each point."""

    def __init__(self, layout: Layout, n_points: int = N_POINTS) -> None:
        super().__init__(layout)
        self.n_points, self._capacity = n_points, self.candidates_per_point * n_points
        self.is_partial = False
        # the smallest hashes so far, sorted: those of the points
        self.keys = torch.zeros(0, dtype=torch.long)
        self.jacobians: list[Jacobian] = []

    @classmethod
    def n_bytes(cls, layout: Layout, n_rows: int | None = None, **options: Any) -> int:
        """Return the bytes of the rows ``R`` of all candidates, and of their products.

        Each candidate has ``n_columns`` rows, and all of them together have no more
        than ``n_rows``, if known. Four matrices have the size of ``R Rᵀ``: the product,
        its eigenvectors and the workspace of the decomposition.
        """
        n_columns = options.get("n_columns", 1)
        n_points = options.get("n_points", N_POINTS)
        n_kept = cls.candidates_per_point * n_points * n_columns
        n_kept = n_kept if n_rows is None else min(n_kept, n_rows)
        per_sample = sum(_stored_elements(block, n_columns) for block in layout.blocks)
        return 8 * (n_kept * per_sample // n_columns + 4 * n_kept**2)

    @classmethod
    def row_elements(
        cls, layout: Layout, n_columns: int, n_points: int = N_POINTS, **_: object
    ) -> int:
        """Count the numbers in a sample's dense rows and products with all points."""
        # rows of convolutions are sums over positions, which become dense
        dense = [block.size for block in layout.blocks if len(block.shape) > 2]
        # three copies of the products, and two copies of the largest dense rows
        return 3 * n_points * n_columns**2 + 2 * n_columns * max(dense, default=0)

    def update(self, jacobian: Jacobian) -> None:
        """Keep the points of one batch, and drop samples that are no longer points.

        Points are the samples with the smallest hashes so far, so that a later sample
        can displace an earlier one.
        """
        keys = _keys(jacobian)
        self._add_keys(keys)
        indices = _indices_in(keys, self.keys)
        if len(indices):
            self.jacobians.append(jacobian.take(indices).compressed())
        # copies of a sample have one key, so that rows can outnumber the points; they
        # are merged only now and then, at twice the number, because merging copies rows
        if sum(rows.n_samples for rows in self.jacobians) > 2 * self._capacity:
            self.jacobians = list(self._points_by_shape())

    def _add_keys(self, keys: Tensor) -> None:
        """Update the smallest hashes, and drop rows of samples with larger hashes.

        With more distinct hashes than the accumulator keeps, the points are only some
        of the samples, and ``is_partial`` becomes True.
        """
        smallest = torch.cat([self.keys, keys]).unique()
        self.is_partial |= len(smallest) > self._capacity
        smallest = smallest[: self._capacity]
        if not torch.equal(smallest, self.keys):
            self.keys = smallest
            self.jacobians = self._selected(self.jacobians)

    def _selected(self, jacobians: Iterable[Jacobian]) -> list[Jacobian]:
        """Return the rows of the samples that are still points."""
        selected = []
        for rows in jacobians:
            indices = _indices_in(_keys(rows), self.keys)
            if len(indices) == rows.n_samples:  # without a copy
                selected.append(rows)
            elif len(indices):
                selected.append(rows.take(indices))
        return selected

    def merge(self, other: Self) -> None:
        """Add the points of another accumulator."""
        self.is_partial |= other.is_partial
        self._add_keys(other.keys)
        self.jacobians += self._selected(other.jacobians)

    def _points_by_shape(self) -> tuple[Jacobian, ...]:
        """Return ``SᵀJ`` of all points, grouped by shape and ordered by hash.

        Equal samples are merged. Only rows with factors of equal shapes can share a
        Jacobian.
        """
        groups = groupby(sorted(self.jacobians, key=_factor_shapes), _factor_shapes)
        merged = (_merge_equal_samples(list(jacobians)) for _, jacobians in groups)
        return tuple(rows for jacobians in merged for rows in jacobians)

    def decompose(self) -> Structure:
        """Return the curvature of the points."""
        points = PointRoot(self.layout, self._points_by_shape())
        return FunctionSpace(self.layout, points, self.is_partial)


class NystromAccumulator(PointsAccumulator):
    """Points from a first pass over the samples, and ``UᵀHU`` from a second pass.

    Parameters
    ----------
    layout : Layout
        The selected parameters.
    n_points : int
        Maximum number of distinct samples selected as points.
    """

    structure: ClassVar[type[Nystrom]] = Nystrom

    def __init__(self, layout: Layout, n_points: int = N_POINTS) -> None:
        super().__init__(layout, n_points)
        # merged approximations with other points, added by `decompose`
        self.summands_of_others: list[Nystrom] = []
        self.basis: PointRoot | None = None  # Uᵀ; None during the first pass
        # hashes of the points among the samples of the second pass
        self.seen_points = torch.zeros(0, dtype=torch.long)

    def needs_another_pass(self) -> bool:
        """Return True once, after the first pass; compute the basis of the points.

        With ``R Rᵀ = V diag(λ) Vᵀ`` for the rows ``R`` of the points, the basis is
        ``Uᵀ = diag(λ)^-½ Vᵀ R``. The second pass adds to ``moment``, the sum of
        ``UᵀHU``, and to ``unexplained``, the trace of ``H`` outside the basis.
        """
        if self.basis is not None:
            return False
        points = PointRoot(self.layout, self._choose_points())
        gram = points.gram()
        check_finite(gram.trace())
        values, vectors = symmetric_eigh(gram)
        is_positive = values > MIN_RELATIVE_EIGENVALUE * values[-1]  # else rounding
        coefficients = vectors[:, is_positive] * values[is_positive].rsqrt()  # (m, q)
        self.basis, self.jacobians = replace(points, factor=coefficients.T), []
        self.moment = values.new_zeros(coefficients.shape[1], coefficients.shape[1])
        self.unexplained = values.new_zeros(())
        return True

    def _choose_points(self) -> tuple[Jacobian, ...]:
        """Return ``SᵀJ`` of the points, here of all candidates."""
        return self._points_by_shape()

    def update(self, jacobian: Jacobian) -> None:
        """Find points in the first pass; add products with the basis in the second.

        The second pass sums ``UᵀHU``, and the trace of ``H`` outside the span of the
        basis ``U``.
        """
        if self.basis is None:
            super().update(jacobian)
            return
        keys = _keys(jacobian)
        # points are only recorded, because `_approximation` adds them: their
        # coordinates in U are known without products
        is_point = torch.isin(keys, _row_keys(self.basis))
        self.seen_points = torch.cat([self.seen_points, keys[is_point]]).unique()
        if is_point.all():
            return
        rows = jacobian.take((~is_point).nonzero().flatten())
        inside = self.basis.cross(rows).flatten(0, 1)  # (b·k, q)
        self.moment += inside.T @ inside
        # variances under unit weights are squared norms of the rows
        trace = rows.variance(inside.new_ones(self.layout.n_parameters)).sum()
        self.unexplained += trace - (inside**2).sum()

    def merge(self, other: Self) -> None:
        """Add the points of another accumulator, or its sums in the second pass.

        Sums can be added only in the same basis. If the bases differ, the other
        accumulator's approximation is stored with its own points, as a summand. The
        summands that the other accumulator has stored so are taken over.
        """
        if other.basis is None:  # the other is in its first pass
            super().merge(other)
            self.summands_of_others += other.summands_of_others
        elif self.basis is not None and _have_equal_points(self.basis, other.basis):
            self.is_partial |= other.is_partial
            self.seen_points = torch.cat([self.seen_points, other.seen_points]).unique()
            self.moment = self.moment + other.moment
            self.unexplained = self.unexplained + other.unexplained
            self.summands_of_others += other.summands_of_others
        else:
            self.summands_of_others += other.summands()

    def summands(self) -> list[Nystrom]:
        """Return approximations whose sum is the curvature, each with its points."""
        if self.basis is None:
            return self.summands_of_others
        return [*self.summands_of_others, self._approximation(self.basis)]

    def decompose(self) -> Structure:
        """Return the sum of this approximation and of merged ones with other points.

        The root of the sum contains the rows of all summands. Its factor has one
        diagonal block per summand, which multiplies the summand's points.
        """
        summands = self.summands()  # their roots always have a factor
        roots = [summand.points for summand in summands]
        jacobians = tuple(rows for root in roots for rows in root.jacobians)
        factors = [root.factor for root in roots if root.factor is not None]
        return self.structure(
            self.layout,
            points=PointRoot(self.layout, jacobians, torch.block_diag(*factors)),
            is_partial=any(summand.is_partial for summand in summands),
            unexplained=torch.stack([s.unexplained for s in summands]).sum(),
        )

    def _approximation(self, basis: PointRoot) -> Nystrom:
        """Return ``U (UᵀHU) Uᵀ`` for a basis ``Uᵀ = diag(λ)^-½ Vᵀ R``.

        ``moment`` lacks the points among the samples of the second pass, which are
        added here. With ``UᵀHU = W diag(e) Wᵀ``, the root of the result is
        ``diag(e)^½ Wᵀ Uᵀ``.
        """
        factor = basis.factor
        assert factor is not None
        # coordinates of the points: V diag(λ)^½ from diag(λ)^-½ Vᵀ, in which the
        # squares of a row sum to 1/λ
        inside = (factor / (factor**2).sum(1, keepdim=True)).T
        inside = inside[torch.isin(_row_keys(basis), self.seen_points)]
        e, w = symmetric_eigh(self.moment + inside.T @ inside)
        root = replace(basis, factor=(w * e.sqrt()).T @ factor)
        unexplained = self.unexplained.clamp(min=0)  # a difference of rounded traces
        return self.structure(self.layout, root, self.is_partial, unexplained)


class VariationalAccumulator(NystromAccumulator):
    """`NystromAccumulator` with greedily chosen points.

    The pool has four candidates per point. Each step chooses the candidate whose
    curvature is least explained by the chosen points (greedy conditional variance:
    Burt, Rasmussen and van der Wilk 2020, "Convergence of sparse variational inference
    in Gaussian processes regression").

    Parameters
    ----------
    layout : Layout
        The selected parameters.
    n_points : int
        Maximum number of distinct samples selected as points.
    """

    structure = Variational
    candidates_per_point = CANDIDATES_PER_POINT

    def _choose_points(self) -> tuple[Jacobian, ...]:
        """Return ``SᵀJ`` of the points, chosen greedily among the candidates.

        The candidates are the samples with the smallest hashes. `_least_explained`
        chooses the one whose curvature is least explained by those before, in turn.
        """
        pool = PointRoot(self.layout, self._points_by_shape())
        check_finite(pool.trace())
        hashes = _least_explained(pool.gram(), _row_keys(pool), self.n_points)
        indices = [_indices_in(_keys(rows), hashes) for rows in pool.jacobians]
        pairs = zip(pool.jacobians, indices, strict=True)
        return tuple(rows.take(chosen) for rows, chosen in pairs if len(chosen))


def _stored_elements(block: BlockSpec, n_columns: int) -> int:
    """Count the numbers stored per sample, at most those of the dense rows.

    Rows of linear layers are stored as inputs (i,) and gradients (k, o) for k =
    ``n_columns``. Others become dense: those of unknown layers, and of convolutions.
    """
    if block.layer is None or len(block.shape) > 2:
        return n_columns * block.size
    o, i = block.factor_shape
    return i + n_columns * o


def _keys(rows: Jacobian) -> Tensor:
    """Return hashes of the samples of a batch, (b,)."""
    assert rows.keys is not None
    return rows.keys.cpu()


def _row_keys(root: PointRoot) -> Tensor:
    """Return, for each row of ``SᵀJ``, the hash of its sample, (m,)."""
    keys = [_keys(rows).repeat_interleave(rows.n_columns) for rows in root.jacobians]
    return torch.cat(keys)


def _have_equal_points(left: PointRoot, right: PointRoot) -> bool:
    """Return whether two bases have the same hashes and the same factors."""
    is_same = torch.equal(_row_keys(left), _row_keys(right))
    return is_same and torch.equal(left.factor, right.factor)  # type: ignore[arg-type]


def _indices_in(keys: Tensor, points: Tensor) -> Tensor:
    """Return the indices of the samples ``keys`` that are among the ``points``."""
    return torch.isin(keys, points).nonzero().flatten()


def _factor_shapes(rows: Jacobian) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that must be equal if Jacobians are to be concatenated."""
    factors = [factor for block in rows.tensors() for factor in (block.g, block.a)]
    return tuple(() if x is None else tuple(x.shape[1:]) for x in factors)


def _merge_equal_samples(jacobians: list[Jacobian]) -> Iterator[Jacobian]:
    """Merge equal samples of Jacobians with one shape, and sort samples by hash.

    The rows of equal samples are multiples of each other, unless ``S`` depends on the
    targets. If the rows are not multiples, the remaining copies follow in another
    Jacobian.
    """
    rows = Jacobian.stacked(jacobians)
    # sorted samples that are still to be merged; each round yields one of each hash
    copies: Jacobian | None = rows.take(_keys(rows).sort(stable=True).indices)
    while copies is not None:
        merged, copies = _first_copies(copies)
        yield merged


def _first_copies(rows: Jacobian) -> tuple[Jacobian, Jacobian | None]:
    """Return the first sample of each hash, merged with its copies, and all others.

    Samples with one hash have equal inputs. If the gradients of a copy are ``ratio``
    times those of the first sample, its curvature is ``ratio²`` times that of the first
    sample. The first sample's rows are therefore multiplied by ``√(1 + Σ ratio²)``. The
    second result contains copies with other gradients, or is None without such copies.
    """
    assert rows.keys is not None
    # hashes may be on the CPU, and rows on another device
    keys = rows.keys.to(rows.device)
    hashes, group = keys.unique(return_inverse=True)  # index of each sample's hash
    if len(hashes) == len(keys):
        return rows, None
    gradients = torch.cat([g.flatten(1) for g in rows.gradients()], 1)  # (n, k·r·o)
    index = torch.arange(len(group), device=group.device)
    # smallest index of each hash, from a start beyond all indices
    first = torch.full_like(hashes, len(group)).scatter_reduce(0, group, index, "amin")
    of_first = gradients[first][group]  # of the first sample with the same hash
    squares = (of_first**2).sum(1)
    # least-squares ratio of the gradients; zero for gradients of zero
    ratio = torch.where(squares > 0, (gradients * of_first).sum(1) / squares, 0)
    # largest deviation from a multiple, compared with the rounding of the largest entry
    gap = (gradients - ratio[:, None] * of_first).abs().amax(1)
    is_multiple = gap <= MAX_DIFFERENCE_OF_MULTIPLES * gradients.abs().amax(1)
    is_first = index == first[group]
    # one for a first sample, ratio² for its multiples, and zero for other copies
    weights = torch.where(is_multiple, ratio**2, 0).masked_fill(is_first, 1)
    total = gradients.new_zeros(len(hashes)).index_add_(0, group, weights)
    merged = rows.take(first).times(total.sqrt()[:, None, None, None])
    unmerged = (~is_multiple & ~is_first).nonzero().flatten()
    return merged, rows.take(unmerged) if len(unmerged) else None


def _least_explained(gram: Tensor, keys: Tensor, n: int) -> Tensor:
    """Choose n samples greedily, each the one least explained by the samples before.

    Return their hashes (n,). The method is a block Cholesky decomposition of ``gram``
    (m, m), which adds some columns per chosen sample to ``factor``. Each pivot is the
    sample whose Schur complement has the largest trace. This trace is the sum of the
    sample's ``unexplained`` (m,), the diagonal of ``gram - factor factorᵀ``. Entries
    with equal ``keys`` (m,) belong to one sample.
    """
    hashes, sample = keys.unique(return_inverse=True)
    sample = sample.to(gram.device)  # index of the sample of each entry
    unexplained, factor = gram.diagonal().clone(), gram[:, :0]
    total = float(unexplained.sum())
    chosen: list[int] = []
    is_chosen = torch.zeros(len(hashes), dtype=torch.bool, device=gram.device)
    for _ in range(min(n, len(hashes))):
        traces = unexplained.new_zeros(len(hashes)).index_add_(0, sample, unexplained)
        # traces are not negative, so -1 excludes the samples chosen before
        best = int(traces.masked_fill_(is_chosen, -1.0).argmax())
        rows = (sample == best).nonzero().flatten()
        remainder = gram[:, rows] - factor @ factor[rows].T
        # a root of the pivot block that leaves out directions of rounding errors
        values, vectors = symmetric_eigh(remainder[rows])
        is_positive = values > MIN_RELATIVE_EIGENVALUE * total
        columns = remainder @ (vectors[:, is_positive] * values[is_positive].rsqrt())
        factor = torch.cat([factor, columns], 1)
        unexplained = (unexplained - (columns**2).sum(1)).clamp(min=0)
        chosen.append(best)
        is_chosen[best] = True
    return hashes[chosen]
