"""The net that is passed as ``estimator``: checked before any training."""

from typing import Any

from sklearn.frozen import FrozenEstimator
from skorch import NeuralNet
from torch import nn

from sklaplace.core import progress
from sklaplace.networks.net_checks import check_device, check_scripted, check_wrapper


def inner_net(estimator: Any) -> Any:
    """Return the skorch net inside a `FrozenEstimator`; None is the default net."""
    return estimator.estimator if is_frozen(estimator) else estimator


def is_frozen(estimator: Any) -> bool:
    """Whether the network keeps its weights."""
    return isinstance(estimator, FrozenEstimator)


def check_net(model: Any) -> None:
    """Raise for an ``estimator`` that is no skorch net, or cannot be used."""
    net = inner_net(model.estimator)
    if net is None:
        return
    if not isinstance(net, NeuralNet):
        raise TypeError(_no_net(net, model))
    if getattr(net, "_trimmed_for_prediction", False):
        raise ValueError(
            "The network was trimmed for prediction, so its criterion is gone and "
            "its outputs cannot be read. Pass the network as it was before "
            "trim_for_prediction()."
        )
    check_scripted(net)
    check_device(net)
    check_wrapper(net)
    if is_frozen(model.estimator) and not getattr(net, "initialized_", False):
        raise ValueError(
            "The frozen network has no weights yet. Fit it, or call "
            "net.initialize() and load its weights, before freezing it."
        )


def _no_net(given: Any, model: Any) -> str:
    """Return what is wrong with an object that is no skorch net, and what to pass."""
    example = model._targets_kind.example_net
    frozen, recipe = "", ""
    if _keeps_weights(model):
        frozen = "a FrozenEstimator around one, "
        recipe = (
            " To keep the weights of a trained module, pass it in place of its class, "
            "and sklearn.frozen.FrozenEstimator(net.initialize()) as estimator."
        )
    is_class = isinstance(given, type)
    kind = given if is_class else type(given)
    if is_class:
        module = kind.__name__ if issubclass(kind, nn.Module) else "Module"
        return (
            f"estimator is the class {kind.__name__}; it must be a skorch net, an "
            f"instance, not the class. Use {example.format(module)}, and arguments of "
            "the module as module__name=value."
        )
    if isinstance(given, nn.Module):
        return (
            f"estimator must be a skorch net; got {kind.__name__}, a torch module. Use "
            f"{example.format(kind.__name__)}, and arguments of the module as "
            f"module__name=value.{recipe}"
        )
    return (
        f"estimator must be a skorch net, {frozen}or None; "
        f"got {kind.__name__}. Wrap a torch module as {example.format('Module')}, and "
        "put preprocessing into a Pipeline around this estimator."
    )


def _keeps_weights(model: Any) -> bool:
    """Whether a frozen net is of use: an ensemble has new weights for each network."""
    return not hasattr(model, "n_estimators")


def note_new_weights(model: Any) -> None:
    """Print, if ``verbose``, that a net has weights which its clone does not get.

    A line rather than a warning: to compare a net with an estimator around it, which
    trains a clone, is right as well. Searches and pipelines of scikit-learn clone the
    net before, so that it has no weights there.
    """
    net = model.estimator
    if not model.verbose or net is None or is_frozen(net):
        return
    if not getattr(net, "initialized_", False) or not _keeps_weights(model):
        return
    anew = "anew, from other weights"
    if isinstance(net.module, nn.Module):
        anew = "further, from the weights of its module"
    progress.line(
        f"estimator is a net with weights, and fit trains a copy of it {anew}. To use "
        "the weights that it has, pass sklearn.frozen.FrozenEstimator(net).",
    )
