"""Change the prior precision, noise or temperature of a fitted estimator."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sklaplace.core.cache import fingerprint
from sklaplace.core.checks import check_option, check_positive, listed
from sklaplace.core.linalg import as_number
from sklaplace.curvature.network import NetworkSpec
from sklaplace.curvature.priors import by_tensor
from sklaplace.estimators.options.laplace import LaplaceOptions, check_prior_shape
from sklaplace.estimators.targets.base import Targets
from sklaplace.estimators.targets.numbers import NumberTargets
from sklaplace.posterior.gaussian import GaussianPosterior

# hyperparameters that `tune` can choose
TUNABLE = "prior_precision", "sigma_noise", "temperature"


def under_hyperparameters(
    posterior: GaussianPosterior,
    given: Mapping[str, Any],
    options: LaplaceOptions,
    targets: Targets,
) -> GaussianPosterior:
    """Return the posterior with new prior precision or noise; None keeps the old value.

    Tensors remain attached to their autograd graph. The noise is in units of ``y``.
    ``given`` maps names of hyperparameters to numbers, arrays, tensors or None.
    """
    values = {name: value for name, value in given.items() if value is not None}
    for name, value in values.items():
        # numpy, which checks the value, takes no tensor with a graph or on a GPU
        plain = value.detach().cpu() if isinstance(value, Tensor) else value
        check_positive(name, plain, scalar=False)
    if "prior_precision" in values:
        structure = options.prior_structure
        check_prior_shape(values["prior_precision"], structure, posterior.layout)
    old = posterior.hyperparameters
    device = old.prior_precision.device
    tensors = {
        name: torch.as_tensor(value, dtype=torch.float64, device=device)
        for name, value in values.items()
    }
    if "prior_precision" in tensors:
        # one value for all weights, per group, or already in the shape of the old value
        delta = by_tensor(as_number(tensors["prior_precision"]), old.groups)
        delta = delta.expand(old.prior_precision.shape)
        posterior = posterior.replace(prior_precision=delta)
    if "sigma_noise" in tensors:
        _check_noise(posterior, "was given", "Leave it out.")
        posterior = _under_noise(posterior, tensors["sigma_noise"], targets)
    return posterior


def _under_noise(
    posterior: GaussianPosterior, noise: Tensor, targets: Targets
) -> GaussianPosterior:
    """Return the posterior with new noise, () or (n_outputs,), in units of ``y``.

    The posterior's noise levels are in the units of the network's outputs, each of
    which equals ``scale`` units of ``y``. Raise ValueError if the ratios of the noise
    levels change and the curvature cannot be converted to the new ratios.
    """
    assert isinstance(targets, NumberTargets)  # other targets have no noise
    n, scale = targets.n_outputs, targets.scaling.scale
    if noise.shape not in ((), (n,)):
        raise ValueError(
            f"sigma_noise has shape {tuple(noise.shape)}. Pass one number, or one per "
            f"column of y: shape ({n},)."
        )
    unit = torch.as_tensor(scale, dtype=noise.dtype, device=noise.device)
    rescaled = posterior.with_noise_levels((noise / unit).expand(n))
    if rescaled is None:
        old = posterior.noise_proportions * posterior.hyperparameters.sigma_noise
        raise ValueError(
            f"sigma_noise={noise.tolist()} is not a multiple of sigma_noise_="
            f"{(old * unit).cpu().numpy().round(6).tolist()}. Use a multiple, or "
            "fit with subset_of_weights='last_layer' and hessian_structure='kron', "
            "'diag' or 'full'."
        )
    return rescaled


def free_parameters(posterior: GaussianPosterior, parameters: Any) -> frozenset[str]:
    """Return the names of the hyperparameters that `tune` chooses.

    Raise ValueError if ``posterior.earlier`` is set: a prior that is a matrix, or the
    posterior of an earlier task, is fixed.

    ``parameters`` is a name or a list of names. None means the prior precision and, if
    there is any, the noise; only an explicit name tunes the temperature.
    """
    if posterior.earlier is not None:
        raise ValueError(
            "The prior is a matrix or the posterior of an earlier task, and cannot "
            "be tuned. Fit again with another prior."
        )
    if parameters is None:
        # the first name, and the second one if there is noise
        return frozenset(TUNABLE[: 1 + posterior.likelihood.has_noise])
    names = np.atleast_1d(parameters).tolist()
    for name in names:
        check_option("parameters", name, TUNABLE)
    if not names:
        raise ValueError("parameters is empty. Name one or more, or use None.")
    if "sigma_noise" in names:
        _check_noise(posterior, "is to be tuned", "Leave it out of parameters.")
    return frozenset(names)


def _check_noise(posterior: GaussianPosterior, event: str, hint: str) -> None:
    """Raise ValueError if the likelihood has no observation noise."""
    if not posterior.likelihood.has_noise:
        raise ValueError(
            f"sigma_noise {event}, but this likelihood has no observation noise. {hint}"
        )


def check_evidence(
    free: frozenset[str], y: ArrayLike | None, sample_weight: ArrayLike | None
) -> None:
    """Raise ValueError if y lacks X, or if the temperature is to be tuned."""
    if y is not None or sample_weight is not None:
        raise ValueError("y or sample_weight was passed without X. Pass X and y.")
    if "temperature" in free:
        raise ValueError(
            "The evidence cannot choose the temperature, because a tempered likelihood "
            "is not normalised. Pass X and y of held-out rows."
        )


def check_addable(
    posterior: GaussianPosterior,
    spec: NetworkSpec,
    old: LaplaceOptions,
    new: LaplaceOptions,
) -> None:
    """Raise ValueError if the new options do not allow samples to be added.

    The curvature of new samples must have the settings of the old curvature, and must
    be computed at the posterior's mean. After a refit, the network can have this mean
    as its weights only if `NetworkSpec.head_map` is set: the outputs are then linear in
    the weights of the last layer. Otherwise, the refit was one of the linearised
    network.
    """
    # options can be arrays, so hashes are compared
    before, after = old.curvature_settings(), new.curvature_settings()
    changed = [k for k in after if fingerprint(before[k]) != fingerprint(after[k])]
    if changed:
        raise ValueError(
            f"{listed(changed)} changed since fit. Restore the old value, or fit again."
        )
    if posterior.is_refitted and spec.head_map is None:
        raise ValueError(
            "New rows are linearised at the trained weights, but refine=True has moved "
            "the mean. Use refine=False, or subset_of_weights='last_layer'."
        )
