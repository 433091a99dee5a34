"""Checks of constructor values, with messages that name the valid ones."""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from sklearn import get_config
from sklearn.utils import check_random_state
from torch import Tensor

# raises an error for an invalid value of the option in the first argument
Check = Callable[[str, Any], None]


def listed(names: Iterable[str]) -> str:
    """Return names in quotes, sorted, separated by commas."""
    return ", ".join(repr(name) for name in sorted(names))


def check_option(
    name: str, value: Any, allowed: Iterable[str], others: str = ""
) -> None:
    """Raise an error unless a value is an allowed name; ``others`` ends its list."""
    allowed = list(allowed)
    if isinstance(value, str) and value in allowed:
        return
    names = {name.lower(): name for name in allowed}
    close = get_close_matches(str(value).lower(), names, n=1)
    hint = f" Did you mean {names[close[0]]!r}?" if close else ""
    raise ValueError(
        f"{name}={value!r} is not known. Choose one of {listed(allowed)}{others}.{hint}"
    )


def check_positive(name: str, value: Any, *, scalar: bool = True) -> None:
    """Raise an error unless a value is positive and finite."""
    kind = "a positive number" if scalar else "a positive number or array"
    if isinstance(value, (str, bool)) or value is None:
        raise ValueError(f"{name}={value!r} is not a positive number. Choose {kind}.")
    try:
        numbers = np.asarray(value, dtype=float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r} is not a number. Choose {kind}.") from error
    if scalar and numbers.ndim:
        raise ValueError(f"{name} has shape {numbers.shape}. Choose {kind}.")
    if numbers.size == 0 or not (np.isfinite(numbers) & (numbers > 0)).all():
        raise ValueError(f"{name}={value!r} is not positive and finite. Choose {kind}.")


def check_count(name: str, value: Any, smallest: int = 1) -> None:
    """Raise an error unless a value is an integer of at least ``smallest``."""
    if not _is_number(value, Integral) or value < smallest:
        raise ValueError(
            f"{name}={value!r} is not an integer of at least {smallest}. "
            f"Choose {smallest} or more."
        )


def check_params(name: str, value: Any, checks: Mapping[str, Check], of: str) -> None:
    """Raise an error for unknown options, and for values that their checks refuse."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        raise TypeError(f"{name} is of type {kind}. Pass a dict, or None.")
    for key, setting in value.items():
        if key not in checks:
            known = f"It takes {listed(checks)}." if checks else "It takes none."
            raise ValueError(f"{name} has {key!r}, which {of} does not take. {known}")
        checks[key](f"{name}[{key!r}]", setting)


def check_fraction(name: str, value: Any, hint: str) -> None:
    """Raise an error unless a value is strictly between zero and one."""
    if not _is_number(value) or not 0 < float(value) < 1:
        raise ValueError(f"{name}={value!r} is not between 0 and 1. {hint}")


def check_below_one(
    name: str, value: Any, hint: str = "Choose a small one, such as 1e-6."
) -> None:
    """Raise an error unless a value is from zero to below one."""
    if not _is_number(value) or not 0 <= float(value) < 1:
        raise ValueError(f"{name}={value!r} is not a number from 0 to below 1. {hint}")


def _is_number(value: Any, kind: type = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def as_levels(name: str, value: Any, hint: str) -> np.ndarray:
    """Return one or several fractions as a vector."""
    try:
        levels = np.atleast_1d(np.asarray(value, dtype=float))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r} is not a number. {hint}") from error
    if levels.size == 0 or levels.ndim != 1:
        raise ValueError(f"{name} has shape {levels.shape}, not one axis. {hint}")
    for level in np.atleast_1d(value).tolist():
        check_fraction(name, level, hint)
    return levels


def check_unmasked(values: Any, name: str) -> None:
    """Raise for masked entries of ``numpy.ma``, whose mask numpy would drop."""
    parts = values.values() if isinstance(values, Mapping) else values
    parts = parts if isinstance(values, (list, tuple, Mapping)) else [values]
    if any(isinstance(p, np.ma.MaskedArray) and np.ma.is_masked(p) for p in parts):
        raise ValueError(
            f"{name} has masked entries. Pass {name}.filled(value), leave out these "
            f"samples, or impute {name}.filled(numpy.nan) (SimpleImputer)."
        )


def check_arrays(**arrays: Any) -> None:
    """Raise an error for masked arrays, and those of others under dispatch.

    Results are numpy's, and scikit-learn takes them to be of the library of the inputs
    there. Without dispatch, tensors are converted.
    """
    for name, value in arrays.items():
        check_unmasked(value, name)
        if not get_config()["array_api_dispatch"]:
            continue
        has_namespace = hasattr(value, "__array_namespace__")
        is_numpy = isinstance(value, np.ndarray | np.generic)
        if isinstance(value, Tensor) or (has_namespace and not is_numpy):
            kind = f"{type(value).__module__}.{type(value).__name__}"
            raise TypeError(
                f"{name} is of type {kind}, and array_api_dispatch is on, but the "
                "estimators of sklaplace compute with numpy arrays and return them. "
                f"Pass an array of numpy, such as {name}.numpy(force=True) of a torch "
                "tensor, or convert tensors everywhere by "
                "sklearn.set_config(array_api_dispatch=False)."
            )


@contextmanager
def naming(**arguments: str) -> Iterator[None]:
    """Let errors about values name the arguments that the values were passed as.

    In messages that do not name X_val, ``naming(X="X_val")`` replaces X by it. Those
    that have neither, as some of scikit-learn's, start with it.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if type(error) not in (TypeError, ValueError):  # more than a message
            raise
        message = str(error)
        if re.search(_any_of(arguments.values()), message):
            raise
        message, n_named = re.subn(
            _any_of(arguments), lambda m: arguments[m[0]], message
        )
        if not n_named:
            message = f"{' and '.join(arguments.values())}: {message}"
        raise type(error)(message) from error


