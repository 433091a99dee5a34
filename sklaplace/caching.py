"""Caching: keys made of content, and a store that is asked by key alone.

A key is the hash of all that a result depends on. ``fingerprint`` walks a value as
a graph and hashes each node from its own content and the hashes of its parts, so
that equal content gives equal keys, whatever is shared, interned or moved to another
process. Functions and classes count by their code, those of an installed library by
its version. A false miss costs time, a false hit would be wrong: what cannot be told
raises.
"""

import copyreg
import dis
import functools
import importlib
import importlib.util
import io
import os
import pickle
import platform
import sys
import sysconfig
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import joblib
import numpy as np
import scipy
import scipy.sparse
import scipy.special
import sklearn
import skorch
import torch
from skorch import NeuralNet
from skorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

T = TypeVar("T")


def _hash(pieces: Iterable[bytes], data: Any = b"") -> bytes:
    """Digest of pieces, each set apart by its length, and of one large buffer."""
    head = b"".join([b"%d:%b" % (len(piece), piece) for piece in pieces])
    state = sha256(b"%d:%b" % (len(head), head))
    state.update(data)
    return state.digest()


def _own_sources() -> str:
    """Digest of this package: unlike a version, it changes with every edit."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return _hash(file.read_bytes() for file in files).hex()


# Part of every key, so that classes and functions of theirs count by their names.
PYTHON = f"{platform.python_implementation()} {platform.python_version()}"
LIBRARIES: dict[str, str] = {
    "sklaplace": _own_sources(),
    **{m.__name__: m.__version__ for m in (joblib, np, scipy, sklearn, skorch, torch)},
}


# ---------------------------------------------------------------- plain values
class Node(NamedTuple):
    """What one value is: its own content, and its parts by name or index."""

    tag: str
    parts: Iterable[tuple[Any, Any]] = ()
    data: Any = b""
    ordered: bool = True
    label: str = "[{!r}]"
    name: str | None = None  # of a function or class that is in no library


def _attributes(tag: str, values: Mapping[str, Any], name: str | None = None) -> Node:
    """A node of named parts in any order; names of our own end in ``()``."""
    names = sorted(values)
    parts = [(key, values[key]) for key in names]
    return Node(f"{tag} {names}", parts, label=".{}", name=name)


def _plain(value: Any) -> Node:
    return Node(f"{type(value).__name__} {value!r}")


def _sequence(value: list[Any] | tuple[Any, ...]) -> Node:
    kind = type(value).__name__
    if set(map(type, value)) <= _BRIEF:
        return Node(f"{kind} {list(value)!r}")
    return Node(kind, enumerate(value))


def _mapping(value: Mapping[Any, Any]) -> Node:
    return Node(type(value).__name__, [("keys()", tuple(value)), *value.items()])


def _set(value: set[Any] | frozenset[Any]) -> Node:
    return Node(type(value).__name__, ((v, v) for v in value), ordered=False)


def _reduced(value: Any) -> Node:
    """Any object, by what pickle would keep of it."""
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    if isinstance(reduced, str):
        release = _library(value, reduced)
        if release is None:
            raise TypeError("pickle knows it by its name only")
        return Node(f"global {value.__module__}.{reduced} {release}")
    make, args, state, items, pairs, setter = (*reduced, *[None] * 4)[:6]
    is_record = type(state) is dict and all(type(key) is str for key in state)
    found = state if is_record else {"state()": state}
    contents = {"items()": list(items or ()), "pairs()": list(pairs or ())}
    how = {"()": make, "args()": args, "setter()": setter}
    return _attributes("object", {**found, **contents, **how})


# ---------------------------------------------------------- arrays and networks
def _array(value: np.ndarray[Any, Any]) -> Node:
    if type(value) not in (np.ndarray, np.memmap):
        base = {"base()": value.view(np.ndarray), "class()": type(value)}
        return _attributes("array", {**base, **vars(value)})
    tag = f"array {value.dtype!r} {value.shape}"
    if value.dtype.hasobject or value.dtype.kind == "T":
        return Node(tag, enumerate(value.ravel().tolist()))
    flat = np.ascontiguousarray(value).reshape(-1)
    return Node(tag, data=flat.view(np.uint8) if flat.nbytes else b"")


def _scalar(value: np.generic) -> Node:
    return Node("scalar", [("array", np.asarray(value)), ("class", type(value))])


def _sparse(value: Any) -> Node:
    known = {k: v for k, v in vars(value).items() if not k.startswith("_has_")}
    return _attributes("sparse", {**known, "class()": type(value)})


def _ufunc(value: np.ufunc) -> Node:
    for home in (np, scipy.special):
        if getattr(home, value.__name__, None) is value:
            return Node(f"ufunc {home.__name__}.{value.__name__}")
    raise TypeError("its code is not at hand")


def _random_state(value: Any) -> Node:
    bits = getattr(value, "_bit_generator", None) or value.bit_generator
    return Node("random state", [("state", bits.state), ("class", type(value))])


def _tensor(value: Tensor) -> Node:
    tag = f"{value.dtype} {value.device.type} {value.layout} {value.requires_grad}"
    hooks = list((value._backward_hooks or {}).values())
    parts = {"class()": type(value), "hooks()": hooks, **vars(value)}
    if is_lazy(value):
        return _attributes(f"lazy {tag}", parts)
    tag = f"{tag} {tuple(value.shape)}"
    value = value.detach()
    if value.layout != torch.strided:
        value = value.to_sparse_coo().coalesce()
        parts |= {"indices()": value.indices(), "values()": value.values()}
        return _attributes(tag, parts)
    if value.device.type == "meta":
        return _attributes(tag, parts)
    flat = value.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return _attributes(tag, parts)._replace(data=data)


_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)


def _module(value: nn.Module) -> Node:
    state = dict(vars(value))
    if type(value).__name__ == "OptimizedModule":  # torch.compile
        return Node("compiled", [("_orig_mod", state["_modules"]["_orig_mod"])])
    state.pop("_compiled_call_impl", None)
    hooks = {name: state.pop(name) for name in _HOOKS if name in state}
    # one counter per process numbers all hooks, so that only their order counts
    numbers = sorted({number for table in hooks.values() for number in table})
    for name, table in hooks.items():
        if table:
            state[name] = {numbers.index(n): hook for n, hook in table.items()}
    state |= {"class()": type(value), "memory()": _shared_memory(value)}
    return _attributes("module", state)


def _shared_memory(module: nn.Module) -> list[str]:
    """Which weights are one and the same, and so are trained as one."""
    found: dict[int, int] = {}
    rows = []
    for name, part in module.named_modules():
        rows.append(name)
        for t in (*part._parameters.values(), *part._buffers.values()):
            if t is None or is_lazy(t) or t.layout != torch.strided:
                continue
            place = t.untyped_storage().data_ptr() or id(t)
            rows.append(f"{found.setdefault(place, len(found))} {t.storage_offset()}")
    return rows


def _net(value: Any) -> Node:
    """A skorch net: its parameters, and its state if it has any."""
    if not getattr(value, "initialized_", False):
        state = value.get_params(deep=False)
    else:
        state = {k: v for k, v in vars(value).items() if k != "callbacks_"}
        for name in value._optimizers:
            state[f"{name}_"] = state[f"{name}_"].state_dict()
        pairs = [pair for row in value.history for pair in row.items()]
        kept = [pair for pair in pairs if pair[0] not in ("batches", "dur")]
        state["history_"] = [word for pair in kept for word in pair]
    state.pop("_params_to_validate", None)
    return _attributes("net", {**state, "class()": type(value)})


def _callback(value: Any) -> Node:
    """A skorch callback by its parameters: the rest does not survive a clone."""
    params = value.get_params(deep=False)
    return _attributes("callback", {**params, "class()": type(value)})


# ------------------------------------------------------- functions and classes
@functools.lru_cache(maxsize=4096)
def _release(module: str, file: str | None) -> str | None:
    """Version of the installed library that a module is of; None for others."""
    top = module.partition(".")[0]
    if top in ("__main__", "__mp_main__"):
        return None
    if top in LIBRARIES:
        return LIBRARIES[top]
    if file is None:
        return PYTHON if top in sys.builtin_module_names else None
    is_installed = bool({"site-packages", "dist-packages"} & set(Path(file).parts))
    if is_installed or file.endswith(tuple(EXTENSION_SUFFIXES)):
        found = os.stat(file)  # a new build may keep its version
        return f"{_version(top)} {found.st_mtime_ns} {found.st_size}"
    folders = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib")]
    roots = tuple(os.path.realpath(folder) + os.sep for folder in folders)
    return PYTHON if os.path.realpath(file).startswith(roots) else None


def _version(top: str) -> str:
    """What a package says of itself, loaded or not."""
    try:
        return str(getattr(sys.modules.get(top), "__version__", "") or version(top))
    except PackageNotFoundError:
        return ""


def _module_release(name: str | None) -> str | None:
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None)
    return None if module is None else _release(str(name), file)


def _library(value: Any, path: str) -> str | None:
    """Version of the library in which a name leads to this very value."""
    home = getattr(value, "__module__", None)
    release = _module_release(home)
    found: Any = sys.modules.get(home or "")
    for part in path.split("."):
        found = getattr(found, part, None) if release else None
    return release if found is value else None


class _Code(NamedTuple):
    """A code object: its digest, and the names that lead out of it."""

    digest: str
    names: frozenset[str]
    globals: frozenset[str]
    imports: frozenset[tuple[int, str]]


def _code(code: types.CodeType) -> _Code:
    return _read(id(code), code)


@functools.lru_cache(maxsize=4096)
def _read(identity: int, code: types.CodeType) -> _Code:
    """Kept, since code is immutable; by identity, since equal code can differ."""
    inner = [_code(const) for const in code.co_consts if type(const) is type(code)]
    used, imported = set(), set()
    steps = [s for s in dis.get_instructions(code) if s.opname != "EXTENDED_ARG"]
    for i, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            used.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            imported.add((steps[i - 2].argval, step.argval))
    content = [getattr(code, key) for key in dir(code) if key in _CODE]
    return _Code(
        _Walk().digest(content).hex(),
        frozenset(code.co_names).union(*(c.names for c in inner)),
        frozenset(used).union(*(c.globals for c in inner)),
        frozenset(imported).union(*(c.imports for c in inner)),
    )


# not its file and its lines
_CODE = {
    *("co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_cellvars"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags"),
    *("co_exceptiontable", "co_name"),
}


class _Used(NamedTuple):
    """A module of the user's, as far as some code has names for it."""

    module: types.ModuleType
    names: frozenset[str]


