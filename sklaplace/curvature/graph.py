"""Graph: which leaves the autograd graph of some tensors leads to, and how often."""

from collections import Counter
from collections.abc import Collection, Iterable

from torch import Tensor


def count_uses(
    tensors: Iterable[Tensor], walls: Collection[object] = ()
) -> Counter[int]:
    """Edges of the graph of some tensors that end in each leaf, by ``id`` of the leaf.

    A parameter that a network uses in one place has one, whatever the values are: a
    gradient that is zero for some samples shows no such use. Nodes in ``walls`` lead
    nowhere.
    """
    stack = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    visited, uses = {*stack, *walls}, Counter[int]()
    # a tensor that is a leaf itself has no node
    uses.update(id(t) for t in tensors if t.grad_fn is None and t.requires_grad)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                uses[id(leaf)] += 1
            elif node not in visited:
                visited.add(node)
                stack.append(node)
    return uses
