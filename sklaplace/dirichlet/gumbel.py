"""Expected softmax of independent Gaussian logits, by the Gumbel-max identity.

With independent Gumbel noise ``g``, ``E[softmax(f)]_k`` is the probability that
``f_k + g_k`` is the largest of all: one integral, ``∫ F_k'(t) Π_{j≠k} F_j(t) dt``, for
any number of classes.
"""

import math
from statistics import NormalDist

import torch
from torch import Tensor

from sklaplace.dirichlet.logits import chunks

# The standard Gumbel distribution, whose convolution with a normal has no closed form,
# as a mixture of normals: weights, means, variances. Fitted by least squares to density
# and distribution function, relative where they are small: the error of the right tail,
# which matters for many classes, is within 0.25 % up to probabilities of 1e-3.
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
# First and largest number of nodes of the quadrature, and tolerance of the sum of
# probabilities.
_FIRST_NODES, _MAX_NODES, _TOLERANCE = 24, 3072, 3e-4
# Largest ratio of spacing to distance of the nodes: for larger ones the errors of two
# classes may cancel in the sum.
_MAX_RATIO = 0.35
# The largest value is below the lower end, which is found by so many bisections, with a
# log-probability of about _LOG_BELOW, and above the upper end with one below _ABOVE.
_LOG_BELOW, _BISECTIONS, _ABOVE = -16.0, 7, 1e-4
# Variance of the noise that nodes must resolve for logits without variance.
_NOISE = 1.3
# Keeps logarithms and quotients finite where distribution functions underflow.
_TINY = {torch.float32: 1e-30, torch.float64: 1e-300}


def independent_variances(centred: Tensor) -> Tensor:
    """Variances ``d ≥ 0`` of independent logits from those of the centred logits.

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
    if n_classes == 2:  # only the sum is determined
        return 2 * centred
    total = centred.sum(-1, keepdim=True)
    variances = (n_classes * centred - total / (n_classes - 1)) / (n_classes - 2)
    return variances.clamp(min=0)


def argmax_proba(
    mean: Tensor,
    variances: Tensor,
    n_nodes: int = _FIRST_NODES,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Probability that each of independent logits is the largest, with Gumbel noise.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits, float64.
    variances : Tensor of shape (b, K)
        Variances of the logits, float64, not negative.
    n_nodes : int
        Initial number of nodes.
    dtype : torch.dtype
        Of the distribution functions: float32 takes half the time and leaves errors of
        about 1e-7, which depend on the other samples.

    Returns
    -------
    Tensor of shape (b, K)
        Rows sum to one.

    Notes
    -----
    The trapezoidal rule for ``∫ F_k'(t) Π_{j≠k} F_j(t) dt``, between a lower and an
    upper end beyond which the largest value is improbable. The spacing of the nodes is
    determined by the smallest variance at the lower end, and proportional to the
    distance from it further up, where only logits of large variance contribute: others
    with a mean far above the lower end would have raised it. The number of nodes is
    doubled for samples whose probabilities do not sum to one, or whose nodes are too
    coarse. Nodes are constants to autograd, as an integral does not depend on them.

    Six error functions and six exponentials for each class and node; memory beyond the
    inputs is a few chunks of `logits.chunks`.
    """
    # halved, as more arrays are in use at once than elsewhere
    parts = (
        half
        for m, v in chunks(mean, variances, n_nodes)
        for half in zip(m.chunk(2), v.chunk(2), strict=True)
    )
    return torch.cat([_argmax_proba_of_chunk(*part, n_nodes, dtype) for part in parts])


def _argmax_proba_of_chunk(
    mean: Tensor, variances: Tensor, n_nodes: int, dtype: torch.dtype
) -> Tensor:
    """`argmax_proba` of one chunk."""
    # relative to the largest mean, where digits are needed
    mean = mean - mean.detach().amax(-1, keepdim=True)
    # samples last: operations on long rows are faster
    of_classes = mean.T.contiguous(), variances.T.contiguous()
    nodes, steps, ratio = _nodes(*of_classes, n_nodes)
    proba = _integrals(*of_classes, nodes, steps, dtype).T
    is_coarse = ((proba.sum(-1) - 1).abs() > _TOLERANCE) | (ratio > _MAX_RATIO)
    coarse = is_coarse.nonzero().squeeze(-1)
    if len(coarse) and n_nodes < _MAX_NODES:
        finer = argmax_proba(mean[coarse], variances[coarse], 2 * n_nodes, dtype)
        proba = proba.index_put((coarse,), finer)
    proba = proba.maximum(_lower_bound(mean, variances))
    return proba / proba.sum(-1, keepdim=True)


