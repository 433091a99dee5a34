"""Select the weights to treat as random, and return them as a `Layout`.

A forward pass over a few samples determines the layout. The Jacobian rows of each
parameter are verified on the same samples.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from sklaplace.core.checks import Check, check_count, listed
from sklaplace.core.trees import Batch
from sklaplace.core.trees import leaves as tensors
from sklaplace.curvature.jacobian import Jacobian, backpropagate
from sklaplace.curvature.layout import MAX_LISTED, BlockSpec, Head, Layout, contains
from sklaplace.curvature.patches import has_layer_form
from sklaplace.curvature.shared import MAX_DENSE_OUTPUTS, IdentityMap
from sklaplace.curvature.uses import check_gradients, count_uses, marked_outputs
from sklaplace.curvature.verification import check_jacobian_bytes, probe, verified
from sklaplace.networks.forward import Forward, first_tensor, requiring_grad, rounding

# default size of a subnetwork, and default criterion that selects its weights
N_WEIGHTS, CRITERION = 100, "magnitude"


def all_weights(forward: Forward, x: Batch) -> Layout:
    """Select all parameters of the network."""
    calls = _called_layers(forward, x)
    return _layout(forward, x, calls, _specs(forward.module, calls))


def last_layer(forward: Forward, x: Batch) -> Layout:
    """Select the weights and biases of the Linear layers at the end of the network.

    A network may end in several parallel layers, such as one layer for means and one
    layer for variances. The layout of a single layer has a `Head` if the outputs are an
    affine function of the layer's outputs.

    Raises
    ------
    ValueError
        If a last layer with parameters is not a Linear layer.
    """
    calls = _called_layers(forward, x)
    last_weights: set[Tensor] = set()
    for name in ending_layers(forward, x, calls.names):
        head = forward.module.get_submodule(name)
        if not isinstance(head, nn.Linear):
            raise ValueError(
                "subset_of_weights='last_layer' needs a network whose last layer with "
                f"parameters is a Linear layer; here it is {type(head).__name__} "
                f"({name!r}). Use subset_of_weights='all', pass a list with the name "
                "of a layer, or end the network with torch.nn.Linear."
            )
        # by identity: a weight tied to an earlier layer has the earlier layer's name
        last_weights.update(head.parameters())
    parameters = forward.module.named_parameters()
    names = [name for name, weight in parameters if weight in last_weights]
    specs = [s for s in _specs(forward.module, calls) if s.name in names]
    layout = _layout(forward, x, calls, specs)
    if calls.uses:
        # samples that call layers not seen here are refused later, since such a layer
        # may come after the last layers found here; without a graph, all are allowed
        layout = replace(layout, called=tuple(calls.names))
    return _with_affine_head(forward, x, layout)


def trainable(forward: Forward, x: Batch) -> Layout:
    """Select parameters with ``requires_grad``, such as adapters of a frozen network.

    Raises
    ------
    ValueError
        If all parameters are frozen.
    """
    if not forward.trainable:
        raise ValueError(
            "subset_of_weights='trainable' needs parameters with requires_grad; all "
            "are frozen. Use 'last_layer', 'all', or names of parameters."
        )
    parameters = dict(forward.module.named_parameters())
    names = [name for name in forward.trainable if _is_weight(parameters[name])]
    return named(forward, x, sorted(names))


def named(forward: Forward, x: Batch, names: Sequence[str]) -> Layout:
    """Select parameters by their names, or by names of modules that contain them.

    Raises
    ------
    ValueError
        If a name matches no parameter and no module.
    """
    calls = _called_layers(forward, x)
    specs = _specs(forward.module, calls)
    unknown = [n for n in names if not any(contains(n, s.name) for s in specs)]
    if unknown:
        valid = listed(spec.name for spec in specs[:MAX_LISTED])
        ellipsis = " …" if len(specs) > MAX_LISTED else ""
        all_are_weights = all(map(_is_weight, forward.module.parameters()))
        hint = "" if all_are_weights else " Integer and empty tensors are not weights."
        raise ValueError(
            f"subset_of_weights={unknown!r} is not known. Choose one of "
            f"{listed(SUBSETS)}, or a list of names of modules or of the parameters "
            f"{valid}{ellipsis}.{hint}"
        )
    selected = [s for s in specs if any(contains(name, s.name) for name in names)]
    return _with_affine_head(forward, x, _layout(forward, x, calls, selected))


def subnetwork(
    forward: Forward,
    x: Batch,
    n_weights: int | None = None,
    by: str = CRITERION,
    indices: ArrayLike | None = None,
    **options: Any,
) -> Layout:
    """Select individual weights by their indices in the vector of all weights.

    If ``indices`` are given, these weights are selected. Otherwise, the first
    ``n_weights`` weights are selected as placeholders. ``n_weights`` defaults to 100,
    or to all weights of a smaller network. After training, other code replaces the
    placeholders by the weights that the criterion ``by``, with its ``options``,
    selects; see `curvature.subnetwork`. The criterion is not used here.

    Raises
    ------
    ValueError
        If the network has too few weights.

    References
    ----------
    Daxberger, Nalisnick, Allingham, Antorán, Hernández-Lobato (2021), "Bayesian deep
    learning via subnetwork inference", ICML.
    """
    whole = all_weights(forward, x)
    p = whole.n_parameters
    n = min(N_WEIGHTS, p) if n_weights is None else n_weights
    # both kinds of indices are ascending, so the last one is the largest
    chosen = torch.as_tensor(range(n) if indices is None else indices).long()
    last = int(chosen[-1])
    if last >= p:
        value = f"n_weights={n:,}" if indices is None else f"index {last:,}"
        raise ValueError(
            f"subset_params has {value}, but the network has {p:,} weights, "
            "numbered from 0. Pass a smaller value, or use subset_of_weights='all'."
        )
    # split the indices into one list per parameter tensor, counted from its start
    blocks, start = [], 0
    for block in whole.blocks:
        in_block = chosen[(chosen >= start) & (chosen < start + block.size)] - start
        start += block.size
        if len(in_block):
            blocks.append(replace(block, indices=in_block))
    return replace(whole, blocks=tuple(blocks))


def _layout(
    forward: Forward,
    x: Batch,
    calls: "_Calls",
    specs: list[BlockSpec],
) -> Layout:
    """Return the verified layout of the parameters in ``specs``.

    Without an autograd graph, the uses of parameters are unknown and not checked.

    Raises
    ------
    ValueError
        If a parameter affects the outputs but has no gradient; see also `verified`.
    """
    if calls.uses:
        # raises an error if there are any such parameters
        check_gradients(_without_gradient(forward, x, calls, specs))
    layout = verified(forward, x, calls.outputs, specs)
    return replace(layout, counts_uses=bool(calls.uses))


def _without_gradient(
    forward: Forward, x: Batch, calls: "_Calls", specs: list[BlockSpec]
) -> list[str]:
    """Return the names of parameters that affect the outputs but have no gradient.

    All parameters outside the graph are changed at once, and single parameters only if
    this changes the outputs. Most networks then need only one trial. Complex
    parameters are refused elsewhere.
    """
    parameters = dict(forward.module.named_parameters())
    real = (spec.name for spec in specs if not parameters[spec.name].is_complex())
    unused = sorted(name for name in real if not calls.uses[parameters[name]])
    if not (unused and _change_outputs(forward, x, unused)):
        return []
    return [name for name in unused if _change_outputs(forward, x, [name])]


def _change_outputs(forward: Forward, x: Batch, names: list[str]) -> bool:
    """Return whether adding one to the named parameters changes the outputs.

    The parameters of a copy of the network are changed.
    """
    twin = forward.twin()
    with torch.no_grad():
        before = twin(x)
        # adapters merge their weights in eval(), so the change must precede eval()
        twin.module.train()
        for name in names:
            twin.module.get_parameter(name).add_(1)
        twin.module.eval()
        return not torch.equal(twin(x), before)


def _with_affine_head(forward: Forward, x: Batch, layout: Layout) -> Layout:
    """Add a `Head` to a layout that selects the weight of a single Linear layer.

    The head is the affine map from the outputs of this layer to those of the network,
    or None if there is no such map. The layout is returned unchanged if it selects
    parameters of other layers, or only the bias.
    """
    # the name is None for parameters without a layer, which have dense rows
    name, *other_names = {spec.layer for spec in layout.blocks}
    # a selected weight precedes its bias
    if other_names or name is None or layout.blocks[0].is_bias:
        return layout
    layer = forward.module.get_submodule(name)
    if not isinstance(layer, nn.Linear):
        return layout
    return replace(layout, head=_affine_head(forward, x, layout, layer))


def _affine_head(
    forward: Forward, x: Batch, layout: Layout, layer: nn.Module
) -> Head | None:
    """Return the affine map from a layer's outputs to the network's outputs.

    Return None if no such map is the same for all samples, or if the layer is called
    several times or at several positions. Gradients of one combination of the outputs
    show whether the map is the identity. Any other map requires the Jacobian of all
    outputs. Each later forward pass checks that its outputs agree with the map.
    """
    layer_outputs: list[Tensor] = []  # one per call

    def record(_layer: nn.Module, _args: object, output: Tensor) -> None:
        layer_outputs.append(output.detach().clone())

    with torch.no_grad(), layer.register_forward_hook(record):
        # not from `backpropagate`: with a graph, rounding can differ
        f = forward(x)
    jacobian = backpropagate(forward, x, layout, probe)[1]
    if len(layer_outputs) != 1 or layer_outputs[0].ndim != 2:
        return None
    hidden, n_outputs = layer_outputs[0].to(f.dtype), f.shape[1]
    # gradients of one combination of outputs, (b, o, 1); if the network returns the
    # layer's outputs, the gradients are the coefficients of the combination
    gradient = jacobian.layers[0].first.g.squeeze(2).mT
    is_identity = torch.equal(hidden, f) and torch.allclose(gradient, probe(f))
    if is_identity and n_outputs > MAX_DENSE_OUTPUTS:
        return Head(IdentityMap(n_outputs), f.new_zeros(n_outputs, dtype=torch.float64))
    if is_identity:
        matrix = torch.eye(n_outputs, dtype=torch.float64, device=f.device)
        return _head_with_offset(matrix, hidden, f)
    check_jacobian_bytes(f)  # raises an error if the Jacobian needs too much memory
    shared = common_layer_jacobian(layout, backpropagate(forward, x, layout)[1])
    return None if shared is None else _head_with_offset(shared, hidden, f)


def _head_with_offset(matrix: Tensor, hidden: Tensor, f: Tensor) -> Head | None:
    """Return the head ``f = hidden matrixᵀ + offset``, or None if it does not fit.

    The layer outputs ``hidden`` are (b, o), the network outputs ``f`` are (b, c), and
    ``matrix`` is (c, o). The offset is the mean difference over the samples.
    """
    exact_hidden, exact_f = hidden.double(), f.double()
    offset = (exact_f - exact_hidden @ matrix.T).mean(0)
    # errors are relative to the largest terms of the sums; 16 roundings are a margin
    # for sums of many terms
    size = exact_hidden.abs().amax(0) @ matrix.T.abs() + exact_f.abs().amax(0)
    rounding = 16 * torch.finfo(f.dtype).eps * size
    # an offset of rounding errors is zero, so that an identity is recognised
    head = Head(matrix, offset.masked_fill(offset.abs() <= rounding, 0))
    return head if head.fits(hidden, f) else None


def common_layer_jacobian(layout: Layout, jacobian: Jacobian) -> Tensor | None:
    """Return the last-layer Jacobian (c, o) shared by all samples, in float64.

    The Jacobian is the derivative of the c outputs with respect to the layer's outputs.
    Return None if samples differ, or if the layout does not select one layer that is
    used at one position. ``jacobian`` has one row per output, (k = c).
    """
    layers = {spec.layer for spec in layout.blocks}
    g = jacobian.layers[0].first.g  # (b, c, r, o)
    if len(layers) > 1 or None in layers or g.shape[2] != 1:
        return None
    g = g.squeeze(2)
    return g[0].double() if torch.allclose(g, g[:1].expand_as(g)) else None


def ending_layers(
    forward: Forward, x: Batch, called: list[str] | None = None
) -> list[str]:
    """Return the layers that affect the outputs and whose outputs enter no other layer.

    ``called`` lists all layers with parameters that the network calls, if known. If the
    output of every layer enters another layer, as in a loop, return only the last
    layer.
    """
    if called is None:
        called = _called_layers(forward, x).names
    called = list(dict.fromkeys(map(_without_parametrization, called)))
    # leave out modules that contain other layers
    layers = [n for n in called if not any(contains(n, m) for m in called if m != n)]
    return _layers_at_end(forward, x, layers) or [_last_called(forward, x, layers)]


def _without_parametrization(name: str) -> str:
    """Return the name of the layer that owns a parametrization, or any other name."""
    names = name.split(".")
    end = names.index("parametrizations") if "parametrizations" in names else None
    return ".".join(names[:end])


def _layers_at_end(forward: Forward, x: Batch, layers: list[str]) -> list[str]:
    """Return layers whose outputs reach the network's outputs through no other layer.

    `marked_outputs` adds a marker, a leaf of the autograd graph, to the outputs of each
    layer. Searches through the graph stop behind the markers, at nodes called walls.
    The last layers are those whose markers are reached from the network's outputs, but
    not from the inputs of any layer.
    """
    inputs: list[Tensor] = []  # of all layers

    def record_inputs(_layer: nn.Module, args: object, kwargs: object) -> None:
        arguments = (v for v in tensors((args, kwargs)) if isinstance(v, Tensor))
        inputs.extend(argument for argument in arguments if argument.requires_grad)

    with torch.enable_grad(), ExitStack() as hooks:
        for name in layers:
            layer = forward.module.get_submodule(name)
            hook = layer.register_forward_pre_hook(record_inputs, with_kwargs=True)
            hooks.enter_context(hook)
        markers, walls = hooks.enter_context(marked_outputs(forward.module, layers))
        reached_from_outputs = count_uses([forward(x)], walls).keys()
    at_end = reached_from_outputs - count_uses(inputs, walls).keys()
    return [name for name, marker in markers.items() if marker in at_end]


def _last_called(forward: Forward, x: Batch, layers: list[str]) -> str:
    """Return the last called layer that affects the outputs.

    A layer affects the outputs if these have a graph when only the layer's parameters
    require gradients. Each layer is tried in a forward pass, the last one first.

    Raises
    ------
    ValueError
        If no layer affects the outputs.
    """
    for name in reversed(layers):
        layer = forward.module.get_submodule(name)
        parameters = [p for p in layer.parameters() if p.is_floating_point()]
        with torch.enable_grad(), requiring_grad(parameters):
            if parameters and forward(x).requires_grad:
                return name
    raise ValueError(
        "subset_of_weights='last_layer' needs a network with a layer that has "
        "parameters; there is none. Add a torch.nn.Linear."
    )


def check_indices(name: str, value: ArrayLike) -> None:
    """Raise an error if the value is not an ascending list of weight indices."""
    indices = np.asarray(value)
    # "i" and "u" are signed and unsigned integers
    if indices.ndim != 1 or not len(indices) or indices.dtype.kind not in "iu":
        raise ValueError(
            f"{name} is not a list of integers. Pass the indices of weights in the "
            "flattened network, such as [0, 5, 7]."
        )
    if indices.min() < 0 or (np.diff(indices) <= 0).any():
        raise ValueError(
            f"{name} are negative, repeated or not in ascending order. Number the "
            "weights from 0, and pass np.unique(indices)."
        )


SUBSETS: dict[str, Callable[..., Layout]] = {
    "all": all_weights,
    "last_layer": last_layer,
    "subnetwork": subnetwork,
    "trainable": trainable,
}
# checks of the options of subsets
SUBSET_CHECKS: dict[str, dict[str, Check]] = {
    "subnetwork": {
        "n_weights": check_count,
        "by": lambda name, value: None,  # `check_subset` checks this option
        "indices": check_indices,
    }
}


def select(
    forward: Forward, x: Batch, subset: str | Sequence[str], options: Mapping[str, Any]
) -> Layout:
    """Return the layout of an entry of ``SUBSETS``, or of a list of names."""
    if isinstance(subset, str):
        return SUBSETS[subset](forward, x, **options)
    return named(forward, x, list(subset))


@dataclass(frozen=True)
class _Calls:
    """Modules that a network calls.

    Attributes
    ----------
    names : list of str
        Modules that own parameters, in the order of their last call.
    n_calls : Counter
        Number of calls of each module.
    uses : Counter
        Number of times that the outputs use each parameter. Empty without a graph.
    outputs : Tensor of shape (b, c)
        The network's outputs.
    """

    names: list[str]
    n_calls: Counter[str]
    uses: Counter[Tensor]
    outputs: Tensor


def _called_layers(forward: Forward, x: Batch) -> _Calls:
    """Record the modules that a network calls, and the uses of parameters.

    Parameters require gradients during the call, since some modules would otherwise not
    call their submodules. If this fails, because the network modifies parameters in
    place, only trained parameters require gradients. If this also fails, no parameters
    do, and uses are not recorded.
    """
    named = forward.module.named_parameters()
    differentiable = {name: p for name, p in named if p.is_floating_point()}
    trained = [p for name, p in differentiable.items() if name in forward.trainable]
    for parameters in ([*differentiable.values()], trained):
        with suppress(RuntimeError), torch.enable_grad(), requiring_grad(parameters):
            return _record_calls(forward, x)
    with torch.no_grad():
        return _record_calls(forward, x)


def _record_calls(forward: Forward, x: Batch) -> _Calls:
    """Pass a batch through the network, and record the modules that it calls.

    Only modules with parameters of their own are recorded. The call also sets
    ``forward.rounding`` from the dtypes of all recorded outputs.
    """
    called: list[str] = []  # one name per call
    outputs: list[object] = []

    def record(name: str, _module: nn.Module, _args: object, output: object) -> None:
        called.append(name)
        outputs.append(first_tensor(output))

    with ExitStack() as hooks:
        for name, module in forward.module.named_modules():
            if list(module.parameters(recurse=False)):
                hook = module.register_forward_hook(partial(record, name))
                hooks.enter_context(hook)
        f = forward(x)
    forward.rounding = rounding([f, *outputs])
    # without repetitions, in the order of last calls: the last layers come last
    names = list(dict.fromkeys(reversed(called)))[::-1]
    n_calls, uses = Counter(called), count_uses([f])
    return _Calls(names, n_calls, uses, f.detach())


def _specs(module: nn.Module, calls: _Calls) -> list[BlockSpec]:
    """Return one spec per parameter, in layer form if only one called layer uses it.

    A spec in layer form names the layer, whose inputs and output gradients are then the
    factors of the Jacobian rows. Other specs have dense rows. A parameter with more
    uses in the graph than calls of its layer is also used outside the layer. Integer
    and empty tensors are not weights and have no spec.
    """
    names = module.named_parameters(remove_duplicate=False)
    n_owners = Counter(parameter for _, parameter in names)  # 2 or more if tied
    specs = []
    for name, parameter in module.named_parameters():
        if not _is_weight(parameter):
            continue
        layer, _, attribute = name.rpartition(".")
        in_layer_form = (
            n_owners[parameter] == 1
            and attribute in ("weight", "bias")
            and calls.uses[parameter] <= calls.n_calls[layer]
            and layer in calls.names
            and has_layer_form(module.get_submodule(layer))
        )
        shape, is_bias = tuple(parameter.shape), in_layer_form and attribute == "bias"
        spec = BlockSpec(name, shape, layer if in_layer_form else None, is_bias)
        if in_layer_form and not is_bias:
            n_groups = getattr(module.get_submodule(layer), "groups", 1)
            spec = replace(spec, n_groups=n_groups)
        specs.append(spec)
    return specs


def _is_weight(parameter: Tensor) -> bool:
    is_number = parameter.is_floating_point() or parameter.is_complex()
    return is_number and parameter.numel() > 0
