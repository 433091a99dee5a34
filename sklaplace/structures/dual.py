"""Dual form of the full structure: ``H = RᵀR`` for fewer rows than parameters.

With ``B = R (scale/δ)^½``, (n, P), the posterior precision is
``D^½ (I + BᵀB) D^½``, ``D = diag δ``, and by Woodbury's identity everything comes
from the small ``M = I + B Bᵀ = L Lᵀ``, (n, n).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sklaplace import priors
from sklaplace.blocks import Block
from sklaplace.jacobians import Jacobian
from sklaplace.linalg import symmetric_eigh
from sklaplace.structures.base import (
    Accumulator,
    Projection,
    Remembered,
    Structure,
)


@dataclass(frozen=True)
class Dual(Structure):
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

    @cached_property
    def _eigh(self) -> tuple[Tensor, Tensor]:
        return symmetric_eigh(self._gram)

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of ``H``, (P,), ascending; those of no row are zero."""
        found: Tensor = torch.linalg.eigvalsh(self._gram)
        n, p = self.rows.shape
        return torch.cat([found.new_zeros(p - n), found.clamp(min=0)])

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

    def product(self, vector: Tensor) -> Tensor:
        """``Rᵀ R v``, (P,)."""
        product: Tensor = self.rows.T @ (self.rows @ vector)
        return product

    def resume(self, accumulator: Accumulator) -> None:
        """The rows."""
        pieces = self.layout.split(self.rows)
        blocks = [Block(piece[:, None, None, :]) for piece in pieces]
        accumulator.update(Jacobian(blocks))

    @cached_property
    def _factors(self) -> Remembered:
        return Remembered()

    def _scaled(self, prior_precision: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """``B`` (n, P) and the Cholesky factor ``L`` (n, n) of ``I + B Bᵀ``."""

        def factorise() -> tuple[Tensor, Tensor]:
            delta = priors.expand(prior_precision, self.layout)
            b = self.rows * (scale / delta).sqrt()
            if prior_precision.ndim == 0:
                gram = self._gram * (scale / prior_precision)
            else:
                gram = b @ b.T
            identity = torch.eye(len(b), dtype=b.dtype, device=b.device)
            root: Tensor = torch.linalg.cholesky((gram + gram.T) / 2 + identity)
            return b, root

        return self._factors.get((prior_precision, scale), factorise)

    def logdet(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """``log det(scale·H + diag δ)``, in nats."""
        many = prior_precision.requires_grad or scale.requires_grad
        if prior_precision.ndim == 0 and many:
            return (scale * self.eigenvalues + prior_precision).log().sum()
        delta = priors.expand(prior_precision, self.layout)
        _, root = self._scaled(prior_precision, scale)
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

    def functional_variance(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """Its diagonal, (b, c)."""
        whole = jacobian.double()
        delta = priors.expand(prior_precision, self.layout)
        known = self._known(whole, prior_precision, scale)
        return (whole.variance(1 / delta) - (known**2).sum(-1)).clamp(min=0)

    def _known(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """``J D^-½ Bᵀ L⁻ᵀ``, (b, c, n): what the data take off the prior's variance."""

        def solve() -> Tensor:
            delta = priors.expand(prior_precision, self.layout)
            b, root = self._scaled(prior_precision, scale)
            solved: Tensor = torch.linalg.solve_triangular(root, b, upper=False)
            return (solved * delta.rsqrt()).T.contiguous()  # (P, n)

        return jacobian.matmul(self._solved.get((prior_precision, scale), solve))

    @cached_property
    def _solved(self) -> Remembered:
        return Remembered()

    def whiten(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """Rows ``J D^-½ F`` (b, c, P), ``F Fᵀ = (I + BᵀB)⁻¹``."""
        delta = priors.expand(prior_precision, self.layout)
        rows = jacobian.double().dense() * delta.rsqrt()
        b, root = self._scaled(prior_precision, scale)
        return rows - (rows @ b.T) @ _half(root) @ b

    def sample(self, noise: Tensor, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Deviations from the mean, (s, P), from standard-normal noise (s, P)."""
        delta = priors.expand(prior_precision, self.layout)
        b, root = self._scaled(prior_precision, scale)
        if prior_precision.ndim:
            return (noise - (noise @ b.T) @ _half(root).T @ b) * delta.rsqrt()
        # the symmetric root: I - Bᵀ U diag(1 / (√(1+k) (1 + √(1+k)))) Uᵀ B
        values, vectors = self._eigh
        grown = (1 + values * scale / prior_precision).sqrt()
        inner = (vectors / (grown * (1 + grown))) @ vectors.T
        return (noise - (noise @ b.T) @ inner @ b) * delta.rsqrt()

    def variance(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Marginal variances of the weights, (P,)."""
        delta = priors.expand(prior_precision, self.layout)
        b, root = self._scaled(prior_precision, scale)
        known: Tensor = torch.linalg.solve_triangular(root, b, upper=False)
        return (1 - (known**2).sum(0)) / delta

    def effective_dimension(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Number of well-determined directions under a scalar prior, ()."""
        _, root = self._scaled(prior_precision, scale)
        identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
        inverse: Tensor = torch.linalg.solve_triangular(root, identity, upper=False)
        return len(root) - (inverse**2).sum()


def _half(root: Tensor) -> Tensor:
    """``W = L⁻ᵀ (I + L)⁻¹``, with ``(I - BᵀWB)(I - BᵀWB)ᵀ = (I + BᵀB)⁻¹``."""
    identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
    inner = torch.linalg.solve_triangular(identity + root, identity, upper=False)
    half: Tensor = torch.linalg.solve_triangular(root.T, inner, upper=True)
    return half


@dataclass(frozen=True)
class _DualProjection(Projection):
    """``J Jᵀ`` and ``J Rᵀ U`` under scalar priors; rows as they are under others."""

    structure: Dual
    jacobian: Jacobian

    @cached_property
    def _prior(self) -> Tensor:
        return self.jacobian.gram(self.structure.rows.new_ones(self._p))

    @property
    def _p(self) -> int:
        return self.structure.layout.n_parameters

    @cached_property
    def _crossed(self) -> Tensor:
        """``J Rᵀ U``, (b, c, n)."""
        vectors = self.structure._eigh[1]
        return self.jacobian.matmul(self.structure.rows.T @ vectors)

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
        return ((prior - known) / prior_precision).clamp(min=0)
