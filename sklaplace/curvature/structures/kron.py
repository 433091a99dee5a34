"""Kronecker-factored structure (KFAC): ``H ≈ B ⊗ A`` per weight tensor.

``B`` is the sum of ``g gᵀ`` over samples, outputs and positions. ``A`` is the mean of
``a aᵀ`` over samples and positions ("expand" form for convolutions; Martens and Grosse
2015; Grosse and Martens 2016). Biases, and parameters of other layer types, have only a
factor ``B``, which is exact within the block. Each group of a grouped convolution has
its own factors. Both factors are diagonalised once, when first needed. The prior
precision is added to the products of their eigenvalues, without approximation (Ritter,
Botev and Barber 2018).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

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
from sklaplace.curvature.rows import LayerRows, aligned, total
from sklaplace.curvature.structures import base

# Only the diagonal of wider factors is kept, because the eigenvectors of a dense factor
# need 8 n² bytes and about 10 n³ operations. Factors of groups are always dense. Few of
# them are wide, since a group has only some of the channels.
MAX_DENSE_WIDTH = 8192
# If the number of rows exceeds this fraction of their width, decomposing the product is
# faster than a singular value decomposition of the rows.
MAX_ROWS_PER_INPUT = 0.7
# Eigenvector matrices wider than this are converted at each use, because the conversion
# is fast compared with products, and a copy would be large.
MAX_CACHED_WIDTH = 512

# how positions count as samples; see `KronAccumulator`
WEIGHT_SHARING = "expand", "reduce"


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
        """Return eigenvalues (n,) and eigenvectors (n, n), or None for the identity.

        The first call replaces the stored factor by them; later calls only return them.
        The state is read and replaced only once, so that threads can share a factor.
        """
        state = self.state
        if isinstance(state, Tensor):
            if state.ndim == 1:  # a diagonal
                state = state, None
            elif _is_root(state):
                state = wide_root_eigh(state)
            else:
                state = symmetric_eigh(state)
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
        if vectors.numel() > MAX_CACHED_WIDTH**2:
            return vectors.to(dtype)
        return self._converted(dtype, vectors)

    @base.cache_last_call
    def _converted(self, dtype: torch.dtype, vectors: Tensor) -> Tensor:
        return vectors.to(dtype)

    def rotate_outputs(self, g: Any) -> Any:
        """Return ``g Q``, cached if all samples share the gradients ``g``.

        ``g`` (b, k, positions, o) is a tensor or `SharedColumns`, and ``Q`` (o, o) are
        the eigenvectors. Shared gradients are stored once, with b = 1.
        """
        vectors = self.vectors(g.dtype)
        if vectors is None:  # Q is the identity
            return g
        return self._rotated(g, vectors) if len(g) == 1 else _times(g, vectors)

    @base.cache_last_call
    def _rotated(self, g: Any, vectors: Tensor) -> Tensor:
        return _times(g, vectors)

    def matrix(self) -> Tensor:
        """Return a copy of the factor (n, n), or (n,) for a diagonal factor.

        The state may be the matrix, its diagonal, a root ``R`` of the factor ``RᵀR``,
        or eigenvalues and eigenvectors.
        """
        state = self.state
        if isinstance(state, Tensor):
            return gram(state) if _is_root(state) else state.clone()
        values, vectors = state
        return values.clone() if vectors is None else _from_eigen(values, vectors)

    def trace(self) -> Tensor:
        """Return the trace of the factor, (), or of each group's factor, (G,)."""
        state = self.state
        if not isinstance(state, Tensor):  # eigenvalues and eigenvectors
            return state[0].sum(-1)
        if _is_root(state):
            return (state**2).sum()
        if state.ndim == 1:  # a diagonal
            return state.sum()
        return state.diagonal(dim1=-2, dim2=-1).sum(-1)

    def dense(self) -> Tensor:
        """Return the matrix of each group, (G, n, n), from its eigenvectors."""
        values, vectors = self.eigh()
        dense = values.diag() if vectors is None else _from_eigen(values, vectors)
        return dense.reshape(-1, *dense.shape[-2:])


def _from_eigen(values: Tensor, vectors: Tensor) -> Tensor:
    """Return ``Q diag(e) Qᵀ``."""
    return (vectors * values.unsqueeze(-2)) @ vectors.mT


def _times(g: Any, vectors: Tensor) -> Tensor:
    """Return ``g Q``, group by group if there are several."""
    product: Tensor = g @ vectors if vectors.ndim == 2 else group_products(g, vectors)
    return product


