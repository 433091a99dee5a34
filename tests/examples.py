"""Tools that run examples in full, on a smaller scale, or in part."""

import ast
import io
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"


class _Smaller(ast.NodeTransformer):
    """Transformer that replaces the constants at the top level of an example."""

    def __init__(self, constants):
        self.constants, self.seen = constants, set()

    def visit_Module(self, node):
        for statement in node.body:
            if isinstance(statement, ast.Assign):
                self._assign(statement)
        return node

    def _assign(self, statement):
        names = {target.id for target in statement.targets if hasattr(target, "id")}
        for name in names & self.constants.keys():
            value = ast.parse(repr(self.constants[name]), mode="eval").body
            statement.value = ast.copy_location(value, statement.value)
            self.seen.add(name)


def functions_of(path):
    """Return functions and classes that an example defines, without running the rest.

    Parameters
    ----------
    path : str
        Below ``examples``.
    """
    tree = ast.parse((FOLDER / path).read_text(encoding="utf-8"), path)
    kept = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef
    tree.body = [statement for statement in tree.body if isinstance(statement, kept)]
    names = {"__name__": Path(path).stem}
    exec(compile(tree, path, "exec"), names)
    return names


def run_example(path, argv=(), **constants):
    """Run an example with other constants; return its names and its output.

    Parameters
    ----------
    path : str
        Below ``examples``.
    argv : sequence of str
        Arguments of the command line.
    **constants
        Values to assign to these names instead: numbers, strings, or tuples of them.
    """
    source = (FOLDER / path).read_text(encoding="utf-8")
    smaller = _Smaller(constants)
    tree = ast.fix_missing_locations(smaller.visit(ast.parse(source, path)))
    assert smaller.seen == constants.keys(), f"{path} does not assign these."
    names, printed = {"__name__": Path(path).stem}, io.StringIO()
    file = FOLDER / path
    with redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(file), *argv])
        patch.setattr(sys, "path", [str(file.parent), *sys.path])
        try:
            exec(compile(tree, path, "exec"), names)
        except SystemExit as end:  # an example may end early, without an error
            if end.code is not None:
                raise
    return names, printed.getvalue()
