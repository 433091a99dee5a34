"""Layers and parameters through which outputs depend on the weights.

A forward pass over a few samples records how the layers are used, which determines the
form of the Jacobian. Other samples may take other paths through the network. Each batch
is compared with the recorded uses, and new paths are refused.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn


def count_uses(
    tensors: Iterable[Tensor], walls: Collection[object] = ()
) -> Counter[Tensor]:
    """Count the edges to each leaf of the autograd graph that ends in the tensors.

    A parameter that a network uses in one place has one edge, even if its gradient is
    zero for some samples. The search goes from the tensors to the leaves, and stops at
    the nodes in ``walls``.
    """
    stack = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    visited, uses = {*stack, *walls}, Counter[Tensor]()
    # a tensor that is a leaf itself has no node
    uses.update(t for t in tensors if t.grad_fn is None and t.requires_grad)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            leaf = getattr(node, "variable", None)  # only nodes of leaves have one
            if leaf is not None:
                uses[leaf] += 1
            elif node not in visited:
                visited.add(node)
                stack.append(node)
    return uses


def unseen_use(layer: str) -> ValueError:
    """Return the error for samples that use a layer in a new way."""
    return ValueError(
        f"Some samples take a path through {layer!r} that did not occur among the "
        "training samples checked by fit, so their uncertainty is unknown. Let the "
        f"module apply {layer!r} in the same way to all samples, and choose between "
        "results with torch.where. Or leave out these samples."
    )


def check_gradients(names: Sequence[str]) -> None:
    """Raise ValueError if ``names``, of parameters without gradients, is not empty."""
    if names:
        raise ValueError(
            f"subset_of_weights selects {', '.join(map(repr, names[:3]))}. These "
            "weights affect the outputs without a gradient in evaluation mode. Use "
            "subset_of_weights='trainable' or names of other layers. Or change the "
            "module: recompute merged or cached values in every call, avoid "
            "torch.no_grad() and detach(), and use torch.utils.checkpoint with "
            "use_reentrant=False."
        )


@contextmanager
def marked_outputs(
    module: nn.Module, layers: Sequence[str]
) -> Iterator[tuple[dict[str, Tensor], set[object]]]:
    """Add a marker, a leaf tensor of zero, to each layer's outputs in forward passes.

    Yield the markers by layer, and the set of the outputs' own graph nodes (walls),
    which grows in each pass. A search that stops at the walls finds only the part of
    the graph that begins at the layers' outputs. The graph behind the walls is not cut,
    since networks may compute derivatives with respect to inputs.
    """
    markers = {name: torch.zeros(()).requires_grad_() for name in layers}
    walls: set[object] = set()

    def mark(name: str, _layer: nn.Module, _args: object, output: object) -> object:
        return _marked(output, markers[name], walls)

    with ExitStack() as hooks:
        for name in layers:
            layer = module.get_submodule(name)
            hooks.enter_context(layer.register_forward_hook(partial(mark, name)))
        yield markers, walls


def _marked(output: object, marker: Tensor, walls: set[object]) -> object:
    """Return a layer's output plus its marker; add the output's node to ``walls``.

    Tensors in tuples and lists are treated one by one. Outputs that are not floating
    point numbers have no graph and stay unchanged.
    """
    if type(output) is tuple:
        return tuple(_marked(part, marker, walls) for part in output)
    if type(output) is list:
        return [_marked(part, marker, walls) for part in output]
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return output
    if output.grad_fn is None:  # perhaps a parameter, which is a leaf itself
        output = output.detach()
    walls.add(output.grad_fn)
    return output + marker  # a new tensor may be modified in place
