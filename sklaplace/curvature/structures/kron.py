"""Kronecker structure (KFAC): per weight tensor ``H ≈ B ⊗ A``.

``B = Σ g gᵀ`` over rows, columns and positions; ``A`` is the mean of ``a aᵀ``
over rows and positions ("expand" form for convolutions; Martens and Grosse
2015; Grosse and Martens 2016). A bias, and rows without a layer form, are blocks
``B`` of their own, which is exact within the block. Both factors are
diagonalised once, when a question first needs it, so that the prior precision is
added to the products of their eigenvalues exactly (Ritter, Botev and Barber 2018).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from sklaplace.core.checks import check_option
from sklaplace.core.linalg import symmetric_eigh
from sklaplace.curvature.blocks import Block
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.patches import Inputs, second_diagonal, second_moment
from sklaplace.curvature.structures.base import Accumulator, Diagonalised

# A factor wider than this keeps its diagonal only: the eigenvectors of a denser
# one take 8 n² bytes and about 10 n³ operations.
MAX_FACTOR = 8192
# Eigenvectors of more dimensions are converted whenever they are used: that is quick
# beside the products with them, and a copy would be large.
MAX_CONVERTED = 512
# output gradients shared by all rows whose rotation is kept: of the identity and of
# the centred outputs, for the weight and where a bias has none of its own
MAX_REMEMBERED = 4

T = TypeVar("T")


@dataclass(eq=False)
class Factor:
    """A factor, factorised when its eigenvectors are first asked for.

    Attributes
    ----------
    state : Tensor of shape (n, n) or (n,), or tuple of Tensor
        The factor itself, float64; a vector is the diagonal of one. Later its
        eigenvalues (n,) and eigenvectors (n, n), or None for the identity: both
        together would take twice the memory.
    """

    state: Tensor | tuple[Tensor, Tensor | None]

    def _eigh(self) -> tuple[Tensor, Tensor | None]:
        state = self.state  # read once and replaced at once, for threads
        if isinstance(state, Tensor):
            state = (state, None) if state.ndim == 1 else symmetric_eigh(state)
            self.state = state
        return state

    @property
    def values(self) -> Tensor:
        """Eigenvalues, (n,)."""
        return self._eigh()[0]

    @property
    def vectors(self) -> Tensor | None:
        """Eigenvectors (n, n); None: the identity."""
        return self._eigh()[1]

    def __getstate__(self) -> dict[str, Any]:
        """What is quick to make again stays behind."""
        return {"state": self.state}

    @cached_property
    def _narrow(self) -> dict[torch.dtype, Tensor]:
        return {}

    def vectors_as(self, dtype: torch.dtype) -> Tensor | None:
        """Eigenvectors in a dtype; converted once, unless they are large."""
        vectors = self.vectors
        if vectors is None or vectors.dtype == dtype:
            return vectors
        if len(vectors) > MAX_CONVERTED:
            return vectors.to(dtype)
        if dtype not in self._narrow:
            self._narrow[dtype] = vectors.to(dtype)
        return self._narrow[dtype]

    @cached_property
    def _rotated(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}

    def rotate_outputs(self, g: Tensor) -> Tensor:
        """Output gradients in the eigenbasis; once for those that all rows share."""
        vectors = self.vectors_as(g.dtype)
        if vectors is None:
            return g
        if len(g) > 1:
            return g @ vectors
        if id(g) not in self._rotated:
            if len(self._rotated) >= MAX_REMEMBERED:
                self._rotated.clear()
            self._rotated[id(g)] = g, g @ vectors  # g itself, so that its id stays
        return self._rotated[id(g)][1]

    def apply(self, x: Tensor) -> Tensor:
        """Coordinates on the last axis back to the original basis."""
        vectors = self.vectors_as(x.dtype)
        return x if vectors is None else x @ vectors.T

    def apply_transposed(self, x: Tensor) -> Tensor:
        """Coordinates on the last axis into the eigenbasis."""
        vectors = self.vectors_as(x.dtype)
        return x if vectors is None else x @ vectors

    def apply_squared(self, x: Tensor) -> Tensor:
        """The same with squared eigenvectors."""
        return x if self.vectors is None else x @ (self.vectors**2).T

    def total(self) -> Tensor:
        """A copy of the factor, (n, n), or of its diagonal, (n,), where that is all."""
        if isinstance(self.state, Tensor):
            return self.state.clone()
        values, vectors = self.state
        return values.clone() if vectors is None else (vectors * values) @ vectors.T

    def dense(self) -> Tensor:
        """The factor written out, (n, n), always from its eigenvectors."""
        values, vectors = self._eigh()
        return values.diag() if vectors is None else (vectors * values) @ vectors.T


@dataclass(frozen=True)
class Kron(Diagonalised):
    """Correlations within each layer, as a product of two small matrices.

    Attributes
    ----------
    factors : tuple of (output factor, input factor)
        One pair per block.
    n_positions : tuple of Tensor of shape ()
        Weighted number of inputs that each input factor is the mean over.
    """

    factors: tuple[tuple[Factor, Factor], ...]
    n_positions: tuple[Tensor, ...]
    kind = "kron"
    priors = frozenset({"scalar", "layerwise"})

    @property
    def eigenvalues(self) -> Tensor:
        """Products of the factors' eigenvalues, (P,), output-major."""
        return torch.cat(
            [torch.outer(b.values, a.values).flatten() for b, a in self.factors]
        )

    def rotated_blocks(self, jacobian: Jacobian) -> Iterator[Block]:
        """``a`` and ``g`` in the eigenbases of their factors."""
        last: tuple[Any, ...] = ()  # of a bias that follows its weight
        for block, (b, a) in zip(jacobian.blocks, self.factors, strict=True):
            if last[:2] != (id(b), id(block.g)):
                last = id(b), id(block.g), b.rotate_outputs(block.g)
            g = last[2]
            yield Block(g, block.a).rotate(None, a.vectors_as(g.dtype))

    def unrotate(self, weights: Tensor) -> Tensor:
        """Coordinates (s, P) in the eigenbasis back to parameters."""
        return self._map(weights, "apply")

    def to_basis(self, weights: Tensor) -> Tensor:
        """Parameters (..., P) to coordinates in the eigenbasis."""
        return self._map(weights, "apply_transposed")

    def squared_basis(self, values: Tensor) -> Tensor:
        """Diagonal of ``Q diag(values) Qᵀ``, (P,)."""
        return self._map(values, "apply_squared")

    def _map(self, vector: Tensor, method: str) -> Tensor:
        pieces = []
        for (b, a), piece in zip(self.factors, self.layout.split(vector), strict=True):
            matrix = piece.unflatten(-1, (len(b.values), len(a.values)))
            turned = getattr(b, method)(getattr(a, method)(matrix).mT).mT
            pieces.append(turned.flatten(-2))
        return torch.cat(pieces, -1)

    def scaled(self, factor: Tensor) -> "Kron":
        """The factors of rows with that sample weight: means of inputs stay."""
        outputs, inputs = zip(*self.factors, strict=True)
        more = once(lambda b: Factor(factor * b.total()), [(b,) for b in outputs])
        counts = tuple(factor * n for n in self.n_positions)
        return Kron(self.layout, tuple(zip(more, inputs, strict=True)), counts)

    def resume(self, accumulator: Accumulator) -> None:
        """The factors, as sums; both sides of a layer may share one."""
        assert isinstance(accumulator, KronAccumulator)
        outputs, inputs = zip(*self.factors, strict=True)
        accumulator._outputs = once(Factor.total, [(b,) for b in outputs])
        accumulator._inputs = [
            a.total() * n for a, n in zip(inputs, self.n_positions, strict=True)
        ]
        accumulator._n_positions = [n.clone() for n in self.n_positions]

    def dense(self) -> Tensor:
        """``H`` written out, (P, P)."""
        blocks = [torch.kron(b.dense(), a.dense()) for b, a in self.factors]
        dense: Tensor = torch.block_diag(*blocks)
        return dense


