"""Subsets: which weights are treated as random, as a `Layout`.

The layout is found by a forward pass over a few samples, and each layer form is
verified there against plain automatic differentiation. A layer that is used otherwise
(shared weights, functional calls, reparametrisations) falls back to dense rows.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sklaplace.core.checks import Check, check_count, listed
from sklaplace.curvature.derivatives import DEPENDENT_SAMPLES, rows_by_loop
from sklaplace.curvature.jacobian import Jacobian, backpropagate
from sklaplace.curvature.layout import BlockSpec, Head, Layout
from sklaplace.curvature.patches import has_layer_form
from sklaplace.networks.forward import Forward, requiring_grad

# names of parameters in a message, at most
MAX_LISTED = 12
# default size of a subnetwork, and the criterion that selects its weights
N_WEIGHTS, CRITERION = 100, "magnitude"


def all_weights(forward: Forward, x: Any) -> Layout:
    """Every parameter of the network."""
    called, f = _called_layers(forward, x)
    return _verified(forward, x, f, _specs(forward.module, called))


def last_layer(forward: Forward, x: Any) -> Layout:
    """Weight and bias of the Linear layer that ends the network.

    Raises
    ------
    ValueError
        If the last layer with parameters is not a Linear layer.
    """
    called, f = _called_layers(forward, x)
    name = _last_called(forward, x, called)
    head = forward.module.get_submodule(name)
    if not isinstance(head, nn.Linear):
        raise ValueError(
            "subset_of_weights='last_layer' needs a network whose last layer with "
            f"parameters is a Linear layer; here it is {type(head).__name__} "
            f"({name!r}). Use subset_of_weights='all', a list with the name of the "
            "layer you mean, or end the network with torch.nn.Linear."
        )
    # by identity: a weight that is tied to an earlier layer has that layer's name
    own = {id(parameter) for parameter in head.parameters()}
    names = [n for n, p in forward.module.named_parameters() if id(p) in own]
    specs = [s for s in _specs(forward.module, called) if s.name in names]
    return _with_head(forward, x, _verified(forward, x, f, specs))


def trainable(forward: Forward, x: Any) -> Layout:
    """The parameters with ``requires_grad``, such as adapters of a frozen network.

    Raises
    ------
    ValueError
        If there is none.
    """
    if not forward.trainable:
        raise ValueError(
            "subset_of_weights='trainable' needs parameters with requires_grad; all "
            "are frozen. Use 'last_layer', 'all', or names of parameters."
        )
    return named(forward, x, sorted(forward.trainable))


def named(forward: Forward, x: Any, names: Sequence[str]) -> Layout:
    """Parameters by their names, or by those of modules that contain them.

    Raises
    ------
    ValueError
        If a name is that of no parameter and no module.
    """
    called, f = _called_layers(forward, x)
    specs = _specs(forward.module, called)
    missing = [n for n in names if not any(_contains(n, s.name) for s in specs)]
    if missing:
        known = listed(spec.name for spec in specs[:MAX_LISTED])
        more = " …" if len(specs) > MAX_LISTED else ""
        raise ValueError(
            f"subset_of_weights={missing!r} is not known. Choose one of "
            f"{listed(SUBSETS)}, or a list of names of modules or of the parameters "
            f"{known}{more}."
        )
    chosen = [s for s in specs if any(_contains(name, s.name) for name in names)]
    return _with_head(forward, x, _verified(forward, x, f, chosen))


def subnetwork(
    forward: Forward,
    x: Any,
    n_weights: int | None = None,
    by: str = CRITERION,
    indices: Any = None,
) -> Layout:
    """Single weights, by their indices in the vector of all weights.

    ``n_weights`` is 100 by default, or all if there are fewer. The criterion ``by``
    is applied once the network has been trained, see `curvature.subnetwork`: until
    then ``indices`` are the first ``n_weights``.

    Raises
    ------
    ValueError
        If there are fewer weights.

    References
    ----------
    Daxberger, Nalisnick, Allingham, Antorán, Hernández-Lobato (2021), "Bayesian deep
    learning via subnetwork inference", ICML.
    """
    whole = all_weights(forward, x)
    p = whole.n_parameters
    n = min(N_WEIGHTS, p) if n_weights is None else n_weights
    chosen = torch.as_tensor(range(n) if indices is None else indices).long()
    last = int(chosen[-1])
    if last >= p:
        given = f"n_weights={n:,}" if indices is None else f"index {last:,}"
        raise ValueError(
            f"subset_params has {given}, but the network has {p:,} weights, "
            "numbered from 0. Pass a smaller one, or use subset_of_weights='all'."
        )
    blocks, start = [], 0
    for block in whole.blocks:
        inside = chosen[(chosen >= start) & (chosen < start + block.size)] - start
        start += block.size
        if len(inside):
            blocks.append(replace(block, indices=inside))
    return Layout(tuple(blocks))


def _with_head(forward: Forward, x: Any, layout: Layout) -> Layout:
    """The layout with its `Head`, if it selects the weight of a single Linear layer."""
    layers = {spec.layer for spec in layout.blocks}
    name = layers.pop()
    if layers or name is None or layout.blocks[0].is_bias:
        return layout
    layer = forward.module.get_submodule(name)
    if not isinstance(layer, nn.Linear):
        return layout
    return replace(layout, head=_affine_head(forward, x, layout, layer))


def _affine_head(
    forward: Forward, x: Any, layout: Layout, layer: nn.Module
) -> Head | None:
    """The affine map from a layer to the outputs; None if it differs between samples.

    Later samples are compared with it in each forward pass.
    """
    hidden: list[Tensor] = []

    def record(_layer: nn.Module, _args: Any, output: Tensor) -> None:
        hidden.append(output.detach().clone())

    with layer.register_forward_hook(record):
        f, jacobian = backpropagate(forward, x, layout, _probe)
    if len(hidden) != 1 or hidden[0].ndim != 2:
        return None
    # where the outputs are those of the layer, one column is enough to verify it
    probed = jacobian.blocks[0].g.squeeze(2).mT
    matrix: Tensor | None
    if torch.equal(hidden[0], f) and torch.allclose(probed, _probe(f)):
        matrix = torch.eye(f.shape[1], dtype=torch.float64, device=f.device)
    else:
        matrix = common_gradient(layout, backpropagate(forward, x, layout)[1])
    if matrix is None:
        return None
    wide, target = hidden[0].double(), f.double()
    offset = (target - wide @ matrix.T).mean(0)
    size = wide.abs().amax(0) @ matrix.T.abs() + target.abs().amax(0)
    rounding = 16 * torch.finfo(f.dtype).eps * size
    head = Head(matrix, offset.masked_fill(offset.abs() <= rounding, 0))
    return head if head.fits(hidden[0], f) else None


def common_gradient(layout: Layout, jacobian: Jacobian) -> Tensor | None:
    """Jacobian (c, o) of the outputs in the last layer's, if all samples share it."""
    block = jacobian.blocks[0]
    if any(spec.layer is None for spec in layout.blocks) or block.g.shape[2] != 1:
        return None
    g = block.g.squeeze(2)
    return g[0].double() if torch.allclose(g, g[:1].expand_as(g)) else None


