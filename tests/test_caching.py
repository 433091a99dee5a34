"""Keys are equal exactly where results are; the store never gives a wrong one."""

import copy
import functools
import gc
import importlib
import io
import itertools
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import weakref
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import sparse, special
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import Checkpoint, EarlyStopping, EpochScoring, LRScheduler
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import SliceDict, predefined_split
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import Subset, TensorDataset

from sklaplace import caching
from sklaplace.caching import cached, check_memory, fingerprint

ROOT = Path(caching.__file__).parents[1]


# ------------------------------------------------------------------- helpers
class Net(nn.Module):
    def __init__(self, width=4, activation=torch.tanh):
        super().__init__()
        self.inner = nn.Linear(3, width)
        self.outer = nn.Linear(width, 2)
        self.activation = activation

    def forward(self, x):
        return self.outer(self.activation(self.inner(x)))


class Rows(torch.utils.data.Dataset):
    def __init__(self, X, y):
        self.X, self.y = X, y

    def __len__(self):
        return len(self.X)

    def __getitem__(self, index):
        return self.X[index], self.y[index]


class Box:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def seeded(make, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def data(n=20):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 3)).astype(np.float32), np.arange(n) % 2


def net(module=Net, **params):
    settings = {"criterion": nn.CrossEntropyLoss, "max_epochs": 2, "verbose": 0}
    return NeuralNetClassifier(module, **{**settings, **params})


def fitted(seed=0, **params):
    return seeded(lambda: net(**params).fit(*data()), seed)


def define(source, name, **names):
    """Execute code as a notebook would, and return what it defines."""
    scope = {"__name__": "__main__", "torch": torch, "nn": nn, **names}
    exec(textwrap.dedent(source), scope)
    return scope[name]


def differ(values):
    keys = [fingerprint(value) for value in values]
    return len(set(keys)) == len(keys)


def same(*values):
    return len({fingerprint(value) for value in values}) == 1


# ------------------------------------------------------------- plain values
def test_key_is_a_hexadecimal_string():
    key = fingerprint({"a": 1})
    assert isinstance(key, str)
    assert len(key) == 64
    assert set(key) <= set("0123456789abcdef")


def test_every_value_has_a_key_of_its_own():
    values = [
        *(None, True, False, 1, 0, 1.0, 0.0, -0.0, 1j, "1", "True", "None", b"1", ...),
        *([], (), {}, set(), frozenset(), [1], (1,), {1}, frozenset({1}), {1: 1}),
        *([1, 2], [2, 1], [12], ["1", "2"], ["1, 2"], [[1, 2]], [[1], 2], [1, [2]]),
        *([1.0, 2], [True, 2], {"a": [1, 2]}, {"a": [1], "b": 2}, {"a": {"b": 1}}),
        *({1: "a", True.real + 1: "b"}, {"a": 1, "b": 2}, {"a": "b"}, {"b": "a"}),
        *(float("nan"), float("inf"), "nan", 10**30, "é", "\ud800", range(3)),
        *(slice(3), bytearray(b"1"), OrderedDict(a=1), SliceDict(a=np.ones(2))),
        *(np.float32(1), np.float64(1), np.int64(1), np.bool_(True), np.str_("1")),
        *(np.array(1), np.array([1]), np.array([[1]]), np.array([1.0]), np.array("1")),
        *(torch.tensor(1), torch.tensor([1]), torch.tensor(1.0), torch.float32),
        *(np.dtype("f4"), np.dtype("f8"), np.dtype(">f4"), np.float32, float, "float"),
        *(torch.device("cpu"), "cpu", torch.Size([1]), nn.ReLU, nn.Tanh, nn.ReLU()),
        *(
            nn.functional.relu,
            torch.relu,
            torch.Tensor.relu,
            len,
            np.exp,
            special.expit,
        ),
        *("".join, "a".join, [].append, str.upper, functools.partial(print), print),
        *(os, sys, Path("a"), Path("b"), list[int], list[float], fingerprint, Box),
    ]
    assert differ(values)


def test_sharing_and_interning_do_not_count():
    one, text = [1, "ab"], "".join(["a", "b"])
    assert same([one, one], [[1, "ab"], [1, text]])
    assert same([text, "ab"], ["ab", "ab"])
    x = np.arange(3.0)
    assert same({"a": x, "b": x}, {"a": x, "b": x.copy()})
    box = Box(a=[1])
    assert same((box, box), (Box(a=[1]), Box(a=[1])))


def test_order_counts_where_it_can_matter():
    assert differ([{"a": 1, "b": 2}, {"b": 2, "a": 1}])
    assert same({"a", "b", "c"}, {"c", "b", "a"})
    assert same(Box(a=1, b=2), Box(b=2, a=1))


def test_objects_count_by_class_and_attributes():
    Point = namedtuple("Point", "x y")
    assert differ([Box(a=1), Box(a=2), Box(b=1), Box(), Point(1, 2), Point(2, 1)])
    assert differ([(1, 2), Point(1, 2)])
    # names that the walk itself uses
    assert differ([Box(args=1), Box(args=2), Box(items=1), Box(state=1)])
    slotted = define("class S:\n    __slots__ = ('a', 'b')", "S")
    one, two = slotted(), slotted()
    one.a, two.a = 1, 2
    assert differ([one, two, slotted()])


