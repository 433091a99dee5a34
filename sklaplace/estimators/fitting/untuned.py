"""The posterior at the network's weights, before its hyperparameters are tuned."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sklaplace.core.budget import move
from sklaplace.core.linalg import as_number
from sklaplace.core.random import row_hash
from sklaplace.curvature import priors
from sklaplace.curvature.jacobian import Centring, backpropagate
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import Structure
from sklaplace.curvature.structures.full import Full
from sklaplace.data.dataset import Batches
from sklaplace.estimators.fitting.laplace_fit import LaplaceFit
from sklaplace.estimators.options.laplace import LaplaceOptions
from sklaplace.likelihoods.base import DataFit, loss_weights_or_ones
from sklaplace.networks.outputs import as_forward
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.noise.levels import root_mean_square
from sklaplace.posterior.gaussian import GaussianPosterior, Hyperparameters
from sklaplace.posterior.linear_model import LinearModel
from sklaplace.posterior.linearised import LinearisedNetwork
from sklaplace.posterior.tuning.problem import LinearisedBatch


def untuned(
    options: LaplaceOptions, fit: LaplaceFit
) -> tuple[GaussianPosterior, LinearModel | None]:
    """Return the posterior before tuning, and its linear model if there is one.

    The mean is at the network's weights. A linear model, in which the weights can be
    refitted, is that of the last layer or, if ``refine`` is True, of the linearised
    network. A prior matrix or earlier posterior is already part of the posterior.
    """
    network, curvature = fit.network, options.configured_curvature
    posterior = at_weights(
        network,
        fit.structure,
        fit.data_fit,
        initial_hyperparameters(options, network, root_mean_square(fit.data_fit)),
        curvature.order,
    )
    if (prior := options.prior) is not None:
        if not isinstance(prior, GaussianPosterior):
            prior = prior_of_matrix(prior, posterior)
        # an earlier posterior, whose curvature is added to that of the new samples
        earlier = move(prior.as_prior(), posterior.mean.device)
        posterior = posterior.under(earlier, options.accumulator)
    # unlike the other curvatures, the exact Hessian can have negative eigenvalues
    if curvature.is_exact:
        check_definite(posterior, is_tuned=options.tuner is not None)
    # None if the last layer's samples were not recorded
    model: LinearModel | None = fit.head_rows.build(
        posterior, curvature, options.accumulator
    )
    if model is None and options.refine is True:
        # a refit needs hashes of the samples, and Jacobians of the outputs themselves
        rows = LinearisedSamples(
            network,
            options.batches(network, network.train),
            in_training=True,
            is_centred=False,
        )
        model = LinearisedNetwork.of(posterior, rows, curvature, options.accumulator)
    return posterior, model


def initial_hyperparameters(
    options: LaplaceOptions, network: TrainedNetwork, noise: Tensor | None = None
) -> Hyperparameters:
    """Return the hyperparameters at the start of tuning.

    The initial value of a tuned prior precision is one, and that of tuned noise is
    ``noise``.
    """
    layout, device = network.spec.layout, network.device
    names = "prior_precision", "prior_mean", "sigma_noise", "temperature"
    values = {name: getattr(options, name) for name in names}
    if isinstance(values["prior_precision"], str):  # the name of a tuner
        values["prior_precision"] = 1.0
    if isinstance(values["sigma_noise"], str):
        values["sigma_noise"] = noise
    tensors = {
        name: torch.as_tensor(value, dtype=torch.float64, device=device)
        for name, value in values.items()
    }
    for name in ("prior_precision", "prior_mean", "temperature"):
        tensors[name] = as_number(tensors[name])
    # expand one value, or one per group, to the shape of the prior structure
    structure = options.prior_structure
    shape = PRIOR_STRUCTURES[priors.structure_name(structure)](layout)
    groups = priors.group_indices(structure, layout, device)
    delta = priors.by_tensor(tensors.pop("prior_precision"), groups)
    delta = delta.expand(shape).clone()
    return Hyperparameters(prior_precision=delta, groups=groups, **tensors)


def prior_of_matrix(
    matrix: ArrayLike, posterior: GaussianPosterior
) -> GaussianPosterior:
    """Return the Gaussian prior with the given precision matrix (P, P) and prior mean.

    Half of the smallest eigenvalue is used as a scalar prior precision. The remainder
    of the matrix is treated as the curvature of an earlier task.
    """
    precision = torch.tensor(np.asarray(matrix, dtype=float)).to(posterior.mean)
    precision = (precision + precision.T) / 2
    # half of the eigenvalue, so that the remainder is positive definite; at least the
    # rounding error of eigenvalues, because a precision must be positive
    eigenvalues = torch.linalg.eigvalsh(precision)
    rounding = torch.finfo(precision.dtype).eps * eigenvalues[-1]
    delta = eigenvalues[0].maximum(rounding) / 2
    rest = precision - delta * torch.eye(len(precision)).to(precision)
    h = replace(posterior.hyperparameters, prior_precision=delta)
    mean, zero = h.prior_mean.expand(len(precision)), torch.zeros_like(delta)
    return replace(
        posterior,
        mean=mean,
        weights=mean,
        # the posterior multiplies its structure by its scale
        structure=Full(posterior.layout, rest / posterior.scale),
        data_fit=DataFit(zero, zero),  # a prior has no data
        hyperparameters=h,
    )


def at_weights(
    network: TrainedNetwork,
    structure: Structure,
    data_fit: DataFit,
    hyperparameters: Hyperparameters,
    curvature_order: int,
) -> GaussianPosterior:
    """Return the posterior with the network's weights as its mean.

    The ``weights`` stay those of the network. A refit later changes only the ``mean``.
    """
    spec = network.spec
    weights = spec.layout.read(as_forward(network.net).module)
    return GaussianPosterior(
        mean=weights,
        weights=weights,
        structure=structure,
        layout=spec.layout,
        likelihood=spec.likelihood,
        data_fit=data_fit,
        hyperparameters=hyperparameters,
        curvature_order=curvature_order,
    )


def check_definite(posterior: GaussianPosterior, *, is_tuned: bool) -> None:
    """Raise ValueError if the posterior precision is not positive definite.

    If hyperparameters are tuned, the curvature itself must not be negative, because
    tuning tries weak priors.
    """
    lowest = float(posterior.structure.eigenvalues[0])
    if is_tuned and lowest < 0:
        raise ValueError(
            "curvature='hessian' cannot be tuned: the Hessian of the loss has the "
            f"eigenvalue {lowest:.3g}, so the weights are not a minimum. Use "
            "curvature='ggn', or a larger fixed prior_precision."
        )
    posterior.log_marginal_likelihood()  # raises if the prior precision is too small


@dataclass(frozen=True)
class LinearisedSamples:
    """Batches of samples that are linearised again in each pass, to save memory.

    Attributes
    ----------
    network : TrainedNetwork
        Trained network.
    batches : Batches
        Samples to linearise.
    in_training : bool
        Whether to hash the samples, which is required for a refit.
    is_centred : bool
        Whether to subtract the mean over outputs, which a softmax ignores.
    """

    network: TrainedNetwork
    batches: Batches
    in_training: bool = False
    is_centred: bool = True

    def __iter__(self) -> Iterator[LinearisedBatch]:
        """Yield the outputs, Jacobian, targets and loss weights of each batch.

        The columns of the Jacobian, one per output, are centred if the likelihood
        ignores a constant added to all outputs.
        """
        forward, spec = self.network.forward(), self.network.spec
        likelihood, columns = spec.likelihood, None
        if likelihood.is_shift_invariant and self.is_centred:
            columns = Centring(likelihood.n_blocks)
        for x, y, weights in self.batches:
            f, jacobian = backpropagate(forward, x, spec.layout, columns)
            targets = likelihood.targets(y, f)
            weights = loss_weights_or_ones(likelihood, targets, weights, f)
            keys = row_hash(x) if self.in_training else None
            yield LinearisedBatch(f, jacobian, targets, weights, keys)
