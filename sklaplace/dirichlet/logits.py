"""Gaussians over logits ``N(μ, Σ)``, as the softmax sees them.

The softmax ignores a shift common to all logits, so only the centred Gaussian matters:
``m = Cμ``, ``S = CΣC`` with ``C = I − 11ᵀ/K``.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

# Logits beyond this are one-hot in any case, and their sums must not overflow.
MAX_LOGIT = 1e100
# What is added to diagonals, as a share of the largest variance; the latter is at least
# this, so that the pivots of a covariance that is zero are numbers.
_SHARE, _MIN_LIFT = 1e-10, 1e-200
# Variances this little below zero, as a share of the largest, are rounding.
_NEGATIVE = 1e-3
# Gaps below this are nothing.
_MIN_UNIT = 1e-100
# What the tensors of a chunk of rows may take: more does not fit into the cache of a
# core, and takes half as long again.
_CHUNK_BYTES = 2**21
# Points of `logsumexp_gap`: directions at least and at most, and up to how many
# dimensions they are taken at three radii and not at two.
_MIN_DIRECTIONS, _MAX_DIRECTIONS, _MAX_DIM_OF_THREE = 8, 64, 8
# How many logits, those that vary most, have one-dimensional integrals of their own,
# and the nodes of these: the trapezoidal rule.
_N_WIDEST = 2
_NODES = torch.linspace(-8, 8, 33, dtype=torch.float64)


def check_finite(name: str, values: Tensor) -> None:
    """Raise unless all values are finite."""
    if not bool(values.isfinite().all()):
        raise ValueError(
            f"{name} has entries that are not finite. Look for divisions by zero and "
            "overflow in what made it."
        )


def check_variances(variances: Tensor, largest: Tensor) -> None:
    """Raise unless variances (..., K) are finite, and not negative but for rounding.

    ``largest`` (..., 1) is the variance to which rounding is relative.
    """
    check_finite("cov", variances)
    if bool((variances < -_NEGATIVE * largest.abs()).any()):
        raise ValueError(
            "cov is not positive semidefinite. Give covariances of logits, symmetric, "
            "without negative eigenvalues."
        )


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


def centred_moments(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Centred means and variances, (b, K) each, float64.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances alone of centred ones.

    Notes
    -----
    O(K²) time and O(K) memory per row.
    """
    if cov.ndim == mean.ndim:
        return _centre_mean(mean), cov.double()
    rows = cov.mean(-1, dtype=torch.float64)  # (b, K)
    diagonal = cov.diagonal(dim1=-2, dim2=-1)
    variances = diagonal - 2 * rows + rows.mean(-1, keepdim=True)
    return _centre_mean(mean), variances.masked_fill(_is_rounding(variances, cov), 0)


def centred_factor(cov: Tensor) -> Tensor:
    """Root of a centred covariance.

    Parameters
    ----------
    cov : Tensor of shape (b, K, K)
        Centred covariances, float64.

    Returns
    -------
    Tensor of shape (b, K, K - 1)
        ``F`` with ``F Fᵀ`` the covariance.

    Raises
    ------
    ValueError
        If a covariance is not finite, or not positive semidefinite.

    Notes
    -----
    The Cholesky factor of all classes but the last, whose logit is minus the sum of
    theirs. What is added to the diagonal keeps singular matrices factorisable, and the
    factor a smooth function of them. Where that is not enough, as of singular ones that
    were rounded to single precision, eigenvectors are asked.
    """
    leading = cov[:, :-1, :-1]
    largest = cov.diagonal(dim1=-2, dim2=-1).amax(-1)
    lift = _SHARE * largest.clamp(min=_MIN_LIFT)
    identity = torch.eye(leading.shape[-1], dtype=cov.dtype, device=cov.device)
    root, failed = torch.linalg.cholesky_ex(leading + lift[:, None, None] * identity)
    if bool(failed.any()):
        rows = failed.nonzero().squeeze(-1)
        root = root.index_copy(0, rows, _eigen_root(leading[rows]))
    return torch.cat([root, -root.sum(-2, keepdim=True)], -2)


