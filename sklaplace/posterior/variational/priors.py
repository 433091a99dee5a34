"""Priors over weights: one distribution that all weights share, independently.

With ``log p(w)`` per weight, and ``E_q[log p(w)]`` where ``E_q[w²]`` is enough for it.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sklaplace.core.checks import check_fraction, check_positive
from sklaplace.posterior.variational.base import LOG_ROOT_TWO_PI


class WeightPrior(Protocol):
    """What the divergence asks of a prior."""

    name: ClassVar[str]
    """Its key in `PRIORS`."""
    is_bounded: ClassVar[bool]
    """Whether all of its mass is within ``(-bound, bound)``."""

    def log_prob(self, w: Tensor) -> Tensor:
        """Log density of each weight, in nats, in the shape of ``w``."""

    def expected_log_prob(self, second_moment: Tensor) -> Tensor | None:
        """``E[log p(w)]`` from ``E[w²]`` (P,); None where that does not say it."""


@dataclass(frozen=True)
class GaussianPrior:
    """``N(0, scale²)``.

    The usual one; the divergence from a Gaussian posterior has a closed form.

    Attributes
    ----------
    scale : float
        Standard deviation.

    Raises
    ------
    ValueError
        If the scale is not positive and finite.
    """

    scale: float = 1.0
    name: ClassVar[str] = "gaussian"
    is_bounded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive("prior_scale", self.scale)

    def log_prob(self, w: Tensor) -> Tensor:
        """Log density of each weight, in nats, in the shape of ``w``."""
        return (w / self.scale).square() * -0.5 - self._log_normalizer

    def expected_log_prob(self, second_moment: Tensor) -> Tensor:
        """``E[log p(w)]`` from ``E[w²]``, (P,), in nats."""
        return second_moment * (-0.5 / self.scale**2) - self._log_normalizer

    @property
    def _log_normalizer(self) -> float:
        return math.log(self.scale) + LOG_ROOT_TWO_PI


@dataclass(frozen=True)
class ScaleMixturePrior:
    """A smooth spike and slab: a wide Gaussian and a narrow one, mixed.

    ``weight · N(0, scale²) + (1 − weight) · N(0, narrow²)``.

    Pulls most weights to zero and leaves a few alone, where it helps to prune. Its
    divergence is estimated from draws, which adds noise to gradients.

    Attributes
    ----------
    scale : float
        Standard deviation of the wide part.
    weight : float
        Share of the wide part, between 0 and 1.
    narrow : float
        Standard deviation of the narrow part.

    Raises
    ------
    ValueError
        If a standard deviation is not positive and finite, or the share not between
        0 and 1.

    References
    ----------
    Blundell, Cornebise, Kavukcuoglu, Wierstra (2015), "Weight uncertainty in neural
    networks", ICML, eq. (7), who search shares of 1/4, 1/2, 3/4, and ``−log`` of the
    standard deviations among 0, 1, 2 and 6, 7, 8.
    """

    scale: float = 1.0
    weight: float = 0.5
    narrow: float = math.exp(-6)
    name: ClassVar[str] = "scale_mixture"
    is_bounded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive("prior_scale", self.scale)
        check_fraction(
            "prior_params['weight']",
            self.weight,
            "Choose the share of the wide part, such as 0.5.",
        )
        check_positive("prior_params['narrow']", self.narrow)

    def log_prob(self, w: Tensor) -> Tensor:
        """Log density of each weight, in nats, in the shape of ``w``."""
        wide = GaussianPrior(self.scale).log_prob(w) + math.log(self.weight)
        narrow = GaussianPrior(self.narrow).log_prob(w) + math.log1p(-self.weight)
        return torch.logaddexp(wide, narrow)

    def expected_log_prob(self, second_moment: Tensor) -> None:
        """None: ``E[w²]`` does not say it."""


@dataclass(frozen=True)
class UniformPrior:
    """Uniform on ``(−bound, bound)``.

    For posteriors that are bounded as well; the divergence is infinite for others.

    Attributes
    ----------
    bound : float
        Largest magnitude of a weight.

    Raises
    ------
    ValueError
        If the bound is not positive and finite.
    """

    bound: float = 3.0
    name: ClassVar[str] = "uniform"
    is_bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("bound", self.bound)

    def log_prob(self, w: Tensor) -> Tensor:
        """Log density of each weight, in nats; minus infinity beyond the bound."""
        inside = torch.full_like(w, -math.log(2 * self.bound))
        # a weight that rounding puts on the bound is within it
        return inside.masked_fill(w.abs() > self.bound, -math.inf)

    def expected_log_prob(self, second_moment: Tensor) -> Tensor:
        """``E[log p(w)]`` of weights within the bound, (P,), in nats."""
        return torch.full_like(second_moment, -math.log(2 * self.bound))


PRIORS: dict[str, type[GaussianPrior | ScaleMixturePrior | UniformPrior]] = {
    "gaussian": GaussianPrior,
    "scale_mixture": ScaleMixturePrior,
    "uniform": UniformPrior,
}
"""Priors by the name that ``prior`` takes."""
