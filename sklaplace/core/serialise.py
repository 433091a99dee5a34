"""Serialise object graphs as arrays and types; loading runs no code from the file.

skops cannot store tensors, and asks the user which types in a file to trust. Therefore,
`torch.save` writes the object graph of an estimator, and torch's weights-only loader
reads the graph. The loader calls only the few functions named in this module. Classes
and functions of torch, skorch and sklaplace are stored by name. skops stores all other
classes and functions, such as the user's and most callbacks, and asks whether to trust
them.

A file can name two kinds of objects: functions of tensors, and classes that run only
library code when their objects are rebuilt from attributes.
"""

import copyreg
import importlib
import pickle
from collections import OrderedDict, defaultdict
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial
from io import BytesIO
from threading import Lock
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import skorch.utils
import torch
from numpy.lib.format import descr_to_dtype, dtype_to_descr
from sklearn.base import BaseEstimator
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNet
from skorch.callbacks import EpochTimer, PrintLog
from skorch.helper import _make_split
from skorch.setter import optimizer_setter
from skorch.utils import get_map_location, to_numpy
from torch.nn import functional
from torch.overrides import get_overridable_functions, resolve_name
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

_KEY, _VALUES = "sklaplace_graph", "values"
# Libraries whose objects skops stores.
_STORED_BY_SKOPS = "datetime", "numpy", "pathlib", "scipy", "sklearn"
# Modules whose objects torch's weights-only loader accepts, and this module.
_STORED_BY_TORCH = (
    *("_codecs", "torch", "torch._tensor", "torch._utils", "torch.nn.parameter"),
    *("torch.storage", __name__),
)
# Modules whose classes a file may name. Other modules have classes that unpickle data
# or write files, such as `skorch.callbacks.Checkpoint`.
_MODULES_OF_CLASSES = (
    *("sklaplace.", "sklearn.frozen.", "skorch.callbacks.scoring."),
    *("skorch.classifier.", "skorch.dataset.", "skorch.helper.", "skorch.history."),
    *("skorch.net.", "skorch.regressor.", "skorch.toy.", "torch.nn.modules."),
    *("torch.nn.utils.", "torch.optim.", "torch.utils.data.dataloader."),
    *("torch.utils.data.dataset.", "torch.utils.data.sampler."),
)
_NEW: Any = copyreg.__newobj__  # type: ignore[attr-defined]
# Functions that a file may call. Each builds an object from its arguments.
_CALLABLE = (
    *(frozenset, range, set, slice, OrderedDict, defaultdict, partial),
    *(torch.Size, torch.device, descr_to_dtype, _NEW),
)
# Other objects that a file may name.
_ONLY_NAMED = (
    *(bool, bytearray, complex, dict, float, int, list, print, str, tuple),
    *(_make_split, optimizer_setter, to_numpy, EpochTimer, PrintLog),
    # indexing functions of skorch datasets
    *(f for name, f in vars(skorch.utils).items() if name.startswith("_indexing_")),
)
_LOCK = Lock()


def to_portable(state: dict[str, Any]) -> dict[str, Any]:
    """Convert a state to an array and to a list of types and objects for skops.

    Return a dict of two entries: the object graph as bytes, in which the parts that
    skops stores are numbered, and the list of these parts.

    Raises
    ------
    TypeError
        If a value cannot be stored without pickle.
    """
    values: list[Any] = []
    try:
        return {_KEY: _written(dict(state), values), _VALUES: values}
    except Exception as error:
        raise TypeError(
            f"The estimator cannot be stored without pickle: {error}. Define classes "
            "and functions at the top level of an importable module, or use "
            "joblib.dump."
        ) from error


def from_portable(state: dict[str, Any]) -> dict[str, Any]:
    """Restore a state from `to_portable`; return any other state unchanged.

    Raises
    ------
    ValueError
        If the state is damaged or was written by another version.
    """
    if _KEY not in state:
        return state
    # a user's subclass may have added entries, which are kept
    added = {k: v for k, v in state.items() if k not in (_KEY, _VALUES)}
    # None keeps the device of each tensor
    device = None if torch.cuda.is_available() else "cpu"
    try:
        # where the file names `_left`, the loader calls this list's __getitem__
        left = state[_VALUES].__getitem__, f"{__name__}.{_left.__name__}"
        # all threads share the list of safe functions
        with _LOCK, safe_globals([by_trusted_name, _made, left, frozenset]):
            file = BytesIO(state[_KEY])
            return torch.load(file, device, weights_only=True) | added
    except Exception as error:
        raise ValueError(
            "The stored estimator cannot be restored: it is damaged, or was stored by "
            f"another version ({type(error).__name__}). Fit it again."
        ) from error


def _written(value: object, values: list[Any]) -> np.ndarray:
    """Return a value as bytes, and append to ``values`` the parts that skops stores.

    Raise TypeError if the bytes name functions that `from_portable` does not allow.
    """

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: object) -> Any:
            return _reduced(value, values)

    file = BytesIO()
    # torch takes a module that has a Pickler
    torch.save(value, file, SimpleNamespace(Pickler=Pickler, __name__=__name__))
    file.seek(0)
    trusted = {f"{__name__}.{f.__name__}" for f in (by_trusted_name, _left, _made)}
    if unknown := {*get_unsafe_globals_in_checkpoint(file)} - trusted:
        raise TypeError(f"torch does not load {', '.join(unknown)} from a file")
    return np.frombuffer(file.getvalue(), np.uint8)


