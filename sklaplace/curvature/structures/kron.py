"""Kronecker-factored structure (KFAC): ``H ≈ B ⊗ A`` per weight tensor.

``B`` is the sum of ``g gᵀ`` over samples, outputs and positions. ``A`` is the mean of
``a aᵀ`` over samples and positions ("expand" form for convolutions; Martens and Grosse
2015; Grosse and Martens 2016). Biases, and parameters of other layer types, have only a
factor ``B``, which is exact within the block. Each group of a grouped convolution has
its own factors. Both factors are diagonalised once, when first needed. The prior
precision is added to the products of their eigenvalues, without approximation (Ritter,
Botev and Barber 2018).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from sklaplace.core.checks import check_option
from sklaplace.core.linalg import gram, group_products, symmetric_eigh, wide_root_eigh
from sklaplace.core.serialise import FieldsOnly
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.patches import (
    Inputs,
    grouped_moment,
    scaled_rows,
    second_diagonal,
    second_moment,
)
from sklaplace.curvature.rows import Block, HeadBlock
from sklaplace.curvature.shared import SharedBlock, SharedColumns
from sklaplace.curvature.structures import base

# Only the diagonal of wider factors is kept, because the eigenvectors of a dense factor
# need 8 n² bytes and about 10 n³ operations. Factors of groups are always dense. Few of
# them are wide, since a group has only some of the channels.
MAX_FACTOR = 8192
# If the number of rows exceeds this fraction of their width, decomposing the product is
# faster than a singular value decomposition of the rows.
ROOT_FRACTION = 0.7
# Eigenvector matrices wider than this are converted at each use, because the conversion
# is fast compared with products, and a copy would be large.
MAX_CONVERTED = 512

# how positions count as samples; see `KronAccumulator`
WEIGHT_SHARING = "expand", "reduce"

T = TypeVar("T")


@dataclass(eq=False)
class Factor(FieldsOnly):
    """Kronecker factor, diagonalised when its eigenvectors are first needed.

    Attributes
    ----------
    state : Tensor of shape (n, n), (r, n) or (n,), or tuple of Tensor
        Factor in float64: the matrix (n, n), a root ``R`` (r, n) of the factor ``Rᵀ R``
        with r < n, or the diagonal (n,). To save memory, `eigh` replaces the factor by
        its eigenvalues (n,) and eigenvectors (n, n), or None for the identity. For G
        groups, all tensors have a first axis of length G.
    """

    state: Tensor | tuple[Tensor, Tensor | None]

    def eigh(self) -> tuple[Tensor, Tensor | None]:
        """Compute eigenvalues (n,) and eigenvectors (n, n), or None for the identity.

        The state is read and replaced only once, so that threads can share a factor.
        """
        state = self.state
        if isinstance(state, Tensor):
            if state.ndim == 1:
                state = state, None
            else:
                state = (wide_root_eigh if _is_wide(state) else symmetric_eigh)(state)
            self.state = state
        return state

    @property
    def values(self) -> Tensor:
        """Eigenvalues, (n,)."""
        return self.eigh()[0]

    def vectors(self, dtype: torch.dtype) -> Tensor | None:
        """Return eigenvectors (n, n) in a dtype; small ones are converted only once."""
        vectors = self.eigh()[1]
        if vectors is None or vectors.dtype == dtype:
            return vectors
        wide = vectors.numel() > MAX_CONVERTED**2
        return vectors.to(dtype) if wide else self._converted(dtype, vectors)

    @base.cache_last_call
    def _converted(self, dtype: torch.dtype, vectors: Tensor) -> Tensor:
        return vectors.to(dtype)

    def rotate_outputs(self, g: Tensor | SharedColumns) -> Tensor | SharedColumns:
        """Return ``g Q``, cached if all samples share the output gradients."""
        vectors = self.vectors(g.dtype)
        if vectors is None:
            return g
        if isinstance(g, SharedColumns) or len(g) == 1:
            return self._rotated(g, vectors)
        return _times(g, vectors)

    @base.cache_last_call
    def _rotated(self, g: Tensor | SharedColumns, vectors: Tensor) -> Tensor:
        if isinstance(g, SharedColumns):
            return g.times(vectors).reshape(1, g.n, 1, g.n)
        return _times(g, vectors)

    def total(self) -> Tensor:
        """Copy the factor (n, n), or its diagonal (n,) if only this is stored."""
        state = self.state
        if isinstance(state, Tensor):
            return gram(state) if _is_wide(state) else state.clone()
        values, vectors = state
        return values.clone() if vectors is None else _product(values, vectors)

    def trace(self) -> Tensor:
        """Return the trace of the factor, (), or of each group's factor, (G,)."""
        state = self.state
        if not isinstance(state, Tensor):
            return state[0].sum(-1)
        if _is_wide(state):
            return (state**2).sum()
        if state.ndim == 1:
            return state.sum()
        return state.diagonal(dim1=-2, dim2=-1).sum(-1)

    def dense(self) -> Tensor:
        """Return the matrix of each group, (G, n, n), from its eigenvectors."""
        values, vectors = self.eigh()
        dense = values.diag() if vectors is None else _product(values, vectors)
        return dense.reshape(-1, *dense.shape[-2:])


