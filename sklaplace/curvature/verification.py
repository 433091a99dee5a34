"""Verify the form of each parameter's Jacobian rows on a few samples.

Factored rows (layer inputs and output gradients) and dense rows (``torch.func.vmap``)
are compared with plain automatic differentiation of single samples. Both kinds of rows
can be wrong: a network may use a layer differently (shared weights, functional calls,
reordered samples), and an operator may have a wrong batching rule.
"""

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from sklaplace.core.budget import BUDGET, require_bytes
from sklaplace.core.linalg import agree
from sklaplace.core.trees import Batch, tree_rows
from sklaplace.curvature.derivatives import (
    DEPENDENT_SAMPLES,
    mapped_rows,
    rows_by_loop,
)
from sklaplace.curvature.jacobian import backpropagate_batch, join_columns
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.networks.forward import Forward, requiring_grad

# above this size, rows are compared for one sample and one column at a time
MAX_PARAMETERS_TOGETHER = 2**24
# rows (b, k, p) of parameters by name; None if the rows are missing
_Rows = dict[str, Tensor | None]


def verified(forward: Forward, x: Batch, f: Tensor, specs: list[BlockSpec]) -> Layout:
    """Return a layout whose Jacobian rows agree with plain automatic differentiation.

    Parameters whose factored rows are wrong get dense rows. Parameters whose dense rows
    are also wrong, or whose operators cannot be batched, get rows sample by sample.

    Parameters
    ----------
    forward : Forward
        The network, inside ``forward.frozen()``.
    x : batch
        Samples from across the data. Derivatives are computed for at most three of
        these samples. Samples with different outputs are preferred, because zeros,
        equal samples and inactive units do not show every use of the weights. The
        network processes these samples one by one, and also within the whole batch in
        reverse order.
    f : Tensor of shape (b, c)
        Outputs of the whole batch.
    specs : list of BlockSpec
        Forms to try first.

    Raises
    ------
    ValueError
        If the outputs of a sample depend on the batch or have no derivatives, if no
        weights are selected, or if weights are complex.
    """
    if not specs:
        raise ValueError(
            "subset_of_weights selects no weights: all parameters of the selected "
            "layers are empty. Select other layers, or layers with inputs and outputs."
        )
    parameters = dict(forward.module.named_parameters())
    complex_names = [s.name for s in specs if parameters[s.name].is_complex()]
    if complex_names:
        raise ValueError(
            f"subset_of_weights selects the complex weights {complex_names[0]!r}, "
            "but weights must be real. Select the names of other layers, or apply "
            "torch.view_as_complex to a real parameter in the module."
        )
    # One combination of the outputs, with the same coefficients for all samples, orders
    # the samples. The lowest, the median and the highest are compared.
    order = (f @ probe(f[:1])[0]).squeeze(1).cpu().argsort(stable=True)
    compared, columns = order[[0, len(f) // 2, -1]].unique(), probe(f, 2)
    # large rows are compared in groups, to save memory
    is_large = sum(math.prod(spec.shape) for spec in specs) > MAX_PARAMETERS_TOGETHER
    sample_groups = compared.split(1) if is_large else [compared]
    column_groups = columns.split(1, 2) if is_large else [columns]
    for indices, combinations in product(sample_groups, column_groups):
        specs = _verified_on(forward, x, f, specs, indices, combinations)
    return Layout(tuple(specs), rounding=forward.rounding)


def _verified_on(
    forward: Forward,
    x: Batch,
    f: Tensor,
    specs: list[BlockSpec],
    indices: Tensor,
    columns: Tensor,
) -> list[BlockSpec]:
    """Return specs whose Jacobian rows match rows computed one sample at a time.

    Rows are compared for the samples of the batch ``x`` with the given indices, and for
    ``columns`` (b, c, k), which combine the outputs ``f`` (b, c). Factored rows are
    compared first. Specs with missing or wrong rows then become specs of dense rows,
    whose rows are compared in turn. Specs with wrong dense rows become ``one_by_one``.
    """
    # up to the rounding errors of the network's layers
    equal = partial(agree, precision=forward.rounding)
    parameters = dict(forward.module.named_parameters())
    leaves = [parameters[spec.name] for spec in specs]
    samples = tree_rows(x, indices)
    try:
        with requiring_grad(leaves):
            f_alone, rows = rows_by_loop(forward, samples, leaves, columns[indices])
    except RuntimeError as error:
        raise ValueError(_NOT_DIFFERENTIABLE.format(str(error).rstrip("."))) from error
    # outputs and rows must not depend on the order of the samples
    reverse = torch.arange(len(f)).flip(0)
    with torch.no_grad():
        f_reversed = forward(tree_rows(x, reverse))
    if not (equal(f_alone, f[indices]) and equal(f_reversed, f[reverse])):
        raise ValueError(DEPENDENT_SAMPLES)
    expected = dict(zip((spec.name for spec in specs), rows, strict=True))

    def wrong(rows_by_name: _Rows) -> set[str]:
        """Return the names of parameters with missing or wrong rows."""
        return {
            name
            for name, rows in rows_by_name.items()
            if rows is None or not equal(rows, expected[name])
        }

    factored = [spec for spec in specs if spec.layer is not None]
    at = len(f) - 1 - indices  # places of the samples in reverse order
    x_reversed, columns_reversed = tree_rows(x, reverse), columns[reverse]
    names = wrong(_factored_rows(forward, x_reversed, factored, columns_reversed, at))
    # without a layer, a spec has dense rows
    specs = [BlockSpec(s.name, s.shape) if s.name in names else s for s in specs]
    dense = [spec for spec in specs if spec.layer is None]
    dense_rows: _Rows = dict.fromkeys(spec.name for spec in dense)
    with suppress(RuntimeError):  # an operator without a batching rule
        dense_rows |= mapped_rows(forward, samples, dense, columns[indices])
    names = wrong(dense_rows)
    return [replace(s, one_by_one=True) if s.name in names else s for s in specs]


def check_jacobian_bytes(f: Tensor) -> None:
    """Raise an error if the Jacobian rows of outputs (b, c) do not fit into memory.

    Rows within the budget that every batch may use are allowed without asking how much
    memory is free.
    """
    b, c = f.shape
    # three arrays (b, c, c): roots of the Hessian and backpropagated columns
    needed = 3 * b * c**2 * f.element_size()
    if needed <= BUDGET:
        return
    require_bytes(
        needed,
        f.device,
        f"the Jacobian of {b} samples with {c:,} outputs each",
        "use subset_of_weights='last_layer' and a network that returns the unchanged "
        "outputs of a torch.nn.Linear layer (logits)",
    )


_NOT_DIFFERENTIABLE = (
    "The network's outputs cannot be differentiated with respect to the selected "
    "weights: {}. Use subset_of_weights='last_layer', or names of other layers."
)


def probe(f: Tensor, k: int = 1) -> Tensor:
    """Return k combinations of the outputs, which differ between samples, (b, c, k)."""
    shape = *f.shape, k
    # arbitrary coefficients without a pattern, reproducible and between -1 and 1
    steps = torch.arange(f.numel() * k, dtype=f.dtype, device=f.device).reshape(shape)
    return torch.cos(1 + 2 * steps)


def _factored_rows(
    forward: Forward, x: Batch, specs: list[BlockSpec], columns: Tensor, at: Tensor
) -> _Rows:
    """Return the factored rows (b', k, p) of the b' samples at indices ``at``, by name.

    The whole batch ``x`` is differentiated, for ``columns`` (b, c, k). The rows of a
    parameter are None if its layer cannot be differentiated in factored form. To find
    such parameters, each parameter is tried alone if all together fail.
    """
    if not specs:
        return {}
    try:
        layout = Layout(tuple(specs), rounding=forward.rounding)
        parts = list(backpropagate_batch(forward, x, layout, lambda _f: columns))
    except RuntimeError:
        if len(specs) == 1:
            return {specs[0].name: None}
        rows: _Rows = {}
        for spec in specs:
            rows |= _factored_rows(forward, x, [spec], columns, at)
        return rows
    tensors = join_columns(parts)[1].tensors()
    return {s.name: t.take(at).dense() for s, t in zip(specs, tensors, strict=True)}
