"""Links: from a Gaussian over logits to class probabilities.

All approximate ``p = E[softmax(f)]``, ``f ~ N(μ, Σ)``, of which only the centred
Gaussian ``N(m, S)`` matters; see `sklaplace.logits`.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from sklaplace import dirichlet
from sklaplace.dirichlet.distribution import split_entropy
from sklaplace.logits import centre, centred_factor, centred_moments, chunks

Link = Callable[[Tensor, Tensor, Tensor], Tensor]

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
# The logistic distribution as a mixture of normals around zero: weights, variances.
# Least squares, relative in the tail: within 1.4 % up to probabilities of 1e-4.
_LOGISTIC = (
    (0.6162662, 1.916595),
    (0.3486317, 4.981186),
    (0.0351020, 10.955848),
)
# Rounds of `threshold` at most; few rows take more than six.
_MOST_ROUNDS = 30
# Below this largest variance, the second-order expansion errs less than the mixture.
_SMALL_VARIANCE = 0.09
# Nodes of the quadrature, first and at most, and how much probability may be missing.
_FIRST_NODES, _MOST_NODES, _MISSING = 32, 2048, 1e-3


def mean_field(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Probabilities from the pairwise differences of logits, in closed form.

    Nearly exact for two classes, where it is MacKay's approximation of the
    logistic-Gaussian integral. For many classes with small variances it can be
    less accurate than the softmax of the mean.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K)
        Covariances of the logits.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    Notes
    -----
    ``p_k ∝ 1 / Σ_j exp(−(μ_k − μ_j) / √(1 + π Var(f_k − f_j) / 8))``. O(K²) time
    and memory per row.

    References
    ----------
    Lu, Ie, Sha (2020), "Mean-field approximation to Gaussian-softmax integral
    with application to uncertainty estimation" (the variant with joint
    variances, normalised here).
    MacKay (1992), "The evidence framework applied to classification networks".
    """
    mean, cov = centre(mean, cov)
    variances = cov.diagonal(dim1=-2, dim2=-1)
    gaps = mean.unsqueeze(-2) - mean.unsqueeze(-1)  # (b, k, j): μ_j − μ_k
    spread = variances.unsqueeze(-2) + variances.unsqueeze(-1) - 2 * cov
    return (-(gaps / _inflation(spread)).logsumexp(-1)).softmax(-1)


