"""Noise: the standard deviation of the observation noise, estimated from residuals."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from sklaplace.core.checks import warn_user
from sklaplace.core.linalg import all_finite, as_number, plain
from sklaplace.core.random import row_hash
from sklaplace.curvature.features import FeatureRecorder
from sklaplace.data.split import (
    groups_of_copies,
    row_keys,
    separate_replicates,
    shared_keys,
)
from sklaplace.estimators.predicting.output_model import BatchedOutputs
from sklaplace.likelihoods import Gaussian
from sklaplace.likelihoods.base import DataFit, losses_by_output
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.noise.residuals import Predictions, Residuals
from sklaplace.novelty.novelty import Novelty
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.predictive import linearised_mean, moments
from sklaplace.posterior.tuning.levels import SMALLEST_RATIO
from sklaplace.posterior.tuning.problem import LinearisedBatch

# Logarithms of the smallest and largest ratio of noise to root mean square residual.
_LOG_BOUNDS = math.log(1e-4), math.log(1e1)


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
        _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        weights = weights / torch.from_numpy(sizes[group]).to(weights)

    def level(mean: Tensor, variance: Tensor, y: Tensor) -> float:
        squares = weights @ likelihood.loss(mean, y) / weights.sum() / mean.shape[1]
        if not (all_finite(squares) and all_finite(variance)):
            raise ValueError(
                "The noise cannot be estimated: errors on held-out samples are not "
                "finite. Look for extreme values in X and X_val."
            )
        scale = math.sqrt(max(2 * float(squares), torch.finfo(torch.float32).tiny))

        def loss(log_ratio: float) -> float:
            sigma = math.exp(log_ratio + math.log(scale))
            return -float(weights @ likelihood.log_density(mean, variance, y, sigma))

        optimum = minimize_scalar(loss, bounds=_LOG_BOUNDS, method="bounded")
        return scale * math.exp(float(optimum.x))

    n_levels = losses_by_output(likelihood, mean, targets).shape[1]
    columns = (values.chunk(n_levels, 1) for values in (mean, variance, targets))
    levels = [level(m, v, y) for m, v, y in zip(*columns, strict=True)]
    return plain(as_number(torch.tensor(levels)))


# Largest number of residuals for fitting a noise model.
MOST_RESIDUALS = 10_000
# Upper bound on the leverage of a sample when its leave-one-out variance is computed.
MOST_LEVERAGE = 0.95
# With a larger mean leverage, residuals contain little information about the noise.
_LARGEST_LEVERAGE = 0.99
# A larger change in the proportions of noise levels, as a factor, triggers a warning.
NOTABLE_CHANGE = 2.0


def with_column_noises(networks: Sequence[TrainedNetwork]) -> list[TrainedNetwork]:
    """Set the relative noise level of each target column.

    The noise levels are proportional to the root mean square residuals of the columns,
    computed on held-out samples if available, and on training samples otherwise. The
    tuner then chooses a factor for all levels.

    Parameters
    ----------
    networks : sequence of TrainedNetwork
        The network, followed by the networks of the folds, if any. The likelihood
        remains unchanged if it is not Gaussian, has one column, or already has noise
        levels.
    """
    likelihood = networks[0].spec.likelihood
    is_shared = isinstance(likelihood, Gaussian) and likelihood.relative is None
    if not is_shared or networks[0].spec.n_outputs == 1:
        return list(networks)
    measured = networks[1:] or networks
    squares = torch.stack([_squares(network) for network in measured]).sum(0)
    adapted = replace(likelihood, relative=tuple(_proportions(squares).tolist()))
    return [
        replace(network, spec=replace(network.spec, likelihood=adapted))
        for network in networks
    ]


def _squares(network: TrainedNetwork) -> Tensor:
    """Return the weighted sum of squared residuals per column, (c,)."""
    dataset = network.train if network.held_out is None else network.held_out
    forward, total = network.forward(), torch.zeros((), dtype=torch.float64)
    with forward.frozen(), torch.no_grad():
        for x, y, w in network.batches(dataset):
            f = forward(x).double()
            squares = (f - network.spec.likelihood.targets(y, f)) ** 2
            total = total + (squares.sum(0) if w is None else w.double() @ squares)
    return total.to(network.device)


def _proportions(squares: Tensor) -> Tensor:
    """Return levels (c,) with a geometric mean of one, from squared residuals (c,)."""
    largest = squares.max().clamp(min=torch.finfo(squares.dtype).tiny)
    levels = (squares / largest).sqrt().clamp(min=SMALLEST_RATIO)
    return levels / levels.log().mean().exp()


def held_out_residuals(
    outputs: BatchedOutputs, held_out: Sequence[BatchedOutputs], levels: np.ndarray
) -> Residuals:
    """Return the residuals of held-out samples.

    Parameters
    ----------
    outputs : BatchedOutputs
        Outputs of the network that is used for predictions. This network provides the
        features.
    held_out : sequence of BatchedOutputs
        Outputs of networks with held-out samples. These outputs provide the moments,
        and may include ``outputs``. Samples beyond `MOST_RESIDUALS` are ignored.
    levels : ndarray of shape (c,)
        Constant noise levels.

    Notes
    -----
    The outputs of a fold's network have larger variances than those of the network for
    predictions, because a fold's network was trained on fewer samples. In a linear
    model with noise level s, leaving a sample with variance v out of the training
    increases its variance to v / (1 - v / s²). The variances in each column are divided
    by the weighted median of their ratios to this value, if the median exceeds one.

    Copies of a sample count as one residual, with the sum of their weights. Weights are
    divided by the number of residuals of the group, so that all groups count equally.
    The sum of the weights is then scaled to the effective number of groups or, without
    groups, of distinct inputs (Kish 1965). More residuals at the same inputs do not
    show how the noise depends on the inputs.
    """
    rows = _held_out_rows(outputs, held_out)
    rows = {name: values[rows["weight"] > 0] for name, values in rows.items()}
    leverage = np.minimum(rows["variance_if_seen"] / levels**2, MOST_LEVERAGE)
    variance_if_unseen = rows["variance_if_seen"] / (1 - leverage)
    ratios = rows["variance"] / np.maximum(variance_if_unseen, np.finfo(float).tiny)
    factor = np.maximum(1, weighted_median(ratios, rows["weight"]))
    residuals = rows["target"] - rows["mean"]
    inputs, keys = rows["inputs"], rows["key"]
    keys = shared_keys(inputs, keys) if inputs.size else keys
    groups = rows.get("group", keys)
    keys = separate_replicates(keys, rows["target"])
    # copies may have different predictions, from different folds
    codes = [np.unique(labels, return_inverse=True)[1] for labels in (keys, groups)]
    copies = groups_of_copies(np.column_stack([*codes, residuals]))
    order = np.lexsort((keys, groups))
    first = order[np.sort(np.unique(copies[order], return_index=True)[1])]
    weights = np.bincount(copies, weights=rows["weight"])[copies[first]]
    _, group, sizes = np.unique(groups[first], return_inverse=True, return_counts=True)
    if "group" in rows:
        weights = weights / sizes[group]
    totals = np.bincount(group, weights=weights)
    predictions = Predictions(
        features=torch.from_numpy(rows["features"][first]),
        inputs=torch.from_numpy(inputs[first]),
        mean=torch.from_numpy(rows["mean"][first]),
        variance=torch.from_numpy((rows["variance"] / factor)[first]),
    )
    return Residuals(
        predictions=predictions,
        values=residuals[first],
        # the sum of the weights is the effective number of groups
        weights=weights * weights.sum() / (totals**2).sum(),
        keys=groups[first],
    )


def _held_out_rows(
    outputs: BatchedOutputs, held_out: Sequence[BatchedOutputs]
) -> dict[str, np.ndarray]:
    """Return predictions, targets, weights, keys and groups of held-out samples.

    ``"variance_if_seen"`` is the variance that ``outputs`` predicts, whose network may
    have been trained on the sample. ``"group"`` is missing without groups.
    """
    forward, spec = outputs.network.forward(), outputs.network.spec
    batches: list[dict[str, np.ndarray]] = []
    for of_network in held_out:
        network = of_network.network
        labels, start = network.held_out_groups, 0
        groups = None if labels is None else row_keys(None, len(labels), 0, labels)
        is_fold = network.net is not outputs.network.net
        with forward.frozen(), network.forward().frozen(), torch.no_grad():
            for x, gaussian, y, weights in of_network.gaussians_of(network.held_out):
                if sum(len(batch["key"]) for batch in batches) >= MOST_RESIDUALS:
                    break
                mean, variance = gaussian
                with FeatureRecorder(forward, spec.feature_layers) as recorder:
                    features = recorder.take(len(forward(x)))
                if_seen = outputs.variances(forward, x)[1] if is_fold else variance
                tensors = {
                    "variance_if_seen": if_seen.double(),
                    **vars(Predictions.of(features, x, mean, variance)),
                    "target": spec.likelihood.targets(y, mean).double(),
                    "weight": torch.ones_like(mean[:, 0])
                    if weights is None
                    else weights,
                }
                batch = {name: t.cpu().numpy() for name, t in tensors.items()}
                batch["weight"] = batch["weight"].astype(np.float64)
                batch["key"] = row_hash(x).numpy()
                if groups is not None:
                    batch["group"] = groups[start : start + len(batch["key"])]
                start += len(batch["key"])
                batches.append(batch)
    names = batches[0].keys()
    return {name: np.concatenate([b[name] for b in batches]) for name in names}


def weighted_median(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted median of each column, (c,)."""
    # the lower and the upper median
    pair = [
        sign
        * np.quantile(sign * values, 0.5, 0, weights=weights, method="inverted_cdf")
        for sign in (1, -1)
    ]
    return np.mean(pair, axis=0)


