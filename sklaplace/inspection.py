"""Inspection: what a skorch network means, found out before it is trusted.

The criterion tells the likelihood and what the module puts out; a few rows tell
whether it really does. Everything that cannot be right is refused here, with the
network still untrained.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sklaplace.forward import Forward, first_tensor
from sklaplace.jacobians import backpropagate
from sklaplace.layouts import Layout
from sklaplace.likelihoods import CRITERIA, Likelihood
from sklaplace.subsets import SUBSETS

# default of each criterion's argument that would change the likelihood
_PLAIN = {
    "weight": None,
    "pos_weight": None,
    "label_smoothing": 0.0,
    "ignore_index": -100,
}
# elements of Jacobian rows, or of one layer's outputs, that one batch may take
BATCH_ELEMENTS = 2**23


@dataclass(frozen=True)
class Inspected:
    """A network as the Laplace part sees it.

    Attributes
    ----------
    likelihood : Likelihood
        Of targets given outputs.
    layout : Layout
        The selected parameters.
    output_map, tap : str
        How outputs are read; see `Forward`.
    n_outputs : int
        Number c of outputs.
    head_map : Tensor of shape (c, o) or None
        Gradient of the outputs in what the last layer puts out, where that is
        the same for all rows; None otherwise.
    batch_size : int
        Rows whose Jacobian fits into the memory budget.
    """

    likelihood: Likelihood
    layout: Layout
    output_map: str
    tap: str | None
    n_outputs: int
    head_map: Tensor | None
    batch_size: int


def unwrapped(module: nn.Module) -> nn.Module:
    """The module behind ``torch.compile``, which hooks cannot enter."""
    return getattr(module, "_orig_mod", module)


def view(net: Any, output_map: str = "identity", tap: str | None = None) -> Forward:
    """The network of a skorch net as a `Forward`; the net is not changed."""
    module = unwrapped(net.module_)
    if module is not net.module_:
        bare = object.__new__(type(net))
        bare.__dict__.update(net.__dict__, module_=module)
        net = bare
    return Forward(module, net.infer, output_map, tap)


def inspect(
    net: Any, x: Any, subset: str, allowed: tuple[type, ...], n_outputs: int | None
) -> Inspected:
    """Find out how the outputs of a net are to be read and differentiated.

    Parameters
    ----------
    net : skorch.NeuralNet
        Initialised, trained or not.
    x : batch
        A few rows.
    subset : str
        Key of ``SUBSETS``.
    allowed : tuple of types
        Likelihoods that the estimator can use.
    n_outputs : int or None
        Number of classes or targets.

    Raises
    ------
    ValueError
        If criterion, outputs or layers do not fit.
    """
    likelihood, convention = _likelihood(net, allowed)
    with view(net).frozen():
        raw = raw_outputs(net, x)
        _check_outputs(net, raw, convention)
        output_map, tap = _reading(net, x, raw, convention)
        forward = view(net, output_map, tap)
        _check_width(raw, likelihood, n_outputs)
        layout = SUBSETS[subset](forward, x)
        f, jacobian = backpropagate(forward, x, layout)
        size = _batch_size(net, forward, x, jacobian)
    head_map = _head_map(jacobian) if subset == "last_layer" else None
    return Inspected(likelihood, layout, output_map, tap, f.shape[1], head_map, size)


def _likelihood(net: Any, allowed: tuple[type, ...]) -> tuple[Likelihood, str]:
    """Likelihood and output convention that belong to the net's criterion."""
    if getattr(net, "_trimmed_for_prediction", False):
        raise ValueError(
            "The network was trimmed for prediction, so its criterion is gone and "
            "its outputs cannot be read. Pass the network as it was before "
            "trim_for_prediction()."
        )
    criterion = net.criterion_
    known = {k: v for k, v in CRITERIA.items() if isinstance(v[0], allowed)}
    if type(criterion) not in known:
        names = ", ".join(sorted(kind.__name__ for kind in known))
        raise ValueError(
            f"criterion={type(criterion).__name__} has no likelihood here. Choose "
            f"one of {names} from torch.nn."
        )
    for name, plain in _PLAIN.items():
        value = getattr(criterion, name, plain)
        if value is not plain and value != plain:
            raise ValueError(
                f"criterion__{name} is set, which changes the likelihood and is not "
                "supported. Leave it at its default; to weight rows or classes, "
                "pass sample_weight to fit."
            )
    return known[type(criterion)]


def raw_outputs(net: Any, x: Any) -> Tensor:
    """What the module returns for a few rows."""
    with torch.no_grad():
        try:
            return first_tensor(view(net).call(x))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            shape = tuple(x.shape[1:]) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"The network cannot be applied to rows of shape {shape}: {error} "
                "Set the size of its first layer to that of the rows."
            ) from error


