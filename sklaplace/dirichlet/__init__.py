"""Dirichlet distributions over class probabilities, and Gaussians over logits.

Everything takes tensors or arrays, batched over leading axes, of any Gaussian over
logits: that of a Laplace approximation, of an ensemble, of a variational network.

* from Gaussians: `kl_projection`, the closest one; `laplace_bridge`, the fastest;
* back: `inverse_bridge`;
* what they say: `mean`, `variance`, `entropy`, `expected_entropy`, `uncertainty`,
  `interval`, `log_density`, `sample`, `plausible_classes`.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from sklaplace.dirichlet.arrays import MAX_TOTAL, MIN_CONCENTRATION
from sklaplace.dirichlet.bridge import NORMS, inverse_bridge, laplace_bridge
from sklaplace.dirichlet.distribution import (
    entropy,
    expected_entropy,
    interval,
    log_density,
    mean,
    plausible_classes,
    sample,
    uncertainty,
    variance,
)
from sklaplace.dirichlet.projection import kl_projection
from sklaplace.logits import centred_moments

Approximation = Callable[[Tensor, Tensor], Tensor]


def _bridged(mean: Tensor, cov: Tensor, norm: str | None = None) -> Tensor:
    """Laplace bridge of the centred Gaussian: (b, K), (b, K, K) or (b, K)."""
    moments = centred_moments(mean, cov)
    return laplace_bridge(*moments, project=False, norm=norm)  # type: ignore[arg-type]


# those for which the variances of the centred logits say enough
DIAGONAL = frozenset({"bridge", "bridge_norm", "bridge_norm_published"})

APPROXIMATIONS: dict[str, Approximation] = {
    "bridge": _bridged,
    "bridge_norm": partial(_bridged, norm="guarded"),
    "bridge_norm_published": partial(_bridged, norm="published"),
    "projection": kl_projection,
}
"""From means (b, K) and covariances (b, K, K) of logits to concentrations (b, K), by
the name that ``dirichlet_approx`` takes."""

__all__ = [
    "APPROXIMATIONS",
    "DIAGONAL",
    "MAX_TOTAL",
    "MIN_CONCENTRATION",
    "NORMS",
    "entropy",
    "expected_entropy",
    "interval",
    "inverse_bridge",
    "kl_projection",
    "laplace_bridge",
    "log_density",
    "mean",
    "plausible_classes",
    "sample",
    "uncertainty",
    "variance",
]
