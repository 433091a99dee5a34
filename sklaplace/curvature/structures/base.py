"""What every structure offers: questions to ``scale·H + diag(prior_precision)``.

`Structure` lists the questions. Most structures are `Diagonalised`: they keep a
basis in which ``H`` is diagonal, so that one decomposition answers for every prior
precision and scale.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from sklaplace.core.checks import Check
from sklaplace.core.linalg import all_finite
from sklaplace.curvature import priors
from sklaplace.curvature.blocks import (
    Block,
    input_weights,
    variance_of_inputs,
    variances,
)
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout

T = TypeVar("T")


class LastCallCache:
    """The last answer to a question that is asked again for every batch."""

    def __init__(self) -> None:
        # one attribute, so that threads see question and answer of one kind
        self._last: tuple[tuple[Any, ...], Any] | None = None

    def get(self, asked: tuple[Any, ...], work: Callable[[], T]) -> T:
        """The last answer where the very same objects were asked for last."""
        if any(isinstance(v, Tensor) and v.requires_grad for v in asked):
            return work()
        last = self._last
        if last is None or not _are_same(last[0], asked):
            last = self._last = asked, work()
        answer: T = last[1]
        return answer

    def __reduce__(self) -> Any:
        """Nothing of it is pickled."""
        return LastCallCache, ()


def _are_same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    return all(a is b for a, b in zip(left, right, strict=True))


class Accumulator(ABC):
    """Sums the curvature over batches; normalises nothing until the end."""

    checks: ClassVar[Mapping[str, Check]] = {}
    """Options of the constructor, each with a check of its value."""

    takes_matrices: ClassVar[bool] = False
    """Whether ``H`` may come as a matrix, see `add_matrix`."""

    takes_keys: ClassVar[bool] = False
    """Whether rows are told apart by their keys, see `draws`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @staticmethod
    @abstractmethod
    def n_bytes(layout: Layout, n_rows: int | None = None, **options: Any) -> int:
        """Peak memory of factorisation, in bytes, known before any allocation.

        ``n_rows`` is the number of rows of the Jacobian, where it is known; the option
        ``n_columns`` is how many of them a row of the data has.
        """

    @staticmethod
    def row_elements(layout: Layout, n_columns: int, **options: Any) -> int:
        """Numbers that a row of a batch takes beside its unmultiplied Jacobian."""
        return 0

    def add_matrix(self, hessian: Tensor, *, is_semidefinite: bool = False) -> None:
        """Add a symmetric (P, P), which need not be positive semidefinite."""
        raise TypeError(f"{type(self).__name__} adds up rows, not matrices.")

    @abstractmethod
    def update(self, jacobian: Jacobian) -> None:
        """Add rows ``Sᵀ J`` of one batch."""

    @abstractmethod
    def merge(self, other: "Accumulator") -> None:
        """Add what another accumulator has seen; same as joint updates."""

    def needs_another_pass(self) -> bool:
        """Whether all rows are to come again, now that all have been seen."""
        return False

    @abstractmethod
    def decompose(self) -> "Structure":
        """The frozen factorisation of what has been seen."""


