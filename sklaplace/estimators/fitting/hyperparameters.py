"""Prior precision, noise and temperature of a fitted Laplace estimator, changed."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sklaplace.core import progress
from sklaplace.core.cache import fingerprint
from sklaplace.core.checks import check_option, check_positive, listed, naming
from sklaplace.estimators.options.laplace import LaplaceOptions, check_prior_shape
from sklaplace.estimators.training.samples import (
    applicable,
    check_loader,
    weighted_data,
)
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.novelty import Novelty

# what `tune` can choose
TUNABLE = "prior_precision", "sigma_noise", "temperature"


def under_hyperparameters(model: Any, given: Mapping[str, Any]) -> GaussianPosterior:
    """Return the posterior under given prior precision and noise; None keeps a value.

    Tensors stay in their graph.
    """
    posterior = model.posterior_
    values = {name: value for name, value in given.items() if value is not None}
    for name, value in values.items():
        plain = value.detach().cpu() if isinstance(value, Tensor) else value
        check_positive(name, plain, scalar=False)
    if "prior_precision" in values:
        structure = model._options.prior_structure
        check_prior_shape(values["prior_precision"], structure, posterior.layout)
    h = posterior.hyperparameters
    device = h.prior_precision.device
    tensors = {
        name: torch.as_tensor(value, dtype=torch.float64, device=device)
        for name, value in values.items()
    }
    if "prior_precision" in tensors:
        delta = tensors["prior_precision"].expand(h.prior_precision.shape)
        posterior = posterior.replace(prior_precision=delta)
    if "sigma_noise" in tensors:
        _check_noise(posterior, "was given", "Leave it out.")
        posterior = _under_noise(model, posterior, tensors["sigma_noise"])
    return posterior


def _under_noise(model: Any, posterior: GaussianPosterior, noise: Tensor) -> Any:
    """Return the posterior under noise in the units of ``y``, () or (c,)."""
    targets = model._targets
    n = targets.n_outputs
    if noise.shape not in ((), (n,)):
        raise ValueError(
            f"sigma_noise has shape {tuple(noise.shape)}. Pass one number, or one per "
            f"column of y: shape ({n},)."
        )
    unit = torch.as_tensor(targets.scaling.scale, dtype=noise.dtype)
    levels = (noise / unit.to(noise.device)).expand(n)
    found = posterior.with_noise_levels(levels)
    if found is None:
        now = np.round(model.sigma_noise_, 6).tolist()
        raise ValueError(
            f"sigma_noise={noise.tolist()} is in other proportions than the levels "
            f"sigma_noise_={now} of the columns of y. The curvature of these weights "
            "was summed under those, and does not tell what each column adds. Use a "
            "multiple of sigma_noise_; or fit with the levels to compare, or with "
            "subset_of_weights='last_layer' and hessian_structure='kron', 'diag' or "
            "'full', which can compare any."
        )
    return found


def retuned(
    model: Any, X: Any, y: Any, sample_weight: Any, parameters: Any
) -> tuple[GaussianPosterior, Novelty | None]:
    """Return the posterior under hyperparameters that are chosen anew, and the novelty.

    On given samples, or by the evidence of the training data if ``X`` is None.
    """
    posterior = model.posterior_
    if posterior.earlier is not None:
        raise ValueError(
            "The prior is the posterior of an earlier task, which fixes prior, noise "
            "and temperature, so that nothing can be tuned. Fit anew."
        )
    free = _free_names(posterior, parameters)
    network = TrainedNetwork(model.estimator_, model.network_spec_)
    if X is None:
        _check_evidence(free, y, sample_weight)
    else:
        check_loader(X, "tune")
        if y is None:
            raise ValueError(
                "y is missing: samples to tune on need inputs and targets. Pass both X "
                "and y, or neither."
            )
        inputs, targets = model._check_samples(X, y, reset=False)
        data = weighted_data(
            model._targets,
            applicable(model.estimator_, inputs),
            targets,
            sample_weight,
        )
        network = replace(network, held_out=data.dataset(model.estimator_))
    score = replace(model._score(network.spec.likelihood), is_given=True)
    solver = model._solver(replace(model._options, residual=model.residual))
    with progress.phase("tune"), nullcontext() if X is None else naming(X="X"):
        posterior = solver.retuned(posterior, network, score, free, model._novelty)
    if model._novelty is None:
        return posterior, None
    return posterior, model._novelty.inflated(score.leverages)


def _free_names(posterior: GaussianPosterior, parameters: Any) -> frozenset[str]:
    """Return the names of what is to be chosen."""
    if parameters is None:
        return frozenset(TUNABLE[: 1 + posterior.likelihood.has_noise])
    names = [parameters] if isinstance(parameters, str) else parameters
    try:
        names = list(names)
    except TypeError:
        names = [parameters]  # refused next
    for name in names:
        check_option("parameters", name, TUNABLE)
    if not names:
        raise ValueError("parameters is empty. Name what is to be chosen, or use None.")
    if "sigma_noise" in names:
        _check_noise(posterior, "is to be tuned", "Leave it out of parameters.")
    return frozenset(names)


def _check_noise(posterior: GaussianPosterior, event: str, hint: str) -> None:
    if not posterior.likelihood.has_noise:
        raise ValueError(
            f"sigma_noise {event}, but this likelihood has no observation noise. {hint}"
        )


def _check_evidence(free: frozenset[str], y: Any, sample_weight: Any) -> None:
    """Raise for what cannot be chosen by the evidence, and for targets without X."""
    others = {"y": y, "sample_weight": sample_weight}
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{name} was given without X. Pass samples with targets, or nothing "
                "for the evidence of the training data."
            )
    if "temperature" in free:
        raise ValueError(
            "The temperature cannot be chosen by the evidence: a tempered likelihood "
            "is not normalised, so that values do not compare. Pass X and y that the "
            "network was not trained on."
        )


def check_addable(model: Any, options: LaplaceOptions) -> None:
    """Raise if samples cannot be added to a fitted estimator with other options."""
    old, new = model._options.curvature_settings(), options.curvature_settings()
    changed = [k for k in new if fingerprint(old[k]) != fingerprint(new[k])]
    if changed:
        raise ValueError(
            f"{listed(changed)} changed since fit, so that new rows cannot be "
            "added to what there is. Set them back, or fit anew."
        )
    if model.posterior_.is_refitted and model.network_spec_.head_map is None:
        raise ValueError(
            "refine=True has moved the posterior's mean away from the weights of "
            "the network, at which new rows would be linearised. Use refine=False, "
            "or subset_of_weights='last_layer'."
        )
