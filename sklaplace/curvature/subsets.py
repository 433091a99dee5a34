"""Subsets: which weights are treated as random, as a `Layout`.

The layout is found by watching the network on a few rows, and each layer form
is checked there against plain automatic differentiation. A layer that is used
in an unforeseen way (shared weights, functional calls, reparametrisations)
falls back to dense rows instead of giving wrong numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sklaplace.core.checks import Check, check_count, listed
from sklaplace.core.trees import tree_rows
from sklaplace.curvature.jacobian import Jacobian, backpropagate
from sklaplace.curvature.layout import BlockSpec, Head, Layout
from sklaplace.curvature.patches import has_layer_form
from sklaplace.networks.forward import Forward, requiring_grad

# names of parameters in a message, at most
MAX_LISTED = 12
# weights of a subnetwork where no number is given, and what chooses them
N_WEIGHTS, CRITERION = 100, "magnitude"

DEPENDENT_ROWS = (
    "The network's outputs for a row depend on the other rows of its batch, also in "
    "evaluation mode. Laplace needs one output per row: let the network treat rows "
    "independently."
)


def all_weights(forward: Forward, x: Any) -> Layout:
    """Every parameter of the network."""
    called, f = _called_layers(forward, x)
    return _verified(forward, x, f.detach(), _specs(forward.module, called))


def last_layer(forward: Forward, x: Any) -> Layout:
    """Weight and bias of the Linear layer that ends the network.

    Raises
    ------
    ValueError
        If the last layer with parameters is not a Linear layer.
    """
    called, f = _called_layers(forward, x)
    name = _last_called(forward, x, called, f)
    head = forward.module.get_submodule(name)
    if not isinstance(head, nn.Linear):
        raise ValueError(
            "subset_of_weights='last_layer' needs a network whose last layer with "
            f"parameters is a Linear layer; here it is {type(head).__name__} "
            f"({name!r}). Use subset_of_weights='all', a list with the name of the "
            "layer you mean, or end the network with torch.nn.Linear."
        )
    # by identity: a weight that is tied to an earlier layer bears that one's name
    own = {id(parameter) for parameter in head.parameters()}
    parameters = dict(forward.module.named_parameters())
    specs = _specs(forward.module, [name])
    chosen = [spec for spec in specs if id(parameters[spec.name]) in own]
    layout = _verified(forward, x, f.detach(), chosen)
    return replace(layout, head=_affine_head(forward, x, layout, head))


def trainable(forward: Forward, x: Any) -> Layout:
    """The parameters with ``requires_grad``, such as adapters on a frozen body.

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
    """Parameters by their own names, or by those of modules that contain them.

    Raises
    ------
    ValueError
        If there is no parameter of some name.
    """
    called, f = _called_layers(forward, x)
    specs = _specs(forward.module, called)
    missing = [n for n in names if not any(_is_under(s.name, n) for s in specs)]
    if missing:
        known = listed(spec.name for spec in specs[:MAX_LISTED])
        more = " …" if len(specs) > MAX_LISTED else ""
        raise ValueError(
            f"subset_of_weights={missing!r} is not known. Choose one of "
            f"{listed(SUBSETS)}, or a list of names of modules or of the parameters "
            f"{known}{more}."
        )
    chosen = [s for s in specs if any(_is_under(s.name, name) for name in names)]
    layout = _verified(forward, x, f.detach(), chosen)
    layers = {spec.layer for spec in layout.blocks}
    if len(layers) > 1 or None in layers:
        return layout
    (name,) = layers
    layer = forward.module.get_submodule(str(name))
    if not isinstance(layer, nn.Linear) or layout.blocks[0].is_bias:
        return layout
    return replace(layout, head=_affine_head(forward, x, layout, layer))


