"""Jacobians of the outputs in the selected parameters, kept unmultiplied.

For a parameter tensor of a Linear or convolution layer the rows of the Jacobian
are ``Σᵣ g ⊗ a``: layer inputs ``a`` (b, r, i) times gradients ``g`` (b, k, r, o)
of the outputs in what the layer puts out. One forward pass records ``a``, one
batched backward pass gives all ``g``; no gradient of any weight is computed and
the dense (b, k, P) Jacobian is not built. Parameters of other layers come from
``torch.func`` as dense rows, which have the form of a bias (``a ≡ 1``).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vjp, vmap

from sklaplace.forward import Forward
from sklaplace.hessians import Factored, OutputHessian
from sklaplace.inputs import LAYER_INPUTS, Inputs, Patches, unfolded
from sklaplace.layouts import BlockSpec, Head, Layout
from sklaplace.linalg import gram
from sklaplace.memory import BUDGET

# elements of a temporary array that is allowed without cutting it into rows
CHUNK_ELEMENTS = 2**22
# the same where the array is read once more at once: it should stay in the caches
DENSE_ELEMENTS = 2**19
# the same where the array is small beside what it is made of
CACHED_ELEMENTS = 2**16
# gradients of a column that are alive at once: those kept, and those passed on
BACKWARD_COPIES = 2


@dataclass(frozen=True)
class Block:
    """Rows of the Jacobian that belong to one parameter tensor.

    Attributes
    ----------
    g : Tensor of shape (b, k, r, o) or (1, k, 1, o)
        Gradients of the k outputs (or combinations of them) at r positions; one
        entry for all rows where they are the same.
    a : Tensor or Patches of shape (b, r, i), or None
        Layer inputs. None stands for ``a ≡ 1``; then r = 1.
    """

    g: Tensor
    a: Inputs | None = None

    def __len__(self) -> int:
        """Rows of the batch; one where all are alike."""
        return len(self.g) if self.a is None else self.a.shape[0]

    @property
    def n_columns(self) -> int:
        """Rows k for each row of the batch."""
        return self.g.shape[1]

    @property
    def n_parameters(self) -> int:
        """Length p of a row."""
        return self.g.shape[-1] * (1 if self.a is None else self.a.shape[-1])

    @property
    def _inputs(self) -> Tensor:
        """Layer inputs written out, (b, r, i); ones for a bias."""
        if self.a is None:
            return self.g.new_ones(len(self.g), 1, 1)
        return unfolded(self.a)

    @property
    def _has_one_position(self) -> bool:
        return self.a is None or self.a.shape[1] == 1

    def dense(self) -> Tensor:
        """Rows written out, (b, k, p)."""
        if self.a is None:
            return self.g.squeeze(2)
        k, o = self.g.shape[1], self.g.shape[-1]
        outputs = self.g.movedim(2, -1).flatten(1, 2)  # (b, k·o, r)
        summed = (
            self.a.contracted(outputs)
            if isinstance(self.a, Patches)
            else outputs @ self.a
        )
        rows: Tensor = summed.unflatten(1, (k, o)).flatten(2)
        return rows

    def double(self) -> "Block":
        """The same in float64."""
        return Block(self.g.double(), None if self.a is None else self.a.double())

    def _pieces(self) -> Iterator[Tensor]:
        """Dense rows in groups that are small enough for fast memory."""
        assert self.a is not None
        b, k = len(self), self.n_columns
        n_rows = max(1, DENSE_ELEMENTS // max(1, k * self.n_parameters))
        for start in range(0, b, n_rows):
            rows = slice(start, start + n_rows)
            g = self.g if len(self.g) == 1 else self.g[rows]
            yield Block(g, self.a[rows]).dense()

    # -------------------------------------------------------- asked when fitting
    @property
    def n_outputs(self) -> int:
        """Outputs o of the layer, or p where there are no inputs."""
        return self.g.shape[-1]

    @property
    def outputs(self) -> Tensor:
        """What the moment of the outputs is made of: blocks may share it."""
        return self.g

    def squares(self) -> Tensor:
        """Sum of squared rows over b and k, (p,), float64."""
        if not self._has_one_position:
            return torch.stack(
                [(piece**2).sum((0, 1)).double() for piece in self._pieces()]
            ).sum(0)
        weights = (self.g.squeeze(2) ** 2).sum(1)  # (b, o)
        return (weights.T @ self._inputs.squeeze(1) ** 2).flatten().double()

    def output_moment(self) -> Tensor:
        """``Σ g gᵀ`` over rows, columns and positions, (o, o)."""
        return gram(self.g.flatten(0, 2))

    def output_squares(self) -> Tensor:
        """Its diagonal, (o,)."""
        return (self.g**2).sum((0, 1, 2))

    def grams(self, other: "Block") -> tuple[Tensor, Tensor, Tensor] | None:
        """``Σₖ g gᵀ`` (b, o, o') with another block, and both layers' inputs (b, i).

        None where there are several positions, so that rows are no such products.
        """
        if not (self._has_one_position and other._has_one_position):
            return None
        outputs = self.g.squeeze(2).mT @ other.g.squeeze(2)
        return outputs, self._inputs.squeeze(1), other._inputs.squeeze(1)

    # ------------------------------------------------------ asked when predicting
    def gram(self, v: Tensor) -> Tensor:
        """``rows · diag(v) · rowsᵀ`` for ``v`` (p,), as (b, k, k)."""
        if self._has_one_position:
            return _weighted_gram(self.g, self._weigh_outputs(v))
        return torch.cat([(piece * v) @ piece.mT for piece in self._pieces()])

    def variance(self, v: Tensor) -> Tensor:
        """Diagonal of `gram`, (b, k)."""
        if self._has_one_position:
            return _weighted_squares(self.g, self._weigh_outputs(v))
        return torch.cat([(piece * piece) @ v for piece in self._pieces()])

    def _weigh_outputs(self, v: Tensor) -> Tensor:
        """``a² v`` for each output of the layer, (b, o)."""
        matrix = v.reshape(self.g.shape[-1], -1)
        if self.a is None:
            return matrix.T
        return self._inputs.squeeze(1) ** 2 @ matrix.T

    def matmul(self, v: Tensor) -> Tensor:
        """``rows @ v`` for ``v`` (p, q), as (b, k, q)."""
        if self.a is None:
            return self.g.squeeze(2) @ v
        if self.n_columns == 1 or not self._has_one_position:
            return torch.cat([piece @ v for piece in self._pieces()])
        # inputs first: b·p·q operations whatever k, and (b, o, q) in between
        matrices = v.reshape(self.g.shape[-1], -1, v.shape[1])  # (o, i, q)
        g, inputs = self.g.squeeze(2), self._inputs.squeeze(1)
        n_rows = max(1, CHUNK_ELEMENTS // max(1, len(matrices) * v.shape[1]))
        found = []
        for start in range(0, len(inputs), n_rows):
            rows = slice(start, start + n_rows)
            reached = inputs[rows] @ matrices  # (o, b, q)
            found.append((g if len(g) == 1 else g[rows]) @ reached.transpose(0, 1))
        return torch.cat(found)

    def rotate(self, outputs: Tensor | None, inputs: Tensor | None) -> "Block":
        """Rows in the basis ``outputs ⊗ inputs``; None leaves a side alone."""
        g = self.g if outputs is None else self.g @ outputs
        if inputs is None or self.a is None:
            return Block(g, self.a)
        if isinstance(self.a, Patches):
            return Block(g, replace(self.a, basis=inputs))
        return Block(g, self.a @ inputs)


def _weighted_gram(g: Tensor, per_output: Tensor) -> Tensor:
    """``g · diag(per_output) · gᵀ``, (b, k, k)."""
    g = g.squeeze(2)
    return (g * per_output.unsqueeze(1)) @ g.mT


def _weighted_squares(
    g: Tensor, per_output: Tensor, squares: Tensor | None = None
) -> Tensor:
    """Its diagonal, (b, k); ``squares`` are those of ``g``, if known."""
    if len(g) == 1:
        squares = g**2 if squares is None else squares
        return per_output @ squares[0, :, 0].T
    g = g.squeeze(2)
    # a few rows at a time, so that what is multiplied stays in the caches
    n_rows = max(1, CACHED_ELEMENTS // g[0].numel())
    pairs = zip(
        g.split(n_rows), per_output.expand(len(g), -1).split(n_rows), strict=True
    )
    return torch.cat([(w.unsqueeze(1) * some**2).sum(-1) for some, w in pairs])


def variances(
    blocks: Iterable[Block],
    pieces: Iterable[Tensor],
    squares: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Sum over blocks of their `Block.variance`, (b, k).

    ``squares`` gives those of the output gradients that all rows share, if known.
    """

    def weigh(g: Tensor, per_output: Tensor) -> Tensor:
        known = squares(g) if squares is not None and len(g) == 1 else None
        return _weighted_squares(g, per_output, known)

    return _summed(blocks, pieces, Block.variance, weigh)


def _summed(
    blocks: Iterable[Block],
    pieces: Iterable[Tensor],
    ask: Callable[[Block, Tensor], Tensor],
    weigh: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Sum over blocks of ``ask(block, piece)``.

    Weight and bias of a layer share output gradients: their weights for each
    output, with which ``weigh`` sums products, are added first.
    """
    parts: list[Tensor] = []
    shared: tuple[Tensor, Tensor] | None = None
    for block, piece in zip(blocks, pieces, strict=True):
        if not block._has_one_position:
            parts.append(ask(block, piece))
            continue
        per_output = block._weigh_outputs(piece)
        if shared is not None and shared[0] is block.g:
            shared = block.g, shared[1] + per_output
            continue
        if shared is not None:
            parts.append(weigh(*shared))
        shared = block.g, per_output
    if shared is not None:
        parts.append(weigh(*shared))
    # blocks of a bias may have one entry for all rows
    total: Tensor = sum(parts[1:], parts[0])
    return total


@dataclass(frozen=True)
class HeadBlock:
    """Rows ``SᵀM ⊗ a`` of a last layer, whose ``S`` is not written out.

    Only the questions of fitting have an answer here; `Block` has the others.

    Attributes
    ----------
    hessian : OutputHessian
        ``Λ = S Sᵀ`` of each row.
    matrix : Tensor of shape (c, o) or None
        ``M``, gradient of the outputs in what the layer puts out; None: identity.
    a : Tensor of shape (b, 1, i) or None
        Layer inputs. None stands for ``a ≡ 1``.
    """

    hessian: OutputHessian
    matrix: Tensor | None
    a: Tensor | None = None

    def __len__(self) -> int:
        """Rows of the batch."""
        return self.hessian.n_rows

    @property
    def n_columns(self) -> int:
        """Rows k for each row of the batch."""
        return self.hessian.n_columns

    @cached_property
    def g(self) -> Tensor:
        """``SᵀM`` written out, (b, k, 1, o); for small models and tests."""
        return self.hessian.rows(self.matrix).unsqueeze(2)

    @property
    def n_outputs(self) -> int:
        """Outputs o of the layer."""
        return self.hessian.n_outputs if self.matrix is None else self.matrix.shape[1]

    @property
    def outputs(self) -> OutputHessian:
        """What the moment of the outputs is made of: weight and bias share it."""
        return self.hessian

    @cached_property
    def _diagonals(self) -> Tensor:
        """Diagonal of ``MᵀΛM`` for each row, (b, o)."""
        return self.hessian.diagonals(self.matrix)

    def dense(self) -> Tensor:
        """Rows written out, (b, k, p)."""
        return Block(self.g, self.a).dense()

    def squares(self) -> Tensor:
        """Sum of squared rows over b and k, (p,), float64."""
        weights = self._diagonals
        if self.a is None:
            return weights.double().sum(0)
        return (weights.T @ self.a.squeeze(1) ** 2).flatten().double()

    def output_moment(self) -> Tensor:
        """``Σ MᵀΛM`` over rows, (o, o)."""
        return self.hessian.moment(self.matrix)

    def output_squares(self) -> Tensor:
        """Its diagonal, (o,)."""
        return self._diagonals.sum(0)

    def grams(self, other: "HeadBlock") -> tuple[Tensor, Tensor, Tensor]:
        """``MᵀΛM`` (b, o, o), and inputs (b, i) of this block and of another."""
        outputs = self.hessian.grams(self.matrix)
        here, there = (
            outputs.new_ones(len(outputs), 1) if block.a is None else block.a.squeeze(1)
            for block in (self, other)
        )
        return outputs, here, there


@dataclass(frozen=True)
class Jacobian:
    """Rows for every selected parameter: one `Block` per parameter tensor.

    Attributes
    ----------
    blocks : list of Block or of HeadBlock
        In the order of the layout.
    weights : Tensor of shape (b,) or None
        Sample weights that the rows carry as their square root already.
    first_column : int
        Number of columns of this batch that came before: then its layer inputs
        have been seen already.
    """

    blocks: list[Any]
    weights: Tensor | None = None
    first_column: int = 0

    @property
    def n_rows(self) -> int:
        """Rows b of the batch; at least one block knows them all."""
        return max(len(block) for block in self.blocks)

    @property
    def n_columns(self) -> int:
        """Rows k for each row of the batch."""
        return int(self.blocks[0].n_columns)

    @property
    def dtype(self) -> torch.dtype:
        """That of the rows."""
        dtype: torch.dtype = self.blocks[0].g.dtype
        return dtype

    @property
    def is_shared(self) -> bool:
        """Whether the output gradients are one and the same for all rows."""
        first = self.blocks[0]
        return first.a is not None and all(
            block.g is first.g and block.g.shape[0] == 1 for block in self.blocks
        )

    def features(self) -> Tensor:
        """What shared output gradients are multiplied by, (b, i), with a one if due."""
        a: Tensor = self.blocks[0].a.squeeze(1)
        ones = [a.new_ones(len(a), 1) for _ in self.blocks[1:]]
        return torch.cat([a, *ones], 1)

    def dense(self) -> Tensor:
        """Rows written out, (b, k, P)."""
        pieces = [block.dense() for block in self.blocks]
        b = max(len(piece) for piece in pieces)
        return torch.cat([piece.expand(b, -1, -1) for piece in pieces], -1)

    def double(self) -> "Jacobian":
        """The same in float64."""
        return replace(self, blocks=[block.double() for block in self.blocks])

    def gram(self, v: Tensor) -> Tensor:
        """``rows · diag(v) · rowsᵀ`` for ``v`` (P,), as (b, k, k)."""
        return _summed(self.blocks, self._split(v), Block.gram, _weighted_gram)

    def variance(self, v: Tensor) -> Tensor:
        """Diagonal of `gram`, (b, k)."""
        return variances(self.blocks, self._split(v))

    def matmul(self, v: Tensor) -> Tensor:
        """``rows @ v`` for ``v`` (P, q), as (b, k, q)."""
        pieces = zip(self.blocks, self._split(v), strict=True)
        parts = [block.matmul(piece) for block, piece in pieces]
        # blocks of a bias have one entry for all rows
        total: Tensor = sum(parts[1:], parts[0])
        return total

    def _split(self, v: Tensor) -> tuple[Tensor, ...]:
        pieces: tuple[Tensor, ...] = v.split([b.n_parameters for b in self.blocks])
        return pieces


def _output_gradients(module: nn.Module, g: Tensor) -> Tensor:
    """Output gradients (k, b, ...) as (b, k, r, o)."""
    g = g.movedim(0, 1)
    if not isinstance(module, nn.Linear):
        g = g.movedim(2, -1)  # channels are last for Linear, first for convolutions
    return g.reshape(*g.shape[:2], -1, g.shape[-1])


# ------------------------------------------------------------- backpropagation
@dataclass(frozen=True)
class _Call:
    """One use of a layer: its input, the edge of its output and that one's shape."""

    x: Tensor
    edge: GradientEdge
    shape: torch.Size


class _Recorder:
    """Listens to the layers of a layout during one forward pass.

    The *gradient edge* of the layer's output is recorded, not the output: an
    in-place activation changes what the tensor stands for, never the edge.
    """

    def __init__(self, module: nn.Module, layers: list[str]) -> None:
        self.calls: dict[str, list[_Call]] = {}
        self._handles = []
        for name in layers:
            layer = module.get_submodule(name)
            self.calls[name] = []
            self._handles += [
                layer.register_forward_pre_hook(
                    self._make_differentiable, with_kwargs=True
                ),
                layer.register_forward_hook(
                    partial(self._record, name), with_kwargs=True
                ),
            ]

    @staticmethod
    def _make_differentiable(
        _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Start the graph here if nothing below is selected.

        The parameters need no gradient, so without this the output would have
        no edge. The copy-free detach keeps in-place activations legal.
        """
        x = args[0] if args else kwargs["input"]
        return (x if x.requires_grad else x.detach().requires_grad_(),), {}

    def _record(
        self, name: str, _layer: nn.Module, args: Any, _kwargs: Any, output: Tensor
    ) -> Tensor:
        if output._is_view():
            # an in-place activation would cut a view's edge out of the graph
            output = output.clone()
        call = _Call(args[0].detach(), get_gradient_edge(output), output.shape)
        self.calls[name].append(call)
        return output

    def __enter__(self) -> "_Recorder":
        return self

    def __exit__(self, *_exception: object) -> None:
        for handle in self._handles:
            handle.remove()


# S as combinations of outputs, (b, c, k), or only S Sᵀ
Columns = Tensor | OutputHessian


def centring(f: Tensor) -> Tensor:
    """``C = I - 11ᵀ/c``, (c, c): outputs less their mean, as softmax sees them."""
    c = f.shape[-1]
    return torch.eye(c, dtype=f.dtype, device=f.device) - 1 / c


# rules whose S is the same for all rows; None stands for the identity
SHARED_COLUMNS: tuple[Callable[[Tensor], Tensor] | None, ...] = (None, centring)


def backpropagate(
    forward: Forward,
    x: Any,
    layout: Layout,
    cotangents: Callable[[Tensor], Columns] | None = None,
) -> tuple[Tensor, Jacobian]:
    """Outputs of a batch and the Jacobian of combinations of them.

    Parameters
    ----------
    forward : Forward
        The network, inside ``forward.frozen()``.
    x : Tensor, or dict, list or tuple of tensors
        One batch of b rows.
    layout : Layout
        The selected parameters.
    cotangents : callable, optional
        Maps the outputs (b, c) to ``S`` (b, c, k) or an `OutputHessian`; the rows of
        the result are those of ``Sᵀ J``. Without it ``S`` is the identity and k = c;
        it is the same for all rows for `centring`, too.

    Returns
    -------
    outputs : Tensor of shape (b, c)
    jacobian : Jacobian
        With k rows for each row of the batch.

    Notes
    -----
    A layout with a `Head` costs one forward pass. Any other costs a backward pass
    of k columns down to the lowest selected layer as well; memory is ``b Σ r (i +
    k·o)`` over the selected layers, and ``b·k·p`` for rows of other layers.
    """
    parts = list(backpropagate_in_parts(forward, x, layout, cotangents))
    return joined(parts)


def backpropagate_in_parts(
    forward: Forward,
    x: Any,
    layout: Layout,
    cotangents: Callable[[Tensor], Columns] | None = None,
) -> Iterator[tuple[Tensor, Jacobian]]:
    """The same, some columns at a time where all of them would take much memory."""
    if layout.head is not None:
        known = _through_head(forward, x, layout, layout.head, cotangents)
        if known is not None:
            yield known
            return
    with torch.enable_grad(), _Recorder(forward.module, layout.layers) as recorder:
        f = forward(x)
    outputs = f.detach()
    columns = _columns(outputs, cotangents)
    free = [block for block in layout.blocks if block.layer is None]
    per_part = _columns_per_part(recorder.calls, columns)
    for start in range(0, columns.shape[-1], per_part):
        some = columns[..., start : start + per_part]
        layer_rows = _layer_rows(forward.module, f, recorder.calls, some)
        free_rows = _dense_rows(forward, x, free, some) if free else {}
        blocks = [
            free_rows[spec.name]
            if spec.layer is None
            else _block(spec, layer_rows[spec.layer])
            for spec in layout.blocks
        ]
        yield outputs, Jacobian(blocks, first_column=start)


def _columns(outputs: Tensor, cotangents: Callable[[Tensor], Columns] | None) -> Tensor:
    """``S`` written out, (b, c, k)."""
    identity = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
    columns = identity if cotangents is None else cotangents(outputs)
    if isinstance(columns, OutputHessian):
        return columns.factor()
    return columns.expand(len(outputs), -1, -1)


def _columns_per_part(calls: dict[str, list[_Call]], columns: Tensor) -> int:
    """Columns whose gradients fit into the budget together, at least one."""
    elements = sum(
        call.shape.numel() for recorded in calls.values() for call in recorded
    )
    per_column = max(1, elements) * columns.element_size() * BACKWARD_COPIES
    return max(1, BUDGET // per_column)


def joined(parts: list[tuple[Tensor, Jacobian]]) -> tuple[Tensor, Jacobian]:
    """Columns of all parts side by side."""
    if len(parts) == 1:
        return parts[0]
    together = zip(*(part.blocks for _, part in parts), strict=True)
    blocks = [Block(torch.cat([b.g for b in same], 1), same[0].a) for same in together]
    return parts[0][0], Jacobian(blocks, parts[0][1].weights)


def _through_head(
    forward: Forward,
    x: Any,
    layout: Layout,
    head: Head,
    cotangents: Callable[[Tensor], Columns] | None,
) -> tuple[Tensor, Jacobian] | None:
    """Outputs and rows by one forward pass; None if some row took another way."""
    layer = forward.module.get_submodule(str(layout.blocks[0].layer))
    calls: list[_Seen] = []

    def look(_layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        x = args[0] if args else kwargs["input"]
        calls.append(_Seen(x, output, x._version, output._version))

    handle = layer.register_forward_hook(look, with_kwargs=True)
    try:
        with torch.no_grad():
            f = forward(x)
    finally:
        handle.remove()
    if len(calls) != 1 or not calls[0].is_intact:
        return None
    (call,) = calls
    if call.output.ndim != 2 or not head.fits(call.output, f):
        return None
    a = call.x.unsqueeze(1)
    if cotangents in SHARED_COLUMNS:
        g = head.shared(cotangents, f)
        return f, Jacobian([Block(g, None if s.is_bias else a) for s in layout.blocks])
    assert cotangents is not None
    columns = cotangents(f)
    hessian = Factored(columns) if isinstance(columns, Tensor) else columns
    matrix = None if head.is_identity else head.matrix.to(f)
    return f, Jacobian(
        [HeadBlock(hessian, matrix, None if s.is_bias else a) for s in layout.blocks]
    )


@dataclass(frozen=True)
class _Seen:
    """What went through a layer, and versions that tell of writing in place."""

    x: Tensor
    output: Tensor
    x_version: int
    output_version: int

    @property
    def is_intact(self) -> bool:
        return (self.x._version, self.output._version) == (
            self.x_version,
            self.output_version,
        )


def _block(spec: BlockSpec, layer: tuple[Inputs, Tensor]) -> Block:
    a, g = layer
    if not spec.is_bias:
        return Block(g, a)
    return Block(g if g.shape[2] == 1 else g.sum(2, keepdim=True))


def _layer_rows(
    module: nn.Module,
    f: Tensor,
    calls: dict[str, list[_Call]],
    columns: Tensor,
) -> dict[str, tuple[Inputs, Tensor]]:
    """Inputs (b, r, i) and output gradients (b, k, r, o) of every layer.

    A layer that was called several times contributes all its positions.
    """
    every_call = [call for recorded in calls.values() for call in recorded]
    gradients = iter(_batched_gradients(f, every_call, columns.movedim(-1, 0)))
    rows: dict[str, tuple[Inputs, Tensor]] = {}
    for name, recorded in calls.items():
        layer: Any = module.get_submodule(name)
        if not recorded:  # these rows took another way through the network
            rows[name] = _no_rows(layer, columns)
            continue
        inputs = LAYER_INPUTS[type(layer)]
        seen = [inputs(layer, call.x) for call in recorded]
        a = seen[0] if len(seen) == 1 else torch.cat([*map(unfolded, seen)], dim=1)
        parts = [_output_gradients(layer, next(gradients)) for _ in recorded]
        rows[name] = a, torch.cat(parts, dim=2)
    return rows


def _no_rows(layer: Any, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a layer that was not called: all zero."""
    b, _, k = columns.shape
    o = layer.weight.shape[0]
    a = columns.new_zeros(b, 1, layer.weight.numel() // o)
    return a, columns.new_zeros(b, k, 1, o)


def _batched_gradients(f: Tensor, calls: list[_Call], columns: Tensor) -> list[Tensor]:
    """Gradients (k, b, ...) of columns (k, b, c) of ``f`` at the outputs of calls."""
    if not calls:
        return []
    edges = [call.edge for call in calls]
    backward = partial(
        torch.autograd.grad, f, edges, retain_graph=True, allow_unused=True
    )
    columns = columns.contiguous()
    used: list[bool] = []

    def pull(column: Tensor) -> list[Tensor]:
        gradients = backward(column)
        used[:] = [g is not None for g in gradients]
        return [column, *(g for g in gradients if g is not None)]

    try:
        with _quiet_batching():
            found = list(vmap(pull)(columns))
    except RuntimeError:  # an operator without a batching rule: column by column
        found = [torch.stack(parts) for parts in zip(*map(pull, columns), strict=True)]
    known = iter(found[1:])
    return [
        next(known) if is_used else columns.new_zeros(len(columns), *call.shape)
        for is_used, call in zip(used, calls, strict=True)
    ]


@contextmanager
def _quiet_batching() -> Iterator[None]:
    """Without torch's hint that some operator is looped over: nobody can help it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*batching rule.*")
        yield


def _dense_rows(
    forward: Forward, x: Any, blocks: list[BlockSpec], columns: Tensor
) -> dict[str, Block]:
    """Rows of parameters without a layer form, through ``torch.func``."""
    values = dict(forward.module.named_parameters())
    parameters = {block.name: values[block.name].detach() for block in blocks}

    def rows(x_n: Any, columns_n: Tensor) -> dict[str, Tensor]:
        one = _add_axis(x_n)
        pull = vjp(lambda p: _call_with(forward, p, one)[0], parameters)[1]
        back: dict[str, Tensor] = vmap(lambda column: pull(column)[0])(columns_n.T)
        return back

    p = sum(block.size for block in blocks)
    chunk = max(1, CHUNK_ELEMENTS // max(1, columns.shape[-1] * p))
    try:
        with _quiet_batching():
            dense = vmap(rows, chunk_size=chunk)(x, columns)
    except RuntimeError:  # an operator without a batching rule: row by row
        dense = _dense_rows_by_loop(forward, x, parameters, columns)
    return {
        name: Block(value.reshape(*columns.shape[::2], 1, -1))
        for name, value in dense.items()
    }


def _dense_rows_by_loop(
    forward: Forward, x: Any, parameters: dict[str, Tensor], columns: Tensor
) -> dict[str, Tensor]:
    """The same rows by one backward pass for each row and column."""
    leaves = {k: v.clone().requires_grad_() for k, v in parameters.items()}
    with torch.enable_grad():
        f = _call_with(forward, leaves, x)
    rows = []
    for n in range(len(f)):
        for column in columns[n].T:
            rows += [
                torch.autograd.grad(
                    f[n],
                    list(leaves.values()),
                    column,
                    retain_graph=True,
                    materialize_grads=True,
                )
            ]
    shape = len(f), columns.shape[-1]
    stacked = [torch.stack(parts) for parts in zip(*rows, strict=True)]
    return {
        name: value.unflatten(0, shape)
        for name, value in zip(leaves, stacked, strict=True)
    }


def _call_with(forward: Forward, parameters: dict[str, Tensor], x: Any) -> Tensor:
    """Outputs with these values in place of the network's own parameters.

    A parameter that several modules share is replaced in each of them; a module
    that has several names is entered once, since torch restores it once.
    """
    names = {id(p): name for name, p in forward.module.named_parameters()}
    replaced = {}
    for prefix, module in forward.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            name = names[id(parameter)]
            if name in parameters:
                replaced[f"{prefix}.{key}"] = parameters[name]
    return functional_call(  # type: ignore[no-any-return]
        forward, replaced, (x,), tie_weights=False
    )


def _add_axis(x: Any) -> Any:
    """A batch of one from a single row."""
    if isinstance(x, dict):
        return {key: _add_axis(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(_add_axis(value) for value in x)
    return x.unsqueeze(0)