def _integrals(
    mean: Tensor, variances: Tensor, nodes: Tensor, steps: Tensor, dtype: torch.dtype
) -> Tensor:
    """``∫ F_k'(t) Π_{j≠k} F_j(t) dt`` for classes (K, b) and nodes (t, b), (K, b)."""
    unit = (variances + 1).rsqrt()
    # differences in single precision would lose digits of distant nodes
    distance = ((nodes.unsqueeze(1) - mean).mul_(unit)).to(dtype)  # (t, K, b)
    is_double = dtype == torch.float64
    below, density = (
        torch.full_like(distance, is_double / 2),
        torch.zeros_like(distance),
    )
    for weight, location, variance in _GUMBEL:
        scale = (2 * (variances + variance)).rsqrt()
        shift, scale = (location * scale).to(dtype), (scale / unit).to(dtype)
        z = torch.addcmul(shift, distance, scale, value=-1)
        # erfc takes longer, but in float32 1 - erf would lose the lower tail
        part, sign = (z.erf(), -1) if is_double else (z.erfc(), 1)
        below.add_(part, alpha=sign * weight / 2)
        bell = z.square().neg_().exp_()
        density.addcmul_(bell, scale, value=weight / math.sqrt(math.pi))
    below = below.clamp(min=_TINY[dtype])
    largest = steps.amax(0)  # whose inverse is about the size of the density
    of_all = below.log().sum(1).double().exp() * (steps / largest)  # (t, b)
    proba = (density / below * of_all.to(dtype).unsqueeze(1)).sum(0)
    return proba.double() * (unit * largest)


@torch.no_grad()
def _nodes(
    mean: Tensor, variances: Tensor, n_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes of the quadrature and their weights, (t, b) each, and ratios (b,).

    For classes (K, b). The ratios are those of spacing to distance from the lower end,
    for distant nodes.
    """
    last = _GUMBEL[-1]
    tail = -NormalDist().inv_cdf(_ABOVE / len(mean))
    high = mean + last[1] + tail * (variances + last[2]).sqrt()
    deviations = (variances + _VARIANCE).sqrt()
    middle = mean + _MEAN
    # a product of probabilities does not exceed its smallest factor
    lowest = middle + NormalDist().inv_cdf(math.exp(_LOG_BELOW)) * deviations
    low, high = lowest.amax(0), high.amax(0)
    scale = (variances.amin(0) + _NOISE).sqrt()
    lower, upper = torch.zeros_like(low), ((high - low) / scale).asinh()
    tiny = _TINY[mean.dtype]
    for _ in range(_BISECTIONS):
        place = (lower + upper) / 2
        z = (low + scale * place.sinh() - middle) / deviations
        log_below = torch.special.ndtr(z).clamp(min=tiny).log().sum(0)
        is_low = log_below < _LOG_BELOW
        lower, upper = place.where(is_low, lower), upper.where(is_low, place)
    low = low + scale * lower.sinh()
    end = ((high - low) / scale).asinh()
    even = torch.linspace(0, 1, n_nodes, dtype=mean.dtype, device=mean.device)
    places, ratio = end * even.unsqueeze(1), end / (n_nodes - 1)
    steps = scale * places.cosh() * ratio
    return low + scale * places.sinh(), steps, ratio


def _lower_bound(mean: Tensor, variances: Tensor) -> Tensor:
    """Lower bound of the probabilities of independent logits, (b, K), not all zero."""
    # negative, so that derivatives are finite where a class has probability one
    log_p = (mean + variances / 2).log_softmax(-1).clamp(max=-1e-20)
    others = (-log_p.expm1()).log()
    bound = (log_p - torch.logaddexp(others, log_p + variances)).exp()
    return bound + torch.finfo(mean.dtype).tiny * mean.softmax(-1)
