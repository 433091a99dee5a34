"""Record layer inputs, and compute gradients with respect to layer outputs.

One forward pass records the input of each call of a layer and the *gradient edge* of
its output. One batched backward pass from the outputs ``f`` (b, c) then computes
``∂(Sᵀf)/∂z`` for the output ``z`` of every call, but no gradients of weights.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sklaplace.core.budget import BUDGET
from sklaplace.core.linalg import agree, all_finite
from sklaplace.core.trees import Batch, leaves, tree_rows
from sklaplace.curvature.derivatives import DEPENDENT_SAMPLES, vectorised
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.uses import count_uses, unseen_use
from sklaplace.networks.forward import Forward, requiring_grad

# arguments of a layer
Args: TypeAlias = tuple[Tensor, ...]
Kwargs: TypeAlias = dict[str, Tensor]
# copies of a column's gradients in memory at once: kept and backpropagated
BACKWARD_COPIES = 2
# maximum number of samples of a batch that pass through the network again
MAX_COMPARED = 8


def first_input(args: Args, kwargs: Kwargs) -> Tensor:
    """Return the input of a layer from the arguments of its hooks."""
    return args[0] if args else kwargs["input"]


def n_samples(x: Batch) -> int:
    """Return the number b of samples of a batch."""
    return len(next(leaves(x)))


@dataclass(frozen=True)
class _Call:
    """Input of one call of a layer, and the gradient edge and shape of its output.

    An input with a sample axis has at least ``n_axes`` axes, as many as the weight.
    """

    x: Tensor
    n_axes: int
    edge: GradientEdge
    shape: torch.Size

    @property
    def n_samples(self) -> int:
        """Length of the first axis, or one if the input has no sample axis."""
        return len(self.x) if self.x.ndim >= self.n_axes else 1


class MixedSamplesError(RuntimeError):
    """Error for layer inputs that do not contain the samples of the batch in order."""


def _samples_to_check(b: int) -> Tensor:
    """Return indices of every second sample, or of 8 samples if the batch is large.

    The order is reversed to detect networks that sort their samples.
    """
    n = min(MAX_COMPARED, (b + 1) // 2)
    # n evenly spaced indices, from the last sample down
    return b - 1 - b * torch.arange(n) // n


def check_independent(forward: Forward, x: Batch, f: Tensor, rounding: float) -> Tensor:
    """Raise ValueError if outputs (b, c) depend on the other samples of the batch.

    The outputs of some samples are compared with those in a smaller batch. Return the
    indices of these samples. ``rounding`` is the relative rounding error of the
    outputs; see `agree`.
    """
    compared = _samples_to_check(len(f))
    with torch.no_grad():
        outputs = forward(tree_rows(x, compared))
    if not agree(outputs, f[compared], rounding):
        raise ValueError(DEPENDENT_SAMPLES)
    return compared


def _agree_each(actual: list[Tensor], expected: list[Tensor], precision: float) -> bool:
    """Return whether two lists have the same length and equal tensors."""
    if len(actual) != len(expected):
        return False
    return all(agree(a, e, precision) for a, e in zip(actual, expected, strict=True))


def layer_parameters(module: nn.Module, layout: Layout) -> dict[str, nn.Parameter]:
    """Return the parameters with factored rows whose uses can be counted, by name."""
    if not layout.counts_uses:
        return {}
    named = dict(module.named_parameters())
    return {b.name: named[b.name] for b in layout.blocks if b.layer is not None}


@contextmanager
def only_known_layers(
    module: nn.Module, known_layers: Collection[str] | None
) -> Iterator[None]:
    """Raise ValueError if other layers with parameters are called; None allows all.

    Only modules with parameters of their own count as layers.
    """

    def refuse(name: str, _layer: nn.Module, _args: object) -> None:
        raise unseen_use(name)

    with ExitStack() as hooks:
        for name, layer in module.named_modules():
            is_new = known_layers is not None and name not in known_layers
            if is_new and list(layer.parameters(recurse=False)):
                hook = layer.register_forward_pre_hook(partial(refuse, name))
                hooks.enter_context(hook)
        yield


class CallRecorder(ExitStack):
    """Context manager that records the calls of layers during one forward pass.

    The *gradient edge* of each layer's output is recorded instead of the output itself,
    because an in-place activation changes the tensor but not the edge.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        super().__init__()
        # inputs of each layer in the smaller batch of `check`; None before the check
        self._inputs_of_subset: dict[str, list[Tensor]] | None = None
        # empty if the uses of parameters are not counted
        self._layout, self._parameters = layout, layer_parameters(module, layout)
        self.calls: dict[str, list[_Call]] = {name: [] for name in layout.layers}
        # parameters are then leaves of the graph, and `check` counts their uses
        self.enter_context(requiring_grad(self._parameters.values()))
        self.enter_context(only_known_layers(module, layout.called))
        for name in layout.layers:
            layer, record = module.get_submodule(name), partial(self._record_call, name)
            # `_prepare_input` sees each call's input, and `_record_call` its output
            prepare = partial(self._prepare_input, name)
            hook = layer.register_forward_pre_hook(prepare, with_kwargs=True)
            self.enter_context(hook)
            # before other hooks, which may change the output
            hook = layer.register_forward_hook(record, prepend=True, with_kwargs=True)
            self.enter_context(hook)

    def _prepare_input(
        self, name: str, _layer: nn.Module, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs] | None:
        """Make a layer's input require gradients, and return the layer's arguments.

        Otherwise, the output of the first selected layer would have no edge, since
        parameters may not require gradients. Detaching the input copies nothing and
        allows in-place activations. During `check`, the input is recorded instead and
        passes unchanged.
        """
        x = first_input(args, kwargs)
        if self._inputs_of_subset is not None:
            self._inputs_of_subset[name].append(x.detach())
            return None
        return (x if x.requires_grad else x.detach().requires_grad_(),), {}

    def _record_call(
        self, name: str, layer: nn.Module, args: Args, _: Kwargs, output: Tensor
    ) -> Tensor:
        """Record the input of a layer's call, and the gradient edge of its output.

        Return the output, or a copy that replaces it in the network.
        """
        if self._inputs_of_subset is not None:
            return output
        if output._is_view():
            # an in-place activation would remove the edge of a view from the graph
            output = output.clone()
        assert isinstance(layer.weight, Tensor)
        # `_prepare_input` has made the input the only argument
        edge, n_axes = get_gradient_edge(output), layer.weight.ndim
        self.calls[name].append(_Call(args[0].detach(), n_axes, edge, output.shape))
        return output

    @property
    def _all_calls(self) -> list[_Call]:
        return [call for calls in self.calls.values() for call in calls]

    def check(self, forward: Forward, x: Batch, f: Tensor, rounding: float) -> None:
        """Check that layer inputs and outputs are the same in a smaller batch.

        Also check that parameters are not used outside the recorded calls, and that the
        inputs of all calls have one entry per sample.

        Parameters
        ----------
        forward : Forward
            The recorded network.
        x : batch
            The samples.
        f : Tensor of shape (b, c)
            Outputs of the samples, with their graph.
        rounding : float
            Relative rounding error of the layers' outputs.

        Raises
        ------
        MixedSamplesError
            If the network reorders samples, or calls a layer only for some samples.
        ValueError
            If outputs depend on the other samples of the batch, or if some samples use
            a layer in a way not seen when the layout was inferred.

        Notes
        -----
        The cost is one forward pass over half the batch (at most 8 samples).
        """
        # a parameter with more uses in the graph than its layer has calls is used in
        # another way
        b, n_uses = n_samples(x), count_uses([f])
        for name, parameter in self._parameters.items():
            layer = name.rpartition(".")[0]
            if n_uses[parameter] > len(self.calls[layer]):
                raise unseen_use(layer)
        f = f.detach()
        if len(f) != b:
            raise ValueError(DEPENDENT_SAMPLES)
        # a single sample cannot be mixed with others; outputs that are not finite never
        # agree, and get an error of their own later
        if b == 1 or not all_finite(f):
            return
        if any(call.n_samples != b for call in self._all_calls):
            raise MixedSamplesError
        # from now on, the hooks record inputs here instead of calls
        self._inputs_of_subset = {name: [] for name in self.calls}
        compared = check_independent(forward, x, f, rounding)
        for name, calls in self.calls.items():
            inputs = [call.x[compared] for call in calls]
            if not _agree_each(self._inputs_of_subset[name], inputs, rounding):
                raise MixedSamplesError

    def columns_at_once(self, columns: Tensor) -> int:
        """Return how many columns of ``S`` (b, c, k) fit into memory, at least one.

        Each column needs gradients with respect to the outputs of all recorded calls.
        """
        elements = sum(call.shape.numel() for call in self._all_calls)
        per_column = max(1, elements) * columns.element_size() * BACKWARD_COPIES
        return max(1, BUDGET // per_column)

    def gradients(self, f: Tensor, columns: Tensor) -> dict[str, list[Tensor]]:
        """Compute gradients (k, b, ...) of ``Sᵀf`` at each call, for ``S`` (b, c, k).

        ``f`` are the outputs with their graph. The gradients with respect to the output
        of each call are returned by layer, in the order of the calls. They are zero for
        calls that do not affect the outputs.
        """
        calls = self._all_calls
        edges = [call.edge for call in calls]
        if not calls:
            return {name: [] for name in self.calls}

        def backward(column: Tensor) -> tuple[Tensor, ...]:
            """Return the gradients of all calls for one column of ``S``, (b, c)."""
            # the graph is kept for the other columns
            gradients = torch.autograd.grad(
                f, edges, column, retain_graph=True, allow_unused=True
            )
            # layers may have a lower or higher precision than the outputs
            return tuple(
                column.new_zeros(call.shape) if g is None else g.to(column.dtype)
                for g, call in zip(gradients, calls, strict=True)
            )

        # one tensor per call, in the order of `_all_calls`
        by_call = iter(vectorised(backward, columns.movedim(-1, 0).contiguous()))
        return {
            name: [next(by_call) for _ in calls_of_layer]
            for name, calls_of_layer in self.calls.items()
        }
