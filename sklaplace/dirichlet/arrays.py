"""Convert and check arrays and tensors, and limit concentrations ``α``."""

import math
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Array = TypeVar("Array", Tensor, np.ndarray)

# Maximum total concentration. At this total, the uncertainty is negligible. Above it,
# differences of digamma functions and Beta quantiles lose all significant digits.
MAX_TOTAL = 1e9
# Minimum concentration, which keeps 1/α, 1/α² and log α finite.
MIN_CONCENTRATION = 1e-100
# The sum of a thousand float32 probabilities differs from one by about 1e-6.
_SUM_TOLERANCE = 1e-4
# Negative variances smaller than this fraction of the largest variance are treated as
# rounding errors.
_MAX_NEGATIVE_SHARE = 1e-3


def as_tensor(array: Tensor | np.ndarray) -> Tensor:
    """Convert values to a floating-point tensor; copy arrays."""
    if not isinstance(array, Tensor):
        # a writable copy with the byte order and strides that torch supports
        native = np.asarray(array).dtype.newbyteorder("=")
        array = torch.from_numpy(np.array(array, native, order="C"))
    return array if array.is_floating_point() else array.double()


def like(result: Tensor, example: Array) -> Array:
    """Convert the result to the type of the example, a tensor or an array."""
    return result if isinstance(example, Tensor) else result.numpy()


def check_shapes(mean: Tensor, cov: Tensor, hint: str = "") -> None:
    """Raise ValueError unless cov has shape (..., K, K) and mean (..., K)."""
    if mean.ndim == 0:
        raise ValueError("mean is a scalar. Pass logits of shape (..., K).")
    wanted = (*mean.shape, mean.shape[-1])
    if cov.shape != wanted:
        raise ValueError(
            f"cov has shape {tuple(cov.shape)}, but mean has shape "
            f"{tuple(mean.shape)}. cov must have shape {wanted}{hint}."
        )


def check_finite(name: str, values: Tensor) -> None:
    """Raise ValueError unless all values are finite."""
    if not bool(values.isfinite().all()):
        raise ValueError(
            f"{name} has entries that are not finite. Check its computation for "
            "overflow and division by zero."
        )


def check_variances(variances: Tensor, largest: Tensor) -> None:
    """Raise ValueError for negative or non-finite variances.

    Negative variances (..., K) count as rounding errors, and are allowed, if they are
    small relative to ``largest`` (..., 1).
    """
    check_finite("cov", variances)
    if bool((variances < -_MAX_NEGATIVE_SHARE * largest.abs()).any()):
        raise ValueError(
            "cov is not positive semidefinite. Pass symmetric covariances of the "
            "logits, without negative eigenvalues."
        )


def check_alpha(alpha: Tensor | np.ndarray) -> Tensor:
    """Return float64 concentrations; raise ValueError unless all are positive.

    The concentrations are limited to ``[1e-100, 1e100]``.
    """
    concentrations = as_tensor(alpha).double()
    if concentrations.ndim == 0:
        raise ValueError("alpha is a scalar. Pass concentrations of shape (..., K).")
    positive = (concentrations > 0) & concentrations.isfinite()
    if not bool(positive.all()):
        value = concentrations[~positive][0].item()
        raise ValueError(
            f"alpha contains {value}. Concentrations must be positive and finite."
        )
    # the limits keep totals, their squares and their inverses finite
    return concentrations.clamp(MIN_CONCENTRATION, 1 / MIN_CONCENTRATION)


def check_proba(proba: Tensor | np.ndarray, alpha: Tensor) -> Tensor:
    """Return float64 probabilities; raise ValueError for invalid values or shapes.

    ``alpha`` determines the number of classes and the device.
    """
    p = as_tensor(proba).double().to(alpha.device)
    if p.ndim == 0 or p.shape[-1] != alpha.shape[-1]:
        raise ValueError(
            f"proba has shape {tuple(p.shape)}, but alpha has shape "
            f"{tuple(alpha.shape)}. Pass one probability per concentration."
        )
    sums = p.sum(-1)
    if not bool(((p >= 0).all(-1) & ((sums - 1).abs() <= _SUM_TOLERANCE)).all()):
        raise ValueError(
            "proba has negative entries or rows that do not sum to one. Pass "
            "non-negative entries, and divide each row by its sum."
        )
    return p


def capped(log_alpha: Tensor) -> Tensor:
    """Return concentrations ``α``, from ``log α``, with a total of at most `MAX_TOTAL`.

    A larger total is reduced without changing the mean.
    """
    log_total = log_alpha.logsumexp(-1, keepdim=True).clamp(max=math.log(MAX_TOTAL))
    return (log_alpha.softmax(-1) * log_total.exp()).clamp(min=MIN_CONCENTRATION)
