"""Modules import only from their own subpackage and from lower subpackages.

Subpackages are the top-level folders and files of the package. Files of a subpackage
import each other without cycles.
"""

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from mutations import MUTATIONS

import sklaplace

PACKAGE = "sklaplace"
ROOT = Path(sklaplace.__file__).parent

# From the lowest subpackage to the highest; the package's own __init__ comes last.
FLOORS = [
    "core",
    "data",
    "metrics",
    "dirichlet",
    "likelihoods",
    "networks",
    "curvature",
    "novelty",
    "noise",
    "posterior",
    "variational",
    "estimators",
    "plotting",
]

# Inside the estimators; files on top come last.
ESTIMATOR_ROOMS = ["targets", "predicting", "options", "training", "fitting"]


DEPENDENCIES = {"joblib", "numpy", "scipy", "sklearn", "skorch", "torch"}
# Imported only where they are used, inside functions, since they may be absent.
OPTIONAL = {"matplotlib": f"{PACKAGE}.plotting", "tqdm": f"{PACKAGE}.core.progress"}


def module_name(path):
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def is_package(module):
    """Return whether a module is a folder with an __init__ file."""
    return any(other.startswith(f"{module}.") for other in FILES)


def subpackage(module):
    """Return the subpackage of a module; "" for the package's own __init__."""
    return module.removeprefix(PACKAGE).lstrip(".").partition(".")[0]


def floor(module):
    """Return the level of a module in ``FLOORS``."""
    name = subpackage(module)
    return FLOORS.index(name) if name else len(FLOORS)


def import_from_targets(node, module):
    """Return the modules that a ``from ... import ...`` statement names."""
    source = node.module or ""
    if node.level:
        # One dot is the module's own package.
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package(module)]
        source = ".".join([*parts, source] if source else parts)
    # `from package import x` imports x where x is a module, else from the package.
    targets = (f"{source}.{alias.name}" for alias in node.names)
    return [target if target in FILES else source for target in targets]


def imports(node, module, in_function=False):
    """Yield (target, line, in_function) of every import below a syntax node."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, node.lineno, in_function
    elif isinstance(node, ast.ImportFrom):
        for target in import_from_targets(node, module):
            yield target, node.lineno, in_function
    # A type checker imports what stands below `if TYPE_CHECKING`; a run does not.
    is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    inside = in_function or is_function or is_typing
    for child in ast.iter_child_nodes(node):
        yield from imports(child, module, inside)


def fault(module, target, in_function):
    """Return the error message for an import, or None."""
    top = target.partition(".")[0]
    if top == PACKAGE:
        if target not in FILES:
            return f"{target} does not exist"
        if floor(target) > floor(module) or (
            not subpackage(target) and subpackage(module)
        ):
            return f"{target} is not below {module} in FLOORS"
    elif top in OPTIONAL:
        place = OPTIONAL[top]
        if not (f"{module}.".startswith(f"{place}.") and in_function):
            return f"{top} is imported inside functions of {place} only"
    elif top not in DEPENDENCIES and top not in sys.stdlib_module_names:
        return f"{top} is not a runtime dependency"
    return None


def faults(source, module):
    """Return a message for every forbidden import in a module's source."""
    found = []
    for target, line, in_function in imports(ast.parse(source), module):
        message = fault(module, target, in_function)
        if message:
            found.append(f"{module}, line {line}: {message}")
    return found


@cache
def graph():
    """Return the modules of the package, each with its imports."""
    trees = {name: ast.parse(path.read_text("utf-8")) for name, path in FILES.items()}
    return {
        name: {target for target, *_ in imports(tree, name) if target in FILES}
        for name, tree in trees.items()
    }


def inside(folder, modules):
    """Return the import graph of the files and folders directly in a folder."""
    depth = folder.count(".") + 2

    def entry(name):
        return ".".join(name.split(".")[:depth])

    found = {}
    for name, targets in modules.items():
        if name.startswith(f"{folder}."):
            near = {entry(t) for t in targets if t.startswith(f"{folder}.")}
            found.setdefault(entry(name), set()).update(near - {entry(name)})
    return found


def test_the_top_of_the_package_is_its_subpackages():
    found = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}
    found |= {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found == set(FLOORS)


def test_imports_point_downward():
    sources = {name: path.read_text("utf-8") for name, path in FILES.items()}
    assert [m for name, source in sources.items() for m in faults(source, name)] == []


def test_files_import_each_other_without_cycles():
    tuple(TopologicalSorter(graph()).static_order())


def test_no_cycles_inside_a_folder():
    for folder in filter(is_package, FILES):
        tuple(TopologicalSorter(inside(folder, graph())).static_order())


def test_rooms_of_the_estimators_import_downward():
    top = f"{PACKAGE}.estimators"
    rooms = {name.split(".")[2] for name in FILES if name.startswith(f"{top}.")}
    rooms = {room for room in rooms if is_package(f"{top}.{room}")}
    assert rooms == set(ESTIMATOR_ROOMS)

    def place(module):
        room = module.split(".")[2] if module.startswith(f"{top}.") else top
        return ESTIMATOR_ROOMS.index(room) if room in rooms else len(rooms)

    upward = {
        (name, target)
        for name, targets in graph().items()
        for target in targets
        if target.startswith(f"{top}.") and place(target) > place(name)
    }
    assert upward == set()


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("sklaplace.core.linalg", "from sklaplace.dirichlet import LINKS", "not below"),
        ("sklaplace.plotting", "from sklaplace import __version__", "not below"),
        ("sklaplace.curvature.ggn", "from ..helpers import x", "not exist"),
        ("sklaplace.estimators.laplace", "import pandas", "not a runtime dependency"),
        ("sklaplace.metrics", "def f():\n    import matplotlib", "inside functions"),
    ],
)
def test_rejects(module, source, message):
    (found,) = faults(source, module)
    assert message in found


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.mistake)
def test_texts_of_mutations_are_there_once(mutation):
    assert mutation.count(ROOT.parent) == 1
