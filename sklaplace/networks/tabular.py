"""TabularNetwork: the module of the default networks, one hidden layer for tables.

With standardised inputs ``z = (x - center) / scale / sqrt(features)`` it is one tanh
layer beside a linear path, followed by one linear head,

    f(x) = B [gain / sqrt(H) * tanh(A z + a), z] + b.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Array = NDArray[np.float64]

# Enough for tables of a few thousand samples. 64 units predicted no better and needed
# more iterations for the same fit.
HIDDEN_UNITS = 32

# tanh has a mean square of about 1/2 at initialisation, so that with this gain the
# hidden features have twice the variance of the linear ones: one common penalty is a
# suitable prior for both. A gain of 1 underfits, one of 4 overfits linear data.
HIDDEN_GAIN = 2.0

# Fraction of the hidden units that dropout sets to zero.
DROPOUT_RATE = 0.1


class TabularNetwork(nn.Module):
    """Standardise, one tanh layer beside a linear path, one linear head.

    All quantities that depend on the units of the data are buffers, so that the weights
    do not depend on them. The head is the last layer with weights; a fixed affine map
    to the units of the targets follows it.

    Parameters
    ----------
    center, scale : ndarray of shape (n_features,)
        Subtracted from the inputs, and divisor of the differences.
    n_outputs : int
        Number of outputs: logits or regression targets.
    target_center, target_scale : float or ndarray of shape (n_outputs,)
        Affine map after the head.
    hidden_units : int
        Width of the hidden layer.

    Notes
    -----
    A pass costs O(b (features + n_outputs) hidden_units + b features n_outputs). The
    weights are float64 and drawn from torch's global generator.
    """

    center: torch.Tensor
    scale: torch.Tensor
    target_center: torch.Tensor
    target_scale: torch.Tensor

    def __init__(
        self,
        center: Array,
        scale: Array,
        n_outputs: int,
        target_center: Array | float = 0.0,
        target_scale: Array | float = 1.0,
        hidden_units: int = HIDDEN_UNITS,
    ) -> None:
        super().__init__()
        buffers = {
            "center": center,
            "scale": scale,
            "target_center": np.full(n_outputs, target_center),
            "target_scale": np.full(n_outputs, target_scale),
        }
        for name, values in buffers.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64))
        n_features = len(center)
        self.hidden = nn.Linear(n_features, hidden_units, dtype=torch.float64)
        self.head = nn.Linear(hidden_units + n_features, n_outputs, dtype=torch.float64)
        nn.init.normal_(self.hidden.weight)
        nn.init.normal_(self.hidden.bias)
        # Training starts from a constant prediction; the random hidden weights break
        # the symmetry of the units.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def features(self, X: torch.Tensor) -> torch.Tensor:
        """Inputs of the head: hidden activations, then scaled inputs.

        Parameters
        ----------
        X : Tensor of shape (b, n_features)
            Inputs in their own units.

        Returns
        -------
        Tensor of shape (b, hidden_units + n_features)
            Initially the squares of the hidden activations of a sample sum to about
            two, the squares of its scaled inputs to about one.
        """
        z = (X - self.center) / self.scale / self.hidden.in_features**0.5
        gain = HIDDEN_GAIN / self.hidden.out_features**0.5
        return torch.cat([gain * torch.tanh(self.hidden(z)), z], dim=1)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Logits, or targets in their own units, (b, n_outputs)."""
        head: torch.Tensor = self.head(self.features(X))
        return self.target_center + self.target_scale * head

    def squared_norm(self) -> torch.Tensor:
        """Sum of squares of all weights but the head's bias, the base rate, ()."""
        penalised = (self.hidden.weight, self.hidden.bias, self.head.weight)
        return torch.stack([weight.square().sum() for weight in penalised]).sum()


class JointDropout(nn.Dropout):
    """Dropout with one mask for all samples of a batch.

    Each step of full-batch training then trains one smaller network, and neither the
    order of samples nor their repetition changes the result of the training.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Units (b, ...), some of them zero in training."""
        return x * super().forward(torch.ones_like(x[:1]))


class DropoutNetwork(TabularNetwork):
    """`TabularNetwork` with dropout of a fraction `DROPOUT_RATE` of the hidden units.

    Parameters
    ----------
    *args, **kwargs
        As for `TabularNetwork`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropout = JointDropout(DROPOUT_RATE)

    def features(self, X: torch.Tensor) -> torch.Tensor:
        """Inputs of the head, (b, hidden_units + n_features), after dropout."""
        features = super().features(X)
        hidden, linear = features.tensor_split([self.hidden.out_features], 1)
        return torch.cat([self.dropout(hidden), linear], 1)
