"""Residuals of held-out samples, and the predictions that a noise model depends on."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sklaplace.core.trees import Batch

Array = NDArray[np.float64]

# Number of groups of residuals. Functions for a group are fitted to the other groups.
N_GROUPS = 5
# With more inputs than this, a noise model ignores all inputs.
MOST_INPUTS = 1000


@dataclass(frozen=True)
class Predictions:
    """Predictions from which a noise model computes the noise.

    Attributes
    ----------
    features : Tensor of shape (n, i)
        Features from the network. If the network has no features, i is 0.
    inputs : Tensor of shape (n, p)
        Inputs of the network. Unless the inputs are a single table, p is 0.
    mean, variance : Tensor of shape (n, c)
        Moments of the noise-free outputs.
    """

    features: Tensor
    inputs: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def of(
        cls, features: Tensor | None, x: Batch, mean: Tensor, variance: Tensor
    ) -> "Predictions":
        """Return the predictions of a batch."""
        none = mean[:, :0].double()
        inputs = x if isinstance(x, Tensor) and x.ndim == 2 else none
        features = none if features is None else features
        return cls(
            features=none if features.shape[1] > MOST_INPUTS else features.double(),
            inputs=none if inputs.shape[1] > MOST_INPUTS else inputs.double(),
            mean=mean.double(),
            variance=variance.double(),
        )


@dataclass(frozen=True)
class Residuals:
    """Residuals of held-out samples.

    Attributes
    ----------
    predictions : Predictions
        Moments predicted by networks that were not trained on the samples.
    values : ndarray of shape (n, c)
        Targets minus means.
    weights : ndarray of shape (n,)
        Positive sample weights.
    keys : ndarray of shape (n,)
        Hashes of the groups or, without groups, of the inputs.
    """

    predictions: Predictions
    values: Array
    weights: Array
    keys: NDArray[np.integer]

    @property
    def group(self) -> NDArray[np.integer]:
        """Group (n,) of each residual, below `N_GROUPS`; equal keys share a group."""
        return np.unique(self.keys, return_inverse=True)[1] % N_GROUPS
