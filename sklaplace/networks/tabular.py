"""TabularNetwork: the module of the default networks, with one hidden layer.

For standardised inputs ``z = (x - center) / scale / sqrt(features)``, a tanh layer and
a parallel linear path feed one linear head,

    f(x) = B [gain / sqrt(H) * tanh(A z + a), z] + b.

``z`` may include piecewise linear functions of single inputs, which are standardised
too.
"""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

Array = NDArray[np.float64]

# Enough for tables of a few hundred samples. Networks with 64 units did not predict
# better, and needed more iterations to fit equally well.
HIDDEN_UNITS = 32

# At initialisation, tanh has a mean square of about 1/2. With this gain, the hidden
# features have twice the variance of the linear features, so that one penalty suits
# both. A gain of 1 underfits, and a gain of 4 overfits linear data.
HIDDEN_GAIN = 2.0

# Fraction of the hidden units that dropout sets to zero.
DROPOUT_RATE = 0.1


def with_pieces(z: torch.Tensor, pieces: torch.Tensor) -> torch.Tensor:
    """Append m pieces to inputs (b, n_features), and return (b, n_features + m).

    A piece rises linearly over an interval of one input, and is constant elsewhere.

    Parameters
    ----------
    z : Tensor of shape (b, n_features)
        Standardised inputs.
    pieces : Tensor of shape (m, 5)
        For each piece, the index of its input, the start and length of its interval,
        and the mean and scale of its values, which range from 0 to 1.
    """
    index, start, length, mean, scale = pieces.T
    if not len(index):
        return z
    values = ((z[:, index.long()] - start) / length).clamp(0, 1)
    return torch.cat([z, (values - mean) / scale], dim=1)


class TabularNetwork(nn.Module):
    """Standardisation, one tanh layer with a parallel linear path, and a linear head.

    All quantities that depend on the units of the data are buffers, so the weights do
    not depend on the units. The head is the last layer with weights. A fixed affine map
    then converts outputs to the units of the targets.

    Parameters
    ----------
    center, scale : ndarray of shape (n_features,)
        Offset and divisor that standardise the inputs.
    n_outputs : int
        Number of outputs, which are logits or regression targets.
    target_center, target_scale : float or ndarray of shape (n_outputs,)
        Affine map after the head.
    hidden_units : int
        Width of the hidden layer.
    pieces : ndarray of shape (m, 5) or None
        Additional inputs of the layers; see `with_pieces`. Pieces count as features.

    Notes
    -----
    A pass over b samples costs O(b (features + n_outputs) hidden_units + b features
    n_outputs). The weights are float64. torch's global generator initialises the
    weights.
    """

    center: torch.Tensor
    scale: torch.Tensor
    target_center: torch.Tensor
    target_scale: torch.Tensor
    pieces: torch.Tensor

    def __init__(
        self,
        center: Array,
        scale: Array,
        n_outputs: int,
        target_center: Array | float = 0.0,
        target_scale: Array | float = 1.0,
        hidden_units: int = HIDDEN_UNITS,
        pieces: Array | None = None,
    ) -> None:
        super().__init__()
        buffers = {
            "pieces": np.empty((0, 5)) if pieces is None else pieces,
            "center": center,
            "scale": scale,
            "target_center": np.full(n_outputs, target_center),
            "target_scale": np.full(n_outputs, target_scale),
        }
        for name, values in buffers.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64))
        n_features = len(center) + len(self.pieces)
        self.hidden = nn.Linear(n_features, hidden_units, dtype=torch.float64)
        self.head = nn.Linear(hidden_units + n_features, n_outputs, dtype=torch.float64)
        nn.init.normal_(self.hidden.weight)
        nn.init.normal_(self.hidden.bias)
        # Training starts from a constant prediction. Random hidden weights break the
        # symmetry between units.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def scaled_inputs(self, X: torch.Tensor) -> torch.Tensor:
        """Return the inputs ``z`` of the layers, (b, n_features + m).

        They do not depend on weights. The squared inputs of a sample sum to about one,
        so that the size of the hidden layer's inputs does not grow with their number.
        """
        z = with_pieces((X - self.center) / self.scale, self.pieces)
        return z / self.hidden.in_features**0.5

    def activations(self, z: torch.Tensor) -> torch.Tensor:
        """Return scaled activations (b, hidden_units).

        At initialisation, the squared activations of a sample sum to about two.
        """
        gain = HIDDEN_GAIN / self.hidden.out_features**0.5
        return gain * torch.tanh(self.hidden(z))

    def features(self, X: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the head: hidden activations, then scaled inputs.

        Parameters
        ----------
        X : Tensor of shape (b, n_features)
            Inputs in their original units.

        Returns
        -------
        Tensor of shape (b, hidden_units + n_features + m)
            Features.
        """
        z = self.scaled_inputs(X)
        return torch.cat([self.activations(z), z], dim=1)

    def forward(
        self, X: torch.Tensor | None = None, z: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits, or predictions in units of the targets, (b, n_outputs).

        In training, the scaled inputs ``z`` are computed once, and passed instead of
        ``X``. The head is then applied to the activations and to ``z`` separately,
        which avoids a copy of ``z``.
        """
        if z is None:
            outputs: torch.Tensor = self.head(self.features(cast(torch.Tensor, X)))
        else:
            n_hidden, weight = self.hidden.out_features, self.head.weight
            outputs = self.activations(z) @ weight[:, :n_hidden].T
            outputs = outputs + functional.linear(
                z, weight[:, n_hidden:], self.head.bias
            )
        return self.target_center + self.target_scale * outputs

    def squared_norm(self) -> torch.Tensor:
        """Return the sum of squares of all weights except the head's bias, ()."""
        penalised = (self.hidden.weight, self.hidden.bias, self.head.weight)
        return torch.stack([weight.square().sum() for weight in penalised]).sum()


class JointDropout(nn.Dropout):
    """Dropout with one mask for all samples of a batch.

    Each step of full-batch training therefore trains a single smaller network. The
    result does not depend on the order of samples or on repeated samples.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the units (b, ...), some of which are set to zero during training."""
        return x * super().forward(torch.ones_like(x[:1]))


class DropoutNetwork(TabularNetwork):
    """`TabularNetwork` with dropout of hidden units at rate `DROPOUT_RATE`.

    Parameters
    ----------
    *args, **kwargs
        Arguments of `TabularNetwork`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropout = JointDropout(DROPOUT_RATE)

    def activations(self, z: torch.Tensor) -> torch.Tensor:
        """Return scaled activations (b, hidden_units) after dropout."""
        kept: torch.Tensor = self.dropout(super().activations(z))
        return kept
