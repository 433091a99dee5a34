"""Expected softmax of independent Gaussian logits, by the Gumbel-max identity.

For independent Gumbel noise ``g``, ``E[softmax(f)]_k`` is the probability that
``f_k + g_k`` is the largest entry of ``f + g``. For any number of classes, this
probability is the one-dimensional integral ``∫ F_k'(t) Π_{j≠k} F_j(t) dt``.
"""

import math

import numpy as np
import torch
from torch import Tensor

from sklaplace.dirichlet.logits import chunks
from sklaplace.dirichlet.normal_gumbel import LOWEST, NormalGumbel

# Initial and maximum numbers of quadrature nodes, and tolerance for the sum of
# probabilities.
_FIRST_NODES, _MAX_NODES, _MAX_SUM_ERROR = 16, 2048, 3e-4
# Maximum ratio of the node spacing to the distance from the lower end. Above this
# ratio, the errors of two classes may cancel in the sum.
_MAX_SPACING_RATIO = 0.35
# The log-probability that the largest value is below the lower end is about minus the
# exponential of this value.
_LOG_AT_END = -LOWEST
# Noise variance that the nodes must resolve if the logits have zero variance. It is
# somewhat below the variance of Gumbel noise, π²/6.
_MIN_RESOLVED_VARIANCE = 1.3
# For more classes than this, all but the leading classes are merged.
MANY_CLASSES = 1024
# Number of leading classes in the first attempt. The second attempt uses the number of
# all classes divided by `_LEADING_DIVISOR`, if that is more.
_N_LEADING, _LEADING_DIVISOR = 512, 32
# Log of the largest relative error of ``-log F`` for merged classes at the lower end.
# This error is as large as in `NormalGumbel`, and smaller by e^LOWEST where the
# integrand is large.
_MAX_LOG_MERGE_ERROR = math.log(1e-2)
# Largest absolute mean and variance in single precision, whose largest number is 3e38.
_LARGEST = 1e30
# Number of points at unit spacing, and derivatives of their interpolating polynomial at
# each point.
_STENCIL_SIZE = 7
_STENCIL_DERIVATIVES = np.array(
    [
        np.linalg.solve(
            np.vander(np.arange(_STENCIL_SIZE) - point, increasing=True).T,
            np.eye(_STENCIL_SIZE)[1],
        )
        for point in range(_STENCIL_SIZE)
    ]
)


