"""Packing: a value as bytes, a pickle and its checksum.

Functions and classes of the user are replaced by the names that a key of `fingerprint`
has for them, so that they need not be importable.
"""

import io
import pickle
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from skorch import NeuralNet
from torch import Tensor

from sklaplace.core.fingerprint import hashed


def pack(value: Any, key: str) -> bytes:
    """Return a value as bytes.

    Parameters
    ----------
    value : object
        Anything that can be pickled, but for definitions of the user.
    key : str
        From `fingerprint`.
    """
    file = io.BytesIO()
    _Pickler(file, key).dump(value)
    return hashed(key, data=file.getbuffer()) + file.getvalue()


def unpack(packed: bytes, key: str) -> Any:
    """Return what was packed, with the definitions of this process.

    Raises
    ------
    ValueError
        If it was packed under another key, or has changed since.
    """
    checksum, content = packed[:32], packed[32:]
    if checksum != hashed(key, data=content):
        raise ValueError("packed under another key, or damaged")
    return _Unpickler(io.BytesIO(content), key).load()


class _Pickler(pickle.Pickler):
    """Pickles the user's functions and classes by the names that a key has for them.

    So they need not be importable: a key holds those of the process that reads.
    """

    def __init__(self, file: io.BytesIO, key: str) -> None:
        super().__init__(file, protocol=5)
        self.definitions = getattr(key, "definitions", {})
        self.names = {id_: k for k, v in self.definitions.items() for id_ in v}

    def persistent_id(self, value: Any) -> Any:
        """Return the name of a definition, None for all else."""
        name = self.names.get(id(value))
        if name and len(self.definitions[name]) > 1:
            raise pickle.PicklingError(f"Several different {value!r} are in use")
        return name

    def reducer_override(self, value: Any) -> Any:
        """Reduce skorch nets, whose own pickler lacks the names, and plain tensors.

        As arrays they load several times as fast as in torch's own form.
        """
        if type(value) is Tensor and (reduced := reduced_as_array(value)):
            return reduced
        if isinstance(value, NeuralNet):
            return object.__new__, (type(value),), vars(value), None, None, _set_state
        return NotImplemented


def reduced_as_array(value: Tensor) -> Any:
    """Return what pickle stores of a plain tensor as an array, None for others."""
    is_plain = value.is_contiguous() and value.device.type == "cpu"
    if is_plain and not (value.requires_grad or vars(value)):
        with suppress(TypeError, RuntimeError):  # of torch's dtypes
            return torch.from_numpy, (value.numpy(),)
    return None


def _set_state(value: Any, attributes: Mapping[str, Any]) -> None:
    vars(value).update(attributes)


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` has written, in this process or another."""

    def __init__(self, file: io.BytesIO, key: str) -> None:
        super().__init__(file)
        self.definitions = getattr(key, "definitions", {})

    def persistent_load(self, name: Any) -> Any:
        """Return the one function or class of that name."""
        return next(iter(self.definitions[name].values()))
