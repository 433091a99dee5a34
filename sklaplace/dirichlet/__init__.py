"""Dirichlet distributions over class probabilities, and Gaussians over logits.

All functions take tensors or arrays with leading batch axes. The Gaussian over logits
may come from a Laplace approximation, an ensemble or a variational network. `links` has
the approximations of the expected softmax, by name in ``LINKS``.

* Gaussian to Dirichlet: `kl_projection`, the closest; `laplace_bridge`, the fastest;
* Dirichlet to Gaussian: `inverse_bridge`;
* properties of a Dirichlet: `mean`, `variance`, `entropy`, `expected_entropy`,
  `uncertainty`, `interval`, `log_density`, `sample`, `plausible_classes`.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from sklaplace.dirichlet.bridge import (
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

# those of the logits as they are; all others centre them first
UNCENTRED = frozenset({"bridge_conditioned", "bridge_norm_conditioned"})
# those that need only the variances of the centred logits
DIAGONAL = frozenset({"bridge", "bridge_norm", "bridge_norm_published"})

APPROXIMATIONS: dict[str, Approximation] = {
    "bridge": centred_bridge,
    "bridge_conditioned": laplace_bridge,
    "bridge_norm": partial(centred_bridge, norm="guarded"),
    "bridge_norm_conditioned": partial(laplace_bridge, norm="published"),
    "bridge_norm_published": partial(centred_bridge, norm="published"),
    "projection": kl_projection,
}
"""Functions from means (b, K) and covariances (b, K, K) of logits to concentrations
(b, K), by their name in ``dirichlet_approx``."""

__all__ = [
    "APPROXIMATIONS",
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
