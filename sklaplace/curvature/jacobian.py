"""Jacobians of the outputs with respect to the selected parameters, in factored form.

For a parameter tensor of a Linear or convolution layer, the rows of the Jacobian are
``Σᵣ g ⊗ a``, with layer inputs ``a`` (b, r, i) and gradients ``g`` (b, k, r, o) of the
network's outputs with respect to the layer's outputs. One forward pass records ``a``.
One batched backward pass computes all ``g``, but no gradients of weights. The dense
(b, k, P) Jacobian is never formed. Parameters of other layers have dense rows, which
are computed by ``torch.func`` and stored like the rows of a bias (``a ≡ 1``).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from sklaplace.core.linalg import agree
from sklaplace.core.trees import Batch, tree_rows
from sklaplace.curvature.derivatives import DEPENDENT_SAMPLES, dense_rows
from sklaplace.curvature.layout import BlockSpec, Head, Layout
from sklaplace.curvature.patches import LAYER_INPUTS, joined_inputs, unfolded
from sklaplace.curvature.recorder import (
    Args,
    CallRecorder,
    Kwargs,
    MixedSamplesError,
    first_input,
    n_samples,
    only_known_layers,
)
from sklaplace.curvature.rows import (
    BaseBlock,
    Block,
    GroupedBlock,
    HeadBlock,
    LayerRows,
    aligned,
    total,
    variance,
    with_entries,
)
from sklaplace.curvature.shared import SharedBlock
from sklaplace.curvature.uses import count_uses
from sklaplace.likelihoods.output_hessian import Factored, OutputHessian
from sklaplace.networks.forward import Forward, requiring_grad


@dataclass(frozen=True)
class Jacobian:
    """Rows for all selected parameters, with one record per layer.

    Attributes
    ----------
    layers : sequence of LayerRows
        Rows of the parameters that share output gradients, in the order of the layout.
    weights : Tensor of shape (b,) or None
        Sample weights. The rows have already been multiplied by the square roots of
        these weights.
    first_column : int
        Index of the first column of this part, if the columns of a batch are split into
        parts. All parts have the same layer inputs.
    keys : Tensor of shape (b,) or None
        Hashes of the samples' inputs; see `row_hash`.
    """

    layers: Sequence[LayerRows]
    weights: Tensor | None = None
    first_column: int = 0
    keys: Tensor | None = None

    @property
    def n_samples(self) -> int:
        """Number b of samples, also if the rows of biases are stored only once."""
        return max(len(block) for block in self.tensors())

    @property
    def n_columns(self) -> int:
        """Number k of columns of ``S``, that is, of rows per sample."""
        return int(self.layers[0].first.n_columns)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the rows."""
        return self.layers[0].first.gradients.dtype

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.layers[0].first.device

    @property
    def samples_share_gradients(self) -> bool:
        """Whether there is one layer, and its ``g`` is the same for all samples.

        The rows are then ``g ⊗ a``, and sums over samples need only the inputs ``a``.
        """
        first = self.layers[0].first
        return (
            len(self.layers) == 1
            # rows of patches and rows at several positions are sums
            and isinstance(first.a, Tensor)
            and first.has_one_position
            and len(first.gradients) == 1
        )

    def features(self) -> Tensor:
        """Return the inputs (b, i) of the only layer, with a column of ones for a bias.

        `samples_share_gradients` must be true.
        """
        first, *biases = self.layers[0].blocks
        a: Tensor = first.a.squeeze(1)
        return torch.cat([a, *(a.new_ones(len(a), 1) for _ in biases)], 1)

    def tensors(self) -> list[BaseBlock]:
        """Return the rows of each parameter tensor, in the order of the layout."""
        return [block for layer in self.layers for block in layer.blocks]

    def dense(self) -> Tensor:
        """Return dense rows, (b, k, P)."""
        pieces = [block.dense() for block in self.tensors()]
        b = max(map(len, pieces))
        return torch.cat([piece.expand(b, -1, -1) for piece in pieces], -1)

    def gradients(self) -> list[Tensor]:
        """Return the output gradients (b, k, r, o) of each layer."""
        return [layer.first.g for layer in self.layers]

    def double(self) -> "Jacobian":
        """Convert the rows to float64."""
        return self._map_blocks(methodcaller("double"))

    def take(self, indices: Tensor) -> "Jacobian":
        """Return the rows of the samples with the given indices (n,), in float64.

        The result has the samples' keys, but no sample weights.
        """
        b, indices = self.n_samples, indices.to(self.device)
        layers = [
            # samples that share `g` have one entry, which is repeated before indexing
            layer.map_factors(
                lambda g: g.expand(b, -1, -1, -1)[indices].double(),
                lambda a: a[indices].double(),
            )
            for layer in self.layers
        ]
        keys = None if self.keys is None else self.keys[indices.to(self.keys.device)]
        return Jacobian(layers, keys=keys)

    def combined(self, columns: Tensor) -> "Jacobian":
        """Return the q rows ``Sᵀ J`` for ``S`` (b, k, q)."""
        return self._map_gradients(lambda g: torch.einsum("bkq,bkro->bqro", columns, g))

    def columns(self, indices: slice) -> "Jacobian":
        """Return a slice of each sample's k rows."""
        return self._map_gradients(lambda g: g[:, indices])

    def times(self, factor: Tensor) -> "Jacobian":
        """Multiply the rows by a factor, () or (b, 1, 1, 1)."""
        return self._map_gradients(lambda g: g * factor)

    def _map_gradients(self, function: Callable[[Tensor], Tensor]) -> "Jacobian":
        """Transform the output gradients of each layer."""
        layers = [layer.map_factors(function) for layer in self.layers]
        return replace(self, layers=layers)

    def _map_blocks(self, function: Callable[[Any], BaseBlock]) -> "Jacobian":
        """Transform the rows of each parameter tensor."""
        layers = [layer.map_blocks(function) for layer in self.layers]
        return replace(self, layers=layers)

    def merge_positions(self) -> "Jacobian":
        """Replace the positions of each layer by one; see `BaseBlock`."""
        return self._map_blocks(methodcaller("merge_positions"))

    def compressed(self) -> "Jacobian":
        """Store the rows of each parameter tensor in the form that is smaller."""
        return self._map_blocks(methodcaller("compressed"))

    @staticmethod
    def stacked(jacobians: "Sequence[Jacobian]", *, share: bool = False) -> "Jacobian":
        """Concatenate the samples of batches, of which all or none must have keys.

        With ``share``, the result uses the output gradients of the first batch. All
        batches must then have these gradients, the same for all samples.
        """
        layers = []
        # for each layer, its rows in all batches
        for batches in zip(*(jacobian.layers for jacobian in jacobians), strict=True):
            g = batches[0].first.gradients
            if not share:
                g = torch.cat([rows.first.g for rows in batches])
            # for each parameter tensor of the layer, its blocks in all batches
            tensors = zip(*(rows.blocks for rows in batches), strict=True)
            inputs = [joined_inputs([b.a for b in blocks]) for blocks in tensors]
            layers.append(batches[0].with_factors(g, inputs))
        keys = [batch.keys for batch in jacobians if batch.keys is not None]
        return Jacobian(layers, keys=torch.cat(keys) if keys else None)

    def kernel(self, other: "Jacobian", v: Tensor) -> Tensor:
        """Return the tangent kernel ``Σₗ vₗ Jₗ J'ₗᵀ`` of two batches, (b, k, b', k').

        ``v`` (L,) has one entry per parameter tensor, such as a prior variance. The
        kernel is then the prior covariance of the outputs. The entries are split by
        layer, since the tensors of a layer share ``g``.
        """
        mine, theirs = aligned(self.layers, other.layers)
        factors = v.split([len(layer.blocks) for layer in mine])
        layers = zip(mine, theirs, factors, strict=True)
        return total([layer.kernel(other, factor) for layer, other, factor in layers])

    def gram(self, v: Tensor) -> Tensor:
        """Return ``rows · diag(v) · rowsᵀ`` for ``v`` (P,), as (b, k, k)."""
        pairs = with_entries(self.layers, v)
        return total([layer.gram(piece) for layer, piece in pairs])

    def variance(self, v: Tensor) -> Tensor:
        """Return the diagonal of `gram`, (b, k)."""
        return variance(self.layers, v)

    def matmul(self, v: Tensor) -> Tensor:
        """Return ``rows @ v`` for ``v`` (P, q), as (b, k, q)."""
        pairs = with_entries(self.tensors(), v)
        return total([block.matmul(piece) for block, piece in pairs])

    def rmatmul(self, w: Tensor) -> Tensor:
        """Return ``Σ rowsᵀ w`` over b and k for ``w`` (b, k, q), as (P, q)."""
        return torch.cat([block.rmatmul(w) for block in self.tensors()])

    def normal_product(self, v: Tensor) -> Tensor:
        """Return ``Σ rowsᵀ rows v`` over b and k for ``v`` (P, q), as (P, q).

        For rows ``SᵀJ``, this is the product ``Σ JᵀΛJ v`` with the Gauss-Newton matrix,
        where ``Λ = S Sᵀ``. In a last layer, ``J = M ⊗ a``, and ``M`` (c, o) is the
        Jacobian of the network's outputs with respect to the layer's outputs. With more
        than q rows per sample, ``SᵀM`` is not formed. Instead, ``v`` is mapped to layer
        outputs, these are multiplied by ``MᵀΛM``, and the products are mapped back to
        weights; see `HeadBlock`.
        """
        # a head has one layer, whose blocks are the weight and the bias
        head = self.layers[0].first
        if self.n_columns <= v.shape[1] or not head.is_from_head:
            return self.rmatmul(self.matmul(v))
        pairs = list(with_entries(self.layers[0].blocks, v))
        outputs = total([block.layer_outputs(piece) for block, piece in pairs])
        products = head.hessian.products(head.matrix, outputs)  # MᵀΛM times outputs
        return torch.cat([block.weight_gradients(products) for block, _ in pairs])


