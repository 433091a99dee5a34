"""Checks of constructor parameters, with messages that name the valid values."""

import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from sklearn import get_config
from torch import Tensor

from sklaplace.core.random import RandomState

# Function of an option's name and value. Raises an error if the value is invalid.
Check = Callable[[str, Any], object]


def listed(names: Iterable[str]) -> str:
    """Return the sorted names, quoted and separated by commas."""
    return ", ".join(repr(name) for name in sorted(names))


def check_option(
    name: str, value: object, allowed: Collection[str], hint: str = ""
) -> None:
    """Raise ValueError unless a value is allowed; ``hint`` extends the message."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"{name}={value!r} is not known. Choose one of {listed(allowed)}{hint}."
        )


def check_positive(name: str, value: object, *, scalar: bool = True) -> None:
    """Raise ValueError unless a value is positive and finite.

    With ``scalar=False``, the value may also be an array with at least one entry.
    Strings and booleans are refused, although numpy converts them to numbers.
    """
    kind = "a positive number" if scalar else "a positive number or array"
    # NaN and empty arrays stand for refused values, and fail the checks below
    try:
        numbers = np.asarray(np.nan if isinstance(value, (str, bool)) else value, float)
    except (TypeError, ValueError):
        numbers = np.empty(0)
    is_positive = numbers.size > 0 and (np.isfinite(numbers) & (numbers > 0)).all()
    if not is_positive or (scalar and numbers.ndim):
        raise ValueError(f"{name}={value!r} is not positive and finite. Choose {kind}.")


def check_count(name: str, value: Any, smallest: int = 1) -> int:
    """Return an integer; raise ValueError unless it is at least ``smallest``."""
    number = plain(value)
    if not _is_number(number, Integral) or number < smallest:
        raise ValueError(
            f"{name}={value!r} is not an integer of at least {smallest}. "
            f"Choose {smallest} or more."
        )
    return int(number)


def check_params(
    name: str, value: object, checks: Mapping[str, Check], owner: str
) -> None:
    """Raise an error for unknown options and for invalid values.

    Parameters
    ----------
    name : str
        Name of the parameter that contains the options, for messages.
    value : dict or None
        Values of the options. None means no options.
    checks : mapping
        The accepted options, each with the function that checks its value.
    owner : str
        What accepts the options, for messages.

    Raises
    ------
    TypeError
        If the value is not a dict.
    ValueError
        If an option is unknown. The checks of single values may raise other errors.
    """
    if value is None:
        return
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        raise TypeError(f"{name} is of type {kind}. Pass a dict, or None.")
    for key, setting in value.items():
        if key not in checks:
            accepted = f"It accepts {listed(checks)}." if checks else "It accepts none."
            raise ValueError(
                f"{name} has {key!r}, which {owner} does not accept. {accepted}"
            )
        checks[key](f"{name}[{key!r}]", setting)


def check_fraction(name: str, value: Any, hint: str) -> float:
    """Return a number; raise ValueError unless it is strictly between zero and one."""
    number = plain(value)
    if not _is_number(number) or not 0 < float(number) < 1:
        raise ValueError(f"{name}={value!r} is not between 0 and 1. {hint}")
    return float(number)


def check_below_one(name: str, value: Any) -> None:
    """Raise ValueError unless a value is at least zero and less than one."""
    if not _is_number(value) or not 0 <= float(value) < 1:
        hint = "Choose a small number, such as 1e-6."
        raise ValueError(f"{name}={value!r} is not a number in [0, 1). {hint}")


def plain(value: Any) -> Any:
    """Return a Python number for a NumPy number, or an array or tensor of shape ().

    Python numbers do not overflow, and torch accepts them everywhere. The values of a
    dict are converted, and any other value is returned unchanged.
    """
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return value.item() if getattr(value, "shape", None) == () else value


def _is_number(value: object, kind: type = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def as_levels(name: str, value: Any, hint: str) -> np.ndarray:
    """Return one or more fractions as a vector of floats, (n,).

    Raise ValueError unless all are strictly between zero and one.
    """
    try:
        levels = np.atleast_1d(value)
    except ValueError as error:  # ragged
        raise ValueError(f"{name}={value!r} is not a number. {hint}") from error
    if levels.size == 0 or levels.ndim != 1:
        raise ValueError(f"{name} has shape {levels.shape}, not (n,), n > 0. {hint}")
    for level in levels.tolist():
        check_fraction(name, level, hint)
    return levels.astype(float)


def check_unmasked(values: Any, name: str) -> None:
    """Raise ValueError for masked entries, because numpy would drop the mask.

    ``values`` may be an array, or a dict, list or tuple of arrays. Other values have no
    mask.
    """
    columns = values.values() if isinstance(values, Mapping) else values
    # any other value is checked as a whole
    columns = columns if isinstance(values, (list, tuple, Mapping)) else [values]
    if any(isinstance(c, np.ma.MaskedArray) and np.ma.is_masked(c) for c in columns):
        raise ValueError(
            f"{name} has masked entries. Pass {name}.filled(value), leave out these "
            f"samples, or impute {name}.filled(numpy.nan) (SimpleImputer)."
        )


def check_arrays(**arrays: object) -> None:
    """Raise an error for masked entries, or non-numpy arrays under array API dispatch.

    Under array API dispatch, scikit-learn expects results from the library of the
    inputs, but this package returns numpy arrays. Without dispatch, tensors are
    converted.
    """
    dispatches = get_config()["array_api_dispatch"]
    for name, value in arrays.items():
        check_unmasked(value, name)
        has_namespace = hasattr(value, "__array_namespace__")
        is_numpy = isinstance(value, np.ndarray | np.generic)
        # tensors have no `__array_namespace__`
        is_foreign = isinstance(value, Tensor) or (has_namespace and not is_numpy)
        if dispatches and is_foreign:
            kind = f"{type(value).__module__}.{type(value).__name__}"
            raise TypeError(
                f"{name} is of type {kind}, and array_api_dispatch is on, but "
                "sklaplace's estimators compute with and return numpy arrays. Pass a "
                f"numpy array, such as {name}.numpy(force=True) for a torch tensor, or "
                "call sklearn.set_config(array_api_dispatch=False) to convert tensors "
                "automatically."
            )


@contextmanager
def naming(**arguments: str) -> Iterator[None]:
    """Make error messages name the arguments that the user passed.

    ``naming(X="X_val")`` replaces X with X_val in messages that do not mention X_val.
    Messages without X, such as some scikit-learn messages, get the prefix X_val.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if type(error) not in (TypeError, ValueError):  # may hold more than a message
            raise
        message = str(error)
        # the message already has the name that the user knows
        if re.search(_any_of(arguments.values()), message):
            raise
        message, n_named = re.subn(
            _any_of(arguments), lambda m: arguments[m[0]], message
        )
        if not n_named:
            message = f"{' and '.join(arguments.values())}: {message}"
        raise type(error)(message) from error