def probit(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Softmax of logits scaled down by their own standard deviations.

    The cheapest link that sees the variances, and the usual one elsewhere. It
    neglects how logits vary together, and for many classes it errs more than the
    softmax of the mean.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances alone of centred ones.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    Notes
    -----
    ``softmax(m_k / √(1 + π S_kk / 8))`` with the centred ``m`` and ``S``. O(K)
    per row for variances, O(K²) time to centre covariances.

    References
    ----------
    MacKay (1992), "The evidence framework applied to classification networks"
    (two classes).
    Gibbs (1997), "Bayesian Gaussian processes for regression and
    classification", PhD thesis, University of Cambridge (more classes).
    """
    mean, variances = centred_moments(mean, cov)
    return (mean / _inflation(variances)).softmax(-1)


def sodpp(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Second-order expansion of the softmax around the mean of the logits.

    The most accurate closed form for standard deviations below 0.3, and the least for
    those above one. Prefer it where the posterior is narrow and nothing may be sampled.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K)
        Covariances of the logits.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    Notes
    -----
    ``p ∘ (1 + pᵀΣp − Σp + ½ diagΣ − ½ pᵀdiagΣ)`` with ``p = softmax(μ)``, which sums to
    one and errs by O(Σ²). Negative entries, which large variances make, are set to zero
    and the rest is divided by its sum. O(K²) per row.

    References
    ----------
    Bickel and Doksum (2015), "Mathematical statistics", vol. 1, section 5.3 (the delta
    method).
    """
    mean, cov = centre(mean, cov)
    softmax = mean.softmax(-1)
    products = (cov @ softmax.unsqueeze(-1)).squeeze(-1)
    variances = cov.diagonal(dim1=-2, dim2=-1)
    return _expanded(softmax, variances, products)


def gumbel(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Probabilities of logits taken as independent, by one-dimensional quadrature.

    The softmax is the probability that a logit is the largest once each has got Gumbel
    noise of its own. For independent logits, that leaves one integral over the largest
    value, whatever the number of classes. Prefer it for tens to hundreds of classes,
    and large variances: its error does not grow with them. How logits vary together is
    kept only as far as independent ones can have the same centred variances.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances alone of centred ones.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    Notes
    -----
    ``p_k = ∫ F_k'(t) Π_{j≠k} F_j(t) dt`` with the distribution ``F_j`` of a normal plus
    a Gumbel variable, where the latter is a mixture of six normals. Their variances
    ``d`` have ``C diag(d) C`` of the diagonal of ``S``, which is exact for two classes
    (and for three, unless one would be negative). Errors are about 0.002 for
    independent logits. By Jensen's inequality
    ``p_k ≥ e^{a_k} / (Σ_{j≠k} e^{a_j} + e^{a_k + d_k})``, ``a = m + d/2``, which holds
    the tails up. Rows of variances below 0.09 have the expansion of `sodpp`, also for
    independent logits. O(K) per row, 200 normal distribution functions for each class.

    References
    ----------
    Yellott (1977), "The relationship between Luce's choice axiom, Thurstone's theory of
    comparative judgment, and the double exponential distribution", Journal of
    Mathematical Psychology 15 (the Gumbel-max identity).
    Frühwirth-Schnatter and Frühwirth (2007), "Auxiliary mixture sampling with
    applications to logistic models", Computational Statistics & Data Analysis 51
    (Gumbel noise as a mixture of normals).
    """
    return _of_independent(mean, cov, _largest)


def threshold(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Probabilities of logits taken as independent, each against all others as one.

    Seen from one of many classes, the sum over all others hardly varies: what is left
    is a logistic function of one normal variable, averaged. Prefer it for hundreds of
    classes and more, where it is nearly as accurate as ``gumbel``, and many times
    cheaper; for few classes others are better.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances alone of centred ones.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    Notes
    -----
    ``p_k = E[sigmoid(f_k − g_k)]`` with the logarithm ``g_k = ℓ + log(1 − p_k)`` of the
    sum over the others, of variance ``Σ_{j≠k} (p_j / (1 − p_k))² d_j``, and ``ℓ`` such
    that probabilities sum to one. The average is that of a mixture of three normals for
    the logistic distribution. Independent variances ``d``, bounds and rows of small
    variances as for ``gumbel``. O(K) per row, some twenty normal distribution functions
    for each class.

    References
    ----------
    Monahan and Stefanski (1992), "Normal scale mixture approximations to F*(z) and
    computation of the logistic-normal integral" (the average).
    """
    return _of_independent(mean, cov, _against_the_rest)


def mc(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Average softmax over draws of the logits.

    The only link whose error vanishes as its budget grows.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K)
        Covariances of the logits.
    draws : Tensor of shape (s, K)
        Standard-normal points, such as ``normal_draws`` gives, shared by all
        rows, so that a row's probabilities do not depend on the others.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    Notes
    -----
    O(K³ + s K²) per row. Rows are taken in chunks, so that memory beyond the inputs
    stays near 2 MiB, or one row's draws if they are larger.
    """
    parts = chunks(mean, cov, len(draws))
    return torch.cat([_drawn(*part, draws).mean(-1) for part in parts])


def mc_uncertainty(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """`uncertainty_of_draws` of Gaussian logits, with the points of `mc`.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K)
        Covariances of the logits.
    draws : Tensor of shape (s, K)
        Standard-normal points.

    Returns
    -------
    Tensor of shape (b, 3)
        In nats, float64.
    """
    parts = chunks(mean, cov, len(draws))
    return torch.cat([uncertainty_of_draws(_drawn(*part, draws)) for part in parts])


def uncertainty_of_draws(proba: Tensor) -> Tensor:
    """Entropy of a label whose probabilities are drawn: total, and its two parts.

    Parameters
    ----------
    proba : Tensor of shape (b, K, s)
        Probabilities of K classes under each of s draws.

    Returns
    -------
    Tensor of shape (b, 3)
        In nats: entropy of the mean (total), mean of the entropies (aleatoric), and
        their difference (epistemic).
    """
    entropies = -torch.special.xlogy(proba, proba).sum(-2)
    return split_entropy(proba.mean(-1), entropies.mean(-1))


def bridge(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Mean of the Dirichlet that the Laplace bridge gives.

    For comparison with the literature. The probabilities do not depend on the
    scale of the covariance, equal the softmax for two classes and do not tend
    to it for more; ``dirichlet.laplace_bridge`` has the uncertainty.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances alone of centred ones.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    Notes
    -----
    O(K) per row for variances, O(K²) to centre covariances.

    References
    ----------
    MacKay (1998), "Choice of basis for Laplace approximation".
    Hobbhahn, Kristiadi, Hennig (2022), "Fast predictive uncertainty for
    classification with Bayesian deep networks", UAI.
    """
    return dirichlet.mean(dirichlet.APPROXIMATIONS["bridge"](mean, cov))


def bridge_norm(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Mean of the Laplace bridge's Dirichlet, corrected for large variances.

    As ``bridge``, but less confident where variances are large. The correction
    is left out where it would sharpen the prediction.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances alone of centred ones.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    Notes
    -----
    O(K) per row for variances, O(K²) to centre covariances.

    References
    ----------
    Hobbhahn, Kristiadi, Hennig (2022), "Fast predictive uncertainty for
    classification with Bayesian deep networks", UAI.
    """
    return dirichlet.mean(dirichlet.APPROXIMATIONS["bridge_norm"](mean, cov))


# links that use their draws
SAMPLED = frozenset({"mc"})
# links for which the variances of the centred logits say enough
DIAGONAL = frozenset({"bridge", "bridge_norm", "gumbel", "probit", "threshold"})

LINKS: dict[str, Link] = {
    "bridge": bridge,
    "bridge_norm": bridge_norm,
    "gumbel": gumbel,
    "mc": mc,
    "mean_field": mean_field,
    "probit": probit,
    "sodpp": sodpp,
    "threshold": threshold,
}
"""Links by the name that ``link_approx`` takes."""


# most classes, link
_CHOICE = ((2, "mean_field"), (16, "mc"), (256, "gumbel"))
_MANY_CLASSES = "threshold"


def choose_link(n_classes: int) -> str:
    """Name of the cheapest link that is accurate for a number of classes.

    The rule behind ``link_approx='auto'``:

    * up to 2 classes ``'mean_field'``: nearly exact, and the cheapest;
    * 3 to 16 classes ``'mc'``: a hundred points cover so few dimensions well, and see
      how logits vary together;
    * 17 to 256 classes ``'gumbel'``: points no longer cover the space, and one logit
      hardly feels how the others vary together;
    * above 256 classes ``'threshold'``: about as accurate there, at an eighth of the
      price.

    Parameters
    ----------
    n_classes : int
        Number of classes, K.

    Returns
    -------
    str
        A key of ``LINKS``.

    Notes
    -----
    From 2 to 300 classes, and for standard deviations of logits from 0.01 to 8, the
    choice has erred less than ``probit`` with every kind of covariance that was tried;
    the gallery has the table.
    """
    for most, name in _CHOICE:
        if n_classes <= most:
            return name
    return _MANY_CLASSES


def normal_draws(n_samples: int, dim: int, seed: int) -> Tensor:
    """Standard-normal points that cover space more evenly than random ones.

    Parameters
    ----------
    n_samples : int
        Number of points, at least one. A power of two covers best.
    dim : int
        Number of dimensions.
    seed : int
        Seed of the scrambling. The global random state is not touched.

    Returns
    -------
    Tensor of shape (n_samples, dim)
        Scrambled Sobol points through the normal quantile, float64. The second
        half mirrors the first, so that odd moments vanish for even
        ``n_samples``; from twice as many points as dimensions on, second moments are
        one, too.

    Raises
    ------
    ValueError
        If ``n_samples`` is not positive.

    Notes
    -----
    O(n_samples · dim). Sobol sequences are tabulated up to 21,201 dimensions;
    beyond these, the points are independent normal draws (mirrored as well).

    References
    ----------
    Owen (1998), "Scrambling Sobol and Niederreiter-Xing points", Journal of
    Complexity 14(4).
    """
    if n_samples < 1:
        raise ValueError(f"n_samples={n_samples} gives no draws. Use at least 1.")
    half = (n_samples + 1) // 2
    if dim > torch.quasirandom.SobolEngine.MAXDIM:
        generator = torch.Generator().manual_seed(seed)
        points = torch.randn(half, dim, generator=generator, dtype=torch.float64)
    else:
        engine = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)
        # Points are multiples of 2⁻³⁰, and 0 and 1 have infinite quantiles.
        uniform = engine.draw(half, dtype=torch.float64).clamp(2**-31, 1 - 2**-31)
        points = torch.special.ndtri(uniform)
    if half >= dim:
        points = _whitened(points)
    return torch.cat([points, -points])[:n_samples]


def _whitened(points: Tensor) -> Tensor:
    """Points (s, d), d <= s, with second moments of exactly one."""
    root = torch.linalg.cholesky(points.mT @ points / len(points))
    whitened: Tensor = torch.linalg.solve_triangular(root, points.mT, upper=False)
    return whitened.mT


# for the same points in every call; not to be written to
cached_draws = lru_cache(maxsize=8)(normal_draws)


def _expanded(softmax: Tensor, variances: Tensor, products: Tensor) -> Tensor:
    """Second-order expansion from ``p``, ``diagΣ`` and ``Σp``, (b, K) each."""
    change = (
        (softmax * products).sum(-1, keepdim=True)
        - products
        + variances / 2
        - (softmax * variances).sum(-1, keepdim=True) / 2
    )
    # beyond, the expansion says nothing, and could overflow
    proba = softmax * (1 + change.clamp(-1, 1e100))
    return proba / proba.sum(-1, keepdim=True)


def _of_independent(
    mean: Tensor, cov: Tensor, link: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """A link of independent logits ``N(m, diag d)``, where they are not narrow."""
    mean, centred = centred_moments(mean, cov)
    if mean.shape[-1] == 1:
        return torch.ones_like(mean)
    variances = _independent_variances(centred)
    softmax = mean.softmax(-1)
    proba = _expanded(softmax, variances, variances * softmax)
    wide = (variances.amax(-1) > _SMALL_VARIANCE).nonzero().squeeze(-1)
    proba[wide] = link(mean[wide], variances[wide])
    return proba


def _independent_variances(centred: Tensor) -> Tensor:
    """``d ≥ 0`` with ``C diag(d) C`` of the given diagonal, (b, K), K > 1."""
    n_classes = centred.shape[-1]
    if n_classes == 2:  # only the sum counts
        return 2 * centred
    total = centred.sum(-1, keepdim=True)
    own = (n_classes * centred - total / (n_classes - 1)) / (n_classes - 2)
    return own.clamp(min=0)


def _largest(mean: Tensor, variances: Tensor, n_nodes: int = _FIRST_NODES) -> Tensor:
    """How probably each of independent logits is the largest, (b, K)."""
    parts = chunks(mean, variances, n_nodes)
    return torch.cat([_largest_of(*part, n_nodes) for part in parts])


def _largest_of(mean: Tensor, variances: Tensor, n_nodes: int) -> Tensor:
    """`_largest` of one chunk.

    The trapezoidal rule, with more nodes for rows of which it misses too much, such as
    those with variances of very different size.
    """
    # from the top, where digits are needed
    mean = mean - mean.amax(-1, keepdim=True)
    first, last = _GUMBEL[0], _GUMBEL[-1]
    low = (mean + first[1] - 5 * (variances + first[2]).sqrt()).amax(-1)[:, None, None]
    high = (mean + last[1] + 4 * (variances + last[2]).sqrt()).amax(-1)[:, None, None]
    step = (high - low) / (n_nodes - 1)
    nodes = low + step * torch.arange(n_nodes, dtype=mean.dtype, device=mean.device)
    below = mean.new_zeros(*mean.shape, n_nodes)
    density = torch.zeros_like(below)
    for weight, location, variance in _GUMBEL:
        deviation = (variances + variance).sqrt().unsqueeze(-1)
        z = (nodes - (mean + location).unsqueeze(-1)) / deviation  # (b, K, t)
        below += torch.special.ndtr(z).mul_(weight)
        density += z.square_().mul_(-0.5).exp_().mul_(weight / deviation)
    below.clamp_(min=1e-300)
    largest = below.log().sum(-2, keepdim=True).exp()
    proba = (density.div_(below) * largest).sum(-1)
    proba *= step.squeeze(-1) / math.sqrt(2 * math.pi)
    missing = ((proba.sum(-1) - 1).abs() > _MISSING).nonzero().squeeze(-1)
    if len(missing) and n_nodes < _MOST_NODES:
        proba[missing] = _largest(mean[missing], variances[missing], 4 * n_nodes)
    proba = proba.maximum(_least(mean, variances))
    return proba / proba.sum(-1, keepdim=True)


def _against_the_rest(mean: Tensor, variances: Tensor) -> Tensor:
    """Each logit against the sum of the others, (b, K)."""
    parts = chunks(mean, variances, 1)
    return torch.cat([_against_the_rest_of(*part) for part in parts])


def _against_the_rest_of(mean: Tensor, variances: Tensor) -> Tensor:
    """`_against_the_rest` of one chunk, by a secant method for the level."""
    mean = mean - mean.amax(-1, keepdim=True)
    flat = mean / _inflation(variances)
    level = flat.logsumexp(-1, keepdim=True)
    proba = (flat - level).exp()
    slope, before = torch.ones_like(level), torch.zeros_like(level)
    move = before
    rows = torch.arange(len(mean), device=mean.device)  # that have not settled
    for _ in range(_MOST_ROUNDS):
        found = _round(mean[rows], variances[rows], level, proba[rows])
        total = found.sum(-1, keepdim=True)
        proba[rows] = found / total
        excess = total.log()
        slope = torch.where(move != 0, (before - excess) / move, slope).clamp(0.02, 1)
        move, before = excess / slope, excess
        level = level + move
        moving = excess.abs().squeeze(-1) > _MISSING
        if not moving.any():
            break
        rows, level, slope = rows[moving], level[moving], slope[moving]
        move, before = move[moving], before[moving]
    proba = proba.maximum(_least(mean, variances))
    return proba / proba.sum(-1, keepdim=True)


def _round(mean: Tensor, variances: Tensor, level: Tensor, proba: Tensor) -> Tensor:
    """Probabilities that each logit exceeds the others, given these, (b, K)."""
    others = (-proba).log1p()  # -inf where there are none
    shares = proba.square() * variances
    rest = (shares.sum(-1, keepdim=True) - shares) / (1 - proba).square()
    widest = variances.amax(-1, keepdim=True)
    spread = variances + rest.clamp(min=0).nan_to_num(0).minimum(widest)
    return _averaged_sigmoid(mean - level - others, spread)


def _averaged_sigmoid(mean: Tensor, variances: Tensor) -> Tensor:
    """``E[sigmoid(x)]`` of normal ``x``."""
    average = torch.zeros_like(mean)
    for weight, variance in _LOGISTIC:
        z = mean / (variances + variance).sqrt_()
        average += torch.special.ndtr(z).mul_(weight)
    return average


def _least(mean: Tensor, variances: Tensor) -> Tensor:
    """Lower bound of the probabilities of independent logits, (b, K), not all zero."""
    log_share = (mean + variances / 2).log_softmax(-1)
    others = (-log_share.exp()).log1p()
    bound = (log_share - torch.logaddexp(others, log_share + variances)).exp()
    found: Tensor = bound + torch.finfo(mean.dtype).tiny * mean.softmax(-1)
    return found


def _drawn(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Softmax at the draws: (b, K), (b, K, K), (s, K) -> (b, K, s)."""
    mean, cov = centre(mean, cov)
    factor = centred_factor(cov)  # (b, K, K - 1)
    points = draws[:, : factor.shape[-1]].to(mean)
    # draws last: a softmax over many short rows is slow
    logits = factor @ points.T + mean.unsqueeze(-1)  # (b, K, s)
    return logits.softmax(-2)


def _inflation(variances: Tensor) -> Tensor:
    """How much flatter a sigmoid gets, averaged over a normal of given variance."""
    return (1 + math.pi / 8 * variances.clamp(min=0)).sqrt()
