"""Fingerprints: cache keys made of the content of all that a result depends on.

A key is the root of a Merkle tree over an object, its parts and their parts,

    h(v) = SHA-256(kind, content, h(part 1), h(part 2), ...).

Parts are arrays, tensors, hooks, random states, and of other objects what pickle would
keep; of the user's functions and classes, bytecode and all that it reaches by name:
closures, defaults, base classes, globals, attributes of the user's modules, imports
inside functions. Those of installed libraries are hashed by name and version.

Code that reaches values of a module otherwise than by name, as by ``globals()`` or
``getattr(config, name)``, or reads environment variables, in one of the ways that
`modules.unseen` knows, is in `Fingerprint.unseen`: nothing may be cached by a key that
has any. A key does not depend on files, on patches to a library, or on attributes that
pickle drops, such as those of subclasses of ``numpy.ndarray``.

joblib's own hasher would not do: it takes code by its name alone, its keys change with
what is shared, as in clones, and it recurses, which deep graphs of objects do not bear.
"""

import copyreg
import functools
import sys
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple, cast

import numpy as np
import scipy.sparse
import skorch.callbacks
import torch
from torch import Tensor, nn

from sklaplace.core.bytecode import uses
from sklaplace.core.modules import (
    LIBRARIES,
    expanded,
    imported_as,
    loaded_version,
    unseen,
)
from sklaplace.core.stored import StoredArray


class Fingerprint(str):
    """A key, with the user's functions and classes in it by name, and their hashes.

    A definition comes after those that it refers to.
    """

    definitions: dict[str, dict[int, Any]]  # by name, then by id
    digests: dict[str, bytes]
    unseen: dict[str, str]  # by name, why a function may use what is not in the key


def fingerprint(value: Any) -> Fingerprint:
    """Return a hash of the content of a value, equal in all processes.

    Parameters
    ----------
    value : object
        Arrays, tensors, modules, skorch nets, datasets, functions, classes, and
        containers of them. Best a dict: an error locates its cause by the keys.

    Returns
    -------
    str
        Hexadecimal. It includes the versions of the libraries, and torch's default
        dtype, device and precision.

    Raises
    ------
    TypeError
        If something has no content to hash, such as an open file.

    Notes
    -----
    Costs a SHA-256 of all arrays (about 0.6 ms per MB) and about 10 µs per object.
    """
    walk = _Walk()
    precision = torch.get_float32_matmul_precision()
    device = torch.empty(0).device.type
    world = repr((LIBRARIES, torch.get_default_dtype(), device, precision))
    key = Fingerprint(hashed(world, [walk.hash(value)]).hex())
    key.definitions, key.digests = walk.definitions, walk.digests
    key.unseen = walk.unseen
    return key


def hashed(tag: str, parts: Iterable[bytes] = (), data: Any = b"") -> bytes:
    """SHA-256 of a tag, the hashes of parts and a buffer, preceded by their lengths."""
    pieces = [tag.encode("utf-8", "surrogatepass"), *parts]
    head = b"".join([b"%d:%b" % (len(piece), piece) for piece in pieces])
    state = sha256(b"%d:%b" % (len(head), head))
    state.update(data)
    return state.digest()


_Visit = Generator[tuple[str, Any], Any, tuple[bytes, int]]