# how positions that share a weight are made one row
WEIGHT_SHARING = "expand", "reduce"


def _check_sharing(name: str, value: Any) -> None:
    check_option(name, value, WEIGHT_SHARING)


class KronAccumulator(Accumulator):
    """Sums ``g gᵀ`` and ``a aᵀ``; memory Σ (o² + i²) over layers.

    Parameters
    ----------
    layout : Layout
        The selected parameters.
    weight_sharing : {"expand", "reduce"}, default="expand"
        Whether each position of a row counts as a row, or the mean of their ``a`` and
        the sum of their ``g`` do.

    References
    ----------
    Eschenhagen, Immer, Turner, Schneider, Hennig (2023), "Kronecker-factored
    approximate curvature for modern neural network architectures", sections 3.2, 3.3.
    """

    checks: ClassVar = {"weight_sharing": _check_sharing}

    def __init__(self, layout: Layout, weight_sharing: str = "expand") -> None:
        super().__init__(layout)
        self._reduces = weight_sharing == "reduce"
        self._outputs: list[Tensor] = []
        self._inputs: list[Tensor] = []
        self._n_positions: list[Tensor] = []

    @staticmethod
    def n_bytes(layout: Layout, n_rows: int | None = None, **options: Any) -> int:
        """Factors, their eigenvectors and the workspace of the largest one."""
        widths = [n for block in layout.blocks for n in block.factor_shape]
        dense = [n for n in widths if n <= MAX_FACTOR]
        return 8 * (2 * sum(n * n for n in dense) + 3 * max([1, *dense]) ** 2)

    def update(self, jacobian: Jacobian) -> None:
        """Add the factors of one batch."""
        blocks = jacobian.blocks
        if self._reduces:
            blocks = [block.reduced() for block in blocks]
        sides = [(block.outputs,) for block in blocks]
        outputs = once(_output_moment, [(block,) for block in blocks], sides)
        if jacobian.first_column:  # of a batch whose inputs have been seen
            _add(self._outputs, outputs)
            return
        device, weights = outputs[0].device, jacobian.weights
        inputs = [_input_moment(block.a, weights, device) for block in blocks]
        counts = [_n_positions(block.a, weights, device) for block in blocks]
        _add(self._outputs, outputs)
        _add(self._inputs, inputs)
        _add(self._n_positions, counts)

    def merge(self, other: Accumulator) -> None:
        """Add what another accumulator has seen."""
        assert isinstance(other, KronAccumulator)
        for mine, theirs in (
            (self._outputs, other._outputs),
            (self._inputs, other._inputs),
            (self._n_positions, other._n_positions),
        ):
            # copies: sums are added to in place
            _add(mine, once(torch.clone, [(value,) for value in theirs]))

    def decompose(self) -> Kron:
        """The frozen eigendecompositions."""
        tiny = torch.finfo(torch.float64).tiny
        means = [
            a / n.clamp(min=tiny)
            for a, n in zip(self._inputs, self._n_positions, strict=True)
        ]
        # copies: sums are added to in place
        outputs = once(lambda b: Factor(b.clone()), [(b,) for b in self._outputs])
        inputs = map(Factor, means)
        counts = tuple(n.clone() for n in self._n_positions)
        return Kron(self.layout, tuple(zip(outputs, inputs, strict=True)), counts)


