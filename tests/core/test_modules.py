"""Keys say where code may use what they do not contain; nothing is cached then."""

import collections
import inspect
import os
import sys
import types

import numpy as np
import pytest
import torch
from keys import Net, define, fitted, net, redefined, seeded
from skorch import NeuralNetClassifier

from sklaplace.core.cache import cached, check_memory
from sklaplace.core.fingerprint import fingerprint


@pytest.fixture(autouse=True)
def config(monkeypatch):
    """Modules of the user: ``own_config``, and ``own_package.config``."""
    package = types.ModuleType("own_package")
    for name in ("own_config", "own_package.config"):
        module = types.ModuleType(name)
        module.WIDTH, module.Layer = 1, redefined()
        monkeypatch.setitem(sys.modules, name, module)
    package.config, package.__path__ = module, []
    module.os = os
    monkeypatch.setitem(sys.modules, "own_package", package)
    return sys.modules["own_config"]


def function(body):
    source = f"import own_config as cfg, own_package, sys\n{body}"
    return define(source, "f")


# reached by a string, or where the code does not name it
UNSEEN = {
    "getattr": "def f(x): return getattr(cfg, 'WIDTH')",
    "computed name": "def f(x): return getattr(cfg, 'WI' + x)",
    "inner module": "def f(x): return getattr(own_package.config, 'WIDTH')",
    "globals": "WIDTH = 1\ndef f(x): return globals()['WIDTH']",
    "vars": "def f(x): return vars(cfg)['WIDTH']",
    "dict": "def f(x): return cfg.__dict__['WIDTH']",
    "sys.modules": "def f(x): return sys.modules['own_config'].WIDTH",
    "get": "def f(x): return sys.modules.get('own_config').WIDTH",
    "imported sys": "def f(x):\n    import sys as s\n    return s.modules[x].WIDTH",
    "attrgetter": "import operator\ndef f(x): return operator.attrgetter('WIDTH')(cfg)",
    "importlib": """
def f(x):
    import importlib
    return importlib.import_module('own_config').WIDTH
""",
    "from importlib": """
from importlib import import_module as load
def f(x): return load('own_config').WIDTH
""",
    "__import__": "def f(x): return __import__('own_config').WIDTH",
    "eval": "def f(x): return eval('cfg.WIDTH')",
    "exec": "def f(x): exec('y = cfg.WIDTH')",
    "function's globals": "def f(x): return f.__globals__['cfg'].WIDTH",
    "argument": "def g(c): return c.WIDTH\ndef f(x): return g(cfg)",
    "local": "def f(x):\n    c = cfg\n    return [c][0].WIDTH",
    "imported inside": """
def f(x):
    import own_package.config as c
    return getattr(c, 'WIDTH')
""",
    "imported from": """
def f(x):
    from own_package import config
    return getattr(config, 'WIDTH')
""",
    "closure": """
def make():
    import own_config as c
    return lambda x: getattr(c, 'WIDTH')
f = make()
""",
    "nested": "def f(x): return [getattr(cfg, n) for n in ['WIDTH']]",
    "environment": "import os\ndef f(x): return os.environ.get('WIDTH')",
    "imported environment": "from os import environ\ndef f(x): return environ['W']",
    "variable": "import os\ndef f(x): return os.getenv('WIDTH')",
    "imported variable": "from os import getenv\ndef f(x): return getenv('WIDTH')",
    "method": """
class A:
    def f(self): return getattr(cfg, 'WIDTH')
f = A()
""",
    "environment inside": "def f(x):\n    import os; return os.environ['W']",
    "environ inside": "def f(x):\n    from os import environ; return environ['W']",
    "getenv inside": "def f(x):\n    from os import getenv as g; return g('W')",
    "renamed os inside": "def f(x):\n    import os as o; return o.getenv('W')",
    "path inside": "def f(x):\n    import os.path as p; return p.expandvars('$W')",
    "modules inside": "def f(x):\n    from sys import modules as m; return m[x].WIDTH",
    "builtin inside": "def f(x):\n    from builtins import globals as g; return g()[x]",
    "imported modules": "from sys import modules\ndef f(x): return modules[x].WIDTH",
    "listed modules": "from sys import modules\ndef f(x): return len(modules)",
    "resolve_name": "import pkgutil\ndef f(x): return pkgutil.resolve_name('a:W')",
    "resolve": "from pkgutil import resolve_name as r\ndef f(x): return r('cfg:W')",
    "getmodule": "import inspect\ndef f(x): return inspect.getmodule(f).cfg.WIDTH",
    "attrgetter of a module": """
import inspect, operator
def f(x): return operator.attrgetter('cfg.WIDTH')(inspect.getmodule(f))
""",
    "importlib.__import__": "import importlib as i\ndef f(x): return i.__import__(x).W",
    "reload": "import importlib\ndef f(x): return importlib.reload(x).WIDTH",
    "getenv, os of a library": "def f(x): return torch.os.getenv('WIDTH')",
    "expandvars": "import os\ndef f(x): return os.path.expandvars('$WIDTH')",
    "imported expandvars": "from os.path import expandvars as e\ndef f(x): e('$WIDTH')",
    "os by another name": "import os\ndef f(x):\n    o = os\n    return o.environ['W']",
    "computed name in os": "import os\ndef f(x): return getattr(os, 'environ')",
    "inside a module": "def f(x): return own_package.config.os.environ['WIDTH']",
}
if hasattr(os, "environb"):
    UNSEEN |= {
        "bytes": "import os\ndef f(x): return os.environb[b'W']",
        "imported bytes": "from os import environb\ndef f(x): return environb[b'W']",
        "variable in bytes": "import os\ndef f(x): return os.getenvb(b'W')",
    }

