"""Bisection in arrays, to the last digit."""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def mean(low: Array, high: Array) -> Array:
    """Return ``(low + high) / 2``, which does not overflow."""
    return low / 2 + high / 2


def first_where(
    is_reached: Callable[[Array], Array],
    low: Array,
    high: Array,
    middle: Callable[[Array, Array], Array] = mean,
) -> Array:
    """Return the smallest values at which a condition holds.

    Parameters
    ----------
    is_reached : callable
        Whether the condition holds, from values to booleans of their shape; it keeps
        holding at larger values.
    low, high : ndarray of one shape
        Values at which it does not hold, and values at which it does.
    middle : callable
        Returns values between two others, or one of these if there is none.

    Returns
    -------
    ndarray
        NaN where ``low`` or ``high`` is.

    Notes
    -----
    Ends when `middle` finds no further value between any two, which for the mean are
    neighbouring floating-point numbers.
    """
    while True:
        between = middle(low, high)
        if not ((low < between) & (between < high)).any():
            return high
        reached = is_reached(between)
        low, high = np.where(reached, low, between), np.where(reached, between, high)
