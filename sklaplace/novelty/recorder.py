"""NoveltyRecorder: records the novelty of samples during passes over them."""

from typing import Any

import torch
from torch import Tensor

from sklaplace.core.linalg import agree
from sklaplace.core.random import row_hash
from sklaplace.core.trees import Batch
from sklaplace.curvature.accumulation import Recorder
from sklaplace.curvature.features import FeatureRecorder
from sklaplace.curvature.recorder import check_independent
from sklaplace.data.dataset import Batches
from sklaplace.likelihoods.base import loss_weights
from sklaplace.networks.forward import Forward
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.novelty.batch import FeatureBatch
from sklaplace.novelty.novelty import Novelty


class NoveltyRecorder(Recorder):
    """Recorder of the `Novelty` relative to the samples of a pass.

    Parameters
    ----------
    network : TrainedNetwork
        Trained network.
    forward : Forward
        Network as a function whose forward passes are recorded.
    earlier : Novelty, optional
        Novelty relative to earlier samples, to which new samples are added.
    """

    def __init__(
        self, network: TrainedNetwork, forward: Forward, earlier: Novelty | None = None
    ) -> None:
        self._features = FeatureRecorder(forward, network.spec.feature_layers)
        self._forward, self._spec = forward, network.spec
        self._novelty, self._has_features = earlier, True

    def __exit__(self, *_: object) -> None:
        """Remove the hooks from the network."""
        self._features.close()

    def observe_batch(
        self, x: Batch, f: Tensor, targets: Any, weights: Tensor | None
    ) -> None:
        """Add a batch, after a forward pass that returned the outputs (b, c).

        The hooks of the pass have recorded the features. If a batch has no features per
        sample, nothing is recorded any more, and there is no novelty.
        """
        features = self._features.take(len(f))
        if features is None or not self._has_features:
            self._has_features = False
            return
        # once, because this takes another pass; `accumulate` then skips its comparison
        if not self.has_compared:
            self.has_compared = True
            self._has_features = self._are_per_sample(features, x, f)
        likelihood = self._spec.likelihood
        batch = FeatureBatch.of(
            likelihood,
            features,
            f,
            x,
            weights=weights,
            keys=row_hash(x),
            targets=targets,
        )
        # the novelty of the first batch, to which those of later batches are added
        new = Novelty.of(likelihood, batch)
        self._novelty = new if self._novelty is None else self._novelty.merged(new)

    def _are_per_sample(self, features: Tensor, x: Batch, f: Tensor) -> bool:
        """Return whether each row of features (b, i) depends on its sample alone.

        If so, samples have the same features in a smaller batch.
        """
        rounding = self._spec.layout.rounding
        compared = check_independent(self._forward, x, f, rounding)
        # the comparison has passed some samples of the batch through the network again
        alone = self._features.take(len(compared))
        return alone is not None and agree(alone, features[compared], rounding)

    def observe_all(self, batches: Batches) -> None:
        """Pass batches through the network, and record each batch.

        `accumulate` calls `observe_batch` itself, so that no separate pass is needed.
        """
        likelihood = self._spec.likelihood
        with self._forward.frozen(), torch.no_grad():
            for x, y, weights in batches:
                f = self._forward(x)
                targets = likelihood.targets(y, f)
                weights = loss_weights(likelihood, targets, weights)
                self.observe_batch(x, f, targets, weights)

    @property
    def novelty(self) -> Novelty | None:
        """Novelty, or None if the network has no features."""
        return self._novelty if self._has_features else None