def with_residual_noise(
    posterior: GaussianPosterior, held_out: Iterable[LinearisedBatch] | None
) -> GaussianPosterior:
    """Set initial noise levels of a posterior, which the tuner then scales.

    This function is like `with_column_noises`, but uses residuals at the posterior's
    mean. The residuals are those of held-out samples if given, and of training samples
    otherwise. If outputs share weights, the proportions of the levels do not change.
    """
    losses = posterior.data_fit.by_output
    if losses is not None:
        squares = 2 * losses * posterior.noise_proportions**2
        if held_out is not None:
            squares = torch.stack([_weighted_squares(posterior, b) for b in held_out])
            squares = squares.sum(0)
        levels = _proportions(squares)
        moved = posterior.with_noise_levels(levels)
        if moved is None:
            _warn_of_kept_proportions(posterior, levels)
        posterior = moved or posterior
    return posterior.replace(sigma_noise=root_mean_square(posterior.data_fit))


def seen_noise(
    data_fit: DataFit, novelty: Novelty | None, n_layers: int, relative: Tensor
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
    novelty : Novelty or None
        Features of the training samples. Without features, σ² is ``mean r²``.
    n_layers : int
        Number of layers L with a weight matrix.
    relative : Tensor of shape (c,)
        Relative noise levels of the columns.

    References
    ----------
    Golub, Heath and Wahba (1979), "Generalized cross-validation as a method for
    choosing a good ridge parameter".
    """
    level = root_mean_square(data_fit)
    if novelty is None:
        return level
    leverage = float(novelty.mean_leverage().clamp(max=_LARGEST_LEVERAGE))
    spread = (novelty.target_variances / relative**2).mean().sqrt()
    widened = level * (1 - leverage) ** -n_layers
    return torch.minimum(widened, torch.maximum(spread, level))


def root_mean_square(data_fit: DataFit) -> Tensor:
    """Return the root mean square residual of the training data, ()."""
    return (2 * data_fit.loss / data_fit.n_targets).clamp(min=1e-16).sqrt()


def loss_per_target(
    data_fit: DataFit, network: TrainedNetwork, posterior: GaussianPosterior
) -> float:
    """Return the network's mean loss per target, with the posterior's noise levels."""
    if data_fit.by_output is not None:
        relative = getattr(network.spec.likelihood, "relative", None)
        before = data_fit.loss.new_tensor(relative or (1.0,))
        factors = (before / posterior.noise_proportions) ** 2
        data_fit = data_fit.with_output_factors(factors)
    return float(data_fit.loss / data_fit.n_targets)


def _weighted_squares(posterior: GaussianPosterior, batch: LinearisedBatch) -> Tensor:
    """Return the weighted sum of a batch's squared residuals per column, (c,)."""
    mean = linearised_mean(posterior, batch.f, batch.jacobian)
    return batch.weights.double() @ (mean - batch.targets).double() ** 2


def _warn_of_kept_proportions(posterior: GaussianPosterior, levels: Tensor) -> None:
    """Warn if noise levels and residuals have very different proportions."""
    change = (levels / posterior.noise_proportions).log()
    if (change - change.mean()).abs().max() > math.log(NOTABLE_CHANGE):
        warn_user(
            "The residuals of the columns of y are not proportional to their noise "
            "levels, but tune keeps the ratios of these levels. Fit again with "
            "sigma_noise='auto', or with one number per column."
        )
