"""Trusted names: classes and functions of libraries that a file may name.

Making one of these objects from its attributes, and predicting with it, runs code of
the libraries alone. Nothing here unpickles, reads files or takes code as text.
"""

import builtins
import importlib
import sys
import types
from contextlib import suppress
from typing import Any

import skorch.callbacks
import skorch.dataset
import skorch.helper
import skorch.history
import skorch.setter
import torch
from sklearn.frozen import FrozenEstimator
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

_CLASSES = (
    *(nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
    *(skorch.NeuralNet, skorch.callbacks.Callback, skorch.dataset.ValidSplit),
    *(skorch.history.History, FrozenEstimator, DataLoader, Dataset, Sampler),
)
# where they are defined; other places have some that unpickle
_HOMES = (
    *("torch.nn.modules.", "torch.nn.utils.", "torch.optim."),
    *(f"torch.utils.data.{name}." for name in ("dataset", "dataloader", "sampler")),
    *("skorch.", "sklearn.frozen."),
)
_OWN = "sklaplace."
# functions that compute tensors from tensors
_IN_C = torch._C._VariableFunctions, torch._C._nn, sys.modules["torch._C._special"]
_IN_PYTHON = {"torch.functional", "torch.nn.functional"}
_READING = {"from_file"}
_SINGLE = {
    "skorch.helper._make_split": skorch.helper._make_split,
    "skorch.setter.optimizer_setter": skorch.setter.optimizer_setter,
    **{
        f"builtins.{name}": getattr(builtins, name)
        for name in ("bool", "dict", "float", "int", "list", "print", "str", "tuple")
    },
}


def trusted_name(value: Any) -> str | None:
    """Return the name of a class or function that any file may name, else None."""
    name = getattr(value, "__name__", "")
    for home in (getattr(value, "__module__", None), "torch"):
        path = f"{home}.{name}"
        if _found(path) is value and _is_trusted(path, value):
            return path
    return None


def by_trusted_name(path: str) -> Any:
    """Return what a name stands for.

    Raises
    ------
    ValueError
        If it is none of those that a file may name.
    """
    value = _found(path)
    if value is None or not _is_trusted(path, value):
        raise ValueError(f"{path!r} is no class or function that a file may name")
    return value


def _found(path: str) -> Any:
    """What has a name, in one of the libraries; None if nothing has."""
    if path in _SINGLE:
        return _SINGLE[path]
    home, _, name = path.rpartition(".")
    if path.startswith((*_HOMES, _OWN)):
        with suppress(ImportError):
            importlib.import_module(home)
    return getattr(sys.modules.get(home), name, None)


def _is_trusted(path: str, value: Any) -> bool:
    home, _, name = path.rpartition(".")
    if path in _SINGLE:
        return True
    if isinstance(value, type):
        if value.__module__ != home:
            return False
        # this folder has caches and pickles, but nothing that is fitted
        is_core = home.startswith(__name__.rpartition(".")[0])
        is_own = path.startswith(_OWN) and not is_core
        return is_own or (path.startswith(_HOMES) and issubclass(value, _CLASSES))
    if isinstance(value, types.FunctionType):
        return home in _IN_PYTHON and value.__module__ == home
    is_in_c = any(getattr(place, name, None) is value for place in _IN_C)
    return is_in_c and name not in _READING
