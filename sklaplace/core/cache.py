"""Cache results in a `joblib.Memory`, under a hash of everything they depend on.

joblib hashes arrays by value, and classes and functions by name. This module also
hashes tensors and networks by value, and the user's classes and functions by source
code. Changes to functions that are called by this source code are not detected. The
``memory`` of a scikit-learn ``Pipeline`` has the same limitation.
"""

import functools
import inspect
import linecache
import marshal
import os
import pickle
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any

import joblib
import numpy as np
import scipy
import sklearn
import skorch
import torch
from joblib.hashing import Hasher, NumpyHasher
from sklearn.utils.validation import check_memory as check_joblib_memory
from torch import Tensor

from sklaplace.core import progress
from sklaplace.core.checks import warn_user

_VERSIONS = {m.__name__: m.__version__ for m in (joblib, np, scipy, sklearn, skorch)}
_VERSIONS |= {"torch": str(torch.__version__), "python": sys.version}
# Libraries whose classes and functions are hashed by name.
_LIBRARIES = {*_VERSIONS, "sklaplace", *sys.stdlib_module_names} - {"__main__"}


def check_memory(memory: Any) -> Any:
    """Return a store for results.

    Parameters
    ----------
    memory : None, str, os.PathLike or joblib.Memory
        None disables storage. A path names a folder, which is created if needed.

    Returns
    -------
    joblib.Memory
        The given object if it has a ``cache`` method, otherwise a new store.

    Raises
    ------
    ValueError
        If ``memory`` is any other object.
    """
    is_path = isinstance(memory, os.PathLike)
    return check_joblib_memory(os.fspath(memory) if is_path else memory)


@dataclass(frozen=True)
class Entry:
    """Place of a result in a store.

    If the store cannot be read or written, a warning is shown.

    Attributes
    ----------
    memory : joblib.Memory
        Store, from `check_memory`.
    key : str
        Hash of everything that the result depends on, from `fingerprint`.
    """

    memory: Any
    key: str

    def load(self) -> Any:
        """Return a copy of the stored result, or None if there is no result.

        Print a message if a result is found. A damaged result counts as none.
        """
        try:
            # joblib stores results of calls of `_stored`, which returns its argument.
            # Only the key tells calls apart; None stands for the unknown result.
            function = self.memory.cache(_stored, ignore=["result"])
            if not function.check_call_in_cache(self.key, None):
                return None
            # joblib replaces a damaged result with the argument, None
            result = function(self.key, None)
        except OSError as error:
            warn_without_memory(error)
            return None
        if result is not None:
            progress.line("network and curvature: from memory")
        return result

    def store(self, result: object) -> None:
        """Store a result."""
        try:
            self.memory.cache(_stored, ignore=["result"]).call(self.key, result)
        except OSError as error:
            warn_without_memory(error)


def _stored(key: str, result: object) -> object:
    """Return the result, which joblib stores under the key."""
    return result


def warn_without_memory(error: Exception) -> None:
    """Warn that ``memory`` is not used, and give the reason."""
    warn_user(
        f"memory has no effect: {error}. Use a folder with free space, and define "
        "classes and functions at the top level of a module; or use memory=None."
    )


def fingerprint(value: object) -> str:
    """Return a hexadecimal hash of a value, reproducible across processes.

    The hash includes the versions of libraries, and torch's default dtype, device and
    precision.

    Parameters
    ----------
    value : object
        Arrays, tensors, modules, skorch nets, datasets, or containers of these.

    Raises
    ------
    pickle.PicklingError, TypeError, RuntimeError
        If a part of the value cannot be pickled, has no source code, or is a tensor
        without dense values.

    Notes
    -----
    The cost is that of a SHA-256 hash of all arrays, plus about 20 µs per object. The
    hash can depend on whether objects are shared: a list of two equal objects and a
    list that contains one object twice have different hashes.
    """
    environment = (
        _VERSIONS,
        _own_source(),
        torch.get_default_dtype(),
        torch.empty(0).device.type,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
    try:
        return str(_Hasher("sha256", coerce_mmap=True).hash((environment, value)))
    except pickle.PicklingError as error:
        error.args = error.args[:1]  # joblib appends the whole value
        raise


class _Hasher(NumpyHasher):
    """Hasher of tensors and nets by value, and of the user's code by source code."""

    def reducer_override(self, value: Any) -> Any:
        """Return the class and content to hash for tensors, nets and stored arrays.

        The results have the form of pickle reductions, ``(function, arguments,
        state)``. The pickled bytes are hashed and never loaded, so the function
        ``type`` only adds the class to these bytes. A class or function of the user
        adds its code to the hash; for a class, also the code of the user's base
        classes.
        """
        if isinstance(value, Tensor):
            return type, (type(value),), _content(value)
        if isinstance(value, skorch.NeuralNet):
            return type, (type(value),), _attributes(value)
        if getattr(type(value), "is_hashed_by_blocks", False) is True:  # StoredArray
            return type, (type(value),), [joblib.hash(b) for b in value.blocks()]
        if isinstance(value, type | FunctionType):
            for part in getattr(value, "__mro__", [value]):
                if _is_of_user(part):
                    self.save(_code(part))
        return NotImplemented  # then hashed as by joblib, classes and functions by name

    def _batch_setitems(self, items: Iterable[Any], *args: object) -> None:
        # joblib's method sorts the items of dicts; Python's method keeps their order,
        # which matters for the layers of a module
        super(Hasher, self)._batch_setitems(items, *args)


def _content(tensor: Tensor) -> tuple[str, np.ndarray]:
    """Return a tensor's metadata, and its values as bytes."""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    metadata = tensor.dtype, tensor.shape, tensor.device.type, tensor.requires_grad
    return str(metadata), values.numpy()


def _attributes(net: skorch.NeuralNet) -> dict[str, Any]:
    """Return a net's parameters, weights and other state, without times and logs."""
    left_out = "callbacks_", "history_", "virtual_params_", "_params_to_validate"
    return {k: v for k, v in sorted(vars(net).items()) if k not in left_out}


def _is_of_user(value: object) -> bool:
    return str(value.__module__).partition(".")[0] not in _LIBRARIES


def _code(value: Any) -> tuple[str, list[bytes]]:
    """Return the source of a class or function, and the bytecode of its functions.

    The bytecode is what runs, and differs from the source if the file was edited after
    its import. A notebook has no source file, so the source of a class is the whole
    cell that defines it. Raise `pickle.PicklingError` if there is no source.
    """
    functions = [value, *vars(value).values()]
    codes = [f.__code__ for f in functions if isinstance(f, FunctionType)]
    try:
        source = inspect.getsource(value)
    except (OSError, TypeError) as error:
        cells = {code.co_filename for code in codes}  # each cell has a file name
        source = "".join(sorted("".join(linecache.getlines(cell)) for cell in cells))
        if not source:
            raise pickle.PicklingError(f"{value!r} has no source code") from error
    # edits elsewhere in the file, and its location, do not matter
    loaded = [code.replace(co_filename="", co_firstlineno=1) for code in codes]
    # version 2 of the format does not depend on reference counts
    return source, [marshal.dumps(code, 2) for code in loaded]


@functools.cache
def _own_source() -> str:
    """Return a hash of this package's source code."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return sha256(repr([*map(Path.read_bytes, files)]).encode()).hexdigest()
