"""Residual: a Gaussian process that adds uncertainty to outputs far from the data.

The outputs are ``f(x) + g(x)``. The process ``g`` has mean zero and is independent of
the weights. For output k, its variance is

    Var g_k(x) = s_k² (h(φ(x)) / h₀)⁴.

``h`` is the leverage of the features; see `leverage`. ``h₀`` is chosen so that 99 % of
the training samples (leave-one-out) and 99 % of any held-out samples have at most this
leverage. If the inputs are a table, a second term of the same form uses the leverage of
the inputs.

Far from the data, the leverage grows quadratically with the distance. The logits and
their standard deviations grow only linearly (Hein, Andriushchenko and Bitterwolf 2019).
The standard deviation of ``g`` grows with the fourth power of the distance, so all
classes become equally probable.

With whitened features ``ψ`` such that ``h = ψᵀψ``, the process is linear in a random
direction ω_k ~ N(0, I): ``g_k = s_k h₀⁻² h^{3/2} ψᵀω_k``. Draws and covariances between
samples use this form.

In regression, the total variance ``v_k`` of an output, including the variance due to
the weights, is bounded: ``v_k / (1 + v_k / τ_k²)`` replaces ``v_k``. ``τ_k`` is twice
the standard deviation of the targets. Similarly, a Gaussian process returns to its
prior far from the data.

References: Kristiadi, Hein and Hennig (2021), "An infinite-feature extension for
Bayesian ReLU nets that fixes their asymptotic overconfidence" (a residual process whose
variance is cubic in the distance of the inputs); Kristiadi, Hein and Hennig (2020),
"Being Bayesian, even just a bit, fixes overconfidence in ReLU networks" (why uncertain
weights do not suffice).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.novelty import FeatureBatch, Novelty

# Non-numeric values of the parameter ``residual``.
RESIDUALS = "auto", "none"
# Default ``s²`` of class logits. For regression, ``s²`` is in units of the noise
# variance.
VARIANCE = 0.5
# Power of the leverage. For the same uncertainty far from the data, a smaller power
# changes predictions near the data more.
EXPONENT = 4
# Largest standard deviation of regression outputs, in standard deviations of the
# targets.
SPREADS = 2.0
# Largest leverage. Powers of larger leverages could overflow.
LARGEST = 1e15


@dataclass(frozen=True)
class Residual:
    """Gaussian process on the features, for c outputs.

    Attributes
    ----------
    novelty : Novelty
        Features of the training samples.
    variance : float
        ``s²``.
    variances : Tensor of shape (c,) or (1,)
        ``s_k²``.
    bounds : Tensor of shape (c,) or None
        ``τ_k²``, or None if the variance is not bounded.
    """

    novelty: Novelty
    variance: float
    variances: Tensor
    bounds: Tensor | None = None

    @classmethod
    def of(
        cls, novelty: Novelty, posterior: GaussianPosterior, variance: float
    ) -> "Residual | None":
        """Build the residual with variance ``s²``.

        Return None if the variance has no unit, as with counts, or if every class has
        only one sample.
        """
        likelihood = posterior.likelihood
        has_unit = likelihood.is_classification or likelihood.has_noise
        if not (has_unit and novelty.distances):
            return None
        if likelihood.is_classification:
            one = novelty.moments.counts.new_ones(1)
            return cls(novelty, variance, variance * one)
        sigma = posterior.hyperparameters.sigma_noise
        noise = (sigma * posterior.noise_proportions.to(sigma)) ** 2
        bounds = SPREADS**2 * (novelty.target_variances + noise)
        return cls(novelty, variance, variance * noise, bounds)

    # -------------------------------------------------------------------- samples
    def relative(self, features: Tensor, f: Tensor, x: object) -> Tensor:
        """Return the variances (b,) of ``g_k / s_k`` at samples ``x``.

        ``features`` (b, i) and ``f`` (b, c) are the network's features and outputs.
        """
        batch = FeatureBatch.of(self.novelty.likelihood, features, f, x=x)
        parts = [part.relative(batch) for part in self.novelty.distances]
        return (torch.stack(parts).clamp(max=LARGEST) ** EXPONENT).sum(0)

    def rows(self, features: Tensor, f: Tensor, x: object) -> Tensor:
        """Return rows (b, p) whose inner products are covariances of ``g_k / s_k``."""
        batch = FeatureBatch.of(self.novelty.likelihood, features, f, x=x)
        found = []
        for part in self.novelty.distances:
            whitened = part.whitened(batch)
            size = whitened.square().sum(1, keepdim=True)
            length = size.clamp(max=LARGEST) ** (EXPONENT / 2)
            found.append(whitened * (length * size.rsqrt()))
        return torch.cat(found, 1)

    # --------------------------------------------------------------------- outputs
    def added_jointly(
        self, cov: Tensor, rows: Tensor, c: int, across_outputs: bool
    ) -> Tensor:
        """Add the residual to covariances between samples.

        Parameters
        ----------
        cov : Tensor of shape (n, n, c), or (..., n·c, n·c) if ``across_outputs``
            Covariances without the residual. The outputs of a sample are adjacent.
        rows : Tensor of shape (..., n, p)
            Rows from `rows`.
        c : int
            Number of outputs.
        across_outputs : bool
            Whether ``cov`` includes covariances between outputs.
        """
        relative, own = rows @ rows.mT, self.variances.expand(c)
        if not across_outputs:
            bounds = None if self.bounds is None else self.bounds.unsqueeze(-1)
            cov = cov.movedim(-1, 0) + relative * own.view(-1, 1, 1)
            return _bounded(cov, bounds).movedim(0, -1)
        bounds = None if self.bounds is None else self.bounds.repeat(rows.shape[-2])
        added = torch.einsum("...nm,kl->...nkml", relative, own.diag())
        return _bounded(cov + added.flatten(-4, -3).flatten(-2), bounds)

    def drawn(self, rows: Tensor, c: int, n_samples: int, seed: int) -> Tensor:
        """Return joint draws (b, c, s) of ``g`` for rows (b, p)."""
        generator = torch.Generator().manual_seed(seed)
        shape = rows.shape[1], c * n_samples
        normals = torch.randn(shape, generator=generator, dtype=torch.float64)
        found = (rows @ normals.to(rows)).unflatten(1, (c, n_samples))
        return found * self.variances.sqrt().unsqueeze(-1)

    def bounded_draws(self, draws: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Shrink draws (b, c, s), given their variances (b, c), to meet the bounds."""
        assert self.bounds is not None
        mean, shrink = mean.unsqueeze(-1), (1 + variance / self.bounds).rsqrt()
        return mean + (draws - mean) * shrink.unsqueeze(-1)


