"""ResidualOutputs: outputs of a network plus a residual that grows with distance.

The residual does not depend on the weights. A draw combines drawn weights with separate
random numbers for the residual; see `sklaplace.novelty.residual`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.trees import Batch, Inputs
from sklaplace.curvature.features import FeatureRecorder
from sklaplace.estimators.predicting.glm_outputs import GLMOutputs
from sklaplace.estimators.predicting.output_model import (
    BatchedOutputs,
    OutputModel,
    WeightDraws,
    require_draws,
)
from sklaplace.networks.forward import Forward
from sklaplace.novelty.residual import Residual
from sklaplace.posterior.predictive import moments

# added to seeds, so that the residual and the weights use different random numbers
_OTHER = 0x9E3779B9


@dataclass(frozen=True)
class ResidualOutputs(WeightDraws):
    """Outputs of another model plus a residual.

    Attributes
    ----------
    inner : OutputModel
        Model without the residual.
    residual : Residual
        Gaussian process to add.
    layers : sequence of str
        Layers whose inputs are the features for the residual.
    """

    inner: OutputModel
    residual: Residual
    layers: Sequence[str]

    @property
    def is_gaussian(self) -> bool:
        """Whether the outputs are Gaussian with known moments, without draws."""
        return self.inner.is_gaussian

    def redrawn(self, n_samples: int, seed: int) -> "ResidualOutputs":
        """Return a copy of the model with new draws."""
        inner = self.inner.redrawn(n_samples, seed)
        return replace(self, n_samples=n_samples, seed=seed, inner=inner)

    def gaussian(
        self, forward: Forward, x: Batch, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return means (b, c), and covariances (b, c, c) or variances (b, c)."""
        if not self.is_gaussian:
            return super().gaussian(forward, x, **options)
        with FeatureRecorder(forward, self.layers) as recorder:
            mean, cov = self.inner.gaussian(forward, x, **options)
            log_ratios = self.log_ratios(recorder, x, len(mean))
        n_blocks, centred = options["n_blocks"], options["centred"]
        return mean, self.residual.added(cov, log_ratios, n_blocks, centred=centred)

    def log_ratios(self, recorder: FeatureRecorder, x: Batch, n_samples: int) -> Tensor:
        """Return `Residual.log_ratios` (b,) of the batch in the last forward pass."""
        features = _required(recorder.take(n_samples))
        return self.residual.log_ratios(features, recorder.outputs, x)

    def draws(self, forward: Forward, x: Batch) -> Tensor:
        """Return joint draws of a batch's outputs, (b, c, s), float64."""
        inner_draws, residual = self.inner.draws(forward, x), self.residual
        rows = self._rows(forward, x)
        _, c, s = inner_draws.shape
        require_draws(s, rows.shape[1] * c)
        drawn = inner_draws + residual.drawn(rows, c, s, self.seed + _OTHER)
        if residual.bounds is None:
            return drawn
        if self.is_gaussian:
            options: dict[str, Any] = {"diagonal": True, "centred": False}
            mean, variance = self.inner.gaussian(forward, x, n_blocks=1, **options)
        else:
            mean, variance = moments(inner_draws, diagonal=True, centred=False)
        variance = variance + rows.square().sum(1, keepdim=True) * residual.variances
        return residual.bounded_draws(drawn, mean, variance)

    def joint(
        self, outputs: BatchedOutputs, X: Inputs, across_outputs: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the means (n, c) and covariances; see `BatchedOutputs.joint`."""
        if not self.is_gaussian:
            return super().joint(outputs, X, across_outputs)
        mean, cov = self.inner.joint(outputs, X, across_outputs)
        rows = torch.as_tensor(outputs.map_features(X, self._rows_of)[0]).to(cov)
        c = mean.shape[1]
        return mean, self.residual.added_jointly(cov, rows, c, across_outputs)

    def in_graph(
        self, forward: Forward, x: Batch, n_joint: int
    ) -> tuple[Tensor, Tensor]:
        """Return moments that are differentiable in ``x``; see `GLMOutputs`."""
        assert isinstance(self.inner, GLMOutputs)
        mean, cov = self.inner.in_graph(forward, x, n_joint)
        rows = self._rows(forward, x, keeps_graph=True).unflatten(0, (-1, n_joint))
        c = mean.shape[1] // n_joint
        return mean, self.residual.added_jointly(cov, rows, c, across_outputs=True)

    def _rows(self, forward: Forward, x: Batch, keeps_graph: bool = False) -> Tensor:
        """Return `Residual.rows` of a batch from a separate forward pass."""
        with (
            FeatureRecorder(forward, self.layers, keeps_graph) as recorder,
            torch.set_grad_enabled(keeps_graph),
        ):
            features = recorder.take(len(forward(x)))
        return self._rows_of(features, recorder.outputs, x)

    def _rows_of(self, features: Tensor | None, f: Tensor, x: Batch) -> Tensor:
        """Return `Residual.rows` of a batch, or raise ValueError without features."""
        return self.residual.rows(_required(features), f, x)


def _required(features: Tensor | None) -> Tensor:
    """Return the features, or raise ValueError if there are none."""
    if features is None:
        raise ValueError(
            "The network's last layer has no features per sample for these rows, "
            "unlike in fit, so there is no residual. Use residual='none'."
        )
    return features
