"""Public names: the `__all__` of each module in the API reference."""

import inspect
from functools import cached_property
from importlib import import_module
from types import FunctionType
from typing import Any

from skorch.callbacks import Callback

MODULES = (
    "sklaplace",
    "sklaplace.metrics",
    "sklaplace.plotting",
    "sklaplace.dirichlet",
    "sklaplace.dirichlet.links",
    "sklaplace.likelihoods",
    "sklaplace.posterior.gaussian",
    "sklaplace.posterior.tuning.evidence",
    "sklaplace.posterior.swag",
    "sklaplace.variational",
    "sklaplace.variational.module",
)
# called by torch and skorch, not by users
HOOKS = {name for name in vars(Callback) if name.startswith("on_")} | {"extra_repr"}
KINDS = FunctionType, classmethod, staticmethod, property, cached_property


def public_objects() -> dict[str, Any]:
    """Classes, functions and constants by their full names."""
    return {
        f"{module}.{name}": getattr(import_module(module), name)
        for module in MODULES
        for name in import_module(module).__all__
        if name != "__version__"
    }


def members(kind: type) -> dict[str, type]:
    """Public methods and properties of a class, each with the class that defines it."""
    found: dict[str, type] = {}
    for base in kind.__mro__:
        for name, value in vars(base).items():
            if not name.startswith("_") and isinstance(value, KINDS):
                found.setdefault(name, base)
    return {
        name: base
        for name, base in found.items()
        if base.__module__.startswith("sklaplace.") and name not in HOOKS
    }


def is_documented_by_base(name: str, base: type, public: set[type]) -> bool:
    """Whether a public base class documents the method, with an equal signature."""

    def signature(owner: type) -> Any:
        value = vars(owner)[name]
        return list(inspect.signature(value).parameters) if callable(value) else None

    return any(
        signature(base) == signature(owner)
        for owner in base.__mro__[1:]
        if owner in public and name in vars(owner)
    )
