"""Distribution of the sum of a normal and a standard Gumbel variable.

The distribution function F has no closed form. This module approximates
``-log(-log F)`` by a polynomial, because this transform is linear for a Gumbel variable
without normal noise, and smooth for all variances.
"""

import math

import torch
from torch import Tensor

# Mean and variance of a standard Gumbel variable.
_MEAN, _VARIANCE = 0.5772156649015329, math.pi**2 / 6
# Bounds of ``-log(-log F)``. The approximation is a polynomial between the bounds, and
# linear outside.
LOWEST, HIGHEST = -2.7, 9.0
# fmt: off
# Coefficients of powers of ``u``, which is -1 at the lower and 1 at the upper bound.
# Each coefficient is a polynomial in ``q``, which is twice the Gumbel variable's share
# of the standard deviation, minus 1. The polynomials are fitted by least squares to
# numerical integrals at 61 Chebyshev points of ``q``, from zero to infinite variance,
# and 121 points of ``u``. The weights of the fit equalise the largest errors: 0.0021
# between -1 and 7, and up to 0.009 outside.
_COEFFICIENTS = (
    (0.141855, 1.37084, 1.39068, 0.6189, 0.185447,
     -0.642496, -0.78581, 0.375241, 0.489419),
    (4.8675, 2.88325, 2.95726, -1.06302, -5.23019,
     -2.28223, 3.04306, 1.4081, -0.715072),
    (3.48254, 2.43068, -1.07198, -12.7501, -9.66423,
     13.4793, 13.9242, -4.49902, -5.30112),
    (2.23067, -2.56529, -13.9028, -9.17534, 28.7277,
     25.4219, -19.7186, -14.8078, 3.64508),
    (-0.19955, -8.22382, -6.54536, 30.6058, 38.4179,
     -37.9149, -52.7721, 14.7699, 21.7336),
    (-2.05902, -0.0617985, 20.0221, 14.7396, -48.874,
     -36.2063, 41.1964, 21.9797, -10.3669),
    (-0.284491, 4.6111, 6.4546, -19.4446, -30.3462,
     26.6143, 41.9091, -11.3703, -18.0113),
    (0.819236, -0.412782, -9.25138, -3.63735, 26.4848,
     11.6313, -26.3255, -7.8786, 8.30102),
)
# Midpoint of the bounds relative to the mean, and half their distance, in standard
# deviations.
_MIDDLE = (-0.218798, 1.21591, 0.871825, -0.0923967, 0.0869022,
           0.0512535, -0.375712, 0.150401, 0.312763)
_HALF = (4.46126, 0.483155, 0.283401, -0.524331, -0.413502,
         0.521482, 0.392926, -0.355158, -0.284562)
# Slope at the upper bound divided by the Gumbel variable's share of the standard
# deviation, to within 1 %. Slopes above one are set to one, the slope far above the
# bound.
_SLOPE = (2.01067, -1.81965, 1.05883, 1.17782, -2.91149,
          -0.185338, 2.90576, -0.195612, -1.02795)
# fmt: on
_TABLE = torch.tensor((*_COEFFICIENTS, _MIDDLE, _HALF, _SLOPE), dtype=torch.float64)


class NormalGumbel:
    """Distributions of normal variables plus independent standard Gumbel variables.

    Parameters
    ----------
    mean, variances : Tensor of shape (...)
        Float64 means and non-negative variances of the normal variables.

    Attributes
    ----------
    lower, upper : Tensor of shape (...)
        Points at which ``-log F`` is ``exp(-LOWEST)`` and ``exp(-HIGHEST)``,
        respectively.

    Notes
    -----
    The relative error of ``-log F`` is at most 0.0025 where ``-log F`` is between 0.001
    and 2, and at most 0.01 up to the upper bound. Above the upper bound, the
    approximation has an exponential tail. The exact tail becomes exponential only
    farther out, so the approximate tail is too heavy for variances above 5.
    """

    def __init__(self, mean: Tensor, variances: Tensor) -> None:
        std = (variances + _VARIANCE).sqrt()
        gumbel_share = _VARIANCE**0.5 / std
        q = 2 * gumbel_share - 1
        # each row of the table has the coefficients of a polynomial in q
        powers = [torch.ones_like(q), q]
        while len(powers) < _TABLE.shape[1]:
            powers.append(q * powers[-1])
        values = (_TABLE.to(q) @ torch.stack(powers).flatten(1)).unflatten(1, q.shape)
        # coefficients of powers of u, middle and half width of the interval, and slope
        *coefficients, middle, half, slope = values
        half = half * std
        centre = torch.addcmul(mean + _MEAN, middle, std)
        self.lower, self.upper = centre - half, centre + half
        # u = offset + factor * t is -1 at the lower and 1 at the upper bound
        self._factor = 1 / half
        self._offset = -centre * self._factor
        self._slope = (slope * gumbel_share).clamp(max=1)
        # coefficients of log(-log F) as a function of u
        self._coefficients = [-coefficient for coefficient in coefficients]
        # slope of log(-log F) beyond the upper bound, also as a function of u
        self._end_slope = -self._slope * half

    def minus_log(self, t: Tensor) -> Tensor:
        """Return ``-log F(t)`` at points that broadcast against the means.

        Its logarithm is a polynomial between the bounds. Outside, it is linear, with
        the slope of the upper end on both sides.
        """
        u = torch.addcmul(self._offset, t, self._factor)
        inner = u.clamp(-1, 1)
        # Horner's scheme, from the coefficient of the highest power
        *lower, log_s = self._coefficients
        for coefficient in reversed(lower):
            log_s = torch.addcmul(coefficient, log_s, inner)
        return torch.addcmul(log_s, u - inner, self._end_slope).exp()

    def upper_end(self, n: int) -> Tensor:
        """Return points at which ``-log F`` is 1/n of its value at the upper bound."""
        return self.upper + math.log(n) / self._slope
