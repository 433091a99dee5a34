"""TrainedNetwork: a trained skorch net with its output specification and samples."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from skorch import NeuralNet

from sklaplace.data.dataset import Batches
from sklaplace.data.streams import Samples
from sklaplace.networks.forward import Forward
from sklaplace.networks.outputs import as_forward


@dataclass(frozen=True)
class TrainedNetwork:
    """Trained skorch net with its output specification and samples.

    Attributes
    ----------
    net : skorch.NeuralNet
        Trained net.
    spec : OutputSpec
        Specification of its outputs.
    train, held_out : Dataset or None
        Training samples and held-out samples, or None if missing or no longer needed.
    held_out_groups : ndarray of shape (n_held_out,) or None
        Group labels of the held-out samples, if the user passed groups.
    """

    net: NeuralNet
    spec: Any
    train: Any = None
    held_out: Any = None
    held_out_groups: np.ndarray | None = None

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return device_of(self.net)

    def forward(self) -> Forward:
        """Return the network as a differentiable function."""
        return as_forward(self.net, self.spec)

    def batches(
        self,
        dataset: Samples,
        batch_size: int | None = None,
        *,
        row_elements: int = 0,
        with_covariance: bool = False,
        n_draws: int = 0,
    ) -> Batches:
        """Return batches of a dataset that fit into the memory budget.

        Parameters
        ----------
        dataset : Dataset
            Samples, with or without targets and weights.
        batch_size : int or None
            Samples per batch. With None, the number depends on the memory budget and
            the arguments below. They say what the caller computes from the outputs.
        row_elements : int
            Number of float64 numbers computed per sample.
        with_covariance : bool
            Whether to reserve memory for covariances between outputs.
        n_draws : int
            Number of draws of the outputs.
        """
        # three arrays: the outputs of each draw, and two computed from these outputs
        row_elements += 3 * n_draws * self.spec.n_outputs
        batch_size = batch_size or self.spec.batch_size(
            row_elements=row_elements, with_covariance=with_covariance
        )
        return Batches(self.net, dataset, int(batch_size))


def device_of(net: NeuralNet) -> torch.device:
    """Return the device of a net's parameters."""
    return next(net.module_.parameters()).device


def n_epochs(net: NeuralNet) -> int:
    """Return the number of epochs that a net was trained for, at least one."""
    return max(1, len(getattr(net, "history_", None) or []))