def _used(value: _Used) -> Node:
    inside = vars(value.module)
    found = {key: inside[key] for key in value.names if key in inside}
    found = {key: _narrowed(v, value.names) for key, v in found.items()}
    return _attributes(f"module {value.module.__name__}", found)


def _narrowed(value: Any, names: frozenset[str]) -> Any:
    """What of a value some code can reach: of the user's modules, what it names."""
    is_own = isinstance(value, types.ModuleType) and not _module_release(value.__name__)
    return _Used(value, names) if is_own else value


def _imported(level: int, name: str, scope: Mapping[str, Any]) -> list[Any]:
    """What a function imports when it is called: loaded now if it is the user's."""
    if level:
        name = importlib.util.resolve_name("." * level + name, scope["__package__"])
    top = name.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    if top not in sys.modules:
        spec = importlib.util.find_spec(top)
        if spec is None:
            return []
        file = spec.origin if spec.has_location else None
    if release := _release(top, file):
        return [release]
    found: list[Any] = [importlib.import_module(name)]
    while name := name.rpartition(".")[0]:
        found.append(sys.modules[name])
    return found


def _function(value: types.FunctionType) -> Node:
    name = f"{value.__module__}.{value.__qualname__}"
    release = _library(value, value.__qualname__)
    if release:
        return Node(f"function {name} {release}")
    code, scope = _code(value.__code__), value.__globals__
    found: dict[str, Any] = {}
    cells = value.__closure__ or ()
    for key, cell in zip(value.__code__.co_freevars, cells, strict=True):
        with suppress(ValueError):  # not filled yet
            found[key] = cell.cell_contents
    if not _module_release(scope.get("__name__")):
        used = sorted(code.globals & scope.keys())
        found |= {f"globals()[{key!r}]": scope[key] for key in used}
        for level, key in code.imports:
            for i, module in enumerate(_imported(level, key, scope)):
                found[f"import {level} {key} {i}"] = module
    found = {key: _narrowed(v, code.names) for key, v in found.items()}
    found |= {"defaults()": (value.__defaults__, value.__kwdefaults__)}
    found |= {"attributes()": vars(value)}
    name = f"{name} {code.digest}"
    return _attributes(f"function {name}", found, name)