def _any_of(names: Iterable[str]) -> str:
    """Return the pattern of any of the names as a word, but not of an attribute."""
    return rf"(?<![\w.])(?:{'|'.join(map(re.escape, names))})(?!\w)"


def check_seed(name: str, value: Any) -> None:
    """Raise an error unless a value can seed a generator."""
    if value is None or isinstance(value, np.random.RandomState):
        return
    if not _is_number(value, Integral) or not 0 <= int(value) < 2**32:
        raise ValueError(
            f"{name}={value!r} cannot seed a generator. Choose None, an integer "
            "from 0 to 2**32 - 1, or a numpy.random.RandomState."
        )


def as_seed(name: str, value: Any) -> int:
    """Return the seed of a private generator; for None another one each time."""
    check_seed(name, value)
    if value is None:
        return int.from_bytes(os.urandom(4), "little")
    if isinstance(value, Integral):
        return int(value)
    return int(check_random_state(value).randint(np.iinfo(np.int32).max))


def as_generator(random_state: Any) -> torch.Generator:
    """Return a torch generator as it is, else one on the CPU, seeded by `as_seed`."""
    if isinstance(random_state, torch.Generator):
        return random_state
    return torch.Generator().manual_seed(as_seed("random_state", random_state))


# code between a user's line and a fit
PACKAGES = {"sklaplace", "sklearn", "skorch", "joblib", "contextlib", "threading"}
PACKAGES |= {"concurrent"}

_SHOWN: set[tuple[str | int, ...]] = set()


def warn_user(
    message: str, category: type[Warning] = UserWarning, *, once: bool = False
) -> None:
    """Warn at the line that called this package, maybe through scikit-learn.

    Under Python's default filters once for each such line. Python itself forgets what
    it has shown as soon as any code changes the filters, which scikit-learn does for
    every fit of a search. With ``once`` a message is never repeated, whatever the
    filters.
    """
    frame = sys._getframe(1)
    while (
        frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in PACKAGES
    ):
        frame = frame.f_back
    line = frame.f_code.co_filename, frame.f_lineno
    key = (message,) if once else (message, *line)
    action = _action(message, category)
    repeats = action == "error" or (action == "always" and not once)
    if repeats or key not in _SHOWN:
        warnings.warn_explicit(message, category, *line)
        if action != "ignore":
            _SHOWN.add(key)


def _action(message: str, category: type[Warning]) -> str:
    """What the filters in force do with a warning."""
    for action, pattern, kind, module, line in warnings.filters:
        is_meant = issubclass(category, kind) and module is None and not line
        if is_meant and (pattern is None or pattern.match(message)):
            return action
    return "default"