def argmax_proba(
    mean: Tensor,
    variances: Tensor,
    n_nodes: int = _FIRST_NODES,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return the probability that each logit plus Gumbel noise is the largest.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Float64 means of the logits.
    variances : Tensor of shape (b, K)
        Non-negative float64 variances of the independent logits.
    n_nodes : int
        Initial number of quadrature nodes, at least seven.
    dtype : torch.dtype
        Dtype of the quadrature. float32 takes half the time, with errors of about 1e-6.
        Variances above 1e30 then count as 1e30.

    Returns
    -------
    Tensor of shape (b, K)
        Float64 probabilities. Each row sums to one.

    Notes
    -----
    With ``S = -log Π F_j``, integration by parts turns the integral into
    ``∫ -(log F_k)(t) (exp(-S))'(t) dt``. This form requires one derivative per sample
    instead of one per class. The trapezoidal rule covers the interval in which the
    largest value probably lies. The derivative uses differences of ``log S``, which is
    nearly linear. At the lower end of this interval, the smallest variance determines
    the spacing of the nodes. Farther up, the spacing is proportional to the distance
    from the lower end, because only logits with large variances contribute there. If a
    logit with a small variance had a large mean, the lower end would be higher. The
    number of nodes is doubled for samples whose probabilities do not sum to one or
    whose nodes are too far apart. Autograd treats the nodes as constants, because the
    integral does not depend on the nodes. Small probabilities are limited by an upper
    bound, because the tails of `NormalGumbel` are too heavy.

    The cost is one exponential and one polynomial of degree seven per class and node.
    The additional memory is the size of a few chunks from `logits.chunks`. If there are
    many classes, most of them are improbable and cost only one exponential each; see
    `_by_leading`.
    """
    # relative to the largest mean, near which precision matters
    mean = mean - mean.detach().amax(-1, keepdim=True)
    if dtype != torch.float64:
        mean, variances = mean.clamp(min=-_LARGEST), variances.clamp(max=_LARGEST)
    mean, variances = mean.to(dtype), variances.to(dtype)
    integrate = _by_leading if mean.shape[-1] > MANY_CLASSES else _by_nodes
    return integrate(mean, variances, n_nodes).double()


def _by_leading(mean: Tensor, variances: Tensor, n_nodes: int) -> Tensor:
    """Compute `argmax_proba` for many classes, most of which are improbable.

    In the upper tail, ``-log F_j(t) = e^(m_j - t)`` up to a relative error of at most
    ``e^(m_j + v_j - t) / 2``, where ``m_j`` is the mean plus half the variance ``v_j``.
    Logits with a small error at the lower end of the quadrature are merged into one
    logit with zero variance, whose mean is the logsumexp of their ``m_j``. The
    probability of the merged logit is split in proportion to ``e^m_j``. The other
    logits are integrated by quadrature. If too many logits have large errors, a second
    attempt integrates more logits, and a third attempt all logits.
    """
    proba, is_precise = _with_leading(_N_LEADING, mean, variances, n_nodes)
    # only these samples are computed anew
    rows = (~is_precise).nonzero().squeeze(-1)
    if len(rows):
        n_more = max(_N_LEADING, mean.shape[-1] // _LEADING_DIVISOR)
        # probabilities of these samples, with more leading classes
        more, is_precise = _with_leading(n_more, mean[rows], variances[rows], n_nodes)
        proba, rows = proba.index_put((rows,), more), rows[~is_precise]
    if len(rows):
        exact = _by_nodes(mean[rows], variances[rows], n_nodes)
        proba = proba.index_put((rows,), exact)
    return proba


def _with_leading(
    n_leading: int, mean: Tensor, variances: Tensor, n_nodes: int
) -> tuple[Tensor, Tensor]:
    """Return probabilities (b, K), and whether the leading classes suffice (b,).

    The leading classes are those with the largest errors when merged. The others are
    merged into one class, as `_by_leading` describes. Samples for which the leading
    classes do not suffice have probabilities of zero.
    """
    tails = mean + variances / 2  # m_j
    # the error grows with m_j + v_j, so `topk` returns these and the classes' positions
    errors, leading = (tails + variances).detach().topk(n_leading, -1, sorted=False)
    top_means, top_variances = (a.gather(-1, leading) for a in (mean, variances))
    rest = tails.scatter(-1, leading, -torch.inf)  # only the merged classes
    largest = rest.detach().amax(-1, keepdim=True)
    shares = (rest - largest).exp()
    total = shares.sum(-1, keepdim=True)
    merged_logit = total.log() + largest  # logsumexp of the merged classes' tails
    # the largest value probably exceeds both lower ends
    lowest = NormalGumbel(top_means.detach(), top_variances.detach()).lower.amax(-1)
    lowest = lowest.maximum(merged_logit.detach().squeeze(-1) + LOWEST)
    # No merged error exceeds the smallest leading error. The log 2 is that of the error
    # bound in `_by_leading`. The result is False for non-finite values.
    is_precise = errors.amin(-1) - math.log(2) - lowest < _MAX_LOG_MERGE_ERROR
    means = torch.cat([top_means, merged_logit], -1)
    # the merged logit has zero variance
    all_variances = torch.cat([top_variances, 0 * merged_logit], -1)
    proba = torch.zeros_like(means)
    if bool(is_precise.any()):
        precise = _by_nodes(means[is_precise], all_variances[is_precise], n_nodes)
        proba = proba.index_put((is_precise,), precise)
    # the merged probability is split in proportion to e^m_j
    improbable = shares * (proba[:, -1:] / total)
    return improbable.scatter(-1, leading, proba[:, :-1]), is_precise


def _by_nodes(mean: Tensor, variances: Tensor, n_nodes: int) -> Tensor:
    """Compute `argmax_proba` by quadrature for each class.

    Samples are repeated with twice as many nodes if their probabilities do not sum to
    one, or if their nodes are too far apart.
    """
    integrals = [_integrals(m, v, n_nodes) for m, v in chunks(mean, variances, n_nodes)]
    proba, ratio = map(torch.cat, zip(*integrals, strict=True))
    error = (proba.sum(-1) - 1).abs()
    is_coarse = (error > _MAX_SUM_ERROR) | (ratio > _MAX_SPACING_RATIO)
    coarse = is_coarse.nonzero().squeeze(-1)
    if len(coarse) and n_nodes < _MAX_NODES:
        finer = _by_nodes(mean[coarse], variances[coarse], 2 * n_nodes)
        proba = proba.index_put((coarse,), finer)
    # the tails of `NormalGumbel` are too heavy, so small probabilities may be too large
    proba = proba.minimum(_upper_bound(mean, variances))
    return proba / proba.sum(-1, keepdim=True)


def _integrals(mean: Tensor, variances: Tensor, n_nodes: int) -> tuple[Tensor, Tensor]:
    """Return the quadrature sums (b, K), and the ratios (b,) from `_nodes`.

    The sums approximate ``∫ −(log F_k)(t) (exp(−S))'(t) dt`` with ``S = −log Π F_j``,
    where ``F_k`` is the distribution function of logit k plus Gumbel noise.
    """
    # samples on the last axis, because operations on long rows are faster
    classes = NormalGumbel(mean.T.contiguous(), variances.T.contiguous())
    nodes, ratio = _nodes(classes, variances, n_nodes)
    minus_logs = classes.minus_log(nodes.unsqueeze(1))  # (t, K, b)
    total = minus_logs.sum(1)  # S at the nodes
    # The derivative of exp(-S) by the number of the node, so the spacing cancels. It is
    # -exp(-S) S (log S)', because log S is nearly linear and its differences precise.
    weights = -(-total).exp() * total * _differences(total.log())
    # trapezoidal rule: half the weight at both ends
    weights = torch.cat([weights[:1] / 2, weights[1:-1], weights[-1:] / 2])
    return (minus_logs * weights.unsqueeze(1)).sum(0).T, ratio


@torch.no_grad()
def _nodes(
    classes: NormalGumbel, variances: Tensor, n_nodes: int
) -> tuple[Tensor, Tensor]:
    """Return the quadrature nodes (t, b), and ratios (b,).

    Coarse nodes first locate the lower end of the interval. Above this point, the
    product ``exp(-S)`` of all distribution functions is no longer negligible. Then, the
    final nodes start there. The classes have shape (K, b) and the variances (b, K).
    Each ratio is the spacing of distant nodes divided by their distance from the lower
    end.
    """
    # near the lower end, the smallest variance determines the spacing
    scale = (variances.amin(1) + _MIN_RESOLVED_VARIANCE).sqrt()
    # above this point, all classes together are negligible
    high = classes.upper_end(variances.shape[1]).amax(0)
    # A product of probabilities does not exceed its smallest factor, so the largest of
    # the classes' lower ends is a first estimate. A third of the nodes locates a better
    # one, which is interpolated between two of them. Fewer than six are too coarse.
    nodes, _ = _spaced(classes.lower.amax(0), high, scale, max(6, n_nodes // 3))
    log_s = classes.minus_log(nodes.unsqueeze(1)).sum(1).log()  # falls with t, (t, b)
    # the last of the lower nodes at which the product is too small, and the next node
    n_low = (log_s > _LOG_AT_END).cumprod(0).sum(0)
    index = n_low.sub_(1).clamp_(0, len(nodes) - 2)
    index = torch.stack([index, index + 1])  # (2, b)
    (first, second), (above, below) = nodes.gather(0, index), log_s.gather(0, index)
    fraction = ((above - _LOG_AT_END) / (above - below)).clamp(0, 1)
    return _spaced(torch.lerp(first, second, fraction), high, scale, n_nodes)


def _spaced(low: Tensor, high: Tensor, scale: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return n nodes (n, b) from ``low`` to ``high``, and ratios (b,).

    Node ``low + scale sinh(x)`` has evenly spaced ``x`` from 0 to ``end``. The spacing
    of nodes is therefore even within ``scale`` of ``low``, and proportional to the
    distance farther away. The ratio of spacing and distance is the step of ``x``.
    """
    even = torch.linspace(0, 1, n, dtype=low.dtype, device=low.device)
    end = ((high - low) / scale).asinh()
    return low + scale * (end * even.unsqueeze(1)).sinh(), end / (n - 1)


def _differences(values: Tensor) -> Tensor:
    """Return derivatives (t, b) of values (t, b) at points with unit spacing.

    Each derivative is that of the polynomial through seven neighbouring points, in the
    middle of which the point lies, except near both ends.
    """
    # row i has the weights of seven values for the derivative at the i-th of them
    derivatives = torch.as_tensor(_STENCIL_DERIVATIVES).to(values)
    middle = _STENCIL_SIZE // 2
    inner = values.unfold(0, _STENCIL_SIZE, 1) @ derivatives[middle]
    first, last = values[:_STENCIL_SIZE], values[-_STENCIL_SIZE:]
    ends = derivatives[:middle] @ first, derivatives[middle + 1 :] @ last
    return torch.cat([ends[0], inner, ends[1]])


def _upper_bound(mean: Tensor, variances: Tensor) -> Tensor:
    """Return the Chernoff bound (b, K) on the probabilities of independent logits.

    For the logits ``f`` and the class j with the largest mean, the probability of class
    k is at most ``E[exp(s (f_k - f_j))]`` for ``0 ≤ s ≤ 1``.
    """
    largest = mean.argmax(-1, keepdim=True)
    gaps = mean.gather(-1, largest) - mean
    # variance of f_k - f_j
    total = variances + variances.gather(-1, largest)
    total = total.clamp(min=torch.finfo(total.dtype).tiny)  # quotients are finite
    s = (gaps / total).clamp(max=1)  # minimises the bound, exp(s² total / 2 − s gaps)
    return (s * (s * total / 2 - gaps)).exp()
