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
from typing import Any

import torch
from torch import Tensor, nn

from sklaplace.core.linalg import agree
from sklaplace.core.trees import Batch, tree_rows
from sklaplace.curvature.derivatives import DEPENDENT_SAMPLES, dense_rows
from sklaplace.curvature.graph import count_uses
from sklaplace.curvature.layout import BlockSpec, Head, Layout
from sklaplace.curvature.patches import LAYER_INPUTS, Inputs, joined_inputs, unfolded
from sklaplace.curvature.recorder import (
    Args,
    Kwargs,
    MixedSamplesError,
    Recorder,
    first_input,
    n_samples,
    only_known_layers,
)
from sklaplace.curvature.rows import (
    Block,
    GroupedBlock,
    HeadBlock,
    grams,
    kernel,
    total,
    variances,
)
from sklaplace.curvature.shared import SharedBlock
from sklaplace.likelihoods.output_hessian import Factored, OutputHessian
from sklaplace.networks.forward import Forward, requiring_grad


@dataclass(frozen=True)
class Jacobian:
    """Rows for all selected parameters, with one `Block` per parameter tensor.

    Attributes
    ----------
    blocks : list of Block or of HeadBlock
        Blocks in the order of the layout.
    weights : Tensor of shape (b,) or None
        Sample weights. The rows have already been multiplied by the square roots of
        these weights.
    first_column : int
        Index of the first column of this part, if the columns of a batch are split into
        parts. All parts have the same layer inputs.
    keys : Tensor of shape (b,) or None
        Hashes of the samples' inputs; see `row_hash`.
    """

    blocks: list[Any]
    weights: Tensor | None = None
    first_column: int = 0
    keys: Tensor | None = None

    @property
    def n_rows(self) -> int:
        """Number b of samples, also if bias blocks have one entry for all samples."""
        return max(len(block) for block in self.blocks)

    @property
    def n_columns(self) -> int:
        """Number k of rows per sample."""
        return int(self.blocks[0].n_columns)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the rows."""
        first = self.blocks[0]
        return (first.columns if isinstance(first, SharedBlock) else first.g).dtype

    @property
    def is_shared(self) -> bool:
        """Whether all samples and blocks share the same output gradients."""
        first = self.blocks[0]
        if isinstance(first, SharedBlock):
            return True
        # rows of patches and rows at several positions are sums
        return (
            isinstance(first.a, Tensor)
            and first.has_one_position
            and all(
                block.g is first.g and block.g.shape[0] == 1 for block in self.blocks
            )
        )

    def features(self) -> Tensor:
        """Return layer inputs (b, i), with ones for a bias; requires `is_shared`."""
        a: Tensor = self.blocks[0].a.squeeze(1)
        ones = [a.new_ones(len(a), 1) for _ in self.blocks[1:]]
        return torch.cat([a, *ones], 1)

    def dense(self) -> Tensor:
        """Return dense rows, (b, k, P)."""
        pieces = [block.dense() for block in self.blocks]
        b = max(len(piece) for piece in pieces)
        return torch.cat([piece.expand(b, -1, -1) for piece in pieces], -1)

    def gradients(self) -> list[Tensor]:
        """Return output gradients (b, k, r, o), without duplicates if shared."""
        return list({id(block.outputs): block.g for block in self.blocks}.values())

    def double(self) -> "Jacobian":
        """Convert the rows to float64."""
        if isinstance(self.blocks[0], HeadBlock | SharedBlock):
            return replace(self, blocks=[block.double() for block in self.blocks])
        return self._map(Tensor.double, lambda a: a.double())

    def take(self, indices: Tensor) -> "Jacobian":
        """Return the rows of the samples with the given indices (n,), in float64."""
        n_rows, indices = self.n_rows, indices.to(self.blocks[0].g.device)
        taken = self._map(
            # one entry may stand for all samples
            lambda g: g.expand(n_rows, -1, -1, -1)[indices].double(),
            lambda a: a[indices].double(),
        )
        keys = None if self.keys is None else self.keys[indices.to(self.keys.device)]
        return Jacobian(taken.blocks, keys=keys)

    def combined(self, columns: Tensor) -> "Jacobian":
        """Return the q rows ``Sᵀ J`` for ``S`` (b, k, q)."""
        return self._map(lambda g: torch.einsum("bkq,bkro->bqro", columns, g))

    def columns(self, some: slice) -> "Jacobian":
        """Return a slice of each sample's k rows."""
        return self._map(lambda g: g[:, some])

    def times(self, factor: Tensor) -> "Jacobian":
        """Multiply the rows by a factor, () or (b, 1, 1, 1)."""
        return self._map(lambda g: g * factor)

    def shortest(self) -> "Jacobian":
        """Convert blocks to dense rows if dense rows need less memory."""
        return replace(self, blocks=[block.shortest() for block in self.blocks])

    def _map(
        self,
        of_gradients: Callable[[Tensor], Tensor],
        of_inputs: Callable[[Inputs], Inputs] = lambda a: a,
    ) -> "Jacobian":
        """Transform gradients and layer inputs; shared gradients stay shared."""
        known: dict[int, Tensor] = {}
        blocks = []
        for block in self.blocks:
            shared = id(block.outputs)
            if shared not in known:
                known[shared] = of_gradients(block.g)
            a = None if block.a is None else of_inputs(block.a)
            blocks.append(block.like(known[shared], a))
        return replace(self, blocks=blocks)

    @staticmethod
    def stacked(parts: "list[Jacobian]", *, share: bool = False) -> "Jacobian":
        """Concatenate the samples of batches, of which all or none must have keys.

        With ``share``, all batches with `is_shared` use the output gradients of the
        first batch.
        """
        blocks = []
        for g, same in _concatenated(parts, None if share else 0):
            a = None if same[0].a is None else joined_inputs([b.a for b in same])
            blocks.append(same[0].like(g, a))
        keys = [part.keys for part in parts if part.keys is not None]
        return Jacobian(blocks, keys=torch.cat(keys) if keys else None)

    def kernel(self, other: "Jacobian", v: Tensor) -> Tensor:
        """Return ``Σₗ vₗ Jₗ J'ₗᵀ`` over blocks for ``v`` (L,), as (b, k, b', k')."""
        return kernel(self.blocks, other.blocks, v)

    def gram(self, v: Tensor) -> Tensor:
        """Return ``rows · diag(v) · rowsᵀ`` for ``v`` (P,), as (b, k, k)."""
        return grams(self.blocks, self._split(v))

    def variance(self, v: Tensor) -> Tensor:
        """Return the diagonal of `gram`, (b, k)."""
        return variances(self.blocks, self._split(v))

    def matmul(self, v: Tensor) -> Tensor:
        """Return ``rows @ v`` for ``v`` (P, q), as (b, k, q)."""
        pairs = zip(self.blocks, self._split(v), strict=True)
        return total([block.matmul(piece) for block, piece in pairs])

    def rmatmul(self, w: Tensor) -> Tensor:
        """Return ``Σ rowsᵀ w`` over b and k for ``w`` (b, k, q), as (P, q)."""
        return torch.cat([block.rmatmul(w) for block in self.blocks])

    def normal_product(self, v: Tensor) -> Tensor:
        """Return ``Σ rowsᵀ rows v`` over b and k for ``v`` (P, q), as (P, q).

        The rows of a last layer with more than ``q`` rows per sample are not formed.
        """
        if self.n_columns <= v.shape[1] or not isinstance(self.blocks[0], HeadBlock):
            return self.rmatmul(self.matmul(v))
        pairs = zip(self.blocks, self._split(v), strict=True)
        outputs = total([block.layer_outputs(piece) for block, piece in pairs])
        head = self.blocks[0]
        curved = head.hessian.products(head.matrix, outputs)
        return torch.cat([block.in_weights(curved) for block in self.blocks])

    def _split(self, v: Tensor) -> tuple[Tensor, ...]:
        return v.split([b.n_parameters for b in self.blocks])