def _product(values: Tensor, vectors: Tensor) -> Tensor:
    """Return ``Q diag(e) Qᵀ``."""
    return (vectors * values.unsqueeze(-2)) @ vectors.mT


def _times(g: Tensor, vectors: Tensor) -> Tensor:
    """Return ``g Q``, group by group if there are several."""
    return g @ vectors if vectors.ndim == 2 else group_products(g, vectors)


def _is_wide(matrix: Tensor) -> bool:
    return matrix.ndim == 2 and len(matrix) < matrix.shape[1]


@dataclass(eq=False)
class Moment:
    """``Σ w a aᵀ`` over rows ``a``, or a root of this sum if the root is smaller.

    Attributes
    ----------
    n : Tensor of shape ()
        ``Σ w`` over samples and positions; for a bias, the number of batches.
    root : list of Tensor of shape (n, i)
        Rows times the square roots of their weights, used if there are fewer rows in
        total than `ROOT_FRACTION` times i. A decomposition of the rows costs O(n·i²)
        instead of O(i³).
    total : Tensor of shape (i, i), (G, i, i) or (i,), or None
        Sum in float64, or the diagonal of the sum; one sum per group if there are
        several.
    """

    n: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    root: list[Tensor] = field(default_factory=list)
    total: Tensor | None = None

    @classmethod
    def of_inputs(
        cls, a: Inputs | None, weights: Tensor | None, one: Tensor, n_groups: int = 1
    ) -> "Moment":
        """Compute the moment of one batch of inputs; ``one`` () is used for a bias."""
        if a is None:
            return cls(one, total=one.new_ones(1, 1))
        n_samples, n_positions, width = a.shape
        n = one * (n_samples if weights is None else weights.double().sum())
        n = n * n_positions
        if n_groups > 1:
            return cls(n, total=grouped_moment(a, weights, n_groups))
        if width > MAX_FACTOR:
            return cls(n, total=second_diagonal(a, weights).double())
        if n_samples * n_positions < ROOT_FRACTION * width:
            return cls(n, [scaled_rows(a, weights)])
        return cls(n, total=second_moment(a, weights).double())

    @classmethod
    def of_outputs(cls, block: Block | HeadBlock) -> "Moment":
        """Compute ``Σ g gᵀ`` of one batch, or only the diagonal of a large matrix."""
        if block.n_outputs > MAX_FACTOR and block.n_groups == 1:
            return cls(total=block.output_squares().double())
        if type(block) is Block:
            rows = block.g.flatten(0, 2)
            if len(rows) < ROOT_FRACTION * block.n_outputs:
                return cls(root=[rows])
        return cls(total=block.output_moment().double())

    @classmethod
    def sum(cls, *moments: "Moment") -> "Moment":
        """Return the sum of moments, which are not changed: blocks may share them."""
        total = cls()
        for moment in moments:
            total.add(moment)
        return total

    def add(self, other: "Moment") -> None:
        """Add another moment in place."""
        self.n = self.n + other.n
        self.root = self.root + other.root
        parts = [] if other.total is None else [other.total]
        n_rows = sum(map(len, self.root))
        is_dense = self.total is not None or parts
        if self.root and (is_dense or n_rows >= ROOT_FRACTION * self.root[0].shape[1]):
            parts += [gram(rows).double() for rows in self.root]
            self.root = []
        for part in parts:
            self.total = part.clone() if self.total is None else self.total.add_(part)

    def factor(self) -> Factor:
        """Return the sum as a factor."""
        total = self.total
        return Factor(torch.cat(self.root).double() if total is None else total)

    def mean(self) -> Factor:
        """Return the mean, the sum divided by ``n``, as a factor."""
        n = self.n.clamp(min=torch.finfo(self.n.dtype).tiny)
        if self.total is None:
            return Factor(torch.cat(self.root).double() / n.sqrt())
        return Factor(self.total / n)


