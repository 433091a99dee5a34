"""Standardisation of the inputs of the noise model."""

import numpy as np
from numpy.typing import NDArray

from sklaplace.networks.default import center_and_scale

Array = NDArray[np.float64]

# Columns count as constant if their relative standard deviation is smaller.
ROUNDING = 1e-9


def standardisation(inputs: Array, weights: Array) -> tuple[Array, Array]:
    """Return each column's weighted mean and standard deviation (1 if constant)."""
    center, scale = center_and_scale(inputs, weights)
    return center, np.where(scale > ROUNDING * np.abs(center), scale, 1.0)