def once(
    function: Callable[..., T],
    arguments: list[tuple[Any, ...]],
    identities: list[tuple[Any, ...]] | None = None,
) -> list[T]:
    """``function`` of each, evaluated once where arguments are the same objects.

    Weight and bias of a Linear layer share output gradients, and so one factor.
    """
    found: dict[tuple[int, ...], T] = {}
    keys = [tuple(map(id, same)) for same in identities or arguments]
    for key, args in zip(keys, arguments, strict=True):
        if key not in found:
            found[key] = function(*args)
    return [found[key] for key in keys]


def _add(sums: list[Tensor], more: list[Tensor]) -> None:
    """Add to sums of one's own in place; begin with the first."""
    if not sums:
        sums += more
        return
    if not more:
        return
    partners: dict[int, set[int]] = {}
    for total, piece in zip(sums, more, strict=True):
        partners.setdefault(id(total), set()).add(id(piece))
    for index, total in enumerate(sums):
        if len(partners[id(total)]) > 1:  # shared so far, and no more
            sums[index] = total.clone()
    once(torch.Tensor.add_, list(zip(sums, more, strict=True)))


def _output_moment(block: Any) -> Tensor:
    """``Σ g gᵀ``, or its diagonal where that would be too wide."""
    is_wide = block.n_outputs > MAX_FACTOR
    moment: Tensor = block.output_squares() if is_wide else block.output_moment()
    return moment.double()


def _input_moment(
    a: Inputs | None, weights: Tensor | None, device: torch.device
) -> Tensor:
    """``Σ w a aᵀ`` over rows and positions, or its diagonal; one for a bias."""
    if a is None:
        return torch.ones(1, 1, dtype=torch.float64, device=device)
    if a.shape[-1] > MAX_FACTOR:
        return second_diagonal(a, weights).double()
    return second_moment(a, weights).double()


def _n_positions(
    a: Inputs | None, weights: Tensor | None, device: torch.device
) -> Tensor:
    """Weighted number of rows, times positions, that an input moment sums."""
    if a is None:
        return torch.ones((), dtype=torch.float64, device=device)
    n_rows = a.shape[0] if weights is None else weights.double().sum()
    return torch.as_tensor(n_rows * a.shape[1], dtype=torch.float64, device=device)
