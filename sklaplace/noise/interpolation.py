"""Interpolation between quantiles, and the probabilities of sorted values.

Normal scores are standard normal quantiles. They represent probabilities: the score 0
represents the median. Beyond the outermost quantiles, distances between values are the
distances between their normal scores.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor

from sklaplace.likelihoods.quadrature import WEIGHTS

Array = NDArray[np.float64]

LEVELS = np.array([0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99])
# Normal scores of the levels.
SCORES = norm.ppf(LEVELS)


def interpolated(values: Array, x: Array, y: Array) -> Array:
    """Interpolate ``y`` between increasing ``x``; extrapolate with a slope of one.

    Parameters
    ----------
    values : ndarray of shape (n, s)
        Values at which to interpolate.
    x, y : ndarray of shape (m,) or (n, m)
        Knots of all rows, or of each row.

    Returns
    -------
    ndarray of shape (n, s)
        Interpolated values.
    """
    inside = values.clip(x[..., :1], x[..., -1:])
    # index of the knot to the left, at most m - 2, so that there is one to the right
    if x.ndim == 1:
        segment = np.searchsorted(x[1:-1], inside, side="right")
    else:
        segment = (x[:, None, 1:-1] <= inside[..., None]).sum(-1)
    # the knots of each row, (n, m), and those on both sides of each value, (n, s)
    x, y = (np.broadcast_to(knots, (len(values), knots.shape[-1])) for knots in (x, y))
    x_low, y_low = (np.take_along_axis(knots, segment, 1) for knots in (x, y))
    x_high, y_high = (np.take_along_axis(knots, segment + 1, 1) for knots in (x, y))
    width = x_high - x_low
    # knots can coincide
    share = np.divide(inside - x_low, width, out=np.zeros_like(inside), where=width > 0)
    # the last term is zero, except beyond the outermost knots
    return np.asarray(y_low + share * (y_high - y_low) + (values - inside))


@dataclass(frozen=True)
class Interpolation:
    """Values at s normal scores, as an affine function of the quantiles at `LEVELS`.

    Attributes
    ----------
    weights : Tensor of shape (n_levels, s)
        Weights of the quantiles.
    shifts : Tensor of shape (s,)
        Signed distances of the scores from the range of `SCORES`.
    """

    weights: Tensor
    shifts: Tensor

    @classmethod
    def at(cls, scores: Array) -> "Interpolation":
        """Return the interpolation at the given normal scores (s,).

        Interpolated values are linear in the quantiles. Interpolating the rows of the
        identity (one quantile is one, the others are zero) yields their weights.
        """
        # `interpolated` adds these shifts beyond the outermost quantiles
        shifts = scores - scores.clip(SCORES[0], SCORES[-1])
        scores = np.tile(scores, (len(LEVELS), 1))
        weights = interpolated(scores, SCORES, np.eye(len(LEVELS))) - shifts
        return cls(torch.from_numpy(weights), torch.from_numpy(shifts))

    def __call__(self, quantiles: Tensor) -> Tensor:
        """Return values (n, s) for quantiles (n, n_levels)."""
        return quantiles @ self.weights + self.shifts

    def moments(self, quantiles: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and standard deviations (n,) of the distributions.

        They are sums of values at the nodes of a quadrature, with its `WEIGHTS`. The
        scores must therefore be its `NODES`.
        """
        values, weights = self(quantiles), quantiles.new_tensor(WEIGHTS)
        mean = values @ weights
        return mean, ((values - mean.unsqueeze(1)) ** 2 @ weights).sqrt()


def empirical_distribution(
    values: Array, weights: Array, group: NDArray[np.integer]
) -> tuple[Array, Array, NDArray[np.integer]]:
    """Return points on the empirical distribution function of each group's values.

    The i-th smallest of n values in a group has the probability i / (n + 1). A value of
    weight two is equivalent to two values. Each value appears twice: with the smallest
    and with the largest of its probabilities. These are equal for weights up to one.

    Parameters
    ----------
    values, weights, group : ndarray of shape (n,)
        Values, their weights, and the number of each value's group.

    Returns
    -------
    tuple of three ndarrays of shape (2n,)
        Probabilities, values and groups, in ascending order of group and value.
    """
    order = np.lexsort((values, group))
    values, weights, group = values[order], weights[order], group[order]
    n = np.bincount(group, weights)
    weights_before = (np.cumsum(n) - n)[group]  # of earlier groups
    # a value of weight w stands for w values, with w successive ranks; the mean of the
    # ranks from 1 to w is w/2 + 1/2, and the first and the last are (w - 1)/2 from it
    middle = np.cumsum(weights) - weights_before - weights / 2 + 0.5
    half = np.maximum(weights - 1, 0) / 2
    ranks = np.stack([middle - half, middle + half], axis=1)
    probabilities = ranks / (n[group, None] + 1)
    return probabilities.ravel(), np.repeat(values, 2), np.repeat(group, 2)
