"""Options: checks of constructor values, with messages that say what to do."""

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import numpy as np


def listed(names: Iterable[str]) -> str:
    """Names in quotes, sorted, separated by commas."""
    return ", ".join(repr(name) for name in sorted(names))


def check_option(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Refuse a value that is not one of the allowed names."""
    allowed = list(allowed)
    if isinstance(value, str) and value in allowed:
        return
    close = get_close_matches(str(value), allowed, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"{name}={value!r} is not known. Choose one of {listed(allowed)}.{hint}"
    )


def check_positive(name: str, value: Any, tuners: Iterable[str] = ()) -> None:
    """Refuse what is neither positive and finite nor the name of a tuner."""
    tuners = list(tuners)
    names = f", or one of {listed(tuners)}" if tuners else ""
    if isinstance(value, str) and tuners:
        check_option(name, value, tuners)
        return
    wanted = f"Choose a positive number{' or array of them' if tuners else ''}{names}."
    if isinstance(value, (str, bool)) or value is None:
        raise ValueError(f"{name}={value!r} is not a positive number. {wanted}")
    try:
        numbers = np.asarray(value, dtype=float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r} is not a number. {wanted}") from error
    if numbers.size == 0 or not (np.isfinite(numbers) & (numbers > 0)).all():
        shown = value if numbers.ndim == 0 else f"array with minimum {numbers.min()}"
        raise ValueError(f"{name}={shown} is not positive and finite. {wanted}")


def check_count(name: str, value: Any) -> None:
    """Refuse what is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(
            f"{name}={value!r} is not a positive integer. Choose 1 or more."
        )


def check_fraction(name: str, value: Any) -> None:
    """Refuse what is not strictly between zero and one."""
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not 0 < float(value) < 1
    ):
        raise ValueError(
            f"{name}={value!r} is not between 0 and 1. Choose a share of the rows, "
            "such as 0.2."
        )
