"""Persistence: what pickle keeps of an object, and a form without pickle.

A file of skops is loaded without running the code of whoever made it: it names types,
and the reader says which of them it trusts. It has no place for tensors, and a skorch
net hides its modules in a pickle. So a graph of objects is written as JSON here, with
the arrays beside it. Classes and functions of torch, skorch and sklaplace are written
by name, see `trusted`; those of the user are listed as such, and skops asks for them.
Attributes are set as pickle would set them, but for skorch nets, whose own method would
unpickle modules.
"""

import collections
import copyreg
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNet
from skorch.utils import get_map_location
from torch import Tensor, nn

from sklaplace.core.trusted import by_trusted_name, trusted_name

_KEY = "sklaplace_graph"
_LISTS = "arrays", "types", "others"
_PLAIN = {type(None), bool, int, float, str}
_SEQUENCES = {k.__name__: k for k in (list, tuple, set, frozenset, torch.Size)}
_MAPPINGS = {k.__name__: k for k in (dict, collections.OrderedDict)}
_TORCH = torch.dtype, torch.memory_format, torch.layout
# libraries whose objects are handed over as they are
_LEFT = "builtins", "datetime", "numpy", "pathlib", "scipy", "sklearn"
# a tensor without a dtype of numpy is kept as integers of the same size
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_IS_FOR_WORKER: ContextVar[bool] = ContextVar("is_for_worker", default=False)


@contextmanager
def for_worker() -> Iterator[None]:
    """Pickle for another process, which continues a computation and returns at once.

    What objects have cached goes along, and what is sent in another form does not.
    """
    token = _IS_FOR_WORKER.set(True)
    try:
        yield
    finally:
        _IS_FOR_WORKER.reset(token)


class FieldsOnly:
    """A dataclass that is pickled without what it has cached."""

    def __getstate__(self) -> dict[str, Any]:
        """Fields alone, from which the rest is computed again."""
        if _IS_FOR_WORKER.get():
            return dict(vars(self))
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


def worker_state(state: dict[str, Any], sent_apart: Iterable[str]) -> dict[str, Any]:
    """Return a state, `for_worker` without some entries, and unchanged otherwise."""
    if not _IS_FOR_WORKER.get():
        return state
    return {k: v for k, v in state.items() if k not in {*sent_apart}}


def pickled(value: Any, state: dict[str, Any]) -> Any:
    """What ``__reduce_ex__`` returns for an object with a state that pickle takes.

    That of a subclass of a user's comes first.
    """
    if not type(value).__getstate__.__module__.startswith("sklaplace."):
        return object.__reduce_ex__(value, 2)
    return copyreg.__newobj__, (type(value),), state  # type: ignore[attr-defined]


def to_portable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as text, arrays, types and what skops stores by itself.

    Raises
    ------
    TypeError
        If something in it cannot be stored without pickle, saying where it is.
    """
    writer = _Writer()
    writer.slot(dict(state), "")
    lists = {name: getattr(writer, name) for name in _LISTS}
    return {_KEY: json.dumps(writer.nodes), **lists}


def from_portable(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state that `to_portable` was given; any other as it is.

    Raises
    ------
    ValueError
        If it is damaged, or from another version.
    """
    if _KEY not in state:
        return state
    # what a subclass of a user's has added
    more = {k: v for k, v in state.items() if k not in (_KEY, *_LISTS)}
    try:
        return dict(_Reader(state).node(0)) | more
    except Exception as error:
        raise ValueError(
            "The stored estimator cannot be restored: it is damaged, or was made by "
            f"another version ({type(error).__name__}: {error}). Fit it again."
        ) from error


