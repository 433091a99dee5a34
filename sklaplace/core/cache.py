"""Cache: a store of results that are found by a key alone, see `fingerprint`.

joblib stores bytes, see `packing`.
"""

import os
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import joblib

from sklaplace.core import progress
from sklaplace.core.folder import (
    UnsafeFolderError,
    make_private,
    require_private,
    require_private_entry,
)
from sklaplace.core.packing import pack, unpack

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
        If memory is none of these, or a folder that cannot be written to, or to which
        others may write: results are pickles, which run code when they are loaded.
    """
    if hasattr(memory, "cache") and not isinstance(memory, type):
        _require_private(memory)
        return memory
    if memory is not None and not isinstance(memory, (str, os.PathLike)):
        choices = "None, the path of a folder, or a joblib.Memory"
        raise TypeError(f"memory={memory!r} is not known. Choose {choices}.")
    location = None if memory is None else os.fspath(memory)
    with _explained(memory):
        if location is not None:
            require_private(location)
            # where joblib stores, in a folder given by its name
            make_private(os.path.join(location, "joblib"))
        return joblib.Memory(location, verbose=0)


def _require_private(memory: Any) -> None:
    """Raise for the folder of a joblib.Memory that others may write to."""
    holders = memory, getattr(memory, "store_backend", None)
    if getattr(memory, "backend", None) == "local":
        with _explained(memory):
            for holder in holders:
                if (location := getattr(holder, "location", None)) is not None:
                    require_private(location)


@contextmanager
def _explained(memory: Any) -> Iterator[None]:
    """Turn errors of a folder into errors of ``memory``."""
    try:
        with _refused(memory):
            yield
    except UnsafeFolderError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(
            f"memory={memory!r} cannot be used as a folder ({error}). Choose one that "
            "can be written to, or None."
        ) from error


@contextmanager
def _refused(memory: Any) -> Iterator[None]:
    """Name ``memory`` in an error of a folder that others may write to."""
    try:
        yield
    except UnsafeFolderError as error:
        raise UnsafeFolderError(
            f"memory={memory!r} is not safe: {error}. What is loaded from there can "
            "run any code. Choose a folder that you alone may write to, or None."
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

    Raises
    ------
    ValueError
        If others may write to what is in the store for this key.

    Warns
    -----
    UserWarning
        If the result cannot be stored, or will not be found again, or if the key may
        lack what the user's code depends on, in which case nothing is taken from the
        store. The result is returned all the same.
    """
    if not _is_on(memory, key):
        return work()
    begun, fresh = list[str](), list[T]()

    def packed_work() -> bytes:
        begun.append(key)
        fresh.append(work())
        return pack(fresh[0], key)

    try:
        if found := _looked_up(memory, key, packed_work, fresh):
            progress.line("network and curvature: from memory")
            return cast(T, found[0])
    except Exception as error:
        # an error of the work itself, or a refusal
        if (begun and not fresh) or isinstance(error, UnsafeFolderError):
            raise
        _warn_of_failure(error)
    if not fresh:
        return work()
    if key_after is not None:
        _warn_of_change(key, key_after())
    return fresh[0]


def _looked_up(
    memory: Any, key: str, pack: Callable[[], bytes], fresh: list[T]
) -> list[Any]:
    """What is in the store, in a list; ``pack`` fills ``fresh`` where nothing is."""
    if (root := _folder(memory)) is not None:
        # closed to others, so that the umask does not matter for what joblib adds
        with _refused(memory):
            make_private(os.path.join(root, _entry.__module__.partition(".")[0]))
    # joblib notes which functions have an entry, but not in which folder
    entry = types.FunctionType(_entry.__code__, globals(), _entry.__name__)
    stored = memory.cache(entry, ignore=["work"])
    shelved = getattr(stored, "call_and_shelve", stored)(str(key), pack)
    if fresh:
        return []
    if root is not None:
        path = os.path.join(root, shelved.func_id, shelved.args_id)
        with _refused(memory):
            require_private_entry(path, root)
    with suppress(Exception):  # a damaged entry
        packed = shelved if isinstance(shelved, bytes) else shelved.get()
        return [unpack(packed, key)]
    getattr(stored, "call", _entry)(str(key), pack)
    return []


def _folder(memory: Any) -> str | None:
    """Where a joblib.Memory keeps its files, None if not in a folder."""
    if getattr(memory, "backend", None) != "local":
        return None
    return cast(str | None, getattr(memory.store_backend, "location", None))


def _warn_of_failure(error: Exception) -> None:
    """Warn that a result is not in the store."""
    advice = "Define classes and functions at the top level, where they can be pickled"
    if isinstance(error, OSError):
        advice = "Choose a folder with free space that you can write to"
    warnings.warn(
        f"The result was not cached: {error}. {advice}, or use memory=None.",
        UserWarning,
        stacklevel=3,
    )


def _is_on(memory: Any, key: str) -> bool:
    """Whether results are kept; warns if the key may lack what code depends on."""
    if memory is None or getattr(memory, "store_backend", memory) is None:
        return False
    for function, reason in getattr(key, "unseen", {}).items():
        warnings.warn(
            f"memory has no effect: {function.split()[0]} {reason}, so that values may "
            "change unnoticed. Name what it uses, as in config.WIDTH, or pass it as a "
            "parameter of the module. Otherwise use memory=None.",
            UserWarning,
            stacklevel=3,
        )
        return False
    return True


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
