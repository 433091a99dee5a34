"""Noise: the standard deviation of the observation noise, from residuals."""

import math
from typing import Any

import torch
from scipy.optimize import minimize_scalar

from sklaplace.estimators.output_model import BatchedOutputs
from sklaplace.posterior.predictive import moments

# Logarithms of the smallest and largest noise over the root mean square residual.
_LOG_BOUNDS = math.log(1e-4), math.log(1e1)


def most_probable_noise(outputs: BatchedOutputs, dataset: Any) -> float:
    """Return the noise under which the targets of a dataset are most probable.

    Maximises ``Σ w log N(y | mean, variance + σ²)`` over σ, where means and variances
    are those of drawn outputs.

    Parameters
    ----------
    outputs : BatchedOutputs
        Outputs of a network in evaluation mode.
    dataset : Dataset
        Samples with targets.

    Returns
    -------
    float
        Standard deviation, in units of the targets.

    Notes
    -----
    Costs one pass over the samples; the outputs are then kept, in (n, c) memory.
    """
    likelihood, parts = outputs.network.spec.likelihood, []
    for draws, y, w in outputs.draws_of(dataset):
        mean, variance = moments(draws, diagonal=True, centred=False)
        weights = torch.ones_like(mean[:, 0]) if w is None else w.to(mean)
        parts.append((mean, variance, likelihood.targets(y, mean), weights))
    mean, variance, y, weights = (torch.cat(part) for part in zip(*parts, strict=True))
    squares = weights @ likelihood.loss(mean, y) / weights.sum() / mean.shape[1]
    scale = math.sqrt(max(2 * float(squares), torch.finfo(torch.float32).tiny))

    def loss(log_ratio: float) -> float:
        sigma = math.exp(log_ratio + math.log(scale))
        return -float(weights @ likelihood.log_density(mean, variance, y, sigma))

    found = minimize_scalar(loss, bounds=_LOG_BOUNDS, method="bounded")
    return scale * math.exp(float(found.x))