def _reduced(value: object, values: list[Any]) -> Any:
    """Return a function that rebuilds an object, and the function's arguments.

    A trusted class or function is found by its name. Objects of torch are left to torch
    (NotImplemented). The user's classes and functions, and objects of NumPy and similar
    libraries, are appended to ``values``, and `_left` marks their places. All other
    objects, and frozen estimators, which may contain nets, are rebuilt from their
    attributes by `_made`. Raise TypeError if an object needs more than that.
    """
    if name := trusted_name(value):
        return by_trusted_name, (name,)
    if getattr(value, "__module__", "") in _STORED_BY_TORCH:
        return NotImplemented
    if isinstance(value, np.dtype):
        return _made, (descr_to_dtype, (dtype_to_descr(value),), None, [], [])
    kind, is_code = type(value), isinstance(value, type | FunctionType)
    if is_code:
        pickle.dumps(value)  # only for its error, if it cannot be imported by name
    home = kind.__module__.split(".")[0]
    if is_code or (home in _STORED_BY_SKOPS and kind is not FrozenEstimator):
        values.append(value)
        return _left, (len(values) - 1,)
    # a skorch net would pickle its modules
    is_net = isinstance(value, BaseEstimator)
    reduced = (_NEW, (kind,), vars(value)) if is_net else value.__reduce_ex__(2)
    # a reduction has up to five entries, and pickle omits those at the end: function,
    # arguments, state, items to append, and pairs of keys and values
    call, args, state, items, pairs = (*reduced, None, None, None)[:5]
    has_slots = isinstance(state, tuple) and not hasattr(value, "__setstate__")
    # The object must be built by its own class. The state of an object with slots is a
    # pair of dicts, which `_made` cannot set.
    if has_slots or (args[0] if call is _NEW else call) is not kind:
        raise TypeError(f"{kind.__qualname__} cannot be rebuilt from its attributes")
    return _made, (call, args, state, list(items or ()), list(pairs or ()))


def _left(place: int) -> Any:
    """Mark the position of a value that skops stores."""


def _made(call: Any, args: Any, state: Any, items: list[Any], pairs: list[Any]) -> Any:
    """Rebuild an object from the parts of its pickle reduction.

    ``call(*args)`` creates the object. ``items`` are appended to it, ``pairs`` of keys
    and values are set, and ``state`` contains its attributes. Raise TypeError if a file
    may not call ``call``.
    """
    is_class_of_user = isinstance(call, type) and not trusted_name(call)
    if call not in _CALLABLE and not is_class_of_user:
        raise TypeError(f"{call!r} is not a function that a file may call")
    made = call(*args)
    for item in items:
        made.append(item)
    for key, value in pairs:
        made[key] = value
    if isinstance(made, BaseEstimator):
        # not __setstate__, which loads a net's modules by pickle
        vars(made).update(state)
        if isinstance(made, NeuralNet) and made.device:
            # if the device is missing, use the CPU and warn
            made.device = str(get_map_location(made.device))
    elif hasattr(made, "__setstate__") and state is not None:
        made.__setstate__(state)
    elif state:
        vars(made).update(state)
    return made


@cache
def _by_name() -> dict[str, Any]:
    """Return the functions and constants that a file may name, by name.

    These are the functions of tensors in ``torch`` and ``torch.nn.functional``, dtypes
    and similar constants, and the objects listed at the top of this module.
    """
    overridable = get_overridable_functions()
    defined = [f for f in vars(functional).values() if isinstance(f, FunctionType)]
    functions = *defined, *overridable[torch], *overridable[functional]
    constants = torch.dtype | torch.layout | torch.memory_format
    return {
        **{resolve_name(f) or "": f for f in functions},
        **{str(v): v for v in vars(torch).values() if isinstance(v, constants)},
        **{f"{v.__module__}.{v.__name__}": v for v in (*_CALLABLE, *_ONLY_NAMED)},
    }


def trusted_name(value: object) -> str | None:
    """Return the name of a value that a file may name, or None for other values."""
    if not isinstance(value, type):
        # by identity, since values such as arrays have no simple equality
        return next((name for name, v in _by_name().items() if v is value), None)
    name = f"{value.__module__}.{value.__name__}"
    # the name of an untrusted class is refused, or belongs to another object
    with suppress(ImportError, ValueError):
        return name if by_trusted_name(name) is value else None
    return None


def by_trusted_name(name: str) -> Any:
    """Return the object that a name refers to.

    The name belongs to `_by_name` or to a class of an allowed module, which must define
    the class and not only import it.

    Raises
    ------
    ValueError
        If a file may not use the name.
    """
    value, home = _by_name().get(name), name.rpartition(".")[0]
    # `core` has caches but no fitted objects
    is_allowed = f"{home}.".startswith(_MODULES_OF_CLASSES)
    if is_allowed and not home.startswith("sklaplace.core."):
        named = vars(importlib.import_module(home)).get(name.rpartition(".")[2])
        is_class = isinstance(named, type) and named.__module__ == home
        value = named if is_class else value
    if value is None:
        raise ValueError(f"{name!r} is not a class or function that a file may name")
    return value


class FieldsOnly:
    """A dataclass that is pickled without its cached values."""

    def __getstate__(self) -> dict[str, Any]:
        """Return only the fields, from which cached values are recomputed."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