def _is_root(matrix: Tensor) -> bool:
    """Return whether a `Factor.state` is a root ``R`` instead of a factor ``RᵀR``."""
    return matrix.ndim == 2 and len(matrix) < matrix.shape[1]


@dataclass(frozen=True, eq=False)
class Moment:
    """``Σ w a aᵀ`` over rows ``a``, or a root of this sum if the root is smaller.

    Attributes
    ----------
    n : Tensor of shape ()
        ``Σ w`` over samples and positions; for a bias, the number of batches.
    root : tuple of Tensor of shape (n, i)
        Rows times the square roots of their weights, used if there are fewer rows in
        total than `MAX_ROWS_PER_INPUT` times i. A decomposition of the rows costs
        O(n·i²) instead of O(i³).
    total : Tensor of shape (i, i), (G, i, i) or (i,), or None
        Sum in float64, or the diagonal of the sum; one sum per group if there are
        several.
    """

    n: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    root: tuple[Tensor, ...] = ()
    total: Tensor | None = None

    @classmethod
    def of_inputs(
        cls,
        a: Inputs | None,
        weights: Tensor | None,
        device: torch.device,
        n_groups: int = 1,
    ) -> "Moment":
        """Compute ``Σ w a aᵀ`` of one batch of inputs, or of a bias if ``a`` is None.

        ``a`` has the shape (samples, positions, i), and ``weights`` are ``w``
        (samples,). The moment of a group is always a matrix. Otherwise, wide inputs
        keep only the diagonal, and few rows are kept as a root, which is cheaper to
        decompose than a matrix.
        """
        unit = torch.ones((), dtype=torch.float64, device=device)
        if a is None:  # the input of a bias is one, in all batches
            return cls(unit, total=unit.new_ones(1, 1))
        n_samples, n_positions, width = a.shape
        # number of rows: the sum of weights times positions
        n = unit * (n_samples if weights is None else weights.double().sum())
        n = n * n_positions
        if n_groups > 1:
            return cls(n, total=grouped_moment(a, weights, n_groups))
        if width > MAX_DENSE_WIDTH:
            return cls(n, total=second_diagonal(a, weights).double())
        if n_samples * n_positions < MAX_ROWS_PER_INPUT * width:
            return cls(n, (scaled_rows(a, weights),))
        return cls(n, total=second_moment(a, weights).double())

    @classmethod
    def of_outputs(cls, block: Any) -> "Moment":
        """Compute ``Σ g gᵀ`` of one batch, or only the diagonal of a large matrix.

        ``block`` holds the gradients ``g`` (b, k, positions, o) of one parameter
        tensor. Few rows ``g`` are kept as a root, which is cheaper to decompose than a
        matrix.
        """
        if block.n_outputs > MAX_DENSE_WIDTH and block.n_groups == 1:
            return cls(total=block.output_squares().double())
        # a last layer has a moment without rows g
        if block.n_groups == 1 and not block.is_from_head:
            rows = block.g.flatten(0, 2)
            if len(rows) < MAX_ROWS_PER_INPUT * block.n_outputs:
                return cls(root=(rows,))
        return cls(total=block.output_moment().double())

    def __add__(self, other: "Moment") -> "Moment":
        """Return the moment of the rows of both.

        Roots are kept together. They become a matrix if they have many rows in total,
        or if one of the moments is a matrix. An empty moment has neither.
        """
        root = self.root + other.root
        totals = [moment.total for moment in (self, other) if moment.total is not None]
        n_rows = sum(map(len, root))
        if root and (totals or n_rows >= MAX_ROWS_PER_INPUT * root[0].shape[1]):
            totals += [gram(rows).double() for rows in root]
            root = ()
        return Moment(self.n + other.n, root, total(totals) if totals else None)

    def factor(self) -> Factor:
        """Return the sum as a factor."""
        if self.total is None:
            return Factor(torch.cat(self.root).double())
        return Factor(self.total)

    def mean(self) -> Factor:
        """Return the mean, the sum divided by ``n``, as a factor."""
        # the sum is zero if all weights are zero, and so is its mean
        n = self.n.clamp(min=torch.finfo(self.n.dtype).tiny)
        if self.total is None:
            return Factor(torch.cat(self.root).double() / n.sqrt())
        return Factor(self.total / n)


