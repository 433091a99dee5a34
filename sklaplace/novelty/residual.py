"""Residual: a Gaussian process that adds uncertainty to outputs far from the data.

The outputs are ``f(x) + g(x)``. The process ``g`` has mean zero and is independent of
the weights. For output k, its variance is

    Var g_k(x) = s_k² (p₀ / p(x))ᵃ.

``p(x)`` is a tail probability: how often new samples from the data's distribution are
less similar to the training samples than x. It is estimated from the leverages of the
features and, if the inputs are an array of real numbers, of the inputs (see
`leverage`). The samples for the estimate are held-out samples. If few or no samples are
held out, training samples (leave-one-out) complete or replace them. A share ``p₀`` of
these samples counts as unusual: 5 % for classes and 1 % for numbers. See
`sklaplace.novelty.novelty`.

For usual samples (``p > p₀``), ``a`` is `USUAL_STEEPNESS`. For unusual samples, the
steepness ``a`` is the largest of several values whose score on held-out samples is
close to the best; see `sklaplace.novelty.steepness`.

Far from the data, the logits and their standard deviations grow only linearly with the
distance (Hein, Andriushchenko and Bitterwolf 2019). The variance of ``g`` grows faster
than every power of the distance, so all classes become equally probable.

With a unit vector ``u`` in the direction of the whitened features and inputs, the
process is linear in a random direction ω_k ~ N(0, I): ``g_k = √(Var g_k) uᵀω_k``. Draws
and covariances between samples use this form.

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
from torch.nn.functional import normalize

from sklaplace.likelihoods import Likelihood
from sklaplace.novelty.amplitudes import Amplitudes
from sklaplace.novelty.batch import FeatureBatch
from sklaplace.novelty.novelty import Novelty

# Non-numeric values of the parameter ``residual``.
RESIDUALS = "auto", "none"
# Default ``s²`` of class logits. For regression, ``s²`` is in units of the noise
# variance.
VARIANCE = 0.5
# Power of the tail probability of usual samples, with ``p > p₀``. Smaller powers would
# add uncertainty near the data that more samples do not remove.
USUAL_STEEPNESS = 2.0
# Largest standard deviation of regression outputs, in standard deviations of the
# targets.
SPREADS = 2.0
# Largest logarithm of the relative variance, which could overflow.
LARGEST_LOG = 300.0
# Largest relative variance of class logits, relative to one plus the square of the
# largest logit. All classes are then equally probable, except for a fraction of 1e-4
# that keeps their order.
LARGEST_RATIO = 1e8


@dataclass(frozen=True)
class Residual:
    """Gaussian process on the features, for c outputs.

    Attributes
    ----------
    novelty : Novelty
        Features of the training samples.
    variance : float
        ``s²``.
    steepness : float
        Power ``a``.
    amplitudes : Amplitudes
        ``s_k²``, and the bounds ``τ_k²`` in regression.
    """

    novelty: Novelty
    variance: float
    steepness: float
    amplitudes: Amplitudes

    @classmethod
    def of(
        cls,
        novelty: Novelty,
        likelihood: Likelihood,
        noise: Tensor,
        *,
        variance: float,
        steepness: float,
    ) -> "Residual | None":
        """Build the residual with variance ``s²``.

        ``noise`` contains the standard deviations (c,) or (1,) of the noise, for
        regression, where ``s²`` is in units of the noise variance. ``steepness`` is the
        power ``a`` by which the variance grows for unusual samples. Return None if the
        variance has no unit, as with counts, or if every class has only one sample.
        """
        has_unit = likelihood.is_classification or likelihood.has_noise
        if not (has_unit and novelty.distances):
            return None
        if likelihood.is_classification:
            one = novelty.moments.counts.new_ones(1)  # the same for all logits
            amplitudes = Amplitudes(variance * one)
        else:
            bounds = SPREADS**2 * (novelty.target_variances + noise**2)
            amplitudes = Amplitudes(variance * noise**2, bounds)
        return cls(novelty, variance, steepness, amplitudes)

    def log_ratios(self, batch: FeatureBatch, f: Tensor) -> Tensor:
        """Return ``log p₀/p`` (b,) of a batch with outputs (b, c)."""
        novelty = self.novelty
        log_ratios = novelty.log_ratios(batch)
        return bounded_log_ratios(log_ratios, novelty.likelihood, f, self.steepness)

    def rows(self, batch: FeatureBatch, f: Tensor) -> Tensor:
        """Return rows (b, p), from which covariances of the residual are computed.

        The inner product of the rows of two samples is the covariance of their
        ``g_k / s_k``, for each k. A row is the unit vector ``u`` times the standard
        deviation. The network's outputs (b, c) bound the variance.
        """
        whitened = [distance.whitened(batch) for distance in self.novelty.distances]
        directions = normalize(torch.cat(whitened, 1))
        variances = relative_variance(self.log_ratios(batch, f), self.steepness)
        return directions * variances.sqrt().unsqueeze(1)


def bounded_log_ratios(
    log_ratios: Tensor, likelihood: Likelihood, f: Tensor, steepness: float | Tensor
) -> Tensor:
    """Return ``log p₀/p`` (b,), bounded for the logits (b, c) of classes.

    Larger values would make the probabilities of all classes equal in floating point,
    so that the predicted class would be arbitrary. The relative variance is the ratio
    p₀/p to the power ``steepness``, so its bound `LARGEST_RATIO` bounds the logarithm.
    """
    if not likelihood.is_classification:
        return log_ratios
    largest = LARGEST_RATIO * (1 + f.double().square().amax(1))
    return log_ratios.minimum(largest.log() / steepness)


def relative_variance(log_ratios: Tensor, steepness: float | Tensor) -> Tensor:
    """Return the variances (b,) of ``g_k / s_k`` for values of ``log p₀/p`` (b,)."""
    powers = torch.where(log_ratios < 0, USUAL_STEEPNESS, steepness)
    return (powers * log_ratios).clamp(max=LARGEST_LOG).exp()
