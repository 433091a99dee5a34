"""Verification: the form of each parameter's rows, from a few samples.

Rows of a layer's inputs and output gradients, or dense ones by ``torch.func.vmap``, are
compared with plain automatic differentiation of each sample alone. Both can be wrong: a
layer may be used otherwise (shared weights, functional calls, samples in another
order), and an operator may have a wrong batching rule.
"""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from sklaplace.core.budget import BUDGET, require_bytes
from sklaplace.core.linalg import agree
from sklaplace.core.random import row_hash
from sklaplace.core.trees import Batch, tree_rows
from sklaplace.curvature.derivatives import (
    DEPENDENT_SAMPLES,
    mapped_rows,
    rows_by_loop,
)
from sklaplace.curvature.jacobian import backpropagate_batch, joined
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.networks.forward import Forward, requiring_grad

# samples whose rows are compared
N_DIFFERENTIATED = 3
# weights whose rows are compared for one sample and combination of outputs at a time
MAX_TOGETHER = 2**24
# outputs are equal if they differ by less, relative to their range
_DISTINCT = 1e-3
# rows (b, k, p) of parameters by name; None where there are none
_Rows = dict[str, Tensor | None]


def verified(forward: Forward, x: Batch, f: Tensor, specs: list[BlockSpec]) -> Layout:
    """A layout whose rows agree with plain automatic differentiation.

    Parameters
    ----------
    forward : Forward
        The network, inside ``forward.frozen()``.
    x : batch
        Samples from across the data. Three of them, with different outputs where there
        are such, are differentiated: samples that are zero, equal, or the same to a
        network whose units are inactive, show no use of weights. They come alone, and
        among all others, in reverse order.
    f : Tensor of shape (b, c)
        Outputs of all samples together.
    specs : list of BlockSpec
        Forms to try first.

    Raises
    ------
    ValueError
        If the outputs of a sample depend on the batch or have no derivatives, or if
        there are no weights or complex ones.
    """
    if not specs:
        raise ValueError(
            "subset_of_weights selects no weights: the layers that it means have no "
            "parameters with entries. Give them inputs and outputs, or select others."
        )
    parameters = dict(forward.module.named_parameters())
    if complex_ := [s.name for s in specs if parameters[s.name].is_complex()]:
        raise ValueError(
            f"subset_of_weights selects the complex weights {complex_[0]!r}; weights "
            "must be real. Select the names of other layers, or use "
            "torch.view_as_complex of a real parameter in the module."
        )
    few, columns = _distinct(f, row_hash(x).cpu()), probe(f, 2)
    is_large = sum(math.prod(spec.shape) for spec in specs) > MAX_TOGETHER
    parts = [few[n : n + 1] for n in range(len(few))] if is_large else [few]
    by_column = columns.split(1, 2) if is_large else [columns]
    for some, combinations in product(parts, by_column):
        specs = _verified_on(forward, x, f, specs, some, combinations)
    return Layout(tuple(specs), rounding=forward.rounding)


def _verified_on(
    forward: Forward,
    x: Batch,
    f: Tensor,
    specs: list[BlockSpec],
    few: Tensor,
    columns: Tensor,
) -> list[BlockSpec]:
    """Specs whose rows of a few samples, and of columns (b, c, k), agree."""
    equal = partial(agree, precision=forward.rounding)
    parameters = dict(forward.module.named_parameters())
    leaves = [parameters[spec.name] for spec in specs]
    samples = tree_rows(x, few)
    try:
        with requiring_grad(leaves):
            alone, rows = rows_by_loop(forward, samples, leaves, columns[few])
    except RuntimeError as error:
        raise ValueError(_NOT_DIFFERENTIABLE.format(str(error).rstrip("."))) from error
    back = torch.arange(len(f)).flip(0)
    with torch.no_grad():
        backwards = forward(tree_rows(x, back))
    if not (equal(alone, f[few]) and equal(backwards, f[back])):
        raise ValueError(DEPENDENT_SAMPLES)
    expected = {spec.name: own for spec, own in zip(specs, rows, strict=True)}

    def wrong(found: _Rows) -> set[str]:
        """Names of parameters without rows, or with other ones."""
        pairs = ((name, found[name], expected[name]) for name in found)
        return {name for name, a, b in pairs if a is None or not equal(a, b)}

    layered = [spec for spec in specs if spec.layer is not None]
    at = len(f) - 1 - few  # where they are in reverse order
    found = _layer_rows(forward, tree_rows(x, back), layered, columns[back], at)
    without = wrong(found)
    specs = [BlockSpec(s.name, s.shape) if s.name in without else s for s in specs]
    dense = [spec for spec in specs if spec.layer is None]
    try:
        found = {**mapped_rows(forward, samples, dense, columns[few])}
    except RuntimeError:  # an operator without a batching rule
        found = dict.fromkeys(spec.name for spec in dense)
    without = wrong(found)
    return [replace(s, one_by_one=True) if s.name in without else s for s in specs]


def check_jacobian_bytes(f: Tensor) -> None:
    """Raise for so many outputs (b, c) that rows of each of them do not fit memory."""
    b, c = f.shape
    needed = 3 * b * c**2 * f.element_size()
    if needed <= BUDGET:  # what any batch may take
        return
    require_bytes(
        needed,
        f.device,
        f"the Jacobian of {b} samples with {c:,} outputs each",
        "use subset_of_weights='last_layer' and a network that returns the outputs of "
        "a torch.nn.Linear layer as they are (logits)",
    )


def _distinct(outputs: Tensor, keys: Tensor) -> Tensor:
    """Indices of a few samples: those with new outputs first, then with new inputs."""
    f = outputs.double()
    gap = _DISTINCT * float(f.max() - f.min())
    chosen = [0]
    while len(chosen) < min(N_DIFFERENTIATED, len(f)):
        nearest = (f[:, None] - f[chosen]).abs().amax(2).amin(1)
        is_new = (keys[:, None] != keys[chosen]).all(1)
        rank = torch.where(nearest.cpu() > gap, 2, is_new.long())
        rank[chosen] = -1
        chosen.append(int(rank.argmax()))
    return torch.tensor(sorted(chosen))


_NOT_DIFFERENTIABLE = (
    "The network's outputs cannot be differentiated in the selected weights: {}. Use "
    "subset_of_weights='last_layer', or a list with the names of other layers."
)


def probe(f: Tensor, k: int = 1) -> Tensor:
    """Combinations of the outputs for each sample, (b, c, k), no two alike."""
    shape = *f.shape, k
    signs = torch.arange(f.numel() * k, dtype=f.dtype, device=f.device).reshape(shape)
    return torch.cos(1 + 2 * signs)


def _layer_rows(
    forward: Forward, x: Batch, specs: list[BlockSpec], columns: Tensor, at: Tensor
) -> _Rows:
    """Rows of the samples ``at`` some indices in layer form; None where it has none."""
    if not specs:
        return {}
    try:
        layout = Layout(tuple(specs), rounding=forward.rounding)
        parts = list(backpropagate_batch(forward, x, layout, lambda _f: columns))
    except RuntimeError:  # some layer has no layer form: find out which
        if len(specs) == 1:
            return {specs[0].name: None}
        alone = [_layer_rows(forward, x, [spec], columns, at) for spec in specs]
        return {name: rows for found in alone for name, rows in found.items()}
    blocks = joined(parts)[1].blocks
    return {s.name: b.take(at).dense() for s, b in zip(specs, blocks, strict=True)}
