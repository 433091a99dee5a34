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
from sklaplace.dirichlet.bridge import (
    NORMS,
    centred_bridge,
    inverse_bridge,
    laplace_bridge,
)
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

Approximation = Callable[[Tensor, Tensor], Tensor]


# those for which the variances of the centred logits say enough
DIAGONAL = frozenset({"bridge", "bridge_norm", "bridge_norm_published"})

APPROXIMATIONS: dict[str, Approximation] = {
    "bridge": centred_bridge,
    "bridge_norm": partial(centred_bridge, norm="guarded"),
    "bridge_norm_published": partial(centred_bridge, norm="published"),
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