class _Walk:
    """Hashes a graph of objects in linear time, with an explicit stack.

    An object that is met again inside a cycle is replaced by its position, and hashes
    are kept once the whole cycle is done (Tarjan 1972, "Depth-first search and linear
    graph algorithms"). So only inside a cycle does it matter what is shared.
    """

    def __init__(self) -> None:
        self.definitions: dict[str, dict[int, Any]] = {}
        self.digests: dict[str, bytes] = {}
        self.unseen: dict[str, str] = {}
        self._done: dict[int, tuple[bytes, Any]] = {}  # values keep their ids
        self._open: dict[int, tuple[int, Any]] = {}

    def hash(self, root: Any) -> bytes:
        """Return the hash of an object and everything in it."""
        stack, result = [("value", root, self._visit(root))], None
        while stack:
            try:
                label, part = stack[-1][2].send(result)
                stack.append((label, part, self._visit(part)))
                result = None
            except StopIteration as returned:
                result = returned.value
                stack.pop()
            except Exception as error:
                raise TypeError(_refusal(stack, error)) from error
        return cast(tuple[bytes, int], result)[0]

    def _visit(self, value: Any) -> _Visit:
        """Return a hash, and the position of the outermost open object met below."""
        if type(value) in _PLAIN:
            return hashed(f"{type(value).__name__} {value!r}"), len(self._open)
        if id(value) in self._done:
            return self._done[id(value)][0], len(self._open)
        position = lowest = len(self._open)
        if id(value) in self._open:
            met = self._open[id(value)][0]
            return b"@%d" % (position - met), met
        self._open[id(value)] = position, value
        node, digests = _describe(value), []
        for label, part in node.parts:
            digest, below = yield label, part
            digests.append(digest)
            lowest = min(lowest, below)
        parts = digests if node.is_ordered else sorted(digests)
        digest = hashed(node.tag, parts, node.data)
        if node.name:
            self._define(node, value, digest)
        if lowest == position:  # no part of a cycle that is still open
            while len(self._open) > position:
                self._open.popitem()
            self._done[id(value)] = digest, value
        return digest, lowest

    def _define(self, node: "Node", value: Any, digest: bytes) -> None:
        """Note a function or class of the user."""
        self.definitions.setdefault(node.name, {})[id(value)] = value
        self.digests[node.name] = digest
        if node.unseen:
            self.unseen[node.name] = node.unseen


def _refusal(path: list[tuple[str, Any, _Visit]], error: Exception) -> str:
    """Return where something is that cannot be hashed, and why."""
    place = "".join(label for label, *_ in path)
    if place.startswith("value['"):  # in a dict that holds all there is
        place = place[7:].replace("']", "", 1)
    kind = type(path[-1][1])
    return (
        f"{place} is of type {kind.__module__}.{kind.__qualname__}, whose content "
        f"cannot be hashed: {error}. Leave it out, give its class a __reduce__ method, "
        "or use memory=None."
    )


class Node(NamedTuple):
    """What an object is hashed from: its kind, its labelled parts, bytes."""

    tag: str
    parts: Iterable[tuple[str, Any]] = ()
    data: Any = b""
    is_ordered: bool = True
    name: str = ""  # of a function or class of the user
    unseen: str | None = None  # why it may depend on more than its parts


def _attributes(tag: str, values: Mapping[str, Any], name: str = "") -> Node:
    """A node of named parts in any order; names that end in () are no attributes."""
    names = sorted(values)
    parts = [(f".{key}", values[key]) for key in names]
    return Node(f"{tag} {names}", parts, name=name)


def _container(value: Any) -> Node:
    kind = type(value).__name__
    if type(value) not in _CONTAINERS:
        return _reduced(value)
    if isinstance(value, (set, frozenset)):
        return Node(kind, (("{}", v) for v in value), is_ordered=False)
    if not isinstance(value, (list, tuple)):
        items = [(f"[{key!r}]", part) for key, part in value.items()]
        return Node(kind, [(".keys()", tuple(value)), *items])
    if set(map(type, value)) <= _EXACT_REPR:
        return Node(f"{kind} {list(value)!r}")
    return Node(kind, [(f"[{i}]", part) for i, part in enumerate(value)])


def _reduced(value: Any) -> Node:
    """An object by what pickle would keep of it."""
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    if isinstance(reduced, str):
        if node := _of_library(value, reduced):
            return node
        raise TypeError("pickle stores its name only")
    make, args, state, items, pairs, setter = (*reduced, *[None] * 4)[:6]
    is_record = type(state) is dict and all(type(key) is str for key in state)
    found = state if is_record else {"state()": state}
    found = {**found, "()": make, "args()": args, "setter()": setter}
    found |= {"items()": list(items or ()), "pairs()": list(pairs or ())}
    return _attributes("object", found)