def with_residual(
    cov: Tensor,
    variances: Tensor,
    bounds: Tensor | None,
    relative: Tensor,
    n_blocks: int,
    *,
    centred: bool,
) -> Tensor:
    """Add a residual to covariances or to variances (b, c) of the outputs.

    Covariances have shape (b, c, c), or (b, r, K, K) for r blocks. `Residual` describes
    the variances, bounds and relative variances.
    """
    if cov.ndim == 2:
        k = cov.shape[1] // n_blocks
        own = relative.unsqueeze(1) * variances
        cov = cov + own * (1 - 1 / k if centred else 1)
        return cov if bounds is None else cov / (1 + cov / bounds)
    identity = torch.eye(cov.shape[-1]).to(cov) * variances
    if centred:  # all outputs have the same variance
        identity = identity - identity.mean(-1, keepdim=True)
    cov = cov + relative.view(-1, *[1] * (cov.ndim - 1)) * identity
    return _bounded(cov, bounds)


def _bounded(cov: Tensor, bounds: Tensor | None) -> Tensor:
    """Shrink covariances (..., q, q) so that the variances respect bounds (q,)."""
    if bounds is None:
        return cov
    shrink = (1 + cov.diagonal(dim1=-2, dim2=-1) / bounds).rsqrt()
    return cov * shrink.unsqueeze(-1) * shrink.unsqueeze(-2)