@dataclass(frozen=True)
class KronLayer:
    """Factors of the parameters that share output gradients; see `LayerRows`.

    Attributes
    ----------
    outputs : Factor
        ``B``.
    inputs : tuple of Factor
        ``A`` of each parameter tensor.
    n_positions : tuple of Tensor of shape ()
        Weighted number of inputs in the mean ``A`` of each parameter tensor.
    """

    outputs: Factor
    inputs: tuple[Factor, ...]
    n_positions: tuple[Tensor, ...]

    def split(self) -> "list[KronLayer]":
        """Return the factors of each parameter tensor."""
        pairs = zip(self.inputs, self.n_positions, strict=True)
        return [KronLayer(self.outputs, (a,), (n,)) for a, n in pairs]


@dataclass(frozen=True)
class Kron(base.Diagonalised):
    """``H ≈ diag(B₁ ⊗ A₁, B₂ ⊗ A₂, ...)``, without correlations between tensors.

    Attributes
    ----------
    layers : tuple of KronLayer
        Factors of all parameters, in the order of the layout.
    """

    layers: tuple[KronLayer, ...]
    name = "kron"
    keeps_factors = True
    priors = frozenset({"scalar", "layerwise"})

    @property
    def factors(self) -> list[tuple[Factor, Factor]]:
        """``(B, A)`` of each parameter tensor."""
        return [(layer.outputs, a) for layer in self.layers for a in layer.inputs]

    @property
    def eigenvalues(self) -> Tensor:
        """Products of the factors' eigenvalues, (P,), output-major."""
        pairs = ((b.values.unsqueeze(-1), a.values) for b, a in self.factors)
        return torch.cat([(b * a.unsqueeze(-2)).flatten() for b, a in pairs])

    def trace(self) -> Tensor:
        """Return ``Σ tr B tr A``, ()."""
        traces = [(b.trace() * a.trace()).sum() for b, a in self.factors]
        return torch.stack(traces).sum()

    def rotated_layers(self, jacobian: Jacobian) -> Iterator[LayerRows]:
        """Yield ``J Q``: inputs ``a`` and gradients ``g`` in their factors' eigenbases.

        Rows ``g ⊗ a`` stay factored, because ``Q`` is a Kronecker product. The tensors
        of a layer share gradients, which are rotated once per layer.
        """
        for rows, layer in zip(*aligned(jacobian.layers, self.layers), strict=True):
            g = layer.outputs.rotate_outputs(rows.first.gradients)
            pairs = zip(rows.blocks, layer.inputs, strict=True)
            # rotated g in place of g, and then rotated inputs
            rotated = (
                b.with_factors(g, b.a).rotate(a.vectors(g.dtype)) for b, a in pairs
            )
            yield LayerRows(tuple(rotated))

    def times_basis(self, w: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``w F(Q)`` for each row of ``w`` (..., P), without forming ``Q``.

        ``F`` is the argument ``function``. For each parameter tensor, ``Q`` is the
        Kronecker product ``Qᵦ ⊗ Qₐ`` of the eigenvectors of its factors ``B`` and
        ``A``. The tensor's weights, as a matrix (o, i), are multiplied by ``F(Qₐ)``
        along the inputs and by ``F(Qᵦ)`` along the outputs.
        """
        pieces = []
        for (b, a), piece in zip(self.factors, self.layout.split(w), strict=True):
            shape = *b.values.shape, a.values.shape[-1]  # (o, i), or (G, o, i)
            x = piece.unflatten(-1, shape)
            for factor in (a, b):
                q = factor.vectors(x.dtype)  # None for the identity
                # the transpose moves the outputs to the end, and then the inputs
                x = (x if q is None else x @ function(q)).mT
            pieces.append(x.flatten(-len(shape)))
        return torch.cat(pieces, -1)

    def scaled(self, factor: Tensor) -> "Kron":
        """Return the structure of ``factor·H``, with unchanged input factors.

        Input factors are means over samples, and do not change. ``n_positions``, the
        sums of weights in these means, are multiplied by the factor, as if sample
        weights were.
        """
        layers = (
            KronLayer(
                outputs=Factor(factor * layer.outputs.matrix()),
                inputs=layer.inputs,
                n_positions=tuple(factor * n for n in layer.n_positions),
            )
            for layer in self.layers
        )
        return Kron(self.layout, tuple(layers))

    def with_output_factors(self, factors: Tensor) -> "Kron":
        """Return the structure of ``D H D``, with unchanged input factors.

        ``D`` multiplies the weights of each output of the layer by a factor (o,), so it
        acts on the output factor ``B`` from both sides.
        """

        def multiplied(outputs: Factor) -> Factor:
            b = outputs.matrix()  # (o, o), or its diagonal
            by_row = factors if b.ndim == 1 else factors[:, None]
            return Factor(by_row * b * factors)

        layers = (replace(k, outputs=multiplied(k.outputs)) for k in self.layers)
        return Kron(self.layout, tuple(layers))

    def add_to(self, accumulator: base.Accumulator) -> None:
        """Add the factors to an empty accumulator, with sums in place of means.

        Output factors are sums. Input factors are means over ``n`` rows, and become
        sums again when multiplied by ``n``.
        """
        assert isinstance(accumulator, KronAccumulator)
        accumulator.add(
            [
                Moments(
                    outputs=Moment(total=layer.outputs.matrix()),
                    inputs=tuple(
                        Moment(n, total=a.matrix() * n)
                        for a, n in zip(layer.inputs, layer.n_positions, strict=True)
                    ),
                )
                for layer in self.layers
            ]
        )

    def dense(self) -> Tensor:
        """Return ``H`` as a matrix, (P, P)."""
        # one block B ⊗ A per parameter tensor, or per group of a grouped convolution
        groups = (zip(b.dense(), a.dense(), strict=True) for b, a in self.factors)
        return torch.block_diag(*(torch.kron(b, a) for ab in groups for b, a in ab))


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over samples for the parameters that share output gradients.

    Attributes
    ----------
    outputs : Moment
        ``Σ g gᵀ``.
    inputs : tuple of Moment
        ``Σ a aᵀ`` of each parameter tensor.
    """

    outputs: Moment
    inputs: tuple[Moment, ...]

    @classmethod
    def of(cls, layer: LayerRows, jacobian: Jacobian) -> "Moments":
        """Compute the moments of one batch's inputs and output gradients in a layer.

        A batch may come in several calls with some columns of the Jacobian each. Its
        inputs are the same in all of them, and are added only in the first call.
        """
        weights, device = jacobian.weights, layer.first.device
        inputs = (
            Moment()  # the inputs have already been added with the first columns
            if jacobian.first_column
            else Moment.of_inputs(block.a, weights, device, block.n_groups)
            for block in layer.blocks
        )
        return cls(Moment.of_outputs(layer.first), tuple(inputs))

    def split(self) -> "list[Moments]":
        """Return the moments of each parameter tensor."""
        return [Moments(self.outputs, (moment,)) for moment in self.inputs]

    def __add__(self, other: "Moments") -> "Moments":
        """Return the moments of the samples of both."""
        inputs = tuple(map(Moment.__add__, self.inputs, other.inputs))
        return Moments(self.outputs + other.outputs, inputs)

    def decompose(self) -> KronLayer:
        """Return the factors, not yet diagonalised."""
        means = tuple(moment.mean() for moment in self.inputs)
        counts = tuple(moment.n for moment in self.inputs)
        return KronLayer(self.outputs.factor(), means, counts)


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
        self.layers: Sequence[Moments] = []

    @classmethod
    def n_bytes(cls, layout: Layout, n_rows: int | None = None, **_: object) -> int:
        """Return the bytes of all factors, eigenvectors and the largest workspace.

        Wide factors count as nothing, because only their diagonal is stored. Each
        parameter tensor has an output and an input factor, for each of its groups.
        """
        factors = [(n, b.n_groups) for b in layout.blocks for n in b.factor_shape]
        dense = [(n, g) for n, g in factors if n <= MAX_DENSE_WIDTH or g > 1]
        largest = max([1, *(n for n, _ in dense)])
        # factors and eigenvectors of all, and three matrices of eigh at a time
        return 8 * (2 * sum(n * n * g for n, g in dense) + 3 * largest**2)

    def update(self, jacobian: Jacobian) -> None:
        """Add the factors of one batch."""
        if self._reduces:
            jacobian = jacobian.merge_positions()
        self.add([Moments.of(layer, jacobian) for layer in jacobian.layers])

    def merge(self, other: Self) -> None:
        """Add the sums of another accumulator."""
        self.add(other.layers)

    def add(self, layers: Sequence[Moments]) -> None:
        """Add the moments of other samples, one for each layer; none if empty."""
        if self.layers and layers:
            layers = [a + b for a, b in zip(*aligned(self.layers, layers), strict=True)]
        self.layers = layers or self.layers

    def decompose(self) -> Kron:
        """Return the factors, not yet diagonalised."""
        return Kron(self.layout, tuple(moments.decompose() for moments in self.layers))
