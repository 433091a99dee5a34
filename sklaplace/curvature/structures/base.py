"""Base classes of structures: what is kept of the curvature ``H``, factorised.

An `Accumulator` sums the curvature over batches. The `Structure` that it decomposes to
keeps what does not depend on hyperparameters. Under a prior precision ``δ`` and a scale
``1/(σ²T)`` of the likelihood it has the posterior precision ``P = scale·H + diag δ``, a
`Precision`, whose factors are computed once, when they are first needed.

Most structures are `Diagonalised`: ``H = Q diag(e) Qᵀ``, and one decomposition serves
every prior precision and scale.
"""

import copy
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
from sklaplace.curvature.blocks import Block, total, variances
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.patches import Inputs, unfolded
from sklaplace.curvature.shared import SharedColumns

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def cache_last_call(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Keep a method's last result for as long as its first argument is the same object.

    Further arguments are determined by the first.
    """
    name = f"_last_{method.__name__}"

    @wraps(method)
    def cached(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        self, key = args[:2]
        # key and result in one attribute, so that threads never see one without the
        # other
        last = vars(self).get(name)
        if last is None or last[0] is not key:
            last = vars(self)[name] = key, method(*args, **kwargs)
        return last[1]

    return cached


class Accumulator(ABC):
    """Sums the curvature over batches; normalises nothing until the end."""

    checks: ClassVar[Mapping[str, Check]] = {}
    """Options of the constructor, each with a check of its value."""

    takes_matrices: ClassVar[bool] = False
    """Whether ``H`` may come as a matrix, see `add_matrix`."""

    takes_keys: ClassVar[bool] = False
    """Whether it needs a hash of each sample, see `sklaplace.core.random.row_hash`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @classmethod
    @abstractmethod
    def n_bytes(cls, layout: Layout, n_rows: int | None = None, **options: Any) -> int:
        """Peak memory of factorisation, in bytes, known before any allocation.

        ``n_rows`` is the number of rows of the Jacobian, where it is known; the option
        ``n_columns`` is how many of them each sample has.
        """

    @classmethod
    def row_elements(cls, layout: Layout, n_columns: int, **options: Any) -> int:
        """Numbers that a sample of a batch takes beside its unmultiplied Jacobian."""
        return 0

    def add_matrix(self, hessian: Tensor, *, is_semidefinite: bool = False) -> None:
        """Add a symmetric (P, P), which need not be positive semidefinite."""
        raise TypeError(f"{type(self).__name__} adds up rows, not matrices.")

    @abstractmethod
    def update(self, jacobian: Jacobian) -> None:
        """Add ``(SᵀJ)ᵀ SᵀJ`` of one batch, whose ``SᵀJ`` is given."""

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Add the curvature that another of this type holds; equals joint updates."""

    def fresh(self) -> "Accumulator":
        """A copy for other samples of the same pass, to be merged with this one.

        Neither may have any yet.
        """
        memo = {id(part): part for part in self.shared_parts}
        return copy.deepcopy(self, memo)

    @property
    def shared_parts(self) -> list[object]:
        """Attributes that do not change while samples are added."""
        return [self.layout]

    def summands(self) -> list[Tensor] | None:
        """Tensors that may be added to in place, where that is all that `merge` does.

        None where it does more, or nothing has been added yet.
        """
        return None

    def needs_another_pass(self) -> bool:
        """Whether all batches are needed once more, after all have been added."""
        return False

    @abstractmethod
    def decompose(self) -> "Structure":
        """The structure of the sum, which later updates do not change."""


@dataclass(frozen=True)
class Structure(FieldsOnly, ABC):
    """The kept part of ``H``; immutable.

    Attributes
    ----------
    layout : Layout
        The selected parameters.
    """

    layout: Layout
    priors: ClassVar[frozenset[str]]
    """Prior structures under which `precision` is available."""
    is_spectral: ClassVar[bool] = True
    """Whether under a scalar prior ``log det P = Σ log(scale·e + δ)``."""
    kind: ClassVar[str]
    """Name in the registry."""
    is_additive: ClassVar[bool] = True
    """Whether the structure of ``H₁ + H₂`` follows from those of ``H₁`` and ``H₂``."""

    @property
    def evidence_is_biased_up(self) -> bool:
        """Whether ``log det P`` lacks curvature, so that the evidence is too large."""
        return False

    @property
    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """Eigenvalues ``e`` of ``H``, (P,), non-negative."""

    @abstractmethod
    def dense(self) -> Tensor:
        """``H`` as a matrix, (P, P); for small models and tests."""

    @abstractmethod
    def resume(self, accumulator: Accumulator) -> None:
        """Put ``H`` into an empty accumulator of its own, which batches can follow."""

    @abstractmethod
    def scaled(self, factor: Tensor) -> "Structure":
        """The structure of ``factor·H``: all sample weights times a factor."""

    def with_output_factors(self, factors: Tensor) -> "Structure | None":
        """The structure of ``D H D`` for the weights of one layer; None if unknown.

        ``D`` multiplies the weights of each output of the layer by a factor, (o,).
        """
        return None

    @abstractmethod
    def product(self, vector: Tensor) -> Tensor:
        """``H v``, (P,), without forming ``H``."""

    def trace(self) -> Tensor:
        """``tr H``, ()."""
        return self.eigenvalues.sum()

    @abstractmethod
    def hessian_diagonal(self) -> Tensor:
        """Diagonal of ``H``, (P,)."""

    def rounding(self, eps: float) -> float:
        """Rounding of ``H`` relative to its diagonal, for an ``eps`` of the Jacobian.

        That of sums in float64, and ``eps²`` where columns of ``J`` cancel.
        """
        return max(eps**2, torch.finfo(torch.float64).eps)

    @abstractmethod
    def precision(self, prior_precision: Tensor, scale: Tensor) -> "Precision":
        """``P = scale·H + diag δ`` for ``δ`` (), (L,) or (P,) and ``scale`` ()."""

    @abstractmethod
    def project(self, jacobian: Jacobian) -> "Projection":
        """A Jacobian in a basis that serves many prior precisions."""


@dataclass(frozen=True)
class Precision(FieldsOnly, ABC):
    """Posterior precision ``P = scale·H + diag δ`` and what follows from it.

    All results are float64 and differentiable in ``δ`` and ``scale``.

    Attributes
    ----------
    structure : Structure
        That of ``H``.
    prior_precision : Tensor of shape (), (L,) or (P,)
        ``δ``, of all weights, of each parameter tensor or of each weight.
    scale : Tensor of shape ()
        Factor of ``H``.
    """

    structure: Structure
    prior_precision: Tensor
    scale: Tensor

    @property
    def delta(self) -> Tensor:
        """``δ`` of each weight, (P,)."""
        return priors.expand(self.prior_precision, self.structure.layout)

    @abstractmethod
    def logdet(self) -> Tensor:
        """``log det P``, in nats, ()."""

    @abstractmethod
    def solve(self, vector: Tensor) -> Tensor:
        """``P⁻¹ v``, (P,)."""

    @abstractmethod
    def variance(self) -> Tensor:
        """Marginal variances of the weights, the diagonal of ``P⁻¹``, (P,)."""

    @abstractmethod
    def sample(self, noise: Tensor) -> Tensor:
        """Draws of ``N(0, P⁻¹)``, (s, P), from standard-normal noise (s, P).

        Under a scalar prior ``P^(-1/2) ε`` with the symmetric root, which is unique:
        signs and order of eigenvectors differ between devices and with the last digit
        of ``H``.
        """

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        """``J P⁻¹ Jᵀ`` of each sample, (b, c, c)."""
        return self.covariance_of_rows(jacobian.double().dense())

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        """Diagonal of `functional_covariance`, (b, c), at less cost."""
        return (self.whiten(jacobian) ** 2).sum(-1)

    @abstractmethod
    def covariance_of_rows(self, rows: Tensor) -> Tensor:
        """``J P⁻¹ Jᵀ``, (b, c, c), of a dense ``J`` (b, c, P); differentiable in it."""

    @abstractmethod
    def whiten(self, jacobian: Jacobian) -> Tensor:
        """``J F`` with ``F Fᵀ = P⁻¹``, (b, c, P).

        Products of two samples' rows are the covariance of their outputs.
        """

    def effective_parameters(self) -> Tensor:
        """``diag(P⁻¹ scale·H) = 1 - δ diag(P⁻¹)``, (P,), between zero and one.

        MacKay's γ is the sum (MacKay 1992, "Bayesian interpolation", eq. 4.9).
        """
        return 1 - self.delta * self.variance()

    def effective_dimension(self) -> Tensor:
        """``γ = Σ scale·e / (scale·e + δ)`` under a scalar prior, ()."""
        e = self.scale * self.structure.eigenvalues
        return (e / (e + self.prior_precision)).sum()

    def functional(self, jacobian: Jacobian, *, diagonal: bool) -> Tensor:
        """`functional_variance` if ``diagonal``, else `functional_covariance`."""
        of = self.functional_variance if diagonal else self.functional_covariance
        return of(jacobian)

    def trace_correction(self) -> Tensor:
        """What `logdet` has beyond ``log det P``, (): a bound's ``tr`` of the rest."""
        return torch.zeros_like(self.scale)


class Projection(ABC):
    """The Jacobian of one batch, prepared for many prior precisions.

    Attributes
    ----------
    structure : Structure
        That of the precisions.
    """

    structure: Structure

    @abstractmethod
    def covariance(self, precision: Precision, *, diagonal: bool = False) -> Tensor:
        """``J P⁻¹ Jᵀ`` of each sample, (b, c, c), or its diagonal, (b, c); float64."""


@dataclass(frozen=True)
class BlockProjection(Projection):
    """Outputs in groups, without covariances between these.

    Attributes
    ----------
    parts : tuple of Projection
        One for each group of outputs.
    """

    structure: Structure
    parts: tuple[Projection, ...]

    def covariance(self, precision: Precision, *, diagonal: bool = False) -> Tensor:
        """``J P⁻¹ Jᵀ`` of each group, (b, r, K, K), or all variances, (b, c)."""
        found = [part.covariance(precision, diagonal=diagonal) for part in self.parts]
        return torch.cat(found, 1) if diagonal else torch.stack(found, 1)


def projected(structure: Structure, jacobian: Jacobian, n_blocks: int) -> Projection:
    """`Structure.project` of outputs in ``n_blocks`` groups of equal size."""
    if n_blocks == 1:
        return structure.project(jacobian)
    n = jacobian.n_columns // n_blocks
    groups = [jacobian.columns(slice(k * n, (k + 1) * n)) for k in range(n_blocks)]
    return BlockProjection(structure, tuple(map(structure.project, groups)))


class Diagonalised(Structure):
    """``H = Q diag(e) Qᵀ`` with an orthonormal ``Q``."""

    @abstractmethod
    def rotated_blocks(self, jacobian: Jacobian) -> Iterator[Block]:
        """``J Q``, block by block, in the dtype of ``J``."""

    @abstractmethod
    def apply(self, weights: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """``w F`` of each row of (..., P) for ``F``, a function of ``Q``.

        A transpose, or one of entries that is multiplicative, so that it can be taken
        of the factors of a Kronecker product.
        """

    def from_basis(self, weights: Tensor) -> Tensor:
        """``Q w`` of each row of (..., P)."""
        return self.apply(weights, lambda q: q.mT)

    def to_basis(self, weights: Tensor) -> Tensor:
        """``Qᵀ w`` of each row of (..., P)."""
        return self.apply(weights, lambda q: q)

    def squared_basis(self, values: Tensor) -> Tensor:
        """``Σⱼ Q²ᵢⱼ valuesⱼ``, the diagonal of ``Q diag(values) Qᵀ``, (P,)."""
        return self.apply(values, lambda q: (q**2).mT)

    def hessian_diagonal(self) -> Tensor:
        """Diagonal of ``Q diag(e) Qᵀ``, (P,)."""
        return self.squared_basis(self.eigenvalues)

    def product(self, vector: Tensor) -> Tensor:
        """``Q diag(e) Qᵀ v``, (P,)."""
        return self.from_basis(self.eigenvalues * self.to_basis(vector))

    def rotate(self, jacobian: Jacobian) -> Jacobian:
        """``J Q``, in the dtype of ``J``."""
        return Jacobian(list(self.rotated_blocks(jacobian)))

    def precision(self, prior_precision: Tensor, scale: Tensor) -> "EigenPrecision":
        """``P = Q diag(scale·e + δ) Qᵀ``."""
        return EigenPrecision(self, prior_precision, scale)

    def project(self, jacobian: Jacobian) -> Projection:
        """``J Q``, computed once."""
        return RotatedProjection(self, jacobian)


class EigenPrecision(Precision):
    """``P = Q diag(scale·e + δ) Qᵀ``, for ``δ`` that is constant where ``Q`` mixes."""

    structure: Diagonalised
    is_in_eigenbasis = True

    @property
    def eigenvalues(self) -> Tensor:
        """``scale·e + δ``, (P,)."""
        return self.scale * self.structure.eigenvalues + self.delta

    def logdet(self) -> Tensor:
        """``Σ log(scale·e + δ)``, ()."""
        return self.eigenvalues.log().sum()

    def solve(self, vector: Tensor) -> Tensor:
        """``Q diag(1/(scale·e + δ)) Qᵀ v``, (P,)."""
        q = self.structure
        return q.from_basis(q.to_basis(vector) / self.eigenvalues)

    def variance(self) -> Tensor:
        """Diagonal of ``Q diag(1/(scale·e + δ)) Qᵀ``, (P,)."""
        return self.structure.squared_basis(1 / self.eigenvalues)

    def sample(self, noise: Tensor) -> Tensor:
        """``Q diag(scale·e + δ)^(-1/2) Qᵀ ε``, (s, P)."""
        q = self.structure
        return q.from_basis(q.to_basis(noise) * self.eigenvalues.rsqrt())

    @cache_last_call
    def relative_variances(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``v / max v`` in a dtype, (P,), and ``max v``, (), ``v = 1/(scale·e + δ)``.

        Single precision ends at 1e38; δ does not.
        """
        v = 1 / self.eigenvalues
        largest = v.detach().amax()
        return (v / largest).to(dtype), largest

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        """``(JQ) diag(1/(scale·e + δ)) (JQ)ᵀ``, (b, c, c)."""
        return self.structure.project(jacobian).covariance(self)

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        """Its diagonal, (b, c); ``JQ`` is never there as a whole."""
        v, largest = self.relative_variances(jacobian.dtype)
        pieces = v.split(self.structure.layout.sizes)
        blocks = self.structure.rotated_blocks(jacobian)
        if jacobian.is_shared:
            both = list(blocks)
            weights = self._input_weights(jacobian.blocks[0].outputs, both, pieces)
            pairs = zip(both, weights, strict=True)
            found = total([_of_inputs(block.a, weight) for block, weight in pairs])
        else:
            found = variances(blocks, pieces)
        found = found.double() * largest
        if jacobian.dtype == torch.float64 or all_finite(found):
            return found
        return self.functional_variance(jacobian.double())

    @cache_last_call
    def _input_weights(
        self, _g: object, blocks: list[Block], pieces: tuple[Tensor, ...]
    ) -> list[Tensor]:
        """``Σₒ g²ₖₒ vₒᵢ`` of each block, (k, i), where all samples share ``g``."""
        pairs = zip(blocks, pieces, strict=True)
        return [input_weights(block.outputs, piece) for block, piece in pairs]

    def covariance_of_rows(self, rows: Tensor) -> Tensor:
        """``(JQ) diag(1/(scale·e + δ)) (JQ)ᵀ`` of a dense ``J``, (b, c, c)."""
        rotated = self.structure.to_basis(rows)
        return (rotated / self.eigenvalues) @ rotated.mT

    def whiten(self, jacobian: Jacobian) -> Tensor:
        """``J Q diag(scale·e + δ)^(-1/2)``, (b, c, P)."""
        rotated = self.structure.rotate(jacobian.double()).dense()
        return rotated * self.eigenvalues.rsqrt()


def _of_inputs(a: Inputs | None, weights: Tensor) -> Tensor:
    """Variances (b, k) at inputs (b, 1, i), or of a bias, from `input_weights`."""
    return weights.T if a is None else unfolded(a).squeeze(1) ** 2 @ weights.T


def input_weights(g: Tensor | SharedColumns, v: Tensor) -> Tensor:
    """``Σₒ g² v``, (k, i), by which variances are linear in squared layer inputs.

    For gradients ``g`` (1, k, 1, o) that all samples share and ``v`` (o·i,).
    """
    if not isinstance(g, Tensor):
        return g.weighted_squares(v.reshape(g.n, -1).T).T
    return (g**2)[0, :, 0] @ v.reshape(g.shape[-1], -1)


@dataclass(frozen=True)
class RotatedProjection(Projection):
    """``J Q`` of a batch.

    Products are taken in the dtype of the network: its features are rounded to that
    precision already, and the sums have no terms of opposite sign.
    """

    structure: Diagonalised
    jacobian: Jacobian

    @cached_property
    def _rotated(self) -> Jacobian:
        return self.structure.rotate(self.jacobian)

    def covariance(self, precision: Precision, *, diagonal: bool = False) -> Tensor:
        """``(JQ) diag(1/(scale·e + δ)) (JQ)ᵀ``, (b, c, c), or its diagonal, (b, c)."""
        assert isinstance(precision, EigenPrecision)
        if not precision.is_in_eigenbasis:
            return precision.functional(self.jacobian, diagonal=diagonal)
        rows = self._rotated
        v, largest = precision.relative_variances(rows.dtype)
        found = (rows.variance(v) if diagonal else rows.gram(v)).double() * largest
        if rows.dtype == torch.float64 or all_finite(found):
            return found
        # squares of rows that a float32 network still holds overflow
        wide = self.structure.project(self.jacobian.double())
        return wide.covariance(precision, diagonal=diagonal)
