"""What is said of a fitted estimator in one line, in print and in a notebook."""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from sklaplace.core.checks import warn_user
from sklaplace.core.progress import Reporter, reporting


def reporting_for(model: Any) -> AbstractContextManager[Reporter]:
    """Open the scope of what an estimator prints."""
    return reporting(type(model).__name__, model.verbose)


def of_posterior(model: Any) -> str:
    """Return one line on the posterior of a fitted Laplace estimator.

    Of that posterior, and of what predictions are made of it now.
    """
    posterior, options = model.posterior_, model._options
    subset = options.subset_of_weights
    if not isinstance(subset, str):
        subset = ", ".join(subset)
    parts = [
        f"{options.hessian_structure} posterior over "
        f"{posterior.layout.n_parameters:,} weights ({subset})",
        "weights refitted" if posterior.is_refitted else "weights kept",
    ]
    parts += _of_prior(model)
    if model.temperature_ != 1:
        parts.append(f"temperature {model.temperature_:.3g}")
    parts += of_outputs(model)
    if model.pred_type != "glm":
        parts.append(f"pred_type {model.pred_type}")
    elif hasattr(model, "link_approx"):
        parts.append(f"link_approx {model._link_name()}")
    if maximises_evidence(model):
        parts.append(f"log evidence {model.log_marginal_likelihood_value_:.1f}")
    if hasattr(model, "cv_results_"):
        tried = f"{len(model.cv_results_['params'])} tried in {model.n_splits_} folds"
        parts.append(f"{tried}, score {model.best_score_:.4g}")
    return ", ".join(parts)


def _of_prior(model: Any) -> list[str]:
    """Return the prior of a fitted Laplace estimator, and the residual if any."""
    if model.posterior_.earlier is not None:
        return ["prior of an earlier task"]
    parts = [f"prior_precision {model.posterior_.shown_precision()}"]
    if are_certain(model):
        parts.append("weights hardly uncertain")
    if (residual := model._residual()) is not None:
        parts.append(f"residual {residual.variance:.3g}")
    return parts


def are_certain(model: Any) -> bool:
    """Whether a prior was chosen under which the weights are hardly uncertain.

    The effective number of parameters (MacKay 1992) is less than one then. It is at
    most the trace of the curvature over the prior precision.
    """
    posterior = model.posterior_
    size = posterior.scale * posterior.structure.trace()
    return bool(model._options.free_prior and size < posterior.prior_precision.min())


def warn_if_alone(model: Any) -> None:
    """Warn where predictions at the default are the network's own."""
    is_asked = model._options.residual_variance(model.residual)
    if not is_asked or model._residual() is not None:
        return
    if model.residual != "auto":
        warn_user(
            f"residual={model.residual} has no effect: the network has no features, or "
            "its likelihood no unit for a residual. See score_samples; or use 'none'."
        )
    elif are_certain(model):
        warn_user(
            "Held-out rows are predicted best without uncertainty of the weights "
            f"(prior precision {model.posterior_.shown_precision()}), and this network "
            "has no residual, so that predictions are its own, also far from the data. "
            "Use prior_precision='marglik' or a number."
        )


def maximises_evidence(model: Any) -> bool:
    """Whether a fitted Laplace estimator chose its prior or noise by the evidence.

    Under another prior the evidence at weights that were not refitted can be lower by
    any amount, as they need not be probable under it, and says little of the model.
    """
    return bool(model._options.tuner == "marglik")


def of_training(model: Any, is_kept: bool) -> str:
    """Return what is common to estimators that predict from draws.

    ``is_kept`` says whether the network has the weights that it was given with.
    """
    n = model.n_iter_
    trained = f"trained for {n:,} epoch{'' if n == 1 else 's'}"
    return ", ".join(["weights kept" if is_kept else trained, *of_outputs(model)])


def of_outputs(model: Any) -> list[str]:
    """Return the likelihood of a fitted estimator, and its noise if it has any."""
    likelihood = model.network_spec_.likelihood
    parts = [f"{type(likelihood).__name__} likelihood"]
    if likelihood.has_noise:
        parts.append(f"sigma_noise {_range(model.sigma_noise_)}")
    return parts


def _range(values: Any) -> str:
    """Return a number, or the range of several, as text."""
    low, high = np.min(values), np.max(values)
    return f"{low:.3g} to {high:.3g}" if high > low else f"{low:.3g}"