def join_columns(parts: list[tuple[Tensor, Jacobian]]) -> tuple[Tensor, Jacobian]:
    """Return the outputs, and the Jacobian with the columns of all parts.

    Each part contains the outputs and the Jacobian of the same samples, for some of the
    columns of ``S``. The parts differ only in their output gradients ``g``.
    """
    if len(parts) == 1:
        return parts[0]
    outputs, jacobians = zip(*parts, strict=True)
    layers = []
    # for each layer, its rows in all parts
    for parts_of_layer in zip(*(part.layers for part in jacobians), strict=True):
        g = torch.cat([rows.first.g for rows in parts_of_layer], 1)
        first = parts_of_layer[0]
        layers.append(first.with_factors(g, [block.a for block in first.blocks]))
    return outputs[0], Jacobian(layers, jacobians[0].weights)


# ------------------------------------------------------------- backpropagation
# S as combinations of outputs, (b, c, k), or only S Sᵀ
Columns = Tensor | OutputHessian
Cotangents = Callable[[Tensor], Columns] | None


@dataclass(frozen=True)
class Centring:
    """``C = I - 11ᵀ/K``, (c, c), which subtracts the mean of the outputs.

    The mean of the logits does not affect a softmax.

    Attributes
    ----------
    n_blocks : int
        Number of consecutive groups of outputs; each group is centred separately.
    """

    n_blocks: int = 1

    def __call__(self, f: Tensor) -> Tensor:
        """Return ``C`` (c, c) for outputs (b, c)."""
        n = f.shape[-1] // self.n_blocks
        return torch.kron(torch.eye(self.n_blocks).to(f), torch.eye(n).to(f) - 1 / n)

    def centred(self, f: Tensor) -> Tensor:
        """Subtract the mean of each group from outputs (b, c)."""
        groups = f.reshape(len(f), self.n_blocks, -1)
        return (groups - groups.mean(2, keepdim=True)).flatten(1)


