"""ResidualOutputs: outputs of a network plus a residual that grows with distance.

The residual does not depend on the weights. A draw combines drawn weights with separate
random numbers for the residual; see `sklaplace.novelty.residual`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

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
from sklaplace.novelty.batch import FeatureBatch
from sklaplace.novelty.residual import Residual, relative_variance
from sklaplace.posterior.predictive import moments

# Added to seeds, so that the residual and the weights use different random numbers. Any
# large number would do; this is 2³² divided by the golden ratio.
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
        """Return means (b, c), and covariances (b, c, c) or variances (b, c).

        They are those of the inner model, to which the residual's variances are added.
        Without closed forms, they are those of draws.
        """
        if not self.is_gaussian:
            return super().gaussian(forward, x, **options)
        # the pass for the moments also yields the features
        with FeatureRecorder(forward, self.layers) as recorder:
            mean, cov = self.inner.gaussian(forward, x, **options)
            log_ratios = self.log_ratios(recorder, x, len(mean))
        relative = relative_variance(log_ratios, self.residual.steepness)
        n_blocks, centred = options["n_blocks"], options["centred"]
        amplitudes = self.residual.amplitudes
        return mean, amplitudes.added(cov, relative, n_blocks, centred=centred)

    def covariance_among(self, forward: Forward, x: Batch, outputs: Tensor) -> Tensor:
        """Return covariances (b, m, m) among some centred outputs of each sample."""
        inner = cast(GLMOutputs, self.inner)
        with FeatureRecorder(forward, self.layers) as recorder:
            cov = inner.covariance_among(forward, x, outputs)
            n_outputs = recorder.outputs.shape[1]
            log_ratios = self.log_ratios(recorder, x, len(outputs))
        relative = relative_variance(log_ratios, self.residual.steepness)
        return self.residual.amplitudes.added_among(cov, relative, n_outputs)

    def log_ratios(self, recorder: FeatureRecorder, x: Batch, n_samples: int) -> Tensor:
        """Return `Residual.log_ratios` (b,) of the batch in the last forward pass.

        They measure how unusual each sample is. The recorder has recorded the features
        and outputs of that pass.
        """
        f = recorder.outputs
        batch = self._batch(recorder.take(n_samples), f, x)
        return self.residual.log_ratios(batch, f)

    def draws(self, forward: Forward, x: Batch) -> Tensor:
        """Return joint draws of a batch's outputs, (b, c, s), float64.

        Draws of the residual are added to those of the other model. In regression, the
        deviations from the mean then shrink so that the variances respect their bounds.
        """
        inner_draws, amplitudes = self.inner.draws(forward, x), self.residual.amplitudes
        rows = self._rows(forward, x)
        _, c, s = inner_draws.shape
        # the random directions of the draws also take up memory
        require_draws(s, rows.shape[1] * c)
        drawn = inner_draws + amplitudes.drawn(rows, c, s, self.seed + _OTHER)
        if amplitudes.bounds is None:
            return drawn
        # moments without the residual: exact if possible, otherwise those of the draws
        if self.is_gaussian:
            options: dict[str, Any] = {"diagonal": True, "centred": False}
            mean, variance = self.inner.gaussian(forward, x, n_blocks=1, **options)
        else:
            mean, variance = moments(inner_draws, diagonal=True, centred=False)
        # the squared norm of a row is the relative variance of its sample
        variance = variance + rows.square().sum(1, keepdim=True) * amplitudes.variances
        return amplitudes.bounded_draws(drawn, mean, variance)

    def joint(
        self, outputs: BatchedOutputs, X: Inputs, across_outputs: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the means (n, c) and covariances between samples, with the residual.

        Without closed forms, they are those of draws. The covariances have the shape
        (n, n, c) or, ``across_outputs``, (n·c, n·c). Rows of each sample, whose inner
        products are covariances of the residual, are computed in another pass.
        """
        if not self.is_gaussian:
            return super().joint(outputs, X, across_outputs)
        mean, cov = self.inner.joint(outputs, X, across_outputs)
        rows = torch.as_tensor(outputs.map_features(X, self._rows_of)[0]).to(cov)
        c, amplitudes = mean.shape[1], self.residual.amplitudes
        return mean, amplitudes.added_jointly(cov, rows, c, across_outputs)

    def differentiable_moments(
        self, forward: Forward, x: Batch, n_joint: int
    ) -> tuple[Tensor, Tensor]:
        """Return moments that are differentiable in ``x``; see `GLMOutputs`.

        Groups of q = ``n_joint`` consecutive samples have means (b/q, q·c) and
        covariances (b/q, q·c, q·c).
        """
        assert isinstance(self.inner, GLMOutputs)
        mean, cov = self.inner.differentiable_moments(forward, x, n_joint)
        rows = self._rows(forward, x, keeps_graph=True).unflatten(0, (-1, n_joint))
        c, amplitudes = mean.shape[1] // n_joint, self.residual.amplitudes
        return mean, amplitudes.added_jointly(cov, rows, c, across_outputs=True)

    def _rows(self, forward: Forward, x: Batch, keeps_graph: bool = False) -> Tensor:
        """Return `Residual.rows` of a batch from a separate forward pass.

        The inner products of these rows (b, p) are covariances of the residual. With
        ``keeps_graph``, the rows are differentiable in ``x``.
        """
        with (
            FeatureRecorder(forward, self.layers, keeps_graph) as recorder,
            torch.set_grad_enabled(keeps_graph),
        ):
            features = recorder.take(len(forward(x)))
        return self._rows_of(features, recorder.outputs, x)

    def _rows_of(self, features: Tensor | None, f: Tensor, x: Batch) -> Tensor:
        """Return `Residual.rows` of a batch."""
        return self.residual.rows(self._batch(features, f, x), f)

    def _batch(self, features: Tensor | None, f: Tensor, x: Batch) -> FeatureBatch:
        """Return a batch of features, or raise ValueError without features."""
        if features is None:
            raise ValueError(
                "The network's last layer has no features per sample for these rows, "
                "unlike in fit, so there is no residual. Use residual='none'."
            )
        return self.residual.novelty.batch(features, f, x)
