"""The user's code counts by what it does, a library's by its version."""

import functools
import importlib
import sys
import textwrap
import types
import weakref
from importlib.machinery import EXTENSION_SUFFIXES

import numpy as np
import pytest
import torch
from keys import DETAILS, Box, Net, define, differ, net, redefined, same, seeded
from torch import nn

from sklaplace.core.fingerprint import LIBRARIES, fingerprint

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
    monkeypatch.setitem(LIBRARIES, "torch", "0.0")
    assert fingerprint(nn.Linear) != before


@pytest.mark.parametrize(
    "library",
    ["python", "sklaplace", "torch", "skorch", "sklearn", "numpy", "scipy", "joblib"],
)
def test_versions_of_libraries_are_in_every_key(library, monkeypatch):
    before = fingerprint(1)
    monkeypatch.setitem(LIBRARIES, library, "0.0")
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


def test_modules_of_libraries_are_hashed_by_name_and_those_of_the_user_refused():
    names = ("builtins", "functools", "_io", "sklaplace.core.cache", "torch.nn")
    modules = [importlib.import_module(n) for n in (*names, "pytest", "hypothesis")]
    assert differ(modules)
    for name in ("__main__", __name__):
        with pytest.raises(TypeError, match="a module of the user"):
            fingerprint(sys.modules[name])


@pytest.mark.parametrize("module", ["__main__", __name__, "no_such_module", "", None])
def test_functions_in_no_library_are_hashed_by_their_code(module):
    functions = [define(f"def f(x): return x + {n}", "f") for n in (1, 2)]
    for f in functions:
        f.__module__ = module
    assert differ(functions)


@pytest.mark.parametrize(
    ("path", "is_library"),
    [
        ("own.py", False),
        ("site-packages/own.py", True),
        ("dist-packages/own/__init__.py", True),
        (f"own{EXTENSION_SUFFIXES[0]}", True),  # its code cannot be read
    ],
)
def test_an_installed_file_counts_by_its_build(path, is_library, tmp_path, monkeypatch):
    keys = []
    for content in ("", "1", "12"):
        file = tmp_path / content / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        module = types.ModuleType("own")
        exec("def f(x): return x", vars(module))
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, "own", module)
        keys.append(fingerprint(module.f))
        module.f.__code__ = (lambda x: x + 1).__code__
        assert (fingerprint(module.f) == keys[-1]) == is_library
    assert len(set(keys)) == (3 if is_library else 1)


def test_modules_of_the_user_that_import_each_other(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "cyclic_package"
    package.mkdir()
    (package / "__init__.py").write_text("from . import layers")
    (package / "layers.py").write_text(
        "import cyclic_package\n"
        "def f(x): return cyclic_package.layers.g(x)\n"
        "def g(x): return x"
    )
    layers = importlib.import_module("cyclic_package.layers")
    before = fingerprint(layers.f)
    layers.g = define("def g(x): return x + 1", "g")
    assert fingerprint(layers.f) != before


def test_exchanged_aliases_of_modules_count(monkeypatch):
    for name in ("own_one", "own_two"):
        module = types.ModuleType(name)
        module.f = define(f"def f(x): return {len(name)}", "f")
        module.value = name
        monkeypatch.setitem(sys.modules, name, module)
    one, two = sys.modules["own_one"], sys.modules["own_two"]
    source = "def f(x): return a.value, b.value"
    pairs = [(one, two), (two, one)]
    assert differ([define(source, "f", a=a, b=b) for a, b in pairs])