def backpropagate(
    forward: Forward, x: Batch, layout: Layout, cotangents: Cotangents = None
) -> tuple[Tensor, Jacobian]:
    """Compute the outputs of a batch and the Jacobian of combinations of outputs.

    Parameters
    ----------
    forward : Forward
        The network, inside ``forward.frozen()``.
    x : Tensor, or dict, list or tuple of tensors
        One batch of b samples.
    layout : Layout
        The selected parameters.
    cotangents : callable, optional
        Maps the outputs (b, c) to ``S`` (b, c, k) or an `OutputHessian`. The rows of
        the result are ``Sᵀ J``. By default ``S`` is the identity and k = c. If
        ``cotangents`` is a `Centring`, all samples share one ``S`` (c, c).

    Returns
    -------
    outputs : Tensor of shape (b, c)
    jacobian : Jacobian
        Jacobian with k rows per sample.

    Notes
    -----
    If the layout has a `Head`, one forward pass is enough. Otherwise, a backward pass
    with k columns follows, down to the lowest selected layer. Memory use is ``b Σ r (i
    + k·o)`` over the selected layers, with i inputs and o outputs at r positions, plus
    ``b·k·p`` for rows of p parameters in other layers.
    """
    return join_columns(list(backpropagate_in_parts(forward, x, layout, cotangents)))


