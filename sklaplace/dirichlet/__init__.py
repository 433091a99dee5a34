"""Dirichlet distributions over class probabilities, and Gaussians over logits.

All functions accept tensors or arrays with leading batch axes. The Gaussian over logits
can come from a Laplace approximation, an ensemble or a variational network. The module
`links` implements approximations to the expected softmax; ``LINKS`` lists them by name.

* From a Gaussian to a Dirichlet: `kl_projection` (closest), `laplace_bridge` (fastest).
* From a Dirichlet to a Gaussian: `inverse_bridge`.
* Properties of a Dirichlet: `mean`, `variance`, `entropy`, `expected_entropy`,
  `uncertainty`, `interval`, `log_density`, `sample`, `plausible_classes`.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
from sklaplace.dirichlet.projection import kl_projection, projection_of_many


@dataclass(frozen=True)
class Approximation:
    """Dirichlet approximation to the softmax of Gaussian logits.

    Attributes
    ----------
    function : callable
        Function that maps means (b, K) and covariances (b, K, K) of the logits to
        concentrations (b, K).
    diagonal : bool
        Whether ``function`` also accepts variances (b, K) instead of covariances.
    centred : bool
        Whether ``function`` centres the logits.
    of_many : callable or None
        Cheaper version for many classes, if any: a function of the means (b, K) and
        variances (b, K) of centred logits, of the indices (b, m) of some leading
        classes, and of the covariances (b, m, m) among them.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    diagonal: bool = False
    centred: bool = True
    of_many: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None

    def __call__(self, mean: Tensor, cov: Tensor) -> Tensor:
        """Return the concentrations (b, K) for Gaussian logits."""
        return self.function(mean, cov)


APPROXIMATIONS: dict[str, Approximation] = {
    "bridge": Approximation(centred_bridge, diagonal=True),
    "bridge_conditioned": Approximation(laplace_bridge, centred=False),
    "bridge_norm": Approximation(
        partial(centred_bridge, norm="guarded"), diagonal=True
    ),
    "bridge_norm_conditioned": Approximation(
        partial(laplace_bridge, norm="published"), centred=False
    ),
    "bridge_norm_published": Approximation(
        partial(centred_bridge, norm="published"), diagonal=True
    ),
    "projection": Approximation(kl_projection, of_many=projection_of_many),
}
"""Dirichlet approximations, keyed by the value of ``dirichlet_approx``."""

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
