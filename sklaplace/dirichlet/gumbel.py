"""Independent Gaussian logits: which of them is the largest, once each has got noise.

With Gumbel noise of its own for each, the answer is the average of their softmax (the
Gumbel-max identity), and one integral for any number of classes.
"""

import math
from statistics import NormalDist

import torch
from torch import Tensor

from sklaplace.dirichlet.logits import chunks

# A standard Gumbel variable, which has no closed form with normal ones, as a mixture
# of normals: weights, means, variances. Least squares for density and distribution,
# relative where they are small: the right tail, which decides among many classes, is
# within 0.25 % up to probabilities of 1e-3.
_GUMBEL = (
    (0.1489672, -0.676879, 0.25504),
    (0.3449618, 0.028825, 0.434976),
    (0.3037729, 0.833726, 0.780602),
    (0.1497159, 1.736781, 1.464669),
    (0.0458425, 2.733692, 2.842548),
    (0.0067396, 3.767712, 6.140254),
)
# Mean and variance of a standard Gumbel variable.
_MEAN, _VARIANCE = 0.5772157, math.pi**2 / 6
# Nodes of the quadrature, first and at most, and how much probability may be missing.
_FIRST_NODES, _MOST_NODES, _MISSING = 24, 3072, 3e-4
# Coarser nodes, by the ratio of spacing to distance, may miss as much for one class as
# they add for another.
_COARSE = 0.35
# Below the low end, which is found by so many bisections, the largest value has a
# probability of about exp(_LOG_LOW); above the high end, it has one below _ABOVE.
_LOG_LOW, _BISECTIONS, _ABOVE = -16.0, 7, 1e-4
# Variance of the part of the noise that nodes must resolve where logits have none.
_NOISE = 1.3
# Keeps logarithms and quotients finite where distribution functions underflow.
_TINY = 1e-300


def independent_variances(centred: Tensor) -> Tensor:
    """Variances ``d ≥ 0`` of independent logits that, centred, have the given ones.

    Parameters
    ----------
    centred : Tensor of shape (b, K)
        Diagonal of ``C diag(d) C``, where ``C = I − 11ᵀ/K``; K > 1.

    Returns
    -------
    Tensor of shape (b, K)
        Exact unless one would be negative.
    """
    n_classes = centred.shape[-1]
    if n_classes == 2:  # only the sum counts
        return 2 * centred
    total = centred.sum(-1, keepdim=True)
    own = (n_classes * centred - total / (n_classes - 1)) / (n_classes - 2)
    return own.clamp(min=0)


def largest(mean: Tensor, variances: Tensor, n_nodes: int = _FIRST_NODES) -> Tensor:
    """How probably each of independent logits is the largest, with Gumbel noise.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits, float64.
    variances : Tensor of shape (b, K)
        Variances of the logits, float64, not negative.
    n_nodes : int
        Nodes to begin with.

    Returns
    -------
    Tensor of shape (b, K)
        Rows sum to one.

    Notes
    -----
    The trapezoidal rule for ``∫ F_k'(t) Π_{j≠k} F_j(t) dt``, from where the largest
    value is almost never below to where it is almost never above. Nodes are spaced by
    the smallest variance at the low end, and in proportion to their distance from it
    further up, where only wide logits still vary: narrow ones far above the low end
    would have raised it. Rows of which too much probability is missing, or whose nodes
    are too coarse, have twice as many, and so on. Nodes are constants to autograd, as
    an integral does not depend on them.

    Six error functions and six exponentials for each class and node; memory beyond the
    inputs stays near a few chunks of `logits.chunks`.
    """
    parts = chunks(mean, variances, n_nodes)
    return torch.cat([_largest_of(*part, n_nodes) for part in parts])


def _largest_of(mean: Tensor, variances: Tensor, n_nodes: int) -> Tensor:
    """`largest` of one chunk."""
    # from the top, where digits are needed
    mean = mean - mean.detach().amax(-1, keepdim=True)
    nodes, steps, ratio = _nodes(mean, variances, n_nodes)
    spans = nodes.unsqueeze(-2)  # (b, 1, t)
    excess = density = torch.zeros_like(mean).unsqueeze(-1)
    for weight, location, variance in _GUMBEL:
        scale = (2 * (variances + variance)).rsqrt()
        shift = -(mean + location) * scale
        scale = scale.unsqueeze(-1)
        z = torch.addcmul(shift.unsqueeze(-1), spans, scale)  # (b, K, t)
        excess = torch.add(excess, z.erf(), alpha=weight)
        bell = (-z.square()).exp()
        density = torch.addcmul(density, bell, scale, value=weight / math.sqrt(math.pi))
    below = ((1 + excess) / 2).clamp(min=_TINY)
    of_all = below.log().sum(-2).exp() * steps  # (b, t)
    proba = (density / below @ of_all.unsqueeze(-1)).squeeze(-1)
    is_coarse = ((proba.sum(-1) - 1).abs() > _MISSING) | (ratio > _COARSE)
    coarse = is_coarse.nonzero().squeeze(-1)
    if len(coarse) and n_nodes < _MOST_NODES:
        finer = largest(mean[coarse], variances[coarse], 2 * n_nodes)
        proba = proba.index_put((coarse,), finer)
    proba = proba.maximum(_least(mean, variances))
    return proba / proba.sum(-1, keepdim=True)


@torch.no_grad()
def _nodes(
    mean: Tensor, variances: Tensor, n_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes of the quadrature, and their weights, (b, t) each, and ratios (b,).

    The latter are those of far nodes' spacing to their distance from the low end.
    """
    last = _GUMBEL[-1]
    tail = -_quantile(_ABOVE / mean.shape[-1])
    high = mean + last[1] + tail * (variances + last[2]).sqrt()
    deviations = (variances + _VARIANCE).sqrt()
    middle = mean + _MEAN
    # no product is larger than its smallest factor
    lowest = middle + _quantile(math.exp(_LOG_LOW)) * deviations
    low, high = lowest.amax(-1, keepdim=True), high.amax(-1, keepdim=True)
    scale = (variances.amin(-1, keepdim=True) + _NOISE).sqrt()
    under, over = torch.zeros_like(low), ((high - low) / scale).asinh()
    for _ in range(_BISECTIONS):
        place = (under + over) / 2
        z = (low + scale * place.sinh() - middle) / deviations
        below = torch.special.ndtr(z).clamp(min=_TINY).log().sum(-1, keepdim=True)
        is_under = below < _LOG_LOW
        under, over = place.where(is_under, under), over.where(is_under, place)
    low = low + scale * under.sinh()
    end = ((high - low) / scale).asinh()
    even = torch.linspace(0, 1, n_nodes, dtype=mean.dtype, device=mean.device)
    places, ratio = end * even, end / (n_nodes - 1)
    steps = scale * places.cosh() * ratio
    return low + scale * places.sinh(), steps, ratio.squeeze(-1)


def _quantile(probability: float) -> float:
    """Quantile of the standard normal distribution."""
    return NormalDist().inv_cdf(probability)


def _least(mean: Tensor, variances: Tensor) -> Tensor:
    """Lower bound of the probabilities of independent logits, (b, K), not all zero."""
    # below zero, so that derivatives are finite where a class is certain
    log_share = (mean + variances / 2).log_softmax(-1).clamp(max=-1e-20)
    others = (-log_share.expm1()).log()
    bound = (log_share - torch.logaddexp(others, log_share + variances)).exp()
    found: Tensor = bound + torch.finfo(mean.dtype).tiny * mean.softmax(-1)
    return found
