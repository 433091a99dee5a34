"""Kronecker structure (KFAC): per weight tensor ``H ≈ B ⊗ A``.

``B = Σ g gᵀ`` over samples, outputs and positions; ``A`` is the mean of ``a aᵀ`` over
samples and positions ("expand" form for convolutions; Martens and Grosse 2015; Grosse
and Martens 2016). A bias, and a parameter that is not of a Linear or convolution layer,
is a block ``B`` by itself, which is exact within the block. Both factors are
diagonalised once, when first needed, so that the prior precision is added to the
products of their eigenvalues exactly (Ritter, Botev and Barber 2018).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from sklaplace.core.checks import check_option
from sklaplace.core.linalg import symmetric_eigh
from sklaplace.curvature.blocks import Block
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.patches import Inputs, second_diagonal, second_moment
from sklaplace.curvature.structures import base

# A factor wider than this keeps its diagonal only: the eigenvectors of a dense one take
# 8 n² bytes and about 10 n³ operations.
MAX_FACTOR = 8192
# Eigenvectors of more dimensions are converted whenever they are used: that is quick
# beside the products with them, and a copy would be large.
MAX_CONVERTED = 512

# which ``a`` and ``g`` count as those of a sample, see `KronAccumulator`
WEIGHT_SHARING = "expand", "reduce"

T = TypeVar("T")


@dataclass(eq=False)
class Factor(base.FieldsOnly):
    """A Kronecker factor, factorised when its eigenvectors are first needed.

    Attributes
    ----------
    state : Tensor of shape (n, n) or (n,), or tuple of Tensor
        The factor itself, float64; a vector is the diagonal of one. Later its
        eigenvalues (n,) and eigenvectors (n, n), or None for the identity: both
        together would take twice the memory.
    """

    state: Tensor | tuple[Tensor, Tensor | None]

    def eigh(self) -> tuple[Tensor, Tensor | None]:
        """Eigenvalues (n,) and eigenvectors (n, n); None: the identity."""
        state = self.state  # read once and replaced at once, for threads
        if isinstance(state, Tensor):
            state = (state, None) if state.ndim == 1 else symmetric_eigh(state)
            self.state = state
        return state

    @property
    def values(self) -> Tensor:
        """Eigenvalues, (n,)."""
        return self.eigh()[0]

    def vectors(self, dtype: torch.dtype) -> Tensor | None:
        """Eigenvectors (n, n) in a dtype, converted once unless they are large."""
        vectors = self.eigh()[1]
        if vectors is None or vectors.dtype == dtype:
            return vectors
        wide = len(vectors) > MAX_CONVERTED
        return vectors.to(dtype) if wide else self._converted(dtype, vectors)

    @base.cache_last_call
    def _converted(self, dtype: torch.dtype, vectors: Tensor) -> Tensor:
        return vectors.to(dtype)

    def rotate_outputs(self, g: Tensor) -> Tensor:
        """``g Q``; once for output gradients that all samples share."""
        vectors = self.vectors(g.dtype)
        if vectors is None:
            return g
        return g @ vectors if len(g) > 1 else self._rotated(g, vectors)

    @base.cache_last_call
    def _rotated(self, g: Tensor, vectors: Tensor) -> Tensor:
        return g @ vectors

    def total(self) -> Tensor:
        """A copy of the factor, (n, n), or (n,) where only its diagonal is kept."""
        if isinstance(self.state, Tensor):
            return self.state.clone()
        values, vectors = self.state
        return values.clone() if vectors is None else (vectors * values) @ vectors.T

    def dense(self) -> Tensor:
        """The factor as a matrix, (n, n), always from its eigenvectors."""
        values, vectors = self.eigh()
        return values.diag() if vectors is None else (vectors * values) @ vectors.T


@dataclass(frozen=True)
class Kron(base.Diagonalised):
    """``H ≈ diag(B₁ ⊗ A₁, B₂ ⊗ A₂, ...)``: correlations within each layer only.

    Attributes
    ----------
    factors : tuple of (output factor, input factor)
        ``(B, A)`` of each block.
    n_positions : tuple of Tensor of shape ()
        Weighted number of inputs that each ``A`` is the mean over.
    """

    factors: tuple[tuple[Factor, Factor], ...]
    n_positions: tuple[Tensor, ...]
    kind = "kron"
    priors = frozenset({"scalar", "layerwise"})

    @property
    def eigenvalues(self) -> Tensor:
        """Products of the factors' eigenvalues, (P,), output-major."""
        products = [torch.outer(b.values, a.values) for b, a in self.factors]
        return torch.cat([product.flatten() for product in products])

    def rotated_blocks(self, jacobian: Jacobian) -> Iterator[Block]:
        """``a`` and ``g`` in the eigenbases of their factors."""
        last: tuple[Any, ...] = ()  # of a bias that follows its weight
        for block, (b, a) in zip(jacobian.blocks, self.factors, strict=True):
            if last[:2] != (id(b), id(block.g)):
                last = id(b), id(block.g), b.rotate_outputs(block.g)
            g = last[2]
            yield Block(g, block.a).rotate(None, a.vectors(g.dtype))

    def apply(self, weights: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """``(Fᵦ ⊗ Fₐ)ᵀ w`` block by block, where ``F`` is a function of ``Q``."""
        pieces = []
        for (b, a), piece in zip(self.factors, self.layout.split(weights), strict=True):
            x = piece.unflatten(-1, (len(b.values), len(a.values)))
            for factor in (a, b):
                q = factor.vectors(x.dtype)
                x = (x if q is None else x @ function(q)).mT
            pieces.append(x.flatten(-2))
        return torch.cat(pieces, -1)

    def scaled(self, factor: Tensor) -> "Kron":
        """The structure of ``factor·H``: means of inputs stay."""
        outputs, inputs = zip(*self.factors, strict=True)
        more = once(lambda b: Factor(factor * b.total()), outputs)
        counts = tuple(factor * n for n in self.n_positions)
        return Kron(self.layout, tuple(zip(more, inputs, strict=True)), counts)

    def resume(self, accumulator: Any) -> None:
        """Put the factors, as sums, into an empty accumulator."""
        outputs, inputs = zip(*self.factors, strict=True)
        pairs = zip(inputs, self.n_positions, strict=True)
        moments = [a.total() * n for a, n in pairs]
        counts = [n.clone() for n in self.n_positions]
        accumulator._sums = once(Factor.total, outputs), moments, counts

    def dense(self) -> Tensor:
        """``H`` as a matrix, (P, P)."""
        blocks = [torch.kron(b.dense(), a.dense()) for b, a in self.factors]
        return torch.block_diag(*blocks)


class KronAccumulator(base.Accumulator):
    """Sums ``g gᵀ`` and ``a aᵀ``; memory Σ (o² + i²) over layers.

    Parameters
    ----------
    layout : Layout
        The selected parameters.
    weight_sharing : {"expand", "reduce"}, default="expand"
        Whether each position of a sample counts as a sample, or the mean of their ``a``
        and the sum of their ``g`` do.

    References
    ----------
    Eschenhagen, Immer, Turner, Schneider, Hennig (2023), "Kronecker-factored
    approximate curvature for modern neural network architectures", sections 3.2, 3.3.
    """

    checks: ClassVar = {"weight_sharing": partial(check_option, allowed=WEIGHT_SHARING)}

    def __init__(self, layout: Layout, weight_sharing: str = "expand") -> None:
        super().__init__(layout)
        self._reduces = weight_sharing == "reduce"
        # of each block: Σ g gᵀ, Σ a aᵀ and the number of inputs a
        self._sums: tuple[list[Tensor], ...] = [], [], []

    @classmethod
    def n_bytes(cls, layout: Layout, n_rows: int | None = None, **options: Any) -> int:
        """Factors, their eigenvectors and the workspace of the largest one."""
        widths = [n for block in layout.blocks for n in block.factor_shape]
        dense = [n for n in widths if n <= MAX_FACTOR]
        return 8 * (2 * sum(n * n for n in dense) + 3 * max([1, *dense]) ** 2)

    def update(self, jacobian: Jacobian) -> None:
        """Add the factors of one batch."""
        blocks = jacobian.blocks
        if self._reduces:
            blocks = [block.reduced() for block in blocks]
        outputs = once(_output_moment, blocks, keys=[b.outputs for b in blocks])
        more = [outputs]
        if not jacobian.first_column:  # else inputs of this batch have been added
            given = jacobian.weights, outputs[0].new_ones(())
            inputs = [_input_sums(block.a, *given) for block in blocks]
            more += map(list, zip(*inputs, strict=True))
        for sums, some in zip(self._sums, more, strict=False):
            _add(sums, some)

    def merge(self, other: Any) -> None:
        """Add the sums of another accumulator."""
        for mine, theirs in zip(self._sums, other._sums, strict=True):
            _add(mine, once(torch.clone, theirs))  # sums are added to in place

    def decompose(self) -> Kron:
        """The factors, which are not diagonalised yet."""
        tiny = torch.finfo(torch.float64).tiny
        # copies: sums are added to in place
        outputs = once(lambda b: Factor(b.clone()), self._sums[0])
        counts = tuple(n.clone() for n in self._sums[2])
        pairs = zip(self._sums[1], counts, strict=True)
        inputs = [Factor(a / n.clamp(min=tiny)) for a, n in pairs]
        return Kron(self.layout, tuple(zip(outputs, inputs, strict=True)), counts)


def once(
    function: Callable[..., T], *arguments: Iterable[Any], keys: Iterable[Any] = ()
) -> list[T]:
    """``map``, evaluated once where arguments, or ``keys``, are the same objects.

    Weight and bias of a Linear layer share output gradients, and so one factor.
    """
    found: dict[tuple[int, ...], T] = {}
    values = list(zip(*arguments, strict=True))
    names = [tuple(map(id, same)) for same in (list(zip(keys)) or values)]
    for name, some in zip(names, values, strict=True):
        if name not in found:
            found[name] = function(*some)
    return [found[name] for name in names]


def _add(sums: list[Tensor], more: list[Tensor]) -> None:
    """Add ``more`` to ``sums`` in place, which may be empty yet."""
    if not sums or not more:
        sums += more
        return
    partners: dict[int, set[int]] = {}
    for total, piece in zip(sums, more, strict=True):
        partners.setdefault(id(total), set()).add(id(piece))
    for index, total in enumerate(sums):
        if len(partners[id(total)]) > 1:  # shared by blocks, whose sums differ now
            sums[index] = total.clone()
    once(torch.Tensor.add_, sums, more)


def _output_moment(block: Any) -> Tensor:
    """``Σ g gᵀ``, or its diagonal where that would be too wide."""
    is_wide = block.n_outputs > MAX_FACTOR
    return (block.output_squares() if is_wide else block.output_moment()).double()


def _input_sums(
    a: Inputs | None, weights: Tensor | None, one: Tensor
) -> tuple[Tensor, Tensor]:
    """``Σ w a aᵀ`` over samples and positions, or its diagonal; and ``Σ w``, ().

    Ones for a bias.
    """
    if a is None:
        return one.new_ones(1, 1), one.clone()
    of_inputs = second_diagonal if a.shape[-1] > MAX_FACTOR else second_moment
    n_rows = a.shape[0] if weights is None else weights.double().sum()
    return of_inputs(a, weights).double(), one * n_rows * a.shape[1]
