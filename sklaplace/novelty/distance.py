"""Distance and NearestInput: distances of features and inputs from training samples."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sklaplace.core.parallel import cached_property
from sklaplace.novelty.batch import FeatureBatch
from sklaplace.novelty.leverage import Leverage

_TINY = 1e-300  # a distance of zero has no logarithm


@dataclass(frozen=True)
class Distance:
    """Leverages of features or inputs, for one or several ridges.

    Attributes
    ----------
    name : {"features", "inputs"}
        Attribute of a `FeatureBatch`.
    leverage : Leverage
        Leverage of this attribute.
    samples : FeatureBatch
        Training samples.
    """

    name: str
    leverage: Leverage
    samples: FeatureBatch

    @cached_property
    def training_logs(self) -> Tensor:
        """`logs` of the training samples (n, r), leave-one-out."""
        samples = self.samples
        rows = getattr(samples, self.name)
        return self.leverage.leave_one_out(rows, samples.groups, samples.weights).log()

    def logs(self, batch: FeatureBatch) -> Tensor:
        """Return the logarithms of the leverages for r ridges, (b, r)."""
        return self.leverage(getattr(batch, self.name), batch.groups).log()

    def whitened(self, batch: FeatureBatch) -> Tensor:
        """Return vectors (b, i + 1) whose squared norms are leverages."""
        return self.leverage.whitened(getattr(batch, self.name), batch.groups)


@dataclass(frozen=True)
class NearestInput:
    """Mahalanobis distance from the nearest of some training inputs.

    Attributes
    ----------
    leverage : Leverage
        Leverage of the inputs, which defines the distance.
    inputs : Tensor of shape (n, d)
        Training inputs.
    """

    leverage: Leverage
    inputs: Tensor

    @cached_property
    def _rows(self) -> Tensor:
        """Whitened training inputs, (n, d + 1)."""
        return self._whitened(self.inputs)

    def _whitened(self, inputs: Tensor) -> Tensor:
        """Return whitened inputs (b, d + 1) with the same origin for all groups."""
        groups = torch.zeros(len(inputs), dtype=torch.long, device=inputs.device)
        return self.leverage.whitened(inputs, groups)

    @cached_property
    def training_logs(self) -> Tensor:
        """Logarithms of distances from the nearest other training inputs, (n, 1)."""
        # the distance from itself, and from copies, is zero
        distances = self._distances(self._rows)
        positive = distances.masked_fill(distances == 0, torch.inf)
        return positive.amin(1, keepdim=True).log()

    def logs(self, batch: FeatureBatch) -> Tensor:
        """Return the logarithms of the distances, (b, 1)."""
        distances = self._distances(self._whitened(batch.inputs))
        return distances.amin(1, keepdim=True).clamp(min=_TINY).log()

    def _distances(self, rows: Tensor) -> Tensor:
        """Return distances (b, n) of rows (b, d + 1) from the training inputs."""
        # matrix products would not return zero for equal rows
        mode = "donot_use_mm_for_euclid_dist"
        return torch.cdist(rows, self._rows, compute_mode=mode)
