"""Levels: noise levels, one per output, that maximise the marginal likelihood.

At the maximum, ``σ_k² = ‖r_k‖² / (T (n - γ_k))``, where ``γ_k`` is the effective number
of parameters of output k (MacKay 1992, "Bayesian interpolation", section 4). If each
output has its own weights, as in a last layer, the curvature ``Σ_k J_kᵀJ_k / σ_k²`` is
known for all levels. If outputs share weights, the levels keep the ratios with which
the curvature was computed.
"""

from dataclasses import replace

import torch
from torch import Tensor

from sklaplace.noise.levels import SMALLEST_LEVEL_TO_LARGEST
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.tuning.evidence import maximise_evidence
from sklaplace.posterior.tuning.problem import TuningProblem

MAX_ROUNDS = 20
# The rounds end when the largest change in the logarithm of a level is this small.
TOLERANCE = 1e-3


def maximise_with_levels(problem: TuningProblem) -> GaussianPosterior:
    """Maximise the evidence with a separate noise level for each output.

    The search alternates between the levels and the other hyperparameters. Each round
    costs as much as `maximise_evidence` and requires no pass over the data. It ends
    when the levels hardly change. Outputs that share weights keep the ratios of their
    levels, because the curvature is known only for these ratios.
    """
    posterior = maximise_evidence(problem)
    # None without a loss for each output; separable if each output has its own weights
    losses = posterior.data_fit.by_output
    if not problem.free_noise or losses is None or not posterior.layout.is_separable:
        return posterior
    for _ in range(MAX_ROUNDS):
        levels = _most_probable_levels(posterior, losses)
        updated = posterior.with_noise_levels(levels)
        if updated is None:  # the curvature cannot be converted to the new ratios
            break
        # `maximise_evidence` has already found the common factor of the levels
        change = updated.noise_proportions / posterior.noise_proportions
        if change.log().abs().max() <= TOLERANCE:
            break
        model = problem.linear_model
        if model is not None:
            model = replace(model, likelihood=updated.likelihood)
        problem = replace(problem, posterior=updated, linear_model=model)
        posterior = maximise_evidence(problem)
        losses = posterior.data_fit.by_output
        assert losses is not None
    return posterior


def _most_probable_levels(posterior: GaussianPosterior, losses: Tensor) -> Tensor:
    """Return MacKay's update of noise levels (c,), from the outputs' losses (c,).

    The update is ``σₖ² = ‖rₖ‖² / (T (n - γₖ))`` for output k with residuals ``rₖ`` and
    ``γₖ`` effective parameters. Each output must have its own weights.
    """
    # losses are half squares of residuals in units of the noise proportions
    squares = 2 * losses * posterior.noise_proportions**2
    gamma = posterior.precision.effective_parameters().clamp(min=0)
    pieces = posterior.layout.split(gamma)
    sums = [piece.reshape(len(losses), -1).sum(1) for piece in pieces]
    by_output = torch.stack(sums).sum(0)
    n = posterior.data_fit.n_targets / len(losses)
    # at least a tenth of a target, for outputs that interpolate all targets
    n_remaining = (n - posterior.curvature_order * by_output).clamp(min=0.1)
    levels = (squares / posterior.hyperparameters.temperature / n_remaining).sqrt()
    return levels.clamp(min=SMALLEST_LEVEL_TO_LARGEST * levels.max())