# ----------------------------------------------------------- arrays and networks
def _array(value: np.ndarray[Any, Any]) -> Node:
    if type(value) not in (np.ndarray, np.memmap):
        return _reduced(value)
    tag = f"array {value.dtype!r} {value.shape}"
    if value.dtype.hasobject or value.dtype.kind == "T":
        return Node(tag, [("", value.ravel().tolist())])
    flat = np.ascontiguousarray(value).reshape(-1)
    return Node(tag, data=flat.view(np.uint8) if flat.nbytes else b"")


def _stored(value: StoredArray) -> Node:
    return Node("stored array", data=value.digest())


def _sparse(value: Any) -> Node:
    known = {k: v for k, v in vars(value).items() if not k.startswith("_has_")}
    return _attributes("sparse", {**known, "class()": type(value)})


def _tensor(value: Tensor) -> Node:
    if nn.parameter.is_lazy(value) or value.layout != torch.strided or value.is_meta:
        return _reduced(value)
    hooks = list((value._backward_hooks or {}).values())
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy()
    tag = f"{value.dtype} {tuple(value.shape)} {value.device.type}"
    parts = {"class()": type(value), "hooks()": hooks, "data()": data}
    return _attributes(f"{tag} {value.requires_grad}", {**vars(value), **parts})


# attributes of every module with its hooks by number
_HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]


def _module(value: nn.Module) -> Node:
    state = dict(vars(value))
    if type(value).__name__ == "OptimizedModule":  # torch.compile
        return Node("compiled", [("._orig_mod", state["_modules"]["_orig_mod"])])
    state.pop("_compiled_call_impl", None)
    # one counter per process numbers all hooks, so that only their order counts
    tables = [(name, state.pop(name, {})) for name in _HOOKS]
    order = sorted({number for _, table in tables for number in table})
    hooks = [(k, order.index(i), hook) for k, t in tables for i, hook in t.items()]
    parts = {"class()": type(value), "storages()": _storages(value), "hooks()": hooks}
    return _attributes("module", state | parts)


def _storages(module: nn.Module) -> list[Any]:
    """Storages of all tensors by number, and offsets: tied ones train as one."""
    numbers: dict[int, int] = {}
    found: list[Any] = []
    for part in module.modules():
        for t in (part._parameters | part._buffers).values():
            if (
                t is not None
                and not nn.parameter.is_lazy(t)
                and t.layout == torch.strided
            ):
                place = t.untyped_storage().data_ptr() or id(t)
                number = numbers.setdefault(place, len(numbers))
                found += [number, t.storage_offset()]
    return found


def _skorch(value: Any) -> Node:
    """A net or callback by its parameters, which survive a clone, or by its state."""
    if not getattr(value, "initialized_", False):
        state = value.get_params(deep=False)
    else:
        timed = "batches", "dur"
        kept = [{k: v for k, v in r.items() if k not in timed} for r in value.history]
        state = {**vars(value), "callbacks_": None, "history_": kept}
    state.pop("_params_to_validate", None)
    return _attributes("skorch", {**state, "class()": type(value)})


# --------------------------------------------------------------------- libraries
def _of_library(value: Any, path: str) -> Node | None:
    """The node of what a library has under a name; None for anything else."""
    # functions in C may have no module
    known = "numpy", "scipy.special", "scipy.special._ufuncs"
    for home in (getattr(value, "__module__", None), *known):
        version, found = loaded_version(home), sys.modules.get(home or "")
        for part in path.split("."):
            found = getattr(found, part, None)
        if version and found is value:
            return Node(f"{type(value).__name__} {home}.{path} {version}")
    return None


def _loaded_module(value: types.ModuleType) -> Node:
    if version := loaded_version(value.__name__):
        return Node(f"module {value.__name__} {version}")
    raise TypeError("a module of the user is hashed by what functions use of it")


