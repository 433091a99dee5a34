"""Quantile posterior: a monotone network represents the quantile function.

A weight is ``w = μ + σ h(ε)``, with ``ε ~ N(0, 1)`` and
``h(e) = e + Σ_k v_k tanh(s_k (e − c_k))``. For ``v, s > 0``,
``h' = 1 + Σ_k v_k s_k (1 − tanh²) ≥ 1``. The log density
``log q(w) = log N(ε) − log σ − log h'(ε)`` does not require inversion if ``ε`` is
given. As ``v → 0``, ``q`` becomes a Gaussian. Deeper networks have layers
``u¹ = tanh(s (e − c))``, ``u^l = tanh(A^l u^{l−1} − c^l)`` with ``A > 0``, and ``v``
contains the coefficients of the last layer. All weights share all parameters of the
network except ``v``.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from sklaplace.core.checks import check_count
from sklaplace.variational.base import (
    LOG_ROOT_TWO_PI,
    LocationScale,
    inverse_softplus,
    positive,
    spread,
)

# Initial heights, largest initial centre, and initial weight between units at different
# positions in successive layers.
_HEIGHT, _OUTERMOST, _MIXING = 0.05, 1.5, 0.05
# Number of points and range of the quadrature over ε. The error is exp(−π²/(0.009 s))
# for a slope s.
_N_POINTS, _RANGE = 2001, 9.0


class Quantile(LocationScale):
    """Learned monotone function of a normal variable for each weight.

    The distributions can be skewed and can have several modes or non-Gaussian tails.
    Log densities of draws are cheap, but log densities of other weights require a
    bisection. The family is experimental: on small problems, differences from the
    Gaussian family were no larger than differences between seeds.

    Read more in the :doc:`User Guide </research/weight_posteriors>`.

    Parameters
    ----------
    location : Tensor of shape (P,)
        Initial means and medians.
    scale : Tensor of shape (P,)
        Initial standard deviations, positive.
    bound : float, default=3.0
        Ignored, because the support is unbounded.
    n_units : int, default=4
        Number of units per hidden layer, K.
    n_layers : int, default=1
        Number of hidden layers.

    Raises
    ------
    ValueError
        If shapes, numbers or the bound are invalid; see `WeightPosterior`.

    See Also
    --------
    WeightPosterior : Interface of all families.
    Density : More flexible and more expensive family.

    Notes
    -----
    Each weight has ``2 + K`` parameters: ``μ``, ``σ`` and the heights ``v_k``. All
    weights share the learned slopes ``s_k`` and centres ``c_k``, so one quadrature
    computes the moments of ``h`` for all weights. A training step for 85,000 weights
    takes twice as long as with Gaussians. Drawing s samples takes O(s P K) time and
    memory, and O(s P K²) time for each additional layer.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.variational import Quantile
    >>> q = Quantile(torch.zeros(3), torch.full((3,), 0.1))
    >>> q.sample(5, torch.Generator().manual_seed(0))[0].shape
    torch.Size([5, 3])
    """

    name: ClassVar[str] = "quantile"
    checks: ClassVar = {"n_units": check_count, "n_layers": check_count}

    def __init__(
        self,
        location: Tensor,
        scale: Tensor,
        bound: float = 3.0,
        *,
        n_units: int = 4,
        n_layers: int = 1,
    ) -> None:
        super().__init__(location, scale, bound, n_units=n_units, n_layers=n_layers)

    def _init_z(self, like: Tensor, **sizes: int) -> None:
        """Create the parameters of a function ``h`` that is nearly linear at first.

        ``like`` (P,) determines the dtype and device. ``sizes`` has the options
        ``n_units`` and ``n_layers`` of the constructor.
        """
        k, n_further = sizes["n_units"], sizes["n_layers"] - 1
        heights = like.new_full((k, len(like)), _HEIGHT)
        self.raw_heights = nn.Parameter(inverse_softplus(heights))
        self.raw_slopes = nn.Parameter(inverse_softplus(like.new_ones(k)))
        self.centres = nn.Parameter(spread(k, _OUTERMOST).to(like))
        mixing = inverse_softplus(torch.eye(k).to(like) + _MIXING)
        self.raw_mixing = nn.ParameterList(mixing.clone() for _ in range(n_further))
        self.offsets = nn.ParameterList(like.new_zeros(k) for _ in range(n_further))

    def median(self) -> Tensor:
        """Return the medians, (P,)."""
        return self.location + self.scale * self._h(torch.zeros_like(self.location))[0]

    def _transform_z(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``z = h(ε)`` and its log density ``log N(ε) − log h'(ε)``."""
        z, slope = self._h(noise)
        return z, noise.square() * -0.5 - LOG_ROOT_TWO_PI - slope.log()

    def _log_prob_z(self, z: Tensor) -> Tensor:
        """Return the log density of ``z`` (..., P), in nats, by bisection.

        The bisection takes up to 60 steps. The result is as precise as ``z`` and is
        differentiable.
        """
        with torch.no_grad():
            # |h(e) − e| < Σ v brackets the solution
            width = positive(self.raw_heights).sum(0)  # half the bracket
            low = z - width
            # Halved to the rounding error of z. Eight more steps serve brackets up to
            # 2⁸ times as wide as z.
            for _ in range(int(-math.log2(torch.finfo(z.dtype).eps)) + 8):
                low = (low + width).where(self._h(low + width)[0] <= z, low)
                width = width / 2
        # one step of Newton's method makes the solution of h(e) = z differentiable
        h, slope = self._h(low)
        e = low - (h - z) / slope.detach()
        return self._transform_z(e)[1]  # the log density of h(e)

    def _h(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``h(e)`` and ``h'(e)`` for ``e`` (..., P)."""
        heights = positive(self.raw_heights)
        units, derivatives = self._last_layer(e)
        # (K, 1, ..., 1, P), to broadcast against units (K, ..., P)
        heights = heights.reshape(-1, *[1] * (e.ndim - 1), heights.shape[1])
        return e + (heights * units).sum(0), 1 + (heights * derivatives).sum(0)

    def _last_layer(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last layer's units at ``e``, (K, ...), and their derivatives.

        The derivatives are those with respect to ``e``, by the chain rule.
        """
        # the shape of one number per unit, to broadcast against units (K, ...)
        column = (-1, *[1] * e.ndim)
        slopes = positive(self.raw_slopes).reshape(column)
        units = (slopes * (e - self.centres.reshape(column))).tanh()
        derivatives = slopes * (1 - units.square())
        for raw_mixing, offsets in zip(self.raw_mixing, self.offsets, strict=True):
            mixing = positive(raw_mixing)
            units = (torch.tensordot(mixing, units, 1) - offsets.reshape(column)).tanh()
            derivatives = torch.tensordot(mixing, derivatives, 1) * (1 - units.square())
        return units, derivatives

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of ``h(ε)``, (P,) each, by one quadrature."""
        heights = positive(self.raw_heights)
        e = spread(_N_POINTS, _RANGE).to(heights)
        density = (-e.square() / 2).softmax(0)  # normal, with a sum of one
        units = self._last_layer(e)[0]  # (K, number of points)
        mean = units @ density  # (K,)
        # h is a weighted sum of the units, and of e with weight one
        centred = torch.cat([units - mean.unsqueeze(-1), e.unsqueeze(0)])
        covariance = (centred * density) @ centred.mT  # (K + 1, K + 1)
        weights = torch.cat([heights, torch.ones_like(heights[:1])])
        return mean @ heights, (weights * (covariance @ weights)).sum(0)