@given(
    array := hnp.arrays(
        st.sampled_from(["f8", "f4", "i8", "u1", "?", "M8[s]", "U3", ">f4", "c16"]),
        hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
    ),
    array,
)
def test_arrays_count_by_dtype_shape_and_bytes(a, b):
    def content(x):
        return x.dtype.str, x.shape, x.tobytes()

    assert same(a, a.copy(), np.asfortranarray(a).reshape(a.shape), copy.deepcopy(a))
    wide = np.repeat(a[..., None], 2, axis=-1)
    assert same(a, wide[..., 1])
    assert same(a, b) == (content(a) == content(b))


def test_one_element_of_a_large_array_counts():
    X = np.random.default_rng(0).normal(size=(1437, 64))
    other = X.copy()
    other[700, 3] = np.nextafter(other[700, 3], 1)
    assert differ([X, other, X.astype("f4"), X.reshape(64, -1), X[:-1]])


def test_arrays_of_all_kinds(tmp_path):
    strings = np.array(["a", "b"], dtype=np.dtypes.StringDType())
    assert same(strings, strings.copy(), np.array(strings))
    objects = np.array(["a", None, [1]], dtype=object)
    assert same(objects, copy.deepcopy(objects))
    masked = np.ma.array([1, 2], mask=[0, 1])
    structured = np.array([(1, "a")], dtype=[("n", "i4"), ("s", "U1")])
    assert differ(
        [
            *(strings, np.array(["a", "b"]), np.array(["a", "c"], dtype=strings.dtype)),
            *(objects, objects[:2], np.array(["a", None, [2]], dtype=object)),
            *(masked, masked.data, np.ma.array([1, 2]), masked.view(np.recarray)),
            *(structured, np.array([(2, "a")], dtype=structured.dtype)),
            *(np.zeros((0, 3)), np.zeros((3, 0)), np.zeros(0), np.zeros(3, "V0")),
        ]
    )
    X = np.arange(6.0)
    np.save(tmp_path / "X.npy", X)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    assert same(mapped, X)  # joblib hands arrays to its workers in this way


def test_tables_and_sparse_arrays():
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", "y"], "c": [0.5, None]})
    assert same(frame, frame.copy(), pickle.loads(pickle.dumps(frame)))
    other = frame.copy()
    other.loc[1, "b"] = "z"
    changed = [other, frame.rename(columns={"a": "d"}), frame[::-1], frame["a"]]
    assert differ([frame, *changed, frame["a"].astype("category")])
    matrix = sparse.random(9, 9, 0.5, format="csr", random_state=0)
    assert same(matrix, matrix.copy(), pickle.loads(pickle.dumps(matrix)))
    assert differ([matrix, matrix.tocsc(), 2 * matrix, matrix.toarray()])


def test_random_states_count_by_state():
    def states():
        legacy, modern = np.random.RandomState(0), np.random.default_rng(0)
        return [legacy, modern, torch.Generator().manual_seed(0)]

    for one, two in zip(states(), states(), strict=True):
        assert same(one, two)
    used = states()
    used[0].normal(), used[1].normal(), torch.rand(1, generator=used[2])
    others = [np.random.RandomState(1), np.random.default_rng(1)]
    assert differ([*states(), *used, *others, torch.Generator().manual_seed(1)])


# ------------------------------------------------------- tensors and modules
def test_tensors_count_by_content():
    t = torch.arange(6.0).reshape(2, 3)
    assert same(t, t.clone(), t.T.contiguous().T, torch.stack([t, t], -1)[..., 0])
    marked = nn.Parameter(t.clone())
    marked.no_decay = True
    hooked = nn.Parameter(t.clone())
    hooked.register_hook(torch.neg)
    values = [
        *(t, t.double(), t.half(), t.bfloat16(), t.reshape(3, 2), t + 1, t.to_sparse()),
        *(t.clone().requires_grad_(), nn.Parameter(t), marked, hooked, t.numpy()),
        *(torch.zeros(2, 3), torch.zeros(2, 3, device="meta"), torch.zeros(0, 3)),
        *(torch.tensor(1.0), torch.tensor([1.0]), torch.tensor(1j), torch.tensor(True)),
        *(t[0].to_sparse(), torch.complex(t, t).conj(), torch.complex(t, t)),
    ]
    assert differ(values)


def test_gradients_left_behind_do_not_count():
    one, two = (seeded(Net) for _ in range(2))
    one(torch.ones(1, 3)).sum().backward()
    assert same(one, two)


