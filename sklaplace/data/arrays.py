"""Conversion of user input to arrays of numbers or labels, with clear errors.

numpy converts None and ``"nan"`` to NaN, and dates to integers. Missing values in
pandas and labels of mixed types raise obscure errors about comparisons.
"""

import datetime as dt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sklaplace.core.checks import check_unmasked

_WITH_NULL = float | np.floating | np.datetime64 | np.timedelta64
_DATES = np.datetime64, np.timedelta64, dt.date, dt.time, dt.timedelta
# names of pandas types, because this module does not import pandas
_DATE_TYPES, _MISSING_TYPES = ("NaTType", "Period"), ("NAType", "NaTType")
# substrings of the names of date dtypes in pandas, polars and Arrow
_DATE_DTYPES = "date", "time", "duration", "period"

IMPUTE = (
    "Leave out these samples, or impute their values first (SimpleImputer in a "
    "Pipeline). With estimator=None, a pandas or polars data frame may have missing "
    "values."
)
ENCODE = (
    "Encode strings and categories as numbers (OneHotEncoder or OrdinalEncoder in a "
    "Pipeline)."
)


def detached(values: object) -> Any:
    """Detach tensors and convert to a numpy dtype; return other values unchanged."""
    if not isinstance(values, Tensor):
        return values
    values = values.detach()
    return values.float() if values.dtype == torch.bfloat16 else values


def as_array(values: object, name: str) -> np.ndarray:
    """Return an array; raise ValueError for ragged or otherwise invalid data."""
    check_unmasked(values, name)
    try:
        return np.asarray(detached(values))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be converted to an array: {error}") from error


def check_columns(frame: object, name: str) -> None:
    """Raise TypeError for a data frame with dates, which numpy may cast to integers."""
    # a Series has a single dtype, and is not checked
    dtypes = getattr(frame, "dtypes", ()) if hasattr(frame, "columns") else ()
    # not strict, because dtypes are empty for anything but a data frame
    for column, dtype in zip(getattr(frame, "columns", ()), dtypes, strict=False):
        # the dtype of categories, which may be dates, instead of "category"
        dtype = getattr(getattr(dtype, "categories", None), "dtype", dtype)
        # without the levels of an Enum and the limits of an interval
        type_name = str(dtype).lower().replace("[", "(").split("(")[0]
        if any(part in type_name for part in _DATE_DTYPES):
            raise _no_dates(name, f"in column {column!r} ({dtype})")


def as_numbers(values: object, name: str, advice: str = ENCODE) -> np.ndarray:
    """Return numeric arrays unchanged, others as float64 with NaN for missing values.

    Raises
    ------
    ValueError, TypeError
        If there are dates or other entries that are not numbers. The message ends with
        ``advice``.
    """
    values = as_array(values, name)
    if values.dtype.kind in "fiubc":  # floats, integers, booleans, complex numbers
        return values
    for value in _one_of_each_type(values):
        if isinstance(value, _DATES) or type(value).__name__ in _DATE_TYPES:
            raise _no_dates(name, f"such as {value}")
        if type(value).__name__ == "NAType":  # pandas raises TypeError for float(NA)
            raise ValueError(f"{name} contains NaN: {value}. {_missing_advice(name)}")
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        # overflow is a ValueError, too
        kind = TypeError if isinstance(error, TypeError) else ValueError
        cause = str(error).rstrip(".")
        raise kind(f"{name} is not an array of numbers: {cause}. {advice}") from error


def check_finite(values: np.ndarray, name: str) -> None:
    """Raise ValueError for NaN or infinite numbers."""
    if np.isnan(values).any():
        raise ValueError(f"{name} contains NaN. {_missing_advice(name)}")
    if not np.isfinite(values).all():
        raise ValueError(
            f"{name} contains infinity. Replace infinite values, or leave out these "
            "samples."
        )


def as_labels(values: object, name: str) -> np.ndarray:
    """Return labels of a single type: numbers, strings or dates.

    Numbers that are stored as objects become an array of numbers.

    Raises
    ------
    ValueError
        If labels are missing or have different types.
    """
    labels = as_array(values, name)
    if labels.dtype.kind == "f":  # NaN and infinity are no labels
        check_finite(labels, name)
    if labels.dtype.kind not in "OmM":  # neither objects nor dates
        return labels
    examples = _one_of_each_type(labels)
    missing = [value for value in examples if is_missing(value)]
    if missing:
        raise ValueError(
            f"{name} contains NaN: the label {missing[0]} is missing. Leave out these "
            "samples, or give them a label."
        )
    if labels.dtype.kind != "O":
        return labels
    # numbers of several types can be compared, so they are one kind
    by_kind = {_kind_of_label(value): value for value in examples}
    if len(by_kind) > 1:
        shown = " and ".join(f"{v!r} ({type(v).__name__})" for v in by_kind.values())
        raise ValueError(
            f"{name} has labels of several types: {shown}. Convert them to one type, "
            f"for example with {name}.astype(str)."
        )
    return np.array(labels.tolist()) if "number" in by_kind else labels


def is_missing(value: object) -> bool:
    """Return whether a value is None, NaN, or a missing value in numpy or pandas."""
    if value is None or type(value).__name__ in _MISSING_TYPES:
        return True
    # NaN and NaT differ from themselves
    return isinstance(value, _WITH_NULL) and bool(value != value)


def _missing_advice(name: str) -> str:
    """Return advice about missing values; only inputs X can be imputed."""
    return "Leave out these samples." if name.startswith(("y", "groups")) else IMPUTE


def _one_of_each_type(values: np.ndarray) -> list[Any]:
    """Return one entry of each type in an array: a missing value if there is one.

    Arrays of dates have one type, and arrays of objects can have several. Other arrays
    need no examples, so the list is empty.
    """
    if values.dtype.kind in "mM":
        missing = values[np.isnat(values)]
        # the first missing date, or else the first date, or nothing in an empty array
        return [*missing.flat[:1], *values.flat[:1]][:1]
    if values.dtype.kind != "O":
        return []
    examples = {type(value): value for value in values.flat}
    for kind in examples:
        if issubclass(kind, _WITH_NULL):  # some entries may be NaN or NaT
            entries = (value for value in values.flat if type(value) is kind)
            examples[kind] = next(filter(is_missing, entries), examples[kind])
    return list(examples.values())


def _kind_of_label(label: object) -> str:
    """Return the kind of a label: a number, a string, or the name of its type."""
    if isinstance(label, bool | int | float | np.number | np.bool_):
        return "number"
    return "string" if isinstance(label, str) else type(label).__name__


def _no_dates(name: str, where: str) -> TypeError:
    """Return the error for dates or times."""
    return TypeError(
        f"{name} has dates or times, {where}. Convert them to numbers first, for "
        "example days: (dates - start) / numpy.timedelta64(1, 'D')."
    )
