"""Jacobians of the outputs in the selected parameters, kept unmultiplied.

For a parameter tensor of a Linear or convolution layer the rows of the Jacobian
are ``Σᵣ g ⊗ a``: layer inputs ``a`` (b, r, i) times gradients ``g`` (b, k, r, o)
of the outputs in what the layer puts out. One forward pass records ``a``, one
batched backward pass gives all ``g``; no gradient of any weight is computed and
the dense (b, k, P) Jacobian is not built. Parameters of other layers come from
``torch.func`` as dense rows, which have the form of a bias (``a ≡ 1``).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vjp, vmap

from sklaplace.core.budget import BUDGET
from sklaplace.core.trees import mapped
from sklaplace.curvature.blocks import (
    CHUNK_ELEMENTS,
    Block,
    HeadBlock,
    kernel,
    summed,
    variances,
    weighted_gram,
)
from sklaplace.curvature.layout import BlockSpec, Head, Layout
from sklaplace.curvature.patches import LAYER_INPUTS, Inputs, joined_inputs, unfolded
from sklaplace.likelihoods.output_hessian import Factored, OutputHessian
from sklaplace.networks.forward import Forward, requiring_grad

# gradients of a column that are alive at once: those kept, and those passed on
BACKWARD_COPIES = 2


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
    keys : Tensor of shape (b,) or None
        What tells rows apart by their content, see `draws`.
    """

    blocks: list[Any]
    weights: Tensor | None = None
    first_column: int = 0
    keys: Tensor | None = None

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
        """The same in float64; blocks share output gradients as before."""
        if self.dtype == torch.float64 or isinstance(self.blocks[0], HeadBlock):
            return replace(self, blocks=[block.double() for block in self.blocks])
        known = {id(g): g.double() for g in self.gradients()}
        blocks = [
            Block(known[id(b.g)], None if b.a is None else b.a.double())
            for b in self.blocks
        ]
        return replace(self, blocks=blocks)

    def take(self, rows: Tensor) -> "Jacobian":
        """Some rows of the batch, by their places (n,), float64.

        Output gradients of a last layer are written out; blocks that share theirs go
        on to do so.
        """
        n_rows = self.n_rows
        rows = rows.to(self.blocks[0].g.device)
        known: dict[int, Tensor] = {}
        blocks = []
        for block in self.blocks:
            shared = id(block.outputs)
            if shared not in known:  # one entry may stand for all rows
                known[shared] = block.g.expand(n_rows, -1, -1, -1)[rows].double()
            a = None if block.a is None else block.a[rows].double()
            blocks.append(Block(known[shared], a))
        keys = None if self.keys is None else self.keys[rows.to(self.keys.device)]
        return Jacobian(blocks, keys=keys)

    def combined(self, columns: Tensor) -> "Jacobian":
        """Rows ``Sᵀ J`` for ``S`` (b, k, q), as many as columns."""
        n = len(columns)
        return self._changed(
            lambda g: torch.einsum("bkq,bkro->bqro", columns, g.expand(n, -1, -1, -1))
        )

    def shortest(self) -> "Jacobian":
        """Rows written out where that takes less, as of layers with many positions."""
        blocks = [
            Block(block.dense().unsqueeze(2))
            if block.a is not None
            and block.a.shape[1] > 1
            and block.n_columns * block.n_parameters * len(block)
            < block.g.numel() + block.a.numel()
            else block
            for block in self.blocks
        ]
        return replace(self, blocks=blocks)

    def gradients(self) -> list[Tensor]:
        """Output gradients, each once where blocks share them."""
        return list({id(block.g): block.g for block in self.blocks}.values())

    def times(self, factor: Tensor) -> "Jacobian":
        """Rows times a number, or (b, 1, 1, 1); blocks share gradients as before."""
        return self._changed(lambda g: g * factor)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "Jacobian":
        """With a function of the output gradients in their place."""
        known = {id(g): change(g) for g in self.gradients()}
        blocks = [Block(known[id(block.g)], block.a) for block in self.blocks]
        return replace(self, blocks=blocks)

    @staticmethod
    def stacked(parts: "list[Jacobian]") -> "Jacobian":
        """Rows of several batches as those of one; all have keys."""
        known: dict[tuple[int, ...], Tensor] = {}
        blocks = []
        for same in zip(*(part.blocks for part in parts), strict=True):
            shared = tuple(id(block.g) for block in same)
            if shared not in known:
                known[shared] = torch.cat([block.g for block in same])
            has_inputs = same[0].a is not None
            a = joined_inputs([block.a for block in same]) if has_inputs else None
            blocks.append(Block(known[shared], a))
        keys = [part.keys for part in parts if part.keys is not None]
        return Jacobian(blocks, keys=torch.cat(keys))

    def kernel(self, other: "Jacobian", v: Tensor) -> Tensor:
        """Products with all rows of another one, (b, k, b', k').

        Each block's are multiplied by its entry of ``v`` (L,). Rows of layers with one
        position are not written out: weight and bias of a layer share products of
        output gradients, which meet those of inputs.
        """
        return kernel(self.blocks, other.blocks, v)

    def gram(self, v: Tensor) -> Tensor:
        """``rows · diag(v) · rowsᵀ`` for ``v`` (P,), as (b, k, k)."""
        return summed(self.blocks, self._split(v), Block.gram, weighted_gram)

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

    def rmatmul(self, w: Tensor) -> Tensor:
        """``Σ rowsᵀ w`` over b and k for ``w`` (b, k, q), as (P, q)."""
        return torch.cat([block.rmatmul(w) for block in self.blocks])

    def columns(self, some: slice) -> "Jacobian":
        """Some of the rows k of each row."""
        return Jacobian([Block(block.g[:, some], block.a) for block in self.blocks])

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


