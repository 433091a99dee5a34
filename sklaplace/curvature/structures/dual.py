"""Dual form of the full structure: ``H = RᵀR`` for fewer rows than parameters.

With ``B = R (scale/δ)^½``, (n, P), the posterior precision is
``D^½ (I + BᵀB) D^½``, ``D = diag δ``, and by Woodbury's identity everything comes
from the small ``M = I + B Bᵀ = L Lᵀ``, (n, n).
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.linalg import symmetric_eigh
from sklaplace.curvature import priors
from sklaplace.curvature.blocks import CHUNK_ELEMENTS, Block
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.structures.base import (
    Accumulator,
    LastCallCache,
    Projection,
    Structure,
)


class DualForm(Structure):
    """Questions to ``scale·RᵀR + diag δ`` by products with the rows of ``R`` alone.

    Whoever derives from it says how these products are made.
    """

    @cached_property
    @abstractmethod
    def _gram(self) -> Tensor:
        """``R Rᵀ``, (n, n)."""

    @abstractmethod
    def _gram_under(self, prior_precision: Tensor) -> Tensor:
        """``R D⁻¹ Rᵀ``, (n, n)."""

    @abstractmethod
    def _onto(self, weights: Tensor) -> Tensor:
        """``weights Rᵀ`` for (s, P), as (s, n)."""

    @abstractmethod
    def _back(self, shares: Tensor) -> Tensor:
        """``shares R`` for (s, n), as (s, P)."""

    @abstractmethod
    def _cross(self, jacobian: Jacobian, prior_precision: Tensor) -> Tensor:
        """``J D⁻¹ Rᵀ``, (b, c, n), for rows in float64."""

    def product(self, vector: Tensor) -> Tensor:
        """``Rᵀ R v``, (P,)."""
        return self._back(self._onto(vector.unsqueeze(0))).squeeze(0)

    def solve(self, vector: Tensor, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """``D⁻¹ v - D⁻¹ Rᵀ (I/scale + R D⁻¹ Rᵀ)⁻¹ R D⁻¹ v``, (P,)."""
        delta = priors.expand(prior_precision, self.layout)
        inverse = self._inverse(prior_precision, scale)
        shares = self._onto((vector / delta).unsqueeze(0)) @ inverse.T @ inverse
        return (vector - scale * self._back(shares).squeeze(0)) / delta

    @cached_property
    def _eigh(self) -> tuple[Tensor, Tensor]:
        return symmetric_eigh(self._gram)

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of ``H``, (P,), ascending; those of no row are zero."""
        found: Tensor = torch.linalg.eigvalsh(self._gram)
        # there may be more rows than parameters
        found = found.clamp(min=0)[-self.layout.n_parameters :]
        rest = self.layout.n_parameters - len(found)
        return torch.cat([found.new_zeros(rest), found])

    @cached_property
    def _roots(self) -> LastCallCache:
        return LastCallCache()

    def _root(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Cholesky factor ``L`` (n, n) of ``I + B Bᵀ``."""

        def factorise() -> Tensor:
            if prior_precision.ndim == 0:
                gram = self._gram * (scale / prior_precision)
            else:
                gram = self._gram_under(prior_precision) * scale
            identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
            root: Tensor = torch.linalg.cholesky((gram + gram.T) / 2 + identity)
            return root

        found: Tensor = self._roots.get((prior_precision, scale), factorise)
        return found

    def logdet(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """``log det(scale·H + diag δ)``, in nats."""
        many = prior_precision.requires_grad or scale.requires_grad
        if prior_precision.ndim == 0 and many:
            return (scale * self.eigenvalues + prior_precision).log().sum()
        delta = priors.expand(prior_precision, self.layout)
        root = self._root(prior_precision, scale)
        return delta.log().sum() + 2 * root.diagonal().log().sum()

    def project(self, jacobian: Jacobian) -> Projection:
        """Rows against the rows of ``R``."""
        return _DualProjection(self, jacobian.double())

    def covariance(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """Functional covariance ``J (scale·H + diag δ)⁻¹ Jᵀ``, (b, c, c)."""
        whole = jacobian.double()
        delta = priors.expand(prior_precision, self.layout)
        known = self._known(whole, prior_precision, scale)
        return whole.gram(1 / delta) - known @ known.mT

    def covariance_of_rows(
        self, rows: Tensor, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """`covariance` of rows written out, (b, c, P), and in their graph."""
        scaled = rows / priors.expand(prior_precision, self.layout)
        crossed = self._onto(scaled.flatten(0, 1)).unflatten(0, rows.shape[:2])
        known = self._reduced(crossed, prior_precision, scale)
        covariance: Tensor = scaled @ rows.mT - known @ known.mT
        return covariance

    def functional_variance(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """Its diagonal, (b, c)."""
        whole = jacobian.double()
        delta = priors.expand(prior_precision, self.layout)
        known = self._known(whole, prior_precision, scale)
        prior = whole.variance(1 / delta)
        return _less(prior, (known**2).sum(-1))

    def _known(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """``J D^-½ Bᵀ L⁻ᵀ``, (b, c, n): what the data take off the prior's variance."""
        crossed = self._cross(jacobian, prior_precision)
        return self._reduced(crossed, prior_precision, scale)

    def _reduced(
        self, crossed: Tensor, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """The same from ``J D⁻¹ Rᵀ``, (b, c, n)."""
        # products, since solving rounds a row by its place among the others
        return crossed @ self._inverse(prior_precision, scale).T * scale.sqrt()

    @cached_property
    def _inverses(self) -> LastCallCache:
        return LastCallCache()

    def _inverse(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """``L⁻¹``, (n, n)."""

        def invert() -> Tensor:
            root = self._root(prior_precision, scale)
            identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
            found: Tensor = torch.linalg.solve_triangular(root, identity, upper=False)
            return found

        inverse: Tensor = self._inverses.get((prior_precision, scale), invert)
        return inverse

    def whiten(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """Rows ``J D^-½ F`` (b, c, P), ``F Fᵀ = (I + BᵀB)⁻¹``."""
        delta = priors.expand(prior_precision, self.layout)
        whole = jacobian.double()
        root = self._root(prior_precision, scale)
        shares = self._cross(whole, prior_precision) @ _half(root) * scale
        known = self._back(shares.flatten(0, 1)).unflatten(0, shares.shape[:2])
        rows: Tensor = (whole.dense() - known) * delta.rsqrt()
        return rows

    def sample(self, noise: Tensor, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Deviations from the mean, (s, P), from standard-normal noise (s, P)."""
        delta = priors.expand(prior_precision, self.layout)
        shares = self._onto(noise * delta.rsqrt()) * scale
        if prior_precision.ndim:
            shares = shares @ _half(self._root(prior_precision, scale)).T
        else:
            # the symmetric root: I - Bᵀ U diag(1 / (√(1+k) (1 + √(1+k)))) Uᵀ B
            values, vectors = self._eigh
            grown = (1 + values * scale / prior_precision).sqrt()
            shares = shares @ (vectors / (grown * (1 + grown))) @ vectors.T
        return (noise - self._back(shares) * delta.rsqrt()) * delta.rsqrt()

    def variance(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Marginal variances of the weights, (P,)."""
        delta = priors.expand(prior_precision, self.layout)
        inverse = self._inverse(prior_precision, scale)
        known = torch.zeros_like(delta)
        for some in inverse.split(max(1, CHUNK_ELEMENTS // len(delta))):
            known = known + (self._back(some) ** 2).sum(0)
        return (1 - known * scale / delta) / delta

    def effective_dimension(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Number of well-determined directions under a scalar prior, ()."""
        inverse = self._inverse(prior_precision, scale)
        return len(inverse) - (inverse**2).sum()


@dataclass(frozen=True)
class Dual(DualForm):
    """Every correlation between the selected weights, from the rows of ``H``'s root.

    Attributes
    ----------
    rows : Tensor of shape (n, P)
        ``R``, float64; all rows of ``Sᵀ J``.
    """

    rows: Tensor
    kind = "full"
    priors = frozenset({"scalar", "layerwise", "diag"})

    @cached_property
    def _gram(self) -> Tensor:
        gram: Tensor = self.rows @ self.rows.T
        return gram

    def _gram_under(self, prior_precision: Tensor) -> Tensor:
        b = self.rows * priors.expand(prior_precision, self.layout).rsqrt()
        gram: Tensor = b @ b.T
        return gram

    def _onto(self, weights: Tensor) -> Tensor:
        return weights @ self.rows.T

    def _back(self, shares: Tensor) -> Tensor:
        return shares @ self.rows

    def _cross(self, jacobian: Jacobian, prior_precision: Tensor) -> Tensor:
        delta = priors.expand(prior_precision, self.layout)
        return jacobian.matmul((self.rows / delta).T)

    def _known(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """The same, by one product with a matrix that is kept."""

        def solve() -> Tensor:
            delta = priors.expand(prior_precision, self.layout)
            root = self._root(prior_precision, scale)
            b = self.rows * scale.sqrt()
            solved: Tensor = torch.linalg.solve_triangular(root, b, upper=False)
            return (solved / delta).T.contiguous()  # (P, n)

        return jacobian.matmul(self._solved.get((prior_precision, scale), solve))

    @cached_property
    def _solved(self) -> LastCallCache:
        return LastCallCache()

    def __getstate__(self) -> dict[str, Any]:
        """What can be made again stays behind."""
        return {"layout": self.layout, "rows": self.rows}

    def dense(self) -> Tensor:
        """``H`` written out, (P, P)."""
        dense: Tensor = self.rows.T @ self.rows
        return (dense + dense.T) / 2

    def scaled(self, factor: Tensor) -> "Dual":
        """The rows of the root of ``factor·H``."""
        return Dual(self.layout, factor.sqrt() * self.rows)

    def resume(self, accumulator: Accumulator) -> None:
        """The rows."""
        pieces = self.layout.split(self.rows)
        blocks = [Block(piece[:, None, None, :]) for piece in pieces]
        accumulator.update(Jacobian(blocks))


def _less(prior: Tensor, known: Tensor) -> Tensor:
    """What is left of variances, at least their rounding: never certain by accident."""
    left: Tensor = (prior - known).maximum(torch.finfo(prior.dtype).eps * prior)
    return left


def _half(root: Tensor) -> Tensor:
    """``W = L⁻ᵀ (I + L)⁻¹``, with ``(I - BᵀWB)(I - BᵀWB)ᵀ = (I + BᵀB)⁻¹``."""
    identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
    inner = torch.linalg.solve_triangular(identity + root, identity, upper=False)
    half: Tensor = torch.linalg.solve_triangular(root.T, inner, upper=True)
    return half


@dataclass(frozen=True)
class _DualProjection(Projection):
    """``J Jᵀ`` and ``J Rᵀ U`` under scalar priors; rows as they are under others."""

    structure: DualForm
    jacobian: Jacobian

    @cached_property
    def _one(self) -> Tensor:
        return self.structure._eigh[0].new_ones(())

    @cached_property
    def _prior(self) -> Tensor:
        return self.jacobian.gram(self._one.expand(self._p))

    @property
    def _p(self) -> int:
        return self.structure.layout.n_parameters

    @cached_property
    def _crossed(self) -> Tensor:
        """``J Rᵀ U``, (b, c, n)."""
        vectors = self.structure._eigh[1]
        return self.structure._cross(self.jacobian, self._one) @ vectors

    def _shares(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        values = self.structure._eigh[0]
        shares: Tensor = scale / (prior_precision + scale * values)
        return shares

    def covariance(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Functional covariance, (b, c, c), float64."""
        if prior_precision.ndim:
            return self.structure.covariance(self.jacobian, prior_precision, scale)
        known = self._crossed * self._shares(prior_precision, scale)
        return (self._prior - known @ self._crossed.mT) / prior_precision

    def variance(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Its diagonal, (b, c), float64."""
        if prior_precision.ndim:
            return self.structure.functional_variance(
                self.jacobian, prior_precision, scale
            )
        known = self._crossed**2 @ self._shares(prior_precision, scale)
        prior = self._prior.diagonal(dim1=1, dim2=2)
        return _less(prior, known) / prior_precision
