"""Definitions: what functions, classes and modules count by in a key.

Those of an installed library count by their name and its version. The user's own
count by their code and by all that it refers to: closures, defaults, globals that
it uses, what it imports.
"""

import dis
import functools
import importlib
import importlib.util
import os
import platform
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import numpy as np
import scipy
import sklearn
import skorch
import torch


def hashed(pieces: Iterable[bytes], data: Any = b"") -> bytes:
    """Digest of pieces, each set apart by its length, and of one large buffer."""
    head = b"".join([b"%d:%b" % (len(piece), piece) for piece in pieces])
    state = sha256(b"%d:%b" % (len(head), head))
    state.update(data)
    return state.digest()


def _own_sources() -> str:
    """Digest of this package: unlike a version, it changes with every edit."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashed(file.read_bytes() for file in files).hex()


# Part of every key, so that classes and functions of theirs count by their names.
PYTHON = f"{platform.python_implementation()} {platform.python_version()}"
LIBRARIES: dict[str, str] = {
    "sklaplace": _own_sources(),
    **{m.__name__: m.__version__ for m in (joblib, np, scipy, sklearn, skorch, torch)},
}


class Node(NamedTuple):
    """What one value is: its own content, and its parts by name or index."""

    tag: str
    parts: Iterable[tuple[Any, Any]] = ()
    data: Any = b""
    ordered: bool = True
    label: str = "[{!r}]"
    name: str | None = None  # of a function or class that is in no library


def attributes(tag: str, values: Mapping[str, Any], name: str | None = None) -> Node:
    """A node of named parts in any order; names of our own end in ``()``."""
    names = sorted(values)
    parts = [(key, values[key]) for key in names]
    return Node(f"{tag} {names}", parts, label=".{}", name=name)


# ---------------------------------------------------------------- libraries
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


def module_release(name: str | None) -> str | None:
    """The same by the name of a module; None also for one that is not loaded."""
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None)
    return None if module is None else _release(str(name), file)


def library_release(value: Any, path: str) -> str | None:
    """Version of the library in which a name leads to this very value."""
    home = getattr(value, "__module__", None)
    release = module_release(home)
    found: Any = sys.modules.get(home or "")
    for part in path.split("."):
        found = getattr(found, part, None) if release else None
    return release if found is value else None


# --------------------------------------------------------------- the user's code
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
    return _Code(
        _content(code).hex(),
        frozenset(code.co_names).union(*(c.names for c in inner)),
        frozenset(used).union(*(c.globals for c in inner)),
        frozenset(imported).union(*(c.imports for c in inner)),
    )


# not its file and its lines
_CODE = (
    *("co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_cellvars"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags"),
    *("co_exceptiontable", "co_name"),
)


def _content(constant: Any) -> bytes:
    """Hash of code, or of a constant in it."""
    kind = type(constant).__name__
    if isinstance(constant, types.CodeType):
        return hashed(_content(getattr(constant, key)) for key in _CODE)
    if isinstance(constant, (tuple, frozenset)):
        parts = [_content(part) for part in constant]
        is_ordered = isinstance(constant, tuple)
        return hashed([kind.encode(), *(parts if is_ordered else sorted(parts))])
    return hashed([f"{kind} {constant!r}".encode("utf-8", "surrogatepass")])


class _Used(NamedTuple):
    """A module of the user's, as far as some code has names for it."""

    module: types.ModuleType
    names: frozenset[str]


def _used(value: _Used) -> Node:
    inside = vars(value.module)
    found = {key: inside[key] for key in value.names if key in inside}
    found = {key: _narrowed(v, value.names) for key, v in found.items()}
    return attributes(f"module {value.module.__name__}", found)


def _narrowed(value: Any, names: frozenset[str]) -> Any:
    """What of a value some code can reach: of the user's modules, what it names."""
    is_own = isinstance(value, types.ModuleType) and not module_release(value.__name__)
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
    release = library_release(value, value.__qualname__)
    if release:
        return Node(f"function {name} {release}")
    code, scope = _code(value.__code__), value.__globals__
    found: dict[str, Any] = {}
    cells = value.__closure__ or ()
    for key, cell in zip(value.__code__.co_freevars, cells, strict=True):
        with suppress(ValueError):  # not filled yet
            found[key] = cell.cell_contents
    if not module_release(scope.get("__name__")):
        used = sorted(code.globals & scope.keys())
        found |= {f"globals()[{key!r}]": scope[key] for key in used}
        for level, key in code.imports:
            for i, module in enumerate(_imported(level, key, scope)):
                found[f"import {level} {key} {i}"] = module
    found = {key: _narrowed(v, code.names) for key, v in found.items()}
    found |= {"defaults()": (value.__defaults__, value.__kwdefaults__)}
    found |= {"attributes()": vars(value)}
    name = f"{name} {code.digest}"
    return attributes(f"function {name}", found, name)


# what a class has by the way, or only once something has looked at it
_INCIDENTAL = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
    *("__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl"),
    *("__orig_bases__", "__parameters__", "__type_params__", "__slotnames__"),
}


def _class(value: type) -> Node:
    name = f"{value.__module__}.{value.__qualname__}"
    release = library_release(value, value.__qualname__)
    if release:
        return Node(f"class {name} {release}")
    found = {key: v for key, v in vars(value).items() if key not in _INCIDENTAL}
    found |= {"bases()": value.__bases__, "class()": type(value)}
    return attributes(f"class {name}", found, name)


def _partial(value: Any) -> Node:
    _, _, (func, args, keywords, own) = value.__reduce__()  # vars() would leave a dict
    found = {"func": func, "args": args, "keywords": keywords, **(own or {})}
    return attributes("partial", found)


def _method(value: Any) -> Node:
    return Node("method", [("__func__", value.__func__), ("__self__", value.__self__)])


def _builtin(value: Any) -> Node:
    """A function or method in C: its name, its library, and what it is bound to."""
    owner = getattr(value, "__self__", None)
    home = getattr(value, "__objclass__", value).__module__
    if isinstance(owner, types.ModuleType):
        owner = owner.__name__
    tag = f"builtin {home}.{value.__qualname__} {module_release(home)}"
    return Node(tag, [("__self__", owner)], label=".{}")


def _wrapper(value: Any) -> Node:
    """A property, static or class method, or cached function: what is inside."""
    keys = ("fget", "fset", "fdel", "__func__", "func", "attrname", "__wrapped__")
    found = {key: getattr(value, key) for key in keys if hasattr(value, key)}
    return attributes("wrapper", {**found, "class()": type(value)})


def _loaded_module(value: types.ModuleType) -> Node:
    release = module_release(value.__name__)
    if release is None:
        raise TypeError("a module of one's own counts by what functions use of it")
    return Node(f"module {value.__name__} {release}")


_IN_C = (
    *(types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
)
# how each is described: by its very type, and by what it is an instance of
EXACT: dict[type, Callable[[Any], Node]] = {
    **dict.fromkeys(_IN_C, _builtin),
    functools.partial: _partial,
    types.FunctionType: _function,
    types.MethodType: _method,
    types.CodeType: lambda value: Node(f"code {_code(value).digest}"),
    _Used: _used,
}
KINDS: tuple[tuple[Any, Callable[[Any], Node]], ...] = (
    (type, _class),
    ((property, staticmethod, classmethod, functools.cached_property), _wrapper),
    (type(functools.lru_cache(int)), _wrapper),
    (types.ModuleType, _loaded_module),
)
