"""SampleRecord: data that a fit keeps of training samples besides the curvature."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sklaplace.curvature.accumulation import Recorder
from sklaplace.curvature.shared import IdentityMap
from sklaplace.estimators.fitting.novelty_recorder import NoveltyRecorder
from sklaplace.networks.forward import Forward
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.posterior.last_layer import LastLayerRecorder
from sklaplace.posterior.novelty import Novelty


@dataclass
class SampleRecord:
    """Data that a fit keeps of its training samples besides the curvature.

    Attributes
    ----------
    head_rows : LastLayerRecorder
        Samples for the last layer's linear model.
    novelty : Novelty or None
        Novelty relative to the training samples; None without features.
    """

    head_rows: LastLayerRecorder
    novelty: Novelty | None

    def merge(self, other: "SampleRecord") -> None:
        """Add the record of later samples."""
        self.head_rows.merge(other.head_rows)
        if self.novelty is None or other.novelty is None:
            self.novelty = None
        else:
            self.novelty = self.novelty.merged(other.novelty)


class SampleRecorder(Recorder):
    """Recorder that builds a `SampleRecord` in a pass over samples.

    Parameters
    ----------
    network : TrainedNetwork
        The network.
    forward : Forward
        The network as a function.
    head_map : Tensor of shape (c, o), IdentityMap or None
        See `LastLayerRecorder`.
    """

    def __init__(
        self,
        network: TrainedNetwork,
        forward: Forward,
        head_map: Tensor | IdentityMap | None,
    ) -> None:
        self._head_rows = LastLayerRecorder(head_map)
        self._novelty = NoveltyRecorder(network.spec, forward)

    def __exit__(self, *_: object) -> None:
        """Remove the hooks from the network."""
        self._novelty.close()

    def observe(self, *batch: Any) -> None:
        """Record samples for the last layer's linear model."""
        self._head_rows.add(*batch)

    def observe_batch(self, *batch: Any) -> None:
        """Record the features of a batch."""
        self._novelty.add(*batch)

    def result(self) -> SampleRecord:
        """Return the record."""
        return SampleRecord(self._head_rows, self._novelty.result())
