"""Laplace bridge between Gaussians over logits and Dirichlet distributions.

The bridge matches ``N(μ, Σ)`` with a Dirichlet of concentrations ``α``, by a Laplace
approximation in the softmax basis:
``α_k = (1 − 2/K + e^{μ_k} Σ_l e^{−μ_l} / K²) / Σ_kk``.
"""

import math

import torch
from torch import Tensor

from sklaplace.core.checks import check_option
from sklaplace.dirichlet import arrays
from sklaplace.dirichlet.arrays import Array, like
from sklaplace.dirichlet.logits import MAX_LOGIT, centre, centred_moments

# For smaller variances, the total is far above MAX_TOTAL for any mean.
_MIN_VARIANCE = 1e-200

NORMS = "guarded", "published"
"""Variance corrections: Σ is divided by ``c = mean_k Σ_kk / √(K/2)``.

``"guarded"`` divides by at least one.
"""


def laplace_bridge(
    mean: Array, cov: Array, *, project: bool = True, norm: str | None = None
) -> Array:
    """Compute Dirichlet concentrations by the Laplace bridge from Gaussian logits.

    This is the fastest approximation. Prefer it if speed matters more than accuracy.
    The mean does not depend on the scale of the covariance; only the total
    concentration does. For more than two classes, the mean does not converge to the
    softmax, and the most probable class may change. If variances differ much between
    classes, the bridge is overconfident in the class with the smallest variance.
    `kl_projection` has none of these defects.

    Read more in the :ref:`User Guide <dirichlet>`.

    Parameters
    ----------
    mean : Tensor or ndarray of shape (..., K)
        Means of the logits.
    cov : Tensor or ndarray of shape (..., K, K) or (..., K)
        Covariances of the logits, symmetric positive semidefinite. With
        ``project=False``, variances are also allowed.
    project : bool, default=True
        Whether to first condition the logits on a sum of zero, as MacKay (1998) does.
        On this plane the bridge is exact. Conditioning changes the distribution of the
        probabilities unless all logits have equal variances and covariances. Centring
        (see `sklaplace.dirichlet.logits.centre`) does not change this distribution, and
        ``predict_dirichlet`` uses centring. ``project`` does not change centred
        Gaussians. The published examples use neither.
    norm : {'guarded', 'published'} or None, default=None
        Correction for large variances: with ``c = mean_k Σ_kk / √(K/2)``, the mean is
        divided by ``√c`` and the covariance by ``c``. ``'published'`` always applies
        the correction, which makes predictions more confident if ``c < 1``.
        ``'guarded'`` applies it only if ``c > 1``.

    Returns
    -------
    Tensor or ndarray of shape (..., K)
        Positive concentrations, float64, as an array if ``mean`` is an array. Totals
        above 1e9 are reduced to 1e9 without changing the mean. A single class has
        concentration one.

    Raises
    ------
    ValueError
        If ``norm`` is unknown, shapes are inconsistent, values are not finite, or
        variances are negative.

    See Also
    --------
    kl_projection : Closest Dirichlet.
    inverse_bridge : From a Dirichlet to a Gaussian.

    Notes
    -----
    Costs O(K²) per sample for the row sums of ``cov``, or O(K) without ``project``. The
    computation is in log space. The result is finite for all finite inputs below 1e300,
    including zero, singular and huge covariances. Variances below the rounding error of
    ``cov`` are clamped to this error.

    References
    ----------
    MacKay (1998), "Choice of basis for Laplace approximation".
    Hobbhahn, Kristiadi, Hennig (2022), "Fast predictive uncertainty for
    classification with Bayesian deep networks", UAI (the map and the
    correction).

    Examples
    --------
    >>> import numpy as np
    >>> from sklaplace.dirichlet import laplace_bridge
    >>> laplace_bridge(np.zeros(3), 0.1 * np.eye(3)).round(2)
    array([10., 10., 10.])
    """
    if norm is not None:
        check_option("norm", norm, NORMS, ", or None")
    logits, covariances = arrays.as_tensor(mean), arrays.as_tensor(cov)
    is_diagonal = covariances.shape == logits.shape and not project
    if not is_diagonal:
        arrays.check_shapes(logits, covariances, ", or variances and project=False")
    if logits.shape[-1] == 1 or logits.numel() == 0:
        return like(torch.ones_like(logits, dtype=torch.float64), mean)
    rounding = torch.finfo(covariances.dtype).eps
    variances = covariances if is_diagonal else covariances.diagonal(dim1=-2, dim2=-1)
    variances = variances.double()  # (..., K); covariances are not copied
    largest = variances.amax(-1, keepdim=True)
    arrays.check_finite("mean", logits)
    arrays.check_variances(variances, largest)
    lowest = (8 * rounding * largest).clamp(min=_MIN_VARIANCE)
    logits = logits.double().clamp(-MAX_LOGIT, MAX_LOGIT)
    if project:
        logits, variances = _project(logits, covariances, rounding)
        arrays.check_variances(variances, largest)
    variances = variances.maximum(lowest)
    if norm is not None:
        c = variances.mean(-1, keepdim=True) / math.sqrt(logits.shape[-1] / 2)
        divisor = c.clamp(min=1) if norm == "guarded" else c
        logits, variances = logits / divisor.sqrt(), variances / divisor
    return like(_concentrations(logits, variances), mean)


