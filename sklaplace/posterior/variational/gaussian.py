"""The Gaussian posterior: ``w = μ + σ ε`` with ``ε ~ N(0, 1)``, ``σ = softplus(ρ)``.

``log q(w) = −ε²/2 − log σ − log √(2π)``, entropy ``log σ + log √(2πe)``.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from sklaplace.posterior.variational.base import (
    LOG_ROOT_TWO_PI,
    WeightPosterior,
    inverse_softplus,
    normal_noise,
    positive,
)


class Gaussian(WeightPosterior):
    """A Gaussian for each weight: Bayes by Backprop as published.

    The one to use unless there is a reason: the cheapest, with a closed form for
    everything asked of it. It has a single mode and thin tails.

    Parameters
    ----------
    location : Tensor of shape (P,)
        Means to start with.
    scale : Tensor of shape (P,)
        Standard deviations to start with, positive.
    bound : float, default=3.0
        Ignored: a Gaussian has no bounds.

    Raises
    ------
    ValueError
        If shapes, numbers or the bound do not fit; see `WeightPosterior`.
    TypeError
        If a tensor is not of floating point.

    Notes
    -----
    Two parameters per weight. O(s P) time and memory for s draws.

    References
    ----------
    Blundell, Cornebise, Kavukcuoglu, Wierstra (2015), "Weight uncertainty in neural
    networks", ICML, section 3.2.
    """

    name: ClassVar[str] = "gaussian"
    is_experimental: ClassVar[bool] = False
    is_closed_form_cheap: ClassVar[bool] = True

    def __init__(self, location: Tensor, scale: Tensor, bound: float = 3.0) -> None:
        super().__init__(location, scale, bound)
        self.location = nn.Parameter(location.detach().clone())
        self.raw_scale = nn.Parameter(inverse_softplus(scale.detach()).to(location))

    @property
    def scale(self) -> Tensor:
        """Standard deviations, (P,)."""
        return positive(self.raw_scale)

    def sample(
        self, n: int = 1, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draws (s, P) and their log densities (s, P); see `WeightPosterior.sample`."""
        noise = normal_noise(n, self.location, generator)
        scale = self.scale
        w = torch.addcmul(self.location, scale, noise)
        return w, noise.square() * -0.5 - (scale.log() + LOG_ROOT_TWO_PI)

    def log_prob(self, w: Tensor) -> Tensor:
        """Log density of weights (..., P), in nats."""
        scale = self.scale
        standardised = (w - self.location) / scale
        return -(scale.log() + LOG_ROOT_TWO_PI) - standardised.square() / 2

    def median(self) -> Tensor:
        """Medians, (P,)."""
        return self.location

    def mean(self) -> Tensor:
        """Means, (P,)."""
        return self.location

    def variance(self) -> Tensor:
        """Variances, (P,)."""
        return self.scale.square()

    def entropy(self) -> Tensor:
        """Entropies in nats, (P,)."""
        return self.closed_form()[0]

    def second_moment(self) -> Tensor:
        """``E[w²]``, (P,)."""
        return self.closed_form()[1]

    def closed_form(self) -> tuple[Tensor, Tensor]:
        """Entropies and ``E[w²]``, (P,) each, from one evaluation of the scales."""
        scale = self.scale
        entropy = scale.log() + (LOG_ROOT_TWO_PI + 0.5)
        return entropy, self.location.square() + scale.square()
