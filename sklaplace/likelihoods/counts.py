"""Poisson-log-normal distribution: counts whose log-rate is Gaussian.

``P(y) = ∫ Poisson(y | exp f) N(f | m, v) df`` (Aitchison and Ho 1989, "The multivariate
Poisson-log normal distribution"). Rates can be as large as double precision allows.
Means, variances and counts are broadcast to a common shape.
"""

import math

import numpy as np
import torch
from scipy.special import ndtr, ndtri, pdtr
from scipy.stats import poisson
from torch import Tensor

from sklaplace.core.newton import first_where
from sklaplace.likelihoods.quadrature import WEIGHTS, exp_at_nodes

Array = np.ndarray

# `cdf` integrates over the log-rate if its standard deviation is at most this multiple
# of the standard deviation of a gamma variable's logarithm.
_MAX_RELATIVE_STD = 1.0
# Nodes of the trapezoidal rule for the logarithm of a gamma variable, in units of its
# standard deviation. Beyond the nodes, the density is below exp(-36), even with one
# degree of freedom.
_GAMMA_NODES = np.linspace(-38.0, 9.0, 95)
# Poisson quantiles use an expansion for rates above the first value. numpy cannot draw
# Poisson variables for rates above the second value.
_MAX_EXACT_RATE, _MAX_NUMPY_RATE = 1e8, 1e18
_MAX_COUNT = np.finfo(np.float64).max
# Number of quantiles per chunk, to limit the memory for the nodes.
_QUANTILES_PER_CHUNK = 10_000
# Gauss-Legendre nodes on (0, 1) with weights. The interval extends until the
# log-integrand has decreased by `_LOG_DROP`.
_X, _W = np.polynomial.legendre.leggauss(32)
_LEGENDRE = (1 + _X) / 2, _W / 2
_LOG_DROP = 30.0
_NEWTON_STEPS = 8
_LOG_2PI = math.log(2 * math.pi)


def cdf(y: Array, mean: Array, variance: Array) -> Array:
    """Compute ``P(Y ≤ y)`` for integers ``y`` of at least -1, where it is zero.

    ``mean`` and ``variance`` describe the log-rate.

    Notes
    -----
    The probability of at most y events equals the probability that a gamma variable G
    with the shape parameter y + 1 exceeds the rate. If the distribution of ``log G`` is
    wider than that of the log-rate f, ``P(G > exp f)`` is smooth in f, and the integral
    is computed by Gauss-Hermite quadrature. Otherwise ``P(f < log G)`` is smooth in
    ``log G``, and the trapezoidal rule is used. Both integrals are accurate to 1e-8.
    """
    y, mean, std = np.broadcast_arrays(y, mean, np.sqrt(np.maximum(variance, 0)))
    proba = np.zeros(y.shape)  # remains zero for y = -1
    # log G has a standard deviation of about 1 / sqrt(y + 1)
    is_narrow = std * np.sqrt(np.maximum(y, 0) + 1) <= _MAX_RELATIVE_STD
    # the mean of P(G > exp f) over f, where P(G > rate) is pdtr(y, rate)
    at = is_narrow & (y >= 0)
    rates = exp_at_nodes(mean[at], std[at] ** 2)  # (entries, nodes)
    proba[at] = pdtr(y[at, None], rates) @ WEIGHTS
    # for the other entries, the mean of P(f < log G) over log G
    at = ~is_narrow & (y >= 0)
    shape = y[at, None] + 1  # of the gamma variable
    # nodes u of log G - log(shape), at which the density of log G, relative to its
    # mode, is exp(-shape (exp(u) - 1 - u))
    u = _GAMMA_NODES / np.sqrt(shape)
    density = np.exp(-shape * _exp_remainder(torch.from_numpy(u)).numpy())
    f_is_below = ndtr((np.log(shape) + u - mean[at, None]) / std[at, None])
    proba[at] = (density * f_is_below).sum(-1) / density.sum(-1)
    return proba