def test_modules_count_by_weights_buffers_mode_and_attributes():
    def batch_norm():
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    def changed(change, make=Net):
        module = seeded(make)
        change(module)
        return module

    def edit(m):
        m.inner.weight.data[0, 0] += 1e-6

    modules = [
        seeded(Net),
        seeded(Net, 1),
        seeded(lambda: Net(activation=torch.relu)),
        changed(edit),
        changed(nn.Module.eval),
        changed(nn.Module.double),
        changed(lambda m: setattr(m, "scale", 2)),
        changed(lambda m: m.inner.weight.requires_grad_(False)),
        changed(lambda m: m.register_forward_hook(lambda *_: None)),
        changed(lambda m: m.register_forward_pre_hook(lambda *_: None)),
        changed(lambda m: parametrizations.weight_norm(m.inner)),
        seeded(batch_norm),
        changed(lambda m: m[1].running_mean.add_(1), batch_norm),
        *(nn.Dropout(0.1), nn.Dropout(0.2), nn.LazyLinear(3), nn.LazyLinear(4)),
        *(seeded(lambda: nn.LSTM(3, 2)), seeded(lambda: nn.GRU(3, 2))),
    ]
    assert differ(modules)


@pytest.mark.parametrize(
    "make",
    [
        Net,
        lambda: nn.LSTM(3, 2),
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ParameterList()}),
        lambda: nn.LazyLinear(3),
        lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    ],
)
def test_equal_modules_have_equal_keys(make):
    one, two = seeded(make), seeded(make)
    assert same(one, two)
    if not hasattr(one, "parametrizations"):  # copies refer to the original
        assert same(one, copy.deepcopy(one), pickle.loads(pickle.dumps(one)))


def test_hooks_count_by_content_and_order_but_not_by_their_running_number():
    def hooked(*hooks):
        module = seeded(Net)
        module.handles = [module.register_forward_hook(hook) for hook in hooks]
        return module

    def one(*_):
        return None

    def two(_, __, out):
        return 2 * out

    assert same(hooked(one, two), hooked(one, two), copy.deepcopy(hooked(one, two)))
    assert differ([hooked(one, two), hooked(two, one), hooked(one), hooked()])


def test_tied_weights_are_told_from_equal_ones():
    def pair(tied):
        first, second = (seeded(lambda: nn.Linear(2, 2)) for _ in range(2))
        if tied == "weight":
            second.weight = first.weight
        if tied == "memory":
            second.weight.data = first.weight.data
        return nn.Sequential(first, first if tied == "layer" else second)

    assert differ([pair(None), pair("weight"), pair("layer")])
    assert differ([pair(None), pair("memory")])
    tied = pair("weight")
    assert same(tied, copy.deepcopy(tied), pickle.loads(pickle.dumps(tied)))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_module_counts_by_what_was_compiled():
    one = torch.compile(seeded(Net))
    assert same(one, torch.compile(seeded(Net)))
    assert differ([one, torch.compile(seeded(Net, 1)), seeded(Net)])
    in_place = seeded(Net)
    in_place.compile()
    assert same(in_place, seeded(Net))


# ---------------------------------------------------------------- skorch nets
def splitting(rows):
    return predefined_split(Dataset(*(part[:rows] for part in data())))


NETS = {
    "default": lambda: net(),
    "module": lambda: net(nn.Linear),
    "module instance": lambda: net(seeded(Net)),
    "other weights": lambda: net(seeded(Net, 1)),
    "module factory": lambda: net(lambda: nn.Linear(3, 2)),
    "other factory": lambda: net(lambda: nn.Linear(3, 3)),
    "module__width": lambda: net(module__width=5),
    "module__activation": lambda: net(module__activation=torch.relu),
    "lr": lambda: net(lr=0.02),
    "max_epochs": lambda: net(max_epochs=3),
    "criterion": lambda: net(criterion=nn.NLLLoss),
    "optimizer": lambda: net(optimizer=torch.optim.Adam),
    "optimizer__": lambda: net(optimizer__momentum=0.9),
    "groups": lambda: net(optimizer__param_groups=[("inner*", {"lr": 0.2})]),
    "iterator": lambda: net(iterator_train__shuffle=True),
    "dataset": lambda: net(dataset=Rows),
    "device": lambda: net(device="meta"),
    "compile": lambda: net(compile=True),
    "no split": lambda: net(train_split=None),
    "split": lambda: net(train_split=ValidSplit(4)),
    "split seed": lambda: net(train_split=ValidSplit(0.2, random_state=1)),
    "given rows": lambda: net(train_split=splitting(5)),
    "other rows": lambda: net(train_split=splitting(6)),
    "stopping": lambda: net(callbacks=[("stop", EarlyStopping(patience=3))]),
    "patience": lambda: net(callbacks=[("stop", EarlyStopping(patience=4))]),
    "name": lambda: net(callbacks=[("end", EarlyStopping(patience=3))]),
    "bare": lambda: net(callbacks=[EarlyStopping(patience=3)]),
    "set later": lambda: net(
        callbacks=[("stop", EarlyStopping(patience=3))], callbacks__stop__patience=9
    ),
    "step": lambda: net(callbacks=[LRScheduler("StepLR", step_size=1)]),
    "step class": lambda: net(
        callbacks=[LRScheduler(torch.optim.lr_scheduler.StepLR, step_size=1)]
    ),
    "checkpoint": lambda: net(callbacks=[Checkpoint(dirname="a")]),
    "folder": lambda: net(callbacks=[Checkpoint(dirname="b")]),
    "monitor": lambda: net(callbacks=[Checkpoint(monitor=lambda net: True)]),
    "other monitor": lambda: net(callbacks=[Checkpoint(monitor=lambda net: False)]),
    "scoring": lambda: net(callbacks=[EpochScoring(lambda net, X, y: 0.0)]),
    "disabled": lambda: net(callbacks="disable"),
    "regressor": lambda: NeuralNetRegressor(Net, max_epochs=2, verbose=0),
}


