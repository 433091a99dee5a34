"""The one rule of direction: a module imports only modules above it in MODULES."""

import ast
import sys
from pathlib import Path

import pytest

import sklaplace

PACKAGE = "sklaplace"
ROOT = Path(sklaplace.__file__).parent

# From the lowest floor to the highest, one module a line. A new module goes
# after everything it imports.
MODULES = [
    "linalg",
    "newton",
    "options",
    "trees",
    "draws",
    "definitions",
    "fingerprints",
    "caching",
    "memory",
    "logits",
    "dirichlet.arrays",
    "dirichlet.bridge",
    "dirichlet.projection",
    "dirichlet.distribution",
    "dirichlet",
    "points",
    "variational.base",
    "variational.priors",
    "variational.gaussian",
    "variational.kumaraswamy",
    "variational.quantile",
    "variational.density",
    "variational.divergence",
    "variational",
    "independent",
    "links",
    "metrics",
    "hessians",
    "likelihoods.base",
    "likelihoods.labels",
    "likelihoods.numbers",
    "likelihoods",
    "layouts",
    "priors",
    "forward",
    "inputs",
    "blocks",
    "jacobians",
    "subsets",
    "structures.base",
    "structures.dual",
    "structures.full",
    "structures.gp",
    "structures.nystrom",
    "structures.kron",
    "structures.lowrank",
    "structures.diag",
    "structures",
    "curvature",
    "subnetworks",
    "posterior",
    "predictive",
    "preconditioners",
    "linear",
    "heads",
    "tasks",
    "linearised",
    "evidence",
    "validation",
    "tuning",
    "networks",
    "descent",
    "noisy_networks",
    "holdout",
    "training",
    "data",
    "labelling",
    "settings",
    "reading",
    "outputs",
    "fitting",
    "classes",
    "probabilities",
    "simplex",
    "columns",
    "bands",
    "inspection",
    "prediction",
    "laplace",
    "base",
    "classifier",
    "preferences",
    "regressor",
    "folds",
    "selection",
    "callbacks",
    "sampling",
    "stochastic",
    "elbo",
    "backprop",
    "bayes_by_backprop",
    "dropout",
    "ensembles",
    "plotting",
]

# The package's own __init__ imports from all of them, and none of them from it.
ORDER = [*(f"{PACKAGE}.{module}" for module in MODULES), PACKAGE]

DEPENDENCIES = {"joblib", "numpy", "scipy", "sklearn", "skorch", "torch"}
PLOTTING = f"{PACKAGE}.plotting"


def module_name(path):
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_package(module):
    """Return whether a module of ORDER is a folder with an __init__ file."""
    return any(other.startswith(f"{module}.") for other in ORDER)


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
    return [target if target in ORDER else source for target in targets]


def imports(node, module, in_function=False):
    """Yield (target, line, in_function) of every import below a syntax node."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, node.lineno, in_function
    elif isinstance(node, ast.ImportFrom):
        for target in import_from_targets(node, module):
            yield target, node.lineno, in_function
    inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in ast.iter_child_nodes(node):
        yield from imports(child, module, inside)


def fault(module, target, in_function):
    """Return what is wrong with an import, or None."""
    top = target.partition(".")[0]
    if top == PACKAGE:
        if target not in ORDER:
            return f"{target} is not listed in MODULES"
        if ORDER.index(target) >= ORDER.index(module):
            return f"{target} is not above {module} in MODULES"
    elif top == "matplotlib":
        if module != PLOTTING or not in_function:
            return f"matplotlib is imported inside functions of {PLOTTING} only"
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


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def test_every_module_is_listed():
    assert sorted(set(FILES) - set(ORDER)) == []


def test_every_listed_module_exists():
    assert [module for module in ORDER if module not in FILES] == []


def test_no_module_is_listed_twice():
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("module", [module for module in ORDER if module in FILES])
def test_imports_point_downward(module):
    source = FILES[module].read_text(encoding="utf-8")
    assert faults(source, module) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sklaplace.links", "from sklaplace import linalg"),
        ("sklaplace.links", "from .linalg import psd_factor"),
        ("sklaplace.structures.kron", "from ..linalg import symmetric_eigh"),
        ("sklaplace.structures.kron", "from .base import Structure"),
        ("sklaplace.structures", "from .kron import Kron"),
        ("sklaplace.curvature", "from sklaplace.structures import STRUCTURES"),
        ("sklaplace", "from .base import BaseLaplace\nfrom . import links"),
        ("sklaplace.linalg", "import math\nimport scipy.special\nfrom torch import nn"),
        ("sklaplace.plotting", "def plot():\n    import matplotlib.pyplot as plt"),
    ],
)
def test_accepts(module, source):
    assert faults(source, module) == []


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("sklaplace.linalg", "from sklaplace.links import LINKS", "not above"),
        ("sklaplace.linalg", "from . import links", "not above"),
        ("sklaplace.linalg", "import sklaplace.base", "not above"),
        ("sklaplace.linalg", "def f():\n    from .links import LINKS", "not above"),
        ("sklaplace.linalg", "from sklaplace import linalg", "not above"),
        ("sklaplace.links", "from sklaplace import __version__", "not above"),
        ("sklaplace.structures.base", "from ..curvature import ggn", "not above"),
        ("sklaplace.structures.kron", "from . import STRUCTURES", "not above"),
        ("sklaplace.base", "from sklaplace.helpers import x", "not listed"),
        ("sklaplace.base", "import pandas as pd", "not a runtime dependency"),
        ("sklaplace.base", "def f():\n    import matplotlib", "inside functions"),
        ("sklaplace.plotting", "import matplotlib.pyplot", "inside functions"),
    ],
)
def test_rejects(module, source, message):
    (found,) = faults(source, module)
    assert message in found
