"""Noise: the standard deviation of the observation noise, from residuals."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from sklaplace.core.linalg import all_finite
from sklaplace.estimators.output_model import BatchedOutputs
from sklaplace.likelihoods import Gaussian
from sklaplace.networks.trained import TrainedNetwork
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
    if not (all_finite(squares) and all_finite(variance)):
        raise ValueError(
            "The noise cannot be estimated: the network's errors are too large for "
            "some of the samples held out for it. Look for values of X, or of X_val, "
            "far beyond the others."
        )
    scale = math.sqrt(max(2 * float(squares), torch.finfo(torch.float32).tiny))

    def loss(log_ratio: float) -> float:
        sigma = math.exp(log_ratio + math.log(scale))
        return -float(weights @ likelihood.log_density(mean, variance, y, sigma))

    found = minimize_scalar(loss, bounds=_LOG_BOUNDS, method="bounded")
    return scale * math.exp(float(found.x))


# Smallest noise of a target column over the largest, by which others are not divided.
_SMALLEST_RATIO = 1e-3


def with_column_noises(networks: Sequence[TrainedNetwork]) -> list[TrainedNetwork]:
    """Return networks with a noise level for each target column, in proportion.

    Their common factor is left to a tuner. They are proportional to the root mean
    square residuals of the columns: of held-out samples if there are any, else of
    training samples.

    Parameters
    ----------
    networks : sequence of TrainedNetwork
        A network, and those of its folds if there are any. A likelihood that is not
        Gaussian, has one column, or has levels already, is not changed.
    """
    likelihood = networks[0].spec.likelihood
    is_shared = isinstance(likelihood, Gaussian) and likelihood.relative is None
    if not is_shared or networks[0].spec.n_outputs == 1:
        return list(networks)
    parts = networks[1:] or networks
    squares = torch.stack([_squares(network) for network in parts]).sum(0)
    largest = squares.max().clamp(min=torch.finfo(squares.dtype).tiny)
    levels = (squares / largest).sqrt().clamp(min=_SMALLEST_RATIO)
    relative = (levels / levels.log().mean().exp()).tolist()
    own = replace(likelihood, relative=tuple(relative))
    return [
        replace(network, spec=replace(network.spec, likelihood=own))
        for network in networks
    ]


def _squares(network: TrainedNetwork) -> Tensor:
    """Weighted sums of squared residuals, (c,)."""
    dataset = network.train if network.held_out is None else network.held_out
    forward, total = network.forward(), torch.zeros((), dtype=torch.float64)
    with forward.frozen(), torch.no_grad():
        for x, y, w in network.batches(dataset):
            f = forward(x).double()
            squares = (f - network.spec.likelihood.targets(y, f)) ** 2
            total = total + (squares.sum(0) if w is None else w.double() @ squares)
    return total.to(network.device)
