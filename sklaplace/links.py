"""Links: from a Gaussian over logits to class probabilities.

All approximate ``p = E[softmax(f)]``, ``f ~ N(μ, Σ)``. The softmax ignores a shift
common to all logits, so only the centred Gaussian matters: ``m = Cμ``,
``S = CΣC`` with ``C = I − 11ᵀ/K``.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sklaplace import dirichlet

Link = Callable[[Tensor, Tensor, Tensor], Tensor]

# Logits beyond this are one-hot in any case, and their sums must not overflow.
_MAX_LOGIT = 1e100
# Keeps the pivots of a covariance that is zero numbers.
_MIN_LIFT = 1e-200
# What the two (rows, s, K) tensors of a chunk of Monte-Carlo rows may take: more
# does not fit into the cache of a core, and takes half as long again.
_CHUNK_BYTES = 2**20


def centre(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Gaussian without the direction that the softmax does not see.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K)
        Covariances of the logits, symmetric positive semidefinite.

    Returns
    -------
    mean : Tensor of shape (b, K)
        ``Cμ``, float64; rows sum to zero.
    cov : Tensor of shape (b, K, K)
        ``CΣC``, float64; rows and columns sum to zero.

    Notes
    -----
    O(K²) per row. Curvature does not reach the all-ones direction, so its
    posterior variance is that of the prior and may be larger than all others
    by orders of magnitude. What it leaves behind in ``CΣC`` by rounding alone
    is set to zero.
    """
    rows = cov.mean(-1, keepdim=True, dtype=torch.float64)  # (b, K, 1)
    columns = cov.mean(-2, keepdim=True, dtype=torch.float64)  # (b, 1, K)
    centred = cov.double() - rows
    centred -= columns
    centred += rows.mean(-2, keepdim=True)
    noise = _is_rounding(centred.diagonal(dim1=-2, dim2=-1), cov)  # (b, 1)
    return _centre_mean(mean), centred.masked_fill_(noise.unsqueeze(-1), 0)


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
    mean, variances = _centred_moments(mean, cov)
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
    per_row = 2 * 8 * draws.numel()  # two float64 tensors
    rows = max(1, _CHUNK_BYTES // per_row)
    chunks = zip(torch.split(mean, rows), torch.split(cov, rows), strict=True)
    return torch.cat([_mean_softmax(*chunk, draws) for chunk in chunks])


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
    centred = _centred_moments(mean, cov)
    return dirichlet.mean(dirichlet.laplace_bridge(*centred, project=False))


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
    centred = _centred_moments(mean, cov)
    return dirichlet.mean(
        dirichlet.laplace_bridge(*centred, project=False, norm="guarded")
    )


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


def _mean_softmax(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Average softmax over the draws: (b, K), (b, K, K), (s, K) -> (b, K)."""
    mean, cov = centre(mean, cov)
    factor = _centred_factor(cov)  # (b, K, K - 1)
    points = draws[:, : factor.shape[-1]].to(mean)
    # draws last: a softmax over many short rows is slow
    logits = factor @ points.T + mean.unsqueeze(-1)  # (b, K, s)
    return logits.softmax(-2).mean(-1)


def _centred_factor(cov: Tensor) -> Tensor:
    """``F`` (b, K, K - 1) with ``F Fᵀ`` a centred covariance.

    The Cholesky factor of all classes but the last, whose logit is minus the sum
    of theirs. What is added to the diagonal keeps singular matrices factorisable,
    and the factor a smooth function of them.
    """
    leading = cov[:, :-1, :-1]
    largest = cov.diagonal(dim1=-2, dim2=-1).amax(-1)
    lift = 1e-10 * largest.clamp(min=_MIN_LIFT)
    identity = torch.eye(leading.shape[-1], dtype=cov.dtype, device=cov.device)
    root, _ = torch.linalg.cholesky_ex(leading + lift[:, None, None] * identity)
    return torch.cat([root, -root.sum(-2, keepdim=True)], -2)


def _centre_mean(mean: Tensor) -> Tensor:
    """``Cμ`` in float64."""
    mean = mean.double().clamp(-_MAX_LOGIT, _MAX_LOGIT)
    return mean - mean.mean(-1, keepdim=True)


def _centred_moments(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Centred means and variances, (b, K), from covariances or such variances."""
    if cov.ndim == mean.ndim:
        return _centre_mean(mean), cov.double()
    return _centre_mean(mean), _centred_variances(cov)


def _centred_variances(cov: Tensor) -> Tensor:
    """Diagonal of ``CΣC`` alone, without a second (b, K, K) tensor."""
    rows = cov.mean(-1, dtype=torch.float64)  # (b, K)
    diagonal = cov.diagonal(dim1=-2, dim2=-1)
    variances = diagonal - 2 * rows + rows.mean(-1, keepdim=True)
    return variances.masked_fill(_is_rounding(variances, cov), 0)


def _is_rounding(variances: Tensor, cov: Tensor) -> Tensor:
    """Whether the centred variances are only rounding of cov: (b, 1)."""
    largest = cov.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True).double()
    rounding = 16 * torch.finfo(cov.dtype).eps * largest
    return variances.amax(-1, keepdim=True) <= rounding


def _inflation(variances: Tensor) -> Tensor:
    """How much flatter a sigmoid gets, averaged over a normal of given variance."""
    return (1 + math.pi / 8 * variances.clamp(min=0)).sqrt()