def backpropagate_in_parts(
    forward: Forward, x: Batch, layout: Layout, cotangents: Cotangents = None
) -> Iterator[tuple[Tensor, Jacobian]]:
    """Yield results of `backpropagate` for groups of columns that fit into memory.

    The rows of a `Head` need one forward pass. Other rows, and those of a head that
    does not fit the outputs, need a backward pass. If a layer's input does not contain
    the samples of the batch in order, the samples are processed one by one. Each result
    is a pair of outputs (b, c) and a Jacobian.
    """
    if layout.head is not None:
        result = _through_head(forward, x, layout, layout.head, cotangents)
        if result is not None:
            yield result
            return
    try:
        yield from backpropagate_batch(forward, x, layout, cotangents)
    except MixedSamplesError:
        yield _one_by_one(forward, x, layout, cotangents)


def backpropagate_batch(
    forward: Forward, x: Batch, layout: Layout, cotangents: Cotangents = None
) -> Iterator[tuple[Tensor, Jacobian]]:
    """Yield outputs (b, c) and Jacobians of as many columns as fit into memory.

    All samples are in one batch. One forward pass records the layers' inputs. A
    backward pass for each group of columns computes the output gradients. Parameters
    without a layer get dense rows from separate passes. See `backpropagate` for the
    parameters.

    Raises
    ------
    MixedSamplesError
        If a layer's input does not contain the samples of the batch in order.
    ValueError
        If some samples use a layer in a way not seen when the layout was inferred, or
        if their outputs depend on the other samples.
    """
    f, recorder = recorded(forward, x, layout)
    outputs = f.detach()
    columns = _columns(outputs, cotangents)
    without_layer = [spec for spec in layout.blocks if spec.layer is None]
    n_at_once = recorder.columns_at_once(columns)
    for start in range(0, columns.shape[-1], n_at_once):
        part = columns[..., start : start + n_at_once]
        factors = _layer_factors(forward.module, f, recorder, part)
        dense = dense_rows(forward, x, without_layer, part) if without_layer else {}
        blocks = [_block(spec, factors, dense) for spec in layout.blocks]
        yield outputs, Jacobian(_layers(blocks), first_column=start)


def recorded(forward: Forward, x: Batch, layout: Layout) -> tuple[Tensor, CallRecorder]:
    """Return the outputs with their graph, and the recorded calls of the layers.

    The recorder also checks that samples do not interact and that layers are used as
    in the layout; see `backpropagate_batch` for the errors.
    """
    with torch.enable_grad(), CallRecorder(forward.module, layout) as recorder:
        f = forward(x)
        recorder.check(forward, x, f, layout.rounding)
    return f, recorder


def require_known_layers(forward: Forward, x: Batch, layout: Layout) -> None:
    """Raise ValueError if outputs depend on layers that were not called in `select`.

    If the `Head` of the layout fits the outputs, no other layer matters. Otherwise, a
    forward pass is made only for the error that an unknown layer raises.
    """
    if layout.called is None:  # the network may call all layers
        return
    # without a function of cotangents, the rows are cheap and not used here
    if layout.head and _through_head(forward, x, layout, layout.head, None):
        return
    with torch.no_grad(), only_known_layers(forward.module, layout.called):
        forward(x)


def _one_by_one(
    forward: Forward, x: Batch, layout: Layout, cotangents: Cotangents
) -> tuple[Tensor, Jacobian]:
    """Compute outputs and rows sample by sample, for layers that mix samples.

    The samples may use a layer at different numbers of positions. Their rows are padded
    to equal numbers and stacked. Raise ValueError if the outputs of single samples
    differ from those of the batch.
    """
    samples = [tree_rows(x, slice(n, n + 1)) for n in range(n_samples(x))]
    with torch.no_grad():
        outputs, outputs_of_batch = torch.cat([*map(forward, samples)]), forward(x)
    # mixed layer inputs are no error as long as each output depends on one sample
    if not agree(outputs, outputs_of_batch, layout.rounding):
        raise ValueError(DEPENDENT_SAMPLES)
    columns = _columns(outputs, cotangents)

    def sample_layers(sample: Batch, columns: Tensor) -> Sequence[LayerRows]:
        """Return the rows of each layer for one sample and its columns (1, c, k)."""
        parts = backpropagate_batch(forward, sample, layout, lambda _f: columns)
        return join_columns(list(parts))[1].layers  # of outputs and Jacobian

    layers_by_sample = aligned(*map(sample_layers, samples, columns.split(1)))
    return outputs, Jacobian.stacked(_with_equal_positions(layers_by_sample))


