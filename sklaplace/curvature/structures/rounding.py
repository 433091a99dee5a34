"""Checks that variances are accurate despite rounding."""

from torch import Tensor

from sklaplace.curvature.structures.base import Precision

# maximum relative error of variances
MAX_VARIANCE_ERROR = 0.1
UNRESOLVED = (
    "prior_precision is so small relative to the curvature of the likelihood that the "
    "variances would be rounding errors. Use a larger prior_precision or sigma_noise, "
    "a float64 net, or hessian_structure='diag'. Scale X and y to unit variance. If "
    "the network fits all targets exactly, as with one sample, pass sigma_noise."
)
NOT_FINITE = (
    "The curvature is not finite: derivatives of the network overflow for some "
    "samples. Look for extreme values in X, and scale X (StandardScaler in a "
    "Pipeline)."
)


def check_finite(size: Tensor) -> None:
    """Raise ValueError if ``size``, such as a trace of the curvature, is not finite."""
    if not size.isfinite():
        raise ValueError(NOT_FINITE)


def variance_error(precision: Precision, eps: float) -> float:
    """Return a bound on the relative error of variances due to rounding.

    Parameters
    ----------
    precision : Precision
        Posterior precision ``P``.
    eps : float
        Relative rounding error of the Jacobian.

    Notes
    -----
    The error of a Cholesky decomposition depends on the condition number of ``P``
    scaled to a unit diagonal (Higham 2002, "Accuracy and stability of numerical
    algorithms", section 10.1). The bound is the maximum of ``Pᵢᵢ (P⁻¹)ᵢᵢ`` times the
    rounding error of ``H``. All variances are computed, unless the trace of ``H`` is so
    small that an O(P) bound is enough.
    """
    structure = precision.structure
    rounding = structure.rounding(eps)
    if not rounding:  # sums of squares, or small eigenvalues dropped
        return 0.0
    # diag P ≤ scale·tr H + δ, and posterior variances are at most prior variances 1/δ
    ratio = precision.scale * structure.trace() / precision.prior_precision.min()
    if rounding * (1 + ratio) <= MAX_VARIANCE_ERROR:
        return rounding * float(1 + ratio)
    diagonal = precision.scale * structure.hessian_diagonal() + precision.delta
    return rounding * float((diagonal * precision.variance()).max())