def test_every_parameter_of_a_net_counts():
    assert differ([make() for make in NETS.values()])


@pytest.mark.parametrize("name", NETS)
def test_clones_and_copies_of_nets_have_the_same_key(name):
    one = NETS[name]()
    assert same(one, clone(one), NETS[name]())
    assert same({"estimator": one}, {"estimator": clone(clone(one))})
    if name not in ("monitor", "other monitor", "scoring") and "factory" not in name:
        assert same(one, pickle.loads(pickle.dumps(one)))


def test_what_training_leaves_in_callbacks_does_not_count():
    stopping = EarlyStopping(patience=3)
    before = fingerprint(net(callbacks=[stopping]))
    trained = fitted(callbacks=[stopping])
    assert fingerprint(clone(trained)) == before


def test_trained_nets_count_by_their_state():
    def loaded(seed):
        return net().initialize().load_params(buffer(fitted(seed)))

    def buffer(trained):
        file = io.BytesIO()
        trained.save_params(f_params=file)
        file.seek(0)
        return file

    one = FrozenEstimator(fitted())
    assert same(one, clone(one), FrozenEstimator(fitted()))
    assert same(one, pickle.loads(pickle.dumps(one)))
    edited = fitted()
    edited.module_.inner.weight.data[0, 0] += 1e-6
    weighted = fitted()
    weighted.criterion_.weight = torch.ones(2)
    nets = [fitted(), fitted(1), edited, weighted, net(), fitted(max_epochs=3)]
    assert differ([*map(FrozenEstimator, nets), one.estimator.module_])
    # the same weights, but another history and optimizer
    trained = fitted(optimizer__momentum=0.9)
    assert differ([trained, net().initialize()])


def test_datasets_count_by_their_content():
    X, y = data()
    tensors = TensorDataset(torch.tensor(X), torch.tensor(y))
    changed = X.copy()
    changed[3, 1] += 1
    sets = [
        *(Dataset(X, y), Dataset(changed, y), Dataset(X, 1 - y), Dataset(X)),
        *(tensors, TensorDataset(torch.tensor(changed), torch.tensor(y))),
        *(Rows(X, y), Rows(changed, y), Rows(X, list(y))),
        *(Subset(tensors, [0, 1, 2]), Subset(tensors, [0, 2, 1]), Subset(tensors, [0])),
        *(Subset(Rows(X, y), range(3)), Subset(Rows(X, y), np.arange(3))),
        *({"x": X}, {"x": changed}, {"z": X}, (X, X), (X, changed)),
    ]
    assert differ(sets)
    for one in sets:
        assert same(one, copy.deepcopy(one), pickle.loads(pickle.dumps(one)))


# ----------------------------------------------------- functions and classes
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


CLASS = """
    class Base(nn.Module):
        bias = {bias}
        def helper(self, x): return x + {shift}

    class Net(Base):
        width: int = {width}
        def __init__(self, n={n}):
            super().__init__()
            self.layer = nn.Linear(n, 2)

        def forward(self, x):
            return self.helper(self.layer(x)) * self.factor

        @property
        def factor(self): return {factor}

        @staticmethod
        def static(x): return x + {static}

        @classmethod
        def make(cls): return cls({made})

        @functools.cached_property
        def cached(self): return {cached}

        class Inner:
            value = {inner}
"""
DETAILS = dict.fromkeys(
    "bias shift width n factor static made cached inner".split(),  # noqa: SIM905
    1,
)


def redefined(**details):
    source = CLASS.format(**{**DETAILS, **details})
    return define(source, "Net", functools=functools)


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
    monkeypatch.setitem(caching.LIBRARIES, "torch", "0.0")
    assert fingerprint(nn.Linear) != before


@pytest.mark.parametrize(
    "library", ["sklaplace", "torch", "skorch", "sklearn", "numpy", "scipy", "joblib"]
)
def test_versions_of_libraries_are_in_every_key(library, monkeypatch):
    before = fingerprint(1)
    monkeypatch.setitem(caching.LIBRARIES, library, "0.0")
    assert fingerprint(1) != before


def test_the_version_of_python_is_in_every_key(monkeypatch):
    before = fingerprint(1)
    monkeypatch.setattr(caching, "PYTHON", "CPython 2.7")
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
    release = caching._module_release
    for name in ("__main__", __name__, "no_such_module", "", None):
        assert release(name) is None
    for name in ("builtins", "functools", "_io", "sklaplace.caching", "torch.nn"):
        assert release(name)
    assert release("pytest") != release("hypothesis")