class _Writer:
    """Turns a graph of objects into a list of nodes, each object into one."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.types: list[Any] = []
        self.others: list[Any] = []
        self._known: dict[int, tuple[int, Any]] = {}  # values keep their ids
        self._by_kind: dict[type, Callable[[Any, str], list[Any]]] = {
            **dict.fromkeys(_SEQUENCES.values(), self._sequence),
            **dict.fromkeys(_MAPPINGS.values(), self._mapping),
            **dict.fromkeys((Tensor, nn.Parameter), self._tensor),
            **dict.fromkeys(_TORCH, self._torch),
            collections.defaultdict: self._defaultdict,
            functools.partial: self._partial,
            torch.device: lambda value, _: ["device", str(value)],
        }

    def slot(self, value: Any, path: str) -> Any:
        """A plain value itself, or the number of the node of an object, in a list."""
        if type(value) in _PLAIN:
            return value
        if id(value) not in self._known:
            position = len(self.nodes)
            self._known[id(value)] = position, value
            self.nodes.append(None)
            self.nodes[position] = self._node(value, path)
        return [self._known[id(value)][0]]

    def _node(self, value: Any, path: str) -> list[Any]:
        if write := self._by_kind.get(type(value)):
            return write(value, path)
        if isinstance(value, np.dtype) and not value.hasobject:
            return ["dtype", value.str]
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return ["array", _appended(self.arrays, value)]
        if callable(value) and hasattr(value, "__qualname__"):
            return self._code(value, path)
        if _is_left(type(value)):
            return ["other", _appended(self.others, value)]
        return self._object(value, path)

    def _sequence(self, value: Any, path: str) -> list[Any]:
        return [type(value).__name__, self._items(value, path)]

    def _mapping(self, value: Any, path: str) -> list[Any]:
        return [type(value).__name__, self._pairs(value, path)]

    def _defaultdict(self, value: Any, path: str) -> list[Any]:
        factory = self.slot(value.default_factory, f"{path}.default_factory")
        return ["defaultdict", self._pairs(value, path), factory]

    def _partial(self, value: Any, path: str) -> list[Any]:
        parts = value.func, value.args, value.keywords
        return ["partial", self._items(parts, path)]

    def _torch(self, value: Any, path: str) -> list[Any]:
        return ["torch", str(value).removeprefix("torch.")]

    def _tensor(self, value: Tensor, path: str) -> list[Any]:
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise _refused(path, value, "it is not dense")
        plain = value.detach().resolve_conj().resolve_neg().cpu()
        stride = None if 0 in plain.stride() else plain.stride()
        plain = plain.contiguous()
        try:
            array = plain.numpy()
        except TypeError:
            array = plain.view(_INTEGERS[value.element_size()]).numpy()
        options = {
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": str(value.device),
            "stride": stride,
            "requires_grad": value.requires_grad and value.is_leaf,
            "is_parameter": isinstance(value, nn.Parameter),
        }
        return ["tensor", _appended(self.arrays, array), options]

    def _code(self, value: Any, path: str) -> list[Any]:
        """A class or a function, by its name."""
        if name := trusted_name(value):
            return ["name", name]
        home = sys.modules.get(getattr(value, "__module__", None) or "")
        if getattr(home, value.__name__, None) is not value:
            raise _refused(path, value, "it cannot be imported by its name")
        return ["type", _appended(self.types, value)]

    def _object(self, value: Any, path: str) -> list[Any]:
        code = self.slot(type(value), path)
        state = self.slot(_state(value, path), path)
        is_list, is_dict = isinstance(value, (list, tuple)), isinstance(value, dict)
        items = self._items(value, path) if is_list else []
        pairs = self._pairs(value, path) if is_dict else []
        return ["object", code, state, items, pairs]

    def _items(self, values: Any, path: str) -> list[Any]:
        return [self.slot(value, f"{path}[{i}]") for i, value in enumerate(values)]

    def _pairs(self, values: Mapping[Any, Any], path: str) -> list[Any]:
        found = []
        for key, value in values.items():
            place = f"{path}.{key}" if isinstance(key, str) else f"{path}[...]"
            found.append([self.slot(key, place), self.slot(value, place)])
        return found


def _appended(values: list[Any], value: Any) -> int:
    values.append(value)
    return len(values) - 1


def _is_left(kind: type) -> bool:
    """Whether objects of a type are left to skops."""
    return kind is not FrozenEstimator and kind.__module__.split(".")[0] in _LEFT


def _state(value: Any, path: str) -> Any:
    """What is stored of an object: all attributes, or what pickle would keep."""
    if isinstance(value, BaseEstimator):  # nets of skorch among them
        return dict(vars(value))
    is_own = type(value).__module__.startswith("sklaplace.")
    try:
        if is_own and is_dataclass(value):
            return FieldsOnly.__getstate__(value)  # type: ignore[arg-type]
        return value.__getstate__()
    except Exception as error:
        raise _refused(path, value, str(error)) from error


def _refused(path: str, value: Any, reason: str) -> TypeError:
    name = getattr(value, "__qualname__", "")
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return TypeError(
        f"{path.lstrip('.')} is {name or 'of type'} {name and 'of type '}{kind}, which "
        f"cannot be stored without pickle: {reason}. Define classes and functions at "
        "the top level of a module that can be imported, or use joblib.dump."
    )


class _Reader:
    """Makes the objects of a list of nodes, each once."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.nodes = json.loads(state[_KEY])
        self._made: dict[int, Any] = {}
        self._read: dict[str, Callable[..., Any]] = {
            "array": state["arrays"].__getitem__,
            "other": state["others"].__getitem__,
            "type": state["types"].__getitem__,
            "tensor": lambda i, options: _tensor(state["arrays"][i], **options),
            "name": by_trusted_name,
            "torch": _of_torch,
            "partial": self._partial,
            "device": torch.device,
            "dtype": np.dtype,
        }

    def slot(self, slot: Any) -> Any:
        """A plain value, or the object of a node."""
        return self.node(slot[0]) if isinstance(slot, list) else slot

    def node(self, i: int) -> Any:
        """The object of a node."""
        if i not in self._made:
            kind, *content = self.nodes[i]
            if kind == "list":
                self._made[i] = []
                self._made[i].extend(map(self.slot, content[0]))
            elif kind in _SEQUENCES:
                self._made[i] = _SEQUENCES[kind](map(self.slot, content[0]))
            elif kind in (*_MAPPINGS, "defaultdict"):
                self._mapping(i, kind, *content)
            elif kind == "object":
                self._object(i, *content)
            else:
                self._made[i] = self._read[kind](*content)
        return self._made[i]

    def _mapping(
        self, i: int, kind: str, pairs: list[Any], factory: Any = None
    ) -> None:
        made = collections.defaultdict[Any, Any](self.slot(factory))
        self._made[i] = _MAPPINGS[kind]() if kind in _MAPPINGS else made
        self._fill(self._made[i], pairs)

    def _fill(self, made: Any, pairs: list[Any]) -> None:
        for key, value in pairs:
            made[self.slot(key)] = self.slot(value)

    def _partial(self, slots: list[Any]) -> Any:
        function, args, keywords = map(self.slot, slots)
        return functools.partial(function, *args, **keywords)

    def _object(
        self, i: int, code: Any, state: Any, items: list[Any], pairs: list[Any]
    ) -> None:
        kind = self.slot(code)
        if not isinstance(kind, type):
            raise TypeError(f"{kind!r} is no class")
        if issubclass(kind, tuple):
            self._made[i] = tuple.__new__(kind, map(self.slot, items))
            return
        made: Any = kind.__new__(kind)
        self._made[i] = made
        if items:
            made.extend(map(self.slot, items))
        self._fill(made, pairs)
        _set_state(made, self.slot(state))


