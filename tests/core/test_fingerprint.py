"""Keys are equal exactly where results are."""

import copy
import functools
import gc
import io
import itertools
import os
import pickle
import sys
import threading
import weakref
from collections import OrderedDict, namedtuple
from contextlib import suppress
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from keys import (
    Box,
    Net,
    Rows,
    data,
    define,
    differ,
    fitted,
    net,
    redefined,
    same,
    seeded,
)
from scipy import sparse, special
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetRegressor
from skorch.callbacks import Checkpoint, EarlyStopping, EpochScoring, LRScheduler
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import SliceDict, predefined_split
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import Subset, TensorDataset

from sklaplace.core.fingerprint import fingerprint


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
        *(nn.functional.relu, torch.relu, torch.Tensor.relu, len, np.exp),
        special.expit,
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


def test_tied_weights_differ_from_equal_ones():
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


# --------------------------------------------------------- what cannot be hashed
def test_what_cannot_be_hashed_is_refused_with_its_place(tmp_path):
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
            "a.b": {"a b": 1, "a": Box(b=lock)},
            "net.callbacks[0].file": {"net": net(callbacks=[callback])},
            "net.callbacks[0][1].file": {"net": net(callbacks=[("log", callback)])},
            "net.train_split.keywords['valid_ds'].X": {
                "net": net(train_split=predefined_split(Rows(file, 1)))
            },
            "net.module.globals()['LOG']": {"net": net(function)},
            "X.extra['a'][0]": {"X": module},
        }
        for place, value in places.items():
            with pytest.raises(TypeError, match="cannot be hashed") as caught:
                fingerprint(value)
            message = str(caught.value)
            assert message.startswith(f"{place} is of type "), message
            assert message.endswith("or use memory=None.")
    with pytest.raises(TypeError, match=r"value is of type _io\.TextIOWrapper, whose"):
        fingerprint(file)


ODD = [
    *(np.frompyfunc(lambda x: x, 1, 1), threading.local(), weakref.WeakSet()),
    *(nn.UninitializedParameter, type(sys)("own_module"), memoryview(b"abc")),
    iter(lambda: 1, 2),
]


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_odd_values_raise_or_have_a_stable_key(value):
    with suppress(TypeError):
        assert same(value, value)


def test_an_error_while_looking_is_a_refusal():
    class Broken:
        def __reduce__(self):
            raise KeyError("no")

    with pytest.raises(TypeError, match=r"value\[0\] is of type .*Broken"):
        fingerprint([Broken()])


def test_attributes_of_the_user_that_are_called_hooks_count_as_any_other():
    def with_hooks(hooks):
        module = seeded(Net)
        module.my_hooks = hooks
        return module

    values = [with_hooks(v) for v in ([], ["a"], {"a": 1}, {1: 1, "a": 2}, None)]
    assert differ(values)
    assert same(values[1], copy.deepcopy(values[1]))


@pytest.mark.parametrize("without", ["callbacks", "callbacks__epoch_timer"])
def test_trained_nets_whose_epochs_are_not_timed_have_keys(without):
    settings = {without: "disable" if without == "callbacks" else None}
    one = fitted(**settings)
    assert same(one, copy.deepcopy(one), fitted(**settings))
    assert differ([one, fitted(1, **settings)])
