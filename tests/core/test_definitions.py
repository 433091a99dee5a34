"""The user's code counts by what it does, a library's by its version."""

import functools
import importlib
import sys
import textwrap
import weakref

import numpy as np
import pytest
import torch
from keys import DETAILS, Box, Net, define, differ, net, redefined, same, seeded
from torch import nn

from sklaplace.core import definitions
from sklaplace.core.fingerprints import fingerprint

FUNCTIONS = """
    def plain(x): return x + 1
    def constant(x): return x + 2
    def constant_type(x): return x + 1.0
    def attribute(x): return x.a
    def other_attribute(x): return x.b
    def default(x, y=1): return x + y
    def other_default(x, y=2): return x + y
    def keyword(x, *, y=1): return x + y
    def other_keyword(x, *, y=2): return x + y
    def nested(x):
        def inner(z): return z * 3
        return inner(x)
    def other_nested(x):
        def inner(z): return z * 4
        return inner(x)
    def listed(x): return [x for _ in range(3)]
    def other_listed(x): return [x for _ in range(4)]
    def chosen(x): return x in {"a", "b", "c", "d"}
    def other_chosen(x): return x in {"a", "b", "c", "e"}
    def guarded(x):
        try: return 1 / x
        except ZeroDivisionError: return 0
    def other_guarded(x):
        try: return 1 / x
        except ValueError: return 0
    def generator(x): yield x
"""


def test_functions_count_by_their_code():
    scope = {"__name__": "__main__"}
    exec(textwrap.dedent(FUNCTIONS), scope)
    functions = [f for name, f in scope.items() if not name.startswith("__")]
    assert len(functions) > 15
    for f in functions:  # the code alone, without the name
        f.__name__ = f.__qualname__ = "f"
    assert differ(functions)


def test_lines_and_files_do_not_count():
    source = "def f(x):\n    return x + 1\n"
    one = define(source, "f")
    two = define(f"\n\n# a comment\n{source}\n", "f")
    three = {"__name__": "__main__"}
    exec(compile(source, "elsewhere.py", "exec"), three)
    assert same(one, two, three["f"])


def test_names_of_functions_and_classes_count():
    # a result refers to them by name
    f, g = (define(f"def {name}(x): return x", name) for name in "fg")
    assert differ([f, g])
    A, B = (define(f"class {name}: pass", name) for name in "AB")
    assert differ([A, B, A(), B()])


def test_closures_count_by_value():
    def add(n):
        return lambda x: x + n

    assert same(add(1), add(1))
    assert differ([add(1), add(2), add(1.0), add([1]), add(np.ones(1)), add(add(1))])


def test_globals_count_where_they_are_used():
    source = "def f(x): return g(x) + C * len(D)"

    def f(inner="x", **names):
        g = define(f"def g(x): return {inner}", "g")
        return define(source, "f", **{"g": g, "C": 1, "D": [1], **names})

    assert same(f(), f(), f(unused=1), f(unused=open))
    assert differ([f(), f("x + 1"), f(C=2), f(D=[2]), f(len=max), f(g=len)])
    # an attribute of the same name is no global
    attribute = [define("def f(x): return x.C", "f", C=value) for value in (1, 2)]
    assert same(*attribute)


def test_globals_of_nested_functions_count():
    source = "def f(x):\n    return [(lambda z: z + C)(y) for y in x]"
    assert differ([define(source, "f", C=c) for c in (1, 2)])


def test_decorated_partial_and_bound_functions():
    def twice(function):
        @functools.wraps(function)
        def wrapper(x):
            return function(function(x))

        return wrapper

    one, two = (define(f"def f(x): return x + {n}", "f") for n in (1, 2))
    partial = functools.partial
    bound = [Box(a=1).__eq__, Box(a=2).__eq__, Net.forward, seeded(Net).forward]
    assert differ(
        [
            *(one, two, twice(one), twice(two), torch.no_grad()(one)),
            *(torch.no_grad()(two), functools.lru_cache(one), functools.lru_cache(two)),
            *(partial(one), partial(two), partial(one, 1), partial(one, x=1)),
            *(*bound, np.vectorize(one), np.vectorize(two)),
            *(one.__get__(1), one.__get__(2), two.__get__(1)),
        ]
    )
    marked = define("def f(x): return x + 1", "f")
    marked.order = 2
    assert differ([one, marked])


def test_functions_that_call_each_other():
    source = """
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - {step})
    """
    one, two, other = (define(source.format(step=s), "even") for s in (1, 1, 2))
    assert same(one, two)
    assert differ([one, other])
    assert same([one, one], [one, two])


def test_a_class_defined_anew_counts_by_its_code():
    assert same(redefined(), redefined())
    changed = [redefined(**{name: 2}) for name in DETAILS]
    assert differ([redefined(), *changed])
    assert differ([net(module) for module in (redefined(), *changed)])
    modules = [seeded(module) for module in (redefined(), redefined(shift=2))]
    assert differ(modules)
    assert same(modules[0], seeded(redefined()))


def test_a_class_changed_in_place_counts_anew():
    module = redefined()
    before = fingerprint(module)
    module.forward = lambda self, x: x
    assert fingerprint(module) != before


def test_looking_at_a_class_does_not_change_its_key():
    plain = define("class A:\n    x: int = 1", "A")
    before = fingerprint(plain)
    plain().__reduce_ex__(4)  # pickle notes the slots in the class
    _ = plain.__annotations__
    weakref.ref(plain)
    assert fingerprint(plain) == before