def _set_state(made: Any, state: Any) -> None:
    """Give an object its attributes; a skorch net never unpickles them."""
    if isinstance(made, BaseEstimator):
        vars(made).update(state)
    elif hasattr(made, "__setstate__"):
        made.__setstate__(state)
    else:
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        if attributes:
            vars(made).update(attributes)
        for name, value in (slots or {}).items():
            object.__setattr__(made, name, value)
    if isinstance(made, NeuralNet) and made.device is not None:
        # as when it is unpickled
        made.device = made._check_device(made.device, get_map_location(made.device))


def _of_torch(name: str) -> Any:
    """A dtype, layout or memory format."""
    value = getattr(torch, name)
    if not isinstance(value, _TORCH):
        raise TypeError(f"{name!r} is no dtype")
    return value


def _tensor(
    array: np.ndarray[Any, Any],
    *,
    dtype: str,
    device: str,
    stride: list[int] | None,
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    """A tensor as it was; on the CPU if its device is not there."""
    plain = torch.from_numpy(array).view(_of_torch(dtype))
    if stride is not None and list(plain.stride()) != stride:
        strided = torch.empty_strided(plain.shape, stride, dtype=plain.dtype)
        plain = strided.copy_(plain)
    is_missing = device.startswith("cuda") and not torch.cuda.is_available()
    plain = plain.to("cpu" if is_missing else device)
    if is_parameter:
        return nn.Parameter(plain, requires_grad)
    return plain.requires_grad_(requires_grad)