def centred_bridge(mean: Tensor, cov: Tensor, norm: str | None = None) -> Tensor:
    """Apply `laplace_bridge` to the centred Gaussian; cov is (b, K, K) or (b, K)."""
    return laplace_bridge(*centred_moments(mean, cov), project=False, norm=norm)


def inverse_bridge(alpha: Array) -> tuple[Array, Array]:
    """Compute the Gaussian over logits whose Laplace bridge is a given Dirichlet.

    Read more in the :ref:`User Guide <dirichlet>`.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.

    Returns
    -------
    mean : Tensor or ndarray of shape (..., K)
        Means of the logits, summing to zero, float64.
    cov : Tensor or ndarray of shape (..., K, K)
        Covariances of the logits, with rows summing to zero, float64.

    Raises
    ------
    ValueError
        If a concentration is not positive.

    See Also
    --------
    laplace_bridge : From a Gaussian to a Dirichlet.

    Notes
    -----
    Costs O(K²) per sample. ``laplace_bridge`` is the inverse up to rounding, if the
    total of ``alpha`` is at most 1e9.

    References
    ----------
    MacKay (1998), "Choice of basis for Laplace approximation".

    Examples
    --------
    >>> import numpy as np
    >>> from sklaplace.dirichlet import inverse_bridge, laplace_bridge
    >>> laplace_bridge(*inverse_bridge(np.array([6.0, 3.0, 1.0]))).round(6)
    array([6., 3., 1.])
    """
    concentrations = arrays.check_alpha(alpha)
    mean, cov = centre(concentrations.log(), (1 / concentrations).diag_embed())
    return like(mean, alpha), like(cov, alpha)


def _project(mean: Tensor, cov: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """Condition on a sum of zero; return mean and variances, (..., K) each."""
    row_sums = cov.sum(-1, dtype=torch.float64)  # Σ1
    total = row_sums.sum(-1, keepdim=True)  # 1ᵀΣ1
    variances = cov.diagonal(dim1=-2, dim2=-1).double()
    # rounding error of a sum of K² entries whose exact value is zero
    negligible = 8 * cov.shape[-1] ** 2 * rounding * variances.amax(-1, keepdim=True)
    on_plane = total <= negligible
    gain = (row_sums / total.masked_fill(on_plane, 1)).masked_fill(on_plane, 0)
    return mean - gain * mean.sum(-1, keepdim=True), variances - gain * row_sums


def _concentrations(mean: Tensor, variances: Tensor) -> Tensor:
    """Compute the bridge for K > 1 with bounded total, (..., K)."""
    n_classes = mean.shape[-1]
    mean = mean - mean.mean(-1, keepdim=True)
    constant = math.log1p(-2 / n_classes) if n_classes > 2 else -math.inf
    ratio = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(n_classes)
    log_scaled = torch.logaddexp(ratio.new_tensor(constant), ratio)
    return arrays.capped(log_scaled - variances.log())
