"""The default networks for noisy gradients: of drawn weights, or with dropout.

The same networks as in ``networks``, trained by many steps of Adam in place of L-BFGS,
which compares losses.
"""

from typing import Any

import torch
from skorch import NeuralNet, NeuralNetClassifier, NeuralNetRegressor
from torch import nn

from sklaplace.networks.default import (
    FULL_BATCH,
    PenalisedClassifier,
    PenalisedRegressor,
    TabularNetwork,
)
from sklaplace.networks.descent import ManySteps

# Noisy gradients, of drawn weights or of units left out, need more and smaller steps.
NOISY_STEPS, NOISY_RATE = 500, 0.05

# Share of the hidden units that are left out at random.
DROPOUT_RATE = 0.1


class JointDropout(nn.Dropout):
    """Dropout that leaves the same units of all rows out.

    Each step of full-batch training is then that of one smaller network, and neither
    the order of rows nor their repetition changes what is learned.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Units (b, ...), some of them zero in training."""
        return x * super().forward(torch.ones_like(x[:1]))


class DropoutNetwork(TabularNetwork):
    """The same with dropout of hidden units, a share `DROPOUT_RATE` of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropout = JointDropout(DROPOUT_RATE)

    def features(self, X: torch.Tensor) -> torch.Tensor:
        """Inputs of the head, some of the hidden activations left out."""
        features = super().features(X)
        hidden, linear = features.tensor_split([self.hidden.out_features], 1)
        return torch.cat([self.dropout(hidden), linear], 1)


def is_penalised(net: Any) -> bool:
    """Whether a net is one of the default networks, whose loss has a penalty."""
    return isinstance(net, PenalisedClassifier | PenalisedRegressor)


def without_penalty(net: PenalisedClassifier | PenalisedRegressor) -> NeuralNet:
    """The same default network for noisy gradients, without weight decay.

    Parameters
    ----------
    net : PenalisedClassifier or PenalisedRegressor
        A default network.

    Returns
    -------
    NeuralNetClassifier or NeuralNetRegressor
        Unfitted; trained by `ManySteps` on all rows at once.
    """
    is_of_numbers = isinstance(net, PenalisedRegressor)
    kind = NeuralNetRegressor if is_of_numbers else NeuralNetClassifier
    settings = _of_module(net)
    return kind(**settings, **_noisy_training())


def with_dropout(
    net: PenalisedClassifier | PenalisedRegressor,
) -> PenalisedClassifier | PenalisedRegressor:
    """The same default network with dropout, and its penalty.

    Parameters
    ----------
    net : PenalisedClassifier or PenalisedRegressor
        A default network.

    Returns
    -------
    PenalisedClassifier or PenalisedRegressor
        Unfitted; trained by `ManySteps` on all rows at once.
    """
    settings = _of_module(net) | {"module": DropoutNetwork}
    return type(net)(**settings, penalty=net.penalty, **_noisy_training())


def _of_module(net: NeuralNet) -> dict[str, Any]:
    """Settings of a net that say what it is, not how it is trained."""
    return {
        name: value
        for name, value in net.get_params(deep=False).items()
        if name in ("module", "criterion") or name.startswith("module__")
    }


def _noisy_training() -> dict[str, Any]:
    """Settings of skorch for one silent full-batch run of Adam."""
    return {
        "optimizer": ManySteps,
        "optimizer__n_steps": NOISY_STEPS,
        "lr": NOISY_RATE,
        **FULL_BATCH,
    }
