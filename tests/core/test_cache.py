"""The store returns stored results; equal results have equal keys."""

import copy
import importlib
import linecache
import os
import pickle
import shutil
import subprocess
import sys
import types
from collections import OrderedDict

import joblib
import numpy as np
import pytest
import torch
from nets import MLP, blobs, classifier, seeded
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from skorch.callbacks import EpochScoring
from torch import nn

from sklaplace.core.cache import Entry, check_memory, fingerprint

X, Y = blobs(60)


class Counter:
    """A function that counts its calls."""

    def __init__(self, make=lambda: [np.zeros(2), {"a": 1}]):
        self.make, self.n = make, 0

    def __call__(self):
        self.n += 1
        return self.make()


def cached(memory, key, work):
    """Return the stored result for a key, or compute and store it."""
    entry = Entry(memory, key)
    result = entry.load()
    if result is None:
        result = work()
        entry.store(result)
    return result


def differ(*values):
    keys = [fingerprint(value) for value in values]
    return len(set(keys)) == len(keys)


def same(*values):
    return len({fingerprint(value) for value in values}) == 1


# ------------------------------------------------------------------------- the store
@pytest.mark.parametrize("options", [{}, {"compress": True}])
def test_work_is_done_once_per_key_and_results_share_nothing(tmp_path, options):
    memory, work = joblib.Memory(tmp_path, verbose=0, **options), Counter()
    for key in ("a", "b", "a", "b", "a"):
        result = cached(memory, key, work)
        np.testing.assert_equal(result, [np.zeros(2), {"a": 1}])
        result[0] += 1
    assert work.n == 2


def test_a_store_that_cannot_be_written_is_not_used(tmp_path):
    memory, work = joblib.Memory(tmp_path / "store", verbose=0), Counter()
    cached(memory, "a", work)
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").touch()
    with pytest.warns(UserWarning, match="memory has no effect"):
        np.testing.assert_equal(cached(memory, "b", work), [np.zeros(2), {"a": 1}])
    assert work.n == 2


def test_a_damaged_result_is_computed_again(tmp_path):
    memory, work = joblib.Memory(tmp_path, verbose=0), Counter()
    cached(memory, "a", work)
    (file,) = tmp_path.rglob("output.pkl")
    file.write_bytes(b"damaged")
    for _ in range(2):
        np.testing.assert_equal(cached(memory, "a", work), [np.zeros(2), {"a": 1}])
    assert work.n == 2


class WithBlocks:
    """A user's object with a method that arrays on disk also have."""

    def __init__(self, values):
        self.values = values

    def blocks(self):
        return iter(())


def test_objects_with_blocks_are_hashed_by_value():
    assert differ(WithBlocks(X), WithBlocks(-X))


def test_what_can_be_a_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_memory(None).location is None
    for location in ("a", tmp_path / "b"):
        assert check_memory(location).location == os.fspath(location)
    own = joblib.Memory(tmp_path, verbose=0)
    assert check_memory(own) is own
    with pytest.raises(ValueError, match="'memory' should be None"):
        check_memory(1)


def test_a_result_that_cannot_be_pickled_is_returned(tmp_path):
    class Local(nn.Linear):
        pass

    memory, work = check_memory(tmp_path), Counter(lambda: Local(2, 2))
    with pytest.warns(Warning, match="Unable to cache to disk.*Local"):
        assert type(cached(memory, "a", work)) is Local
    assert work.n == 1


def test_a_trained_net_comes_back_whole(tmp_path):
    def make():
        return seeded(classifier(optimizer=torch.optim.Adam), X, Y)

    fresh, back = (cached(check_memory(tmp_path), "a", make) for _ in range(2))
    assert fresh.history == back.history
    for net in (fresh, back):
        with torch.random.fork_rng():
            net.partial_fit(X, Y)  # with the momentum of before
    np.testing.assert_array_equal(fresh.predict_proba(X), back.predict_proba(X))


# --------------------------------------------------------------------------- the keys
def test_arrays_and_tensors_count_by_content():
    t = torch.arange(6.0).reshape(2, 3)
    assert same(t, t.clone(), torch.stack([t, t], -1)[..., 0])
    assert differ(t, t.double(), t.half(), t.reshape(3, 2), t + 1)
    assert differ(t, nn.Parameter(t), t.numpy())
    assert same(X, X.copy())
    assert differ(X, X[:-1], X.astype("f8"), X + 1, X.tolist())


def test_modules_count_by_weights_settings_and_order():
    def module(**parts):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(OrderedDict(parts or {"a": nn.Linear(3, 3)}))

    frozen, tied = module(), nn.Linear(3, 3)
    frozen.a.weight.requires_grad_(False)
    assert same(module(), module(), copy.deepcopy(module()))
    assert differ(module(), frozen, module().eval(), module().double())
    assert differ(*(nn.Dropout(p) for p in (0.1, 0.2)))
    layers = {"a": nn.Tanh(), "b": nn.ReLU()}
    assert differ(module(**layers), module(**dict(reversed(layers.items()))))
    # tied weights are trained as one
    assert differ([tied, tied], [tied, copy.deepcopy(tied)])


