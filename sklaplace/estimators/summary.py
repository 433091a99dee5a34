"""What ``verbose`` prints."""

from typing import Any


def print_line(model: Any, line: str) -> None:
    """Print a line that names the estimator."""
    print(f"[{type(model).__name__}] {line}")  # noqa: T201


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
