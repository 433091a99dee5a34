"""SampleRecord: data about training samples that a fit stores besides the curvature."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sklaplace.core.linalg import agree
from sklaplace.core.random import row_hash
from sklaplace.core.trees import Batch, Inputs
from sklaplace.curvature.accumulation import Recorder
from sklaplace.curvature.features import FeatureRecorder
from sklaplace.curvature.network import NetworkSpec
from sklaplace.curvature.recorder import compare_alone
from sklaplace.curvature.shared import IdentityMap
from sklaplace.data.dataset import Batches
from sklaplace.estimators.options.laplace import LaplaceOptions
from sklaplace.estimators.predicting.output_model import BatchedOutputs
from sklaplace.likelihoods.base import sample_weights, weighted
from sklaplace.networks.forward import Forward
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.novelty.novelty import FeatureBatch, Novelty
from sklaplace.posterior.last_layer import LastLayerRecorder


class NoveltyRecorder(FeatureRecorder):
    """Recorder of features for `Novelty` during passes over the training samples.

    Parameters
    ----------
    spec : NetworkSpec
        Description of the network.
    forward : Forward
        Network as a function whose forward passes are recorded.
    earlier : Novelty, optional
        Novelty relative to earlier samples, to which new samples are added.
    """

    def __init__(
        self, spec: NetworkSpec, forward: Forward, earlier: Novelty | None = None
    ) -> None:
        super().__init__(forward, spec.feature_layers)
        self._forward, self._likelihood = forward, spec.likelihood
        self._rounding = spec.layout.rounding
        self._novelty, self._is_known, self.has_compared = earlier, True, False

    def add(self, x: Batch, f: Tensor, targets: Any, weights: Tensor | None) -> None:
        """Add a batch, after a forward pass that returned the outputs (b, c)."""
        features = self.take(len(f))
        if features is None or not self._is_known:
            self._is_known = False
            return
        if not self.has_compared:
            self.has_compared = True
            self._is_known = self._are_of_samples(features, x, f)
        batch = FeatureBatch.of(
            self._likelihood, features, f, weights, row_hash(x), x, targets
        )
        new = Novelty.of(self._likelihood, batch, f.shape[1])
        self._novelty = new if self._novelty is None else self._novelty.merged(new)

    def _are_of_samples(self, features: Tensor, x: Batch, f: Tensor) -> bool:
        """Return whether samples have the same features in a smaller batch."""
        compared = compare_alone(self._forward, x, f, self._rounding)
        alone = self.take(len(compared))
        return alone is not None and agree(alone, features[compared], self._rounding)

    def add_all(self, batches: Batches) -> None:
        """Pass batches through the network, and record each batch."""
        with self._forward.frozen(), torch.no_grad():
            for x, y, weights in batches:
                f = self._forward(x)
                targets = self._likelihood.targets(y, f)
                self.add(x, f, targets, weighted(self._likelihood, targets, weights))

    def result(self) -> Novelty | None:
        """Return the novelty, or None if the network has no features."""
        return self._novelty if self._is_known else None


def held_out_novelty(
    options: LaplaceOptions, network: TrainedNetwork, novelty: Novelty | None
) -> Tensor | None:
    """Return the novelty of held-out samples, and their weights; see `Novelty.scaled`.

    Return None without held-out samples, or if the network has no features.
    """
    if network.held_out is None:
        return None
    batches = options.batches(network, network.held_out)
    forward, likelihood = network.forward(), network.spec.likelihood
    rows = []
    with (
        FeatureRecorder(forward, network.spec.feature_layers) as recorder,
        forward.frozen(),
        torch.no_grad(),
    ):
        for x, y, weights in batches:
            f = forward(x)
            features = recorder.take(len(f))
            if novelty is None or features is None:
                return None
            targets = likelihood.targets(y, f)
            weights = sample_weights(likelihood, targets, weights, f)
            scores = novelty.scores(novelty.batch(features, f, x))
            rows.append(torch.cat([scores, weights.double().unsqueeze(1)], 1))
    return torch.cat(rows)


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

    return outputs.map_features(X, scores)[0]


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
        """Merge with the record of additional samples."""
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
        Trained network.
    forward : Forward
        Trained network as a function.
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
        self.has_compared = self._novelty.has_compared

    def result(self) -> SampleRecord:
        """Return the record."""
        return SampleRecord(self._head_rows, self._novelty.result())