SEEN = {
    "attribute": "def f(x): return cfg.WIDTH + own_package.config.WIDTH",
    "call": "def f(x): return cfg.Layer(x)",
    "object": "def f(x): return getattr(x, 'WIDTH'), vars(x), x.__dict__, x.modules()",
    "library": """
import torch
from torch.nn import functional as F
def f(x): return getattr(torch, x), getattr(F, x), vars(torch.nn)
""",
    "library inside": """
def f(x):
    import torch.nn as nn
    from torch.nn import functional as F
    return getattr(nn, x), getattr(F, x)
""",
    "function inside": """
def f(x):
    from own_config import Layer as L, WIDTH as w
    import own_package.config as c, sys
    return L(w), c.WIDTH, sys.version, sys.path
""",
    "library's functions inside": """
def f(x):
    import os.path as p, importlib.util, inspect
    from os import getpid, path
    from sys import version_info as v
    return p.join('a'), path.exists(x), inspect.isclass(x), getpid(), v, p.sep
""",
    "other attributes": """
import importlib, inspect, os, sys
def f(x):
    if os.path.exists(x) and inspect.isclass(x): return os.sep, os.getpid()
    return sys.version_info, importlib.util, os.cpu_count() or sys.maxsize
""",
    "method eval": "def f(x): return x.eval(), x.exec(), x.globals()",
    "own name": "def globals(): return 1\ndef f(x): return globals()",
    "argument of the name": "def f(cfg): return getattr(cfg, 'WIDTH')",
}


@pytest.mark.parametrize("body", UNSEEN.values(), ids=UNSEEN)
def test_what_a_key_may_lack(body):
    key = fingerprint({"estimator": [function(body)]})
    assert list(key.unseen), body
    assert all(name.startswith("__main__.") for name in key.unseen)


@pytest.mark.parametrize("body", SEEN.values(), ids=SEEN)
def test_ordinary_code_has_keys(body):
    assert fingerprint(function(body)).unseen == {}


@pytest.mark.parametrize(
    "value",
    [
        *(Net, redefined(), net(), torch.nn.Transformer, NeuralNetClassifier, np.sum),
        *(inspect.getmembers, collections.namedtuple("Pair", "a b")),
        *(seeded(Net), fitted(), fitted(module=seeded(Net))),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_ordinary_values_have_keys(value):
    assert fingerprint(value).unseen == {}


def test_computed_attributes_of_a_module_count(config):
    keys = []
    for value in (1, 2):
        config.__getattr__ = define(f"def g(name): return {value}", "g")
        keys.append(fingerprint(function("def f(x): return cfg.LAZY")))
    assert len(set(keys)) == 2
    assert not keys[0].unseen


def test_nothing_is_taken_from_memory_where_a_key_may_lack_something(tmp_path, config):
    memory, f = check_memory(tmp_path), function(UNSEEN["getattr"])
    message = r"memory has no effect: __main__\.f uses the module own_config otherwise"
    for width in (1, 2):
        config.WIDTH = width
        with pytest.warns(UserWarning, match=message) as caught:
            assert cached(memory, fingerprint(f), lambda: f(0)) == width
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert "config.WIDTH" in str(caught[0].message)
    assert not list(tmp_path.rglob("output.pkl"))


@pytest.mark.parametrize(
    "body",
    [
        "from sys import modules\ndef f(x): return modules[x]",
        "def f(x): return own_package.config.modules[x]",
    ],
)
def test_all_modules_as_a_variable_are_no_error(body, config):
    sys.modules["own_package.config"].modules = sys.modules
    reasons = fingerprint(function(body)).unseen.values()
    assert list(reasons) == ["uses sys.modules"]
