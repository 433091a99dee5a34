"""Lazy modules, whose parameters have no sizes before the first batch."""

from skorch import NeuralNet
from torch import nn
from torch.nn.parameter import is_lazy

from sklaplace.core.checks import listed
from sklaplace.networks.outputs import as_forward


def initialise_lazy_modules(net: NeuralNet, x: object) -> None:
    """Run an initialised skorch net on a few samples if it has lazy modules.

    As its first training step would do. Other state, such as running means, stays.
    """
    if _lazy_names(net.module_):
        forward = as_forward(net)
        with forward.frozen():
            forward.returned(x)


def check_no_lazy_modules(net: NeuralNet) -> None:
    """Refuse a network with parameters that have no sizes.

    Raises
    ------
    ValueError
        If there are some.
    """
    if names := _lazy_names(net.module_):
        raise ValueError(
            f"The parameters {listed(names)} belong to lazy modules that have not seen "
            "a batch, so that they have no sizes. Fit the net, or call net.infer on a "
            "few samples and load its weights, before FrozenEstimator(net)."
        )


def _lazy_names(module: nn.Module) -> list[str]:
    """Names of parameters and buffers without sizes."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in named if is_lazy(tensor)]
