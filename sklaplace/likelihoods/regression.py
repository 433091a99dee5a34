"""Likelihoods of numeric targets: real values and counts.

For a Gaussian over the outputs, the predictive distribution of new targets is
``∫ p(y | f) N(f | m, v) df``. Integrals without a closed form use Gauss-Hermite
quadrature.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor, nn

from sklaplace.core.newton import first_where
from sklaplace.likelihoods import counts
from sklaplace.likelihoods.base import Likelihood, SeparableLikelihood
from sklaplace.likelihoods.quadrature import NODES, WEIGHTS, exp_at_nodes

Array = np.ndarray
Pair = tuple[Array, Array]
Noise = float | Array
Level = float | Tensor

_LOG_2PI = math.log(2 * math.pi)


class RegressionLikelihood(Likelihood):
    """Base class for likelihoods of numeric targets, with one output per column.

    Outputs (n, c) are Gaussian with mean ``mean`` and variance ``var``. ``noise`` is
    the noise level σ; likelihoods without a noise parameter ignore it. `log_density`
    accepts tensors, and the other predictive methods accept arrays.

    Read more in the :doc:`User Guide </user_guide/networks>`.

    See Also
    --------
    Gaussian : Likelihood of real numbers.
    Poisson : Likelihood of counts.

    Examples
    --------
    >>> from sklaplace.likelihoods import Gaussian, RegressionLikelihood
    >>> isinstance(Gaussian(), RegressionLikelihood)
    True
    """

    is_classification = False
    noun = "column"

    def check_targets(self, y: Array) -> None:
        """Raise ValueError for invalid targets; by default, all targets are valid.

        Parameters
        ----------
        y : ndarray of shape (n, t)
            Targets.

        Raises
        ------
        ValueError
            If targets are invalid. The message says which targets are allowed.

        See Also
        --------
        targets : Convert targets for `loss`.

        Examples
        --------
        >>> import numpy as np
        >>> from sklaplace.likelihoods import Poisson
        >>> Poisson().check_targets(np.array([[0.0], [3.0]]))
        """

    def targets(self, y: Tensor, f: Tensor) -> Tensor:
        """Return targets, (b, c), in the dtype of the outputs."""
        return y.reshape(f.shape).to(f)

    def n_targets(self, n_outputs: int) -> int:
        """Return the number of observed values, one per output."""
        return n_outputs

    def rescaled_outputs(self, center: Array, scale: Array) -> Pair | None:
        """Return the map of outputs that corresponds to targets ``center + scale · y``.

        Parameters
        ----------
        center, scale : ndarray of shape (t,)
            Affine map of the targets.

        Returns
        -------
        tuple of two ndarrays of shape (c,), or None
            ``shift`` and ``factor``. Outputs become ``shift + factor · f``, and any
            noise is multiplied by ``scale``. None, the default, means that there is no
            such map and that targets cannot be normalised.

        See Also
        --------
        moments : Moments of targets in their original units.

        Examples
        --------
        >>> import numpy as np
        >>> from sklaplace.likelihoods import Gaussian
        >>> shift, factor = Gaussian().rescaled_outputs(
        ...     np.array([10.0]), np.array([2.0])
        ... )
        >>> shift, factor
        (array([10.]), array([2.]))
        """
        return None

    @abstractmethod
    def moments(self, mean: Array, var: Array, noise: Noise) -> Pair:
        """Return the mean and variance of new targets.

        Parameters
        ----------
        mean : ndarray of shape (n, c)
            Means of the outputs.
        var : ndarray of shape (n, c)
            Variances of the outputs.
        noise : float or ndarray of shape (n, t)
            Standard deviation ``σ``; ignored by likelihoods without noise.

        Returns
        -------
        mean : ndarray of shape (n, t)
            Means.
        variance : ndarray of shape (n, t)
            Variances, including the noise.

        See Also
        --------
        joint_moments : Covariances between samples.

        Examples
        --------
        >>> import numpy as np
        >>> from sklaplace.likelihoods import Gaussian
        >>> mean, var = np.zeros((1, 1)), np.full((1, 1), 3.0)
        >>> Gaussian().moments(mean, var, noise=1.0)
        (array([[0.]]), array([[4.]]))
        """

    @abstractmethod
    def joint_moments(self, mean: Array, cov: Array, noise: Noise) -> Pair:
        """Return the means of new targets and their covariances between samples.

        Parameters
        ----------
        mean : ndarray of shape (n, c)
            Means of the outputs.
        cov : ndarray of shape (n, n, c)
            Covariances of each output between samples.
        noise : float or ndarray of shape (n, t)
            Standard deviation ``σ``; ignored by likelihoods without noise.

        Returns
        -------
        mean : ndarray of shape (n, t)
            Means.
        cov : ndarray of shape (n, n, t)
            Covariances, with the noise on the diagonal.

        See Also
        --------
        moments : Means and variances.

        Examples
        --------
        >>> import numpy as np
        >>> from sklaplace.likelihoods import Gaussian
        >>> mean, var = np.zeros((1, 1)), np.full((1, 1), 3.0)
        >>> Gaussian().joint_moments(mean, var[:, None], noise=1.0)[1].shape
        (1, 1, 1)
        """

    @abstractmethod
    def quantiles(self, mean: Array, var: Array, noise: Noise, levels: Array) -> Array:
        """Return quantiles of new targets.

        Parameters
        ----------
        mean : ndarray of shape (n, c)
            Means of the outputs.
        var : ndarray of shape (n, c)
            Variances of the outputs.
        noise : float or ndarray of shape (n, t)
            Standard deviation ``σ``; ignored by likelihoods without noise.
        levels : ndarray of shape (q,)
            Levels between 0 and 1.

        Returns
        -------
        ndarray of shape (n, t, q)
            Quantiles of the targets, which include the noise.

        See Also
        --------
        moments : Means and variances.

        Examples
        --------
        >>> import numpy as np
        >>> from sklaplace.likelihoods import Gaussian
        >>> mean, var = np.zeros((1, 1)), np.full((1, 1), 3.0)
        >>> Gaussian().quantiles(mean, var, 1.0, np.array([0.5, 0.975])).round(2)
        array([[[0.  , 3.92]]])
        """

    @abstractmethod
    def sample(self, f: Array, noise: Noise, generator: np.random.Generator) -> Array:
        """Draw new targets.

        Parameters
        ----------
        f : ndarray of shape (n, c, s)
            Draws of the outputs.
        noise : float or ndarray of shape (n, t)
            Standard deviation ``σ``; ignored by likelihoods without noise.
        generator : numpy.random.Generator
            Random generator for the noise.

        Returns
        -------
        ndarray of shape (n, t, s)
            One target per draw of the outputs.

        See Also
        --------
        moments : Means and variances.

        Examples
        --------
        >>> import numpy as np
        >>> from sklaplace.likelihoods import Poisson
        >>> counts = Poisson().sample(
        ...     np.zeros((2, 1, 5)), 1.0, np.random.default_rng(0)
        ... )
        >>> counts.shape
        (2, 1, 5)
        """

    @abstractmethod
    def log_density(self, mean: Tensor, var: Tensor, y: Tensor, noise: Level) -> Tensor:
        """Return the predictive log-density of targets.

        Parameters
        ----------
        mean : Tensor of shape (b, c)
            Means of the outputs.
        var : Tensor of shape (b, c)
            Variances of the outputs.
        y : Tensor of shape (b, t)
            Targets.
        noise : float or Tensor of shape (b, t)
            Standard deviation ``σ``; ignored by likelihoods without noise.

        Returns
        -------
        Tensor of shape (b,)
            Sum over columns, in nats.

        See Also
        --------
        quantiles : Predictive quantiles.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Gaussian
        >>> zeros = torch.zeros(1, 1)
        >>> Gaussian().log_density(zeros, zeros, zeros, noise=1.0)
        tensor([-0.9189])
        """


@dataclass(frozen=True)
class Gaussian(SeparableLikelihood, RegressionLikelihood):
    """Likelihood of normal targets with mean f and noise level σ.

    Read more in the :ref:`User Guide <noise>`.

    Parameters
    ----------
    relative : tuple of float or None
        Relative noise ``r``. Output k has the noise level ``σ r_k``. None means a noise
        level of σ for all outputs.

    See Also
    --------
    HeteroscedasticGaussian : Noise predicted by the network.
    Poisson : Likelihood of counts.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.likelihoods import Gaussian
    >>> Gaussian().loss(torch.zeros(1, 1), torch.ones(1, 1))  # (y - f)² / 2
    tensor([0.5000])
    """

    relative: tuple[float, ...] | None = None
    has_noise = True

    def _relative_variances(self, f: Tensor) -> Tensor:
        """Return ``r²``, the noise variances in units of ``σ²``: (c,) or (1,)."""
        return f.new_tensor([r**2 for r in self.relative or (1.0,)])

    def _noise_variances(self, noise: Noise) -> Array:
        """Return the noise variances ``σ² r²``: (c,), (1,) or, by sample, (n, c)."""
        return noise**2 * np.array(self.relative or (1.0,)) ** 2

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``Σ_k (f_k - y_k)² / (2 r_k²)`` per sample, (b,)."""
        return ((f - y) ** 2 / self._relative_variances(f)).sum(-1) / 2

    def output_losses(self, f: Tensor, y: Tensor) -> Tensor | None:
        """Return ``(f - y)² / (2 r²)``, (b, c), or None for one output."""
        if f.shape[1] == 1:
            return None
        return (f - y) ** 2 / self._relative_variances(f) / 2

    def root_hessian(self, f: Tensor) -> Tensor:
        """Return ``1/r``."""
        return self._relative_variances(f).rsqrt().expand(f.shape)

    def draw(self, f: Tensor, u: Tensor) -> Tensor:
        """Draw normal values, (b, c)."""
        return f + torch.special.ndtri(u).to(f) * self._relative_variances(f).sqrt()

    def scale(self, sigma_noise: Tensor) -> Tensor:
        """Return ``1/σ²``."""
        return sigma_noise**-2

    def log_normalizer(self, sigma_noise: Tensor) -> Tensor:
        """Return ``log(σ √(2π))`` plus the mean of ``log r``."""
        extra = np.log(self.relative).mean() if self.relative else 0.0
        return sigma_noise.log() + _LOG_2PI / 2 + float(extra)

    def rescaled_outputs(self, center: Array, scale: Array) -> Pair:
        """Return the map of the targets, because the outputs are means of targets."""
        return center, scale

    def moments(self, mean: Array, var: Array, noise: Noise) -> Pair:
        """Return ``m`` and ``v + σ² r²``."""
        return mean, var + self._noise_variances(noise)

    def joint_moments(self, mean: Array, cov: Array, noise: Noise) -> Pair:
        """Return ``m`` and ``C + σ² r² I``."""
        noise_variances = self._noise_variances(noise)[..., None, :]
        # cov is (n, n, t); the noise of samples is independent, hence on the diagonal
        return mean, cov + noise_variances * np.eye(len(cov))[:, :, None]

    def quantiles(self, mean: Array, var: Array, noise: Noise, levels: Array) -> Array:
        """Return quantiles of ``N(m, v + σ² r²)``, (n, t, q)."""
        std = np.sqrt(var + self._noise_variances(noise))
        return mean[..., None] + std[..., None] * norm.ppf(levels)

    def sample(self, f: Array, noise: Noise, generator: np.random.Generator) -> Array:
        """Return the outputs plus normal noise."""
        std = np.sqrt(self._noise_variances(noise))[..., None]
        return f + std * generator.standard_normal(f.shape)

    def log_density(self, mean: Tensor, var: Tensor, y: Tensor, noise: Level) -> Tensor:
        """Return ``log N(y | m, v + σ² r²)``, summed over columns, (b,)."""
        # the Gaussians of output and noise are convolved, so their variances add up
        target_var = var + noise**2 * self._relative_variances(mean)  # (b, c)
        return _normal_log_density(y, mean, target_var).sum(-1)