@pytest.mark.parametrize(
    ("path", "is_library"),
    [
        ("own.py", False),
        ("site-packages/own.py", True),
        ("dist-packages/own/__init__.py", True),
        (f"own{caching.EXTENSION_SUFFIXES[0]}", True),  # its code cannot be seen
    ],
)
def test_an_installed_file_counts_by_its_build(path, is_library, tmp_path):
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    keys = []
    for content in ("", "1", "12"):
        file.write_text(content)
        keys.append(caching._release.__wrapped__("own", str(file)))
    assert len(set(keys)) == (3 if is_library else 1)
    assert (None in keys) == (not is_library)


# ------------------------------------------------------------- graphs at large
def chain(*links):
    """Boxes, each knowing the next one's number; the last knows nothing."""
    boxes = [Box() for _ in links]
    for box, link in zip(boxes, links, strict=True):
        box.next = None if link is None else boxes[link]
    return boxes


def test_cycles_end_and_count_by_their_shape():
    loop, other = [1], [1]
    loop.append(loop)
    other.append([1, other])
    assert same(loop, copy.deepcopy(loop))
    assert differ([loop, other, [1, [1]]])
    rings = [chain(1, 2, 0)[0], chain(1, 0)[0], chain(0)[0], chain(1, 1)[0]]
    assert differ(rings)
    for ring in rings:
        assert same(ring, copy.deepcopy(ring), pickle.loads(pickle.dumps(ring)))


def test_cycles_can_be_shared():
    a, b = chain(1, 0)
    c, d = chain(1, 0)
    assert same([a, b], [c, d])
    assert same([a, a], [a, c], [c, d][:1] * 2)


def test_a_cycle_is_hashed_with_what_it_leads_to():
    def family(child_of_second):
        first, second = Box(name=1), Box(name=2)
        child = Box(parent=first)
        first.child = child
        second.child = child if child_of_second == 1 else Box(parent=second)
        return [first, second]

    assert differ([family(1), family(2)])


@given(st.lists(st.integers(0, 4), min_size=5, max_size=5), st.integers(0, 4))
def test_copies_of_any_graph_have_the_same_key(links, start):
    boxes = chain(*links)
    for box, link in zip(boxes, reversed(links), strict=True):
        box.other = [boxes[link], {"start": boxes[start]}]
    assert same(boxes, copy.deepcopy(boxes))
    assert same(boxes[start], pickle.loads(pickle.dumps(boxes[start])))
    before = fingerprint(boxes[0])
    reached = {id(boxes[0]), id(boxes[start])}
    for box in boxes:
        if id(box) in reached:
            box.mark = 1
    assert fingerprint(boxes[0]) != before


def test_deep_and_shared_structures_take_no_time():
    deep = shared = []
    for _ in range(10_000):
        deep = [deep]
    for _ in range(100):
        shared = [shared, shared]
    assert differ([deep, [deep], shared, [shared]])
    nodes = [Box(number=i) for i in range(300)]
    for node in nodes:
        node.all = nodes
    assert same(nodes, copy.deepcopy(nodes))
    for _ in range(10_000):  # a list that deep is taken apart from the outside
        deep = deep[0]


def test_ids_of_passing_objects_are_not_confused():
    class Fleeting:
        def __reduce__(self):
            return Box, (), {"a": [float(next(numbers))], "b": (next(numbers), [])}

    numbers = itertools.count()
    keys = {fingerprint([Fleeting() for _ in range(50)]) for _ in range(5)}
    assert len(keys) == 5


def test_nothing_is_kept_alive():
    module = seeded(Net)
    alive = weakref.ref(module)
    fingerprint({"net": net(module)})
    del module
    gc.collect()
    assert alive() is None


def test_values_are_left_as_they_are(rng_untouched):
    value = {"net": fitted(), "X": data()[0], "class": redefined()}

    def state():
        content = [vars(value["net"]), value["X"], list(vars(value["class"]))]
        return joblib.hash(content)

    before = state()
    fingerprint(value)
    assert state() == before