def _last_called(forward: Forward, x: Any, called: list[str]) -> str:
    """The layer called last on which the outputs depend, and which has no other."""
    called = [n for n in called if ".parametrizations" not in n]
    layers = [n for n in called if not any(_contains(n, m) for m in called if m != n)]
    for name in reversed(layers):
        leaves = _differentiable(forward.module.get_submodule(name))
        with torch.enable_grad(), requiring_grad(leaves):
            if leaves and forward(x).requires_grad:
                return name
    raise ValueError(
        "subset_of_weights='last_layer' needs a network with a layer that has "
        "parameters; there is none. Add a torch.nn.Linear."
    )


def _differentiable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.is_floating_point()]


def _contains(name: str, other: str) -> bool:
    """Whether a name is that of a module or parameter, or of a module around it."""
    return name in ("", other) or other.startswith(f"{name}.")


def check_indices(name: str, value: Any) -> None:
    """Refuse what is no ascending list of indices of weights."""
    indices = np.asarray(value)
    if indices.ndim != 1 or not len(indices) or indices.dtype.kind not in "iu":
        raise ValueError(
            f"{name} is not a list of integers. Pass the places of weights in the "
            "flattened network, such as [0, 5, 7]."
        )
    if indices.min() < 0 or (np.diff(indices) <= 0).any():
        raise ValueError(
            f"{name} are negative, not in ascending order, or repeat themselves. Count "
            "from the first weight, 0, and pass np.unique(indices)."
        )


