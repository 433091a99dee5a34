"""Every public name is documented: numpydoc's checks, and a place in the reference."""

import inspect
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from numpydoc.docscrape import get_doc_object
from numpydoc.validate import Validator, validate

from sklaplace import LaplaceClassifier, LaplaceRegressor
from sklaplace.curvature.ggn import CURVATURES
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.dirichlet import APPROXIMATIONS
from sklaplace.dirichlet.links import LINKS
from sklaplace.estimators.predicting.glm_outputs import OUTPUT_MODELS
from sklaplace.posterior.tuning import TUNERS

DOCS = Path(__file__).parent.parent / "docs"
sys.path.append(str(DOCS))
from public_names import is_documented_by_base, members, public_objects  # noqa: E402

PUBLIC = public_objects()
CLASSES = {value for value in PUBLIC.values() if inspect.isclass(value)}
EXEMPT = {
    # a function may be named, and described, by what it returns: "Draws of …"; as D401
    "SS05",
    # one sentence can say all there is, as pydocstyle's convention has it
    "ES01",
}
SAME = re.compile(r"As in `([\w.]+)`")


def full_names():
    """Return full names of classes, functions, and methods of their defining class."""
    found = {}
    for name, value in PUBLIC.items():
        if not callable(value):
            continue
        found[value] = name
        for method, base in members(value).items() if inspect.isclass(value) else ():
            if not is_documented_by_base(method, base, CLASSES):
                found.setdefault((base, method), f"{name}.{method}")
    return sorted(found.values())


def is_public(name):
    """Return whether a name is a public object or a method of a public class."""
    owner, _, method = name.rpartition(".")
    return name in PUBLIC or (owner in PUBLIC and hasattr(PUBLIC[owner], method))


@cache
def documented(name):
    """Return the names of the parameters that an object's docstring describes."""
    return Documented(name).doc_parameters


class Documented(Validator):
    """Validator of docstrings that may refer to another object's parameters."""

    def __init__(self, obj_name):
        super().__init__(get_doc_object(self._load_obj(obj_name)))
        self.owner = obj_name.rpartition(".")[0]

    def _doc_parameters(self, sections):
        """Return parameters; those described "as for" another object have its types.

        Long lists of names continue on a second line.
        """
        found = {}
        for section in sections:
            for names, kind, text in self.doc[section]:
                other = SAME.match(" ".join(text))
                for name in re.split(r",\s+", names):
                    known = self._of(other[1])[name] if other and not kind else None
                    found[name] = (known[0], text) if known else (kind, text)
        return found

    def _of(self, other):
        """Return the parameters of an object named relative to its class or module."""
        names = f"{self.owner}.{other}", f"sklaplace.{other}"
        return documented(next(name for name in names if is_public(name)))

    @property
    def parameter_mismatches(self):
        """Return differences from the signature, ignoring the order of keywords."""
        found = super().parameter_mismatches
        has_order = not inspect.isclass(self.obj)
        return [(code, text) for code, text in found if has_order or code != "PR03"]


@pytest.mark.parametrize("name", full_names())
def test_docstring(name):
    found = validate(name, Documented)["errors"]
    assert [error for error in found if error[0] not in EXEMPT] == []


def listed():
    """Return the full names in the tables of the API reference, in order."""
    module, found = "", []
    for line in (DOCS / "api.rst").read_text(encoding="utf-8").splitlines():
        if line.startswith(".. currentmodule::"):
            module = line.split()[-1]
        elif re.fullmatch(r"   ~?[\w.]+", line):
            found.append(f"{module}.{line.strip(' ~')}")
    return found


def test_the_reference_lists_every_public_name_once():
    names = listed()
    assert set(PUBLIC) - set(names) == set(), "not in docs/api.rst"
    assert sorted(names) == sorted(PUBLIC)


OPTIONS = {
    "hessian_structure": STRUCTURES,
    "curvature": CURVATURES,
    "prior_structure": PRIOR_STRUCTURES,
    "prior_precision": TUNERS,
    "subset_of_weights": SUBSETS,
    "pred_type": OUTPUT_MODELS,
    "link_approx": LINKS,
    "dirichlet_approx": APPROXIMATIONS,
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", [LaplaceClassifier, LaplaceRegressor])
def test_docstrings_list_the_names_of_registries(kind, option):
    types = {p.name: p.type for p in get_doc_object(kind)["Parameters"]}
    if option in kind._get_param_names():
        missing = [name for name in OPTIONS[option] if f'"{name}"' not in types[option]]
        assert missing == []


def test_classes_and_functions_link_to_the_user_guide():
    callables = [(name, value) for name, value in PUBLIC.items() if callable(value)]
    missing = [name for name, value in callables if "User Guide <" not in value.__doc__]
    assert missing == []
