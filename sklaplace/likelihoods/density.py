"""DensityLikelihood: a likelihood of numeric targets, defined by its log-density.

Integrals over targets and outputs are computed by the trapezoidal rule. The nodes are
centred at the mode of the integrand and reach far into the tails.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sklaplace.likelihoods.base import SeparableLikelihood
from sklaplace.likelihoods.quadrature import NODES, WEIGHTS
from sklaplace.likelihoods.regression import (
    Array,
    Level,
    Noise,
    Pair,
    RegressionLikelihood,
)

Nodes = tuple[Tensor, Tensor]

# Bounds on targets, on logarithms of positive targets (whose squares must not
# overflow), and on standard scores of outputs, all as inverse hyperbolic sines.
_MAX_ASINH_TARGET, _MAX_ASINH_LOG, _MAX_ASINH_OUTPUT = 32.0, 6.4, 4.4
# Search for the mode: grid of the first pass in units of the bound, grid between two
# neighbours in each refinement, and number of refinements.
_COARSE_GRID = torch.linspace(-1.0, 1.0, 201, dtype=torch.float64)
_ZOOM_GRID = torch.linspace(0.0, 1.0, 33, dtype=torch.float64)
_N_ZOOMS = 12
# Distances from the mode at which to look for the width of the peak.
_WIDTHS = 2.0 ** torch.arange(-60.0, 60.5, 0.5, dtype=torch.float64)
# Nodes in units of the width, spaced by a hyperbolic sine to reach far into the tails.
_ASINH_NODES = torch.linspace(-20.0, 20.0, 801, dtype=torch.float64)
# A variance is infinite if an outermost node contributes more than this share.
_MAX_TAIL_SHARE = 1e-3
# Largest allowed error in the logarithm of a density's integral.
_MAX_LOG_INTEGRAL_ERROR = 0.02
# Scores of targets with a probability below this value can overflow, and are ignored.
_MIN_PROBABILITY = 1e-30
# Nodes over the outputs for quantiles: the largest standard deviation, and the largest
# step in units of the width of the likelihood. Noise narrower than `_MIN_NOISE_WIDTH`
# standard deviations of the output is neglected.
_MAX_DEVIATIONS, _MAX_STEP, _MIN_NOISE_WIDTH = 6.5, 0.5, 0.03
# Number of density values to compute at a time.
_VALUES_PER_CHUNK = 4_000_000
_LOG_2PI = math.log(2 * math.pi)


class DensityLikelihood(SeparableLikelihood, RegressionLikelihood):
    """Base class for continuous targets, defined by their log-density.

    A subclass implements only `log_prob`. Autograd computes derivatives, and quadrature
    computes expectations, quantiles and draws. The density must be defined for all real
    numbers or all positive numbers, and have a single maximum and no jumps. For more
    speed, override other methods with closed forms.

    Read more in the :ref:`User Guide <own-likelihood>`.

    See Also
    --------
    RegressionLikelihood : Base class for closed forms and for counts.

    Notes
    -----
    The output Hessian is the Fisher information, computed by quadrature with 801 nodes.
    Computing a moment requires about 50,000 evaluations of the density per target. If
    the output variance is large, computing a quantile requires up to a million
    evaluations.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.likelihoods import DensityLikelihood
    >>> class Laplace(DensityLikelihood):
    ...     def log_prob(self, f, y):
    ...         return torch.distributions.Laplace(f, 0.5).log_prob(y)
    >>> Laplace().root_hessian(torch.zeros(1, 1))  # 1 / scale
    tensor([[2.]])
    """

    is_convex = False
    is_positive: ClassVar[bool] = False
    """Whether targets must be positive. Otherwise they can be any real numbers."""

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the log-density of targets.

        Parameters
        ----------
        f : Tensor
            Outputs of the network.
        y : Tensor
            Targets, with a shape that broadcasts with ``f``.

        Returns
        -------
        Tensor
            Log-density of each target given its output, in nats.

        See Also
        --------
        loss : Negative log-density, summed over target columns.

        Notes
        -----
        Far from the data, parameters such as ``f.exp()`` can overflow. Torch
        distributions then raise an error. With ``validate_args=False``, predictions are
        NaN instead.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import DensityLikelihood
        >>> class Exponential(DensityLikelihood):
        ...     is_positive = True
        ...
        ...     def log_prob(self, f, y):
        ...         return f - f.exp() * y
        >>> Exponential().log_prob(torch.zeros(1), torch.ones(1))
        tensor([-1.])
        """

    def check_targets(self, y: Array) -> None:
        """Raise ValueError if targets must be positive but are not."""
        if self.is_positive and not (y > 0).all():
            raise ValueError(
                f"y has values of 0 or less, but {type(self).__name__} is for positive "
                "targets. Remove these rows, or use a likelihood for real numbers."
            )

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-density, summed over columns, (b,)."""
        return -self.log_prob(f, y).sum(-1)

    def root_hessian(self, f: Tensor) -> Tensor:
        """Return the square roots of the Fisher information, (b, c).

        The information is the expected square of the score, the derivative of the
        log-density with respect to the output.
        """

        def root_information(f: Tensor) -> Tensor:
            """Return the root of the expected squared score at each output, (k,)."""
            y, p = self._target_nodes(f)  # targets and their probabilities, (k, q) each
            # the user's log_prob may change f in place, so it gets a copy
            score_at = torch.func.grad(lambda f: self.log_prob(f.clone(), y).sum())
            scores = score_at(f.unsqueeze(-1).expand(y.shape))
            # far in the tails, scores overflow and would make the sum NaN
            scores = torch.where(p > _MIN_PROBABILITY, scores, 0)
            return (p * scores**2).sum(-1).sqrt()

        return _by_chunks(root_information, f).to(f)

    def draw(self, f: Tensor, u: Tensor) -> Tensor:
        """Draw targets by inverting the distribution function, (b, c)."""

        def quantile(f: Tensor, u: Tensor) -> Tensor:
            """Return the quantile at one level for each output, (k,)."""
            y, p = self._target_nodes(f)
            return self._quantiles(y, p, u.unsqueeze(-1))[:, 0]  # the only level

        return _by_chunks(quantile, f, u).to(f)

    def moments(self, mean: Array, var: Array, noise: Noise) -> Pair:
        """Return means and variances; variances dominated by the tails are inf.

        The moments of the target are computed for outputs at Gauss-Hermite nodes. The
        variance is the mean of the variances at the nodes, plus the variance of the
        means.
        """

        def conditional_moments(f: Tensor) -> Tensor:
            """Return the mean and variance of the target given each output, (k, 2)."""
            y, p = self._target_nodes(f)
            mean = (p * y).sum(-1, keepdim=True)
            terms = p * (y - mean) ** 2
            # if an outermost node has a noticeable share, farther ones would have more
            variance, tail = terms.sum(-1), torch.maximum(terms[:, 0], terms[:, -1])
            diverges = tail > _MAX_TAIL_SHARE * variance
            return torch.stack([mean[:, 0], variance.where(~diverges, torch.inf)], -1)

        f = mean[..., None] + np.sqrt(np.maximum(var, 0))[..., None] * NODES
        pairs = _by_chunks(conditional_moments, torch.from_numpy(f)).numpy()
        means, variances = pairs[..., 0], pairs[..., 1]  # (n, t, nodes) each
        mean = means @ WEIGHTS
        return mean, (variances + (means - mean[..., None]) ** 2) @ WEIGHTS

    def joint_moments(self, mean: Array, cov: Array, noise: Noise) -> Pair:
        """Return means, and covariances to first order in the output covariances.

        To first order, the covariance of two targets is the covariance of their outputs
        times the slopes of their means as functions of the mean output. The slopes are
        central differences. The variances on the diagonal are those of `moments`.
        """
        var = np.einsum("nnc->nc", cov)  # cov (n, n, c) is between samples
        means, variances = self.moments(mean, var, noise)
        # small in comparison with the output's spread, and positive without a spread
        step = 0.02 * np.sqrt(np.maximum(var, 0)) + 1e-6
        higher, _ = self.moments(mean + step, var, noise)
        lower, _ = self.moments(mean - step, var, noise)
        slopes = (higher - lower) / (2 * step)  # (n, t)
        covariances = slopes[:, None] * slopes * cov
        rows = np.arange(len(mean))
        covariances[rows, rows] = variances
        return means, covariances

    def quantiles(self, mean: Array, var: Array, noise: Noise, levels: Array) -> Array:
        """Return quantiles of the predictive distribution, (n, t, q).

        The normal distribution of each output is replaced by equidistant nodes, so the
        target has a mixture of one density for each node. The nodes must be close to
        each other in comparison with the width of these densities. Their number is
        therefore proportional to the ratio of the output's standard deviation to this
        width, rounded up to a power of two, so that targets with equal ratios are
        computed together. If the ratio is very large, the quantile of the target is its
        median at the quantile of the output.
        """
        u = torch.as_tensor(levels, dtype=torch.float64)

        def mixture_quantiles(mean: Tensor, std: Tensor, n_nodes: int) -> Tensor:
            """Return quantiles (k, q) of targets, given normal outputs (k,).

            Each target has a mixture of densities, one for each node of its output. The
            nodes z are standard scores of the output, and the weights of the mixture
            are their normal densities, normalised.
            """
            z = torch.linspace(
                -_MAX_DEVIATIONS, _MAX_DEVIATIONS, n_nodes, dtype=torch.float64
            )
            f = (mean.unsqueeze(-1) + std.unsqueeze(-1) * z).unsqueeze(-1)
            # f is (k, n_nodes, 1), and the weights are (n_nodes, 1)
            log_weights = (-(z**2) / 2).log_softmax(0).unsqueeze(-1)

            def log_mixture(y: Tensor) -> Tensor:  # of targets (k, target nodes)
                log_joint = self.log_prob(f, y.unsqueeze(-2)) + log_weights
                return log_joint.logsumexp(-2)

            y, p = self._target_nodes(mean, log_mixture)
            return self._quantiles(y, p, u)

        m, std = (torch.from_numpy(a) for a in (mean, np.sqrt(np.maximum(var, 0))))
        quantiles = m.new_empty(*m.shape, len(u))
        # the width of the density is about 1 / root_hessian
        ratios = (std * self.root_hessian(m)).clamp(min=1).log2().ceil().exp2()
        is_noisy = ratios <= 1 / _MIN_NOISE_WIDTH
        # elsewhere, the spread of the target around its median, for a given output, is
        # negligible
        if not is_noisy.all():
            at = ~is_noisy
            f = m[at].unsqueeze(-1) + std[at].unsqueeze(-1) * torch.special.ndtri(u)
            # sorted, because the median may decrease with the output
            quantiles[at] = self.draw(f, torch.full_like(f, 0.5)).sort(-1)[0]
        for ratio in ratios[is_noisy].unique():
            # from -_MAX_DEVIATIONS to _MAX_DEVIATIONS in steps of _MAX_STEP widths
            n_nodes = 2 * math.ceil(_MAX_DEVIATIONS * ratio / _MAX_STEP) + 1
            at = ratios == ratio
            function = partial(mixture_quantiles, n_nodes=n_nodes)
            quantiles[at] = _by_chunks(function, m[at], std[at], n_each=n_nodes)
        return quantiles.numpy()

    def sample(self, f: Array, noise: Noise, generator: np.random.Generator) -> Array:
        """Draw one target per draw of the outputs, (n, t, s)."""
        u = generator.uniform(size=f.shape)
        return self.draw(torch.from_numpy(f), torch.from_numpy(u)).numpy()

    def log_density(self, mean: Tensor, var: Tensor, y: Tensor, noise: Level) -> Tensor:
        """Return the predictive log-density, summed over columns, (b,).

        For each target y, ``p(y | f)`` is integrated over its normal output
        ``f = mean + std · z``, that is, over the standard score z.
        """

        def log_integral(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
            """Return the logarithm of the integral for each of k targets, (k,)."""
            m, s, y = (t.unsqueeze(-1) for t in (mean, std, y))

            def log_joint(z: Tensor) -> Tensor:  # log-density of y and z, (k, nodes)
                return self.log_prob(m + s * z, y) - (z**2 + _LOG_2PI) / 2

            # the search for the mode starts at zero, the center of z
            _, log_terms = _quadrature_terms(log_joint, 0 * mean, _MAX_ASINH_OUTPUT)
            return log_terms.logsumexp(-1)

        return _by_chunks(log_integral, mean, var.clamp(min=0).sqrt(), y).sum(-1)

    def _target_nodes(
        self, f: Tensor, log_density: Callable[[Tensor], Tensor] | None = None
    ) -> Nodes:
        """Return targets at the nodes of a quadrature, and their weights, (k, q) each.

        The weights are probabilities: those of each row sum to one. By default, the
        density of targets is that given outputs ``f`` (k,), and an error is raised if
        it does not integrate to one. If ``log_density`` is given, this function of
        targets (k, q) defines the density instead. For positive targets, the nodes are
        chosen for their logarithms.
        """
        log_p_at = log_density or partial(self.log_prob, f.unsqueeze(-1))
        # For positive targets, the variable is their logarithm x. Its density includes
        # the Jacobian exp(x) of y = exp(x). The mode is searched around zero.
        if self.is_positive:
            y, log_p = _quadrature_terms(
                lambda x: log_p_at(x.exp()) + x, 0 * f, _MAX_ASINH_LOG
            )
            y = y.exp()
        else:  # targets of most likelihoods are near the outputs
            y, log_p = _quadrature_terms(log_p_at, f, _MAX_ASINH_TARGET)
        # overflow far from the data is no error of the user's density
        error = log_p.logsumexp(-1).nan_to_num(0, 0, 0).abs().max()
        if log_density is None and error > _MAX_LOG_INTEGRAL_ERROR:
            raise ValueError(
                f"The density of {type(self).__name__} does not integrate to one: the "
                f"logarithm of its integral over targets is off by {float(error):.2g}. "
                "Include all terms in log_prob. Set is_positive for positive targets."
            )
        return y, log_p.softmax(-1)

    def _quantiles(self, y: Tensor, p: Tensor, u: Tensor) -> Tensor:
        """Return quantiles (k, m) at levels u, (m,) or (k, m).

        ``y`` and ``p`` (k, q) are the nodes and probabilities of `_target_nodes`. The
        quantiles are interpolated between the nodes, after two transformations:
        probabilities become normal scores, and positive targets become logarithms. For
        normal and log-normal targets, the interpolated function is linear.
        """
        if self.is_positive:
            y = y.log()
        # trapezoidal rule up to each node, with the first correction of Euler-Maclaurin
        below = p.cumsum(-1) - p / 2 - torch.gradient(p, dim=-1)[0] / 12
        # without 0 and 1, so that scores are finite
        scores = torch.special.ndtri(below.clamp(1e-300, 1 - 1e-16))
        level_scores = torch.special.ndtri(u.to(y)).expand(len(y), -1)
        rows = zip(*(t.cpu().numpy() for t in (level_scores, scores, y)), strict=True)
        quantiles = torch.from_numpy(np.array([np.interp(*row) for row in rows])).to(y)
        quantiles[p.isnan().any(-1)] = torch.nan
        return quantiles.exp() if self.is_positive else quantiles


def _by_chunks(
    function: Callable[..., Tensor], *tensors: Tensor, n_each: int = 1
) -> Tensor:
    """Apply a function of vectors to the flattened tensors, in float64.

    The function is applied to chunks of entries, to limit memory. For each entry, it
    computes ``n_each`` density values per node, and returns a value or a vector. The
    result has the shape of the first tensor, followed by the length of the vectors.
    """
    size = max(1, _VALUES_PER_CHUNK // (n_each * len(_ASINH_NODES)))
    flat = (t.detach().double().flatten().split(size) for t in tensors)
    values = torch.cat([function(*vectors) for vectors in zip(*flat, strict=True)])
    return values.reshape(*tensors[0].shape, *values.shape[1:])


def _quadrature_terms(
    log_function: Callable[[Tensor], Tensor], center: Tensor, reach: float
) -> Nodes:
    """Return nodes, and the logarithms of their terms in an integral, (k, q) each.

    The sum of the terms is the integral by the trapezoidal rule. ``log_function``
    evaluates the logarithms of k integrands at values (k, q). Each mode is at most
    ``sinh(reach)`` from its center (k,), and the integral covers that range.

    First, the mode is found on a coarse grid, which is refined around the largest value
    several times. Next, the width of the peak is measured on both sides of the mode.
    Finally, the nodes are placed at the mode plus the width times ``sinh(t)``, for
    equidistant t. A term is the integrand times the distance to the next node.
    """
    center, bound = center.unsqueeze(-1), math.sinh(reach)

    def log_value(x: Tensor) -> Tensor:
        """Return the log-integrands at distances (k, q) from the centers.

        Undefined or infinite values count as an integrand of zero.
        """
        log_f = log_function(center + x.clamp(-bound, bound))
        if log_f.shape != x.shape:
            raise ValueError(
                f"log_prob returns shape {tuple(log_f.shape)} for targets of shape "
                f"{tuple(x.shape)}. Return one log-density per target."
            )
        return log_f.nan_to_num(-torch.inf, -torch.inf, -torch.inf)

    # x is the grid of distances from the centers; at first, they grow exponentially,
    # because the scale of the peak is unknown
    x = (reach * _COARSE_GRID.to(center)).sinh().expand(len(center), -1)
    fractions = _ZOOM_GRID.to(center)
    for _ in range(_N_ZOOMS):
        # the next grid lies between the neighbours of the point with the largest value
        best = log_value(x).argmax(-1, keepdim=True).clamp(1, x.shape[1] - 2)
        low, high = x.gather(-1, best - 1), x.gather(-1, best + 1)
        x = low + (high - low) * fractions
    mode = (low + high) / 2  # the last neighbours differ by little more than rounding
    distances, t = _WIDTHS.to(center), _ASINH_NODES.to(center)
    width = torch.zeros_like(mode)  # mean of the widths on both sides
    for sign in (-1, 1):
        # one standard deviation from the mode, a normal log-density has fallen by 0.5
        is_high = log_value(mode + sign * distances) > log_value(mode) - 0.5
        n_high = is_high.long().cumprod(-1).sum(-1, keepdim=True)  # up to the first low
        # each side adds half of its first low distance, or of the largest distance
        width += distances[n_high.clamp(max=len(distances) - 1)] / 2
    x = mode + width * t.sinh()
    # the integrand times dx/dt and the step in t
    log_terms = log_value(x) + (width * t.cosh() * (t[1] - t[0])).log()
    # the range ends at the bound
    log_terms = torch.where(x.abs() > bound, -torch.inf, log_terms)
    return center + x.clamp(-bound, bound), log_terms
