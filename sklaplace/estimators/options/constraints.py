"""Constraints on constructor parameters, validated by scikit-learn.

`option` declares a parameter with its default value and its constraints. Views of the
keys of registries include entries that are added later.
"""

from collections import ChainMap
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import field
from numbers import Integral, Real
from typing import Any

import numpy as np
from sklearn.utils._param_validation import Interval, StrOptions

Constraints = dict[str, list[object]]


def option(default: object, *constraints: object, **settings: Any) -> Any:
    """Declare a parameter of a dataclass with its default value and constraints.

    ``settings`` are arguments of `dataclasses.field`.
    """
    metadata = {"constraints": [*constraints]}
    return field(default=default, metadata=metadata, **settings)


def constraints_of(dataclass: type) -> Constraints:
    """Return the constraints that a dataclass and its base classes declare.

    A class can declare another default value without repeating the constraints, so
    base classes come first and later declarations replace theirs.
    """
    constraints: Constraints = {}
    for base in reversed(dataclass.__mro__):
        for parameter in vars(base).get("__dataclass_fields__", {}).values():
            if "constraints" in parameter.metadata:
                constraints[parameter.name] = parameter.metadata["constraints"]
    return constraints


class DeclaredConstraints:
    """Attribute of a class with the constraints of its parameters."""

    def __get__(self, instance: object, owner: type) -> Constraints:
        return constraints_of(owner)


class Number(Interval):
    """Interval of numbers that excludes booleans."""

    def is_satisfied_by(self, val: object) -> bool:
        """Return whether a value is a number in the interval."""
        return not isinstance(val, bool) and bool(super().is_satisfied_by(val))


class Finite(Interval):
    """Finite number above a bound, or an array of such numbers.

    ``ndims`` lists the allowed numbers of axes. Numbers, and arrays or tensors of shape
    (), have zero axes. An array of shape (1,) counts as a number.
    """

    def __init__(
        self, shown: str, low: float | None = None, ndims: Sequence[int] = range(64)
    ) -> None:
        super().__init__(Real, low, None, closed="neither")
        self.shown, self.ndims = shown, ndims

    def is_satisfied_by(self, val: object) -> bool:
        """Return whether a value has an allowed shape and only allowed numbers.

        ``left`` is an exclusive lower bound or None, and ``ndims`` contains the allowed
        numbers of axes. An array with one entry is accepted in place of a number.
        """
        # NumPy would convert these to numbers
        if val is None or isinstance(val, str | bool):
            return False
        try:
            numbers = np.asarray(val, dtype=float)
        except (TypeError, ValueError, RuntimeError):  # last: tensors with gradients
            return False
        are_allowed = np.isfinite(numbers) & (self.left is None or numbers > self.left)
        is_shaped = numbers.ndim in self.ndims or getattr(val, "shape", None) == (1,)
        return is_shaped and numbers.size > 0 and bool(are_allowed.all())

    def __str__(self) -> str:
        return self.shown


def one_of(names: Iterable[str]) -> StrOptions:
    """Return the constraint that a value is one of some names."""
    return StrOptions(names)


def keys_and(registry: dict[str, Any], name: str) -> KeysView[str]:
    """Return a view of the keys of a registry, and another name."""
    return ChainMap[str, Any](registry, {name: None}).keys()


COUNT = Number(Integral, 1, None, closed="left")
WORKERS = COUNT, Number(Integral, None, -1, closed="right"), None
TWO_OR_MORE = Number(Integral, 2, None, closed="left")
FRACTION = Number(Real, 0, 1, closed="neither")
POSITIVE = Finite("a positive number", 0, [0])
LEVELS = Finite("a positive number or one per column", 0, [0, 1])
POSITIVE_ARRAY = Finite("a positive number or array", 0)
MATRIX = Finite("a finite matrix", ndims=[2])