# --------------------------------------------------------- what cannot be told
def test_what_cannot_be_told_is_refused_with_its_place(tmp_path):
    lock = threading.Lock()
    with open(tmp_path / "log", "w") as file:
        callback = EpochScoring(lambda *_: 0)
        callback.file = file
        function = define("def f(x): return LOG.write(x)", "f", LOG=file)
        module = seeded(Net)
        module.extra = {"a": [lock]}
        places = {
            "value": file,
            "value[1]": [1, (i for i in ())],
            "value.a.b": Box(a=Box(b=lock)),
            "value['a'].b": {"a b": 1, "a": Box(b=lock)},
            "estimator.callbacks[0].file": {"estimator": net(callbacks=[callback])},
            "estimator.callbacks[0][1].file": {
                "estimator": net(callbacks=[("log", callback)])
            },
            "estimator.train_split.keywords['valid_ds'].X": {
                "estimator": net(train_split=predefined_split(Rows(file, 1)))
            },
            "estimator.module.globals()['LOG']": {"estimator": net(function)},
            "X.extra['a'][0]": {"X": module},
        }
        for place, value in places.items():
            place = place.replace("value['a']", "a")
            with pytest.raises(TypeError, match="cannot be told") as caught:
                fingerprint(value)
            message = str(caught.value)
            assert message.startswith(f"{place} is of type "), message
            assert message.endswith("or use memory=None.")
    with pytest.raises(TypeError, match=r"value is of type _io\.TextIOWrapper, whose"):
        fingerprint(file)


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.frompyfunc(lambda x: x, 1, 1),
        lambda: threading.local(),
        lambda: weakref.WeakSet(),
        lambda: torch.nn.UninitializedParameter,
        lambda: type(sys)("own_module"),
        lambda: memoryview(b"abc"),
        lambda: iter(lambda: 1, 2),
    ],
)
def test_odd_values_raise_or_have_a_stable_key(make):
    value = make()
    with suppress(TypeError):
        assert same(value, value)


def test_an_error_while_looking_is_a_refusal():
    class Broken:
        def __reduce__(self):
            raise KeyError("no")

    with pytest.raises(TypeError, match=r"value\[0\] is of type .*Broken"):
        fingerprint([Broken()])


# ----------------------------------------------------------- other processes
KEYS = """
    import sys, pickle
    import numpy as np, torch
    from torch import nn
    from skorch import NeuralNetClassifier
    from skorch.callbacks import Checkpoint
    from sklaplace.caching import fingerprint

    NAMES = {"alpha", "beta", "gamma", "delta"}

    class Net(nn.Module):
        kinds = {"p", "q", "r", "s"}
        def __init__(self, n=3):
            super().__init__()
            self.layer = nn.Linear(n, 2)
        def forward(self, x):
            return self.layer(x) if "p" in {"p", "q", "r"} | NAMES else x

    torch.manual_seed(0)
    X = np.arange(12.0).reshape(4, 3)
    made = Net()
    made.register_forward_hook(lambda *_: None)
    net = NeuralNetClassifier(
        Net, module__n=3, callbacks=[Checkpoint(monitor=lambda net: 1 in {1, 2})]
    )
    values = [X, torch.tensor(X), Net, made, net, NAMES, {"a": {"x", "y"}, (1, "b"): 2}]
    print(*map(fingerprint, values), fingerprint(values))
"""


def run(source, *arguments, hash_seed="random", **options):
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_keys_are_the_same_in_every_process(tmp_path):
    started = [run(KEYS, hash_seed=str(seed), cwd=tmp_path) for seed in (1, 2)]
    results = [process.communicate() for process in started]
    assert results[0] == results[1]
    assert len(set(results[0][0].split())) == 8, results


SEARCH = """
    import os, sys, warnings
    import numpy as np, torch
    from torch import nn
    from pathlib import Path
    from sklearn.base import BaseEstimator, clone
    from sklearn.model_selection import GridSearchCV
    from skorch import NeuralNetClassifier
    from skorch.callbacks import EpochScoring
    from sklaplace.caching import cached, check_memory, fingerprint

    warnings.simplefilter("error")
    torch.set_num_threads(1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
        def forward(self, x):
            return self.layer(x)

    class Fitted(BaseEstimator):
        def __init__(self, net, prior=1.0, memory=None, log=None):
            self.net, self.prior, self.memory, self.log = net, prior, memory, log

        def fit(self, X, y):
            def work():
                (Path(self.log) / f"{fingerprint(X)} {os.getpid()}").touch()
                return clone(self.net).fit(X, y)
            key = fingerprint({"net": self.net, "X": X, "y": y})
            self.net_ = cached(check_memory(self.memory), key, work)
            return self

        def score(self, X, y):
            return self.net_.score(X, y) - self.prior

    X = np.random.default_rng(0).normal(size=(30, 3)).astype("f4")
    y = np.arange(30) % 2
    net = NeuralNetClassifier(
        Net, criterion=nn.CrossEntropyLoss, max_epochs=1, verbose=0,
        callbacks=[EpochScoring(lambda net, X, y: 0.0, name="zero")],
    )
    model = Fitted(net, memory=sys.argv[1], log=sys.argv[2])
    grid = {"prior": [1.0, 2.0, 3.0]}
    for n_jobs in (2, 1):
        search = GridSearchCV(model, grid, cv=3, n_jobs=n_jobs, error_score="raise")
        best = search.fit(X, y).best_estimator_
        assert type(best.net_.module_) is Net
        print(len(list(Path(sys.argv[2]).iterdir())))
"""


def test_a_parallel_grid_search_trains_once_per_fold(tmp_path):
    # classes and functions of a script, which its workers cannot import
    log = tmp_path / "log"
    log.mkdir()
    out, err = run(SEARCH, tmp_path / "store", log).communicate()
    assert out, err
    first, second = map(int, out.split())
    assert len(entries(tmp_path)) == 4  # three folds, and all rows
    assert 4 <= first < 8  # the workers may begin the same fold at the same time
    assert second == first