def _with_equal_positions(samples: Sequence[Sequence[LayerRows]]) -> list[Jacobian]:
    """Zero-pad the layers of several samples to the same number of positions.

    Each sample is given by the rows of its layers. Return one Jacobian per sample.
    """
    layers = []  # for each layer, its rows for all samples
    for samples_of_layer in zip(*samples, strict=True):
        n = max(rows.first.g.shape[2] for rows in samples_of_layer)
        pad = methodcaller("padded", n)
        layers.append([rows.map_blocks(pad) for rows in samples_of_layer])
    return [Jacobian(sample) for sample in zip(*layers, strict=True)]


def _columns(f: Tensor, cotangents: Cotangents) -> Tensor:
    """Return ``S`` for outputs ``f`` (b, c) as a tensor, (b, c, k).

    See `backpropagate` for ``cotangents``. If all samples share ``S``, it is repeated.
    """
    if cotangents is None:
        return torch.eye(f.shape[-1]).to(f).expand(len(f), -1, -1)
    columns = cotangents(f)
    if isinstance(columns, OutputHessian):
        return columns.factor()
    return columns.expand(len(f), -1, -1)


def _layer_factors(
    module: nn.Module, f: Tensor, recorder: CallRecorder, columns: Tensor
) -> dict[str, Block]:
    """Return the inputs (b, r, i) and output gradients (b, k, r, o) of every layer.

    The result has one `Block` per layer name. If a layer is called several times, the
    positions of its calls are concatenated. If a layer is not called, or only with
    empty inputs, its rows are zero.
    """
    factors: dict[str, Block] = {}
    for name, gradients in recorder.gradients(f, columns).items():
        layer: Any = module.get_submodule(name)
        b, _, k = columns.shape
        blocks = [
            _call_factors(layer, call.x.to(f.dtype), gradient, b)
            for call, gradient in zip(recorder.calls[name], gradients, strict=True)
            if call.x.numel()
        ]
        if not blocks:
            o, i = layer.weight.flatten(1).shape  # one position with zeros
            i *= getattr(layer, "groups", 1)  # the weight has the inputs of one group
            g, a = columns.new_zeros(b, k, 1, o), columns.new_zeros(b, 1, i)
            factors[name] = Block(g, a)
        elif len(blocks) == 1:
            (block,) = blocks
            # at one position, later products would each copy the gradients; at several,
            # most use another order of the axes, and copy them anyway
            if block.g.shape[2] == 1:
                block = Block(block.g.contiguous(), block.a)
            factors[name] = block
        else:
            a = torch.cat([block.inputs for block in blocks], 1)
            factors[name] = Block(torch.cat([block.g for block in blocks], 2), a)
    return factors


def _call_factors(layer: Any, x: Tensor, g: Tensor, b: int) -> Block:
    """Return inputs (b, r, i) and output gradients (b, k, r, o) of a call on ``x``.

    ``g`` (k, *output shape) are the gradients with respect to the call's output. ``b``
    is the number of samples in the batch. In a batch of one sample, all entries of
    ``x`` belong to this sample, even if the network has reshaped them to several rows.
    """
    if x.ndim < layer.weight.ndim:  # no sample axis
        x, g = x.unsqueeze(0), g.unsqueeze(1)
    a, g = LAYER_INPUTS[type(layer)](layer, x), _by_position(layer, g)
    if b == 1 and len(x) > 1:
        # join the first axis, of length n, and the positions: (1, n·r, i)
        a, g = unfolded(a).flatten(0, 1).unsqueeze(0), g.transpose(0, 1).flatten(1, 2)
        g = g.unsqueeze(0)  # (1, k, n·r, o)
    return Block(g, a)


def _by_position(layer: nn.Module, g: Tensor) -> Tensor:
    """Reshape output gradients (k, b, ...) to (b, k, r, o)."""
    g = g.movedim(0, 1)
    if not isinstance(layer, nn.Linear):
        g = g.movedim(2, -1)  # channels are last for Linear, first for convolutions
    return g.reshape(*g.shape[:2], -1, g.shape[-1])