def subnetwork(
    forward: Forward,
    x: Any,
    n_weights: int | None = None,
    by: str = CRITERION,
    indices: Any = None,
) -> Layout:
    """Single weights: those of given places in the flattened network.

    ``n_weights`` is 100, or all if there are fewer, where it is not given. Without
    ``indices``, which are chosen once the network has been trained (see
    `subnetworks`), the first ``n_weights`` stand for them.

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
    places = torch.arange(n) if indices is None else torch.as_tensor(indices)
    places = places.long()
    if int(places[-1]) >= p:
        asked = f"n_weights={n:,}" if indices is None else f"index {int(places[-1]):,}"
        raise ValueError(
            f"subset_params asks for {asked}, but the network has {p:,} weights, "
            "numbered from 0. Ask for fewer, or use subset_of_weights='all'."
        )
    blocks, start = [], 0
    for block in whole.blocks:
        inside = places[(places >= start) & (places < start + block.size)] - start
        start += block.size
        if len(inside):
            blocks.append(replace(block, indices=inside))
    return Layout(tuple(blocks))


def _affine_head(
    forward: Forward, x: Any, layout: Layout, layer: nn.Module
) -> Head | None:
    """The map from the last layer to the outputs, where it is one for these rows.

    Other rows are compared with it whenever they pass.
    """
    hidden: list[Tensor] = []
    handle = layer.register_forward_hook(
        lambda _m, _i, out: hidden.append(out.detach().clone())
    )
    try:
        # for outputs that are the layer's own, one column tells
        f, jacobian = backpropagate(forward, x, layout, _probe)
    finally:
        handle.remove()
    if len(hidden) != 1 or hidden[0].ndim != 2:
        return None
    block = jacobian.blocks[0]
    if (
        torch.equal(hidden[0], f)
        and all(spec.layer is not None for spec in layout.blocks)
        and torch.allclose(block.g.squeeze(2).mT, _probe(f))
    ):
        matrix = torch.eye(f.shape[1], dtype=torch.float64, device=f.device)
    else:
        common = common_gradient(layout, backpropagate(forward, x, layout)[1])
        if common is None:
            return None
        matrix = common
    wide, target = hidden[0].double(), f.double()
    offset = (target - wide @ matrix.T).mean(0)
    size = wide.abs().amax(0) @ matrix.T.abs() + target.abs().amax(0)
    rounding = 16 * torch.finfo(f.dtype).eps * size
    head = Head(matrix, offset.masked_fill(offset.abs() <= rounding, 0))
    return head if head.fits(hidden[0], f) else None


def common_gradient(layout: Layout, jacobian: Jacobian) -> Tensor | None:
    """Gradient (c, o) of the outputs in the last layer's, if one for all rows."""
    block = jacobian.blocks[0]
    if any(spec.layer is None for spec in layout.blocks) or block.g.shape[2] != 1:
        return None
    g = block.g.squeeze(2)
    same = torch.equal(g[1:], g[:1].expand_as(g[1:])) or torch.allclose(
        g, g[:1].expand_as(g)
    )
    return g[0].double() if same else None


def _last_called(forward: Forward, x: Any, called: list[str], f: Tensor) -> str:
    """The layer called last on which the outputs depend; containers aside."""
    called = [n for n in called if ".parametrizations" not in n]
    layers = [n for n in called if not any(_contains(n, other) for other in called)]
    for name in reversed(layers):
        leaves = _differentiable(forward.module.get_submodule(name))
        if leaves and _depends(forward, x, f, leaves):
            return name
    raise ValueError(
        "subset_of_weights='last_layer' needs a network with a layer that has "
        "parameters; there is none. Add a torch.nn.Linear."
    )


def _depends(forward: Forward, x: Any, f: Tensor, leaves: list[nn.Parameter]) -> bool:
    """Whether outputs depend on parameters, by their graph if they bear one."""
    with torch.enable_grad(), requiring_grad(leaves):
        if not f.requires_grad:
            return bool(forward(x).requires_grad)
        gradients = torch.autograd.grad(
            f.sum(), leaves, retain_graph=True, allow_unused=True
        )
        return any(gradient is not None for gradient in gradients)


def _differentiable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.is_floating_point()]


def _contains(name: str, other: str) -> bool:
    return name != other and (name == "" or other.startswith(f"{name}."))


def _is_under(parameter: str, name: str) -> bool:
    return parameter == name or _contains(name, parameter)


def check_indices(name: str, value: Any) -> None:
    """Refuse what does not list weights by their places."""
    places = np.asarray(value)
    if places.ndim != 1 or not len(places) or places.dtype.kind not in "iu":
        raise ValueError(
            f"{name} is not a list of integers. Pass the places of weights in the "
            "flattened network, such as [0, 5, 7]."
        )
    if places.min() < 0:
        raise ValueError(f"{name} has negative entries. Count from the first weight.")
    if (np.diff(places) <= 0).any():
        raise ValueError(
            f"{name} are not in ascending order, or repeat themselves. Pass "
            "np.unique(indices): priors and means follow the order of the network."
        )