def test_nets_count_by_parameters_and_trained_ones_by_weights():
    net = classifier()
    trained = seeded(clone(net), X, Y)
    frozen = FrozenEstimator(trained)
    assert same(net, clone(net), copy.deepcopy(net))
    assert same(frozen, copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen)))
    assert same(trained, seeded(clone(net), X, Y))  # times do not count
    others = [clone(net).set_params(lr=0.5), clone(net).set_params(max_epochs=7)]
    assert differ(net, trained, seeded(clone(net), X, Y, seed=1), *others)


MODULE = """
from torch import nn

class Base(nn.Module):
    scale = 1.0

    def helper(self):
        return self.scale

class Net(Base):
    def forward(self, x):
        return x * 2

def factory():
    return Net()
"""
EDITS = [("scale = 1.0", "scale = 3.0"), ("x * 2", "x * 3")]


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    """Return a function that writes a user module and imports it again."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "user_code.py"

    def imported(edits=(), *, again=True):
        source = MODULE
        for edit in edits:
            source = source.replace(*edit)
        file.write_text(source)
        stamp = 10**9 * (1 + len(sys.modules) + hash(source) % 10**6)
        os.utime(file, ns=(stamp, stamp))
        if again:
            sys.modules.pop("user_code", None)
            importlib.invalidate_caches()
        return importlib.import_module("user_code")

    yield imported
    sys.modules.pop("user_code", None)


@pytest.mark.parametrize("edit", EDITS)
def test_code_counts_by_source_and_by_what_is_loaded(user_code, edit):
    def keys():
        module = user_code(again=False)
        return [fingerprint(module.Net()), fingerprint(classifier(module.Net))]

    user_code()
    before = keys()
    assert keys() == before
    user_code([edit])
    net = sys.modules["user_code"].Net
    after = [fingerprint(net()), fingerprint(classifier(net))]
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_a_file_edited_after_its_import_does_not_count_as_loaded(user_code):
    module = user_code()
    edited = user_code([EDITS[1]], again=False)
    assert edited is module
    not_loaded = fingerprint(module.Net())
    assert fingerprint(user_code([EDITS[1]]).Net()) != not_loaded


def test_functions_count_by_source(user_code):
    before = fingerprint(user_code().factory)
    edited = user_code([("return Net()", "return Net().eval()")])
    assert fingerprint(edited.factory) != before


def test_classes_of_a_notebook_count_by_their_cell(monkeypatch):
    """The module has no file, and names of cells differ between kernels."""
    notebook = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", notebook)

    def run(source, cell):
        lines = source.splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, cell, (len(source), None, lines, cell))
        exec(compile(source, cell, "exec"), vars(notebook))
        return fingerprint(notebook.Net())

    before = run(MODULE, "cell-1")
    assert run(MODULE, "cell-2") == before
    edited = [MODULE.replace(*edit) for edit in EDITS]
    keys = {before, *(run(source, f"cell-{n}") for n, source in enumerate(edited))}
    assert len(keys) == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: type("Made", (nn.Module,), {"__module__": __name__}),
        lambda: EpochScoring(lambda net, X, y: 0.0),
        lambda: sys.stdout,
        lambda: (line for line in sys.argv),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.ones(2, device="meta"),
    ],
    ids=["class", "lambda", "file", "generator", "sparse", "without values"],
)
def test_what_cannot_be_hashed_raises(make):
    errors = pickle.PicklingError, TypeError, AttributeError, RuntimeError
    with pytest.raises(errors):
        fingerprint(make())


def test_settings_of_torch_count(monkeypatch):
    keys = {fingerprint(1)}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_default_dtype", lambda: torch.float64)
        keys.add(fingerprint(1))
    with torch.device("meta"):
        keys.add(fingerprint(1))
    assert len(keys) == 3


@pytest.mark.slow  # two processes
def test_other_processes_have_the_same_keys(tmp_path):
    source = (
        "from nets import MLP, blobs, classifier, seeded;"
        "from sklaplace.core.cache import fingerprint;"
        "net = classifier(callbacks=[]); X, y = blobs(60);"
        "print(fingerprint([net, MLP, {'a', 'b', 'c'}, X, y, seeded(net, X, y)]))"
    )
    keys = set()
    for seed in "12":
        env = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-c", source]
        keys.add(
            subprocess.run(command, env=env, capture_output=True, check=True).stdout
        )
    net = classifier(callbacks=[])
    values = [net, MLP, {"a", "b", "c"}, X, Y, seeded(net, X, Y)]
    assert keys == {f"{fingerprint(values)}\n".encode()}
