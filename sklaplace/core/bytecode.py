"""Bytecode: which globals, attributes and modules the code of a function names.

Code that reaches what is in a module by attributes, as in ``config.WIDTH``, names all
that it uses of it. Code that passes the module on, as in ``getattr(config, name)``,
does not.
"""

import dis
import functools
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

# between an import, or a load, and what is done with it
_SKIPPED = {"EXTENDED_ARG", "CACHE", "SWAP", "POP_TOP", "PUSH_NULL", "NOP"}
_KINDS = {
    ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"): "GLOBAL",
    ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF"): "LOCAL",
    ("LOAD_ATTR", "LOAD_METHOD"): "ATTRIBUTE",
    ("STORE_FAST", "STORE_DEREF", "STORE_NAME"): "STORE",
}


class Import(NamedTuple):
    """A module that is imported inside a function, and what is taken from it."""

    level: int
    module: str
    name: str = ""


class Load(NamedTuple):
    """A variable, and the attributes of attributes of it that are loaded at once."""

    is_local: bool
    name: str
    path: tuple[str, ...]


class Uses(NamedTuple):
    """What code names, with the functions defined in it.

    Attributes
    ----------
    names : set of str
        Globals, attributes and imports.
    loads : set of Load
        Variables, with the attributes that are used of them.
    imports : set of Import
        Modules imported inside the code.
    aliases : dict of Import
        Imports by the local variable that holds them.
    """

    names: set[str]
    loads: set[Load]
    imports: set[Import]
    aliases: dict[str, Import]


@functools.lru_cache(maxsize=4096)
def uses(code: CodeType) -> Uses:
    """Return what code names."""
    found = Uses(set(code.co_names), set(), set(), {})
    steps, statement = list(_steps(code)), Import(0, "")
    for i, (kind, name) in enumerate(steps):
        before, part = steps[i - 1]
        if kind in ("LOCAL", "GLOBAL"):
            found.loads.add(Load(kind == "LOCAL", name, _path(steps, i + 1)))
        elif kind == "IMPORT_NAME":
            statement = Import(steps[i - 2][1], name)
            found.imports.add(statement)
        elif kind == "STORE" and before in ("IMPORT_NAME", "IMPORT_FROM"):
            name_in = part if before == "IMPORT_FROM" else ""
            found.aliases[name] = statement._replace(name=name_in)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            inner = uses(const)
            found.names.update(inner.names)
            found.loads.update(inner.loads)
            found.imports.update(inner.imports)
            found.aliases.update(inner.aliases)
    return found


def _path(steps: list[tuple[str, Any]], start: int) -> tuple[str, ...]:
    """Return the attributes that are loaded one after the other."""
    end = start
    while end < len(steps) and steps[end][0] == "ATTRIBUTE":
        end += 1
    return tuple(name for _, name in steps[start:end])


def _steps(code: CodeType) -> Iterator[tuple[str, Any]]:
    """Yield kind and value of each instruction, alike in all versions of Python."""
    for step in dis.get_instructions(code):
        kind, value = step.opname, step.argval
        if kind in _SKIPPED:
            continue
        if isinstance(value, tuple) and "_FAST" in kind:  # two instructions in one
            for part, name in zip(kind.split("_FAST", 1), value, strict=True):
                yield ("LOCAL" if "LOAD" in part else "STORE"), name
        else:
            kinds = (v for names, v in _KINDS.items() if kind.startswith(names))
            yield next(kinds, kind), value
