"""Gaussians ``N(μ, Σ)`` over logits: centring, factors and expected logsumexp.

The softmax is invariant to a shift common to all logits. Its distribution therefore
depends only on the centred Gaussian with mean ``m = Cμ`` and covariance ``S = CΣC``,
where ``C = I − 11ᵀ/K``.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor
from torch.nn.functional import pad

from sklaplace.dirichlet.arrays import check_finite, check_variances

# Larger logits are clamped to avoid overflow in sums; their softmax is one-hot anyway.
MAX_LOGIT = 1e100
# Jitter added to diagonals, as a fraction of the largest variance, and minimum of this
# variance. The minimum keeps the pivots of a zero covariance positive.
_JITTER, _MIN_VARIANCE = 1e-10, 1e-200
# Gaps below this value are treated as zero.
_MIN_GAP = 1e-100
# Memory for the tensors of a chunk of samples. Larger chunks do not fit into the cache
# of a core and take 50 % longer.
_CHUNK_BYTES = 2**21
# Points of `logsumexp_gap`: minimum and maximum numbers of directions, and maximum
# dimension with three radii instead of two.
_MIN_DIRECTIONS, _MAX_DIRECTIONS, _MAX_DIM_OF_THREE_RADII = 8, 64, 8
# Number of points of `gap_of_many`, without their negatives.
_N_STRATA = 64
# Number of logits with the largest variances that are integrated separately, and nodes
# of the trapezoidal rule for these one-dimensional integrals. Beyond ±8, the normal
# density is below 1e-14.
_N_WIDEST = 2
# Logits whose variances differ by less than this fraction are chosen by probability.
_TIE = 1e-6
_NORMAL_NODES = torch.linspace(-8, 8, 33, dtype=torch.float64)


def centre(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Remove the direction of the logits to which the softmax is invariant.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K)
        Symmetric positive semidefinite covariances of the logits.

    Returns
    -------
    mean : Tensor of shape (b, K)
        Float64 centred means ``Cμ``. Each row sums to zero.
    cov : Tensor of shape (b, K, K)
        Float64 centred covariances ``CΣC``. Each row and each column sums to zero.

    Notes
    -----
    The cost is O(K²) per sample. The all-ones direction has no curvature and keeps its
    prior variance, which can exceed all other variances by orders of magnitude. If
    ``CΣC`` consists only of rounding errors, it is set to zero.
    """
    rows = cov.mean(-1, keepdim=True, dtype=torch.float64)  # (b, K, 1)
    columns = cov.mean(-2, keepdim=True, dtype=torch.float64)  # (b, 1, K)
    # CΣC: subtract the means of rows and columns, and add the mean of all entries
    centred = cov.double() - rows
    centred -= columns
    centred += rows.mean(-2, keepdim=True)
    is_rounding = _is_rounding(centred.diagonal(dim1=-2, dim2=-1), cov)  # (b, 1)
    return centred_mean(mean), centred.masked_fill_(is_rounding.unsqueeze(-1), 0)


def centred_mean(mean: Tensor) -> Tensor:
    """Return ``Cμ`` in float64."""
    mean = mean.double().clamp(-MAX_LOGIT, MAX_LOGIT)
    return mean - mean.mean(-1, keepdim=True)


