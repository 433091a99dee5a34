"""GLMOutputs: Gaussian outputs of the linearised network under a posterior.

``f(x) ~ N(f* + J (mean - weights), J Σ Jᵀ)`` (Immer, Korzepa and Bauer 2021,
"Improving predictions of Bayesian neural nets via local linearization").
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from sklaplace.core.trees import Batch, Inputs
from sklaplace.curvature.jacobian import Jacobian, backpropagate
from sklaplace.estimators.predicting.output_model import (
    BatchedOutputs,
    WeightDraws,
    require_joint,
)
from sklaplace.networks.forward import Forward
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.predictive import (
    differentiable_moments,
    glm,
    linearised_draws,
    linearised_mean,
)


@dataclass(frozen=True)
class GLMOutputs(WeightDraws):
    """Outputs of the network, linearised at its trained weights."""

    posterior: GaussianPosterior

    @property
    def is_gaussian(self) -> bool:
        """Whether the outputs are Gaussian with known moments, without draws."""
        return True

    def draws(self, forward: Forward, x: Batch) -> Tensor:
        """Return outputs (b, c, s) of the linearised network under drawn weights."""
        return linearised_draws(self.posterior, forward, x, self.weights)

    def gaussian(
        self,
        forward: Forward,
        x: Batch,
        *,
        n_blocks: int,
        diagonal: bool,
        centred: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return means (b, c), and covariances (b, c, c) or variances (b, c)."""
        return glm(self.posterior, forward, x, diagonal=diagonal, centred=centred)

    def covariance_among(self, forward: Forward, x: Batch, outputs: Tensor) -> Tensor:
        """Return covariances (b, m, m) among some centred outputs of each sample.

        ``outputs`` (b, m) are the indices of the outputs. The mean over all outputs is
        subtracted from each of them. This requires another pass.
        """

        def selected(f: Tensor) -> Tensor:
            """Return the columns (b, c, m) of the centring matrix for ``outputs``."""
            return one_hot(outputs, f.shape[1]).mT.to(f) - 1 / f.shape[1]

        _, jacobian = backpropagate(forward, x, self.posterior.layout, selected)
        return self.posterior.precision.output_covariance(jacobian, diagonal=False)

    def joint(
        self, outputs: BatchedOutputs, X: Inputs, across_outputs: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the means (n, c) and covariances between samples.

        The covariances have the shape (n, n, c) or, ``across_outputs``, (n·c, n·c).
        If all samples share the gradients of a last layer, they follow from its inputs
        alone. Otherwise, they are products of whitened Jacobians ``J P^{-1/2}``.
        """
        posterior, layout = self.posterior, self.posterior.layout
        precision: Any = posterior.precision
        # only the Jacobians show whether the samples really share gradients, see below
        is_shared = layout.head is not None and posterior.structure.keeps_factors
        # a Jacobian in memory: gradients and inputs of the layer, or all its entries
        n_numbers = sum(layout.blocks[0].factor_shape if is_shared else layout.sizes)
        # the Jacobian of an output, and a copy
        require_joint(outputs, X, across_outputs, 2 * n_numbers)
        means, factors = [], list[Any]()  # factors are Jacobians, or whitened
        with outputs.evaluation(X) as (forward, batches):
            for x, _, _ in batches:
                f, jacobian = backpropagate(forward, x, layout)
                means.append(linearised_mean(posterior, f, jacobian))
                factors.append(jacobian if is_shared else precision.whiten(jacobian))
        mean = torch.cat(means)
        if is_shared and all(part.samples_share_gradients for part in factors):
            jacobian = Jacobian.stacked(factors, share=True)
            cov = precision.between_samples(jacobian, across_outputs=across_outputs)
            # (n, c, n, c) to (n·c, n·c)
            return mean, cov.flatten(2).flatten(0, 1) if across_outputs else cov
        # a root (n, c, P) of the covariances
        root = torch.cat(
            [precision.whiten(j) for j in factors] if is_shared else factors
        )
        if across_outputs:
            rows = root.flatten(0, 1)
            return mean, rows @ rows.mT
        return mean, torch.einsum("ncp,mcp->nmc", root, root)

    def differentiable_moments(
        self, forward: Forward, x: Batch, n_joint: int
    ) -> tuple[Tensor, Tensor]:
        """Return means and covariances that are differentiable in ``x``.

        Groups of q = ``n_joint`` consecutive samples have means (b/q, q·c) and joint
        covariances (b/q, q·c, q·c).
        """
        return differentiable_moments(self.posterior, forward, x, n_joint)


# pred_type -> class for the distribution of outputs
OUTPUT_MODELS: dict[str, type[WeightDraws]] = {"glm": GLMOutputs, "nn": WeightDraws}