def _block(
    spec: BlockSpec, factors: dict[str, Block], dense: dict[str, Tensor]
) -> Block:
    """Return the rows of the selected entries of one parameter tensor.

    ``factors`` contains the rows of each layer's weight, by the name of the layer.
    ``dense`` contains the dense rows (b, k, p) of parameters without a layer, by the
    name of the parameter. The rows of a bias are the gradients of the layer's outputs,
    summed over positions.
    """
    if spec.layer is None:
        block = Block(dense[spec.name].unsqueeze(2))
    elif spec.is_bias:
        g = factors[spec.layer].g
        # at one position, weight and bias share the same object `g`; see `_layers`
        block = Block(g if g.shape[2] == 1 else g.sum(2, keepdim=True))
    else:
        block = factors[spec.layer]
        if spec.n_groups > 1:
            block = GroupedBlock(block.g, block.a, spec.n_groups)
    return block if spec.indices is None else block.select(spec.indices)


def _layers(blocks: list[Block]) -> list[LayerRows]:
    """Combine each weight with a bias that follows it and has the same gradients.

    These are the weight and the bias of a layer that is used at one position. Other
    parameter tensors have `LayerRows` of their own.
    """
    layers: list[LayerRows] = []
    for block in blocks:
        if layers and layers[-1].accepts(block):
            layers[-1] = LayerRows((*layers[-1].blocks, block))
        else:
            layers.append(LayerRows((block,)))
    return layers


def head_jacobian(
    layout: Layout, head: Head, inputs: Tensor, f: Tensor, centring: Centring | None
) -> Jacobian:
    """Return the rows for the outputs ``f`` (b, c) of a `Head` with inputs (b, i).

    ``centring`` is the function that returns ``S``. ``M`` (c, o) is the `Head.matrix`.
    The gradients of the layer's outputs, ``SᵀM``, are dense or, for many outputs,
    `SharedColumns`, which are not formed.
    """
    # S is the same for all samples; None means the identity
    gradients = head.shared_gradients(centring, f)
    block_type: Any = Block if isinstance(gradients, Tensor) else SharedBlock
    blocks = (block_type(gradients, a) for a in head_inputs(layout, inputs))
    return Jacobian([LayerRows(tuple(blocks))])


def head_inputs(layout: Layout, inputs: Tensor) -> list[Tensor | None]:
    """Return the inputs (b, 1, i) of a `Head`'s weight, and None for its bias."""
    return [None if spec.is_bias else inputs.unsqueeze(1) for spec in layout.blocks]


def _through_head(
    forward: Forward, x: Batch, layout: Layout, head: Head, cotangents: Cotangents
) -> tuple[Tensor, Jacobian] | None:
    """Return outputs and rows of one forward pass, or None if the `Head` does not fit.

    A head fits if its layer is called once, with one input row per sample, if the
    layer's weights are not used elsewhere, and if the affine map of the head reproduces
    the outputs. See `backpropagate` for the parameters. The rows are gradients ``SᵀM``
    times the layer's inputs, for the matrix ``M`` of the head. If all samples share
    ``S``, they also share the gradients; otherwise, `HeadBlock` stores ``S Sᵀ``.
    """
    layer = forward.module.get_submodule(str(layout.blocks[0].layer))
    tensors: list[Tensor] = []  # input and output of each call
    # torch counts the in-place changes of each tensor; counts at the time of the call
    versions: list[int] = []

    def record(_: nn.Module, args: Args, kwargs: Kwargs, output: Tensor) -> None:
        tensors.extend([first_input(args, kwargs), output])
        # of the input and output just added
        versions.extend(tensor._version for tensor in tensors[-2:])

    # weights that require gradients show in the graph where they are used
    weights = list(layer.parameters(recurse=False)) if layout.counts_uses else []
    hook = layer.register_forward_hook(record, with_kwargs=True)
    with torch.enable_grad(), requiring_grad(weights), hook:
        f = forward(x)
    is_changed = [tensor._version for tensor in tensors] != versions
    if len(tensors) != 2 or is_changed:  # not one call, or overwritten tensors
        return None
    # a weight is used below its layer, or again above it
    if tensors[0].requires_grad or any(n > 1 for n in count_uses([f]).values()):
        return None
    f = f.detach()
    inputs, hidden = (tensor.detach().to(f.dtype) for tensor in tensors)
    if hidden.ndim != 2 or len(hidden) != n_samples(x) or not head.fits(hidden, f):
        return None
    if cotangents is None or isinstance(cotangents, Centring):
        return f, head_jacobian(layout, head, inputs, f, cotangents)
    columns = cotangents(f)  # S, or the Hessian S Sᵀ
    hessian = Factored(columns) if isinstance(columns, Tensor) else columns
    matrix: Any = None if head.is_identity else head.matrix.to(f)
    blocks = (HeadBlock(hessian, matrix, a) for a in head_inputs(layout, inputs))
    return f, Jacobian([LayerRows(tuple(blocks))])