def _eigen_root(cov: Tensor) -> Tensor:
    """The Cholesky factor (b, k, k) without negative eigenvalues that are rounding."""
    check_finite("cov", cov)
    values, vectors = torch.linalg.eigh(cov)
    check_variances(values, values[:, -1:])
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    lower = torch.linalg.qr(root.mT)[1].mT
    signs = torch.where(lower.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    factor: Tensor = lower * signs.unsqueeze(-2)
    return factor


def chunks(mean: Tensor, cov: Tensor, n_points: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of both, as many at a time as fit into a core's cache.

    Parameters
    ----------
    mean, cov : Tensor of shape (b, K), and (b, K, K) or (b, K)
        A Gaussian for each row, by covariances or variances.
    n_points : int
        Points at which each row is evaluated.
    """
    per_row = 8 * (n_points * mean.shape[-1] + cov[:1].numel())  # float64
    rows = max(1, _CHUNK_BYTES // (2 * per_row))
    return zip(torch.split(mean, rows), torch.split(cov, rows), strict=True)


def logsumexp_gap(log_proba: Tensor, factor: Tensor) -> Tensor:
    """How much ``E[logsumexp(f)]`` exceeds ``logsumexp(E[f])``, for Gaussian logits.

    Parameters
    ----------
    log_proba : Tensor of shape (b, K)
        Mean of the logits, less its ``logsumexp``.
    factor : Tensor of shape (b, K, d)
        ``F`` with ``F Fᵀ`` the covariance of the logits.

    Returns
    -------
    Tensor of shape (b, 1)
        Not negative, up to rounding: logsumexp is convex.

    Notes
    -----
    A spherical-radial rule: ``f = log p ± r_j F q``, with nodes ``r_j²/2`` of
    Gauss-Laguerre quadrature, exact to the third power of ``r²`` for two and to the
    fifth for three, and orthonormal directions ``q`` (several bases of them in few
    dimensions). The bases are random, but always the same: axes of the factor itself
    would put all points on few classes. They hardly hit a logit that varies far more
    than the others, such as that of a class without training rows: so
    ``log(1 − p + p exp(f_k − m_k))`` of the two widest is integrated on its own, and
    the points have what it leaves. Expectations of quadratic functions are exact; in
    many dimensions, where not all directions of a basis are taken, by regression on the
    curvature at the mean, the expectation of which is known.

    36 points for ten classes, at most 256; O(K²) for each.

    References
    ----------
    Genz and Monahan (1998), "Stochastic integration rules for infinite regions", SIAM
    Journal on Scientific Computing 19(2).
    """
    points, weights = (part.to(factor) for part in _rule(factor.shape[-1]))
    moves = factor @ points.mT  # (b, K, s)
    middle = log_proba.unsqueeze(-1)
    gaps = ((middle + moves).logsumexp(-2) + (middle - moves).logsumexp(-2)) / 2
    variances = factor.square().sum(-1)
    widest = variances.topk(min(_N_WIDEST, variances.shape[-1]), -1).indices  # (b, r)
    own, spread = log_proba.gather(-1, widest), variances.gather(-1, widest)
    moved = moves.gather(-2, widest.unsqueeze(-1).expand(-1, -1, moves.shape[-1]))
    gaps = gaps - (_alone(own, moved) + _alone(own, -moved)).sum(-2) / 2
    average = _alone_on_average(own, spread) + (gaps @ weights).unsqueeze(-1)
    if factor.shape[-1] <= _MAX_DIRECTIONS:
        return average
    # what the curvature at the mean has beyond that of the widest alone
    proba, share = log_proba.exp(), own.exp() * (1 - own.exp())
    bends = _variance(proba, moves) - (share.unsqueeze(-1) * moved**2).sum(-2)  # (b, s)
    known = _variance(proba, factor).sum(-1, keepdim=True)
    known = known - (share * spread).sum(-1, keepdim=True)
    return average + _regressed(gaps, bends / 2, known / 2, weights)


def _alone(log_proba: Tensor, moves: Tensor) -> Tensor:
    """Change of logsumexp by that of one logit: (b, r), (b, r, s) -> (b, r, s)."""
    own = log_proba.unsqueeze(-1)
    has_rest = own < -torch.finfo(own.dtype).tiny
    rest = (-own.where(has_rest, -own.new_ones(())).expm1()).log()
    # without one, the change is the move itself
    return torch.logaddexp(rest.where(has_rest, -torch.inf), own + moves)


def _alone_on_average(log_proba: Tensor, variances: Tensor) -> Tensor:
    """Expected change by each of r normal logits, summed: (b, r), (b, r) -> (b, 1)."""
    nodes = _NODES.to(variances)
    deviations = variances.clamp(min=_MIN_LIFT).sqrt().unsqueeze(-1)
    mass = (-(nodes**2) / 2).softmax(-1)
    return (_alone(log_proba, deviations * nodes) @ mass).sum(-1, keepdim=True)


def _regressed(gaps: Tensor, bends: Tensor, known: Tensor, weights: Tensor) -> Tensor:
    """What control variates (b, s) of known mean add to a weighted average, (b, 1)."""
    # in units in which squares neither overflow nor vanish, nor those of derivatives
    unit = known.clamp(min=_MIN_UNIT)
    expected, bends = known / unit, bends / unit
    missing = expected - (bends @ weights).unsqueeze(-1)
    deviations = bends - expected + missing
    spread = unit * (deviations**2 @ weights).unsqueeze(-1)
    spread = spread.clamp(min=_MIN_UNIT)
    shared = (deviations * gaps @ weights).unsqueeze(-1)
    slope = shared.clamp(min=0).minimum(spread) / spread
    return slope * missing * unit


def _variance(proba: Tensor, columns: Tensor) -> Tensor:
    """Variance of each column (b, K, s) under class probabilities, (b, s)."""
    p = proba.unsqueeze(-1)
    mean = (p * columns).sum(-2, keepdim=True)
    return (p * (columns - mean) ** 2).sum(-2)


@lru_cache(maxsize=32)
def _rule(dim: int) -> tuple[Tensor, Tensor]:
    """Points (s, d), to be taken with both signs, and their weights (s,)."""
    generator = torch.Generator().manual_seed(0)
    n_bases = max(1, math.ceil(_MIN_DIRECTIONS / dim))
    columns = min(dim, _MAX_DIRECTIONS)
    normal = torch.randn(n_bases, dim, columns, generator=generator).double()
    directions = torch.linalg.qr(normal)[0].mT.reshape(-1, dim)
    # Golub and Welsch: nodes of generalised Gauss-Laguerre quadrature
    i = torch.arange(3 if dim <= _MAX_DIM_OF_THREE else 2).double()
    beside = (i[1:] * (i[1:] + dim / 2 - 1)).sqrt()
    matrix = torch.diag(2 * i + dim / 2) + beside.diag(1) + beside.diag(-1)
    nodes, vectors = torch.linalg.eigh(matrix)
    points = (2 * nodes).sqrt()[:, None, None] * directions
    weights = (vectors[0] ** 2).repeat_interleave(len(directions)) / len(directions)
    return points.reshape(-1, dim), weights


def _centre_mean(mean: Tensor) -> Tensor:
    """``Cμ`` in float64."""
    mean = mean.double().clamp(-MAX_LOGIT, MAX_LOGIT)
    return mean - mean.mean(-1, keepdim=True)


def _is_rounding(variances: Tensor, cov: Tensor) -> Tensor:
    """Whether the centred variances are only rounding of cov: (b, 1)."""
    largest = cov.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True).double()
    rounding = 16 * torch.finfo(cov.dtype).eps * largest
    return variances.abs().amax(-1, keepdim=True) <= rounding
