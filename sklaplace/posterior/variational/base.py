"""Distributions over weights that are independent of each other: the protocol.

``q(w) = Π_p q_p(w_p)`` over P weights, with parameters that are learned. A draw is a
differentiable function of the parameters and of noise, so that gradients of
``E_q[f(w)]`` are averages of gradients of ``f(w)`` (the pathwise, or
reparameterisation, gradient).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from sklaplace.core.checks import check_count, check_positive

LOG_ROOT_TWO_PI = 0.5 * math.log(2 * math.pi)
# What softplus is raised by: far below zero it rounds to zero, and logarithms are
# taken. Divided by this, gradients do not overflow in float32.
_SMALLEST = 1e-30


class WeightPosterior(nn.Module, ABC):
    """A distribution over P independent weights that gradients can move.

    Parameters
    ----------
    location : Tensor of shape (P,)
        Where the weights start. Parameters have its dtype and device.
    scale : Tensor of shape (P,)
        Standard deviations that they start with, positive.
    bound : float, default=3.0
        Weights stay within ``(-bound, bound)`` where ``is_bounded``; ignored otherwise.

    Raises
    ------
    ValueError
        If the shapes differ or are not (P,), numbers are not finite, scales are not
        positive, or the bound is not.
    TypeError
        If a tensor is not of floating point.

    Attributes
    ----------
    n_weights : int
        Number of weights, P.
    name : str
        Its key in `POSTERIORS`.
    is_bounded : bool
        Whether all of its mass is within ``(-bound, bound)``.
    is_experimental : bool
        Whether nothing was found that it does better than a Gaussian.
    is_closed_form_cheap : bool
        Whether its entropy and moments cost less than a draw, so that training should
        use them.

    References
    ----------
    Blundell, Cornebise, Kavukcuoglu, Wierstra (2015), "Weight uncertainty in neural
    networks", ICML.
    """

    name: ClassVar[str]
    is_bounded: ClassVar[bool] = False
    is_experimental: ClassVar[bool] = True
    is_closed_form_cheap: ClassVar[bool] = False

    def __init__(self, location: Tensor, scale: Tensor, bound: float = 3.0) -> None:
        super().__init__()
        _check_start(location, scale)
        check_positive("bound", bound)
        self.n_weights = len(location)
        self.bound = float(bound)

    @abstractmethod
    def sample(
        self, n: int = 1, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draws, differentiable in the parameters, and their log densities.

        Parameters
        ----------
        n : int, default=1
            Number of draws, s.
        generator : torch.Generator or None
            Source of the noise, on any device. None takes the global one.

        Returns
        -------
        w : Tensor of shape (s, P)
            The draws.
        log_q : Tensor of shape (s, P)
            Log density of each weight, in nats, differentiable as a function of the
            parameters both directly and by way of the draw.

        Raises
        ------
        ValueError
            If ``n`` is not a positive integer.
        """

    @abstractmethod
    def log_prob(self, w: Tensor) -> Tensor:
        """Log density of given weights.

        Parameters
        ----------
        w : Tensor of shape (..., P)
            Weights.

        Returns
        -------
        Tensor of shape (..., P)
            In nats; minus infinity outside of the support.
        """

    @abstractmethod
    def median(self) -> Tensor:
        """Medians, (P,)."""

    @abstractmethod
    def mean(self) -> Tensor:
        """Means, (P,)."""

    @abstractmethod
    def variance(self) -> Tensor:
        """Variances, (P,)."""

    def entropy(self) -> Tensor | None:
        """Entropies in nats, (P,), in closed form; None where there is none."""
        return None

    def second_moment(self) -> Tensor | None:
        """``E[w²]``, (P,), in closed form; None where there is none."""
        return None

    def closed_form(self) -> tuple[Tensor, Tensor] | None:
        """Entropies and ``E[w²]``, (P,) each, at once; None where one has no form."""
        entropy = self.entropy()
        second_moment = None if entropy is None else self.second_moment()
        if entropy is None or second_moment is None:
            return None
        return entropy, second_moment

    def extra_repr(self) -> str:
        """Number of weights, and the bound where there is one."""
        bound = f", bound={self.bound:g}" if self.is_bounded else ""
        return f"n_weights={self.n_weights}{bound}"


def positive(raw: Tensor) -> Tensor:
    """Positive numbers from any: ``softplus(raw)``, but never zero."""
    return softplus(raw).add_(_SMALLEST)


def inverse_softplus(x: Tensor) -> Tensor:
    """``r`` with ``softplus(r) = x`` for positive ``x``, without overflow."""
    return x + (-torch.expm1(-x)).log()


def normal_noise(
    n: int, like: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Standard normal numbers, (n, P), on the device of ``like`` (P,)."""
    return _noise(torch.randn, n, like, generator)


def uniform_noise(
    n: int, like: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Uniform numbers in [0, 1), (n, P), on the device of ``like`` (P,)."""
    return _noise(torch.rand, n, like, generator)


def draw(
    function: type[torch.autograd.Function], *inputs: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Weights and log densities of a function with a gradient of its own."""
    w, log_q = function.apply(*inputs)
    return w, log_q


def total(x: Tensor) -> Tensor:
    """Sum over draws, (s, P) -> (P,); one draw is not copied."""
    return x[0] if len(x) == 1 else x.sum(0)


def _noise(
    kind: Callable[..., Tensor], n: int, like: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Numbers (n, P), drawn where the generator is."""
    check_count("n", n)
    device = like.device if generator is None else generator.device
    size = (n, len(like))
    drawn = kind(size, generator=generator, dtype=like.dtype, device=device)
    return drawn.to(like.device)


def _check_start(location: Tensor, scale: Tensor) -> None:
    """Refuse locations and scales that no distribution can start from."""
    for name, values in (("location", location), ("scale", scale)):
        if not values.is_floating_point():
            raise TypeError(
                f"{name} is of dtype {values.dtype}. Pass a floating-point tensor."
            )
        if not values.isfinite().all():
            raise ValueError(
                f"{name} has numbers that are not finite. Pass finite ones."
            )
    if location.ndim != 1 or location.shape != scale.shape or not len(location):
        raise ValueError(
            f"location has shape {tuple(location.shape)} and scale "
            f"{tuple(scale.shape)}. Pass one number for each of P weights, (P,), twice."
        )
    if not (scale > 0).all():
        raise ValueError(
            f"scale has {float(scale.min()):g}, which is not positive. Pass standard "
            "deviations, such as 0.05."
        )
