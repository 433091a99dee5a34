"""Lazy modules, whose parameters have no shape before the first batch."""

from skorch import NeuralNet
from torch import nn
from torch.nn.parameter import is_lazy

from sklaplace.core.checks import listed
from sklaplace.networks.outputs import as_forward, raw_outputs


def initialise_lazy_modules(net: NeuralNet, x: object) -> None:
    """Run a few samples through an initialised skorch net that has lazy modules.

    The first training step would also initialise lazy modules. Other state, such as
    running means, does not change.
    """
    if _lazy_names(net.module_):
        with as_forward(net).frozen():
            raw_outputs(net, x)


def check_no_lazy_modules(net: NeuralNet) -> None:
    """Raise ValueError if a parameter or buffer of a network has no shape.

    Raises
    ------
    ValueError
        If a parameter or buffer has no shape.
    """
    if names := _lazy_names(net.module_):
        raise ValueError(
            f"The parameters {listed(names)} belong to lazy modules that have not seen "
            "a batch, so they have no sizes. Fit the net before you wrap it, "
            "or call net.infer on a few samples and load the weights."
        )


def _lazy_names(module: nn.Module) -> list[str]:
    """Return the names of parameters and buffers without a shape."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in named if is_lazy(tensor)]
