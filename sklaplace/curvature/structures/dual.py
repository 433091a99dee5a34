"""Dual form ``H = RᵀR`` of a structure, for a root ``R`` (n, P) with n < P.

With ``D = diag δ`` and ``B = (scale·D⁻¹)^½ Rᵀ``, the posterior precision is
``P = D^½ (I + BBᵀ) D^½``. By Woodbury's identity, all results follow from the Cholesky
factorisation ``L Lᵀ = I + BᵀB``, (n, n).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sklaplace.core.budget import KEPT_BUDGET
from sklaplace.core.linalg import symmetric_eigh
from sklaplace.core.parallel import cached_property
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.rows import CHUNK_ELEMENTS, Block, LayerRows
from sklaplace.curvature.structures import base
from sklaplace.curvature.structures.root import DenseRoot, Root, identity, lower_inverse
from sklaplace.curvature.structures.rounding import UNRESOLVED
from sklaplace.curvature.structures.svd import SVDPrecision

# Above this trace of scale·R D⁻¹ Rᵀ, the relative rounding error of variances would
# exceed 2e-4. R is then decomposed instead of R Rᵀ.
MAX_TRACE_FOR_GRAM = 1e12
# Maximum number of entries of R for this decomposition.
MAX_SVD_ENTRIES = 2**27
# Maximum number of operations for this decomposition, about ten seconds on one core.
MAX_SVD_OPERATIONS = 2**34


class DualForm(base.Structure):
    """``H = RᵀR``, used through products with ``R``.

    Attributes
    ----------
    root : Root
        ``R``.
    """

    root: Root

    @cached_property
    def gram(self) -> Tensor:
        """``R Rᵀ``, (n, n)."""
        return self.root.gram()

    @cached_property
    def layer_grams(self) -> Tensor | None:
        """``R Rᵀ`` over the columns of each parameter tensor, (L, n, n).

        None if the matrices and two temporary copies are too large to keep, or if they
        are differentiable.
        """
        n_layers, n = len(self.layout.blocks), self.root.n_rows
        # three float64 arrays (L, n, n)
        if 3 * 8 * n_layers * n**2 > KEPT_BUDGET or self.gram.requires_grad:
            return None
        # an infinite prior precision removes a tensor from R D⁻¹ Rᵀ
        deltas = self.gram.new_full((n_layers, n_layers), torch.inf).fill_diagonal_(1)
        return torch.stack([self.root.gram(delta) for delta in deltas])

    @cached_property
    def eigh(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (n,) and eigenvectors (n, n) of ``R Rᵀ``."""
        return symmetric_eigh(self.gram)

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of ``H``, (P,), ascending: zeros, then those of ``R Rᵀ``."""
        p = self.layout.n_parameters
        values = torch.linalg.eigvalsh(self.gram).clamp(min=0)[-p:]
        return torch.cat([values.new_zeros(p - len(values)), values])

    def dense(self) -> Tensor:
        """Return ``H`` as a matrix, (P, P)."""
        rows = self.root.dense()
        dense = rows.T @ rows
        return (dense + dense.T) / 2

    def product(self, vector: Tensor) -> Tensor:
        """Return ``Rᵀ R v``, (P,)."""
        return self.root.rmatmul(self.root.matmul(vector.unsqueeze(0))).squeeze(0)

    @cached_property
    def _trace(self) -> Tensor:
        return self.root.trace()

    def trace(self) -> Tensor:
        """Return ``tr RᵀR``, ()."""
        return self._trace

    @property
    def _is_decomposable(self) -> bool:
        """Whether ``R`` is small enough for a dense decomposition."""
        n, p = self.root.n_rows, self.layout.n_parameters
        return n * p <= MAX_SVD_ENTRIES and n * p * min(n, p) <= MAX_SVD_OPERATIONS

    def hessian_diagonal(self) -> Tensor:
        """Return the diagonal of ``RᵀR``, (P,)."""
        return _squared_column_norms(self.root, identity(self.gram))

    def rounding(self, eps: float) -> float:
        """Return the rounding error of ``H``, smaller if ``R`` can be decomposed."""
        eps_of_sums = torch.finfo(torch.float64).eps
        return max(eps**2, eps_of_sums**2 if self._is_decomposable else eps_of_sums)

    def precision(self, prior_precision: Tensor, scale: Tensor) -> base.Precision:
        """Return ``P = scale·RᵀR + diag δ``, by Woodbury's identity or by an SVD.

        The SVD of ``R`` resolves smaller eigenvalues. It is used if the curvature is so
        large relative to the prior that rounding of ``R Rᵀ`` matters, and if ``R`` is
        small enough.
        """
        # an upper bound on the trace of scale·R D⁻¹ Rᵀ
        trace = self.trace() * scale.detach() / prior_precision.detach().min()
        if float(trace) > MAX_TRACE_FOR_GRAM and self._is_decomposable:
            return SVDPrecision(self, prior_precision, scale, self.root.dense())
        return DualPrecision(self, prior_precision, scale)

    def project(self, jacobian: Jacobian) -> base.Projection:
        """Prepare ``J Jᵀ`` and ``J Rᵀ U``, which are computed only once."""
        return DualProjection(self, jacobian.double())


class DualPrecision(base.Precision):
    """``P = scale·RᵀR + D``, by Woodbury's identity.

    ``P⁻¹ = D⁻¹ - D⁻¹ WᵀW D⁻¹`` with ``W = √scale L⁻¹ R``, (n, P).
    """

    structure: DualForm

    @cached_property
    def _cholesky(self) -> Tensor:
        """``L`` (n, n), lower triangular, ``L Lᵀ = I + scale·R D⁻¹ Rᵀ``.

        The decomposition fails if rounding errors of the product exceed ``I``.
        """
        # the stored R Rᵀ is enough for scalar priors
        if self.prior_precision.ndim == 0:
            gram = self.structure.gram * (self.scale / self.prior_precision)
        else:
            gram = self.structure.root.gram(self.prior_precision) * self.scale
        lower, failed = torch.linalg.cholesky_ex((gram + gram.T) / 2 + identity(gram))
        if failed:
            raise ValueError(UNRESOLVED)
        return lower

    @cached_property
    def _inverse(self) -> Tensor:
        """``L⁻¹``, (n, n)."""
        return lower_inverse(self._cholesky)

    @cached_property
    def _half(self) -> Tensor:
        """``M = L⁻ᵀ (I + L)⁻¹``, with ``(I - BMBᵀ)(I - BMBᵀ)ᵀ = (I + BBᵀ)⁻¹``."""
        lower = self._cholesky
        return self._inverse.T @ lower_inverse(identity(lower) + lower)

    @cached_property
    def _whitened_root(self) -> Root:
        """``W = √scale L⁻¹ R``."""
        # solve for R once, not for each J: rounding of a row depends on its position
        return self.structure.root.solved(self._cholesky / self.scale.sqrt())

    def logdet(self) -> Tensor:
        """Return ``log det P = Σ log δ + 2 Σ log diag L``, ().

        If gradients are needed, cheaper forms avoid derivatives of ``L``. They use the
        eigenvalues of ``H`` for a scalar prior, and a series for layerwise priors. The
        series replaces only the derivatives; `_taylor_increment` itself is zero.
        """
        asks_gradient = self.prior_precision.requires_grad or self.scale.requires_grad
        if self.prior_precision.ndim == 0 and asks_gradient:
            e = self.scale * self.structure.eigenvalues
            return (e + self.prior_precision).log().sum()
        value = 2 * self._cholesky.diagonal().log().sum()
        is_layerwise = len(self.structure.layout.blocks) == self.prior_precision.numel()
        grams = self.structure.layer_grams if asks_gradient and is_layerwise else None
        if grams is not None:
            value = value.detach() + self._taylor_increment(grams)
        return self.delta.log().sum() + value

    def _taylor_increment(self, grams: Tensor) -> Tensor:
        """Return a zero whose first two derivatives are those of ``log det L Lᵀ``, ().

        For ``L Lᵀ = I + Σ aᵢ Gᵢ`` with ``a = scale/δ`` (L,), and ``M = (L Lᵀ)⁻¹``, the
        gradient in ``a`` is ``tr M Gᵢ`` and the Hessian is ``-tr M Gᵢ M Gⱼ``. The
        second-order Taylor series is cheaper than derivatives of ``L``. ``grams``
        (L, n, n) contains ``Gᵢ``, the product ``R Rᵀ`` for each parameter tensor.
        """
        products = torch.cholesky_inverse(self._cholesky.detach()) @ grams
        gradient = products.diagonal(dim1=1, dim2=2).sum(1)
        minus_hessian = products.flatten(1) @ products.mT.flatten(1).T
        a = self.scale / self.prior_precision
        step = a - a.detach()  # zero, with the derivatives of a
        return step @ (gradient - minus_hessian @ step / 2)

    def solve(self, vector: Tensor) -> Tensor:
        """Return ``D⁻¹ (v - Wᵀ W D⁻¹ v)``, (P,)."""
        w, delta = self._whitened_root, self.delta
        explained = w.rmatmul(w.matmul((vector / delta).unsqueeze(0))).squeeze(0)
        return (vector - explained) / delta

    def variance(self) -> Tensor:
        """Return ``1/δ - diag(WᵀW)/δ²``, (P,)."""
        delta = self.delta
        explained = _squared_column_norms(self.structure.root, self._inverse)
        return (1 - explained * self.scale / delta) / delta

    def effective_dimension(self) -> Tensor:
        """Return ``γ = n - ‖L⁻¹‖²`` under a scalar prior, ()."""
        return len(self._inverse) - (self._inverse**2).sum()

    def sample(self, noise: Tensor) -> Tensor:
        """Return ``D^-½ (I - B M Bᵀ) ε``, (s, P), for standard-normal noise ``ε``.

        Here ``B = (scale·D⁻¹)^½ Rᵀ``, and `_half` defines ``M``. Under a scalar prior,
        a symmetric ``M`` is used instead. The samples are then ``P^(-1/2) ε`` with the
        symmetric root, which is unique.
        """
        root, inverse_sd = self.structure.root, self.delta.rsqrt()
        # √scale·Bᵀε, (s, n); B occurs twice, so both factors √scale are put here
        products = root.matmul(noise * inverse_sd) * self.scale
        if self.prior_precision.ndim:
            products = products @ self._half.T
        else:
            # M = U diag(1 / (√(1+k) (1 + √(1+k)))) Uᵀ for BᵀB = U diag(k) Uᵀ
            values, vectors = self.structure.eigh
            root_k = (1 + values * self.scale / self.prior_precision).sqrt()
            products = products @ (vectors / (root_k * (1 + root_k))) @ vectors.T
        return (noise - root.rmatmul(products) * inverse_sd) * inverse_sd

    def _explained(self, jacobian: Jacobian) -> Tensor:
        """Return ``J D⁻¹ Wᵀ``, (b, c, n), the root of the reduction in covariance."""
        return self._whitened_root.cross(jacobian, self.prior_precision)

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        """Return ``J D⁻¹ Jᵀ - (J D⁻¹ Wᵀ)(J D⁻¹ Wᵀ)ᵀ``, (b, c, c)."""
        wide = jacobian.double()
        explained = self._explained(wide)
        return wide.gram(1 / self.delta) - explained @ explained.mT

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        """Return the diagonal of the functional covariance, (b, c)."""
        wide = jacobian.double()
        explained = (self._explained(wide) ** 2).sum(-1)
        return _posterior_variances(wide.variance(1 / self.delta), explained)

    def covariance_of_rows(self, rows: Tensor) -> Tensor:
        """Return ``J D⁻¹ Jᵀ - (J D⁻¹ Wᵀ)(J D⁻¹ Wᵀ)ᵀ`` of a dense ``J``, (b, c, c).

        The first term is the prior covariance. The second term is the reduction by the
        data, with ``W = √scale L⁻¹ R``.
        """
        scaled = rows / self.delta
        explained = self._whitened_root.matmul(scaled.flatten(0, 1))
        explained = explained.unflatten(0, rows.shape[:2])
        return scaled @ rows.mT - explained @ explained.mT

    def whiten(self, jacobian: Jacobian) -> Tensor:
        """Return ``J D^-½ (I - B M Bᵀ)``, (b, c, P), with ``B = (scale·D⁻¹)^½ Rᵀ``.

        The product of the result with its transpose is ``J P⁻¹ Jᵀ``; `_half` defines
        ``M``.
        """
        wide, root = jacobian.double(), self.structure.root
        products = root.cross(wide, self.prior_precision) @ self._half  # (b, c, n)
        # B occurs twice, so both factors √scale are put here
        explained = root.rmatmul(products.flatten(0, 1) * self.scale)
        rows = wide.dense() - explained.unflatten(0, products.shape[:2])
        return rows * self.delta.rsqrt()


@dataclass(frozen=True)
class DualProjection(base.Projection):
    """``J Jᵀ`` and ``J Rᵀ U`` for scalar priors, with ``R Rᵀ = U diag(k) Uᵀ``.

    ``J P⁻¹ Jᵀ = (J Jᵀ - J Rᵀ U diag(scale / (δ + scale·k)) Uᵀ R Jᵀ) / δ``.
    """

    structure: DualForm
    jacobian: Jacobian

    @cached_property
    def _prior(self) -> Tensor:
        ones = self.structure.gram.new_ones(self.structure.layout.n_parameters)
        return self.jacobian.gram(ones)

    @cached_property
    def _crossed(self) -> Tensor:
        return self.structure.root.cross(self.jacobian) @ self.structure.eigh[1]

    def covariance(
        self, precision: base.Precision, *, diagonal: bool = False
    ) -> Tensor:
        """Return ``J P⁻¹ Jᵀ`` of each sample, (b, c, c), or its diagonal, (b, c).

        Under a scalar prior, this is ``(J Jᵀ - C diag(w) Cᵀ) / δ`` with the stored
        products ``J Jᵀ`` and ``C = J Rᵀ U``, for ``R Rᵀ = U diag(k) Uᵀ`` and
        ``w = scale / (δ + scale·k)``.
        """
        delta, scale = precision.prior_precision, precision.scale
        if delta.ndim:  # the products hold only for scalar priors
            return precision.output_covariance(self.jacobian, diagonal=diagonal)
        weights = scale / (delta + scale * self.structure.eigh[0])
        if diagonal:
            prior = self._prior.diagonal(dim1=1, dim2=2)
            return _posterior_variances(prior, self._crossed**2 @ weights) / delta
        return (self._prior - (self._crossed * weights) @ self._crossed.mT) / delta


@dataclass(frozen=True)
class Dual(DualForm):
    """Full matrix ``H``, represented by the rows ``R = SᵀJ`` of all samples."""

    root: DenseRoot
    name = "full"
    priors = frozenset({"scalar", "layerwise", "diag"})

    def scaled(self, factor: Tensor) -> "Dual":
        """Return the structure of ``factor·H``."""
        return Dual(self.layout, self.root.scaled(factor))

    def with_output_factors(self, factors: Tensor) -> "Dual | None":
        """Return the structure of ``D H D``, with rows ``R D``."""
        rows = self.root.dense() * self.layout.expand_outputs(factors)
        return Dual(self.layout, DenseRoot(self.layout, rows))

    def add_to(self, accumulator: base.Accumulator) -> None:
        """Put the rows into an empty accumulator, as samples with one output each."""
        by_tensor = self.layout.split(self.root.rows)
        # (samples, outputs, positions, weights)
        blocks = [Block(rows[:, None, None, :]) for rows in by_tensor]
        accumulator.update(Jacobian([LayerRows((block,)) for block in blocks]))


def _squared_column_norms(root: Root, factor: Tensor) -> Tensor:
    """Return squared norms (P,) of the columns of ``F R``, for ``F`` (m, n).

    They are the diagonal of ``(F R)ᵀ F R``. ``F R`` (m, P) is computed in chunks of
    rows, because it may be large.
    """
    p = root.layout.n_parameters
    squares = factor.new_zeros(p)
    # at least one row per chunk
    for rows in factor.split(max(1, CHUNK_ELEMENTS // p)):
        squares = squares + (root.rmatmul(rows) ** 2).sum(0)
    return squares


def _posterior_variances(prior: Tensor, explained: Tensor) -> Tensor:
    """Return ``prior - explained`` variances, at least ``eps`` times the prior ones.

    Rounding could otherwise make the difference zero or negative.
    """
    return (prior - explained).maximum(torch.finfo(prior.dtype).eps * prior)
