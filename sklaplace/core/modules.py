"""Modules: those of installed libraries, and what code of the user reaches in others.

A library counts by its version; of a module of the user counts what code names in it.
"""

import builtins
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pkgutil
import platform
import sys
import types
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import scipy
import sklearn
import skorch
import torch

from sklaplace.core.bytecode import Import, Uses

_SOURCES = sorted(Path(__file__).parents[1].rglob("*.py"))
# Part of every key, so that their classes and functions are hashed by name.
LIBRARIES: dict[str, str] = {
    "python": f"{platform.python_implementation()} {platform.python_version()}",
    # unlike a version, it changes with every edit
    "sklaplace": sha256(repr([*map(Path.read_bytes, _SOURCES)]).encode()).hexdigest(),
    **{m.__name__: m.__version__ for m in (joblib, np, scipy, sklearn, skorch, torch)},
}


@functools.lru_cache(maxsize=4096)
def library_version(module: str, file: str | None) -> str | None:
    """Version of the library that a module is of, with time and size of a build.

    None for a module of the user.
    """
    top = module.partition(".")[0]
    if top in LIBRARIES or top in ("__main__", "__mp_main__"):
        return LIBRARIES.get(top)
    if file is None:
        file = os.__file__ if top in sys.builtin_module_names else ""
    is_installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    if is_installed or file.endswith(tuple(EXTENSION_SUFFIXES)):
        version, found = "", os.stat(file)  # a new build may keep its version
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(top)
        return f"{version} {found.st_mtime_ns} {found.st_size}"
    is_standard = Path(os.__file__).parent in Path(file).parents
    return LIBRARIES["python"] if is_standard else None


def loaded_version(name: str | None) -> str | None:
    """`library_version` of a loaded module; None also for one that is not loaded."""
    module = sys.modules.get(name or "")
    # not by getattr, which a module may define
    return library_version(str(name), vars(module).get("__file__")) if module else None


def expanded(found: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Replace modules of the user by their names, and add what code names of them.

    What makes keys lack something, such as ``sys.modules``, is replaced by the reason.
    """
    expanded, queue, seen = {}, list(found.items()), set()
    for label, value in queue:  # which grows
        if _is_of_user(value):
            inside = f"{value.__name__}."
            if inside not in seen:
                seen.add(inside)
                # "__getattr__" computes those that are not there
                named = names | {"__getattr__"}
                queue += [(inside + k, v) for k, v in vars(value).items() if k in named]
            value = inside
        expanded[label] = _reason(value) or value
    return expanded


def imported(name: str) -> Any:
    """The package of an import, loaded now if it is the user's, or its version."""
    top = name.partition(".")[0]
    found: Any = sys.modules.get(top) or importlib.util.find_spec(top)
    file = getattr(found, "__file__", None) or getattr(found, "origin", None)
    if found is None or (version := library_version(top, file)):
        return found and version
    importlib.import_module(name)
    return sys.modules[top]


def imported_as(statement: Import, scope: Mapping[str, Any]) -> tuple[str, Any]:
    """The full name of an import, and its package or version."""
    name = "." * statement.level + statement.module
    name = importlib.util.resolve_name(name, scope.get("__package__"))
    return name, imported(name)


def _held(statement: Import, scope: Mapping[str, Any]) -> Any:
    """What a local variable holds after an import, if that is loaded."""
    name, found = imported_as(statement, scope)
    if not statement.name:
        return sys.modules.get(name.partition(".")[0])
    module = sys.modules.get(name)
    # ``import a.b as c`` takes ``b`` from ``a.b``
    inner = sys.modules.get(f"{name}.{statement.name}", module)
    if isinstance(found, types.ModuleType):
        return getattr(module, statement.name, inner)
    # a library may import more when it is asked for an attribute
    return vars(module).get(statement.name, inner) if module else None


# What gives access to globals by their names, and to values outside the program: all
# that is noticed is in these tables and in docs/performance.md.
_ACCESS: dict[types.ModuleType, str] = {
    builtins: "globals eval exec __import__",
    importlib: "import_module __import__ reload",
    inspect: "getmodule",
    pkgutil: "resolve_name",
    sys: "modules",
}
_ENVIRONMENT: dict[types.ModuleType, str] = {
    os: "environ environb getenv getenvb",
    os.path: "expandvars",
}
_REASONS = [
    *(
        (vars(module)[name], f"uses {module.__name__}.{name}")
        for module, names in _ACCESS.items()
        for name in names.split()
    ),
    *(
        (vars(module)[name], "reads environment variables")
        for module, names in _ENVIRONMENT.items()
        for name in names.split()
        if hasattr(module, name)  # not all are on Windows
    ),
]
_ATTRIBUTES = {"__globals__", "f_globals", "import_module"}


def _reason(value: Any) -> str | None:
    """Why code that uses a value may use others that it does not name, if it may."""
    return next((reason for found, reason in _REASONS if found is value), None)


def unseen(
    used: Uses, scope: Mapping[str, Any], cells: Mapping[str, Any]
) -> str | None:
    """Why code may use values of modules that it does not name, if it may.

    Parameters
    ----------
    used : Uses
        Of the code.
    scope : dict
        Its globals.
    cells : dict
        Its closure.
    """
    shared = {**vars(builtins), **scope}
    local = {k: _held(v, scope) for k, v in used.aliases.items()} | dict(cells)
    for load in sorted(used.loads):
        value = (local if load.is_local else shared).get(load.name)
        if reason := _reached(value, load.path):
            return reason
    return next((f"uses {name}" for name in sorted(used.names & _ATTRIBUTES)), None)


def _reached(value: Any, path: tuple[str, ...]) -> str | None:
    """Why attributes of a variable do not tell what is used, if they do not."""
    for name in path:
        is_module = isinstance(value, types.ModuleType)
        if not is_module or name in ("__dict__", "__getattribute__"):
            break
        value = vars(value).get(name)
    if not isinstance(value, types.ModuleType):
        return _reason(value)
    is_listed = value in _ACCESS or value in _ENVIRONMENT
    if is_listed or _is_of_user(value):
        return f"uses the module {value.__name__} otherwise than by its attributes"
    return None


def _is_of_user(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and not loaded_version(value.__name__)
