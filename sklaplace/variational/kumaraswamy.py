"""Kumaraswamy posterior on ``(−bound, bound)``, with one or two modes.

A weight is ``w = bound · (2x − 1)`` with ``P(X ≤ x) = 1 − (1 − x^a)^b``. Let
``E ~ Exp(1)`` and ``y = E/b``. Inverting the survival function gives

``log x = z/a``, ``z = log(1 − e^{−y})``,
``log q = log a + log b + (1 − 1/a) z − (1 − 1/b) E − log(2 · bound)``.

The parameters are ``log a`` and ``logit m``, where ``m`` is the median of ``x``. With
``t = a log m`` and ``L(t) = log(−log(1 − e^t))``, ``log b = log log 2 − L(t)``. In a
narrow posterior, ``b`` overflows. The code therefore computes only ``log b``, and
``z + log b = log E + log((1 − e^{−y})/y)`` instead of ``z``.
"""

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from sklaplace.variational.base import WeightPosterior

# Parameters are clamped to these magnitudes to avoid overflow in float32.
_LARGEST_LOG_A, _LARGEST_LOGIT = 20.0, 80.0
# Logarithms of b above which series replace the gamma and digamma functions. At b = 20,
# `_stirling_error` is precise, and at b = e³², ψ(1 + b) rounds to log b.
_STIRLING, _LOGARITHM = math.log(20), 32.0


