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
from sklaplace.logits import centre, centred_factor, centred_moments, chunks

Link = Callable[[Tensor, Tensor, Tensor], Tensor]


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

    The cheapest link that sees the variances. Prefer it for hundreds of
    classes. It neglects how logits vary together.

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
    stays near 1 MiB, or one row's draws if they are larger.
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
    average = proba.mean(-1)
    total = -torch.special.xlogy(average, average).sum(-1)
    aleatoric = -torch.special.xlogy(proba, proba).sum(-2).mean(-1)
    aleatoric = torch.minimum(aleatoric, total)  # up to rounding
    return torch.stack([total, aleatoric, total - aleatoric], -1)


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
DIAGONAL = frozenset({"bridge", "bridge_norm", "probit"})

LINKS: dict[str, Link] = {
    "bridge": bridge,
    "bridge_norm": bridge_norm,
    "mc": mc,
    "mean_field": mean_field,
    "probit": probit,
}
"""Links by the name that ``link_approx`` takes."""


def choose_link(n_classes: int) -> str:
    """Name of the cheapest link that is accurate for a number of classes.

    The rule behind ``link_approx='auto'``:

    * up to 2 classes ``'mean_field'``: in closed form and nearly exact;
    * 3 to 128 classes ``'mc'``: no closed form is accurate any more;
    * above 128 classes ``'probit'``: a covariance and its root cost O(K³) per
      row, and for large variances a hundred draws are no longer better.

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
    Measured ``Σ_k |p_k − p_k*|``, averaged over rows, for logits of mean
    ``2 N(0, I)`` and covariance ``s² A Aᵀ / K``, ``A`` standard normal, with
    ``p*`` from 40,000 random draws. ``mc`` has 100 draws of ``normal_draws``.

    ====  ===  =======  ==========  ======  ====
    K     s    softmax  mean_field  probit  mc
    ====  ===  =======  ==========  ======  ====
    2     1    .072     .005        .049    .002
    2     4    .299     .005        .129    .010
    3     1    .101     .035        .064    .002
    3     4    .457     .148        .215    .017
    10    1    .143     .115        .115    .020
    10    4    .637     .331        .334    .091
    128   1    .085     .279        .150    .049
    128   4    .653     .497        .378    .402
    200   1    .075     .304        .168    .056
    200   4    .629     .538        .408    .499
    ====  ===  =======  ==========  ======  ====

    One row took ``mc`` 0.02 ms for 10 classes, 1.4 ms for 128 and 3.5 ms for
    200, and ``probit`` at most 0.01 ms (one core, float64).
    """
    if n_classes <= 2:
        return "mean_field"
    return "mc" if n_classes <= 128 else "probit"


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
        ``n_samples``.

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
    return torch.cat([points, -points])[:n_samples]


# for the same points in every call; not to be written to
cached_draws = lru_cache(maxsize=8)(normal_draws)


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
