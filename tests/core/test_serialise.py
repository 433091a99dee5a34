"""States without pickle: objects are restored, and loading runs no code."""

import collections
import copy
import functools
import io
import os
import pickle
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nets import MLP, classifier, regressor
from sklearn.base import clone
from skorch import NeuralNetClassifier
from skorch.callbacks import Checkpoint, EpochScoring, LRScheduler
from skorch.dataset import Dataset
from skorch.exceptions import DeviceWarning
from skorch.helper import predefined_split
from torch import nn

import sklaplace
from sklaplace import LaplaceClassifier, LaplaceRegressor
from sklaplace.core import serialise
from sklaplace.core.serialise import (
    by_trusted_name,
    from_portable,
    to_portable,
    trusted_name,
)

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 2)).astype("f4")
Y = np.arange(60) % 3
T = X[:, 0]


def round_trip(value):
    state = to_portable({"value": value})
    assert state["sklaplace_graph"].dtype == np.uint8
    return from_portable(state)["value"]


TENSORS = {
    "float": torch.arange(6.0).reshape(2, 3),
    "strides": torch.arange(6.0).reshape(2, 3).T,
    "expanded": torch.ones(1).expand(3),
    "empty": torch.zeros(0, 2),
    "scalar": torch.tensor(2.0, dtype=torch.float64),
    "bfloat16": torch.ones(2).bfloat16(),
    "scalar bfloat16": torch.tensor(1.5).bfloat16(),
    "half": torch.ones(2).half(),
    "bool": torch.tensor([True, False]),
    "complex": torch.complex(torch.ones(2), torch.ones(2)).conj(),
    "gradient": torch.ones(2, requires_grad=True),
    "parameter": nn.Parameter(torch.ones(2)),
    "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_tensors(tensor):
    back = round_trip(tensor)
    assert type(back) is type(tensor)
    assert (back.dtype, back.device) == (tensor.dtype, tensor.device)
    assert back.requires_grad == tensor.requires_grad
    assert torch.equal(back, tensor)
    if 0 not in tensor.stride():  # products depend on strides in the last bits
        assert back.stride() == tensor.stride()
    back.detach().zero_()  # writable


@dataclass
class Settings:
    width: int = 3
    scale: float = float("inf")


class Slotted:
    __slots__ = ("a",)

    def __init__(self):
        self.a = 1


Pair = collections.namedtuple("Pair", "a b")

VALUES = [
    *(None, True, 3, 10**30, 0.1, float("inf"), "é", [1, [2]], (1, (2,)), {1, 2}),
    *(frozenset({1}), {"a": 1, 2: [3], (1, 2): None}, Pair(1, [2]), torch.Size([1, 2])),
    *(collections.OrderedDict(b=1, a=2), collections.defaultdict(list, a=[1])),
    *(torch.float32, torch.device("cpu"), np.dtype("f4"), Settings(), nn.Linear, dict),
    *(torch.tanh, nn.functional.relu, nn.functional.gelu, print, MLP, classifier),
]


@pytest.mark.parametrize(
    "value", VALUES, ids=lambda value: getattr(value, "__name__", type(value).__name__)
)
def test_values(value):
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)


def test_sharing_and_cycles_of_containers_are_kept():
    one, weight = [1], nn.Parameter(torch.ones(2))
    one.append(one)
    back = round_trip({"a": one, "b": one, "w": weight, "v": [weight]})
    assert back["a"] is back["b"] is back["a"][1]
    assert back["w"] is back["v"][0]


@pytest.mark.filterwarnings("ignore:Validating sparse")
def test_sparse_tensors():
    tensor = torch.eye(2).to_sparse()
    assert torch.equal(round_trip(tensor).to_dense(), tensor.to_dense())


def test_partial_functions():
    back = round_trip(functools.partial(classifier, MLP, lr=0.5))
    assert (back.func, back.args, back.keywords) == (classifier, (MLP,), {"lr": 0.5})


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.GELU()),
        nn.LSTM(2, 3, num_layers=2),
        nn.TransformerEncoderLayer(4, 2, 8, activation=nn.functional.gelu),
        nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules(module):
    module[0].weight.requires_grad_(False) if isinstance(module, nn.Sequential) else 0
    back = round_trip(module.train())
    wanted, found = module.state_dict(), back.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    pairs = zip(module.parameters(), back.parameters(), strict=True)
    assert all(a.requires_grad == b.requires_grad for a, b in pairs)
    assert back.training
    assert repr(back) == repr(module)


def test_nets_go_on_training():
    settings = {"optimizer": torch.optim.Adam, "max_epochs": 2}
    scheduler = LRScheduler("StepLR", step_size=1)
    callbacks = [scheduler, EpochScoring("accuracy", name="own")]
    split = predefined_split(Dataset(X[:9], Y[:9].astype("i8")))
    net = classifier(callbacks=callbacks, train_split=split, **settings).fit(X, Y)
    back = round_trip(net)
    assert back.history == net.history
    assert back.optimizer_.param_groups[0]["params"][0] is next(
        back.module_.parameters()
    )
    for own in (net, back):
        torch.manual_seed(0)
        own.partial_fit(X, Y)
    np.testing.assert_array_equal(back.predict_proba(X), net.predict_proba(X))
    back.set_params(lr=0.5)
    assert clone(back).fit(X, Y).module_ is not back.module_


