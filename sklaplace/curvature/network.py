"""Specification of a network, inferred from a few samples.

A forward pass and the Jacobian of these samples show what the outputs mean, which
weights are selected, and how much memory the Jacobian needs per sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from skorch import NeuralNet
from torch import Tensor

from sklaplace.core.budget import CACHE, require_bytes
from sklaplace.core.trees import Batch, tree_rows
from sklaplace.curvature.features import feature_layers
from sklaplace.curvature.jacobian import Jacobian, backpropagate
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.recorder import BACKWARD_COPIES, check_independent
from sklaplace.curvature.shared import MAX_DENSE_OUTPUTS, IdentityMap
from sklaplace.curvature.subsets import common_layer_jacobian, select
from sklaplace.curvature.verification import check_jacobian_bytes, probe
from sklaplace.networks import outputs

# copies of a layer's inputs in memory at once: original and rotated
INPUT_COPIES = 2
# number of samples whose full Jacobian is computed, and minimum number to verify
N_DIFFERENTIATED = 3
# Batch size per verified sample. Large networks have smaller batches, and are therefore
# verified on fewer samples.
BATCH_PER_VERIFIED = 16
# minimum batch size for many outputs, because each batch reads all weights once
MIN_BATCH_FOR_MANY_OUTPUTS = 128


@dataclass(frozen=True, kw_only=True)
class NetworkSpec(outputs.OutputSpec):
    """Information about a network that the Laplace approximation needs.

    Attributes
    ----------
    layout : Layout
        The selected parameters.
    head_map : Tensor of shape (c, o), IdentityMap or None
        Jacobian of the network's outputs with respect to the last layer's outputs, if
        all samples share it and the loss is convex in the outputs; None otherwise.
    feature_layers : list of str
        Names of the last layers with parameters; their inputs are the features.
    """

    layout: Layout
    head_map: Tensor | IdentityMap | None
    feature_layers: list[str] = field(default_factory=list)

    def batch_size(
        self, *, row_elements: int = 0, with_covariance: bool = False
    ) -> int:
        """Return the number of samples that fit into the memory budget.

        See `OutputSpec`. For a last layer with many outputs, batches are larger and may
        need as much memory as the layer's weights. All weights are read for each batch,
        which takes longer than the products for a few samples. Arrays of outputs stay
        below 32 MiB, since larger arrays would be returned to the operating system
        after each batch.
        """
        n = super().batch_size(
            row_elements=row_elements, with_covariance=with_covariance
        )
        has_many_outputs = self.n_outputs > MAX_DENSE_OUTPUTS
        if self.layout.head is None or not has_many_outputs or with_covariance:
            return n
        row_bytes = self.row_bytes + 8 * row_elements
        # samples whose float64 outputs fit into 32 MiB, and samples that need as much
        # memory as the layer's weights in float64; a float64 number takes 8 bytes
        most = CACHE // (8 * self.n_outputs), 8 * self.layout.n_parameters // row_bytes
        return max(n, min(MIN_BATCH_FOR_MANY_OUTPUTS, *most))


def infer_network_spec(
    net: NeuralNet,
    x: Batch,
    subset: str | Sequence[str],
    *expected: Any,
    options: Mapping[str, Any] | None = None,
    **others: Any,
) -> NetworkSpec:
    """Infer what the outputs of a net mean and how to differentiate them.

    The meaning of the outputs is inferred first. The weights are then selected, and
    their Jacobian rows are verified. Finally, the Jacobian of three samples shows how
    much memory a sample needs.

    Parameters
    ----------
    net, x, *expected, **others
        Arguments of `measure_outputs`: the net, a few samples, and what the estimator
        expects of the outputs.
    subset : str or list of str
        Key of ``SUBSETS``, or names of parameters or modules.
    options : mapping, optional
        Options of the subset.

    Returns
    -------
    NetworkSpec

    Raises
    ------
    ValueError
        If the criterion, outputs or layers are not supported.
    """
    bare = outputs.as_forward(net)
    with bare.frozen():
        # `raw` are the module's outputs, `sizes` the output elements of each module
        meaning, raw, sizes = outputs.measure_outputs(net, x, *expected, **others)
        # from here on, outputs are the likelihood's parameters, such as logits
        forward = bare.with_output_map(meaning.output_map, meaning.logit_layer)
        # large networks have small batches, and are verified on fewer samples
        n_verified = max(N_DIFFERENTIATED, meaning.batch_size() // BATCH_PER_VERIFIED)
        layout = select(forward, tree_rows(x, slice(n_verified)), subset, options or {})
        samples = tree_rows(x, slice(N_DIFFERENTIATED))
        # sizes for these samples instead of all
        n_samples = min(N_DIFFERENTIATED, len(raw))
        sizes = {name: n * n_samples // len(raw) for name, n in sizes.items()}
        _check_map_bytes(raw[:N_DIFFERENTIATED], sizes, layout)
        f, jacobian = backpropagate(forward, samples, layout)
        row_bytes = _row_bytes(f, sizes, layout, jacobian, meaning.likelihood.n_blocks)
        last_layers = feature_layers(forward, samples, layout, subset)
    head_map = None if layout.head is None else layout.head.matrix
    # `head_map` maps the last layer's outputs to the network's outputs. It serves to
    # refit the last layer by Newton steps, for losses that are convex in the outputs.
    if not meaning.likelihood.is_convex:
        head_map = None
    # without a head, all samples may still have the same Jacobian
    elif subset == "last_layer" and head_map is None:
        head_map = common_layer_jacobian(layout, jacobian)
    layout = replace(layout, is_separable=_is_separable(layout, head_map))
    fields = vars(meaning) | {"row_bytes": row_bytes}
    return NetworkSpec(
        **fields, layout=layout, head_map=head_map, feature_layers=last_layers
    )


def check_batch(net: NeuralNet, x: Batch, spec: NetworkSpec) -> None:
    """Raise ValueError if a batch uses layers in new ways, or if its samples interact.

    `backpropagate` raises an error for new uses of layers. For this purpose, the rows
    of one combination of the outputs, `probe`, are enough.
    """
    forward = outputs.as_forward(net, spec)
    with forward.frozen():
        f = backpropagate(forward, x, spec.layout, probe)[0]
        check_independent(forward, x, f, spec.layout.rounding)


def _is_separable(layout: Layout, head_map: Tensor | IdentityMap | None) -> bool:
    """Return whether each last-layer output affects only one network output.

    This is False for single weights, whose number differs between outputs.
    """
    if head_map is None or any(block.indices is not None for block in layout.blocks):
        return False
    if isinstance(head_map, IdentityMap):
        return True
    is_square = head_map.shape[0] == head_map.shape[1]
    return is_square and torch.equal(head_map, head_map.diagonal().diag())


def _check_map_bytes(raw: Tensor, sizes: dict[str, int], layout: Layout) -> None:
    """Raise ValueError if the Jacobian of a few samples needs too much memory.

    ``raw`` contains the module's outputs for these samples. ``sizes`` contains the
    number of output elements of each module, by name. Outputs (b, c, ...) with three or
    more axes are maps, such as one class per pixel. For other outputs, only networks
    without a `Head` are checked, since the rows of a head need little memory.
    """
    if raw.ndim < 3:
        if layout.head is None:
            check_jacobian_bytes(raw.reshape(len(raw), -1))
        return
    c = raw[0].numel()
    gradients = sum(sizes.get(name, 0) for name in layout.layers)
    # three arrays (b, c, c), as in `check_jacobian_bytes`, and the gradients of each
    # output; then the rows of the largest parameter tensor for one sample
    elements = 3 * len(raw) * c**2 + BACKWARD_COPIES * c * gradients
    elements += c * max(block.size for block in layout.blocks)
    require_bytes(
        elements * raw.element_size(),
        raw.device,
        f"the Jacobian of {len(raw)} samples with {c:,} outputs each, of shape "
        f"{tuple(raw.shape[1:])},",
        "use smaller maps (crops, or a coarser grid), or fewer layers: "
        "subset_of_weights accepts names",
    )


def _row_bytes(
    f: Tensor, sizes: dict[str, int], layout: Layout, jacobian: Jacobian, n_blocks: int
) -> int:
    """Return the bytes per sample needed to compute and use the Jacobian.

    The number is measured on the outputs ``f`` (b, c) and the Jacobian of a few
    samples. ``sizes`` contains the number of output elements of each module, by name.
    ``n_blocks`` is the number of groups of outputs with separate softmax functions.
    """
    n_samples, c = f.shape
    tensors = jacobian.tensors()
    inputs = sum(block.a.numel() for block in tensors if block.a is not None)
    # layer inputs, and all arrays made from the outputs
    elements = INPUT_COPIES * inputs // n_samples + outputs.OUTPUT_COPIES * c
    # of all layers' outputs, a forward pass alone keeps the input and output of one
    # layer; with a backward pass, all are kept, and gradients are added
    if layout.head is not None:
        elements += 2 * max(sizes.values(), default=0) // n_samples
    else:
        gradients = sum(block.g.numel() for block in tensors)
        elements += (sum(sizes.values()) + BACKWARD_COPIES * gradients) // n_samples
    # S of several groups is dense, although zero between groups; three arrays (c, c),
    # as in `check_jacobian_bytes`
    if n_blocks > 1:
        elements += 3 * c**2
    return int(elements) * f.element_size()
