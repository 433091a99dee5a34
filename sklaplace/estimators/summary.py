"""One line on what was fitted, for ``verbose``."""

from typing import Any


def of_posterior(model: Any) -> str:
    """Return one line on the posterior of a fitted Laplace estimator."""
    posterior = model.posterior_
    head = "refitted" if posterior.is_refitted else "kept"
    return (
        f"{model.hessian_structure} posterior over "
        f"{posterior.layout.n_parameters:,} weights ({model.subset_of_weights}), "
        f"prior_precision {posterior.shown_precision()}, weights {head}, "
        f"log evidence {model.log_marginal_likelihood_value_:.1f}"
    )