def _concatenated(
    parts: Sequence[Jacobian], axis: int | None
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the gradients of each tensor, joined along an axis, and its blocks.

    If ``axis`` is None, yield the gradients of the first part.
    """
    known: dict[tuple[int, ...], Any] = {}
    for same in zip(*(part.blocks for part in parts), strict=True):
        shared = tuple(id(block.outputs) for block in same)
        if shared not in known:
            known[shared] = same[0].outputs
            if axis is not None:
                known[shared] = torch.cat([block.g for block in same], axis)
        yield known[shared], same


def joined(parts: list[tuple[Tensor, Jacobian]]) -> tuple[Tensor, Jacobian]:
    """Return the outputs, and the Jacobian with the columns of all parts."""
    if len(parts) == 1:
        return parts[0]
    outputs, jacobians = zip(*parts, strict=True)
    blocks = [same[0].like(g, same[0].a) for g, same in _concatenated(jacobians, 1)]
    return outputs[0], Jacobian(blocks, jacobians[0].weights)


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


centring = Centring()


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
    + k·o)`` over the selected layers, plus ``b·k·p`` for rows of other layers.
    """
    return joined(list(backpropagate_in_parts(forward, x, layout, cotangents)))


def backpropagate_in_parts(
    forward: Forward, x: Batch, layout: Layout, cotangents: Cotangents = None
) -> Iterator[tuple[Tensor, Jacobian]]:
    """Yield results of `backpropagate` for groups of columns that fit into memory."""
    if layout.head is not None:
        known = _through_head(forward, x, layout, layout.head, cotangents)
        if known is not None:
            yield known
            return
    try:
        yield from backpropagate_batch(forward, x, layout, cotangents)
    except MixedSamplesError:
        yield _one_by_one(forward, x, layout, cotangents)


def backpropagate_batch(
    forward: Forward, x: Batch, layout: Layout, cotangents: Cotangents = None
) -> Iterator[tuple[Tensor, Jacobian]]:
    """Yield the parts of `backpropagate_in_parts`, with all samples in one batch.

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
    others = [spec for spec in layout.blocks if spec.layer is None]
    per_part = recorder.columns_at_once(columns)
    for start in range(0, columns.shape[-1], per_part):
        some = columns[..., start : start + per_part]
        factors = _layer_factors(forward.module, f, recorder, some)
        dense = dense_rows(forward, x, others, some) if others else {}
        blocks = [_block(spec, factors, dense) for spec in layout.blocks]
        yield outputs, Jacobian(blocks, first_column=start)


def recorded(forward: Forward, x: Batch, layout: Layout) -> tuple[Tensor, Recorder]:
    """Return the outputs with their graph, and the recorded calls of the layers.

    See `backpropagate_batch` for the errors.
    """
    with torch.enable_grad(), Recorder(forward.module, layout) as recorder:
        f = forward(x)
        recorder.check(forward, x, f, layout.rounding)
    return f, recorder


def require_known_layers(forward: Forward, x: Batch, layout: Layout) -> None:
    """Raise ValueError if outputs depend on layers that were not called in `select`."""
    if layout.called is None:
        return
    if layout.head and _through_head(forward, x, layout, layout.head, None):
        return
    with torch.no_grad(), only_known_layers(forward.module, layout.called):
        forward(x)


def _one_by_one(
    forward: Forward, x: Batch, layout: Layout, cotangents: Cotangents
) -> tuple[Tensor, Jacobian]:
    """Compute outputs and rows sample by sample, for layers that mix samples."""
    samples = [tree_rows(x, slice(n, n + 1)) for n in range(n_samples(x))]
    with torch.no_grad():
        outputs, together = torch.cat([*map(forward, samples)]), forward(x)
    if not agree(outputs, together, layout.rounding):
        raise ValueError(DEPENDENT_SAMPLES)
    columns = _columns(outputs, cotangents)

    def rows(sample: Batch, own: Tensor) -> Jacobian:
        parts = backpropagate_batch(forward, sample, layout, lambda _f: own)
        return joined(list(parts))[1]

    parts = [*map(rows, samples, columns.split(1))]
    return outputs, Jacobian.stacked(_with_equal_positions(parts))


def _with_equal_positions(parts: list[Jacobian]) -> list[Jacobian]:
    """Zero-pad the rows of several samples to the same number of positions."""
    blocks = []
    for same in zip(*(part.blocks for part in parts), strict=True):
        n_positions = max(block.g.shape[2] for block in same)
        blocks.append([block.padded(n_positions) for block in same])
    return [Jacobian(list(of_part)) for of_part in zip(*blocks, strict=True)]


def _columns(f: Tensor, cotangents: Cotangents) -> Tensor:
    """Return ``S`` as a tensor, (b, c, k)."""
    if cotangents is None:
        return torch.eye(f.shape[-1]).to(f).expand(len(f), -1, -1)
    columns = cotangents(f)
    if isinstance(columns, OutputHessian):
        return columns.factor()
    return columns.expand(len(f), -1, -1)


def _layer_factors(
    module: nn.Module, f: Tensor, recorder: Recorder, columns: Tensor
) -> dict[str, tuple[Inputs, Tensor]]:
    """Return inputs (b, r, i) and output gradients (b, k, r, o) of every layer.

    If a layer is called several times, its positions are concatenated. If a layer is
    not called, its rows are zero.
    """
    factors: dict[str, tuple[Inputs, Tensor]] = {}
    for name, gradients in recorder.gradients(f, columns).items():
        layer: Any = module.get_submodule(name)
        b, _, k = columns.shape
        pairs = [
            _of_samples(layer, call.x.to(f.dtype), gradient, b)
            for call, gradient in zip(recorder.calls[name], gradients, strict=True)
            if call.x.numel()
        ]
        if not pairs:
            o, i = layer.weight.flatten(1).shape
            i *= getattr(layer, "groups", 1)
            factors[name] = columns.new_zeros(b, 1, i), columns.new_zeros(b, k, 1, o)
            continue
        inputs, outputs = zip(*pairs, strict=True)
        if len(pairs) == 1:
            factors[name] = inputs[0], outputs[0].contiguous()
            continue
        a = torch.cat([*map(unfolded, inputs)], 1)
        factors[name] = a, torch.cat(outputs, dim=2)
    return factors


def _of_samples(layer: Any, x: Tensor, g: Tensor, b: int) -> tuple[Inputs, Tensor]:
    """Return inputs (b, r, i) and output gradients (b, k, r, o) of a call on ``x``.

    In a batch of one sample, all entries of ``x`` belong to this sample.
    """
    if x.ndim < layer.weight.ndim:  # no sample axis
        x, g = x.unsqueeze(0), g.unsqueeze(1)
    a, g = LAYER_INPUTS[type(layer)](layer, x), _by_position(layer, g)
    if b == 1 and len(x) > 1:
        a, g = unfolded(a).flatten(0, 1).unsqueeze(0), g.transpose(0, 1).flatten(1, 2)
        g = g.unsqueeze(0)
    return a, g


def _by_position(layer: nn.Module, g: Tensor) -> Tensor:
    """Reshape output gradients (k, b, ...) to (b, k, r, o)."""
    g = g.movedim(0, 1)
    if not isinstance(layer, nn.Linear):
        g = g.movedim(2, -1)  # channels are last for Linear, first for convolutions
    return g.reshape(*g.shape[:2], -1, g.shape[-1])


def _block(
    spec: BlockSpec, factors: dict[str, tuple[Inputs, Tensor]], dense: dict[str, Tensor]
) -> Block:
    """Return the rows of the selected entries of one parameter tensor."""
    if spec.layer is None:
        block = Block(dense[spec.name].unsqueeze(2))
    elif spec.is_bias:
        g = factors[spec.layer][1]
        block = Block(g if g.shape[2] == 1 else g.sum(2, keepdim=True))
    else:
        a, g = factors[spec.layer]
        grouped = spec.n_groups > 1
        block = GroupedBlock(g, a, spec.n_groups) if grouped else Block(g, a)
    return block if spec.indices is None else block.select(spec.indices)


def of_head(
    layout: Layout, head: Head, inputs: Tensor, f: Tensor, centring: Centring | None
) -> Jacobian:
    """Return the rows for the outputs ``f`` (b, c) of a `Head` with inputs (b, i)."""
    factors = [None if s.is_bias else inputs.unsqueeze(1) for s in layout.blocks]
    # S is the same for all samples; None means the identity
    g = head.shared(centring, f)
    kind: Any = Block if isinstance(g, Tensor) else SharedBlock
    return Jacobian([kind(g, a) for a in factors])


def _through_head(
    forward: Forward, x: Batch, layout: Layout, head: Head, cotangents: Cotangents
) -> tuple[Tensor, Jacobian] | None:
    """Return outputs and rows of one pass, or None if the `Head` does not fit.

    The version counters of tensors reveal in-place changes by the network.
    """
    layer = forward.module.get_submodule(str(layout.blocks[0].layer))
    calls: list[list[tuple[Tensor, int]]] = []

    def record(_: nn.Module, args: Args, kwargs: Kwargs, output: Tensor) -> None:
        calls.append([(t, t._version) for t in (first_input(args, kwargs), output)])

    leaves = list(layer.parameters(recurse=False)) if layout.counts_uses else []
    hook = layer.register_forward_hook(record, with_kwargs=True)
    with torch.enable_grad(), requiring_grad(leaves), hook:
        f = forward(x)
    if len(calls) != 1 or any(tensor._version != v for tensor, v in calls[0]):
        return None
    # a weight is used below its layer, or again above it
    if calls[0][0][0].requires_grad or any(n > 1 for n in count_uses([f]).values()):
        return None
    f = f.detach()
    inputs, hidden = (tensor.detach().to(f.dtype) for tensor, _ in calls[0])
    if hidden.ndim != 2 or len(hidden) != n_samples(x) or not head.fits(hidden, f):
        return None
    if cotangents is None or isinstance(cotangents, Centring):
        return f, of_head(layout, head, inputs, f, cotangents)
    factors = [None if s.is_bias else inputs.unsqueeze(1) for s in layout.blocks]
    columns = cotangents(f)
    hessian = Factored(columns) if isinstance(columns, Tensor) else columns
    matrix: Any = None if head.is_identity else head.matrix.to(f)
    return f, Jacobian([HeadBlock(hessian, matrix, a) for a in factors])
