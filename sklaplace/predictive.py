"""Predictives: from the posterior over weights to a Gaussian over outputs.

The linearised predictive (``glm``) is exact for the linearised network:
``f(x) ~ N(f* + J (mean - weights), J Σ Jᵀ)`` (Immer, Korzepa and Bauer 2021,
"Improving predictions of Bayesian neural nets via local linearization").
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sklaplace.forward import Forward
from sklaplace.jacobians import Jacobian, backpropagate
from sklaplace.posterior import GaussianPosterior


def linearised_mean(
    posterior: GaussianPosterior, f: Tensor, jacobian: Jacobian
) -> Tensor:
    """Mean of the linearised outputs, (b, c), float64.

    ``f`` and ``jacobian`` are those of the network's own weights.
    """
    if not posterior.is_refitted:
        return f.double()
    shift = (posterior.mean - posterior.weights).unsqueeze(-1)
    return f.double() + jacobian.double().matmul(shift).squeeze(-1)


def glm(
    posterior: GaussianPosterior, forward: Forward, x: Any
) -> tuple[Tensor, Tensor]:
    """Mean (b, c) and covariance (b, c, c) of the linearised outputs, float64.

    Costs one forward pass and c backward columns down to the selected weights.
    """
    f, jacobian = backpropagate(forward, x, posterior.layout)
    mean = linearised_mean(posterior, f, jacobian)
    return mean, posterior.functional_covariance(jacobian)


PREDICTIVES: dict[
    str, Callable[[GaussianPosterior, Forward, Any], tuple[Tensor, Tensor]]
] = {"glm": glm}