def _check_name(name: str, value: Any) -> None:
    """The names themselves are checked where their registry is."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r} is not the name of a criterion.")


@dataclass(frozen=True)
class Subset:
    """A way to select weights: ``select(forward, x, **options) -> Layout``.

    ``checks`` has a check of its value for each option that a user has.
    """

    select: Callable[..., Layout]
    checks: Mapping[str, Check] = field(default_factory=dict)

    def __call__(self, forward: Forward, x: Any, **options: Any) -> Layout:
        """The layout of the selected weights, from a few rows."""
        return self.select(forward, x, **options)


SUBSETS: dict[str, Subset] = {
    "all": Subset(all_weights),
    "last_layer": Subset(last_layer),
    "subnetwork": Subset(
        subnetwork,
        {
            "n_weights": check_count,
            "by": _check_name,
            "indices": check_indices,
        },
    ),
    "trainable": Subset(trainable),
}


def select(forward: Forward, x: Any, subset: Any, options: Mapping[str, Any]) -> Layout:
    """The layout of an entry of ``SUBSETS``, or of a list of names."""
    if isinstance(subset, str):
        return SUBSETS[subset](forward, x, **options)
    return named(forward, x, list(subset))


def _called_layers(forward: Forward, x: Any) -> tuple[list[str], Tensor]:
    """Modules that own parameters, in the order of their last call, and outputs.

    The outputs bear a graph that leads to all parameters, unless the network writes
    to one of them, which a graph forbids.
    """
    try:
        with torch.enable_grad(), requiring_grad(_differentiable(forward.module)):
            return _listed(forward, x)
    except RuntimeError:
        with torch.no_grad():
            return _listed(forward, x)


def _listed(forward: Forward, x: Any) -> tuple[list[str], Tensor]:
    called: dict[str, None] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(*_args: object) -> None:
            called.pop(name, None)
            called[name] = None

        return hook

    handles = [
        module.register_forward_hook(note(name))
        for name, module in forward.module.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        f = forward(x)
    finally:
        for handle in handles:
            handle.remove()
    return list(called), f


def _specs(module: nn.Module, called: list[str]) -> list[BlockSpec]:
    """A spec per parameter; in layer form where one called layer owns it."""
    owners: dict[int, list[tuple[str, bool]]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        for key, parameter in layer.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((name, key == "bias"))
    specs = []
    for name, parameter in module.named_parameters():
        (layer, is_bias), *others = owners[id(parameter)]
        fits = has_layer_form(module.get_submodule(layer)) and layer in called
        fits = fits and not others and name.rpartition(".")[2] in ("weight", "bias")
        specs.append(
            BlockSpec(
                name,
                tuple(parameter.shape),
                layer if fits else None,
                is_bias and fits,
            )
        )
    return specs


def _verified(forward: Forward, x: Any, f: Tensor, specs: list[BlockSpec]) -> Layout:
    """A layout whose layer forms agree with plain automatic differentiation.

    ``f`` are the outputs of all rows together.

    Raises
    ------
    ValueError
        If the outputs of a row depend on the rows that come with it.
    """
    columns = _probe(f)
    alone, truth = _gradients_by_row(forward, x, specs, columns)
    if not _agree(alone, f):
        raise ValueError(DEPENDENT_ROWS)
    try:
        found = _rows(forward, x, specs, columns)
    except RuntimeError:  # some layer has no layer form: find out which
        found = [_rows_or_none(forward, x, spec, columns) for spec in specs]
    checked = [
        spec if _agree(rows, true) else BlockSpec(spec.name, spec.shape)
        for spec, rows, true in zip(specs, found, truth, strict=True)
    ]
    return Layout(tuple(checked))


def _probe(f: Tensor) -> Tensor:
    """A combination of the outputs for each row, (b, c, 1), no two alike."""
    signs = torch.arange(f.numel(), dtype=f.dtype, device=f.device).reshape(f.shape)
    return torch.cos(1 + 2 * signs).unsqueeze(-1)


def _rows(
    forward: Forward, x: Any, specs: list[BlockSpec], columns: Tensor
) -> list[Tensor | None]:
    """Rows (b, p) of every block in its declared form."""
    _, jacobian = backpropagate(forward, x, Layout(tuple(specs)), lambda _f: columns)
    return [block.dense().squeeze(1) for block in jacobian.blocks]


def _rows_or_none(
    forward: Forward, x: Any, spec: BlockSpec, columns: Tensor
) -> Tensor | None:
    try:
        return _rows(forward, x, [spec], columns)[0]
    except RuntimeError:
        return None


def _agree(found: Tensor | None, true: Tensor) -> bool:
    """Equal up to rounding of the dtype, relative to the largest entry."""
    if found is None or found.shape != true.shape:
        return False
    allowed = torch.finfo(true.dtype).eps ** 0.5 * 10
    largest = true.abs().max() if true.numel() else true.new_zeros(())
    return bool(((found - true).abs() <= allowed * largest.clamp(min=1e-30)).all())


def _gradients_by_row(
    forward: Forward, x: Any, specs: list[BlockSpec], columns: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Outputs (b, c) and the same rows (b, p), each row of the batch on its own.

    Raises
    ------
    ValueError
        If a row alone has other outputs in number than with others.
    """
    parameters = dict(forward.module.named_parameters())
    leaves = [parameters[spec.name] for spec in specs]
    outputs, rows = [], []
    for n, column in enumerate(columns.squeeze(-1)):
        with torch.enable_grad(), requiring_grad(leaves):
            f = forward(tree_rows(x, slice(n, n + 1)))
            if f.shape != (1, len(column)):
                raise ValueError(DEPENDENT_ROWS)
            gradients = torch.autograd.grad(
                (f[0] * column).sum(), leaves, allow_unused=True
            )
        outputs.append(f.detach())
        rows.append(gradients)
    return torch.cat(outputs), [
        torch.stack(
            [torch.zeros_like(leaf) if g is None else g for g in parts]
        ).reshape(len(rows), -1)
        for leaf, parts in zip(leaves, zip(*rows, strict=True), strict=True)
    ]