# what a class has by the way, or only once something has looked at it
_INCIDENTAL = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
    *("__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl"),
    *("__orig_bases__", "__parameters__", "__type_params__", "__slotnames__"),
}


def _class(value: type) -> Node:
    name = f"{value.__module__}.{value.__qualname__}"
    release = _library(value, value.__qualname__)
    if release:
        return Node(f"class {name} {release}")
    found = {key: v for key, v in vars(value).items() if key not in _INCIDENTAL}
    found |= {"bases()": value.__bases__, "class()": type(value)}
    return _attributes(f"class {name}", found, name)


def _partial(value: Any) -> Node:
    _, _, (func, args, keywords, own) = value.__reduce__()
    found = {"func": func, "args": args, "keywords": keywords, "__dict__": own or {}}
    return _attributes("partial", found)


def _method(value: Any) -> Node:
    return Node("method", [("__func__", value.__func__), ("__self__", value.__self__)])


def _builtin(value: Any) -> Node:
    """A function or method in C: its name, its library, and what it is bound to."""
    owner = getattr(value, "__self__", None)
    home = getattr(value, "__objclass__", value).__module__
    if isinstance(owner, types.ModuleType):
        owner = owner.__name__
    tag = f"builtin {home}.{value.__qualname__} {_module_release(home)}"
    return Node(tag, [("__self__", owner)], label=".{}")