# ------------------------------------------------------------------ the store
class Counter:
    """Work that counts how often it is done."""

    def __init__(self, make=lambda: [np.zeros(2), {"a": 1}]):
        self.make, self.calls = make, 0

    def __call__(self):
        self.calls += 1
        return self.make()


def entries(folder):
    return sorted(Path(folder).rglob("output.pkl"))


def test_work_is_done_once_per_key(tmp_path, capsys):
    memory, work = check_memory(tmp_path / "store"), Counter()
    for key in ("a", "b", "a", "b", "a"):
        assert repr(cached(memory, key, work)) == repr(work.make())
    assert work.calls == 2
    assert len(entries(tmp_path)) == 2
    cached(check_memory(str(tmp_path / "store")), "a", work)
    assert work.calls == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("memory", [None, check_memory(None), joblib.Memory(None)])
def test_without_memory_work_is_done_every_time(memory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    work = Counter(lambda: threading.Lock())  # nothing is pickled
    for _ in range(3):
        cached(memory, fingerprint(1), work)
    assert work.calls == 3
    assert list(tmp_path.iterdir()) == []


def test_what_can_be_a_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_memory(None).location is None
    assert list(tmp_path.iterdir()) == []
    for location in ("a", tmp_path / "b", os.fspath(tmp_path / "c")):
        assert os.fspath(check_memory(location).location) == os.fspath(location)
    own = joblib.Memory(tmp_path, verbose=0)
    assert check_memory(own) is own
    for wrong in (1, True, b"a", ["a"], {}, joblib.Memory, print):
        with pytest.raises(TypeError, match=r"memory=.* is not known\. Choose None"):
            check_memory(wrong)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be used as a folder .* Choose one"):
        check_memory(tmp_path / "file" / "store")


def test_results_share_nothing(tmp_path):
    memory, work = check_memory(tmp_path), Counter()
    results = [cached(memory, "a", work) for _ in range(3)]
    for result in results:
        result[0] += 1
        result[1]["a"] = 2
    np.testing.assert_equal(cached(memory, "a", work), [np.zeros(2), {"a": 1}])
    assert [result[0][0] for result in results] == [1, 1, 1]
    assert work.calls == 1


@pytest.mark.parametrize(
    "options", [{"mmap_mode": "r"}, {"mmap_mode": "r+"}, {"compress": True}]
)
def test_settings_of_a_memory_do_not_change_results(tmp_path, options):
    memory = joblib.Memory(tmp_path, verbose=0, **options)
    work = Counter()
    for _ in range(3):
        result = cached(memory, "a", work)
        assert type(result[0]) is np.ndarray
        result[0] += 1
    assert work.calls == 1
    assert cached(memory, "a", work)[0].sum() == 0


def damage_garbage(file, other):
    file.write_bytes(b"garbage")


def damage_nothing(file, other):
    file.write_bytes(b"")


def damage_cut(file, other):
    file.write_bytes(file.read_bytes()[:-20])


def damage_bit(file, other):
    content = bytearray(file.read_bytes())
    at = bytes(content).index(np.full(3, 7.0).tobytes())
    content[at + 1] ^= 1
    file.write_bytes(bytes(content))


def damage_foreign(file, other):
    file.write_bytes(other.read_bytes())


def damage_value(file, other):
    joblib.dump({"not": "bytes"}, file)


@pytest.mark.parametrize(
    "damage",
    [
        *(damage_garbage, damage_nothing, damage_cut, damage_bit),
        *(damage_foreign, damage_value),
    ],
)
def test_damaged_entries_are_made_anew(tmp_path, damage):
    memory = check_memory(tmp_path)
    work = Counter(lambda: np.full(3, 7.0))
    cached(memory, "a", work)
    (file,) = entries(tmp_path)
    cached(memory, "b", lambda: np.full(3, 8.0))
    (other,) = set(entries(tmp_path)) - {file}
    damage(file, other)
    for _ in range(3):
        np.testing.assert_array_equal(cached(memory, "a", work), np.full(3, 7.0))
    assert work.calls == 2


def test_threads_can_share_a_store(tmp_path):
    memory, work = check_memory(tmp_path), Counter(lambda: np.ones(10_000))
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(cached, memory, f"{i % 2}", work) for i in range(20)]
    assert all(job.result().sum() == 10_000 for job in jobs)


def test_an_entry_removed_while_in_use_is_made_anew(tmp_path):
    memory, work = check_memory(tmp_path), Counter()
    cached(memory, "a", work)
    memory.clear(warn=False)
    cached(memory, "a", work)
    cached(memory, "a", work)
    assert work.calls == 2