@dataclass(frozen=True)
class Structure(ABC):
    """The kept part of ``H``, factorised; never changed by a question.

    Attributes
    ----------
    layout : Layout
        The selected parameters.
    """

    layout: Layout
    priors: ClassVar[frozenset[str]]
    is_spectral: ClassVar[bool] = True
    """Whether under a scalar prior the log-determinant is that of `eigenvalues`."""
    kind: ClassVar[str]
    """Name in the registry."""
    is_additive: ClassVar[bool] = True
    """Whether what two of them kept can go on as one, with nothing lost."""

    @property
    def evidence_is_biased_up(self) -> bool:
        """Whether the evidence grows by what was left out of ``H``."""
        return False

    @property
    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """Eigenvalues ``e`` of ``H``, (P,), non-negative."""

    @abstractmethod
    def dense(self) -> Tensor:
        """``H`` written out, (P, P); for small models and tests."""

    @abstractmethod
    def resume(self, accumulator: Accumulator) -> None:
        """Put what this was made of into an accumulator that has seen nothing."""

    @abstractmethod
    def scaled(self, factor: Tensor) -> "Structure":
        """The structure of ``factor·H``: of rows with that sample weight."""

    @abstractmethod
    def product(self, vector: Tensor) -> Tensor:
        """``H v``, (P,), which is not written out."""

    @abstractmethod
    def solve(self, vector: Tensor, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """``(scale·H + diag δ)⁻¹ v``, (P,)."""

    @abstractmethod
    def logdet(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """``log det(scale·H + diag δ)``, in nats."""

    @abstractmethod
    def project(self, jacobian: Jacobian) -> "Projection":
        """Rows prepared for questions at many prior precisions."""

    @abstractmethod
    def functional_variance(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """Diagonal of `covariance`, (b, c), without the rest where that is cheaper."""

    @abstractmethod
    def whiten(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """Rows ``R`` (b, c, P) with ``R Rᵀ`` the covariance, also across rows."""

    @abstractmethod
    def sample(self, noise: Tensor, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Deviations from the mean, (s, P), from standard-normal noise (s, P).

        Under a scalar prior by the symmetric root of the covariance, which is
        unique: signs and order of eigenvectors differ between devices and with the
        last digit of ``H``.
        """

    @abstractmethod
    def variance(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Marginal variances of the weights, (P,)."""

    def covariance(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """Functional covariance ``J (scale·H + diag δ)⁻¹ Jᵀ``, (b, c, c)."""
        return self.project(jacobian).covariance(prior_precision, scale)

    def covariance_of_rows(
        self, rows: Tensor, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """`covariance` of rows written out, (b, c, P), and in their graph."""
        blocks = [Block(piece.unsqueeze(2)) for piece in self.layout.split(rows)]
        return self.covariance(Jacobian(blocks), prior_precision, scale)

    def effective_parameters(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """``diag((scale·H + diag δ)⁻¹ scale·H)``, (P,): well-determined parts.

        MacKay's γ is the sum (MacKay 1992, "Bayesian interpolation", eq. 4.9).
        """
        delta = priors.expand(prior_precision, self.layout)
        return 1 - delta * self.variance(prior_precision, scale)

    def trace_correction(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """What `logdet` has beyond that of the kept part of ``H``, (): a bound's."""
        return torch.zeros_like(scale)

    def effective_dimension(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Their sum for a scalar prior, (): no eigenvector is needed."""
        known = scale * self.eigenvalues
        return (known / (known + prior_precision)).sum()


class Projection(ABC):
    """Rows of one batch, prepared for questions at many prior precisions."""

    structure: Structure

    @abstractmethod
    def covariance(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Functional covariance, (b, c, c), float64."""

    @abstractmethod
    def variance(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Its diagonal, (b, c), float64."""


@dataclass(frozen=True)
class BlockProjection(Projection):
    """Rows whose outputs are asked for in groups: no covariance between these.

    Attributes
    ----------
    parts : tuple of Projection
        One for each group of outputs.
    """

    structure: Structure
    parts: tuple[Projection, ...]

    def covariance(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Functional covariance of each group, (b, r, K, K), float64."""
        found = [part.covariance(prior_precision, scale) for part in self.parts]
        return torch.stack(found, 1)

    def variance(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Variances of all outputs, (b, c), float64."""
        found = [part.variance(prior_precision, scale) for part in self.parts]
        return torch.cat(found, 1)


def projected(structure: Structure, jacobian: Jacobian, n_blocks: int) -> Projection:
    """Rows prepared for questions, in as many groups of outputs."""
    if n_blocks == 1:
        return structure.project(jacobian)
    n = jacobian.n_columns // n_blocks
    groups = [jacobian.columns(slice(k * n, (k + 1) * n)) for k in range(n_blocks)]
    return BlockProjection(structure, tuple(map(structure.project, groups)))


@dataclass(frozen=True)
class Diagonalised(Structure):
    """A structure that keeps an orthonormal basis in which it is diagonal.

    ``H = Q diag(e) Qᵀ``. As long as the prior precision is constant where ``Q``
    mixes coordinates, all questions have the same answer in the eigenvalues:

    * log-determinant ``Σ log(scale·e + δ)``
    * functional covariance ``(JQ) diag(1/(scale·e + δ)) (JQ)ᵀ``
    * samples ``Q diag(scale·e + δ)^(-1/2) Qᵀ ε``
    """

    @abstractmethod
    def rotated_blocks(self, jacobian: Jacobian) -> Iterator[Block]:
        """Rows in the eigenbasis, in their dtype, one block after the other."""

    @abstractmethod
    def unrotate(self, weights: Tensor) -> Tensor:
        """Coordinates (s, P) in the eigenbasis back to parameters."""

    @abstractmethod
    def to_basis(self, weights: Tensor) -> Tensor:
        """Parameters (..., P) to coordinates in the eigenbasis."""

    @abstractmethod
    def squared_basis(self, values: Tensor) -> Tensor:
        """``Σⱼ Q²ᵢⱼ valuesⱼ``, (P,): the diagonal of ``Q diag(values) Qᵀ``."""

    def product(self, vector: Tensor) -> Tensor:
        """``Q diag(e) Qᵀ v``, (P,)."""
        turned = self.eigenvalues * self.to_basis(vector.unsqueeze(0))
        return self.unrotate(turned).squeeze(0)

    def solve(self, vector: Tensor, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """``Q diag(1/(scale·e + δ)) Qᵀ v``, (P,)."""
        precision = self._precision(prior_precision, scale)
        return self.unrotate(self.to_basis(vector.unsqueeze(0)) / precision).squeeze(0)

    def rotate(self, jacobian: Jacobian) -> Jacobian:
        """All rows in the eigenbasis, in their dtype."""
        return Jacobian(list(self.rotated_blocks(jacobian)))

    def _precision(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Eigenvalues of the posterior precision, (P,)."""
        delta = priors.expand(prior_precision, self.layout)
        return scale * self.eigenvalues + delta

    @cached_property
    def _remembered(self) -> "LastCallCache":
        return LastCallCache()

    def narrow_variances(
        self, prior_precision: Tensor, scale: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Variances in the eigenbasis, (P,), in a dtype, over the largest of them, ().

        Single precision ends at 1e38; δ does not.
        """

        def narrow() -> tuple[Tensor, Tensor]:
            v = 1 / self._precision(prior_precision, scale)
            size = v.detach().amax()
            return (v / size).to(dtype), size

        return self._remembered.get((prior_precision, scale, dtype), narrow)

    def logdet(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """``log det(scale·H + diag δ)``, in nats."""
        return self._precision(prior_precision, scale).log().sum()

    def project(self, jacobian: Jacobian) -> Projection:
        """Rows in the eigenbasis."""
        return RotatedProjection(self, jacobian)

    def covariance_of_rows(
        self, rows: Tensor, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """`covariance` of rows written out, (b, c, P), and in their graph."""
        rotated = self.to_basis(rows)
        scaled = rotated / self._precision(prior_precision, scale)
        covariance: Tensor = scaled @ rotated.mT
        return covariance

    def functional_variance(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """Variances of the outputs, (b, c); rotated rows are dropped at once."""
        v, size = self.narrow_variances(prior_precision, scale, jacobian.dtype)
        pieces = v.split(self.layout.sizes)
        if jacobian.is_shared:
            found = self._shared_variances(jacobian, v, pieces)
        else:
            found = variances(self.rotated_blocks(jacobian), pieces)
        found = found.double() * size
        if jacobian.dtype == torch.float64 or all_finite(found):
            return found
        return self.functional_variance(jacobian.double(), prior_precision, scale)

    @cached_property
    def _spreads(self) -> "LastCallCache":
        return LastCallCache()

    def _shared_variances(
        self, jacobian: Jacobian, v: Tensor, pieces: tuple[Tensor, ...]
    ) -> Tensor:
        """Variances where all rows share gradients: these meet ``v`` once for all."""
        blocks = list(self.rotated_blocks(jacobian))

        def spreads() -> list[Tensor]:
            pairs = zip(blocks, pieces, strict=True)
            return [input_weights(block.g, piece) for block, piece in pairs]

        known = self._spreads.get((jacobian.blocks[0].g, v), spreads)
        pairs = zip(blocks, known, strict=True)
        parts = [variance_of_inputs(block.a, spread) for block, spread in pairs]
        return sum(parts[1:], parts[0])

    def whiten(
        self, jacobian: Jacobian, prior_precision: Tensor, scale: Tensor
    ) -> Tensor:
        """Rows ``R`` (b, c, P) with ``R Rᵀ`` the covariance, also across rows."""
        rotated = self.rotate(jacobian.double()).dense()
        return rotated * self._precision(prior_precision, scale).rsqrt()

    def sample(self, noise: Tensor, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Deviations from the mean, (s, P), by the root ``Q diag(...) Qᵀ``."""
        scales = self._precision(prior_precision, scale).rsqrt()
        return self.unrotate(self.to_basis(noise) * scales)

    def variance(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Marginal variances of the weights, (P,)."""
        return self.squared_basis(1 / self._precision(prior_precision, scale))


@dataclass(frozen=True)
class RotatedProjection(Projection):
    """A Jacobian in the eigenbasis of a structure: one rotation, many questions.

    Products are taken in the dtype of the network. Its features are rounded to
    that precision already, and the sums have no terms of opposite sign.
    """

    structure: Diagonalised
    jacobian: Jacobian

    @cached_property
    def _rotated(self) -> Jacobian:
        return self.structure.rotate(self.jacobian)

    def covariance(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Functional covariance, (b, c, c), float64."""
        return self._ask("gram", prior_precision, scale)

    def variance(self, prior_precision: Tensor, scale: Tensor) -> Tensor:
        """Its diagonal, (b, c), float64."""
        return self._ask("variance", prior_precision, scale)

    def _ask(self, contraction: str, prior_precision: Tensor, scale: Tensor) -> Tensor:
        dtype = self._rotated.dtype
        v, size = self.structure.narrow_variances(prior_precision, scale, dtype)
        found: Tensor = getattr(self._rotated, contraction)(v).double() * size
        if dtype == torch.float64 or all_finite(found):
            return found
        # squares of rows that a float32 network still bears
        return RotatedProjection(self.structure, self.jacobian.double())._ask(
            contraction, prior_precision, scale
        )