def _wrapper(value: Any) -> Node:
    """A property, static or class method, or cached function: what is inside."""
    keys = ("fget", "fset", "fdel", "__func__", "func", "attrname", "__wrapped__")
    found = {key: getattr(value, key) for key in keys if hasattr(value, key)}
    return _attributes("wrapper", {**found, "class()": type(value)})


def _loaded_module(value: types.ModuleType) -> Node:
    release = _module_release(value.__name__)
    if release is None:
        raise TypeError("a module of one's own counts by what functions use of it")
    return Node(f"module {value.__name__} {release}")


# ------------------------------------------------------------------- the walk
_BRIEF = {type(None), bool, int, float, str}  # also a list of them has an exact repr
_PLAIN = {
    *(*_BRIEF, complex, type(...), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
_IN_C = {
    *(types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
}
_EXACT: dict[type, Callable[[Any], Node]] = {
    **dict.fromkeys(_PLAIN, _plain),
    **dict.fromkeys((list, tuple), _sequence),
    **dict.fromkeys((dict, types.MappingProxyType), _mapping),
    **dict.fromkeys((set, frozenset), _set),
    **dict.fromkeys(_IN_C, _builtin),
    bytes: lambda value: Node("bytes", data=value),
    functools.partial: _partial,
    types.FunctionType: _function,
    types.MethodType: _method,
    types.CodeType: lambda value: Node(f"code {_code(value).digest}"),
    _Used: _used,
    RemovableHandle: lambda _: Node("handle of a hook"),
    weakref.ref: lambda value: Node("weakref", [("()", value())]),
}
_KINDS: tuple[tuple[Any, Callable[[Any], Node]], ...] = (
    (type, _class),
    (Tensor, _tensor),
    (np.ndarray, _array),
    (np.generic, _scalar),
    (np.dtype, lambda value: Node(f"dtype {value!r}")),
    (np.ufunc, _ufunc),
    ((scipy.sparse.spmatrix, scipy.sparse.sparray), _sparse),
    (nn.Module, _module),
    (NeuralNet, _net),
    (Callback, _callback),
    ((property, staticmethod, classmethod, functools.cached_property), _wrapper),
    (type(functools.lru_cache(int)), _wrapper),
    ((np.random.RandomState, np.random.Generator), _random_state),
    (torch.Generator, lambda g: Node(f"generator {g.device}", [(0, g.get_state())])),
    (types.ModuleType, _loaded_module),
    (object, _reduced),
)


def _describe(value: Any) -> Node:
    """The node of any value."""
    exact = _EXACT.get(type(value))
    if exact:
        return exact(value)
    return next(make for kinds, make in _KINDS if isinstance(value, kinds))(value)


@dataclass(slots=True)
class _Frame:
    """A node whose parts are being hashed."""

    value: Any
    node: Node
    key: Any
    parts: Iterator[tuple[Any, Any]]
    position: int
    low: int
    digests: list[bytes] = field(default_factory=list)


class _Walk:
    """Hashes a graph, with a stack of its own and in linear time.

    What has been hashed is not hashed again, unless it is part of a cycle that is
    still open: then its position stands for it. Tarjan (1972), "Depth-first search
    and linear graph algorithms", tells the two apart. So what is shared does not
    count, but for the parts of one cycle.
    """

    def __init__(self) -> None:
        self.named: dict[str, dict[int, Any]] = {}
        self._done: dict[int, tuple[bytes, Any]] = {}  # values too: ids stay theirs
        self._open: list[Any] = []
        self._position: dict[int, int] = {}
        self._frames: list[_Frame] = []

    def digest(self, root: Any) -> bytes:
        """Hash of a value and everything in it."""
        digest = self._enter(None, root)
        while self._frames:
            frame = self._frames[-1]
            if digest is not None:
                frame.digests.append(digest)
            step = next(frame.parts, None)
            digest = self._leave() if step is None else self._enter(*step)
        return cast(bytes, digest)

    def _enter(self, key: Any, value: Any) -> bytes | None:
        """Hash of a value that can be told at once; for others, None and a frame."""
        if type(value) in _PLAIN:
            return b"=" + _plain(value).tag.encode("utf-8", "surrogatepass")
        if id(value) in self._done:
            return self._done[id(value)][0]
        position = self._position.get(id(value))
        if position is not None:
            self._frames[-1].low = min(self._frames[-1].low, position)
            return b"@%d" % (len(self._open) - position)
        try:
            node = _describe(value)
        except Exception as error:
            raise TypeError(_refusal(self._frames, key, value, error)) from error
        position = self._position[id(value)] = len(self._open)
        self._open.append(value)
        parts = iter(node.parts)
        self._frames.append(_Frame(value, node, key, parts, position, position))
        return None

    def _leave(self) -> bytes:
        """Hash of the innermost frame, whose parts are all known."""
        frame = self._frames.pop()
        node, digests = frame.node, frame.digests
        tag = node.tag.encode("utf-8", "surrogatepass")
        parts = digests if node.ordered else sorted(digests)
        digest = _hash([tag, *parts], node.data)
        if node.name:
            self.named.setdefault(node.name, {})[id(frame.value)] = frame.value
        if frame.low < frame.position:  # part of a cycle that is still open
            self._frames[-1].low = min(self._frames[-1].low, frame.low)
            return digest
        for value in self._open[frame.position :]:
            del self._position[id(value)]
        del self._open[frame.position :]
        self._done[id(frame.value)] = digest, frame.value
        return digest


def _refusal(frames: list[_Frame], key: Any, value: Any, error: Exception) -> str:
    """Where something is that cannot be told, and why."""
    keys = [*(frame.key for frame in frames[1:]), key]
    labels = [frame.node.label for frame in frames]
    path = "".join(label.format(k) for label, k in zip(labels, keys, strict=False))
    is_named = path.startswith("['")  # in a dict that holds all there is
    path = path[2:].replace("']", "", 1) if is_named else f"value{path}"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return (
        f"{path} is of type {kind}, whose content cannot be told: {error}. So nothing "
        "can be cached by it. Leave it out, give its class a __reduce__ method, or use "
        "memory=None."
    )


class Fingerprint(str):
    """A key, with the functions and classes of the user's that went into it.

    Attributes
    ----------
    objects : dict of lists
        By name. A cached result refers to them by name and gets those of the
        process that reads it, so that they need not be importable.
    """

    objects: dict[str, list[Any]]


def fingerprint(value: Any) -> Fingerprint:
    """Hash of the content of a value, the same in any process.

    Parameters
    ----------
    value : object
        Arrays, tensors, modules, skorch nets, datasets, functions, classes, and
        containers of them. Best a dict of all that matters: an error names what it
        is about by the keys.

    Returns
    -------
    str
        Hexadecimal. The versions of the libraries, and torch's default dtype,
        device and precision, are part of it.

    Raises
    ------
    TypeError
        If the content of something in it cannot be told, such as an open file.

    Notes
    -----
    Costs a SHA-256 of all arrays (about 0.6 ms per MB) and about 10 µs per object.
    What is neither in the value nor in the code that it refers to does not count:
    files that a dataset reads, environment variables, patches to a library.
    """
    walk = _Walk()
    device, precision = torch.get_default_device(), torch.get_float32_matmul_precision()
    world = (PYTHON, LIBRARIES, torch.get_default_dtype(), device.type, precision)
    key = Fingerprint(_hash([walk.digest(value), repr(world).encode()]).hex())
    key.objects = {name: list(found.values()) for name, found in walk.named.items()}
    return key


# ------------------------------------------------------------------- the store
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


def cached(memory: Any, key: str, work: Callable[[], T]) -> T:
    """The result of some work, from the store if it is there, else put into it.

    Parameters
    ----------
    memory : joblib.Memory or None
        From `check_memory`.
    key : str
        Of everything that the result depends on, from `fingerprint`.
    work : callable
        Called without arguments, at most once.

    Returns
    -------
    object
        What ``work`` returns, or a copy of what it returned for this key before.
        No two results share anything but the user's functions and classes.

    Warns
    -----
    UserWarning
        If the result cannot be stored. It is returned all the same.
    """
    if memory is None or getattr(memory, "store_backend", memory) is None:
        return work()
    fresh: list[T] = []

    def pack() -> bytes:
        fresh.append(work())
        return _packed(key, fresh[0])

    stored = memory.cache(_entry, ignore=["work"])
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
    return fresh[0]


def _entry(key: str, work: Callable[[], bytes]) -> bytes:
    """What joblib stores, by the key alone: bytes, whatever its settings."""
    return work()


def _packed(key: str, value: Any) -> bytes:
    """A pickle behind a seal, which tells whether it is whole."""
    file = io.BytesIO()
    _Pickler(file, getattr(key, "objects", {})).dump(value)
    return _hash([key.encode()], file.getbuffer()) + file.getvalue()


def _unpacked(key: str, packed: bytes) -> Any:
    seal, content = packed[:32], packed[32:]
    if seal != _hash([key.encode()], content):
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
        """A skorch net as any object: its own pickler would not know the names."""
        if isinstance(value, NeuralNet):
            make = copyreg.__newobj__  # type: ignore[attr-defined]
            return make, (type(value),), vars(value), None, None, _set_state
        return NotImplemented


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