class Labelled(LaplaceRegressor):
    """A user's subclass with additional state."""

    def __getstate__(self):
        return {**super().__getstate__(), "label": "stored"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_states_of_subclasses_are_kept(tmp_path):
    fixed = {"prior_precision": 1.0, "sigma_noise": 0.3, "residual": "none"}
    model = Labelled(regressor(), memory=str(tmp_path), **fixed).fit(X, T)
    for back in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert back.label == "stored"
        assert back.memory == str(tmp_path)
        np.testing.assert_array_equal(back.predict(X), model.predict(X))


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_caches_are_not_pickled(subset):
    options = {"subset_of_weights": subset, "prior_precision": 1.0}
    model = LaplaceClassifier(classifier(), **options).fit(X, Y)
    before = len(pickle.dumps(model.network_spec_))
    model.predict_proba(X)
    head = model.network_spec_.layout.head
    assert head is None or head._cache
    assert len(pickle.dumps(model.network_spec_)) == before


# ------------------------------------------------------------------- refusals
def local():
    class Local(nn.Linear):
        pass

    return Local(2, 2)


@pytest.mark.parametrize(
    "value",
    [
        *(lambda x: x, local(), threading.Lock(), MLP().forward, Slotted()),
        *(torch.compile, torch.ones(2).to_mkldnn()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_stored_is_refused(value):
    with pytest.raises(TypeError, match="cannot be stored without pickle: ") as caught:
        to_portable({"a": {"b": [0, value]}})
    assert "joblib.dump" in str(caught.value)


FORBIDDEN = [
    *("builtins.eval", "builtins.exec", "builtins.getattr", "builtins.__import__"),
    *("os.system", "pickle.loads", "torch.load", "torch.hub.load", "torch.from_file"),
    *("torch.import_ir_module", "torch.jit.load", "torch.serialization.load"),
    *("torch.package.PackageImporter", "torch.jit._script.RecursiveScriptModule"),
    *("skorch.utils.open_file_like", "skorch.net.pickle", "torch.nn.modules.os"),
    *("sklaplace.core.cache.pickle", "sklaplace.core.cache.cached", "numpy.load"),
    *("sklaplace.core.cache._Unpickler", "joblib.load", "", ".", "torch", "nope.a"),
    # it unpickles what it is given
    "torch.utils.data.datapipes.datapipe._IterDataPipeSerializationWrapper",
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "skorch.net.Dataset",  # by its own name alone
    # they write files, unpickle or use the network
    *("skorch.callbacks.training.Checkpoint", "skorch.utils._TorchLoadUnpickler"),
    *("skorch.callbacks.training.LoadInitState", "skorch.hf.HfHubStorage"),
    *("skorch.callbacks.logging.WandbLogger", "skorch.callbacks.Checkpoint"),
]


@pytest.mark.parametrize("path", FORBIDDEN)
def test_a_file_cannot_name_what_may_do_harm(path):
    with pytest.raises(ValueError, match="that a file may name"):
        by_trusted_name(path)


class Harm:
    """Content that `to_portable` would not write to a file."""


CALLS = {
    "function of the system": (os.system, ("true",)),
    "function by its parts": (serialise._made, (print, (), None, [], [])),
    "class by its parts": (serialise._made, (nn.Linear, (2, 2), None, [], [])),
    "function of the user": (serialise._made, (classifier, (), None, [], [])),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_file_cannot_call_what_may_do_harm(call):
    values, file = [], io.BytesIO()

    class Pickler(pickle.Pickler):
        def reducer_override(self, value):
            if isinstance(value, Harm):
                return call
            of_system = value is os.system
            return NotImplemented if of_system else serialise._reduced(value, values)

    module = SimpleNamespace(Pickler=Pickler, __name__="pickle")
    torch.save({"value": Harm()}, file, module)
    graph = np.frombuffer(file.getvalue(), "u1")
    with pytest.raises(ValueError, match="cannot be restored: it is damaged"):
        from_portable({"sklaplace_graph": graph, "values": values})


def test_a_net_is_not_unpickled():
    class Unpickled:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    net = classifier()
    vars(net)["__cuda_dependent_attributes__"] = pickle.dumps(Unpickled())
    back = round_trip(net)
    assert "__cuda_dependent_attributes__" in vars(back)
    # by skops itself only where its class is trusted
    assert trusted_name(NeuralNetClassifier)
    assert not any("skorch" in name for name in sklaplace.TRUSTED_TYPES)


def test_nothing_is_written_on_loading(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    round_trip(classifier(callbacks=[Checkpoint(dirname="made")]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {**s, "sklaplace_graph": s["sklaplace_graph"][:-9]},
        lambda s: {**s, "sklaplace_graph": s["sklaplace_graph"][:0]},
        lambda s: {**s, "sklaplace_graph": [["name", "os.system"]]},
        lambda s: {**s, "values": s["values"][:1]},
        lambda s: {"sklaplace_graph": s["sklaplace_graph"]},
    ],
)
def test_damaged_states_are_refused(change):
    model = LaplaceClassifier(classifier(), prior_precision=1.0, random_state=0)
    state = model.fit(X, Y).__getstate__()
    with pytest.raises(ValueError, match="cannot be restored: it is damaged"):
        object.__new__(LaplaceClassifier).__setstate__(change(state))


def test_a_device_that_is_missing(monkeypatch):
    """The stored state contains a net on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    net = classifier().initialize()
    vars(net)["device"] = "cuda:0"
    state = to_portable({"value": net})
    with pytest.warns(DeviceWarning, match="no CUDA devices"):
        back = from_portable(state)["value"]
    assert back.device == "cpu"


def test_trusted_types_are_the_estimators():
    for name in sklaplace.TRUSTED_TYPES:
        home, _, kind = name.rpartition(".")
        assert getattr(sklaplace, kind).__module__ == home
    public = {
        name
        for name, value in vars(sklaplace).items()
        if isinstance(value, type) and hasattr(value, "fit")
    }
    assert {name.rpartition(".")[2] for name in sklaplace.TRUSTED_TYPES} == public