@dataclass(frozen=True)
class Centring:
    """``C = I - 11ᵀ/K``, (c, c): outputs less their mean, as softmax sees them.

    Attributes
    ----------
    n_blocks : int
        Groups of outputs, side by side, each of which has a mean of its own.
    """

    n_blocks: int = 1

    def __call__(self, f: Tensor) -> Tensor:
        """The matrix for outputs (b, c)."""
        c, n = f.shape[-1], f.shape[-1] // self.n_blocks
        identity = torch.eye(c, dtype=f.dtype, device=f.device)
        if self.n_blocks == 1:
            return identity - 1 / n
        groups = torch.eye(self.n_blocks, dtype=f.dtype, device=f.device)
        return identity - torch.kron(groups, groups.new_full((n, n), 1 / n))

    def centred(self, f: Tensor) -> Tensor:
        """Outputs (b, c) less their means."""
        groups = f.reshape(len(f), self.n_blocks, -1)
        return (groups - groups.mean(2, keepdim=True)).flatten(1)


centring = Centring()


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
            _selected(
                spec,
                free_rows[spec.name]
                if spec.layer is None
                else _block(spec, layer_rows[spec.layer]),
            )
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
    # rules whose S is the same for all rows; None stands for the identity
    if cotangents is None or isinstance(cotangents, Centring):
        g = head.shared(cotangents, f)
        return f, Jacobian([Block(g, None if s.is_bias else a) for s in layout.blocks])
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


def _selected(spec: BlockSpec, block: Block) -> Block:
    return block if spec.indices is None else block.select(spec.indices)


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
        with quiet_batching():
            found = list(vmap(pull)(columns))
    except RuntimeError:  # an operator without a batching rule: column by column
        found = [torch.stack(parts) for parts in zip(*map(pull, columns), strict=True)]
    known = iter(found[1:])
    return [
        next(known) if is_used else columns.new_zeros(len(columns), *call.shape)
        for is_used, call in zip(used, calls, strict=True)
    ]


@contextmanager
def quiet_batching() -> Iterator[None]:
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
        one = add_axis(x_n)
        pull = vjp(lambda p: call_with(forward, p, one)[0], parameters)[1]
        back: dict[str, Tensor] = vmap(lambda column: pull(column)[0])(columns_n.T)
        return back

    p = sum(value.numel() for value in parameters.values())
    chunk = max(1, CHUNK_ELEMENTS // max(1, columns.shape[-1] * p))
    try:
        with quiet_batching():
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
        f = call_with(forward, leaves, x)
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


def call_with(forward: Forward, parameters: dict[str, Tensor], x: Any) -> Tensor:
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


def add_axis(x: Any) -> Any:
    """A batch of one from a single row."""
    return mapped(lambda leaf: leaf.unsqueeze(0), x)


# ----------------------------------------------------------- second derivatives
def exact_hessian(
    forward: Forward, x: Any, layout: Layout, total: Callable[[Tensor], Tensor]
) -> Tensor:
    """Second derivatives of ``total(outputs)``, (), in the selected parameters.

    Parameters
    ----------
    forward : Forward
        The network, inside ``forward.frozen()``.
    x : Tensor, or dict, list or tuple of tensors
        One batch.
    layout : Layout
        The selected parameters.
    total : callable
        A number from outputs (b, c), twice differentiable.

    Returns
    -------
    Tensor of shape (P, P)
        Symmetric, in the dtype of the network.

    Notes
    -----
    P backward passes through the graph of one: for small models.
    """
    parameters = dict(forward.module.named_parameters())
    leaves = [parameters[block.name] for block in layout.blocks]
    with torch.enable_grad(), requiring_grad(leaves):
        first = torch.autograd.grad(
            total(forward(x)), leaves, create_graph=True, materialize_grads=True
        )
        hessian = _derivatives(layout.flatten(first), leaves, layout)
    return (hessian + hessian.T) / 2


def _derivatives(entries: Tensor, leaves: list[nn.Parameter], layout: Layout) -> Tensor:
    """Gradients of entries (p,) in the selected parameters, (p, p), some at a time."""
    if not entries.requires_grad:  # the outputs are linear in all of them
        return entries.new_zeros(len(entries), len(entries))
    identity = torch.eye(len(entries), dtype=entries.dtype, device=entries.device)
    size = max(1, CHUNK_ELEMENTS // max(1, sum(leaf.numel() for leaf in leaves)))

    def pull(cotangents: Tensor, *, is_batched: bool) -> Tensor:
        pieces = torch.autograd.grad(
            entries,
            leaves,
            cotangents,
            retain_graph=True,
            materialize_grads=True,
            is_grads_batched=is_batched,
        )
        return layout.flatten(pieces)

    try:
        with quiet_batching():
            parts = [pull(some, is_batched=True) for some in identity.split(size)]
    except RuntimeError:  # an operator without a batching rule: row by row
        parts = [pull(row, is_batched=False).unsqueeze(0) for row in identity]
    return torch.cat(parts)