def test_a_result_that_cannot_be_stored_is_not_lost(tmp_path):
    class Local(nn.Linear):
        pass

    memory = check_memory(tmp_path)
    makes = [lambda: Local(2, 2), lambda: lambda x: x, threading.Lock]
    for number, make in enumerate(makes):
        work = Counter(make)
        for _ in range(2):
            with pytest.warns(UserWarning, match="The result was not cached: ") as log:
                result = cached(memory, str(number), work)
            assert len(log) == 1
            assert "memory=None" in str(log[0].message)
            assert log[0].filename == __file__
            assert type(result) is type(make())
        assert work.calls == 2
    assert entries(tmp_path) == []


def test_a_failure_of_the_work_is_passed_on(tmp_path):
    memory = check_memory(tmp_path)

    def fail():
        raise RuntimeError("diverged")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="diverged"):
            cached(memory, "a", fail)
    work = Counter()
    cached(memory, "a", work)
    cached(memory, "a", work)
    assert work.calls == 1


def test_classes_and_functions_of_the_key_need_not_be_importable(tmp_path):
    memory, X = check_memory(tmp_path), data()[0]

    def estimator(shift=1):
        class Local(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 2)

            def forward(self, x):
                return self.layer(x) + shift

        scoring = EpochScoring(lambda net, X, y: 0.0, name="zero")
        return Local, net(Local, callbacks=[scoring])

    def trained(own):
        calls.append(1)
        return seeded(lambda: clone(own).fit(*data()))

    calls = []
    for _ in range(2):  # the second with classes and functions of its own
        module, own = estimator()
        key = fingerprint(own)
        result = cached(memory, key, functools.partial(trained, own))
        assert type(result.module_) is module
        assert result.module is module
        assert result.callbacks[0].scoring is not None
        expected = trained(own).predict_proba(X)
        np.testing.assert_array_equal(result.predict_proba(X), expected)
        assert result.history[-1]["zero"] == 0
        clone(result).fit(*data())
        result.partial_fit(*data())
    assert len(calls) == 3
    assert fingerprint(estimator(2)[1]) != key


def test_two_functions_of_one_name_are_not_confused(tmp_path):
    memory = check_memory(tmp_path)

    def add(n):
        return lambda x: x + n

    one, two = add(1), add(2)
    key = fingerprint([one, two])
    with pytest.warns(UserWarning, match="not cached: Several different .*lambda"):
        assert cached(memory, key, lambda: [two, one])[0](1) == 3
    fine = fingerprint([one, [one]])
    for _ in range(2):
        assert cached(memory, fine, lambda: [one])[0] is one


def test_a_trained_net_comes_back_whole(tmp_path):
    memory, X = check_memory(tmp_path), data()[0]
    makes = {
        "callbacks": lambda: fitted(
            callbacks=[EarlyStopping(), LRScheduler("StepLR", step_size=1)]
        ),
        "momentum": lambda: fitted(optimizer=torch.optim.Adam),
        "instance": lambda: fitted(module=seeded(Net)),
    }
    for name, make in makes.items():
        fresh, stored = (cached(memory, name, make) for _ in range(2))
        assert fingerprint(fresh) == fingerprint(stored)
        np.testing.assert_array_equal(fresh.predict_proba(X), stored.predict_proba(X))
        assert fresh.history == stored.history
        assert stored.module_ is not fresh.module_
        assert stored.optimizer_.param_groups[0]["params"][0] is next(
            stored.module_.parameters()
        )
        for trained in (fresh, stored):
            seeded(functools.partial(trained.partial_fit, *data()))
        np.testing.assert_array_equal(fresh.predict_proba(X), stored.predict_proba(X))
        assert pickle.loads(pickle.dumps(stored)).initialized_


class Plain:
    """A memory with no more than the one method."""

    def __init__(self):
        self.found = {}

    def cache(self, function, ignore=None):
        def remembered(key, work):
            if key not in self.found:
                self.found[key] = function(key, work)
            return self.found[key]

        return remembered


def test_any_memory_with_a_method_cache_will_do():
    memory, work = check_memory(Plain()), Counter()
    for _ in range(2):
        cached(memory, "a", work)
    assert work.calls == 1
    memory.found["a"] = b"garbage"
    np.testing.assert_equal(cached(memory, "a", work), [np.zeros(2), {"a": 1}])
    assert work.calls == 2


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user")
def test_a_folder_that_became_read_only_loses_nothing(tmp_path):
    memory = check_memory(tmp_path)
    cached(memory, "a", Counter())
    for folder in [tmp_path, *tmp_path.rglob("*")]:
        if folder.is_dir():
            folder.chmod(0o500)
    work = Counter()
    cached(memory, "a", work)
    assert work.calls == 0
    with pytest.warns(Warning, match="Unable to cache to disk"):
        cached(memory, "b", work)


@dataclass(frozen=True)
class Result:
    weights: torch.Tensor
    trained: object


def test_tensors_and_dataclasses_come_back(tmp_path):
    memory = check_memory(tmp_path)
    work = Counter(lambda: Result(torch.arange(3.0), fitted()))
    one, two = (cached(memory, "a", work) for _ in range(2))
    assert torch.equal(one.weights, two.weights)
    assert one.weights.data_ptr() != two.weights.data_ptr()
    assert isinstance(two, Result)
    assert work.calls == 1