def test_classes_of_many_kinds():
    source = """
        import abc, enum, typing
        from dataclasses import dataclass, field

        class Colour(enum.Enum):
            RED = 1
            BLUE = {n}

        class Abstract(abc.ABC):
            @abc.abstractmethod
            def f(self): return {n}

        @dataclass(frozen=True)
        class Settings:
            a: int = {n}
            b: list = field(default_factory=list)

        class Pair(typing.NamedTuple):
            a: int = {n}

        class Meta(type):
            def __call__(cls): return {n}

        class Made(metaclass=Meta): pass

        class Slotted:
            __slots__ = ("a",)
            def f(self): return {n}
    """
    for name in ("Colour", "Abstract", "Settings", "Pair", "Made", "Slotted"):
        one, two, other = (define(source.format(n=n), name) for n in (2, 2, 3))
        assert same(one, two), name
        assert differ([one, other]), name
    colours = define(source.format(n=2), "Colour")
    assert differ([colours.RED, colours.BLUE])


def test_modules_of_the_user_count_by_what_is_used(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    package = tmp_path / "user_package"
    package.mkdir()

    def written(f=1, g=1):
        (package / "__init__.py").write_text("from . import layers")
        code = f"LOG = open(__file__)\ndef f(x): return x + {f}\ndef g(x): return {g}"
        (package / "layers.py").write_text(code)
        (package / "other.py").touch()
        for name in [name for name in sys.modules if name.startswith("user_package")]:
            if "layers" in name:
                sys.modules[name].LOG.close()
            del sys.modules[name]
        importlib.invalidate_caches()

    sources = {
        "name": "from user_package.layers import f\ndef h(x): return f(x)",
        "module": "import user_package\ndef h(x): return user_package.layers.f(x)",
        "alias": "from user_package import layers as m\ndef h(x): return m.f(x)",
        "local name": """
            def h(x):
                from user_package.layers import f
                return f(x)
        """,
        "local": "def h(x):\n    import user_package.layers as m\n    return m.f(x)",
        "local package": """
            def h(x):
                import user_package.other
                return user_package.layers.f(x)
        """,
        "closure": """
            def make():
                import user_package.layers as m
                return lambda x: m.f(x)
            h = make()
        """,
    }
    keys = {}
    for f, g in [(1, 1), (1, 2), (2, 2)]:
        for name, source in sources.items():
            written(f, g)
            keys[name, f, g] = fingerprint(define(source, "h"))
    written()
    for name in sources:
        assert keys[name, 1, 1] == keys[name, 1, 2], name
        assert keys[name, 1, 1] != keys[name, 2, 2], name


def test_imports_inside_functions_do_not_depend_on_what_is_loaded():
    source = """
        def f(x):
            import wave
            try:
                import no_such_module_at_all
            except ImportError:
                pass
            return wave
    """
    sys.modules.pop("wave", None)
    before = fingerprint(define(source, "f"))
    assert "wave" not in sys.modules
    importlib.import_module("wave")
    assert fingerprint(define(source, "f")) == before


def test_classes_of_libraries_count_by_name_and_version(monkeypatch):
    before = fingerprint(nn.Linear)
    monkeypatch.setattr(nn.Linear, "extra_repr", lambda self: "")
    assert fingerprint(nn.Linear) == before
    monkeypatch.setitem(definitions.LIBRARIES, "torch", "0.0")
    assert fingerprint(nn.Linear) != before


@pytest.mark.parametrize(
    "library", ["sklaplace", "torch", "skorch", "sklearn", "numpy", "scipy", "joblib"]
)
def test_versions_of_libraries_are_in_every_key(library, monkeypatch):
    before = fingerprint(1)
    monkeypatch.setitem(definitions.LIBRARIES, library, "0.0")
    assert fingerprint(1) != before


def test_the_version_of_python_is_in_every_key(monkeypatch):
    before = fingerprint(1)
    monkeypatch.setattr(definitions, "PYTHON", "CPython 2.7")
    assert fingerprint(1) != before


def test_defaults_of_torch_are_in_every_key():
    before = fingerprint(1)
    torch.set_default_dtype(torch.float64)
    try:
        assert fingerprint(1) != before
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert fingerprint(1) != before
    assert fingerprint(1) == before


def test_libraries_are_told_from_the_users_code():
    release = definitions.module_release
    for name in ("__main__", __name__, "no_such_module", "", None):
        assert release(name) is None
    for name in ("builtins", "functools", "_io", "sklaplace.core.caching", "torch.nn"):
        assert release(name)
    assert release("pytest") != release("hypothesis")


@pytest.mark.parametrize(
    ("path", "is_library"),
    [
        ("own.py", False),
        ("site-packages/own.py", True),
        ("dist-packages/own/__init__.py", True),
        (f"own{definitions.EXTENSION_SUFFIXES[0]}", True),  # its code cannot be seen
    ],
)
def test_an_installed_file_counts_by_its_build(path, is_library, tmp_path):
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    keys = []
    for content in ("", "1", "12"):
        file.write_text(content)
        keys.append(definitions._release.__wrapped__("own", str(file)))
    assert len(set(keys)) == (3 if is_library else 1)
    assert (None in keys) == (not is_library)