def _check_outputs(net: Any, raw: Tensor, convention: str) -> None:
    """Refuse outputs that contradict the criterion."""
    name = type(net.criterion_).__name__
    if not raw.isfinite().all():
        raise ValueError(
            "The network's outputs are not finite: its training has diverged, or "
            "its weights were not loaded. Lower the learning rate, scale the "
            "inputs, and look at net.history for the epoch in which it began."
        )
    is_distribution = _is_distribution(raw)
    if convention == "probabilities" and not is_distribution:
        raise ValueError(
            f"criterion={name} needs a module that returns probabilities (skorch "
            "takes their logarithm itself), but this one returns logits or "
            "log-probabilities. End the module with a softmax (or sigmoid), or use "
            "the criterion for logits: torch.nn.CrossEntropyLoss (or "
            "torch.nn.BCEWithLogitsLoss)."
        )
    if (
        convention == "logits"
        and raw.ndim == 2
        and raw.shape[1] > 1
        and is_distribution
    ):
        warnings.warn(
            f"The module returns probabilities, but criterion={name} applies a "
            "softmax itself: this is a softmax of a softmax. Remove the softmax "
            "from the module, or use criterion=torch.nn.NLLLoss.",
            UserWarning,
            stacklevel=2,
        )


def _is_distribution(raw: Tensor) -> bool:
    """Whether outputs lie in [0, 1] and, where there are several, sum to one."""
    inside = bool(((raw >= 0) & (raw <= 1)).all())
    if raw.ndim == 1 or raw.shape[1] == 1:
        return inside
    total = raw.sum(1)
    return inside and bool(torch.allclose(total, torch.ones_like(total), atol=1e-4))


def _reading(net: Any, x: Any, raw: Tensor, convention: str) -> tuple[str, str | None]:
    """Output map and tap: how logits are read from what the module returns."""
    if convention != "probabilities":
        return "identity", None
    binary = raw.ndim == 1 or raw.shape[1] == 1
    seen: list[tuple[str, Tensor]] = []
    handles = [
        module.register_forward_hook(
            lambda _m, _i, out, name=name: seen.append((name, out))
        )
        for name, module in view(net).module.named_modules()
        if not any(module.children())
    ]
    try:
        with torch.no_grad():
            view(net).call(x)
    finally:
        for handle in handles:
            handle.remove()
    for name, out in reversed(seen):
        if not isinstance(out, Tensor) or out.numel() != raw.numel():
            continue
        logits = out.reshape(raw.shape)
        probabilities = logits.sigmoid() if binary else logits.softmax(-1)
        used_once = sum(other == name for other, _ in seen) == 1
        if used_once and torch.allclose(probabilities, raw, atol=1e-6):
            return "identity", name
    return ("logit" if binary else "log"), None


def _check_width(raw: Tensor, likelihood: Likelihood, n_outputs: int | None) -> None:
    """Compare the number of outputs with that of classes or targets."""
    if raw.ndim > 2:
        raise ValueError(
            f"The network gives outputs of shape {tuple(raw.shape[1:])} per row; "
            "one vector per row is supported. Flatten them in the module."
        )
    found = 1 if raw.ndim == 1 else raw.shape[1]
    if n_outputs is None or found == likelihood.width(n_outputs):
        return
    noun = "columns" if likelihood.has_noise else "classes"
    raise ValueError(
        f"The network gives {found} outputs, but y has {n_outputs} {noun}. Set the "
        f"size of its last layer to {likelihood.width(n_outputs)}."
    )


def _head_map(jacobian: Any) -> Tensor | None:
    """Gradient (c, o) of the outputs in the last layer's, if one for all rows."""
    block = jacobian.blocks[0]
    if block.a is None or block.g.shape[2] != 1:
        return None
    g = block.g.squeeze(2).double()
    return g[0] if torch.allclose(g, g[:1].expand_as(g)) else None


def _batch_size(net: Any, forward: Forward, x: Any, jacobian: Any) -> int:
    """Rows per batch: the budget for rows of the Jacobian, and for activations.

    Activations of the net's own batch size are known to fit.
    """
    widest = [1]
    handles = [
        module.register_forward_hook(lambda _m, _i, out: widest.append(_numel(out)))
        for module in forward.module.modules()
    ]
    try:
        with torch.no_grad():
            n_rows = len(forward(x))
    finally:
        for handle in handles:
            handle.remove()
    elements = sum(
        block.g.numel() + (0 if block.a is None else block.a.numel())
        for block in jacobian.blocks
    )
    own = net.batch_size if net.batch_size > 0 else 1
    activations = max(own, BATCH_ELEMENTS * n_rows // max(widest))
    return max(1, min(BATCH_ELEMENTS * n_rows // max(1, elements), activations))


def _numel(out: Any) -> int:
    out = first_tensor(out)
    return out.numel() if isinstance(out, Tensor) else 1