def quantiles(mean: Array, variance: Array, levels: Array) -> Array:
    """Return the smallest counts ``y`` with ``cdf(y) ≥ level``, or inf above 1e308.

    The result has the broadcast shape of the arguments. It is computed in chunks, which
    limits the memory.
    """
    arrays = np.broadcast_arrays(mean, variance, levels)
    n_chunks = max(1, arrays[0].size // _QUANTILES_PER_CHUNK)
    # triples of chunks of the three arguments
    chunks = zip(*(np.array_split(a.ravel(), n_chunks) for a in arrays), strict=True)
    counts = np.concatenate([_quantiles(m, v, q) for m, v, q in chunks])
    return counts.reshape(arrays[0].shape)


def _quantiles(mean: Array, variance: Array, levels: Array) -> Array:
    """Return the smallest counts whose distribution function reaches the levels."""
    low, high = _bracket(mean, np.sqrt(np.maximum(variance, 0)), levels)
    y = first_where(lambda y: cdf(y, mean, variance) >= levels, low, high, _middle)
    return np.where(y == _MAX_COUNT, np.inf, y)


def poisson_quantiles(rates: Array, levels: Array) -> Array:
    """Return the smallest counts ``y`` with ``P(Y ≤ y) ≥ level`` for Poisson ``Y``.

    For large rates, a Cornish-Fisher expansion is used, because scipy's search fails.
    """
    z = ndtri(levels)
    # the skewness 1 / sqrt(rate) gives the third term; 0.5 is the continuity correction
    large = np.ceil(rates + z * np.sqrt(rates) + (z**2 - 1) / 6 - 0.5)
    # scipy is called for all entries, so large rates are replaced by one it can search
    small = poisson.ppf(levels, np.minimum(rates, _MAX_EXACT_RATE))
    return np.asarray(np.where(rates > _MAX_EXACT_RATE, large, small))


def draw(rates: Array, generator: np.random.Generator) -> Array:
    """Draw Poisson variables, float64, from a normal approximation for huge rates."""
    is_large = rates > _MAX_NUMPY_RATE
    # zero stands for huge rates, whose counts follow below
    counts = generator.poisson(np.where(is_large, 0.0, rates)).astype(np.float64)
    large = rates[is_large]
    # with a finite standard deviation, an infinite rate gives inf instead of NaN
    std = np.sqrt(np.minimum(large, _MAX_COUNT))
    counts[is_large] = large + std * generator.standard_normal(large.shape)
    return counts


def log_mass(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Compute ``log P(y)`` of counts, in nats.

    Notes
    -----
    Let f* maximise the logarithm of the integrand, and let ``r = exp f*``. The
    integrand at ``f* + u`` is its maximum times ``exp(-r (exp(u) - 1 - u) - u²/2v)``.
    Gauss-Legendre quadrature covers the range around the maximum in which this factor
    exceeds ``exp(-30)``. The result is accurate to 1e-8, and to 3e-7 for variances of
    10,000. To avoid the difference of large terms, the log-rate is written as
    ``f = log s + d`` with ``s = max(y, 1)``. The Poisson factor is then its value at
    the rate s, times ``exp(y d - s (exp(d) - 1))``.
    """
    v = variance.clamp(min=1e-12)  # not zero, because the formulas divide by v
    s = y.clamp(min=1)
    mean_d = mean - s.log()
    d = _mode(y, s, mean_d, v)  # at f*
    rate = s * d.exp()  # r
    # maximum of the log-integrand, without the Poisson factor at the rate s and the
    # constant of the normal factor: y d - s (exp(d) - 1), without cancellation, and
    # the exponent of the normal factor
    peak = (y - s) * d - s * _exp_remainder(d) - (d - mean_d) ** 2 / v / 2
    left, right = _distances_to_tails(rate, v)
    nodes, weights = (torch.as_tensor(a).to(y) for a in _LEGENDRE)
    area = torch.zeros_like(v)  # integral relative to the maximum of the integrand
    for width in (-left, right):  # on each side of the maximum
        u = width.unsqueeze(-1) * nodes
        fall = rate.unsqueeze(-1) * _exp_remainder(u) + u**2 / v.unsqueeze(-1) / 2
        area = area + width.abs() * ((-fall).exp() @ weights)
    return peak + _log_poisson_at_count(y, s) + area.log() - (v.log() + _LOG_2PI) / 2


def _bracket(mean: Array, std: Array, levels: Array) -> tuple[Array, Array]:
    """Return a lower and an upper bound of each quantile.

    One half of a tail's probability determines a bound on the log-rate. The other half
    determines a bound on the Poisson variable at this rate, by Chernoff's inequality.
    """
    bounds = []
    # the lower bound limits the probability below it, and the upper bound that above it
    for tail, sign in ((levels, -1), (1 - levels, 1)):
        log_rate = mean - sign * std * ndtri(tail / 2)  # ndtri is negative
        with np.errstate(over="ignore"):
            rate = np.minimum(np.exp(log_rate), _MAX_COUNT)
        # a Poisson variable is farther from its rate than t with a probability below
        # exp(-t² / (2 (rate + t/3))), which is at most tail / 2 for this margin t
        deviations = np.sqrt(-2 * np.log(tail / 2))
        # one more, because floor lowers the upper bound by less than one
        margin = deviations * np.sqrt(rate) + deviations**2 / 2 + 1
        # -1 is below all counts, so its probability never reaches a level
        bounds.append(np.clip(np.floor(rate + sign * margin), -1.0, _MAX_COUNT))
    return bounds[0], bounds[1]


def _middle(low: Array, high: Array) -> Array:
    """Return the count at which bisection splits each interval from low to high.

    It is the geometric mean of distant bounds, which may be many orders of magnitude
    apart, and the arithmetic mean of close bounds.
    """
    arithmetic = np.floor(low / 2 + high / 2)  # the sum of the bounds could overflow
    # shifted by two, because bounds start at -1, and a mean with zero would be zero
    geometric = np.floor(np.sqrt(low + 2) * np.sqrt(high + 2) - 2)
    return np.where(high / 4 > low + 2, geometric, arithmetic)


def _exp_remainder(u: Tensor) -> Tensor:
    """Compute ``exp(u) - 1 - u`` without cancellation."""
    series = u**2 / 2 * (1 + u / 3 * (1 + u / 4 * (1 + u / 5 * (1 + u / 6))))
    return torch.where(u.abs() < 1e-2, series, u.expm1() - u)


def _mode(y: Tensor, s: Tensor, mean_d: Tensor, v: Tensor) -> Tensor:
    """Return the d that maximises ``y d - s·exp(d) - (d - mean_d)² / (2v)``.

    This is the log-integrand of `log_mass` up to a constant; d is the log-rate minus
    ``log s``, and has the mean ``mean_d`` and variance v. The function is concave.
    Where its slope is zero, ``x = d + log(v s)`` solves
    ``x + exp(x) = log(v s) + mean_d + v y``. The left side is convex, so Newton's
    method converges from the right, in at most eight steps.
    """
    shift = (v * s).log()
    value = shift + mean_d + v * y
    # x + exp(x) is close to x for small x, and close to exp(x) for large x
    x = torch.where(value < 1, value, value.clamp(min=1).log())
    for _ in range(_NEWTON_STEPS):
        x = x - (x + x.exp() - value) / (1 + x.exp())
    d = x - shift
    # one more Newton step, for d itself, recovers the digits lost by the shift; the
    # gradient is that of the negated function
    gradient = s * d.expm1() + (s - y) + (d - mean_d) / v
    return d - gradient / (s * d.exp() + 1 / v)


def _distances_to_tails(rate: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return distances at which the integrand is below ``exp(-30)`` times its maximum.

    The integrand is that of `log_mass`, with the rate r at its maximum and variance v
    of the log-rate. The distances u are those to the left and to the right. The left
    distance follows from ``exp(-u) - 1 + u ≥ u²/(2 + 2u/3)``. The right distance
    follows from ``exp(u) - 1 - u ≥ u²/2``, and ``exp(u) - 1 - u ≥ exp(u)/4`` for u
    above 1.5. These bounds concern the Poisson factor of the integrand. The normal
    factor alone, or both factors together, can imply smaller distances.
    """
    third = _LOG_DROP / 3  # the left distance solves r u² = 30 (2 + 2u/3)
    left = (third + (third**2 + 2 * _LOG_DROP * rate).sqrt()) / rate
    right = (4 * _LOG_DROP / rate).log().clamp(min=1.5)
    normal, both = (2 * _LOG_DROP * v).sqrt(), (2 * _LOG_DROP / (rate + 1 / v)).sqrt()
    return left.minimum(normal), right.minimum(both)


def _log_poisson_at_count(y: Tensor, s: Tensor) -> Tensor:
    """Compute the log-probability of counts y under Poisson rates ``s = max(y, 1)``.

    It is ``y log s - s - log y!``. For large counts, Stirling's series of ``log y!``
    cancels the large terms.
    """
    exact = y * s.log() - s - torch.lgamma(y + 1)
    remainder = (1 / 12 - (1 / 360 - 1 / 1260 / s**2) / s**2) / s
    return torch.where(y < 30, exact, -(s.log() + _LOG_2PI) / 2 - remainder)
