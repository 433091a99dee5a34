"""Summary: parts of a one-line description of a fit, for print and notebooks."""

import numpy as np

from sklaplace.core.checks import warn_user
from sklaplace.estimators.options.laplace import LaplaceOptions
from sklaplace.likelihoods import Likelihood
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.residual import Residual


def of_posterior(
    posterior: GaussianPosterior, options: LaplaceOptions, residual: Residual | None
) -> list[str]:
    """Describe the structure, weights and prior of a Laplace approximation."""
    subset = options.subset_of_weights
    if not isinstance(subset, str):
        subset = ", ".join(subset)
    parts = [
        f"{options.hessian_structure} posterior over "
        f"{posterior.layout.n_parameters:,} weights ({subset})",
        "weights refitted" if posterior.is_refitted else "weights kept",
    ]
    if posterior.earlier is not None:
        return [*parts, "prior of an earlier task"]
    parts.append(f"prior_precision {posterior.shown_precision()}")
    if options.free_prior and are_certain(posterior):
        parts.append("weights hardly uncertain")
    if residual is not None:
        parts.append(f"residual {residual.variance:.3g}")
    return parts


def are_certain(posterior: GaussianPosterior) -> bool:
    """Return whether the prior leaves the weights almost no uncertainty.

    The effective number of parameters (MacKay 1992) is then less than one. Its upper
    bound is the trace of the curvature divided by the prior precision.
    """
    size = posterior.scale * posterior.structure.trace()
    return bool(size < posterior.prior_precision.min())


def warn_without_residual(
    posterior: GaussianPosterior, options: LaplaceOptions
) -> None:
    """Warn if a requested or needed residual is not possible for the network."""
    if options.residual != "auto":
        warn_user(
            f"residual={options.residual} has no effect: the network has no features, "
            "or its likelihood no unit for a residual. See score_samples; or use "
            "'none'."
        )
    elif options.free_prior and are_certain(posterior):
        warn_user(
            "Held-out rows are predicted best without uncertainty of the weights "
            f"(prior precision {posterior.shown_precision()}), and this network "
            "has no residual, so that predictions are its own, also far from the data. "
            "Use prior_precision='marglik' or a number."
        )


def of_training(n_epochs: int, *, is_kept: bool) -> str:
    """Describe the training; ``is_kept`` means that the network was not trained."""
    trained = f"trained for {n_epochs:,} epoch{'' if n_epochs == 1 else 's'}"
    return "weights kept" if is_kept else trained


def of_likelihood(likelihood: Likelihood, sigma_noise: float | np.ndarray) -> list[str]:
    """Describe the likelihood, with its noise level or range of levels, if any."""
    parts = [f"{type(likelihood).__name__} likelihood"]
    if likelihood.has_noise:
        low, high = np.min(sigma_noise), np.max(sigma_noise)
        shown = f"{low:.3g} to {high:.3g}" if high > low else f"{low:.3g}"
        parts.append(f"sigma_noise {shown}")
    return parts
