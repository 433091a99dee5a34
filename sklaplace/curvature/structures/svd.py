"""Posterior precision from a singular value decomposition of ``R``, where ``H = RᵀR``.

With ``√scale R D^-½ = U diag(√k) Vᵀ``, ``P = D^½ (I + V diag(k) Vᵀ) D^½``. The SVD
costs several times as much as Woodbury's identity with ``R Rᵀ``. However, it resolves
eigenvalues down to ``eps²`` times the largest eigenvalue, instead of ``eps`` times. Use
the SVD for problems with almost no noise and a wide prior.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sklaplace.core.parallel import cached_property
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.structures import base


@dataclass(frozen=True)
class SVDPrecision(base.Precision):
    """``P = D^½ (I + V diag(k) Vᵀ) D^½`` for a dense root.

    Attributes
    ----------
    rows : Tensor of shape (n, P)
        ``R``.
    """

    rows: Tensor

    @cached_property
    def _svd(self) -> tuple[Tensor, Tensor]:
        """``k`` (n,), descending, and ``V`` (P, n)."""
        scaled = self.rows * (self.scale.sqrt() * self.delta.rsqrt())
        _, singular, vectors = torch.linalg.svd(scaled, full_matrices=False)
        return singular**2, vectors.mT

    def _shrunk(self, weights: Tensor) -> Tensor:
        """Return ``w (I + V diag(k) Vᵀ)^-½``, (..., P), without cancellation.

        The part of ``w`` in the span of ``V`` (P, n) shrinks by ``(1 + k)^-½``. The
        part outside does not change.
        """
        k, vectors = self._svd
        inside = weights @ vectors
        outside = weights - inside @ vectors.mT
        return outside + (inside * (1 + k).rsqrt()) @ vectors.mT

    def logdet(self) -> Tensor:
        """Return ``Σ log δ + Σ log(1 + k)``, ()."""
        return self.delta.log().sum() + self._svd[0].log1p().sum()

    def solve(self, vector: Tensor) -> Tensor:
        """Return ``P⁻¹ v``, (P,)."""
        inverse_sd = self.delta.rsqrt()
        return self._shrunk(self._shrunk(vector * inverse_sd)) * inverse_sd

    def variance(self) -> Tensor:
        """Return the diagonal of ``P⁻¹``, (P,).

        A weight's squared entries in the span of ``V`` shrink by ``1/(1 + k)``. The
        rest, one minus their sum, does not.
        """
        k, vectors = self._svd
        squares = vectors**2
        outside = (1 - squares.sum(1)).clamp(min=0)  # rounding may be negative
        return (outside + squares @ (1 / (1 + k))) / self.delta

    def effective_dimension(self) -> Tensor:
        """Return ``γ = Σ k / (1 + k)``, ()."""
        k = self._svd[0]
        return (k / (1 + k)).sum()

    def sample(self, noise: Tensor) -> Tensor:
        """Return ``D^-½ (I + V diag(k) Vᵀ)^-½ ε``, (s, P)."""
        return self._shrunk(noise) * self.delta.rsqrt()

    def covariance_of_rows(self, rows: Tensor) -> Tensor:
        """Return ``J P⁻¹ Jᵀ``, (b, c, c), for a dense ``J``."""
        whitened = self._shrunk(rows * self.delta.rsqrt())
        return whitened @ whitened.mT

    def whiten(self, jacobian: Jacobian) -> Tensor:
        """Return ``J D^-½ (I + V diag(k) Vᵀ)^-½``, (b, c, P)."""
        return self._shrunk(jacobian.double().dense() * self.delta.rsqrt())
