"""Caching: a store of results that is asked by key alone.

What joblib stores are bytes: a pickle behind a seal, in which functions and classes
of the user's stand by the names that the key has for them, so that they need not be
importable.
"""

import copyreg
import io
import os
import pickle
import types
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast

import joblib
import numpy as np
import torch
from skorch import NeuralNet

from sklaplace.core.definitions import hashed

T = TypeVar("T")

# dtypes that numpy has as well
_ARRAYS = {torch.float32, torch.float64, torch.int64, torch.int32, torch.bool}


def check_memory(memory: Any) -> Any:
    """The store to use; nothing is printed and, for None, nothing is written.

    Parameters
    ----------
    memory : None, str, os.PathLike or joblib.Memory
        None computes every time. A path is that of a folder, made if need be.

    Returns
    -------
    joblib.Memory
        Or the object given, if it has a method ``cache`` like that of one.

    Raises
    ------
    TypeError, ValueError
        If memory is none of these, or a folder that cannot be written to.
    """
    if hasattr(memory, "cache") and not isinstance(memory, type):
        return memory
    if memory is not None and not isinstance(memory, (str, os.PathLike)):
        raise TypeError(
            f"memory={memory!r} is not known. Choose None, the path of a folder, or "
            "a joblib.Memory."
        )
    try:
        location = None if memory is None else os.fspath(memory)
        return joblib.Memory(location, verbose=0)
    except OSError as error:
        raise ValueError(
            f"memory={memory!r} cannot be used as a folder ({error}). Choose one that "
            "can be written to, or None."
        ) from error


def cached(
    memory: Any,
    key: str,
    work: Callable[[], T],
    again: Callable[[], str] | None = None,
) -> T:
    """The result of some work, from the store if it is there, else put into it.

    Parameters
    ----------
    memory : joblib.Memory or None
        From `check_memory`.
    key : str
        Of everything that the result depends on, from `fingerprint`.
    work : callable
        Called without arguments, at most once.
    again : callable, optional
        Makes the key anew; asked once work has been done, which should not have
        changed it.

    Returns
    -------
    object
        What ``work`` returns, or a copy of what it returned for this key before.
        No two results share anything but the user's functions and classes.

    Warns
    -----
    UserWarning
        If the result cannot be stored, or will not be found again. It is returned
        all the same.
    """
    if memory is None or getattr(memory, "store_backend", memory) is None:
        return work()
    fresh: list[T] = []

    def pack() -> bytes:
        fresh.append(work())
        return _packed(key, fresh[0])

    # joblib notes which functions it knows, not in which folder: another each time
    entry = types.FunctionType(_entry.__code__, globals(), _entry.__name__)
    stored = memory.cache(entry, ignore=["work"])
    try:
        packed = stored(str(key), pack)
        if not fresh:
            with suppress(Exception):  # damaged
                return cast(T, _unpacked(key, packed))
            getattr(stored, "call", _entry)(str(key), pack)
    except Exception as error:
        if not fresh:
            raise
        warnings.warn(
            f"The result was not cached: {error}. Define classes and functions at the "
            "top level, where they can be pickled, or use memory=None.",
            UserWarning,
            stacklevel=2,
        )
    if again is not None:
        _warn_of_change(key, again)
    return fresh[0]


def _warn_of_change(key: str, again: Callable[[], str]) -> None:
    """Say so if the work has changed what its own key is made of."""
    after = again()
    if after == key:
        return
    before, found = (getattr(k, "digests", {}) for k in (key, after))
    # what a definition refers to comes before it
    changed = [name for name in found if before.get(name) != found[name]]
    what = "one of the inputs"
    if changed:
        what = f"something that {changed[0].partition(' ')[0]} refers to"
    warnings.warn(
        f"The result was cached, but will not be found again: {what} changed while "
        "it was made. Code that counts or collects in a global or in an attribute of "
        "a class makes every key a new one. Collect in an attribute of the module, or "
        "in a callback.",
        UserWarning,
        stacklevel=3,
    )


def _entry(key: str, work: Callable[[], bytes]) -> bytes:
    """What joblib stores, by the key alone: bytes, whatever its settings."""
    return work()


def _packed(key: str, value: Any) -> bytes:
    """A pickle behind a seal, which tells whether it is whole."""
    file = io.BytesIO()
    _Pickler(file, getattr(key, "objects", {})).dump(value)
    return hashed([key.encode()], file.getbuffer()) + file.getvalue()


def _unpacked(key: str, packed: bytes) -> Any:
    seal, content = packed[:32], packed[32:]
    if seal != hashed([key.encode()], content):
        raise ValueError("The entry is damaged.")
    return _Unpickler(io.BytesIO(content), getattr(key, "objects", {})).load()


class _Pickler(pickle.Pickler):
    """Pickles the user's functions and classes by the names that a key has."""

    def __init__(self, file: Any, objects: Mapping[str, list[Any]]) -> None:
        super().__init__(file, protocol=5)
        self.objects = objects
        self.names = {id(v): name for name, found in objects.items() for v in found}

    def persistent_id(self, value: Any) -> str | None:
        """The name of a function or class of the user's."""
        name = self.names.get(id(value))
        if name and len(self.objects[name]) > 1:
            raise pickle.PicklingError(f"Several different {value!r} are in use")
        return name

    def reducer_override(self, value: Any) -> Any:
        """Plain tensors as arrays, which load five times as fast as torch's own form.

        And a skorch net as any object: its own pickler would not know the names.
        """
        if _is_plain(value):
            is_parameter = isinstance(value, torch.nn.Parameter)
            array = value.detach().numpy()
            return _tensor, (array, value.requires_grad, is_parameter)
        if isinstance(value, NeuralNet):
            make = copyreg.__newobj__  # type: ignore[attr-defined]
            return make, (type(value),), vars(value), None, None, _set_state
        return NotImplemented


def _is_plain(value: Any) -> bool:
    """Whether a tensor is no more than its numbers."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.is_contiguous()
        and value.is_leaf
        and value.dtype in _ARRAYS
        and not value.__dict__
        and not value._backward_hooks
    )


def _tensor(array: np.ndarray, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    value = torch.from_numpy(np.require(array, requirements="W"))
    if is_parameter:
        return torch.nn.Parameter(value, requires_grad)
    return value.requires_grad_(requires_grad)


def _set_state(value: Any, state: Mapping[str, Any]) -> None:
    vars(value).update(state)


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` has written, in this process or another."""

    def __init__(self, file: Any, objects: Mapping[str, list[Any]]) -> None:
        super().__init__(file)
        self.objects = objects

    def persistent_load(self, name: str) -> Any:
        """The one function or class of that name."""
        (value,) = self.objects[name]
        return value