# --------------------------------------------------------------- the user's code
def _code(value: types.CodeType) -> Node:
    # no file and no lines
    keys = "code consts names varnames freevars cellvars flags name exceptiontable"
    keys += " argcount posonlyargcount kwonlyargcount"
    return _attributes("code", {k: getattr(value, f"co_{k}") for k in keys.split()})


def _function(value: types.FunctionType) -> Node:
    if node := _of_library(value, value.__qualname__):
        return node
    used, scope = uses(value.__code__), value.__globals__
    pairs = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    empty = types.CellType()
    cells = {key: cell.cell_contents for key, cell in pairs if cell != empty}
    found, names, reason = dict(cells), used.names, None
    if not loaded_version(scope.get("__name__")):
        own = {load.name for load in used.loads if not load.is_local} & scope.keys()
        found |= {f"globals()[{key!r}]": scope[key] for key in own}
        for statement in used.imports:
            key, package = imported_as(statement, scope)
            names = names.union(key.split("."))
            found[f"import {key}"] = package
        reason = unseen(used, scope, cells)
    found = expanded(found, names) | {"attributes()": vars(value)}
    found |= {"defaults()": (value.__defaults__, value.__kwdefaults__)}
    # lambdas share their qualified names
    code = _Walk().hash(value.__code__).hex()
    name = f"{value.__module__}.{value.__qualname__} {code}"
    return _attributes(f"function {name}", found, name)._replace(unseen=reason)


# what a class has by the way, or only once something has looked at it
_INCIDENTAL = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
    *("__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl"),
    *("__orig_bases__", "__parameters__", "__type_params__", "__slotnames__"),
}


def _class(value: type) -> Node:
    if node := _of_library(value, value.__qualname__):
        return node
    found = {key: v for key, v in vars(value).items() if key not in _INCIDENTAL}
    found |= {"bases()": value.__bases__, "class()": type(value)}
    name = f"{value.__module__}.{value.__qualname__}"
    return _attributes(f"class {name}", found, name)


def _wrapper(value: Any) -> Node:
    """A method, a descriptor or a partial or cached function by what is inside."""
    keys = "fget fset fdel func attrname __func__ __self__ __wrapped__ __objclass__"
    keys += " args keywords __name__"
    found = {key: getattr(value, key) for key in keys.split() if hasattr(value, key)}
    if isinstance(value, functools.partial):
        reduced: Any = value.__reduce__()  # vars() would leave a dict
        found |= reduced[2][3] or {}
    return _attributes("wrapper", {**found, "class()": type(value)})


_EXACT_REPR = {type(None), bool, int, float, str}  # also in a list
_PLAIN = {
    *(*_EXACT_REPR, complex, type(...), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
_CONTAINERS = list, tuple, set, frozenset, dict, types.MappingProxyType
_WRAPPERS = (
    *(types.MethodType, types.MemberDescriptorType, type(functools.lru_cache(int))),
    *(property, staticmethod, classmethod, functools.cached_property),
    functools.partial,
)
# by the first base class of an object that is listed
_KINDS: dict[type, Callable[[Any], Node]] = {
    **dict.fromkeys(_CONTAINERS, _container),
    **dict.fromkeys(_WRAPPERS, _wrapper),
    **dict.fromkeys((skorch.NeuralNet, skorch.callbacks.Callback), _skorch),
    **dict.fromkeys((scipy.sparse.spmatrix, scipy.sparse.sparray), _sparse),
    bytes: lambda value: Node(type(value).__name__, data=value),
    weakref.ref: lambda value: Node("weakref", [("()", value())]),
    torch.utils.hooks.RemovableHandle: lambda _: Node("handle of a hook"),
    types.FunctionType: _function,
    types.CodeType: _code,
    types.ModuleType: _loaded_module,
    type: _class,
    Tensor: _tensor,
    np.ndarray: _array,
    StoredArray: _stored,
    nn.Module: _module,
    object: _reduced,
}


def _describe(value: Any) -> Node:
    """The node of any object."""
    return next(_KINDS[kind] for kind in type(value).__mro__ if kind in _KINDS)(value)
