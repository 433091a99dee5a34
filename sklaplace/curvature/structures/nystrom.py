"""Nyström structures: all of the data, seen through the rows of some points.

With an orthonormal basis ``U`` of the rows ``R`` of the points, ``H ≈ U (UᵀHU) Uᵀ``:
two passes, one that finds the points and one that adds up ``UᵀHU``. What ``U`` does not
span keeps the prior's variance. ``U = Rᵀ V diag(λ)^-½`` for ``R Rᵀ = V diag(λ) Vᵀ``.

Products with ``U`` are known up to ``ε √(λ_max/λ_min)``: rounding of products with
``R`` is divided by the small ``√λ``. The coordinates of the points themselves are no
products: they are the rows of ``V diag(λ)^½``, so that their own curvature is exact.

``nystrom`` is ELLA (Deng, Zhou and Zhu 2022, "Accelerated linearized Laplace
approximation for Bayesian deep learning") with the variance of the complement.

``variational`` is the same posterior as the optimum of a bound. Among the Gaussians
whose precision is ``diag δ + RᵀAR``, that with ``A`` as above is closest to the Laplace
posterior with all of ``H`` in the sense of Kullback and Leibler, as in VaLLA (Ortega,
Rodríguez-Santana and Hernández-Lobato 2024, "Variational linearized Laplace
approximation for Bayesian deep learning"), and the bound on the evidence is tight up to
``scale/δ tr(H - UUᵀH)`` (Titsias 2009, "Variational learning of inducing variables in
sparse Gaussian processes"). The bound takes the place of the evidence, and points are
chosen one after the other so that this trace becomes small.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.linalg import symmetric_eigh
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures.base import Accumulator, Structure
from sklaplace.curvature.structures.dual import DualForm
from sklaplace.curvature.structures.gp import (
    N_POINTS,
    Compact,
    FunctionSpace,
    PointsAccumulator,
)

# Share of the largest eigenvalue of ``R Rᵀ`` below which a direction is rounding.
TOLERANCE = 1e-14
# rows that greedy points are chosen from, for each of them
POOL = 4


@dataclass(frozen=True)
class Nystrom(FunctionSpace):
    """The curvature of all rows in the span of the points."""

    kind = "nystrom"
    # each keeps points of its own
    is_additive = True
    priors = frozenset({"scalar"})

    def resume(self, accumulator: Accumulator) -> None:
        """What was found; new rows are approximated with points of their own."""
        assert isinstance(accumulator, NystromAccumulator)
        accumulator.known.append(self)


@dataclass(frozen=True)
class CompactNystrom(Compact):
    """The same where there are more rows than parameters."""

    kind = "nystrom"
    is_additive = True


class Bounded(DualForm):
    """Questions whose answer is a bound on that with all of ``H``.

    Attributes
    ----------
    rest : Tensor of shape ()
        ``tr(H - UUᵀH)``, which the points do not explain.
    """

    rest: Tensor
    kind = "variational"
    is_spectral = False

    @property
    def evidence_is_biased_up(self) -> bool:
        """Never: what is left out is part of the bound."""
        return False

    def logdet(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """``log det(scale·UUᵀHUUᵀ + δ) + scale/δ tr(H - UUᵀH)``, in nats."""
        bound = self.trace_correction(prior_precision, scale)
        return super().logdet(prior_precision, scale) + bound

    def trace_correction(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """``scale/δ tr(H - UUᵀH)``, ()."""
        return scale / prior_precision * self.rest


@dataclass(frozen=True)
class Variational(Bounded, Nystrom):
    """Curvature of all rows in the span of the points, and a bound with the rest."""

    rest: Tensor

    def scaled(self, factor: Tensor) -> "Variational":
        """Points and rest of ``factor·H``."""
        found, rest = super().scaled(factor), factor * self.rest
        return Variational(
            self.layout, found.points, found.root, found.is_partial, rest
        )


@dataclass(frozen=True)
class CompactVariational(Bounded, CompactNystrom):
    """The same where there are more rows than parameters."""

    rest: Tensor

    def scaled(self, factor: Tensor) -> "CompactVariational":
        """Rows, points and rest of ``factor·H``."""
        found, rest = super().scaled(factor), factor * self.rest
        return CompactVariational(self.layout, found.rows, found.points, rest)


class NystromAccumulator(PointsAccumulator):
    """Finds points in a first pass over the rows, adds up ``UᵀHU`` in a second.

    Parameters
    ----------
    layout : Layout
        The selected parameters.
    n_points : int
        Different rows of the data that are points, at most.
    """

    def __init__(self, layout: Layout, n_points: int = N_POINTS) -> None:
        super().__init__(layout, n_points)
        self.known: list[Nystrom] = []
        self._chosen: FunctionSpace | None = None  # U is its ``(F R)ᵀ``
        self._seen = torch.zeros(0, dtype=torch.long)  # points in the second pass

    def needs_another_pass(self) -> bool:
        """Once, after the points have been found."""
        if self._chosen is not None:
            return False
        points = FunctionSpace(self.layout, self._choose(), None, self.is_partial)
        values, vectors = symmetric_eigh(points._gram)
        kept = values > TOLERANCE * values[-1]
        basis = vectors[:, kept] * values[kept].rsqrt()
        self._chosen, self._pieces = replace(points, root=basis.T), []
        self._moment = values.new_zeros(len(basis.T), len(basis.T))
        self._rest = values.new_zeros(())
        return True

    def _choose(self) -> tuple[Jacobian, ...]:
        return self.points()

    def update(self, jacobian: Jacobian) -> None:
        """Look for points, or add products with their basis."""
        if self._chosen is None:
            super().update(jacobian)
            return
        keys = _keys(jacobian)
        is_point = torch.isin(keys, _keys_of_columns(self._chosen.points))
        self._seen = torch.cat([self._seen, keys[is_point]]).unique()
        if is_point.all():
            return
        rows = jacobian.take((~is_point).nonzero().flatten())
        one = torch.ones((), dtype=torch.float64, device=rows.blocks[0].g.device)
        inside = self._chosen._cross(rows, one).flatten(0, 1)  # (b·k, q)
        trace = rows.variance(one.expand(self.layout.n_parameters)).sum()
        self._moment += inside.T @ inside
        self._rest += trace - (inside**2).sum()

    def merge(self, other: Accumulator) -> None:
        """Add what another accumulator has found, with its own points."""
        assert isinstance(other, NystromAccumulator)
        self.known += other._parts()

    def _parts(self) -> list[Nystrom]:
        """Approximations of all that was seen, each with its own points."""
        return self.known + ([self._own()] if self._chosen is not None else [])

    def decompose(self) -> Structure:
        """The sum of the approximations."""
        found = self._sum(self._parts())
        return CompactNystrom.of(found) if found.is_wide else found

    def _sum(self, parts: list[Nystrom]) -> Nystrom:
        """One approximation from several, whose points stay apart."""
        points = tuple(point for part in parts for point in part.points)
        roots = [part.root for part in parts if part.root is not None]
        is_partial = any(part.is_partial for part in parts)
        return Nystrom(self.layout, points, torch.block_diag(*roots), is_partial)

    def _own(self) -> Nystrom:
        """``UᵀHU = W diag(e) Wᵀ``, and ``(FR)ᵀ = U W diag(√e)``."""
        assert self._chosen is not None
        basis = self._chosen.root
        assert basis is not None
        seen = torch.isin(_keys_of_columns(self._chosen.points), self._seen)
        # of the points: V diag(λ)^½ from diag(λ)^-½ Vᵀ
        inside = (basis / (basis**2).sum(1, keepdim=True)).T[seen]
        e, w = symmetric_eigh(self._moment + inside.T @ inside)
        root = (w * e.sqrt()).T @ basis
        return Nystrom(self.layout, self._chosen.points, root, self.is_partial)


class VariationalAccumulator(NystromAccumulator):
    """The same with points chosen one after the other.

    Of a pool of four rows for each point, every next point is the row whose own
    curvature the others explain least (greedy conditional variance: Burt, Rasmussen and
    van der Wilk 2020, "Convergence of sparse variational inference in Gaussian
    processes regression").

    Parameters
    ----------
    layout : Layout
        The selected parameters.
    n_points : int
        Different rows of the data that are points, at most.
    """

    def __init__(self, layout: Layout, n_points: int = N_POINTS) -> None:
        super().__init__(layout, POOL * n_points)
        self._n_chosen = n_points

    @staticmethod
    def n_bytes(
        layout: Layout,
        n_rows: int | None = None,
        n_points: int = N_POINTS,
        n_columns: int = 1,
        **options: Any,
    ) -> int:
        """Rows of the pool, and their products with each other."""
        return PointsAccumulator.n_bytes(layout, n_rows, POOL * n_points, n_columns)

    def _choose(self) -> tuple[Jacobian, ...]:
        pool = self.points()
        keys = _keys_of_columns(pool)
        gram = FunctionSpace(self.layout, pool, None, True)._gram
        chosen = _least_explained(gram, keys, self._n_chosen)
        places = [torch.isin(_keys(rows), chosen).nonzero().flatten() for rows in pool]
        pairs = zip(pool, places, strict=True)
        return tuple(rows.take(some) for rows, some in pairs if len(some))

    def decompose(self) -> Structure:
        """The sum of the approximations, and of what each does not explain."""
        found = self._sum(self._parts())
        if found.is_wide:
            return CompactVariational.of(found, rest=found.rest)
        return found

    def _sum(self, parts: list[Nystrom]) -> Variational:
        whole = super()._sum(parts)
        rest = torch.stack([p.rest for p in parts if isinstance(p, Variational)]).sum()
        return Variational(
            self.layout, whole.points, whole.root, whole.is_partial, rest
        )

    def _own(self) -> Variational:
        found = super()._own()
        rest = self._rest.clamp(min=0)
        return Variational(
            self.layout, found.points, found.root, found.is_partial, rest
        )


def _keys(rows: Jacobian) -> Tensor:
    assert rows.keys is not None
    return rows.keys.cpu()


def _keys_of_columns(points: tuple[Jacobian, ...]) -> Tensor:
    """The key of each row of ``R``, (m,)."""
    keys = [_keys(rows).repeat_interleave(rows.n_columns) for rows in points]
    return torch.cat(keys)


def _least_explained(gram: Tensor, keys: Tensor, n: int) -> Tensor:
    """Keys (n,) of rows, each the one that those before it explain least.

    A block Cholesky decomposition of ``gram`` (m, m), pivoted by the trace of what is
    left of a row; entries with the same of ``keys`` (m,) are columns of one row.
    """
    names, owner = keys.unique(return_inverse=True)
    owner = owner.to(gram.device)
    left, factors = gram.diagonal().clone(), gram[:, :0]
    size = float(left.sum())
    chosen: list[int] = []
    for _ in range(min(n, len(names))):
        traces = left.new_zeros(len(names)).index_add_(0, owner, left)
        traces[chosen] = -1.0
        best = int(traces.argmax())
        own = (owner == best).nonzero().flatten()
        rest = gram[:, own] - factors @ factors[own].T
        values, vectors = symmetric_eigh(rest[own])
        kept = values > TOLERANCE * size
        factor = rest @ (vectors[:, kept] * values[kept].rsqrt())
        factors = torch.cat([factors, factor], 1)
        left = (left - (factor**2).sum(1)).clamp(min=0)
        chosen.append(best)
    found: Tensor = names[chosen]
    return found
