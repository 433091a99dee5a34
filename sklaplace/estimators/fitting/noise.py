"""Estimates of the noise that need the outputs of a network, or its posterior."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from sklaplace.core.checks import warn_user
from sklaplace.core.linalg import as_number, plain
from sklaplace.core.random import row_hash
from sklaplace.curvature.features import FeatureRecorder
from sklaplace.data.split import row_keys
from sklaplace.estimators.predicting.output_model import BatchedOutputs
from sklaplace.likelihoods.base import DataFit, losses_by_output
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.noise.levels import most_probable_level, proportions, root_mean_square
from sklaplace.noise.residuals import HeldOutRows, Predictions
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.predictive import linearised_mean, moments
from sklaplace.posterior.tuning.problem import LinearisedBatch

# Largest number of residuals for fitting a noise model.
MOST_RESIDUALS = 10_000
# A larger change in the proportions of noise levels, as a factor, triggers a warning.
NOTABLE_CHANGE = 2.0


def most_probable_noise(outputs: BatchedOutputs, dataset: object) -> float | np.ndarray:
    """Return the noise levels that maximise the likelihood of a dataset's targets.

    The function maximises ``Σ w log N(y | mean, variance + σ²)`` over σ, with the mean
    and variance over draws of the outputs.

    Parameters
    ----------
    outputs : BatchedOutputs
        Outputs of a network in evaluation mode.
    dataset : Dataset
        Samples with targets. If these are held-out samples with groups, all groups
        count equally.

    Returns
    -------
    float or ndarray of shape (c,)
        Standard deviation of each column's noise, in units of the targets. A number if
        there is one column, or if the likelihood has no losses by output.

    Notes
    -----
    The estimate requires one pass over the samples, and memory for outputs (n, c).
    """
    likelihood, batches = outputs.network.spec.likelihood, []
    for draws, y, w in outputs.draws_of(dataset):
        mean, variance = moments(draws, diagonal=True, centred=False)
        weights = torch.ones_like(mean[:, 0]) if w is None else w.to(mean)
        batches.append((mean, variance, likelihood.targets(y, mean), weights))
    mean, variance, targets, weights = map(torch.cat, zip(*batches, strict=True))
    groups = outputs.network.held_out_groups
    if groups is not None and dataset is outputs.network.held_out:
        # all groups count equally
        _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        weights = weights / torch.from_numpy(sizes[group]).to(weights)
    # one level per column, or a single level if the loss cannot be split by column
    n_levels = losses_by_output(likelihood, mean, targets).shape[1]
    columns = (values.chunk(n_levels, 1) for values in (mean, variance, targets))
    levels = [
        most_probable_level(likelihood, m, v, y, weights)
        for m, v, y in zip(*columns, strict=True)
    ]
    # a single level becomes a float, and several levels an array
    return plain(as_number(torch.tensor(levels)))


def held_out_rows(
    outputs: BatchedOutputs, held_out: Sequence[BatchedOutputs]
) -> HeldOutRows:
    """Return held-out samples with their predictions.

    Parameters
    ----------
    outputs : BatchedOutputs
        Outputs of the network that is used for predictions. This network provides the
        features.
    held_out : sequence of BatchedOutputs
        Outputs of networks with held-out samples. These outputs provide the moments,
        and may include ``outputs``. Samples beyond `MOST_RESIDUALS` are ignored, up to
        the size of a batch.
    """
    rows: list[HeldOutRows] = []
    for fold_outputs in held_out:
        n_left = MOST_RESIDUALS - sum(map(len, rows))
        if n_left > 0:
            rows.append(_rows_of_network(outputs, fold_outputs, n_left))
    return HeldOutRows.joined(rows)


def _rows_of_network(
    outputs: BatchedOutputs, fold_outputs: BatchedOutputs, n_rows: int
) -> HeldOutRows:
    """Return at least ``n_rows`` held-out samples of a network, or all if fewer.

    ``fold_outputs`` are of the network that holds out the samples, and predict their
    moments. ``outputs`` are of the network for predictions, and provide the features
    and the variances of a network that may have seen the samples. Both can be the same.
    """
    network, spec = fold_outputs.network, outputs.network.spec
    is_of_fold = network.net is not outputs.network.net
    # no column without groups
    groups, labels = np.empty((len(network.held_out), 0), int), network.held_out_groups
    if labels is not None:
        groups = row_keys(None, len(labels), seed=0, groups=labels)[:, np.newaxis]
    forward = outputs.network.forward()
    batches: list[HeldOutRows] = []
    with forward.frozen(), network.forward().frozen(), torch.no_grad():
        for x, gaussian, y, weights in fold_outputs.gaussians_of(network.held_out):
            n_before = sum(map(len, batches))
            if n_before >= n_rows:
                break
            mean, variance = gaussian
            with FeatureRecorder(forward, spec.feature_layers) as recorder:
                features = recorder.take(len(forward(x)))
            # variances of the network for predictions; known if both are the same
            _, if_seen = outputs.variances(forward, x) if is_of_fold else gaussian
            weights = torch.ones_like(mean[:, 0]) if weights is None else weights
            tensors = {
                **vars(Predictions.of(features, x, mean, variance)),
                "variance_if_seen": if_seen.double(),
                "targets": spec.likelihood.targets(y, mean).double(),
                "weights": weights.double(),
                "keys": row_hash(x),
            }
            arrays = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
            batch_groups = groups[n_before : n_before + len(mean)]
            batches.append(HeldOutRows(**arrays, groups=batch_groups))
    return HeldOutRows.joined(batches)


def with_residual_noise(
    posterior: GaussianPosterior, held_out: Iterable[LinearisedBatch] | None
) -> GaussianPosterior:
    """Return the posterior with initial noise levels, which the tuner then scales.

    Squared residuals per column determine the proportions of the levels, and the loss
    on the training samples their common factor.

    This function is like `with_column_noises`, but uses residuals at the posterior's
    mean. The residuals are those of held-out samples if given, and of training samples
    otherwise. If outputs share weights, the proportions of the levels do not change.
    """
    losses = posterior.data_fit.by_output
    if losses is not None:
        # a loss is half the squared residual, in units of the column's proportion
        squares = 2 * losses * posterior.noise_proportions**2
        if held_out is not None:
            squares = torch.stack([_weighted_squares(posterior, b) for b in held_out])
            squares = squares.sum(0)
        levels = proportions(squares)
        # None if the curvature cannot be converted to other proportions
        rescaled = posterior.with_noise_levels(levels)
        if rescaled is None:
            _warn_of_kept_proportions(posterior, levels)
        posterior = rescaled or posterior
    return posterior.replace(sigma_noise=root_mean_square(posterior.data_fit))


def loss_per_target(
    data_fit: DataFit, network: TrainedNetwork, posterior: GaussianPosterior
) -> float:
    """Return the network's mean loss per target, with the posterior's noise levels.

    A loss is half a squared residual, divided by the square of the column's relative
    noise level. Tuning may have changed these levels since ``data_fit`` was computed.
    """
    if data_fit.by_output is not None:
        # the stored losses are in units of the network's noise levels
        relative = getattr(network.spec.likelihood, "relative", None)
        old_levels = data_fit.loss.new_tensor(relative or (1.0,))
        factors = (old_levels / posterior.noise_proportions) ** 2
        data_fit = data_fit.with_output_factors(factors)
    return float(data_fit.loss / data_fit.n_targets)


def _weighted_squares(posterior: GaussianPosterior, batch: LinearisedBatch) -> Tensor:
    """Return the weighted sum of a batch's squared residuals per column, (c,)."""
    mean = linearised_mean(posterior, batch.f, batch.jacobian)
    return batch.weights.double() @ (mean - batch.targets).double() ** 2


def _warn_of_kept_proportions(posterior: GaussianPosterior, levels: Tensor) -> None:
    """Warn if noise levels and residuals have very different proportions.

    ``levels`` are those of the residuals. The posterior keeps its own proportions.
    """
    # a common factor of all levels is no change of proportions
    change = (levels / posterior.noise_proportions).log()
    if (change - change.mean()).abs().max() > math.log(NOTABLE_CHANGE):
        warn_user(
            "The residuals of the columns of y are not proportional to their noise "
            "levels, but tune keeps the ratios of these levels. Fit again with "
            "sigma_noise='auto', or with one number per column."
        )