def centred_moments(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 centred means and variances, each of shape (b, K).

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances of centred logits.

    Notes
    -----
    The cost is O(K²) time and O(K) memory per sample.
    """
    if cov.ndim == mean.ndim:  # variances, which are those of centred logits
        return centred_mean(mean), cov.double()
    rows = cov.mean(-1, dtype=torch.float64)  # (b, K)
    # only the diagonal of CΣC
    diagonal = cov.diagonal(dim1=-2, dim2=-1)
    variances = diagonal - 2 * rows + rows.mean(-1, keepdim=True)
    return centred_mean(mean), variances.masked_fill(_is_rounding(variances, cov), 0)


def independent_variances(centred: Tensor) -> Tensor:
    """Return variances ``d ≥ 0`` of independent logits with given centred variances.

    Parameters
    ----------
    centred : Tensor of shape (b, K)
        Diagonal of ``C diag(d) C``, where ``C = I − 11ᵀ/K`` and K > 1.

    Returns
    -------
    Tensor of shape (b, K)
        Variances, which are exact unless a negative variance is replaced by zero.
    """
    n_classes = centred.shape[-1]
    if n_classes == 2:  # only the sum is identifiable
        return 2 * centred
    # centred_k = (1 − 2/K) d_k + Σ_j d_j / K², so its sum is (1 − 1/K) Σ_j d_j
    total = centred.sum(-1, keepdim=True)
    variances = (n_classes * centred - total / (n_classes - 1)) / (n_classes - 2)
    return variances.clamp(min=0)


def centred_factor(cov: Tensor, uncentred: Tensor | None = None) -> Tensor:
    """Return a factor of a centred covariance.

    Parameters
    ----------
    cov : Tensor of shape (b, K, K)
        Float64 centred covariances.
    uncentred : Tensor of shape (b, K, K), optional
        Covariances before centring, which determine the size of rounding errors.

    Returns
    -------
    Tensor of shape (b, K, K - 1)
        Factor ``F``, where ``F Fᵀ`` is the covariance.

    Raises
    ------
    ValueError
        If a covariance is not finite or not positive semidefinite.

    Notes
    -----
    The factor is a Cholesky factor for all classes except the last. The last logit is
    the negative sum of the other logits. Jitter on the diagonal makes singular matrices
    factorisable, and makes the factor a smooth function of the covariance. If the
    jitter is too small, for example for singular matrices rounded to single precision,
    the factor is computed from the eigenvectors.
    """
    # The last row of the factor follows from the others. A variable for the jittered
    # matrix would keep it in memory.
    factor, failed = torch.linalg.cholesky_ex(_jittered(cov))
    if bool(failed.any()):
        rows = failed.nonzero().squeeze(-1)  # samples with singular covariances
        leading = cov[rows, :-1, :-1]
        uncentred = cov if uncentred is None else uncentred
        # rounding errors of eigenvalues grow with the size of the matrix
        noise = leading.shape[-1] * _rounding(uncentred[rows])
        lower = _semidefinite_cholesky(leading, noise)
        factor = factor.index_copy(0, rows, lower)
    return _with_last_row(factor)


def unrolled_factor(cov: Tensor, uncentred: Tensor) -> Tensor:
    """Return `centred_factor` column by column, by operators that ONNX has.

    Pivots that rounding made negative are replaced by a small number.
    """
    # Cholesky: each column's outer product is subtracted from the rest of the matrix
    rest, columns = _jittered(cov), list[Tensor]()
    for j in range(rest.shape[-1]):
        column = rest[:, j:, j] / rest[:, j : j + 1, j].clamp(min=_MIN_VARIANCE).sqrt()
        columns.append(pad(column, (j, 0)))
        rest = rest - columns[-1].unsqueeze(2) * columns[-1].unsqueeze(1)
    return _with_last_row(torch.stack(columns, -1))


def _jittered(cov: Tensor) -> Tensor:
    """Return covariances without the last class, with jitter on the diagonal.

    Centred logits sum to zero, so the last class is redundant. The jitter keeps a
    singular covariance positive definite in spite of rounding.
    """
    leading = cov[:, :-1, :-1]
    largest = cov.diagonal(dim1=-2, dim2=-1).amax(-1)
    jitter = _JITTER * largest.clamp(min=_MIN_VARIANCE)
    identity = torch.eye(leading.shape[-1], dtype=cov.dtype, device=cov.device)
    return leading + jitter[:, None, None] * identity


def _with_last_row(factor: Tensor) -> Tensor:
    """Append the row of the last class, with which each column sums to zero."""
    return torch.cat([factor, -factor.sum(-2, keepdim=True)], -2)


def _semidefinite_cholesky(cov: Tensor, noise: Tensor) -> Tensor:
    """Return the Cholesky factor (b, k, k) after setting negative eigenvalues to zero.

    Negative eigenvalues count as rounding errors if not below ``-noise``, (b, 1).
    """
    check_finite("cov", cov)
    values, vectors = torch.linalg.eigh(cov)
    # eigenvalues ascend, so the last is the largest
    check_variances(values + noise, values[:, -1:])
    # A square root R with Σ = R Rᵀ becomes triangular by a QR decomposition of Rᵀ,
    # whose second factor is upper triangular.
    sqrt = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    lower = torch.linalg.qr(sqrt.mT)[1].mT
    # a Cholesky factor has a positive diagonal, but a QR decomposition need not
    signs = torch.where(lower.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return lower * signs.unsqueeze(-2)


def chunks(mean: Tensor, cov: Tensor, n_points: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of samples that fit into a core's cache.

    Parameters
    ----------
    mean, cov : Tensor of shape (b, K), and (b, K, K) or (b, K)
        One Gaussian per sample, with covariances or variances.
    n_points : int
        Number of points at which each sample is evaluated.
    """
    sample_bytes = 8 * (n_points * mean.shape[-1] + cov[:1].numel())  # float64
    # room for two sets of tensors, such as logits and their softmax
    size = max(1, _CHUNK_BYTES // (2 * sample_bytes))
    return zip(torch.split(mean, size), torch.split(cov, size), strict=True)


def logsumexp_gap(log_proba: Tensor, factor: Tensor) -> Tensor:
    """Compute the Jensen gap ``E[logsumexp(f)] − logsumexp(E[f])`` of Gaussian logits.

    Parameters
    ----------
    log_proba : Tensor of shape (b, K)
        Mean of the logits minus its ``logsumexp``.
    factor : Tensor of shape (b, K, d)
        Factor ``F``, where ``F Fᵀ`` is the covariance of the logits.

    Returns
    -------
    Tensor of shape (b, 1)
        Jensen gap, which is non-negative up to rounding because logsumexp is convex.

    Notes
    -----
    The gap is computed by a spherical-radial rule with points ``f = log p ± r_j F q``.
    The nodes ``r_j²/2`` come from Gauss-Laguerre quadrature, which is exact to degree
    three in ``r²`` for two radii, and to degree five for three radii. The directions
    ``q`` are orthonormal. In few dimensions, the directions come from several
    orthonormal bases. The bases are random with a fixed seed, because the axes of the
    factor would concentrate all points on a few classes. Random directions rarely reach
    a logit whose variance far exceeds all other variances, for example the logit of a
    class without training data. Therefore, the terms ``log(1 − p + p exp(f_k − m_k))``
    for the two logits with the largest variances are integrated in one dimension, and
    the rule handles the remainder. The rule is exact for quadratic functions. In many
    dimensions, it uses only some directions of a basis, and the second-order term,
    whose expectation is known, serves as a control variate.

    The rule has 36 points for ten classes, and never more than 256 points. Each point
    costs O(K²).

    References
    ----------
    Genz and Monahan (1998), "Stochastic integration rules for infinite regions", SIAM
    Journal on Scientific Computing 19(2).
    """
    # points (s, d) and weights (s,); each point also represents its negative
    points, weights = (values.to(factor) for values in _rule(factor.shape[-1]))
    variances = factor.square().sum(-1)
    # with a whole basis, the rule is exact for the second-order term
    curvature = None
    if factor.shape[-1] > _MAX_DIRECTIONS:
        curvature = _variance(log_proba.exp(), factor).sum(-1, keepdim=True)
    return _gap(log_proba, factor @ points.mT, weights, variances, curvature)


def gap_of_many(
    log_proba: Tensor, variances: Tensor, leading: Tensor, covariance: Tensor
) -> Tensor:
    """Compute the Jensen gap of `logsumexp_gap` for many classes, in O(K).

    The covariances among the leading classes are exact. All other logits are treated as
    independent of each other and of the leading logits.

    Parameters
    ----------
    log_proba : Tensor of shape (b, K)
        Mean of the logits minus its ``logsumexp``.
    variances : Tensor of shape (b, K)
        Variances of independent logits; those of leading classes are not used.
    leading : Tensor of shape (b, m)
        Indices of the leading classes, such as the most probable ones.
    covariance : Tensor of shape (b, m, m)
        Covariances among the leading classes.

    Returns
    -------
    Tensor of shape (b, 1)
        Jensen gap.

    Notes
    -----
    The points are a Latin hypercube. Each independent logit takes one random value from
    each of 128 equally probable intervals, so that sums of functions of single logits
    are nearly exact. The second-order term, whose expectation is known, serves as a
    control variate. The points belong to the indices of the classes: another order of
    the classes changes the total concentration by up to 3 %.
    """
    points, weights = (t.to(variances) for t in _latin_hypercube(variances.shape[1]))
    # the symmetric root R, with Σ = R R; unlike others, it hardly depends on rounding
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT
    # the points of the leading classes, (b, m, s), and shifts of all logits, (b, K, s)
    of_leading = points.mT[leading]
    shifts = variances.sqrt().unsqueeze(-1) * points.mT
    index = leading.unsqueeze(-1).expand_as(of_leading)
    shifts = shifts.scatter(1, index, root @ of_leading)
    variances = variances.scatter(1, leading, root.square().sum(-1))
    # half of Σ p_k Σ_kk − pᵀ Σ p is the second-order term
    proba = log_proba.exp()
    p = proba.gather(1, leading)
    of_mean = (proba**2 * variances).sum(1) - (p**2 * root.square().sum(-1)).sum(1)
    of_mean = of_mean + (p.unsqueeze(1) @ root).square().sum((1, 2))
    curvature = ((proba * variances).sum(1) - of_mean).unsqueeze(1)
    return _gap(log_proba, shifts, weights, variances, curvature)


def _gap(
    log_proba: Tensor,
    shifts: Tensor,
    weights: Tensor,
    variances: Tensor,
    curvature: Tensor | None,
) -> Tensor:
    """Return the Jensen gap (b, 1) from weighted points; see `logsumexp_gap`.

    Each point shifts the logits by ``shifts`` (b, K, s), and also represents its
    negative. ``curvature`` (b, 1) is the expected variance of the logits under the
    class probabilities, or None if the weighted points determine it exactly.
    """
    base = log_proba.unsqueeze(-1)  # its logsumexp is zero
    # mean change in logsumexp at each pair of opposite points, (b, s)
    gaps = ((base + shifts).logsumexp(-2) + (base - shifts).logsumexp(-2)) / 2
    # The r logits with the largest variances are integrated separately, and the rule
    # handles only the remaining gaps. These logits have the log-probabilities ``log_p``
    # (b, r), the variances ``wide`` (b, r) and the shifts ``shift`` (b, r, s). Among
    # equally large variances, rounding errors should not decide.
    preference = variances * (1 + _TIE * log_proba.exp())
    widest = preference.topk(min(_N_WIDEST, variances.shape[-1]), -1).indices  # (b, r)
    log_p, wide = log_proba.gather(-1, widest), variances.gather(-1, widest)
    shift = shifts.gather(-2, widest.unsqueeze(-1).expand(-1, -1, shifts.shape[-1]))
    gaps = gaps - (_gap_of_one(log_p, shift) + _gap_of_one(log_p, -shift)).sum(-2) / 2
    average = _expected_gaps_of_one(log_p, wide) + (gaps @ weights).unsqueeze(-1)
    if curvature is None:
        return average
    # Second-order term, without the separate terms of the widest logits. The slope
    # p (1 − p) of a sigmoid is the second derivative of such a term.
    proba, slope = log_proba.exp(), log_p.exp() * (1 - log_p.exp())
    quadratic = _variance(proba, shifts) - (slope.unsqueeze(-1) * shift**2).sum(-2)
    expected = curvature - (slope * wide).sum(-1, keepdim=True)
    return average + _correction(gaps, quadratic / 2, expected / 2, weights)


def _gap_of_one(log_proba: Tensor, shifts: Tensor) -> Tensor:
    """Return changes in logsumexp due to shifts: (b, r), (b, r, s) -> (b, r, s).

    A shift of one logit with probability p changes logsumexp by
    ``log(1 − p + p exp(shift))``.
    """
    log_p = log_proba.unsqueeze(-1)
    has_others = log_p < -torch.finfo(log_p.dtype).tiny
    # log(1 − p); where p = 1, another value keeps the gradient finite
    log_rest = (-log_p.where(has_others, -log_p.new_ones(())).expm1()).log()
    # if the other logits are negligible, the change equals the shift
    return torch.logaddexp(log_rest.where(has_others, -torch.inf), log_p + shifts)


def _expected_gaps_of_one(log_proba: Tensor, variances: Tensor) -> Tensor:
    """Sum the expected changes in logsumexp due to r normal logits; return (b, 1)."""
    nodes = _NORMAL_NODES.to(variances)
    deviations = variances.clamp(min=_MIN_VARIANCE).sqrt().unsqueeze(-1)
    mass = (-(nodes**2) / 2).softmax(-1)  # normal density, with a sum of one
    return (_gap_of_one(log_proba, deviations * nodes) @ mass).sum(-1, keepdim=True)


def _correction(
    gaps: Tensor, variates: Tensor, expected: Tensor, weights: Tensor
) -> Tensor:
    """Return the change (b, 1) of a weighted mean due to control variates.

    The mean is that of ``gaps`` (b, s) under ``weights`` (s,). The control variates
    (b, s) have the known expectation ``expected`` (b, 1). The error of their weighted
    mean times a regression slope corrects the mean of the gaps. The variates are the
    second-order part of the gaps, so the slope is about one. Limits of 0 and 1 prevent
    overcorrection if the few points determine it badly.
    """
    # scaled so that squares and their derivatives neither overflow nor vanish
    unit = expected.clamp(min=_MIN_GAP)
    expected, variates = expected / unit, variates / unit
    error = expected - (variates @ weights).unsqueeze(-1)
    deviations = variates - expected + error  # from their weighted mean
    variance = unit * (deviations**2 @ weights).unsqueeze(-1)
    variance = variance.clamp(min=_MIN_GAP)
    covariance = (deviations * gaps @ weights).unsqueeze(-1)
    # regression slope; ``unit`` cancels the remaining scale of the control variates
    slope = covariance.clamp(min=0).minimum(variance) / variance
    return slope * error * unit


def _variance(proba: Tensor, columns: Tensor) -> Tensor:
    """Return the variances (b, s) of columns (b, K, s) under class probabilities."""
    p = proba.unsqueeze(-1)
    mean = (p * columns).sum(-2, keepdim=True)
    return (p * (columns - mean) ** 2).sum(-2)


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # otherwise later gradients would fail
def _rule(dim: int) -> tuple[Tensor, Tensor]:
    """Return half of the symmetric points (s, d) of the rule, and weights (s,).

    The points combine all radii with all directions, which come from random orthonormal
    bases. In few dimensions there are several bases, and in many dimensions only a part
    of one.
    """
    generator = torch.Generator().manual_seed(0)
    n_bases = max(1, math.ceil(_MIN_DIRECTIONS / dim))
    n_columns = min(dim, _MAX_DIRECTIONS)
    # The first factor of the QR decomposition of a random matrix has orthonormal
    # columns. The dtype and device do not depend on torch's defaults.
    normal = torch.empty(n_bases, dim, n_columns, dtype=torch.float32, device="cpu")
    normal = normal.normal_(generator=generator).double()
    directions = torch.linalg.qr(normal)[0].mT.reshape(-1, dim)
    # Golub and Welsch: the eigenvalues are the nodes r²/2 of generalised Gauss-Laguerre
    # quadrature, and the squared first entries of the eigenvectors are the weights
    i = torch.arange(3 if dim <= _MAX_DIM_OF_THREE_RADII else 2).double()
    off_diagonal = (i[1:] * (i[1:] + dim / 2 - 1)).sqrt()
    matrix = torch.diag(2 * i + dim / 2)
    matrix += off_diagonal.diag(1) + off_diagonal.diag(-1)
    nodes, vectors = torch.linalg.eigh(matrix)
    points = (2 * nodes).sqrt()[:, None, None] * directions  # (radii, directions, d)
    # each radius divides its weight evenly among the directions
    weights = (vectors[0] ** 2).repeat_interleave(len(directions)) / len(directions)
    return points.reshape(-1, dim), weights


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _latin_hypercube(dim: int) -> tuple[Tensor, Tensor]:
    """Return half of a symmetric Latin hypercube of normal points (s, d), and weights.

    Each coordinate has one point in each of 2 s equally probable intervals.
    """
    rng, shape = np.random.default_rng(0), (_N_STRATA, dim)
    # one point in each interval below the median, in random order and with random signs
    intervals = rng.permuted(np.tile(np.arange(_N_STRATA), (dim, 1)), axis=1).T
    points = ndtri((intervals + rng.random(shape)) / (2 * _N_STRATA))
    signs = rng.choice([-1, 1], shape)
    weights = np.full(_N_STRATA, 1 / _N_STRATA)
    return torch.from_numpy(points * signs), torch.from_numpy(weights)


def _is_rounding(variances: Tensor, cov: Tensor) -> Tensor:
    """Return whether centred variances are only rounding errors of ``cov``, (b, 1)."""
    return variances.abs().amax(-1, keepdim=True) <= _rounding(cov)


def _rounding(cov: Tensor) -> Tensor:
    """Return the size of rounding errors of covariances, (b, 1).

    The factor 16 is a margin for the sums in `centre`.
    """
    largest = cov.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True).double()
    return 16 * torch.finfo(cov.dtype).eps * largest
