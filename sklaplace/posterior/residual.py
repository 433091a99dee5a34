"""Residual: a Gaussian process that is added to the outputs far from the data.

The outputs are ``f(x) + g(x)``. The process ``g`` has mean zero and is independent of
the weights. Its variance for the output k is

    Var g_k(x) = s_k² (h(φ(x)) / h₀)⁴.

A second term of this form has the leverage of the inputs, where these are a table.
``h`` is the leverage of the features, see `leverage`. ``h₀`` is the leverage that 99 %
of the samples do not exceed: the training samples, each among the others, and the
held-out samples, if there are any. Far away a leverage grows as the square of the
distance. Logits and their standard deviations grow as the distance (Hein,
Andriushchenko and Bitterwolf 2019), the standard deviation of ``g`` as its fourth
power: the probabilities of all classes become equal.

With whitened features ``ψ``, for which ``h = ψᵀψ``, the process is linear in a random
direction: ``g_k = s_k h₀⁻² h^{3/2} ψᵀω_k`` with ω_k ~ N(0, I). Draws, and covariances
between samples, follow from it.

In regression the variance of the outputs, weights included, is bounded: it
is ``v_k / (1 + v_k / τ_k²)`` in place of ``v_k``, with ``τ_k`` twice the standard
deviation of the targets, as a Gaussian process returns to its prior.

References: Kristiadi, Hein and Hennig (2021), "An infinite-feature extension for
Bayesian ReLU nets that fixes their asymptotic overconfidence" (a residual process whose
variance is a cubic function of the distance of the inputs); Kristiadi, Hein and Hennig
(2020), "Being Bayesian, even just a bit, fixes overconfidence in ReLU networks" (why
the weights alone do not suffice).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.novelty import FeatureBatch, Novelty

# Values of the parameter that are no numbers.
RESIDUALS = "auto", "none"
# Default of ``s²``, of class logits; for numbers in units of the variance of the noise.
VARIANCE = 0.5
# Power of the leverage. Smaller ones cost more near the data for the same uncertainty
# far from them.
EXPONENT = 4
# The outputs of a regression have at most these standard deviations of the targets.
SPREADS = 2.0
# of leverages, so that their powers stay finite
_LARGEST = 1e15


@dataclass(frozen=True)
class Residual:
    """A Gaussian process of the features, for c outputs.

    Attributes
    ----------
    novelty : Novelty
        Features of the training samples.
    variance : float
        ``s²``.
    variances : Tensor of shape (c,) or (1,)
        ``s_k²``.
    bounds : Tensor of shape (c,) or None
        ``τ_k²``; None where the variance is not bounded.
    """

    novelty: Novelty
    variance: float
    variances: Tensor
    bounds: Tensor | None = None

    @classmethod
    def of(
        cls, novelty: Novelty, posterior: GaussianPosterior, variance: float
    ) -> "Residual | None":
        """Return the residual of a variance ``s²``.

        None without a unit for it, as for counts, or where all samples are alone in
        their class.
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

    # ----------------------------------------------------------------- of samples
    def relative(self, features: Tensor, f: Tensor, x: object) -> Tensor:
        """Return the variances of ``g_k / s_k``, (b,).

        Of samples ``x`` with features (b, i) and outputs (b, c) of the network.
        """
        batch = FeatureBatch.of(self.novelty.likelihood, features, f, x=x)
        parts = [part.relative(batch) for part in self.novelty.distances]
        return (torch.stack(parts).clamp(max=_LARGEST) ** EXPONENT).sum(0)

    def rows(self, features: Tensor, f: Tensor, x: object) -> Tensor:
        """Return rows (b, p) whose products are covariances of ``g_k / s_k``."""
        batch = FeatureBatch.of(self.novelty.likelihood, features, f, x=x)
        found = []
        for part in self.novelty.distances:
            whitened = part.whitened(batch)
            size = whitened.square().sum(1, keepdim=True)
            length = size.clamp(max=_LARGEST) ** (EXPONENT / 2)
            found.append(whitened * (length * size.rsqrt()))
        return torch.cat(found, 1)

    # ------------------------------------------------------------------ of outputs
    def added(
        self, cov: Tensor, relative: Tensor, n_blocks: int, *, centred: bool
    ) -> Tensor:
        """Return covariances or variances (b, c) of outputs with the residual.

        Covariances are (b, c, c), or (b, r, K, K) of r blocks.
        """
        if cov.ndim == 2:
            k = cov.shape[1] // n_blocks
            own = relative.unsqueeze(1) * self.variances
            cov = cov + own * (1 - 1 / k if centred else 1)
            return cov if self.bounds is None else cov / (1 + cov / self.bounds)
        identity = torch.eye(cov.shape[-1]).to(cov) * self.variances
        if centred:  # all outputs have one variance
            identity = identity - identity.mean(-1, keepdim=True)
        cov = cov + relative.view(-1, *[1] * (cov.ndim - 1)) * identity
        return self._bounded(cov, self.bounds)

    def added_jointly(
        self, cov: Tensor, rows: Tensor, c: int, across_outputs: bool
    ) -> Tensor:
        """Return covariances between samples with the residual.

        Parameters
        ----------
        cov : Tensor of shape (n, n, c), or (..., n·c, n·c) if ``across_outputs``
            Without it. The outputs of a sample are next to each other.
        rows : Tensor of shape (..., n, i + 1)
            See `rows`.
        c : int
            Number of outputs.
        across_outputs : bool
            Whether covariances are those between outputs, too.
        """
        relative, own = rows @ rows.mT, self.variances.expand(c)
        if not across_outputs:
            bounds = None if self.bounds is None else self.bounds.unsqueeze(-1)
            cov = cov.movedim(-1, 0) + relative * own.view(-1, 1, 1)
            return self._bounded(cov, bounds).movedim(0, -1)
        bounds = None if self.bounds is None else self.bounds.repeat(rows.shape[-2])
        added = torch.einsum("...nm,kl->...nkml", relative, own.diag())
        return self._bounded(cov + added.flatten(-4, -3).flatten(-2), bounds)

    def drawn(self, rows: Tensor, c: int, n_samples: int, seed: int) -> Tensor:
        """Return draws (b, c, s) of ``g`` for rows (b, i + 1), jointly."""
        generator = torch.Generator().manual_seed(seed)
        shape = rows.shape[1], c * n_samples
        normals = torch.randn(shape, generator=generator, dtype=torch.float64)
        found = (rows @ normals.to(rows)).unflatten(1, (c, n_samples))
        return found * self.variances.sqrt().unsqueeze(-1)

    def bounded_draws(self, draws: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return draws (b, c, s) of outputs whose variance (b, c) was not bounded."""
        assert self.bounds is not None
        mean, shrink = mean.unsqueeze(-1), (1 + variance / self.bounds).rsqrt()
        return mean + (draws - mean) * shrink.unsqueeze(-1)

    @staticmethod
    def _bounded(cov: Tensor, bounds: Tensor | None) -> Tensor:
        """Return covariances (..., q, q) within bounds (q,) of the variances."""
        if bounds is None:
            return cov
        shrink = (1 + cov.diagonal(dim1=-2, dim2=-1) / bounds).rsqrt()
        return cov * shrink.unsqueeze(-1) * shrink.unsqueeze(-2)
