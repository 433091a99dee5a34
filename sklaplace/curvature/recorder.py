"""Recorder: the inputs of layers, and gradients of the outputs at layer outputs.

One forward pass records the input of each call of a layer and the *gradient edge* of
its output. One batched backward pass from outputs ``f`` (b, c) then gives
``∂(Sᵀf)/∂z`` for the output ``z`` of every call, without any gradient of a weight.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sklaplace.core.budget import BUDGET
from sklaplace.curvature.derivatives import vectorised

# gradients of a column that are alive at once: those kept, and those passed on
BACKWARD_COPIES = 2


def first_input(args: Any, kwargs: Any) -> Tensor:
    """The input of a layer, from the arguments of its hooks."""
    return args[0] if args else kwargs["input"]


@dataclass(frozen=True)
class _Call:
    """One call of a layer: its input, and edge and shape of its output."""

    x: Tensor
    edge: GradientEdge
    shape: torch.Size


class Recorder(ExitStack):
    """Records the calls of the layers of a layout during one forward pass.

    The *gradient edge* of the layer's output is recorded, not the output: an
    in-place activation changes what the tensor stands for, never the edge.
    """

    def __init__(self, module: nn.Module, layers: list[str]) -> None:
        super().__init__()
        self.calls: dict[str, list[_Call]] = {name: [] for name in layers}
        for name in layers:
            layer, record = module.get_submodule(name), partial(self._record, name)
            start = layer.register_forward_pre_hook(self._start_graph, with_kwargs=True)
            self.enter_context(start)
            self.enter_context(layer.register_forward_hook(record, with_kwargs=True))

    @staticmethod
    def _start_graph(_layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Start the graph at a layer if nothing below it is selected.

        The parameters need no gradient, so without this the output would have
        no edge. The copy-free detach keeps in-place activations legal.
        """
        x = first_input(args, kwargs)
        return (x if x.requires_grad else x.detach().requires_grad_(),), {}

    def _record(
        self, name: str, _layer: nn.Module, args: Any, _kwargs: Any, output: Tensor
    ) -> Tensor:
        if output._is_view():
            # an in-place activation would cut a view's edge out of the graph
            output = output.clone()
        edge = get_gradient_edge(output)
        self.calls[name].append(_Call(args[0].detach(), edge, output.shape))
        return output

    @property
    def _all_calls(self) -> list[_Call]:
        return [call for calls in self.calls.values() for call in calls]

    def columns_at_once(self, columns: Tensor) -> int:
        """Columns whose gradients fit into the budget together, at least one."""
        elements = sum(call.shape.numel() for call in self._all_calls)
        per_column = max(1, elements) * columns.element_size() * BACKWARD_COPIES
        return max(1, BUDGET // per_column)

    def gradients(self, f: Tensor, columns: Tensor) -> dict[str, list[Tensor]]:
        """Gradients (k, b, ...) of columns (b, c, k) of ``f`` at the calls of layers.

        Zero where the outputs do not depend on a call.
        """
        calls = self._all_calls
        edges = [call.edge for call in calls]
        if not calls:
            return {name: [] for name in self.calls}

        def backward(column: Tensor) -> tuple[Tensor, ...]:
            gradients = torch.autograd.grad(
                f, edges, column, retain_graph=True, allow_unused=True
            )
            return tuple(
                column.new_zeros(call.shape) if g is None else g
                for g, call in zip(gradients, calls, strict=True)
            )

        found = iter(vectorised(backward, columns.movedim(-1, 0).contiguous()))
        return {name: [next(found) for _ in c] for name, c in self.calls.items()}
