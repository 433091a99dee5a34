"""Conversion and checks of arrays and tensors, and bounds on concentrations ``α``."""

import math
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Array = TypeVar("Array", Tensor, np.ndarray)

# Maximum total concentration, at which uncertainty is negligible. For larger totals,
# differences of digamma functions and Beta quantiles lose all digits.
MAX_TOTAL = 1e9
# Keeps 1/α, its square and log α finite.
MIN_CONCENTRATION = 1e-100
# Sums of a thousand float32 probabilities differ from one by about 1e-6.
_SUM_TOLERANCE = 1e-4
# Negative variances below this fraction of the largest count as rounding errors.
_NEGATIVE = 1e-3


def as_tensor(array: Tensor | np.ndarray) -> Tensor:
    """Return a floating-point tensor; arrays are copied."""
    if not isinstance(array, Tensor):
        # a writable copy with the byte order and strides that torch supports
        native = np.asarray(array).dtype.newbyteorder("=")
        array = torch.from_numpy(np.array(array, native, order="C"))
    return array if array.is_floating_point() else array.double()


def like(result: Tensor, example: Array) -> Array:
    """Return the result as a tensor or an array, like the example."""
    return result if isinstance(example, Tensor) else result.numpy()


def check_shapes(mean: Tensor, cov: Tensor, hint: str = "") -> None:
    """Raise ValueError unless the shapes are cov (..., K, K) and mean (..., K)."""
    if mean.ndim == 0:
        raise ValueError("mean is a scalar. Give logits of shape (..., K).")
    wanted = (*mean.shape, mean.shape[-1])
    if cov.shape != wanted:
        raise ValueError(
            f"cov has shape {tuple(cov.shape)}, but mean has shape "
            f"{tuple(mean.shape)}. Give cov the shape {wanted}{hint}."
        )


def check_finite(name: str, values: Tensor) -> None:
    """Raise ValueError unless all values are finite."""
    if not bool(values.isfinite().all()):
        raise ValueError(
            f"{name} has entries that are not finite. Look for divisions by zero and "
            "overflow in its computation."
        )


def check_variances(variances: Tensor, largest: Tensor) -> None:
    """Raise ValueError for variances that are not finite, or negative.

    Negative variances (..., K) are allowed up to rounding errors, relative to the
    variance ``largest`` (..., 1).
    """
    check_finite("cov", variances)
    if bool((variances < -_NEGATIVE * largest.abs()).any()):
        raise ValueError(
            "cov is not positive semidefinite. Give covariances of logits, symmetric, "
            "without negative eigenvalues."
        )


def check_alpha(alpha: Tensor | np.ndarray) -> Tensor:
    """Return concentrations, float64; raise ValueError unless all are positive."""
    concentrations = as_tensor(alpha).double()
    if concentrations.ndim == 0:
        raise ValueError("alpha is a scalar. Give concentrations of shape (..., K).")
    positive = (concentrations > 0) & concentrations.isfinite()
    if not bool(positive.all()):
        value = concentrations[~positive][0].item()
        raise ValueError(
            f"alpha has the entry {value}. Concentrations are positive and finite."
        )
    # totals, their squares and inverses are also finite
    return concentrations.clamp(MIN_CONCENTRATION, 1 / MIN_CONCENTRATION)


def check_proba(proba: Tensor | np.ndarray, alpha: Tensor) -> Tensor:
    """Return probabilities, float64; raise ValueError for invalid values or shapes."""
    p = as_tensor(proba).double().to(alpha.device)
    if p.ndim == 0 or p.shape[-1] != alpha.shape[-1]:
        raise ValueError(
            f"proba has shape {tuple(p.shape)}, but alpha has shape "
            f"{tuple(alpha.shape)}. Give one probability for each concentration."
        )
    sums = p.sum(-1)
    if not bool(((p >= 0).all(-1) & ((sums - 1).abs() <= _SUM_TOLERANCE)).all()):
        raise ValueError(
            "proba has rows that are negative somewhere or do not sum to one. Divide "
            "them by their sums."
        )
    return p


def capped(log_alpha: Tensor) -> Tensor:
    """Return concentrations (..., K) with total up to `MAX_TOTAL` and the same mean."""
    log_total = log_alpha.logsumexp(-1, keepdim=True).clamp(max=math.log(MAX_TOTAL))
    return (log_alpha.softmax(-1) * log_total.exp()).clamp(min=MIN_CONCENTRATION)
