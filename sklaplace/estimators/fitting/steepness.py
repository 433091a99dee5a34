"""Choice of the residual's steepness on held-out samples."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from sklaplace.curvature.features import FeatureRecorder
from sklaplace.estimators.predicting.glm_outputs import GLMOutputs
from sklaplace.estimators.predicting.output_model import BatchedOutputs
from sklaplace.estimators.predicting.residual_outputs import ResidualOutputs
from sklaplace.likelihoods.base import loss_weights_or_ones
from sklaplace.novelty.residual import relative_variance
from sklaplace.novelty.steepness import largest_within_tolerance
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.tuning.problem import HeldOutScore


def chosen_steepness(
    outputs: Iterable[BatchedOutputs], score: HeldOutScore, steepnesses: Sequence[float]
) -> float:
    """Return the largest steepness whose score is close to the best.

    The steepness is the power by which the variance of the `Residual` grows with
    distance from the training samples. Without held-out samples, return its largest
    value.

    Parameters
    ----------
    outputs : iterable of BatchedOutputs
        Outputs with a residual, of networks with held-out samples.
    score : HeldOutScore
        Score on the held-out samples.
    steepnesses : sequence of float
        Values to choose from, in ascending order.
    """
    # losses and weights of all batches of all networks
    batches = [b for model in outputs for b in _losses(model, score, steepnesses)]
    if not batches:
        return steepnesses[-1]
    losses, weights = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    return largest_within_tolerance(losses, weights, steepnesses)


def with_steepness(outputs: BatchedOutputs, steepness: float) -> BatchedOutputs:
    """Return the outputs with another steepness of the residual."""
    model = cast(ResidualOutputs, outputs.model)
    residual = replace(model.residual, steepness=steepness)
    return replace(outputs, model=replace(model, residual=residual))


def _losses(
    outputs: BatchedOutputs, score: HeldOutScore, steepnesses: Sequence[float]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield losses (b, m) for m values, and weights (b,), of held-out samples.

    The moments of the outputs and ``log p₀/p`` are computed once. For each steepness,
    the residual is then added to the covariance. Moments are always those of the
    linearised network, as in tuning.
    """
    network, model = outputs.network, cast(ResidualOutputs, outputs.model)
    posterior = cast(GaussianPosterior, model.posterior)
    inner = GLMOutputs(model.n_samples, model.seed, posterior)  # no residual
    forward, likelihood = network.forward(), network.spec.likelihood
    amplitudes, diagonal = model.residual.amplitudes, score.diagonal
    n_blocks = 1 if diagonal else likelihood.n_blocks  # variances have no blocks
    # only probabilities of classes can ignore the mean of the outputs
    centred = score.log_proba is not None and score.is_centred
    with forward.frozen(), torch.no_grad():
        for x, y, weights in outputs.batches_of(network.held_out):
            with FeatureRecorder(forward, model.layers) as recorder:
                mean, cov = inner.gaussian(
                    forward, x, n_blocks=n_blocks, diagonal=diagonal, centred=centred
                )
                log_ratios = model.log_ratios(recorder, x, len(mean))
            targets = likelihood.targets(y, mean)
            weights = loss_weights_or_ones(likelihood, targets, weights, mean)
            losses = []
            for steepness in steepnesses:
                relative = relative_variance(log_ratios, steepness)
                total = amplitudes.added(cov, relative, n_blocks, centred=centred)
                losses.append(score.losses(posterior, mean, total, targets))
            yield torch.stack(losses, 1), weights.double()
