"""Base classes of structures, which store and factorise an approximation of ``H``.

An `Accumulator` sums the curvature over batches and decomposes the sum into a
`Structure`, which does not depend on hyperparameters. With a prior precision ``δ`` and
a likelihood scale ``1/(σ²T)``, a structure has the posterior precision
``P = scale·H + diag δ``. A `Precision` computes its factors once, when first needed.

Most structures are `Diagonalised`: ``H = Q diag(e) Qᵀ``. One decomposition is enough
for all prior precisions and scales.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

import torch
from torch import Tensor

from sklaplace.core.checks import Check
from sklaplace.core.linalg import all_finite
from sklaplace.core.parallel import cached_property
from sklaplace.core.serialise import FieldsOnly
from sklaplace.curvature import priors
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.rows import LayerRows, total, variance, with_entries

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def cache_last_call(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a method's last result again while its first argument is the same object.

    The first argument must determine all other arguments. Arguments are compared by
    identity, because comparing tensors would take a pass over them.
    """
    name = f"_last_{method.__name__}"

    @wraps(method)
    def cached(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        self, key = args[:2]  # the key is the method's first argument
        # a dataclass may be frozen, so the result is put into its dictionary;
        # (key, result) in one attribute, so that threads always see both
        key_and_result = vars(self).get(name)
        if key_and_result is None or key_and_result[0] is not key:
            key_and_result = vars(self)[name] = key, method(*args, **kwargs)
        return key_and_result[1]

    return cached


class Accumulator(ABC):
    """Sum of the curvature over batches, without normalisation."""

    checks: ClassVar[Mapping[str, Check]] = {}
    """Options of the constructor, each with a check of its value."""

    takes_matrices: ClassVar[bool] = False
    """Whether the accumulator supports `add_matrix`."""

    takes_keys: ClassVar[bool] = False
    """Whether `update` needs sample hashes; see `sklaplace.core.random.row_hash`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @classmethod
    @abstractmethod
    def n_bytes(cls, layout: Layout, n_rows: int | None = None, **options: Any) -> int:
        """Return the expected peak memory of the factorisation, in bytes.

        ``n_rows`` is the number of rows of the Jacobian, if known. The option
        ``n_columns`` is the number of rows per sample.
        """

    @classmethod
    def row_elements(cls, layout: Layout, n_columns: int, **options: Any) -> int:
        """Return how many values are stored per sample besides its Jacobian factors."""
        return 0

    def add_matrix(self, hessian: Tensor, *, is_semidefinite: bool = False) -> None:
        """Add a symmetric matrix (P, P), which may be indefinite."""
        raise TypeError(f"{type(self).__name__} adds up rows, not matrices.")

    @abstractmethod
    def update(self, jacobian: Jacobian) -> None:
        """Add ``(SᵀJ)ᵀ SᵀJ``, given the rows ``SᵀJ`` of one batch."""

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Add the curvature of another accumulator, from other samples."""

    def needs_another_pass(self) -> bool:
        """Return whether another pass over all batches is needed."""
        return False

    @abstractmethod
    def decompose(self) -> "Structure":
        """Return the structure of the sum, which later updates do not change."""


class SumAccumulator(Accumulator):
    """Accumulator that sums tensors of one shape."""

    sums: Tensor | None = None
    """Current sum, float64, updated in place; None before the first batch."""

    def _add(self, sums: Tensor) -> None:
        self.sums = sums if self.sums is None else self.sums.add_(sums)

    def merge(self, other: Self) -> None:
        """Add the sum of another accumulator."""
        if other.sums is not None:
            self._add(other.sums.clone())


@dataclass(frozen=True)
class Structure(FieldsOnly, ABC):
    """Immutable, stored approximation of ``H``.

    Attributes
    ----------
    layout : Layout
        The selected parameters.
    """

    layout: Layout
    priors: ClassVar[frozenset[str]]
    """Prior structures that `precision` supports."""
    keeps_factors: ClassVar[bool] = False
    """Whether rotated rows keep the output gradients that all samples share."""
    is_spectral: ClassVar[bool] = True
    """Whether ``log det P = Σ log(scale·e + δ)`` under a scalar prior."""
    name: ClassVar[str]
    """Name in the registry."""
    is_additive: ClassVar[bool] = True
    """Whether the structures of two summands of ``H`` determine the sum's structure."""

    @property
    def evidence_is_biased_up(self) -> bool:
        """Whether ``log det P`` omits some curvature, making the evidence too large."""
        return False

    @property
    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """Eigenvalues ``e`` of ``H``, (P,), non-negative."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return ``H`` as a matrix, (P, P), for small models and tests."""

    @abstractmethod
    def add_to(self, accumulator: Accumulator) -> None:
        """Add ``H`` to an empty accumulator, which then accepts more batches."""

    @abstractmethod
    def scaled(self, factor: Tensor) -> "Structure":
        """Return the structure of ``factor·H``, as if sample weights were scaled."""

    def with_output_factors(self, factors: Tensor) -> "Structure | None":
        """Return the structure of ``D H D`` for weights of one layer, or None.

        ``D`` multiplies the weights by factors (o,), one for each output of the layer.
        This is how ``H`` changes with the noise levels of outputs with own weights.
        None means that the structure of ``H`` does not determine the result.
        """
        return None

    @abstractmethod
    def product(self, vector: Tensor) -> Tensor:
        """Return ``H v``, (P,), without forming ``H``."""

    def trace(self) -> Tensor:
        """Return ``tr H``, ()."""
        return self.eigenvalues.sum()

    @abstractmethod
    def hessian_diagonal(self) -> Tensor:
        """Return the diagonal of ``H``, (P,)."""

    def rounding(self, eps: float) -> float:
        """Return the rounding error of ``H`` relative to its diagonal.

        The error is the float64 rounding of sums, or ``eps²`` if columns of ``J``
        cancel, where ``eps`` is the relative rounding error of ``J``.
        """
        return max(eps**2, torch.finfo(torch.float64).eps)

    @abstractmethod
    def precision(self, prior_precision: Tensor, scale: Tensor) -> "Precision":
        """Return ``scale·H + diag δ`` for ``δ`` (), (L,) or (P,), and ``scale`` ()."""

    @abstractmethod
    def project(self, jacobian: Jacobian) -> "Projection":
        """Prepare the Jacobian of a batch for use with many prior precisions."""


@dataclass(frozen=True)
class Precision(FieldsOnly, ABC):
    """Posterior precision ``P = scale·H + diag δ``, and quantities derived from it.

    All results are float64 and differentiable in ``δ`` and ``scale``.

    Attributes
    ----------
    structure : Structure
        Structure of ``H``.
    prior_precision : Tensor of shape (), (L,) or (P,)
        ``δ``: one value for all weights, per parameter tensor or per weight.
    scale : Tensor of shape ()
        Factor of ``H``.
    """

    structure: Structure
    prior_precision: Tensor
    scale: Tensor

    @property
    def in_eigenbasis(self) -> "EigenPrecision | None":
        """The same precision in the eigenbasis of ``H``, or None."""
        return None

    @property
    def delta(self) -> Tensor:
        """``δ`` of each weight, (P,)."""
        return priors.expand(self.prior_precision, self.structure.layout)

    @abstractmethod
    def logdet(self) -> Tensor:
        """Return ``log det P``, in nats, ()."""

    @abstractmethod
    def solve(self, vector: Tensor) -> Tensor:
        """Return ``P⁻¹ v``, (P,)."""

    @abstractmethod
    def variance(self) -> Tensor:
        """Return marginal variances of the weights, the diagonal of ``P⁻¹``, (P,)."""

    @abstractmethod
    def sample(self, noise: Tensor) -> Tensor:
        """Draw samples of ``N(0, P⁻¹)``, (s, P), from standard-normal noise (s, P).

        Under a scalar prior, the samples are ``P^(-1/2) ε`` with the symmetric root.
        This root is unique, whereas the signs and order of eigenvectors vary between
        devices and with the last digit of ``H``.
        """

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        """Return ``J P⁻¹ Jᵀ`` of each sample, (b, c, c)."""
        return self.covariance_of_rows(jacobian.double().dense())

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        """Return the diagonal of `functional_covariance`, (b, c), at lower cost."""
        return (self.whiten(jacobian) ** 2).sum(-1)

    @abstractmethod
    def covariance_of_rows(self, rows: Tensor) -> Tensor:
        """Return ``J P⁻¹ Jᵀ``, (b, c, c), for dense ``J`` (b, c, P), differentiably."""

    @abstractmethod
    def whiten(self, jacobian: Jacobian) -> Tensor:
        """Return ``J F`` with ``F Fᵀ = P⁻¹``, (b, c, P).

        Products of the rows of two samples are covariances between their outputs.
        """

    def effective_parameters(self) -> Tensor:
        """Return ``diag(P⁻¹ scale·H) = 1 - δ diag(P⁻¹)``, (P,), between zero and one.

        The sum of these values is MacKay's γ, the effective number of parameters
        (MacKay 1992, "Bayesian interpolation", eq. 4.9).
        """
        return 1 - self.delta * self.variance()

    def effective_dimension(self) -> Tensor:
        """Return ``γ = Σ scale·e / (scale·e + δ)`` under a scalar prior, ()."""
        e = self.scale * self.structure.eigenvalues
        return (e / (e + self.prior_precision)).sum()

    def output_covariance(self, jacobian: Jacobian, *, diagonal: bool) -> Tensor:
        """Return variances (b, c) of outputs, or covariances (b, c, c) per sample."""
        if diagonal:
            return self.functional_variance(jacobian)
        return self.functional_covariance(jacobian)

    def trace_correction(self) -> Tensor:
        """Return `logdet` minus ``log det P``, (); zero unless `logdet` is a bound."""
        return torch.zeros_like(self.scale)


class Projection(ABC):
    """The Jacobian of one batch, prepared for many precisions of one structure."""

    @abstractmethod
    def covariance(self, precision: Precision, *, diagonal: bool = False) -> Tensor:
        """Return ``J P⁻¹ Jᵀ`` of each sample, (b, c, c), or its diagonal, (b, c).

        The result is float64.
        """


@dataclass(frozen=True)
class BlockProjection(Projection):
    """Projection of groups of outputs, without covariances between groups.

    Attributes
    ----------
    groups : tuple of Projection
        One projection per group of outputs.
    """

    groups: tuple[Projection, ...]

    def covariance(self, precision: Precision, *, diagonal: bool = False) -> Tensor:
        """Return ``J P⁻¹ Jᵀ`` for each of r groups of K outputs, (b, r, K, K).

        If ``diagonal`` is True, return the variances (b, c) of all c = r·K outputs.
        """
        blocks = [
            group.covariance(precision, diagonal=diagonal) for group in self.groups
        ]
        return torch.cat(blocks, 1) if diagonal else torch.stack(blocks, 1)


def projected(structure: Structure, jacobian: Jacobian, n_blocks: int) -> Projection:
    """Apply `Structure.project` to ``n_blocks`` groups of outputs of equal size.

    The result has covariances within groups, and none between groups.
    """
    if n_blocks == 1:
        return structure.project(jacobian)
    n = jacobian.n_columns // n_blocks  # outputs per group
    groups = [jacobian.columns(slice(k * n, (k + 1) * n)) for k in range(n_blocks)]
    return BlockProjection(tuple(map(structure.project, groups)))


class Diagonalised(Structure):
    """``H = Q diag(e) Qᵀ`` with an orthonormal ``Q``."""

    @abstractmethod
    def rotated_layers(self, jacobian: Jacobian) -> Iterator[LayerRows]:
        """Yield ``J Q``, layer by layer, in the dtype of ``J``."""

    @abstractmethod
    def times_basis(self, w: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``w F(Q)`` for each row of ``w`` (..., P); ``F`` is ``function``.

        ``F`` may transpose ``Q``, square its entries, or return ``Q`` itself. If ``Q``
        is a Kronecker product, ``F(Q)`` is then the product of ``F`` of its factors.
        """

    def from_basis(self, weights: Tensor) -> Tensor:
        """Return ``Q w`` for each row ``w`` of (..., P)."""
        return self.times_basis(weights, lambda q: q.mT)

    def to_basis(self, weights: Tensor) -> Tensor:
        """Return ``Qᵀ w`` for each row ``w`` of (..., P)."""
        return self.times_basis(weights, lambda q: q)

    def squared_basis(self, values: Tensor) -> Tensor:
        """Return ``Σⱼ Q²ᵢⱼ valuesⱼ``, the diagonal of ``Q diag(values) Qᵀ``, (P,)."""
        return self.times_basis(values, lambda q: (q**2).mT)

    def hessian_diagonal(self) -> Tensor:
        """Return the diagonal of ``Q diag(e) Qᵀ``, (P,)."""
        return self.squared_basis(self.eigenvalues)

    def product(self, vector: Tensor) -> Tensor:
        """Return ``Q diag(e) Qᵀ v``, (P,)."""
        return self.from_basis(self.eigenvalues * self.to_basis(vector))

    def rotate(self, jacobian: Jacobian) -> Jacobian:
        """Return ``J Q``, in the dtype of ``J``."""
        return Jacobian(list(self.rotated_layers(jacobian)))

    def precision(self, prior_precision: Tensor, scale: Tensor) -> Precision:
        """Return ``P = Q diag(scale·e + δ) Qᵀ``."""
        return EigenPrecision(self, prior_precision, scale)

    def project(self, jacobian: Jacobian) -> Projection:
        """Prepare ``J Q``, which is computed only once."""
        return RotatedProjection(self, jacobian)


class EigenPrecision(Precision):
    """``P = Q diag(scale·e + δ) Qᵀ``, with equal ``δ`` for weights that ``Q`` mixes."""

    structure: Diagonalised

    @property
    def in_eigenbasis(self) -> "EigenPrecision | None":
        """The precision itself."""
        return self

    @property
    def eigenvalues(self) -> Tensor:
        """``scale·e + δ``, (P,)."""
        return self.scale * self.structure.eigenvalues + self.delta

    def logdet(self) -> Tensor:
        """Return ``Σ log(scale·e + δ)``, ()."""
        return self.eigenvalues.log().sum()

    def solve(self, vector: Tensor) -> Tensor:
        """Return ``Q diag(1/(scale·e + δ)) Qᵀ v``, (P,)."""
        q = self.structure
        return q.from_basis(q.to_basis(vector) / self.eigenvalues)

    def variance(self) -> Tensor:
        """Return the diagonal of ``Q diag(1/(scale·e + δ)) Qᵀ``, (P,)."""
        return self.structure.squared_basis(1 / self.eigenvalues)

    def sample(self, noise: Tensor) -> Tensor:
        """Return ``Q diag(scale·e + δ)^(-1/2) Qᵀ ε``, (s, P)."""
        q = self.structure
        return q.from_basis(q.to_basis(noise) * self.eigenvalues.rsqrt())

    @cache_last_call
    def relative_variances(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return ``v / max v``, (P,), and ``max v``, (), for ``v = 1/(scale·e + δ)``.

        The ratio has the given dtype. It is used in place of ``v``, which may exceed
        1e38, the range of float32.
        """
        v = 1 / self.eigenvalues
        largest = v.detach().amax()
        return (v / largest).to(dtype), largest

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        """Return ``(JQ) diag(1/(scale·e + δ)) (JQ)ᵀ``, (b, c, c)."""
        return self.structure.project(jacobian).covariance(self)

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        """Return the diagonal of `functional_covariance`, (b, c), layer by layer.

        This is ``Σⱼ (JQ)²ⱼ vⱼ`` with ``v = 1/(scale·e + δ)``. If all samples share the
        output gradients, as in a last layer, the sums over the layer's outputs are
        computed only once. Sums use ``v / max v``, and are then multiplied by
        ``max v``; see `relative_variances`.
        """
        v, largest = self.relative_variances(jacobian.dtype)
        layers = self.structure.rotated_layers(jacobian)
        if jacobian.samples_share_gradients and self.structure.keeps_factors:
            rotated = list(layers)
            # output k is Σᵢ aᵢ cₖᵢ with coefficients cₖᵢ = Σₒ gₖₒ Wₒᵢ; their variances
            # are cached, and the gradients before rotation only identify the result
            weights = self._coefficient_variances(
                jacobian.layers[0].first.gradients, rotated, v
            )
            blocks = (block for layer in rotated for block in layer.blocks)
            pairs = zip(blocks, weights, strict=True)
            variances = total([b.output_variances(weight) for b, weight in pairs])
        else:
            variances = variance(layers, v)
        variances = variances.double() * largest
        if jacobian.dtype == torch.float64 or all_finite(variances):
            return variances
        # float32 rows are finite, but their squares overflow
        return self.functional_variance(jacobian.double())

    @cache_last_call
    def _coefficient_variances(
        self, _gradients: object, layers: list[LayerRows], v: Tensor
    ) -> list[Tensor]:
        """Return variances ``Σₒ g²ₖₒ vₒᵢ`` of the inputs' coefficients, by tensor.

        Each tensor has a matrix (k, i). All samples must share ``g``. The rotated
        ``layers`` have gradients ``g`` (k, o) of k network outputs, and ``v`` (P,)
        holds a variance for each output o and input i. ``_gradients`` are the gradients
        before rotation, and only the key of the cache.
        """
        blocks = (block for layer in layers for block in layer.blocks)
        return [b.coefficient_variances(x) for b, x in with_entries(blocks, v)]

    def between_samples(self, jacobian: Jacobian, *, across_outputs: bool) -> Tensor:
        """Return covariances between samples for each output, (b, b, c).

        With ``across_outputs``, the shape is (b, c, b, c). The outputs of a layer in
        the eigenbasis are independent. For each of them, covariances between samples
        are computed first. The gradients ``g`` (c, o), which all samples share, then
        combine them.

        `Jacobian.samples_share_gradients` and `Structure.keeps_factors` must be true.
        If the layer has i inputs, the cost is O(b² c (i + c)), or O(b² c (i + c²))
        across outputs.
        """
        covariances = []
        rotated = self.structure.rotated_layers(jacobian.double())
        for layer, v in with_entries(rotated, 1 / self.eigenvalues):
            # sum over weight and bias, (b, b, o) after the first of them
            hidden = torch.zeros_like(self.scale)
            for block, piece in with_entries(layer.blocks, v):
                # a (b, i), and variances (o, i) of the rotated weights
                a, w = block.inputs.squeeze(1), piece.reshape(block.n_outputs, -1)
                hidden = (a.unsqueeze(1) * a) @ w.mT + hidden
            g = layer.first.g[0, :, 0]  # (c, o), stored once for all samples
            cov = _between_outputs(hidden, g) if across_outputs else hidden @ (g**2).mT
            covariances.append(cov)
        return total(covariances)

    def covariance_of_rows(self, rows: Tensor) -> Tensor:
        """Return ``(JQ) diag(1/(scale·e + δ)) (JQ)ᵀ`` of a dense ``J``, (b, c, c)."""
        rotated = self.structure.to_basis(rows)
        return (rotated / self.eigenvalues) @ rotated.mT

    def whiten(self, jacobian: Jacobian) -> Tensor:
        """Return ``J Q diag(scale·e + δ)^(-1/2)``, (b, c, P)."""
        rotated = self.structure.rotate(jacobian.double()).dense()
        return rotated * self.eigenvalues.rsqrt()


def _between_outputs(weights: Tensor, g: Tensor) -> Tensor:
    """Return ``g diag(w) gᵀ`` for each pair of samples, as (b, c, b, c).

    The weights ``w`` (b, b, o) are symmetric in the samples, and ``g`` has the shape
    (c, o). Each pair of samples is computed once.
    """
    b, c = len(weights), len(g)
    covariances = weights.new_empty(b, c, b, c)
    for k in range(b):
        # of sample k with itself and all later ones: (b - k, c, c), symmetric matrices
        block = (weights[k, k:].unsqueeze(1) * g) @ g.mT
        covariances[k, :, k:] = block.movedim(0, 1)
        covariances[k:, :, k] = block
    return covariances


@dataclass(frozen=True)
class RotatedProjection(Projection):
    """``J Q`` of a batch.

    Products use the network's dtype, because the features have already been rounded to
    this precision and all terms of the sums have the same sign.
    """

    structure: Diagonalised
    jacobian: Jacobian

    @cached_property
    def _rotated(self) -> Jacobian:
        return self.structure.rotate(self.jacobian)

    def covariance(self, precision: Precision, *, diagonal: bool = False) -> Tensor:
        """Return ``(JQ) diag(1/(scale·e + δ)) (JQ)ᵀ``, (b, c, c), or the diagonal."""
        eigen = precision.in_eigenbasis
        if eigen is None:  # P is not diagonal in this basis, so J Q does not help
            return precision.output_covariance(self.jacobian, diagonal=diagonal)
        rows = self._rotated
        # v is divided by its maximum, because it may exceed the range of float32
        v, largest = eigen.relative_variances(rows.dtype)
        covariance = (rows.variance(v) if diagonal else rows.gram(v)).double() * largest
        if rows.dtype == torch.float64 or all_finite(covariance):
            return covariance
        # float32 rows are finite, but their squares overflow
        wide = self.structure.project(self.jacobian.double())
        return wide.covariance(precision, diagonal=diagonal)