@dataclass(frozen=True)
class Poisson(SeparableLikelihood, RegressionLikelihood):
    """Likelihood of counts with rates ``exp(f)``.

    Read more in the :doc:`User Guide </user_guide/networks>`.

    See Also
    --------
    Gaussian : Likelihood of real numbers.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.likelihoods import Poisson
    >>> Poisson().loss(torch.zeros(1, 1), torch.ones(1, 1))  # a rate of 1
    tensor([1.])
    """

    def check_targets(self, y: Array) -> None:
        """Raise ValueError for targets that are not counts."""
        if (y < 0).any() or (y != np.round(y)).any():
            raise ValueError(
                "y has entries that are not counts (0, 1, 2, …). For real numbers, use "
                "torch.nn.MSELoss instead of criterion=PoissonNLLLoss."
            )

    def configured(self, criterion: nn.Module) -> "Poisson":
        """Return the likelihood; raise ValueError if outputs are not log-rates."""
        if not getattr(criterion, "log_input", True):
            raise ValueError(
                "With criterion__log_input=False, the module returns rates, which a "
                "Gaussian posterior could make negative. Leave the option at True, and "
                "let the module return logarithms of rates."
            )
        return self

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``exp(f) - y f + log y!`` per sample, summed over outputs, (b,)."""
        return (f.exp() - y * f + torch.lgamma(y + 1)).sum(-1)

    def root_hessian(self, f: Tensor) -> Tensor:
        """Return ``exp(f/2)``."""
        return (f / 2).exp()

    def draw(self, f: Tensor, u: Tensor) -> Tensor:
        """Draw counts, (b, c)."""
        rates = f.detach().double().exp().cpu().numpy()
        return torch.from_numpy(counts.poisson_quantiles(rates, u.cpu().numpy())).to(f)

    def moments(self, mean: Array, var: Array, noise: Noise) -> Pair:
        """Return ``λ = exp(m + v/2)`` and ``λ + λ² (exp(v) - 1)``."""
        with np.errstate(over="ignore"):  # infinite far from the data
            rate = np.exp(mean + var / 2)
            return rate, rate + rate**2 * np.expm1(var)

    def joint_moments(self, mean: Array, cov: Array, noise: Noise) -> Pair:
        """Return ``λ`` and ``λᵢ λⱼ (exp(Cᵢⱼ) - 1)``, plus ``λᵢ`` on the diagonal.

        ``λᵢ`` is the expected rate of sample i, and C the output covariance (n, n, c).
        """
        with np.errstate(over="ignore"):
            rate = np.exp(mean + np.einsum("nnc->nc", cov) / 2)
            between = rate[:, None] * rate[None] * np.expm1(cov)
        return rate, between + np.eye(len(cov))[:, :, None] * rate

    def quantiles(self, mean: Array, var: Array, noise: Noise, levels: Array) -> Array:
        """Return the smallest counts with ``P(Y ≤ count) ≥ level``, (n, t, q)."""
        return counts.quantiles(mean[..., None], var[..., None], levels)

    def sample(self, f: Array, noise: Noise, generator: np.random.Generator) -> Array:
        """Draw Poisson counts with rates ``exp(f)``."""
        return counts.draw(np.exp(f), generator)

    def log_density(self, mean: Tensor, var: Tensor, y: Tensor, noise: Level) -> Tensor:
        """Return ``log ∫ Poisson(y | exp f) N(f | m, v) df`` summed over columns."""
        return counts.log_mass(y, mean, var).sum(-1)


@dataclass(frozen=True)
class HeteroscedasticGaussian(SeparableLikelihood, RegressionLikelihood):
    """Likelihood of normal targets with a mean and variance predicted by the network.

    The network has 2·t outputs: first the means μ, then the logarithms s of the
    variances. `hessian` is the expected Hessian of the loss, which is the Fisher
    information ``diag(exp(-s), ½)``. The expected Hessian is positive definite, but the
    Hessian itself may be indefinite.

    Read more in the :doc:`User Guide </user_guide/regression>`.

    See Also
    --------
    HeteroscedasticNLLLoss : Criterion of this likelihood.
    Gaussian : Constant noise level.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.likelihoods import HeteroscedasticGaussian
    >>> HeteroscedasticGaussian().loss(torch.zeros(1, 2), torch.zeros(1, 1))
    tensor([0.9189])
    """

    is_convex = False

    def targets(self, y: Tensor, f: Tensor) -> Tensor:
        """Return targets (b, t) in the dtype of the outputs."""
        return y.reshape(len(f), -1).to(f)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``((y - μ)² exp(-s) + s + log 2π) / 2``, summed over targets, (b,)."""
        return _normal_losses(f, y).sum(-1)

    def root_hessian(self, f: Tensor) -> Tensor:
        """Return ``exp(-s/2)`` and ``√½``."""
        roots = (f.chunk(2, -1)[1] / -2).exp()
        return torch.cat([roots, torch.full_like(roots, math.sqrt(0.5))], -1)

    def n_targets(self, n_outputs: int) -> int:
        """Return the number of observed values, one per pair of outputs."""
        return n_outputs // 2

    def n_outputs(self, n_targets: int) -> int:
        """Return the number of outputs, a mean and a log-variance per target column."""
        return 2 * n_targets

    def draw(self, f: Tensor, u: Tensor) -> Tensor:
        """Draw normal values, (b, t)."""
        mean, log_variance = f.chunk(2, -1)
        return mean + (log_variance / 2).exp() * torch.special.ndtri(u).to(f)

    def rescaled_outputs(self, center: Array, scale: Array) -> Pair:
        """Return the map of the outputs; variances scale with ``scale²``."""
        shift = np.concatenate([center, 2 * np.log(scale)])
        return shift, np.concatenate([scale, np.ones_like(scale)])

    def moments(self, mean: Array, var: Array, noise: Noise) -> Pair:
        """Return ``m_μ`` and ``v_μ + E exp(s)`` = ``v_μ + exp(m_s + v_s / 2)``."""
        (mu, s), (v_mu, v_s) = (np.split(a, 2, -1) for a in (mean, var))
        return mu, v_mu + np.exp(s + v_s / 2)

    def joint_moments(self, mean: Array, cov: Array, noise: Noise) -> Pair:
        """Return ``m_μ`` and ``C_μ``, plus ``E exp(s)`` on the diagonal.

        These are the mean and covariance (n, n, t) of the outputs μ between samples,
        and the expected variance of the noise, which is independent between samples.
        """
        var = np.einsum("nnc->nc", cov)
        mu, target_variance = self.moments(mean, var, noise)
        # the first half of the outputs
        cov_mu, v_mu = np.split(cov, 2, -1)[0], np.split(var, 2, -1)[0]
        noise_variance = target_variance - v_mu
        return mu, cov_mu + np.eye(len(cov))[:, :, None] * noise_variance[:, None]

    def quantiles(self, mean: Array, var: Array, noise: Noise, levels: Array) -> Array:
        """Return quantiles (n, t, q) of the mixture of normals over s, by bisection.

        The mixture assumes that μ and s are independent. It has one normal distribution
        for each of k Gauss-Hermite nodes of s, with the variances of μ and of the
        noise added. All are centred at the mean of μ, so the quantile of the widest one
        bounds the quantile of the mixture.
        """
        (mu, s), (v_mu, v_s) = (np.split(a, 2, -1) for a in (mean, var))
        noise_var = exp_at_nodes(s, v_s)[..., None, :]  # (n, t, 1, k)
        std = np.sqrt(v_mu[..., None, None] + noise_var)  # (n, t, 1, k)
        levels = np.broadcast_to(levels, (*mu.shape, len(levels)))
        largest = np.abs(norm.ppf(levels)) * std.max(-1)  # (n, t, q), the bounds

        def is_reached(gap: Array) -> Array:  # whether P(Y - μ ≤ gap) ≥ level
            return norm.cdf(gap[..., None] / std) @ WEIGHTS >= levels

        return mu[..., None] + first_where(is_reached, -largest, largest)

    def sample(self, f: Array, noise: Noise, generator: np.random.Generator) -> Array:
        """Return drawn means plus noise with the drawn variances."""
        mean, log_variance = np.split(f, 2, 1)
        return mean + np.exp(log_variance / 2) * generator.standard_normal(mean.shape)

    def log_density(self, mean: Tensor, var: Tensor, y: Tensor, noise: Level) -> Tensor:
        """Return the predictive log-density, summed over columns, (b,).

        Given s, a target is normal with the variance ``v_μ + exp(s)``. The integral
        over s, which is normal, is a weighted sum over k Gauss-Hermite nodes.
        """
        # means and variances (b, t, 1) of the outputs μ and s
        (mu, s), (v_mu, v_s) = (a.unsqueeze(-1).chunk(2, -2) for a in (mean, var))
        nodes, weights = (torch.as_tensor(a).to(mean) for a in (NODES, WEIGHTS))
        noise_var = (s + v_s.clamp(min=0).sqrt() * nodes).exp()  # (b, t, k)
        log_density = _normal_log_density(y.unsqueeze(-1), mu, v_mu + noise_var)
        return (weights.log() + log_density).logsumexp(-1).sum(-1)


