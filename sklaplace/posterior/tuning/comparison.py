"""Comparison of held-out losses, to warn if the evidence chose a harmful prior.

The evidence assumes that the weights are the most probable weights under the prior. If
they are not, the posterior can predict worse than the network alone.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.checks import warn_user
from sklaplace.curvature.structures import projected
from sklaplace.likelihoods import Gaussian
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.predictive import linearised_mean
from sklaplace.posterior.tuning.problem import TuningProblem, clamped

# Smallest notable difference between mean losses, in nats per sample.
NOTABLE = 0.01


def compare_with_network(problem: TuningProblem, posterior: GaussianPosterior) -> None:
    """Warn if a posterior predicts held-out samples worse than the network alone.

    The warning states both mean losses and suggests other options. If the noise is
    free, the network alone has the most probable noise levels. The comparison requires
    one pass over the held-out samples. Without held-out samples, there is no warning.
    """
    if problem.validation is None:
        return
    score = problem.score
    likelihood: Any = posterior.likelihood
    # variances are the same with or without blocks of outputs
    n_blocks = 1 if score.diagonal else likelihood.n_blocks
    losses, outputs = [], []
    for batch in problem.validation:
        mean = linearised_mean(posterior, batch.f, batch.jacobian)
        projection = projected(posterior.structure, batch.jacobian, n_blocks)
        cov = projection.covariance(posterior.precision, diagonal=score.diagonal)
        losses.append(score.losses(posterior, mean, cov, batch.targets))
        outputs.append((batch.f, batch.targets, batch.weights))
    noise = posterior.hyperparameters.sigma_noise
    fixed_noise = None if problem.free_noise else noise
    reference, weights = network_losses(likelihood, outputs, fixed_noise)
    means = means_if_worse(torch.cat(losses), reference, weights)
    if means is None:  # the posterior is not clearly worse
        return
    # the evidence also chose the noise, which 'auto' tunes on held-out samples
    noise_by_evidence = problem.free_noise and not problem.noise_on_held_out
    # text times a bool, and list times a bool: empty if false
    remedies = [
        "prior_precision='validation'" + " with sigma_noise='auto'" * noise_by_evidence,
        *["subset_of_weights='last_layer'"] * (posterior.layout.head is None),
        "tune(X_val, y_val)",
    ]
    warn_user(
        "The prior that maximises the evidence predicts the held-out samples "
        "worse than the network alone: the mean negative log-likelihood is "
        f"{means[0]:.3f} nats instead of {means[1]:.3f}. Use {' or '.join(remedies)}."
    )


def network_losses(
    likelihood: Any,
    batches: Iterable[tuple[Tensor, Tensor, Tensor | None]],
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return negative log-likelihoods (n,) of outputs in nats, and weights (n,).

    Parameters
    ----------
    likelihood : Likelihood
        Likelihood of the targets.
    batches : iterable of tuple
        Outputs (b, c), targets as `Likelihood.targets` returns them, and weights (b,).
    noise : Tensor or None
        Noise level (). None means the most probable noise level of each output.
    """
    rows = []  # pairs of losses (b,), or residuals (b, c), and weights (b,)
    for f, y, w in batches:
        f = f.double()
        if likelihood.is_classification:
            p = likelihood.probabilities(f).flatten(0, -2)
            log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log()
            values = likelihood.log_loss(log_p, y)
        elif likelihood.has_noise:
            values = f - y  # residuals: the noise may depend on all batches
        else:  # outputs have no variance, and the noise level is not used
            values = -likelihood.log_density(f, torch.zeros_like(f), y.double(), 1.0)
        rows.append((values, torch.ones_like(f[:, 0]) if w is None else w.double()))
    values, weights = map(torch.cat, zip(*rows, strict=True))
    if not likelihood.has_noise:
        return values, weights
    if noise is None:
        likelihood = Gaussian()  # without the ratios of the noise levels
        noise = clamped(weights @ values**2 / weights.sum()).sqrt()
    # residuals are outputs of variance zero for targets of zero
    zero = torch.zeros_like(values)
    return -likelihood.log_density(values, zero, zero, noise), weights


def means_if_worse(
    losses: Tensor, reference: Tensor, weights: Tensor
) -> tuple[float, float] | None:
    """Return the weighted means of losses (n,) and of reference losses (n,), or None.

    None means that the losses are not clearly larger: their mean excess is at most
    `NOTABLE` or at most its standard error.
    """
    shares, excess = weights / weights.sum(), losses - reference
    mean = shares @ excess
    # standard error of a weighted mean; the divisor corrects for the estimated mean,
    # as 1 - 1/n does with equal weights
    error = (shares**2 @ (excess - mean) ** 2 / (1 - shares @ shares)).sqrt()
    if mean > NOTABLE and mean > error:
        return float(shares @ losses), float(shares @ reference)
    return None
