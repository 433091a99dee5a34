"""Dirichlet distributions over class probabilities, and Gaussians over logits.

All functions take tensors or arrays with leading batch axes. The Gaussian over logits
may come from a Laplace approximation, an ensemble or a variational network. `links`
implements approximations of the expected softmax; ``LINKS`` lists them by name.

* Gaussian to Dirichlet: `kl_projection` (closest) and `laplace_bridge` (fastest); *
Dirichlet to Gaussian: `inverse_bridge`; * properties of a Dirichlet: `mean`,
`variance`, `entropy`, `expected_entropy`,
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
from sklaplace.dirichlet.projection import kl_projection


@dataclass(frozen=True)
class Approximation:
    """Dirichlet approximation of the softmax of Gaussian logits, and its inputs.

    Attributes
    ----------
    function : callable
        Maps means (b, K) and covariances (b, K, K) of logits to concentrations (b, K).
    diagonal : bool
        Whether ``function`` also takes variances (b, K) instead of covariances.
    centred : bool
        Whether the logits are centred first.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    diagonal: bool = False
    centred: bool = True

    def __call__(self, mean: Tensor, cov: Tensor) -> Tensor:
        """Return concentrations (b, K) for Gaussian logits."""
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
    "projection": Approximation(kl_projection),
}
"""Dirichlet approximations by their name in ``dirichlet_approx``."""

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