class Kumaraswamy(WeightPosterior):
    """Kumaraswamy distribution for each weight, stretched to ``(−bound, bound)``.

    This family is for weights on an interval, for example with a uniform prior. It is
    similar to the beta distribution, but samples and densities have closed forms. A
    narrow distribution has a skewness of −1.1 (in ``x``), and a wide distribution can
    have modes at both bounds. The family is experimental: on small problems,
    differences from the Gaussian family were no larger than differences between seeds.

    Read more in the :doc:`User Guide </research/weight_posteriors>`.

    Parameters
    ----------
    location : Tensor of shape (P,)
        Initial medians, within ``(−bound, bound)``.
    scale : Tensor of shape (P,)
        Initial standard deviations, positive. A value too large for the interval is
        reduced to the largest value from which training works well.
    bound : float, default=3.0
        Largest magnitude of a weight.

    Raises
    ------
    ValueError
        If a location is not within the bound, or if shapes or numbers are invalid; see
        `WeightPosterior`.

    See Also
    --------
    WeightPosterior : Interface of all families.
    UniformPrior : Prior on the same interval.

    Notes
    -----
    Each weight has two parameters. One parameter changes only the median, because
    training converged far more slowly with ``log a`` and ``log b`` as the parameters.
    Drawing s samples takes O(s P) time and memory. A training step for 85,000 weights
    takes twice as long as with Gaussians.

    The entropy and the moments have closed forms in gamma and digamma functions,
    computed in float64. The closed forms cost ten times as much as a draw, so they are
    used in reports but not in training.

    Log densities of draws are computed from the noise. These log densities are finite
    in float32 even if ``w`` rounds to a bound, unlike in
    ``torch.distributions.Kumaraswamy`` (see pytorch issues 95548 and 139019).

    References
    ----------
    Kumaraswamy (1980), "A generalized probability density function for double-bounded
    random processes", Journal of Hydrology 46.
    Jones (2009), "Kumaraswamy's distribution: a beta-type distribution with some
    tractability advantages", Statistical Methodology 6 (moments).
    Wasserman and Mateos (2024), "Stabilizing the Kumaraswamy distribution",
    arXiv:2410.00660 (unstable terms of the usual formulas).

    Examples
    --------
    >>> import torch
    >>> from sklaplace.variational import Kumaraswamy
    >>> q = Kumaraswamy(torch.zeros(3), torch.full((3,), 0.1))
    >>> w, _ = q.sample(5, torch.Generator().manual_seed(0))
    >>> bool((w.abs() < q.bound).all())
    True
    """

    name: ClassVar[str] = "kumaraswamy"
    is_bounded: ClassVar[bool] = True
    _noise = staticmethod(torch.rand)

    def __init__(self, location: Tensor, scale: Tensor, bound: float = 3.0) -> None:
        super().__init__(location, scale, bound)
        relative = location.detach().double() / self.bound
        if (relative.abs() >= 1).any():
            largest = float(location.abs().max())
            raise ValueError(
                f"location has a weight of magnitude {largest:g}, outside bound="
                f"{self.bound:g}. Choose a larger bound, such as {2 * largest:.2g}."
            )
        # the logit of the median of x, which is (1 + relative) / 2
        self.logit_median = nn.Parameter(2 * relative.atanh())
        self.log_a = nn.Parameter(torch.zeros_like(relative))
        with torch.no_grad():
            # Fixed-point iteration, because the standard deviation is almost
            # proportional to 1/a. After 14 steps, its error is below 0.1 %. The lower
            # limit of log a prevents starts that are too wide for training. The upper
            # limit is inside the range of `_shape`, whose clamp has no gradient beyond.
            for _ in range(14):
                log_ratio = (self.variance() + 1e-30).log() / 2 - scale.double().log()
                self.log_a.add_(log_ratio).clamp_(-2, _LARGEST_LOG_A - 1)
        self.to(location)  # from float64, in which the iteration is precise

    def transform(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and log densities, (s, P) each, from uniform noise (s, P).

        With ``E ~ Exp(1)`` and ``y = E/b``, a draw has ``log x = log(1 − e^{−y}) / a``.
        The numerator ``z`` is computed as ``z + log b``, because ``b`` can overflow.
        """
        log_a, log_b = self._shape(noise.dtype)
        E = (-torch.log1p(-noise)).clamp(min=torch.finfo(noise.dtype).tiny)
        # a smaller y is lost in 1 + y, and its reciprocal overflows in the gradient
        y = (E * (-log_b).exp()).clamp(min=torch.finfo(noise.dtype).eps)
        # z + log b, from z = log(1 − e^{−y}) and log b = log E − log y
        z_plus_log_b = E.log() + (-(-y).expm1() / y).log()
        log_x = ((z_plus_log_b - log_b) / log_a.exp()).clamp(max=0)
        # log a + log b + (1 − 1/a) z − (1 − 1/b) E − log(2 · bound), where z/a is log x
        # and E/b is y
        log_q = z_plus_log_b - log_x - E + y + log_a - math.log(2 * self.bound)
        return self.bound * (2 * log_x.exp() - 1), log_q

    def log_prob(self, w: Tensor) -> Tensor:
        """Return log densities of weights (..., P), in nats.

        Log densities at or beyond the bounds are −inf.
        """
        log_a, log_b = self._shape(w.dtype)
        x = (w / self.bound + 1) / 2
        inside = (x > 0) & (x < 1)
        # log 0 would have a gradient of nan, even though it is masked
        log_x = torch.where(inside, x, 0.5).log()
        z = log_a.exp() * log_x
        log_y = _cloglog_exp(z)  # y = −log(1 − x^a), and b y = E in `transform`
        # log a + log b + (a − 1) log x + (b − 1) log(1 − x^a), where log(1 − x^a) is −y
        log_q = z - log_x - (log_y + log_b).exp() + log_y.exp() + log_a + log_b
        return (log_q - math.log(2 * self.bound)).masked_fill(~inside, -math.inf)

    def median(self) -> Tensor:
        """Return the medians, (P,)."""
        return self.bound * (self.logit_median / 2).tanh()

    def mean(self) -> Tensor:
        """Return the means, (P,)."""
        return self._moments()[0].to(self.log_a.dtype)

    def variance(self) -> Tensor:
        """Return the variances, (P,)."""
        return self._moments()[1].to(self.log_a.dtype)

    def closed_form(self) -> tuple[Tensor, Tensor]:
        """Return entropies in nats and ``E[w²]``, (P,) each, in closed form."""
        log_a, log_b = self._shape(torch.float64)
        capped = log_b.clamp(max=_LOGARITHM)
        # ψ(1 + b) + γ, where ψ(1 + b) is log b if b overflows
        harmonic = torch.digamma(1 + capped.exp()) + (log_b - capped) + np.euler_gamma
        # entropy of x: 1 − 1/b + (1 − 1/a) (ψ(1 + b) + γ) − log a − log b
        entropy = (1 - (-log_b).exp()) + (1 - (-log_a).exp()) * harmonic
        entropy = entropy - (log_a + log_b) + math.log(2 * self.bound)
        mean, variance = self._moments()
        dtype = self.log_a.dtype
        return entropy.to(dtype), (variance + mean.square()).to(dtype)

    def _shape(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return ``log a`` and ``log b``, (P,) each, clamped.

        The median ``m`` of ``x`` determines ``b``, because ``(1 − m^a)^b = 1/2``.
        Therefore, ``log b = log log 2 − L(a log m)``, where `_cloglog_exp` returns
        ``L``.
        """
        log_a = self.log_a.to(dtype).clamp(-_LARGEST_LOG_A, _LARGEST_LOG_A)
        logit = self.logit_median.to(dtype).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
        log_b = math.log(math.log(2)) - _cloglog_exp(log_a.exp() * logsigmoid(logit))
        return log_a, log_b

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Return the means and variances (P,), float64, from moments of ``x``.

        ``E[x^n] = Γ(1 + n/a) Γ(1 + b) / Γ(1 + b + n/a)`` (Jones 2009). The variance has
        a small relative error.
        """
        log_a, log_b = self._shape(torch.float64)
        d = (-log_a).exp()  # 1/a
        # log E[x] and log E[x²]
        first, second = (
            torch.lgamma(1 + n * d) + _log_gamma_ratio(log_b, n * d) for n in (1, 2)
        )
        # E[x²] − E[x]², without the cancellation of this difference
        variance = (2 * first).exp() * (second - 2 * first).expm1().clamp(min=0)
        return self.bound * (2 * first.exp() - 1), 4 * self.bound**2 * variance


def _cloglog_exp(t: Tensor) -> Tensor:
    """Return ``L(t) = log(−log(1 − e^t))`` for negative ``t``, to full precision.

    This is the complementary log-log function of a probability ``e^t``.

    One formula is precise for ``t`` near zero, and the other far below zero. Both are
    precise where ``e^t`` is 1/2, so the code switches there.
    """
    t = t.clamp(max=-torch.finfo(t.dtype).tiny)
    near = (-(-t.clamp(min=-1).expm1()).log()).log()
    # below −40, L(t) = t in every precision. Clamps keep the value and the gradient of
    # the formula that is not selected finite.
    far = (-torch.log1p(-t.clamp(-40, -0.5).exp())).log() + (t - t.clamp(min=-40))
    return torch.where(t > -math.log(2), near, far)


def _log_gamma_ratio(log_b: Tensor, d: Tensor) -> Tensor:
    """Return ``log(Γ(1 + b) / Γ(1 + b + d))``, even if ``b`` overflows.

    Small ``b`` are inserted into the formula. For large ``b``, Stirling's series of
    both terms are subtracted, so that terms as large as ``b log b`` cancel exactly.
    """
    b = log_b.clamp(max=_STIRLING).exp()
    direct = torch.lgamma(1 + b) - torch.lgamma(1 + b + d)
    # x is 1 + b; log Γ(x) is (x − 1/2) log x − x + log √(2π) plus a small remainder
    log_x = torch.logaddexp(log_b, torch.zeros_like(log_b))
    x = log_x.clamp(max=600).exp()  # without overflow
    # (x + d − 1/2) (log(x + d) − log x)
    growth = (x + d - 0.5) * torch.log1p(d / x)
    series = d - d * log_x - growth + _stirling_error(x) - _stirling_error(x + d)
    return torch.where(log_b < _STIRLING, direct, series)


def _stirling_error(x: Tensor) -> Tensor:
    """Return ``log Γ(x)`` minus the leading terms of Stirling's series.

    The leading terms are ``(x − 1/2) log x − x + log √(2π)``. The code has the next
    three terms of the series, with an error of 5e-13 at ``x = 20``.
    """
    square = x.square()
    return (1 / 12 - (1 / 360 - 1 / (1260 * square)) / square) / x
