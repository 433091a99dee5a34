"""Cache: a store of results that are found by a key alone, see `fingerprint`.

joblib stores bytes: a pickle and its checksum, in which functions and classes of the
user are replaced by the names that the key has for them, so that they need not be
importable.
"""

import io
import os
import pickle
import types
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast

import joblib
import torch
from skorch import NeuralNet

from sklaplace.core.fingerprint import hashed

T = TypeVar("T")


def check_memory(memory: Any) -> Any:
    """Return the store to use.

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
        choices = "None, the path of a folder, or a joblib.Memory"
        raise TypeError(f"memory={memory!r} is not known. Choose {choices}.")
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
    key_after: Callable[[], str] | None = None,
) -> T:
    """Return a result from the store if it is there, else compute and store it.

    Parameters
    ----------
    memory : joblib.Memory or None
        From `check_memory`.
    key : str
        Of everything that the result depends on, from `fingerprint`.
    work : callable
        Computes the result; called without arguments, at most once.
    key_after : callable, optional
        Computes the key again after ``work``, which should not have changed it.

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
        file = io.BytesIO()
        _Pickler(file, key).dump(fresh[0])
        return hashed(key, data=file.getbuffer()) + file.getvalue()

    # joblib notes which functions have an entry, but not in which folder
    entry = types.FunctionType(_entry.__code__, globals(), _entry.__name__)
    stored = memory.cache(entry, ignore=["work"])
    try:
        packed = stored(str(key), pack)
        if not fresh:
            with suppress(Exception):  # a damaged entry
                checksum, content = packed[:32], packed[32:]
                if checksum == hashed(key, data=content):
                    return cast(T, _Unpickler(io.BytesIO(content), key).load())
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
    if key_after is not None:
        _warn_of_change(key, key_after())
    return fresh[0]


def _warn_of_change(before: str, after: str) -> None:
    """Warn if the work has changed what its own key is made of."""
    if after == before:
        return
    old, new = (getattr(key, "digests", {}) for key in (before, after))
    # a definition comes after those that it refers to
    changed = next((name for name in new if old.get(name) != new[name]), None)
    what = f"something that {changed.split()[0]} refers to" if changed else "an input"
    warnings.warn(
        f"The result was cached, but will not be found again: {what} changed while "
        "it was computed. Code that collects in a global or in an attribute of a class "
        "makes every key a new one. Collect in the module, or in a callback.",
        UserWarning,
        stacklevel=3,
    )


def _entry(key: str, work: Callable[[], bytes]) -> bytes:
    """Return what joblib stores by the key alone: bytes, whatever its settings."""
    return work()


class _Pickler(pickle.Pickler):
    """Pickles the user's functions and classes by the names that a key has for them.

    So they need not be importable: a key holds those of the process that reads.
    """

    def __init__(self, file: io.BytesIO, key: str) -> None:
        super().__init__(file, protocol=5)
        self.definitions = getattr(key, "definitions", {})
        self.names = {id_: k for k, v in self.definitions.items() for id_ in v}

    def persistent_id(self, value: Any) -> str | None:
        """Return the name of a function or class of the user, None for others."""
        name = self.names.get(id(value))
        if name and len(self.definitions[name]) > 1:
            raise pickle.PicklingError(f"Several different {value!r} are in use")
        return name

    def reducer_override(self, value: Any) -> Any:
        """Reduce skorch nets, whose own pickler lacks the names, and plain tensors.

        As arrays they load several times as fast as in torch's own form.
        """
        is_plain = type(value) is torch.Tensor and value.is_contiguous()
        if is_plain and not (value.requires_grad or vars(value)):
            with suppress(TypeError, RuntimeError):  # on a GPU, or of torch's dtypes
                return torch.from_numpy, (value.numpy(),)
        if isinstance(value, NeuralNet):
            return object.__new__, (type(value),), vars(value), None, None, _set_state
        return NotImplemented


def _set_state(value: Any, attributes: Mapping[str, Any]) -> None:
    vars(value).update(attributes)


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` has written, in this process or another."""

    def __init__(self, file: io.BytesIO, key: str) -> None:
        super().__init__(file)
        self.definitions = getattr(key, "definitions", {})

    def persistent_load(self, name: str) -> Any:
        """Return the one function or class of that name."""
        return next(iter(self.definitions[name].values()))
