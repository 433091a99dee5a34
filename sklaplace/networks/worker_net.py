"""WorkerNet and WorkerNetwork: what is sent to other processes, to be evaluated there.

skorch pickles modules by plain pickle, which does not find classes of a notebook or a
script; joblib pickles those by value, if it gets to see them.
"""

from dataclasses import dataclass, replace
from typing import Any

from sklaplace.networks.trained import TrainedNetwork

# What training alone uses: a validation set, a log, an open file.
_OF_TRAINING = {"callbacks": None, "train_split": None}
_FITTED_BY_TRAINING = {"callbacks_", "history_", "optimizer_"}


@dataclass(frozen=True)
class WorkerNet:
    """A net that is pickled by its attributes.

    Attributes
    ----------
    net : skorch.NeuralNet
        The net.
    """

    net: Any

    def __reduce__(self) -> Any:
        return _with_attributes, (type(self.net), vars(self.net))


def _with_attributes(kind: type, attributes: dict[str, Any]) -> WorkerNet:
    """Return a net of a class with the given attributes."""
    net: Any = object.__new__(kind)
    vars(net).update(attributes)
    return WorkerNet(net)


@dataclass(frozen=True)
class WorkerNetwork:
    """A trained network that is pickled without samples, and for evaluation alone.

    Attributes
    ----------
    network : TrainedNetwork
        The network.
    """

    network: TrainedNetwork

    def __reduce__(self) -> Any:
        net = self.network.net
        kept = {k: v for k, v in vars(net).items() if k not in _FITTED_BY_TRAINING}
        bare = _with_attributes(type(net), kept | _OF_TRAINING)
        network = replace(self.network, net=bare, train=None, held_out=None)
        return _unpacked, (network,)


def _unpacked(network: TrainedNetwork) -> WorkerNetwork:
    return WorkerNetwork(replace(network, net=network.net.net))
