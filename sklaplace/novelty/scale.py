"""Scale: distribution of the z-scores of new samples."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Number of samples that the expected mean excess of `Scale` counts for.
PSEUDO_COUNT = 30
# Smallest standard deviation of the logarithms, for identical training samples.
SMALLEST_STD = 1e-2
_TINY = 1e-300


def weighted_quantile(values: Tensor, weights: Tensor, share: float) -> float:
    """Return the weighted quantile of the values (b,) at the level ``share``."""
    values, order = values.sort()
    totals = weights[order].cumsum(0)
    # the first value at which the total weight reaches the share
    index = torch.searchsorted(totals, share * totals[-1])
    return float(values[index.clamp(max=len(values) - 1)])


def finite_moments(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means and standard deviations (q,) of the finite values (b, q).

    The weights (b,) count for each column only where its value is finite, and are
    divided by their sum. `SMALLEST_STD` bounds the standard deviations.
    """
    is_finite = values.isfinite()
    shares = torch.where(is_finite, weights.unsqueeze(1), 0.0)
    shares = shares / shares.sum(0).clamp(min=_TINY)
    values = torch.where(is_finite, values, 0.0)
    mean = (shares * values).sum(0)
    std = (shares * (values - mean) ** 2).sum(0).sqrt()
    return mean, std.clamp(min=SMALLEST_STD)


@dataclass(frozen=True)
class ZScores:
    """Z-scores of samples: quantities that are standardised by `Novelty`.

    Attributes
    ----------
    values : Tensor of shape (b, q)
        Values of `Novelty.z_scores`.
    weights : Tensor of shape (b,)
        Sample weights, float64.
    """

    values: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Scale:
    """Distribution of the z-scores of new samples from the data's distribution.

    Each of the q z-scores, such as that of the logarithm of a leverage, is normal.
    ``t`` is minus the sum of the logarithms of their tail probabilities. The z-scores
    are dependent, so ``t`` has a distribution of its own. Its tail is exponential:

        p(x) = P(t > t(x)) = p₀ exp(-(t(x) - t₀) / β),

    where a share p₀ of the samples exceeds ``t₀``, and β is the mean excess over ``t₀``
    (the "peaks over threshold" of Davison and Smith 1990, with a shape of zero). Few
    samples exceed ``t₀``, so the mean excess is shrunk towards q. This is the value for
    q equal z-scores, for which ``t/q`` has an exponential distribution.

    Attributes
    ----------
    mean, std : Tensor of shape (q,)
        Moments of the z-scores. Held-out samples have other moments than the training
        samples, which define the z-scores.
    usual, excess : float
        ``t₀`` and β.
    """

    mean: Tensor
    std: Tensor
    usual: float = 0.0
    excess: float = 1.0

    @classmethod
    def of(cls, scores: ZScores, share: float) -> "Scale":
        """Estimate the scale; ``share`` of the samples do not exceed ``t₀``.

        `PSEUDO_COUNT` samples with an excess of q shrink the mean excess towards q.
        """
        mean, std = finite_moments(scores.values, scores.weights)
        scale = cls(mean, std)  # `tails` uses only the moments
        t = scale.tails(scores.values)
        # infinite values, such as those of features that overflow, have no weight
        weights = scores.weights * t.isfinite()
        usual, q = weighted_quantile(t, weights, share), len(mean)  # t₀
        # β, the mean excess of the samples above t₀ and of the pseudo-samples
        above_weights = weights * (t > usual)
        excesses = (t.nan_to_num() - usual).clamp(min=0)
        total = above_weights @ excesses + PSEUDO_COUNT * q
        excess = float(total / (above_weights.sum() + PSEUDO_COUNT))
        return replace(scale, usual=usual, excess=excess)

    def tails(self, z: Tensor) -> Tensor:
        """Return ``t`` (b,), minus the sum of the q log tail probabilities of z."""
        return -torch.special.log_ndtr((self.mean - z) / self.std).sum(1)

    def log_ratios(self, z: Tensor) -> Tensor:
        """Return ``log p₀/p`` (b,), which is positive beyond ``t₀``."""
        return (self.tails(z) - self.usual) / self.excess
