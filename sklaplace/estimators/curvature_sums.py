"""CurvatureSums: what is added up over the training samples, shard by shard.

`CurvaturePass` computes those of one shard from nothing else but the network and the
shard, in this process or another. They are added in the order of the shards.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sklaplace.core.random import private_rng
from sklaplace.curvature.ggn import Curvature, add_pass
from sklaplace.curvature.structures import Accumulator
from sklaplace.estimators.novelty_recorder import NoveltyRecorder
from sklaplace.likelihoods.base import DataFit
from sklaplace.networks.data import Batches
from sklaplace.networks.trained import TrainedNetwork, device_of
from sklaplace.posterior.last_layer import LastLayerRecorder
from sklaplace.posterior.novelty import Novelty


@dataclass
class CurvatureSums:
    """Sums over training samples.

    Attributes
    ----------
    accumulator : Accumulator
        Curvature.
    data_fit : DataFit
        Loss.
    head_rows : LastLayerRecorder
        Samples as the last layer's linear model takes them.
    novelty : Novelty or None
        How unlike them others are; None where the network has no features.
    """

    accumulator: Accumulator
    data_fit: DataFit
    head_rows: LastLayerRecorder
    novelty: Novelty | None

    def merge(self, other: "CurvatureSums") -> None:
        """Add the sums of samples that follow."""
        self.accumulator.merge(other.accumulator)
        self.data_fit = self.data_fit + other.data_fit
        self.head_rows.merge(other.head_rows)
        if self.novelty is None or other.novelty is None:
            self.novelty = None
        else:
            self.novelty = self.novelty.merged(other.novelty)


@dataclass(frozen=True)
class CurvaturePass:
    """One pass over the samples of a shard.

    Attributes
    ----------
    network : TrainedNetwork
        The network.
    curvature : Curvature
        Curvature to sum.
    batch_size : int
        Samples per batch.
    accumulator : Accumulator
        Without samples; prepared by earlier passes, if there were any.
    head_map : Tensor or None
        See `LastLayerRecorder`.
    is_first : bool
        Whether more than the curvature is added up.
    """

    network: TrainedNetwork
    curvature: Curvature
    batch_size: int
    accumulator: Accumulator
    head_map: Tensor | None = None
    is_first: bool = True

    def __call__(self, samples: Any) -> CurvatureSums:
        """Return the sums over a dataset."""
        network, accumulator = self.network, self.accumulator.fresh()
        batches = Batches(network.net, samples, self.batch_size).tracked("curvature")
        likelihood, forward = network.spec.likelihood, network.forward()
        head_rows = LastLayerRecorder(self.head_map if self.is_first else None)
        # loaders and modules may draw numbers
        with private_rng(0, device_of(network.net)), forward.frozen():
            if not self.is_first:
                add = forward, batches, likelihood, self.curvature, accumulator
                return CurvatureSums(accumulator, add_pass(*add), head_rows, None)
            with NoveltyRecorder(network) as recorder:
                data_fit = add_pass(
                    recorder.forward,
                    batches,
                    likelihood,
                    self.curvature,
                    accumulator,
                    head_rows.add,
                    recorder.add,
                )
        return CurvatureSums(accumulator, data_fit, head_rows, recorder.result())
