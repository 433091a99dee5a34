"""SampleRecord: data about training samples that a fit stores besides the curvature."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sklaplace.core.trees import Inputs
from sklaplace.curvature.accumulation import ObservedRows
from sklaplace.curvature.features import FeatureRecorder
from sklaplace.curvature.shared import IdentityMap
from sklaplace.estimators.options.laplace import LaplaceOptions
from sklaplace.estimators.predicting.output_model import BatchedOutputs
from sklaplace.likelihoods.base import loss_weights_or_ones
from sklaplace.networks.forward import Forward
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.novelty.novelty import Novelty
from sklaplace.novelty.recorder import NoveltyRecorder
from sklaplace.novelty.scale import ZScores
from sklaplace.posterior.last_layer import LastLayerRecorder


def held_out_novelty(
    options: LaplaceOptions, network: TrainedNetwork, novelty: Novelty | None
) -> ZScores | None:
    """Return the z-scores of held-out samples, from which `Novelty.scaled` learns.

    Z-scores are the quantities that measure novelty, standardised by their moments over
    the training samples. Each forward pass yields the outputs, and also the features,
    which the recorder takes from it. Return None without held-out samples, or if the
    network has no features.
    """
    if network.held_out is None or novelty is None:
        return None
    batches = options.batches(network, network.held_out)
    forward, likelihood = network.forward(), network.spec.likelihood
    values, all_weights = [], []
    with (
        FeatureRecorder(forward, network.spec.feature_layers) as recorder,
        forward.frozen(),
        torch.no_grad(),
    ):
        for x, y, weights in batches:
            f = forward(x)
            features = recorder.take(len(f))
            if features is None:
                return None
            targets = likelihood.targets(y, f)
            weights = loss_weights_or_ones(likelihood, targets, weights, f)
            values.append(novelty.z_scores(novelty.batch(features, f, x)))
            all_weights.append(weights.double())
    return ZScores(torch.cat(values), torch.cat(all_weights))


def novelty_scores(
    outputs: BatchedOutputs, X: Inputs, novelty: Novelty | None
) -> np.ndarray:
    """Return the novelty scores (n,) of samples that have already been checked.

    Raises
    ------
    ValueError
        If the network has no features.
    """

    def scores(features: Tensor | None, f: Tensor, x: object) -> Tensor:
        if novelty is None or features is None:
            raise ValueError(
                "score_samples needs features: one input per sample to the last layer "
                "with parameters, in the samples' order. This network has none. End "
                "it with torch.nn.Linear, called on the whole batch."
            )
        return novelty.log_tail_probability(features, f, x)

    return outputs.map_features(X, scores)[0]  # a list of one array


@dataclass
class SampleRecord:
    """Data about training samples that a fit stores besides the curvature.

    Attributes
    ----------
    head_rows : LastLayerRecorder
        Samples for the linear model of the last layer.
    novelty : Novelty or None
        Novelty relative to the training samples. None without features.
    """

    head_rows: LastLayerRecorder
    novelty: Novelty | None

    def merge(self, other: "SampleRecord") -> None:
        """Add the record of additional samples to this one, in place.

        There is no novelty if one part of the samples has no features.
        """
        self.head_rows.merge(other.head_rows)
        if self.novelty is None or other.novelty is None:
            self.novelty = None
        else:
            self.novelty = self.novelty.merged(other.novelty)


class SampleRecorder(NoveltyRecorder):
    """Recorder that builds a `SampleRecord` in a pass over samples.

    Parameters
    ----------
    network, forward
        See `NoveltyRecorder`.
    head_map : Tensor of shape (c, o), IdentityMap or None
        See `LastLayerRecorder`.
    """

    def __init__(
        self,
        network: TrainedNetwork,
        forward: Forward,
        head_map: Tensor | IdentityMap | None,
    ) -> None:
        super().__init__(network, forward)
        self._head_rows = LastLayerRecorder(head_map)

    def observe(self, rows: ObservedRows) -> None:
        """Record samples for the last layer's linear model."""
        self._head_rows.add(rows)

    def result(self) -> SampleRecord:
        """Return the record."""
        return SampleRecord(self._head_rows, self.novelty)
