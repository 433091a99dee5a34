"""Features: the inputs of a network's last layers, as one vector per sample.

Features are recorded during forward passes that are needed for other results. The last
layers may be of any type, and their weights need not be selected.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from sklaplace.core.trees import Batch, leaves
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.subsets import ending_layers
from sklaplace.networks.forward import Forward, at_least_single

_CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d


def feature_layers(
    forward: Forward, x: Batch, layout: Layout, subset: object
) -> list[str]:
    """Return the names of the last layers with parameters, or [] if unknown.

    ``layout`` is the layout of the ``subset`` of weights; ``x`` is a small batch. If
    possible, the layers are read from the layout. Otherwise, `ending_layers` searches
    the autograd graph, which is slower. This search needs the names of all layers that
    the network calls. If all weights are selected, the layout has these names.
    """
    all_have_layers = all(block.layer for block in layout.blocks)
    if subset == "last_layer" and all_have_layers:
        return layout.layers
    called = layout.layers if subset == "all" and all_have_layers else None
    try:
        return ending_layers(forward, x, called)
    except (RuntimeError, ValueError):  # no graph, or no parameters
        return []


class FeatureRecorder(ExitStack):
    """Context manager that records features during forward passes.

    Parameters
    ----------
    forward : Forward
        The network, inside ``forward.frozen()``.
    layers : sequence of str
        Names of the network's last layers.
    keeps_graph : bool
        Whether the features stay attached to the autograd graph of the inputs.

    Attributes
    ----------
    outputs : Tensor of shape (b, c)
        Outputs of the pass.

    Notes
    -----
    Only the first pass after each call of `take` is recorded, which is the pass over
    the whole batch. Later passes, over single samples or inside ``torch.func``
    transforms, are ignored.
    """

    outputs: Tensor

    def __init__(
        self, forward: Forward, layers: Sequence[str], keeps_graph: bool = False
    ) -> None:
        super().__init__()
        self._keeps_graph = keeps_graph
        self._is_complete = False
        self._inputs: dict[str, list[Tensor | None]] = {name: [] for name in layers}
        # layer and input of each recorded call
        self._recorded: list[tuple[str, Tensor]] = []
        for name in layers:
            # before the layer runs, since it may modify its input in place
            layer = forward.module.get_submodule(name)
            hook = partial(self._record, name)
            self.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
        # the end of the first pass over the whole network
        self.enter_context(forward.register_forward_hook(self._complete))

    def _record(
        self, name: str, layer: nn.Module, args: object, kwargs: object
    ) -> None:
        """Record the mean input of a call, unless another layer has the same input.

        None is recorded if the call has no real-valued input.
        """
        if self._is_complete:
            return
        x = _first_real(args, kwargs)
        if x is None:
            self._inputs[name].append(None)
        elif not any(name != n and _is_same(x, y) for n, y in self._recorded):
            # keep the input, so that no later input reuses its memory
            self._recorded.append((name, x))
            x = x if self._keeps_graph else x.detach()
            self._inputs[name].append(_mean_over_positions(layer, x))

    def _complete(self, _forward: Forward, _args: object, outputs: Tensor) -> None:
        if not self._is_complete:
            self._is_complete, self.outputs = True, outputs.detach()

    def take(self, n_samples: int) -> Tensor | None:
        """Return the features (b, i) of b samples, and forget them.

        Return None if there are no features, if the inputs of a call cannot be divided
        among the samples, or if the calls of a layer differ in shape. Features are
        averaged over positions and over calls of a layer. The features of several
        layers are concatenated. An input shared by several layers is included once, so
        some layers may have no recorded input.
        """
        inputs = self._inputs
        # record the next pass
        self._inputs, self._is_complete = {name: [] for name in inputs}, False
        self._recorded = []
        features: list[Tensor] = []
        for calls in inputs.values():
            means = [_by_sample(call, n_samples) for call in calls]
            matching = [mean for mean in means if mean is not None]
            has_mismatch = len(matching) < len(means)
            if has_mismatch or len({mean.shape for mean in matching}) > 1:
                return None
            if len(matching) == 1:
                features.append(matching[0])
            elif matching:
                features.append(torch.stack(matching).mean(0))
        return torch.cat(features, 1) if features else None


def _first_real(args: object, kwargs: object) -> Tensor | None:
    """Return the first real-valued argument with at least two axes."""
    tensors = (v for v in leaves((args, kwargs)) if isinstance(v, Tensor))
    return next((v for v in tensors if v.is_floating_point() and v.ndim > 1), None)


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are views of the same memory."""
    same_layout = x.shape == y.shape and x.stride() == y.stride()
    return same_layout and x.data_ptr() == y.data_ptr()


def _mean_over_positions(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the mean of a layer's inputs over positions, (b, i), as a copy.

    The network may later modify the inputs in place.
    """
    x = at_least_single(x)
    if isinstance(layer, _CONVOLUTIONS):
        return x.flatten(2).mean(2)
    if x.ndim == 2:
        return x.clone()
    return x.reshape(len(x), -1, x.shape[-1]).mean(1)


def _by_sample(x: Tensor | None, n_samples: int) -> Tensor | None:
    """Return the mean (b, i) of each sample's consecutive rows.

    Return None without an input, or if the rows cannot be divided among the samples.
    """
    if x is None or not len(x) or len(x) % n_samples:
        return None
    if len(x) == n_samples:
        return x
    return x.reshape(n_samples, -1, x.shape[-1]).mean(1)
