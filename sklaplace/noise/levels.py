"""Levels: constant standard deviations of the noise, from residuals."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from sklaplace.core.linalg import all_finite
from sklaplace.likelihoods import Gaussian, RegressionLikelihood
from sklaplace.likelihoods.base import DataFit
from sklaplace.networks.trained import TrainedNetwork

# Logarithms of the smallest and largest ratio of noise to root mean square residual.
# Noise is smaller if uncertain weights explain the residuals, and hardly ever larger.
_LOG_BOUNDS = math.log(1e-4), math.log(1e1)
# Smallest ratio of a level to the largest level. An output that is fitted exactly would
# have zero noise. The units of the outputs can differ by many orders of magnitude.
SMALLEST_LEVEL_TO_LARGEST = 1e-6
# With a larger mean leverage, residuals contain little information about the noise.
_LARGEST_LEVERAGE = 0.99


def root_mean_square(data_fit: DataFit) -> Tensor:
    """Return the root mean square residual of the training data, ().

    A loss is half a squared residual. The result is at least 1e-8, because noise must
    be positive.
    """
    return (2 * data_fit.loss / data_fit.n_targets).clamp(min=1e-16).sqrt()


def seen_noise(
    data_fit: DataFit, *, mean_leverage: Tensor, target_variances: Tensor, n_layers: int
) -> Tensor:
    """Estimate the noise, (), from the residuals of the training samples.

    For residuals ``r`` and leverages ``h`` of the last layer's features,

        σ² = min(mean r² / (1 - mean h)^{2L}, variance of the targets).

    For L = 1, the first term is the generalised cross-validation score of the last
    layer, which estimates the mean square of leave-one-out residuals. Because the
    features were trained on the same samples, the factor of the last layer is applied
    once for each of the L layers. If the network predicts worse than the mean of the
    targets, σ² is ``mean r²``.

    Parameters
    ----------
    data_fit : DataFit
        Losses on the training samples.
    mean_leverage : Tensor of shape ()
        Mean leverage of the training samples.
    target_variances : Tensor of shape (c,)
        Variances of the targets, in units of the relative noise levels.
    n_layers : int
        Number of layers L with a weight matrix.

    References
    ----------
    Golub, Heath and Wahba (1979), "Generalized cross-validation as a method for
    choosing a good ridge parameter".
    """
    level = root_mean_square(data_fit)
    leverage = float(mean_leverage.clamp(max=_LARGEST_LEVERAGE))
    spread = target_variances.mean().sqrt()
    widened = level * (1 - leverage) ** -n_layers
    return torch.minimum(widened, torch.maximum(spread, level))


def most_probable_level(
    likelihood: RegressionLikelihood,
    mean: Tensor,
    variance: Tensor,
    y: Tensor,
    weights: Tensor,
) -> float:
    """Return the noise level that maximises the likelihood of targets (n, c).

    Parameters
    ----------
    likelihood : RegressionLikelihood
        Likelihood of the targets.
    mean, variance : Tensor of shape (n, c)
        Moments of the noise-free outputs.
    y : Tensor of shape (n, c)
        Targets.
    weights : Tensor of shape (n,)
        Sample weights.
    """
    squares = weights @ likelihood.loss(mean, y) / weights.sum() / mean.shape[1]
    if not (all_finite(squares) and all_finite(variance)):
        raise ValueError(
            "The noise cannot be estimated: errors on held-out samples are not finite. "
            "Look for extreme values in X and X_val."
        )
    # root mean square residual, because the loss is half the squared residual; it is
    # positive even if all residuals are zero
    scale = math.sqrt(max(2 * float(squares), torch.finfo(torch.float32).tiny))

    def loss(log_ratio: float) -> float:
        sigma = math.exp(log_ratio + math.log(scale))
        return -float(weights @ likelihood.log_density(mean, variance, y, sigma))

    optimum = minimize_scalar(loss, bounds=_LOG_BOUNDS, method="bounded")
    return scale * math.exp(float(optimum.x))


def proportions(squares: Tensor) -> Tensor:
    """Return relative noise levels (c,) from mean or summed squared residuals (c,).

    The levels are proportional to the roots of the squares, with a geometric mean of
    one.
    """
    # positive even if all residuals are zero
    largest = squares.max().clamp(min=torch.finfo(squares.dtype).tiny)
    levels = (squares / largest).sqrt().clamp(min=SMALLEST_LEVEL_TO_LARGEST)
    return levels / levels.log().mean().exp()


def with_column_noises(
    networks: Sequence[TrainedNetwork], *, on_held_out: bool
) -> list[TrainedNetwork]:
    """Set the relative noise level of each target column.

    The noise levels are proportional to the root mean square residuals of the columns.
    The tuner then chooses a factor for all levels.

    Parameters
    ----------
    networks : sequence of TrainedNetwork
        The network, followed by the networks of the folds, if any. The likelihood
        remains unchanged if it is not Gaussian, has one column, or already has noise
        levels.
    on_held_out : bool
        Whether to compute the residuals on held-out samples where there are any, and
        not on training samples.
    """
    likelihood = networks[0].spec.likelihood
    has_one_level = isinstance(likelihood, Gaussian) and likelihood.relative is None
    if not has_one_level or networks[0].spec.n_outputs == 1:
        return list(networks)
    # if there are folds, their held-out samples are used
    measured = networks[1:] or networks
    squares = torch.stack([_squared_residuals(n, on_held_out) for n in measured]).sum(0)
    by_column = replace(likelihood, relative=tuple(proportions(squares).tolist()))
    return [
        replace(network, spec=replace(network.spec, likelihood=by_column))
        for network in networks
    ]


def _squared_residuals(network: TrainedNetwork, on_held_out: bool) -> Tensor:
    """Return the weighted sum of squared residuals per column, (c,).

    The samples are the held-out samples if there are any and ``on_held_out`` is True,
    and the training samples otherwise.
    """
    has_held_out = on_held_out and network.held_out is not None
    dataset = network.held_out if has_held_out else network.train
    forward, total = network.forward(), torch.zeros((), dtype=torch.float64)
    with forward.frozen(), torch.no_grad():
        for x, y, w in network.batches(dataset):
            f = forward(x).double()
            squares = (f - network.spec.likelihood.targets(y, f)) ** 2
            total = total + (squares.sum(0) if w is None else w.double() @ squares)
    return total.to(network.device)
