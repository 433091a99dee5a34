"""NoveltyRecorder: features of training samples, recorded in forward passes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sklaplace.core.linalg import agree
from sklaplace.core.random import row_hash
from sklaplace.core.trees import Batch, Inputs
from sklaplace.curvature.features import FeatureRecorder
from sklaplace.curvature.network import NetworkSpec
from sklaplace.curvature.recorder import compare_alone
from sklaplace.estimators.predicting.output_model import BatchedOutputs
from sklaplace.networks.data import Batches
from sklaplace.networks.forward import Forward
from sklaplace.posterior.novelty import FeatureBatch, Novelty


class NoveltyRecorder(FeatureRecorder):
    """Recorder of features for `Novelty`, during passes over the training samples.

    Parameters
    ----------
    spec : NetworkSpec
        Description of the network.
    forward : Forward
        The network as a function. Its forward passes are recorded.
    earlier : Novelty, optional
        Novelty of earlier samples, which the new samples are added to.
    """

    def __init__(
        self, spec: NetworkSpec, forward: Forward, earlier: Novelty | None = None
    ) -> None:
        super().__init__(forward, spec.feature_layers)
        self._forward, self._likelihood = forward, spec.likelihood
        self._rounding = spec.layout.rounding
        self._novelty, self._is_known, self._is_checked = earlier, True, False

    def add(self, x: Batch, f: Tensor, targets: Any, weights: Tensor | None) -> None:
        """Add a batch after its forward pass, which gave outputs (b, c)."""
        features = self.take(len(f))
        if features is None or not self._is_known:
            self._is_known = False
            return
        if not self._is_checked:
            self._is_checked = True
            self._is_known = self._are_of_samples(features, x, f)
        keys = row_hash(x)
        given = self._likelihood, features, f, weights, keys, x
        batch = FeatureBatch.of(*given, targets)
        if self._novelty is None:
            self._novelty = Novelty.of(self._likelihood, batch, f.shape[1])
        else:
            self._novelty = self._novelty.added(batch)

    def _are_of_samples(self, features: Tensor, x: Batch, f: Tensor) -> bool:
        """Pass some samples separately; return whether their features agree."""
        some = compare_alone(self._forward, x, f, self._rounding)
        alone = self.take(len(some))
        return alone is not None and agree(alone, features[some], self._rounding)

    def add_all(self, batches: Batches) -> None:
        """Pass batches through the network, and add them."""
        with self._forward.frozen(), torch.no_grad():
            for x, y, weights in batches:
                f = self._forward(x)
                self.add(x, f, self._likelihood.targets(y, f), weights)

    def result(self) -> Novelty | None:
        """Return the novelty, or None if the network has no features."""
        return self._novelty if self._is_known else None


def novelty_scores(
    outputs: BatchedOutputs, X: Inputs, novelty: Novelty | None
) -> np.ndarray:
    """Return the novelty scores of checked samples, (n,).

    Raises
    ------
    ValueError
        If the network has no features.
    """

    def scores(features: Tensor | None, f: Tensor, _x: object) -> Tensor:
        if novelty is None or features is None:
            raise ValueError(
                "score_samples needs features: the inputs of the last layer that has "
                "parameters, as real numbers, with the samples in order on the first "
                "axis. This network has none. End it with torch.nn.Linear, called on "
                "the whole batch."
            )
        return novelty.log_tail_probability(features, f)

    return outputs.map_features(X, scores)