def _any_of(names: Iterable[str]) -> str:
    """Return a pattern that matches each name as a word, but not as an attribute."""
    return rf"(?<![\w.])(?:{'|'.join(map(re.escape, names))})(?!\w)"


def as_seed(name: str, value: Any) -> int:
    """Return a seed for a private generator.

    An integer is returned unchanged, and a generator draws the seed. For None, each
    call returns a new seed of four bytes from the operating system. NumPy accepts seeds
    below 2**32.

    Raises
    ------
    ValueError
        If the value cannot seed a generator.
    """
    if value is None:
        return int.from_bytes(os.urandom(4), "little")
    if isinstance(value, np.random.RandomState):
        return int(value.randint(np.iinfo(np.int32).max))
    seed = plain(value)
    if not _is_number(seed, Integral) or not 0 <= seed < 2**32:
        raise ValueError(
            f"{name}={value!r} cannot seed a generator. Choose None, an integer "
            "from 0 to 2**32 - 1, or a numpy.random.RandomState."
        )
    return int(seed)


def as_generator(random_state: RandomState | torch.Generator) -> torch.Generator:
    """Return the given torch generator, or a new CPU generator seeded by `as_seed`."""
    if isinstance(random_state, torch.Generator):
        return random_state
    return torch.Generator().manual_seed(as_seed("random_state", random_state))


# packages whose calls may lie between the user's line and a fit
PACKAGES = {"sklaplace", "sklearn", "skorch", "joblib", "contextlib", "threading"}
PACKAGES |= {"concurrent"}

_SHOWN: set[tuple[str | int, ...]] = set()


def warn_user(
    message: str, category: type[Warning] = UserWarning, *, once: bool = False
) -> None:
    """Warn at the user's line that called this package, directly or via scikit-learn.

    Python's default filters show a warning once per line. However, Python forgets these
    warnings when the filters change, and scikit-learn changes the filters for every fit
    of a search. This function therefore keeps its own record. If ``once`` is True, a
    message is not repeated, even under the filter "always". Without ``once``, it is
    repeated for other lines. The filter "error" always raises the warning.
    """
    # walk up the call stack to the first line outside these packages
    frame = sys._getframe(1)
    while (
        frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in PACKAGES
    ):
        frame = frame.f_back
    line = frame.f_code.co_filename, frame.f_lineno  # file and number
    key, action = (message,) if once else (message, *line), _action(message, category)
    repeats = action == "error" or (action == "always" and not once)
    if repeats or key not in _SHOWN:
        warnings.warn_explicit(message, category, *line)
        if action != "ignore":  # an ignored warning was not shown
            _SHOWN.add(key)


def _action(message: str, category: type[Warning]) -> str:
    """Return the action that the active filters specify for a warning.

    The first filter that applies decides. Filters of a module or line are skipped.
    """
    for action, pattern, kind, module, line in warnings.filters:
        is_of_kind = issubclass(category, kind) and module is None and not line
        if is_of_kind and (pattern is None or pattern.match(message)):
            return action
    return "default"
