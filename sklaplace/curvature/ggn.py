"""Generalised Gauss-Newton matrix, Fisher matrices and Hessian of the loss.

``H = Σₙ Jₙᵀ Sₙ Sₙᵀ Jₙ``. Each curvature defines ``S Sᵀ`` (b, c, c), which is the
Hessian of the loss with respect to the outputs or a substitute for this Hessian.
``S Sᵀ`` depends on the likelihood, the outputs and the targets. The exact Hessian also
includes the second derivatives of the network, and is summed as a matrix.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.checks import Check, check_count
from sklaplace.core.random import counter_uniforms, row_hash
from sklaplace.likelihoods.base import Likelihood, output_weights
from sklaplace.likelihoods.output_hessian import Diagonal, Factored, OutputHessian

# number of targets to draw for each sample
N_DRAWS = 10


# hashes of the samples; if None, their outputs are hashed
Keys = Tensor | None


def ggn(likelihood: Likelihood, f: Tensor, y: Tensor, keys: Keys) -> OutputHessian:
    """Return the exact Hessian of the loss with respect to the outputs.

    The resulting generalised Gauss-Newton matrix equals the Fisher information for all
    likelihoods in this package (Martens 2020, "New insights and perspectives on the
    natural gradient method").
    """
    weights = output_weights(likelihood, y, f.shape[1])
    return likelihood.hessian(f).weigh_outputs(weights)


def ef(likelihood: Likelihood, f: Tensor, y: Tensor, keys: Keys) -> OutputHessian:
    """Return ``g gᵀ`` for the gradients ``g`` (b, c) of the loss in the outputs.

    The gradients are those at the training targets, so ``S`` has one column ``g``. The
    resulting empirical Fisher is cheap, but does not approximate the Hessian. This
    matrix vanishes where the network fits the targets (Kunstner, Balles and Hennig
    2019, "Limitations of the empirical Fisher approximation"), and it is quadratic in
    the scale of the loss. For one output with Gaussian noise, the matrix is
    ``Σ (f - y)² JᵀJ / σ⁴``.
    """
    return Factored(likelihood.gradient(f, y).unsqueeze(-1))


def ggn_mc(
    likelihood: Likelihood,
    f: Tensor,
    y: Tensor,
    keys: Keys,
    n_draws: int = N_DRAWS,
    seed: int = 0,
) -> OutputHessian:
    """Return the mean of ``g gᵀ`` over targets drawn from the likelihood.

    ``g`` (b, c) is the gradient of the loss in the outputs at one draw. The resulting
    Monte-Carlo Fisher is an unbiased estimate of the generalised Gauss-Newton matrix.
    ``S`` has k = ``n_draws`` columns instead of c, which saves time and memory for
    hundreds of classes. The targets drawn for a sample depend on the seed and on the
    sample's inputs, but not on the batch.
    """
    keys = row_hash(f) if keys is None else keys
    # uniform numbers that determine one draw of a sample's targets
    n_uniforms = likelihood.n_draws(f.shape[-1])
    uniforms = counter_uniforms(keys, n_draws * n_uniforms, seed)
    by_draw = uniforms.to(f.device).chunk(n_draws, -1)
    # g (b, c) at each draw, without the weights of labels, which follow below
    gradients = [likelihood.score(f, likelihood.draw(f, u)) for u in by_draw]
    # S (b, c, k), so that S Sᵀ is the mean over the draws
    root = torch.stack(gradients, -1) * float(n_draws**-0.5)
    return Factored(root).weigh_outputs(output_weights(likelihood, y, f.shape[1]))


def identity(likelihood: Likelihood, f: Tensor, y: Tensor, keys: Keys) -> OutputHessian:
    """Return the identity instead of the Hessian with respect to the outputs.

    The curvature ``Σ w JᵀJ`` depends on the weights of samples and of single outputs,
    but not on the network's confidence or the targets. For a Gaussian likelihood, this
    curvature equals `ggn`, including the noise levels. For class probabilities, it is
    an upper bound on `ggn`, since no eigenvalue of the Hessian with respect to the
    outputs exceeds one (Zhdanov, Dereka and Kolesnikov 2023, "Identity curvature
    Laplace approximation for improved out-of-distribution detection").
    """
    # noise levels set the units of the outputs, so the identity is taken in these units
    ones = Diagonal(torch.ones_like(f))
    unit = likelihood.hessian(f) if likelihood.has_noise else ones
    return unit.weigh_outputs(output_weights(likelihood, y, f.shape[1]))


@dataclass(frozen=True)
class Curvature:
    """Approximation of the Hessian of the loss, with its options.

    Attributes
    ----------
    function : callable
        ``(likelihood, f, y, keys, **options) -> OutputHessian``, ``S Sᵀ``.
    order : int
        Power of ``likelihood.scale`` that multiplies the curvature in the posterior.
    is_exact : bool
        Whether to add the second derivatives of the network.
    is_random : bool
        Whether the curvature has a ``seed`` option and depends on ``keys``.
    checks : mapping
        Options that users may set, each with a function that checks its value.
    options : mapping
        Values of the options.
    """

    function: Callable[..., OutputHessian]
    order: int = 1
    is_exact: bool = False
    is_random: bool = False
    checks: Mapping[str, Check] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def configured(self, options: Mapping[str, Any], seed: int) -> "Curvature":
        """Return a copy with options and, for a random curvature, the seed."""
        seeds = {"seed": seed} if self.is_random else {}
        return replace(self, options={**seeds, **options})

    def __call__(
        self,
        likelihood: Likelihood,
        f: Tensor,
        y: Tensor,
        weights: Tensor | None = None,
        keys: Keys = None,
    ) -> OutputHessian:
        """Return ``w S Sᵀ`` for each sample, with sample weights ``w`` (b,) if any."""
        hessian = self.function(likelihood, f, y, keys, **self.options)
        return hessian.weigh_samples(weights)


CURVATURES: dict[str, Curvature] = {
    "ef": Curvature(ef, order=2),
    "ggn": Curvature(ggn),
    "ggn_mc": Curvature(ggn_mc, is_random=True, checks={"n_draws": check_count}),
    # outputs are linear in a head's weights, so the head's Hessian is the GGN
    "hessian": Curvature(ggn, is_exact=True),
    "identity": Curvature(identity),
}
GGN = CURVATURES["ggn"]
