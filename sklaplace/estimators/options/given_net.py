"""Checks of the net passed as ``estimator``, before any training."""

from typing import Any

from sklearn.frozen import FrozenEstimator
from skorch import NeuralNet
from torch import nn

from sklaplace.core.checks import warn_user
from sklaplace.networks.net_checks import (
    check_device,
    check_scripted,
    check_wrapper,
    is_untouched,
)


def inner_net(estimator: Any) -> Any:
    """Return the net without its `FrozenEstimator`, or None for the default net."""
    return estimator.estimator if is_frozen(estimator) else estimator


def is_frozen(estimator: Any) -> bool:
    """Return whether the network is frozen and keeps its weights."""
    return isinstance(estimator, FrozenEstimator)


def check_net(estimator: Any, example: str) -> None:
    """Raise an error if ``estimator`` is not a skorch net or cannot be used.

    Warn if a frozen net seems never trained.

    Parameters
    ----------
    estimator : object
        Value of the constructor parameter.
    example : str
        Code that creates a skorch net, for messages. ``{}`` is replaced by the torch
        module.
    """
    net = inner_net(estimator)
    if net is None:
        return
    freezing = (
        "To keep the weights of a module, pass the module itself, not its class: "
        f"FrozenEstimator({example.format('module')}.initialize())."
    )
    if is_frozen(estimator) and isinstance(net, nn.Module):
        raise TypeError(f"The frozen estimator is a torch module. {freezing}")
    if not isinstance(net, NeuralNet):
        kind = net if isinstance(net, type) else type(net)  # users pass classes, too
        # how to name what was passed, and the module in the example
        given = f"the class {kind.__name__}" if kind is net else kind.__name__
        module = kind.__name__ if issubclass(kind, nn.Module) else "Module"
        raise TypeError(
            "estimator must be a skorch net (an instance, not the class), a "
            f"FrozenEstimator around one, or None; got {given}. Wrap a torch module as "
            f"{example.format(module)}, with its arguments as module__name=value, and "
            "put preprocessing into a Pipeline around this estimator."
        )
    if getattr(net, "_trimmed_for_prediction", False):
        raise ValueError(
            "The network was trimmed for prediction, which deletes its criterion. "
            "Pass the network as it was before trim_for_prediction()."
        )
    check_scripted(net)
    check_device(net)
    check_wrapper(net)
    if is_frozen(estimator) and not getattr(net, "initialized_", False):
        raise ValueError(
            f"The frozen network has no weights yet. Fit it first. {freezing}"
        )
    if is_frozen(estimator) and is_untouched(net):
        warn_user(
            "The frozen network has no history, and seems never trained. Fit it or "
            f"load weights first. {freezing}"
        )
