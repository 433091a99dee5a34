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

from sklaplace.forward import Forward
from sklaplace.layouts import BlockSpec, Layout

# elements of a temporary array that is allowed without cutting it into rows
CHUNK_ELEMENTS = 2**23


@dataclass(frozen=True)
class Block:
    """Rows of the Jacobian that belong to one parameter tensor.

    Attributes
    ----------
    g : Tensor of shape (b, k, r, o)
        Gradients of the k outputs (or combinations of them) at r positions.
    a : Tensor of shape (b, r, i) or None
        Layer inputs. None stands for ``a ≡ 1``; then r = 1.
    """

    g: Tensor
    a: Tensor | None = None

    @property
    def n_parameters(self) -> int:
        """Length p of a row."""
        return self.g.shape[-1] * (1 if self.a is None else self.a.shape[-1])

    def dense(self) -> Tensor:
        """Rows written out, (b, k, p)."""
        if self.a is None:
            return self.g.squeeze(2)
        return torch.einsum("bkro,bri->bkoi", self.g, self.a).flatten(2)

    def double(self) -> "Block":
        """The same in float64."""
        return Block(self.g.double(), None if self.a is None else self.a.double())

    def _pieces(self) -> list["Block"]:
        """Cut into groups of rows whose dense form is small enough."""
        b, k = self.g.shape[:2]
        rows = max(1, CHUNK_ELEMENTS // max(1, k * self.n_parameters))
        if rows >= b:
            return [self]
        cuts = [slice(start, start + rows) for start in range(0, b, rows)]
        return [
            Block(self.g[cut], None if self.a is None else self.a[cut]) for cut in cuts
        ]

    def squares(self) -> Tensor:
        """Sum of squared rows over b and k, (p,), float64."""
        if self.a is None:
            return (self.g.squeeze(2) ** 2).sum((0, 1)).double()
        if self.a.shape[1] == 1:
            weights = (self.g.squeeze(2) ** 2).sum(1)  # (b, o)
            return (weights.T @ self.a.squeeze(1) ** 2).flatten().double()
        return torch.stack(
            [(piece.dense() ** 2).sum((0, 1)).double() for piece in self._pieces()]
        ).sum(0)

    def gram(self, v: Tensor) -> Tensor:
        """``rows · diag(v) · rowsᵀ`` for ``v`` (p,), as (b, k, k)."""
        if self.a is None:
            g = self.g.squeeze(2)
            return (g * v) @ g.mT
        if self.a.shape[1] == 1:
            g, a = self.g.squeeze(2), self.a.squeeze(1)
            per_output = a**2 @ v.reshape(g.shape[-1], a.shape[-1]).T  # (b, o)
            return (g * per_output.unsqueeze(1)) @ g.mT
        rows = [piece.dense() for piece in self._pieces()]
        return torch.cat([(piece * v) @ piece.mT for piece in rows])

    def matmul(self, v: Tensor) -> Tensor:
        """``rows @ v`` for ``v`` (p, q), as (b, k, q)."""
        if self.a is None:
            return self.g.squeeze(2) @ v
        o, i = self.g.shape[-1], self.a.shape[-1]
        reached = torch.einsum("bri,oiq->broq", self.a, v.reshape(o, i, -1))
        return torch.einsum("bkro,broq->bkq", self.g, reached)

    def rotate(self, outputs: Tensor | None, inputs: Tensor | None) -> "Block":
        """Rows in the basis ``outputs ⊗ inputs``; None leaves a side alone."""
        g = self.g if outputs is None else self.g @ outputs
        a = self.a if inputs is None or self.a is None else self.a @ inputs
        return Block(g, a)


@dataclass(frozen=True)
class Jacobian:
    """Rows for every selected parameter: one `Block` per parameter tensor.

    Attributes
    ----------
    blocks : list of Block
        In the order of the layout.
    weights : Tensor of shape (b,) or None
        Sample weights that the rows carry as their square root already.
    """

    blocks: list[Block]
    weights: Tensor | None = None

    def dense(self) -> Tensor:
        """Rows written out, (b, k, P)."""
        return torch.cat([block.dense() for block in self.blocks], -1)

    def double(self) -> "Jacobian":
        """The same in float64."""
        return replace(self, blocks=[block.double() for block in self.blocks])

    def gram(self, v: Tensor) -> Tensor:
        """``rows · diag(v) · rowsᵀ`` for ``v`` (P,), as (b, k, k)."""
        pieces = zip(self.blocks, v.split(self._sizes()), strict=True)
        return torch.stack([block.gram(piece) for block, piece in pieces]).sum(0)

    def matmul(self, v: Tensor) -> Tensor:
        """``rows @ v`` for ``v`` (P, q), as (b, k, q)."""
        pieces = zip(self.blocks, v.split(self._sizes()), strict=True)
        return torch.stack([block.matmul(piece) for block, piece in pieces]).sum(0)

    def _sizes(self) -> list[int]:
        return [block.n_parameters for block in self.blocks]


# --------------------------------------------------------------- layer inputs
def _linear_inputs(module: nn.Module, x: Tensor) -> Tensor:
    """Inputs of a Linear layer: every axis between first and last is a position."""
    return x.reshape(len(x), -1, x.shape[-1])


def _conv_padding(module: Any) -> list[int]:
    """Padding at both ends of each axis, last axis first, as ``pad`` wants it."""
    both: list[int] = []
    for axis, kernel in reversed(list(enumerate(module.kernel_size))):
        reach = module.dilation[axis] * (kernel - 1)
        if module.padding == "same":
            both += [reach // 2, reach - reach // 2]
        elif module.padding == "valid":
            both += [0, 0]
        else:
            both += [module.padding[axis]] * 2
    return both


def _conv_inputs(module: Any, x: Tensor) -> Tensor:
    """Patches that a convolution sees, (b, positions, channels x kernel)."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = nn.functional.pad(x, _conv_padding(module), mode=mode)
    n_axes = len(module.kernel_size)
    for axis in range(n_axes):
        dilation, kernel = module.dilation[axis], module.kernel_size[axis]
        reach = dilation * (kernel - 1) + 1
        x = x.unfold(2 + axis, reach, module.stride[axis])[..., ::dilation]
    # (b, channels, *positions, *kernel) -> (b, *positions, channels, *kernel)
    x = x.movedim(1, 1 + n_axes)
    return x.reshape(len(x), -1, x.shape[1 + n_axes :].numel())


# layer kind -> its inputs as (b, r, i)
LAYER_INPUTS: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.Linear: _linear_inputs,
    nn.Conv1d: _conv_inputs,
    nn.Conv2d: _conv_inputs,
    nn.Conv3d: _conv_inputs,
}


def has_layer_form(module: nn.Module) -> bool:
    """Whether rows of this layer's parameters have the form ``Σᵣ g ⊗ a``."""
    return type(module) in LAYER_INPUTS and getattr(module, "groups", 1) == 1


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


def backpropagate(
    forward: Forward,
    x: Any,
    layout: Layout,
    cotangents: Callable[[Tensor], Tensor] | None = None,
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
        Maps the outputs (b, c) to ``S`` (b, c, k); the rows of the result are
        those of ``Sᵀ J``. Without it ``S`` is the identity and k = c.

    Returns
    -------
    outputs : Tensor of shape (b, c)
    jacobian : Jacobian
        With k rows for each row of the batch.

    Notes
    -----
    Costs one forward pass and a backward pass of k columns down to the lowest
    selected layer. Memory is ``b Σ r (i + k·o)`` over the selected layers; rows
    of other layers take ``b·k·p``.
    """
    with torch.enable_grad(), _Recorder(forward.module, layout.layers) as recorder:
        f = forward(x)
    outputs = f.detach()
    if cotangents is None:
        identity = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
        columns = identity.expand(len(f), -1, -1)
    else:
        columns = cotangents(outputs)
    layer_rows = _layer_rows(forward.module, f, recorder.calls, columns)
    free = [block for block in layout.blocks if block.layer is None]
    free_rows = _dense_rows(forward, x, free, columns) if free else {}
    return outputs, Jacobian(
        [
            free_rows[spec.name]
            if spec.layer is None
            else _block(spec, layer_rows[spec.layer])
            for spec in layout.blocks
        ]
    )


def _block(spec: BlockSpec, layer: tuple[Tensor, Tensor]) -> Block:
    a, g = layer
    return Block(g.sum(2, keepdim=True)) if spec.is_bias else Block(g, a)


def _layer_rows(
    module: nn.Module,
    f: Tensor,
    calls: dict[str, list[_Call]],
    columns: Tensor,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Inputs (b, r, i) and output gradients (b, k, r, o) of every layer.

    A layer that was called several times contributes all its positions.
    """
    every_call = [call for recorded in calls.values() for call in recorded]
    gradients = iter(_batched_gradients(f, every_call, columns.movedim(-1, 0)))
    rows = {}
    for name, recorded in calls.items():
        layer: Any = module.get_submodule(name)
        if not recorded:  # these rows took another way through the network
            rows[name] = _no_rows(layer, columns)
            continue
        inputs = LAYER_INPUTS[type(layer)]
        a = torch.cat([inputs(layer, call.x) for call in recorded], dim=1)
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
    found: list[Tensor | None]
    try:
        with _quiet_batching():
            found = list(backward(columns, is_grads_batched=True))
    except RuntimeError:  # an operator without a batching rule: column by column
        each = [backward(column) for column in columns]
        found = [
            None if parts[0] is None else torch.stack(parts)
            for parts in zip(*each, strict=True)
        ]
    return [
        columns.new_zeros(len(columns), *call.shape) if g is None else g
        for g, call in zip(found, calls, strict=True)
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
