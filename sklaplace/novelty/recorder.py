"""NoveltyRecorder: records the novelty of samples during passes over them."""

from typing import Any

import torch
from torch import Tensor

from sklaplace.core.linalg import agree
from sklaplace.core.random import row_hash
from sklaplace.core.trees import Batch
from sklaplace.curvature.features import FeatureRecorder
from sklaplace.curvature.network import NetworkSpec
from sklaplace.curvature.recorder import compare_alone
from sklaplace.data.dataset import Batches
from sklaplace.likelihoods.base import weighted
from sklaplace.networks.forward import Forward
from sklaplace.novelty.batch import FeatureBatch
from sklaplace.novelty.novelty import Novelty


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
            self._likelihood,
            features,
            f,
            x,
            weights=weights,
            keys=row_hash(x),
            targets=targets,
        )
        new = Novelty.of(self._likelihood, batch)
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