class HeteroscedasticNLLLoss(nn.Module):
    """Criterion for a module that returns means and logarithms of variances.

    The loss is the negative log-likelihood of normal targets. For t target columns, the
    module has 2·t outputs: first the means, then the logarithms of the variances.

    Read more in the :doc:`User Guide </user_guide/regression>`.

    Parameters
    ----------
    reduction : {"mean", "sum", "none"}, default="mean"
        Reduction over samples and target columns.

    See Also
    --------
    HeteroscedasticGaussian : Likelihood of this criterion.

    References
    ----------
    Nix and Weigend (1994), "Estimating the mean and variance of the target probability
    distribution".

    Examples
    --------
    >>> import torch
    >>> from sklaplace.likelihoods import HeteroscedasticNLLLoss
    >>> outputs, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0]])
    >>> round(float(HeteroscedasticNLLLoss()(outputs, y)), 3)
    0.919
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the loss.

        Parameters
        ----------
        outputs : Tensor of shape (b, 2·t)
            Means and logarithms of variances.
        y : Tensor of shape (b, t)
            Targets.

        Returns
        -------
        Tensor of shape () or (b, t)
            Loss in nats, or the loss of each target with ``reduction="none"``.

        See Also
        --------
        HeteroscedasticGaussian.loss : Loss per sample.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import HeteroscedasticNLLLoss
        >>> HeteroscedasticNLLLoss()(torch.zeros(4, 2), torch.zeros(4, 1))
        tensor(0.9189)
        """
        losses = _normal_losses(outputs, y.reshape(len(outputs), -1))
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.mean()


def _normal_log_density(y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Return ``log N(y | mean, var)`` of each entry, in the broadcast shape."""
    return -((y - mean) ** 2 / var + var.log() + _LOG_2PI) / 2


def _normal_losses(f: Tensor, y: Tensor) -> Tensor:
    """Return negative log-likelihoods of targets y, (b, t), given outputs (b, 2·t).

    The first t outputs are means, and the others logarithms of variances. Unlike
    `_normal_log_density`, the formula needs no division by a variance.
    """
    mean, log_variance = f.chunk(2, -1)
    squares = (y - mean) ** 2
    return (squares * (-log_variance).exp() + log_variance + _LOG_2PI) / 2
