"""Priors over weights: all weights are independent and identically distributed.

A prior computes ``log p(w)`` of each weight. A prior also computes ``E_q[log p(w)]`` if
this expectation is a function of ``E_q[w²]``.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sklaplace.core.checks import check_fraction, check_positive
from sklaplace.variational.base import LOG_ROOT_TWO_PI


class WeightPrior(ABC):
    """Prior distribution of each weight.

    Read more in the :doc:`User Guide </research/weight_posteriors>`.

    Attributes
    ----------
    name : str
        Key in `PRIORS`.
    is_bounded : bool
        Whether the support is ``(-bound, bound)``.
    bound : float
        Bound of the support; infinite if the support is unbounded.

    See Also
    --------
    GaussianPrior : Default prior.
    WeightPosterior : Distributions over weights after training.

    Examples
    --------
    >>> from sklaplace.variational import PRIORS, WeightPrior
    >>> all(issubclass(prior, WeightPrior) for prior in PRIORS.values())
    True
    """

    name: ClassVar[str]
    is_bounded: ClassVar[bool] = False
    bound: float = math.inf

    @abstractmethod
    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log density of each weight.

        Parameters
        ----------
        w : Tensor
            Weights, of any shape.

        Returns
        -------
        Tensor
            Log densities in nats, in the shape of ``w``; −inf outside the support.

        See Also
        --------
        expected_log_prob : Expected log density, from second moments.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.variational import GaussianPrior
        >>> prior = GaussianPrior()
        >>> prior.log_prob(torch.zeros(1))
        tensor([-0.9189])
        """

    def expected_log_prob(self, second_moment: Tensor) -> Tensor | None:
        """Return the expected log density from second moments.

        Parameters
        ----------
        second_moment : Tensor of shape (P,)
            ``E[w²]`` of the weights.

        Returns
        -------
        Tensor of shape (P,), or None
            ``E[log p(w)]`` in nats. None if the expectation is not a function of second
            moments.

        See Also
        --------
        log_prob : The log density.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.variational import GaussianPrior
        >>> prior = GaussianPrior()
        >>> prior.expected_log_prob(torch.ones(1))
        tensor([-1.4189])
        """
        return None


@dataclass(frozen=True)
class GaussianPrior(WeightPrior):
    """Gaussian prior ``N(0, scale²)``.

    This is the default. With a Gaussian posterior, the divergence has a closed form.

    Read more in the :doc:`User Guide </research/weight_posteriors>`.

    Parameters
    ----------
    scale : float
        Standard deviation.

    Raises
    ------
    ValueError
        If the scale is not positive and finite.

    See Also
    --------
    ScaleMixturePrior : Mixture of two Gaussians.
    UniformPrior : Uniform prior on an interval.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.variational import GaussianPrior
    >>> prior = GaussianPrior(scale=1.0)
    >>> prior.log_prob(torch.tensor([0.0, 1.0]))
    tensor([-0.9189, -1.4189])
    """

    scale: float = 1.0
    name: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        check_positive("prior_scale", self.scale)

    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log density of each weight, in nats, in the shape of ``w``."""
        return (w / self.scale).square() * -0.5 - self._log_normalizer

    def expected_log_prob(self, second_moment: Tensor) -> Tensor:
        """Return ``E[log p(w)]`` from ``E[w²]``, (P,), in nats."""
        return second_moment * (-0.5 / self.scale**2) - self._log_normalizer

    @property
    def _log_normalizer(self) -> float:
        return math.log(self.scale) + LOG_ROOT_TWO_PI


@dataclass(frozen=True)
class ScaleMixturePrior(WeightPrior):
    """Spike-and-slab prior, a mixture of a wide and a narrow Gaussian.

    The density is ``weight · N(0, scale²) + (1 − weight) · N(0, narrow²)``. The prior
    shrinks most weights towards zero and a few weights hardly at all. This can help
    pruning. The divergence is estimated from draws, which adds variance to the
    gradients.

    Read more in the :doc:`User Guide </research/weight_posteriors>`.

    Parameters
    ----------
    scale : float
        Standard deviation of the wide component.
    weight : float
        Fraction of the wide component, between 0 and 1.
    narrow : float
        Standard deviation of the narrow component.

    Raises
    ------
    ValueError
        If a standard deviation is not positive and finite, or if the fraction is not
        between 0 and 1.

    See Also
    --------
    GaussianPrior : Single Gaussian.

    References
    ----------
    Blundell, Cornebise, Kavukcuoglu, Wierstra (2015), "Weight uncertainty in neural
    networks", ICML, eq. (7). The authors search over ``weight`` in 1/4, 1/2 and 3/4,
    ``−log scale`` in 0, 1 and 2, and ``−log narrow`` in 6, 7 and 8.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.variational import ScaleMixturePrior
    >>> prior = ScaleMixturePrior(narrow=0.01)
    >>> prior.log_prob(torch.tensor([0.0, 1.0]))
    tensor([ 3.0030, -2.1121])
    """

    scale: float = 1.0
    weight: float = 0.5
    narrow: float = math.exp(-6)
    name: ClassVar[str] = "scale_mixture"

    def __post_init__(self) -> None:
        """Raise an error for invalid parameters."""
        check_positive("prior_scale", self.scale)
        hint = "Choose a fraction for the wide component, such as 0.5."
        check_fraction("prior_params['weight']", self.weight, hint)
        check_positive("prior_params['narrow']", self.narrow)

    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log density of each weight, in nats, in the shape of ``w``."""
        wide = GaussianPrior(self.scale).log_prob(w) + math.log(self.weight)
        narrow = GaussianPrior(self.narrow).log_prob(w) + math.log1p(-self.weight)
        return torch.logaddexp(wide, narrow)


@dataclass(frozen=True)
class UniformPrior(WeightPrior):
    """Uniform prior on ``(−bound, bound)``.

    This prior requires a bounded posterior. The divergence of an unbounded posterior is
    infinite.

    Read more in the :doc:`User Guide </research/weight_posteriors>`.

    Parameters
    ----------
    bound : float
        Largest magnitude of a weight.

    Raises
    ------
    ValueError
        If the bound is not positive and finite.

    See Also
    --------
    GaussianPrior : Prior without bounds.
    Kumaraswamy : Posterior on an interval.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.variational import UniformPrior
    >>> prior = UniformPrior(bound=3.0)
    >>> prior.log_prob(torch.tensor([0.0, 4.0]))
    tensor([-1.7918,    -inf])
    """

    bound: float = 3.0
    name: ClassVar[str] = "uniform"
    is_bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("bound", self.bound)

    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log density of each weight in nats, or −inf beyond the bound."""
        # `expected_log_prob` returns the constant density, whatever its argument; a
        # weight that rounds to the bound is within the support
        return self.expected_log_prob(w).masked_fill(w.abs() > self.bound, -math.inf)

    def expected_log_prob(self, second_moment: Tensor) -> Tensor:
        """Return ``E[log p(w)]`` of weights within the bound, (P,), in nats.

        It is the constant ``−log(2 · bound)``, whatever the second moments.
        """
        return torch.full_like(second_moment, -math.log(2 * self.bound))


PRIORS = {p.name: p for p in (GaussianPrior, ScaleMixturePrior, UniformPrior)}
"""Prior classes, by the value of the parameter ``prior``."""
