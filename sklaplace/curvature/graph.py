"""Number of times that an autograd graph uses each of its leaves."""

from collections import Counter
from collections.abc import Collection, Iterable

from torch import Tensor


def count_uses(
    tensors: Iterable[Tensor], walls: Collection[object] = ()
) -> Counter[Tensor]:
    """Count the edges to each leaf of an autograd graph.

    A parameter that a network uses in one place has one edge, even if its gradient is
    zero for some samples. The search stops at the nodes in ``walls``.
    """
    stack = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    visited, uses = {*stack, *walls}, Counter[Tensor]()
    # a tensor that is a leaf itself has no node
    uses.update(t for t in tensors if t.grad_fn is None and t.requires_grad)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                uses[leaf] += 1
            elif node not in visited:
                visited.add(node)
                stack.append(node)
    return uses
