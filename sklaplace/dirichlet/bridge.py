"""Laplace bridge between Gaussians over logits and Dirichlet distributions.

The bridge maps ``N(μ, Σ)`` to a Dirichlet with concentrations ``α``, by a Laplace
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

# Below this variance, the total far exceeds MAX_TOTAL for any mean.
_MIN_VARIANCE = 1e-200

NORMS = "guarded", "published"
"""Variance corrections, which divide Σ by ``c = mean_k Σ_kk / √(K/2)``.

``"guarded"`` divides by ``max(c, 1)``.
"""


def laplace_bridge(
    mean: Array, cov: Array, *, project: bool = True, norm: str | None = None
) -> Array:
    """Map Gaussian logits to a Dirichlet by the Laplace bridge.

    The Laplace bridge is the fastest approximation. Use it if speed matters more than
    accuracy. The scale of the covariance changes the total concentration, but not the
    mean of the Dirichlet. For more than two classes, the mean does not converge to the
    softmax of the mean logits as the covariance vanishes, and the most probable class
    may change. If variances differ strongly between classes, the bridge is
    overconfident in the class with the smallest variance. `kl_projection` avoids these
    problems.

    Read more in the :ref:`User Guide <dirichlet>`.

    Parameters
    ----------
    mean : Tensor or ndarray of shape (..., K)
        Means of the logits.
    cov : Tensor or ndarray of shape (..., K, K) or (..., K)
        Symmetric positive semidefinite covariances of the logits. With
        ``project=False``, variances are also accepted.
    project : bool, default=True
        Whether to condition the logits on a sum of zero first, as in MacKay (1998). The
        bridge is exact for logits that sum to zero. Conditioning changes the
        distribution of the probabilities unless all logits have equal variances and
        covariances. Centring, as in ``predict_dirichlet``, does not change the
        distribution (see `sklaplace.dirichlet.logits.centre`). ``project`` has no
        effect on centred Gaussians. The published examples use neither conditioning nor
        centring.
    norm : {'guarded', 'published'} or None, default=None
        Correction for large variances, which divides the covariance by
        ``c = mean_k Σ_kk / √(K/2)`` and the mean by ``√c``. ``'published'`` always
        applies the correction, which makes predictions more confident if ``c < 1``.
        ``'guarded'`` applies the correction only if ``c > 1``.

    Returns
    -------
    Tensor or ndarray of shape (..., K)
        Positive float64 concentrations, as an array if ``mean`` is an array. Total
        concentrations above 1e9 are reduced to 1e9 without changing the mean. A single
        class has a concentration of one.

    Raises
    ------
    ValueError
        If ``norm`` is unknown, shapes are inconsistent, values are not finite, or
        variances are negative.

    See Also
    --------
    kl_projection : Closest Dirichlet.
    inverse_bridge : Map a Dirichlet to Gaussian logits.

    Notes
    -----
    The cost per sample is O(K²) for the row sums of ``cov``, or O(K) without
    ``project``. The bridge is computed in log space. The result is finite for all
    finite inputs below 1e300, including zero, singular and huge covariances. Variances
    below the rounding error of ``cov`` are replaced by this error.

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
    # the given dtype determines the rounding errors, even after conversion to float64
    eps = torch.finfo(covariances.dtype).eps
    variances = covariances if is_diagonal else covariances.diagonal(dim1=-2, dim2=-1)
    variances = variances.double()  # (..., K); covariances are not copied
    largest = variances.amax(-1, keepdim=True)
    arrays.check_finite("mean", logits)
    arrays.check_variances(variances, largest)
    # smaller variances are only rounding errors; 8 is a margin for several roundings
    lowest = (8 * eps * largest).clamp(min=_MIN_VARIANCE)
    logits = logits.double().clamp(-MAX_LOGIT, MAX_LOGIT)
    if project:
        logits, variances = _project(logits, covariances, eps)
        # conditioning can make variances negative if the covariance is indefinite
        arrays.check_variances(variances, largest)
    variances = variances.maximum(lowest)
    if norm is not None:
        c = variances.mean(-1, keepdim=True) / math.sqrt(logits.shape[-1] / 2)
        divisor = c.clamp(min=1) if norm == "guarded" else c
        logits, variances = logits / divisor.sqrt(), variances / divisor
    return like(_concentrations(logits, variances), mean)


def centred_bridge(mean: Tensor, cov: Tensor, norm: str | None = None) -> Tensor:
    """Apply `laplace_bridge` after centring; cov has shape (b, K, K) or (b, K)."""
    mean, variances = centred_moments(mean, cov)
    return laplace_bridge(mean, variances, project=False, norm=norm)


def inverse_bridge(alpha: Array) -> tuple[Array, Array]:
    """Map a Dirichlet to Gaussian logits by the inverse Laplace bridge.

    Read more in the :ref:`User Guide <dirichlet>`.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.

    Returns
    -------
    mean : Tensor or ndarray of shape (..., K)
        Float64 means of the logits, which sum to zero.
    cov : Tensor or ndarray of shape (..., K, K)
        Float64 covariances of the logits, whose rows sum to zero.

    Raises
    ------
    ValueError
        If a concentration is not positive.

    See Also
    --------
    laplace_bridge : Map Gaussian logits to a Dirichlet.

    Notes
    -----
    The cost is O(K²) per sample. If the total of ``alpha`` is at most 1e9,
    ``laplace_bridge`` recovers ``alpha`` up to rounding.

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


def _project(mean: Tensor, cov: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Condition logits on a sum of zero; return means and variances, (..., K) each.

    The conditional mean is ``μ − g 1ᵀμ``, and the conditional covariance is
    ``Σ − g (Σ1)ᵀ``, with the gain ``g = Σ1 / 1ᵀΣ1``. If the variance ``1ᵀΣ1`` of the
    sum is zero up to rounding, nothing changes. ``eps`` is the relative rounding error
    of ``cov``.
    """
    row_sums = cov.sum(-1, dtype=torch.float64)  # Σ1
    total = row_sums.sum(-1, keepdim=True)  # 1ᵀΣ1
    variances = cov.diagonal(dim1=-2, dim2=-1).double()
    # rounding error of a sum of K² entries whose exact value is zero; 8 is a margin
    negligible = 8 * cov.shape[-1] ** 2 * eps * variances.amax(-1, keepdim=True)
    is_fixed = total <= negligible
    gain = (row_sums / total.masked_fill(is_fixed, 1)).masked_fill(is_fixed, 0)
    return mean - gain * mean.sum(-1, keepdim=True), variances - gain * row_sums


def _concentrations(mean: Tensor, variances: Tensor) -> Tensor:
    """Compute the bridge for K > 1 classes, and limit the total concentration.

    The sum ``α_k Σ_kk = 1 − 2/K + e^{μ_k} Σ_l e^{−μ_l} / K²`` can overflow. Therefore,
    only its logarithm is computed, from the logarithms of ``1 − 2/K`` and of the last
    term.
    """
    n_classes = mean.shape[-1]
    # a common shift of the means cancels, and would only cost precision
    mean = mean - mean.mean(-1, keepdim=True)
    # 1 − 2/K is zero for two classes
    log_constant = math.log1p(-2 / n_classes) if n_classes > 2 else -math.inf
    log_term = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(n_classes)
    log_sum = torch.logaddexp(log_term.new_tensor(log_constant), log_term)
    return arrays.capped(log_sum - variances.log())