def _check_name(name: str, value: Any) -> None:
    """Refuse what is no string; the estimator compares names with their registry."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r} is not the name of a criterion.")


@dataclass(frozen=True)
class Subset:
    """A way to select weights: ``select(forward, x, **options) -> Layout``.

    ``checks`` has a check of the value of each option that users may set.
    """

    select: Callable[..., Layout]
    checks: Mapping[str, Check] = field(default_factory=dict)

    def __call__(self, forward: Forward, x: Any, **options: Any) -> Layout:
        """Layout of the selected weights, from a few samples ``x``."""
        return self.select(forward, x, **options)


_CHECKS = {"n_weights": check_count, "by": _check_name, "indices": check_indices}
SUBSETS: dict[str, Subset] = {
    "all": Subset(all_weights),
    "last_layer": Subset(last_layer),
    "subnetwork": Subset(subnetwork, _CHECKS),
    "trainable": Subset(trainable),
}


def select(forward: Forward, x: Any, subset: Any, options: Mapping[str, Any]) -> Layout:
    """Layout of an entry of ``SUBSETS``, or of a list of names."""
    if isinstance(subset, str):
        return SUBSETS[subset](forward, x, **options)
    return named(forward, x, list(subset))


def _called_layers(forward: Forward, x: Any) -> tuple[list[str], Tensor]:
    """Modules that own parameters, in the order of their last call, and outputs.

    Parameters require gradients meanwhile, since some modules do not call their
    submodules otherwise, unless the network writes to one of them in place.
    """
    try:
        with torch.enable_grad(), requiring_grad(_differentiable(forward.module)):
            return _record_calls(forward, x)
    except RuntimeError:
        with torch.no_grad():
            return _record_calls(forward, x)


def _record_calls(forward: Forward, x: Any) -> tuple[list[str], Tensor]:
    called: list[str] = []
    with ExitStack() as hooks:
        for name, module in forward.module.named_modules():
            if list(module.parameters(recurse=False)):
                record = partial(lambda name, *_: called.append(name), name)
                hooks.enter_context(module.register_forward_hook(record))
        f = forward(x)
    return list(dict.fromkeys(reversed(called)))[::-1], f.detach()


def _specs(module: nn.Module, called: list[str]) -> list[BlockSpec]:
    """A spec per parameter; in layer form where one called layer owns it."""
    names = module.named_parameters(remove_duplicate=False)
    n_owners = Counter(id(parameter) for _, parameter in names)
    specs = []
    for name, parameter in module.named_parameters():
        layer, _, key = name.rpartition(".")
        has_form = (
            n_owners[id(parameter)] == 1
            and key in ("weight", "bias")
            and layer in called
            and has_layer_form(module.get_submodule(layer))
        )
        shape, is_bias = tuple(parameter.shape), has_form and key == "bias"
        specs.append(BlockSpec(name, shape, layer if has_form else None, is_bias))
    return specs


def _verified(forward: Forward, x: Any, f: Tensor, specs: list[BlockSpec]) -> Layout:
    """A layout whose layer forms agree with plain automatic differentiation.

    ``f`` are the outputs of all samples together.

    Raises
    ------
    ValueError
        If the outputs of a sample depend on the batch.
    """
    columns = _probe(f)
    parameters = dict(forward.module.named_parameters())
    leaves = [parameters[spec.name] for spec in specs]
    with requiring_grad(leaves):
        alone, expected = rows_by_loop(forward, x, leaves, columns)
    if not _agree(alone, f):
        raise ValueError(DEPENDENT_SAMPLES)
    found = _rows(forward, x, specs, columns)
    checked = [
        spec if _agree(rows, true) else BlockSpec(spec.name, spec.shape)
        for spec, rows, true in zip(specs, found, expected, strict=True)
    ]
    return Layout(tuple(checked))


def _probe(f: Tensor) -> Tensor:
    """A combination of the outputs for each sample, (b, c, 1), no two alike."""
    signs = torch.arange(f.numel(), dtype=f.dtype, device=f.device).reshape(f.shape)
    return torch.cos(1 + 2 * signs).unsqueeze(-1)


def _rows(
    forward: Forward, x: Any, specs: list[BlockSpec], columns: Tensor
) -> list[Tensor | None]:
    """Rows (b, 1, p) of every block in its declared form; None where it has none."""
    try:
        layout = Layout(tuple(specs))
        _, jacobian = backpropagate(forward, x, layout, lambda _f: columns)
    except RuntimeError:  # some layer has no layer form: find out which
        if len(specs) == 1:
            return [None]
        return [_rows(forward, x, [spec], columns)[0] for spec in specs]
    return [block.dense() for block in jacobian.blocks]


def _agree(found: Tensor | None, expected: Tensor) -> bool:
    """Whether they are equal up to rounding, relative to the largest entry."""
    if found is None or found.shape != expected.shape:
        return False
    allowed = torch.finfo(expected.dtype).eps ** 0.5 * 10
    largest = expected.abs().max() if expected.numel() else expected.new_zeros(())
    return bool(((found - expected).abs() <= allowed * largest.clamp(min=1e-30)).all())