@dataclass(frozen=True)
class Kron(base.Diagonalised):
    """``H ≈ diag(B₁ ⊗ A₁, B₂ ⊗ A₂, ...)``, without correlations between tensors.

    Attributes
    ----------
    factors : tuple of (output factor, input factor)
        ``(B, A)`` of each block.
    n_positions : tuple of Tensor of shape ()
        Weighted number of inputs in the mean ``A`` of each block.
    """

    factors: tuple[tuple[Factor, Factor], ...]
    n_positions: tuple[Tensor, ...]
    kind = "kron"
    keeps_factors = True
    priors = frozenset({"scalar", "layerwise"})

    @property
    def eigenvalues(self) -> Tensor:
        """Products of the factors' eigenvalues, (P,), output-major."""
        pairs = ((b.values.unsqueeze(-1), a.values) for b, a in self.factors)
        return torch.cat([(b * a.unsqueeze(-2)).flatten() for b, a in pairs])

    def trace(self) -> Tensor:
        """Return ``Σ tr B tr A``, ()."""
        traces = [(b.trace() * a.trace()).sum() for b, a in self.factors]
        return torch.stack(traces).sum()

    def rotated_blocks(self, jacobian: Jacobian) -> Iterator[Block]:
        """Rotate ``a`` and ``g`` into the eigenbases of their factors."""
        last: tuple[Any, ...] = ()  # reused by a bias that follows its weight
        for block, (b, a) in zip(jacobian.blocks, self.factors, strict=True):
            g = block.columns if isinstance(block, SharedBlock) else block.g
            if last[:2] != (id(b), id(g)):
                last = id(b), id(g), b.rotate_outputs(g)
            g = last[2]
            yield block.like(g, block.a).rotate(a.vectors(g.dtype))

    def apply(self, weights: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``(Fᵦ ⊗ Fₐ)ᵀ w`` of each block, where ``F`` is a function of ``Q``."""
        pieces = []
        for (b, a), piece in zip(self.factors, self.layout.split(weights), strict=True):
            shape = *b.values.shape, a.values.shape[-1]
            x = piece.unflatten(-1, shape)
            for factor in (a, b):
                q = factor.vectors(x.dtype)
                x = (x if q is None else x @ function(q)).mT
            pieces.append(x.flatten(-len(shape)))
        return torch.cat(pieces, -1)

    def scaled(self, factor: Tensor) -> "Kron":
        """Return the structure of ``factor·H``, with unchanged input factors."""
        outputs, inputs = zip(*self.factors, strict=True)
        more = once(lambda b: Factor(factor * b.total()), outputs)
        counts = tuple(factor * n for n in self.n_positions)
        return Kron(self.layout, tuple(zip(more, inputs, strict=True)), counts)

    def with_output_factors(self, factors: Tensor) -> "Kron":
        """Return the structure of ``D H D``, with unchanged input factors."""

        def multiplied(b: Factor) -> Factor:
            total = b.total()
            rows = factors if total.ndim == 1 else factors[:, None]
            return Factor(rows * total * factors)

        outputs, inputs = zip(*self.factors, strict=True)
        pairs = zip(once(multiplied, outputs), inputs, strict=True)
        return Kron(self.layout, tuple(pairs), self.n_positions)

    def resume(self, accumulator: base.Accumulator) -> None:
        """Add the factors, as sums, to an empty accumulator."""
        outputs, inputs = zip(*self.factors, strict=True)
        pairs = zip(inputs, self.n_positions, strict=True)
        assert isinstance(accumulator, KronAccumulator)
        accumulator.inputs = [Moment(n, total=a.total() * n) for a, n in pairs]
        accumulator.outputs = once(lambda b: Moment(total=b.total()), outputs)

    def dense(self) -> Tensor:
        """Return ``H`` as a matrix, (P, P)."""
        groups = (zip(b.dense(), a.dense(), strict=True) for b, a in self.factors)
        return torch.block_diag(*(torch.kron(b, a) for some in groups for b, a in some))


class KronAccumulator(base.Accumulator):
    """Sums of ``g gᵀ`` and ``a aᵀ``, with Σ (o² + i²) numbers over layers and groups.

    Parameters
    ----------
    layout : Layout
        The selected parameters.
    weight_sharing : {"expand", "reduce"}, default="expand"
        "expand" counts each position as a sample. "reduce" uses the mean of ``a`` and
        the sum of ``g`` over the positions of a sample.

    References
    ----------
    Eschenhagen, Immer, Turner, Schneider, Hennig (2023), "Kronecker-factored
    approximate curvature for modern neural network architectures", sections 3.2, 3.3.
    """

    checks: ClassVar = {"weight_sharing": partial(check_option, allowed=WEIGHT_SHARING)}

    def __init__(self, layout: Layout, weight_sharing: str = "expand") -> None:
        super().__init__(layout)
        self._reduces = weight_sharing == "reduce"
        # of each block: Σ g gᵀ and Σ a aᵀ
        self.outputs: list[Moment] = []
        self.inputs = [Moment() for _ in layout.blocks]

    @classmethod
    def n_bytes(cls, layout: Layout, n_rows: int | None = None, **_: object) -> int:
        """Return the bytes of all factors, eigenvectors and the largest workspace."""
        widths = [(n, b.n_groups) for b in layout.blocks for n in b.factor_shape]
        dense = [(n, groups) for n, groups in widths if n <= MAX_FACTOR or groups > 1]
        largest = max([1, *(n for n, _ in dense)])
        return 8 * (2 * sum(n * n * groups for n, groups in dense) + 3 * largest**2)

    def update(self, jacobian: Jacobian) -> None:
        """Add the factors of one batch."""
        blocks = jacobian.blocks
        if self._reduces:
            blocks = [block.reduced() for block in blocks]
        outputs = once(Moment.of_outputs, blocks, keys=[b.outputs for b in blocks])
        self._add_outputs(outputs)
        if not jacobian.first_column:  # otherwise, inputs have already been added
            one = torch.ones((), dtype=torch.float64, device=blocks[0].device)
            for moment, block in zip(self.inputs, blocks, strict=True):
                given = block.a, jacobian.weights, one, block.n_groups
                moment.add(Moment.of_inputs(*given))

    def merge(self, other: Self) -> None:
        """Add the sums of another accumulator."""
        self._add_outputs(other.outputs)
        for moment, more in zip(self.inputs, other.inputs, strict=True):
            moment.add(more)

    def _add_outputs(self, more: list[Moment]) -> None:
        """Add output factors, one per block, if there are any."""
        self.outputs = once(Moment.sum, *filter(None, (self.outputs, more)))

    def decompose(self) -> Kron:
        """Return the factors, not yet diagonalised."""
        outputs = once(Moment.factor, self.outputs)
        inputs = [moment.mean() for moment in self.inputs]
        counts = tuple(moment.n for moment in self.inputs)
        return Kron(self.layout, tuple(zip(outputs, inputs, strict=True)), counts)


def once(
    function: Callable[..., T],
    *arguments: Iterable[object],
    keys: Iterable[object] = (),
) -> list[T]:
    """Map a function, called only once for identical arguments or identical ``keys``.

    The weight and bias of a Linear layer share output gradients, and therefore share a
    factor.
    """
    found: dict[tuple[int, ...], T] = {}
    values = list(zip(*arguments, strict=True))
    names = [tuple(map(id, same)) for same in (list(zip(keys)) or values)]
    for name, some in zip(names, values, strict=True):
        if name not in found:
            found[name] = function(*some)
    return [found[name] for name in names]
