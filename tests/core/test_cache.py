"""The store gives back what was made, and never a wrong result."""

import errno
import functools
import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from joblib.externals.loky.backend.reduction import dumps
from keys import Net, data, define, fitted, net, seeded
from sklearn.base import clone
from skorch.callbacks import EarlyStopping, EpochScoring, LRScheduler
from torch import nn

import sklaplace
from sklaplace.core.cache import cached, check_memory
from sklaplace.core.fingerprint import fingerprint


class Counter:
    """Work that counts how often it is done."""

    def __init__(self, make=lambda: [np.zeros(2), {"a": 1}]):
        self.make, self.calls = make, 0

    def __call__(self):
        self.calls += 1
        return self.make()


@pytest.fixture
def memory(tmp_path):
    return check_memory(tmp_path)


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


def test_a_process_can_use_several_stores(tmp_path, monkeypatch):
    work = Counter()
    for folder in "ab":
        cached(check_memory(tmp_path / folder), "key", work)
    # what joblib remembers of a process
    monkeypatch.setattr(joblib.memory, "_FUNCTION_HASHES", weakref.WeakKeyDictionary())
    for folder in "ab":
        cached(check_memory(tmp_path / folder), "key", work)
    assert work.calls == 2


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


def test_results_share_nothing(memory):
    work = Counter()
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
    memory, work = joblib.Memory(tmp_path, verbose=0, **options), Counter()
    for _ in range(3):
        result = cached(memory, "a", work)
        assert type(result[0]) is np.ndarray
        result[0] += 1
    assert work.calls == 1
    assert cached(memory, "a", work)[0].sum() == 0


def flipped(content):
    """With another bit in the first of three numbers."""
    at = content.index(np.full(3, 7.0).tobytes()) + 1
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


# what is found in place of an entry, beside that of another key
DAMAGES = {
    "garbage": lambda content, other: b"garbage",
    "nothing": lambda content, other: b"",
    "cut": lambda content, other: content[:-20],
    "bit": lambda content, other: flipped(content),
    "foreign": lambda content, other: other,
    "value": lambda content, other: pickle.dumps({"not": "bytes"}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_entries_are_made_anew(memory, tmp_path, damage):
    work = Counter(lambda: np.full(3, 7.0))
    cached(memory, "a", work)
    (file,) = entries(tmp_path)
    cached(memory, "b", lambda: np.full(3, 8.0))
    (other,) = set(entries(tmp_path)) - {file}
    file.write_bytes(damage(file.read_bytes(), other.read_bytes()))
    for _ in range(3):
        np.testing.assert_array_equal(cached(memory, "a", work), np.full(3, 7.0))
    assert work.calls == 2


def test_threads_can_share_a_store(memory):
    work = Counter(lambda: np.ones(10_000))
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(cached, memory, f"{i % 2}", work) for i in range(20)]
    assert all(job.result().sum() == 10_000 for job in jobs)


def test_an_entry_removed_while_in_use_is_made_anew(memory):
    work = Counter()
    cached(memory, "a", work)
    memory.clear(warn=False)
    for _ in range(2):
        cached(memory, "a", work)
    assert work.calls == 2


def test_a_result_that_cannot_be_stored_is_not_lost(memory, tmp_path):
    class Local(nn.Linear):
        pass

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


def test_a_failure_of_the_work_is_passed_on(memory):
    def fail():
        raise RuntimeError("diverged")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="diverged"):
            cached(memory, "a", fail)
    work = Counter()
    cached(memory, "a", work)
    cached(memory, "a", work)
    assert work.calls == 1


def test_classes_and_functions_of_the_key_need_not_be_importable(memory):
    X = data()[0]

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


def test_two_functions_of_one_name_are_not_confused(memory):
    def add(n):
        return lambda x: x + n

    one, two = add(1), add(2)
    key = fingerprint([one, two])
    with pytest.warns(UserWarning, match="not cached: Several different .*lambda"):
        assert cached(memory, key, lambda: [two, one])[0](1) == 3
    fine = fingerprint([one, [one]])
    for _ in range(2):
        assert cached(memory, fine, lambda: [one])[0] is one


def test_a_trained_net_comes_back_whole(memory):
    X = data()[0]
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
        def stored(key, work):
            if key not in self.found:
                self.found[key] = function(key, work)
            return self.found[key]

        return stored


def test_any_memory_with_a_method_cache_will_do():
    memory, work = check_memory(Plain()), Counter()
    for _ in range(2):
        cached(memory, "a", work)
    assert work.calls == 1
    memory.found["a"] = b"garbage"
    np.testing.assert_equal(cached(memory, "a", work), [np.zeros(2), {"a": 1}])
    assert work.calls == 2


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user")
def test_a_folder_that_became_read_only_loses_nothing(memory, tmp_path):
    cached(memory, "a", Counter())
    for folder in [tmp_path, *tmp_path.rglob("*")]:
        if folder.is_dir():
            folder.chmod(0o500)
    work = Counter()
    cached(memory, "a", work)
    assert work.calls == 0
    with pytest.warns(Warning, match="Unable to cache to disk"):
        cached(memory, "b", work)


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_folders_that_others_may_write_to_are_refused(tmp_path):
    bits = {"open": 0o777, "sticky": 0o1777}
    for name, mode in bits.items():
        folder = tmp_path / name
        folder.mkdir()
        folder.chmod(mode)
        store = joblib.Memory(folder, verbose=0)
        for memory in (folder, os.fspath(folder), store):
            message = rf"memory=.* is not safe: .*{name}.* written to by everybody"
            with pytest.raises(ValueError, match=message) as caught:
                check_memory(memory)
            assert "chmod" in str(caught.value)
        folder.chmod(0o755)
        check_memory(folder)
        # what joblib has made under another umask
        (folder / "joblib").chmod(mode)
        with pytest.raises(ValueError, match="joblib may be written to by everybody"):
            check_memory(folder)


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_new_folders_are_for_the_user_alone(tmp_path):
    cached(check_memory(tmp_path / "a" / "b"), "key", Counter())
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert folder.stat().st_mode & 0o777 == 0o700


class Planted:
    """Makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
@pytest.mark.parametrize(
    "make",
    [check_memory, joblib.Memory, lambda path: joblib.Memory(path, mmap_mode="r")],
)
def test_entries_that_others_may_have_written_are_not_loaded(tmp_path, make):
    memory = make(tmp_path / "store")
    cached(memory, "a", Counter())
    (file,) = entries(tmp_path)
    file.write_bytes(pickle.dumps(Planted(tmp_path / "run")))
    file.parents[4].chmod(0o755)
    for path in (file, *file.parents[:4]):  # as if made by others under umask 0
        path.chmod(0o777)
    work = Counter()
    message = r"memory=.* is not safe: .* everybody; use a new, empty folder, or delete"
    with pytest.raises(ValueError, match=message):
        cached(memory, "a", work)
    assert not (tmp_path / "run").exists()
    assert work.calls == 0


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="needs root")
def test_entries_of_other_users_are_not_loaded(memory, tmp_path):
    cached(memory, "a", Counter())
    (file,) = entries(tmp_path)
    file.write_bytes(pickle.dumps(Planted(tmp_path / "run")))
    os.chown(file, 12345, 12345)
    with pytest.raises(ValueError, match=r"output\.pkl belongs to another user"):
        cached(memory, "a", Counter())
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
@pytest.mark.parametrize("mask", [0, 0o002, 0o022, 0o077])
@pytest.mark.parametrize("bits", [0o700, 0o755])
def test_own_entries_are_loaded_whatever_the_umask(tmp_path, monkeypatch, mask, bits):
    monkeypatch.setattr("sklaplace.core.folder._is_own_group", lambda gid: False)
    (tmp_path / "joblib").mkdir()
    for path in (tmp_path, tmp_path / "joblib"):  # which others may enter
        path.chmod(bits)
    before, work = os.umask(mask), Counter()
    try:
        for memory in (tmp_path, joblib.Memory(os.fspath(tmp_path), verbose=0)):
            for _ in range(3):
                cached(check_memory(memory), "a", work)
    finally:
        os.umask(before)
    assert work.calls == 1
    (file,) = entries(tmp_path)
    others = [path.stat().st_mode & 0o077 for path in file.parents]
    assert others.index(0) < file.parents.index(tmp_path / "joblib")


class FullDisk:
    """Fails to write, once there are so many files, as where no space is left."""

    def __init__(self, n_files):
        self.n_left = n_files

    def open(self, *args, **kwargs):
        self.n_left -= "w" in (args[1:] or ("r",))[0]
        if self.n_left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return open(*args, **kwargs)


@pytest.mark.parametrize("n_files", [0, 1, 2, 3])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, n_files):
    backend = joblib._store_backends
    monkeypatch.setattr(backend, "open", FullDisk(n_files).open, raising=False)
    monkeypatch.setattr(
        backend.FileSystemStoreBackend, "_open_item", FullDisk(n_files).open
    )
    for _ in range(2):
        work = Counter()
        with warnings.catch_warnings(record=True) as log:
            warnings.simplefilter("always")
            memory = check_memory(tmp_path / "store")
            np.testing.assert_equal(cached(memory, "a", work), work.make())
        assert all("space" in str(warning.message) for warning in log)
        assert log or n_files > 1
    monkeypatch.undo()
    work = Counter()
    for _ in range(2):
        np.testing.assert_equal(cached(memory, "a", work), work.make())
    assert work.calls <= 1


def test_a_full_disk_where_the_folder_is_made(tmp_path, monkeypatch):
    def mkdir(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "mkdir", mkdir)
    message = r"memory=.* cannot be used as a folder \(.*No space left on device"
    with pytest.raises(ValueError, match=message):
        check_memory(tmp_path / "store")


@dataclass(frozen=True)
class Result:
    weights: torch.Tensor
    trained: object


def test_tensors_and_dataclasses_come_back(memory):
    work = Counter(lambda: Result(torch.arange(3.0), fitted()))
    one, two = (cached(memory, "a", work) for _ in range(2))
    assert torch.equal(one.weights, two.weights)
    assert one.weights.data_ptr() != two.weights.data_ptr()
    assert isinstance(two, Result)
    assert work.calls == 1


def test_work_that_changes_its_own_key_warns(tmp_path):
    source = """
        CALLS = []
        class Helper:
            calls = 0
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 2)
            def forward(self, x):
                {count}
                return self.layer(x)
    """
    counts = {
        "CALLS.append(1)": "forward",
        "Helper.calls += 1": "Helper",
        "Counting.calls = getattr(Counting, 'calls', 0) + 1": "Counting",
        "self.calls = getattr(self, 'calls', 0) + 1": None,
    }
    for count, culprit in counts.items():
        own = net(define(source.format(count=count), "Counting"))
        memory = check_memory(tmp_path / str(culprit))
        key = functools.partial(fingerprint, own)
        work = Counter(lambda own=own: clone(own).fit(*data()))
        if culprit is None:
            for _ in range(2):
                cached(memory, key(), work, key)
            assert work.calls == 1
            continue
        message = rf"not be found again: something that __main__\.\S*{culprit} refers"
        with pytest.warns(UserWarning, match=message) as caught:
            result = cached(memory, key(), work, key)
        assert caught[0].filename == __file__
        assert result.initialized_


def test_work_that_changes_its_inputs_warns(memory):
    X = np.zeros(3)
    key = functools.partial(fingerprint, X)
    for _ in range(2):
        with pytest.warns(UserWarning, match="again: an input changed"):
            cached(memory, key(), lambda: X.fill(X[0] + 1), key)


# ------------------------------------------------------------ other processes
ROOT = Path(sklaplace.__file__).parents[1]


def run(source, *arguments, root=ROOT, **options):
    """A script in a process with another order of sets."""
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, **options)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


SCRIPT = """
    import numpy as np, torch
    from torch import nn
    from sklearn.base import clone
    from skorch import NeuralNetClassifier
    from skorch.callbacks import EpochScoring
    from sklaplace.core.cache import cached, check_memory
    from sklaplace.core.fingerprint import fingerprint

    NAMES = {"alpha", "beta", "gamma", "delta"}

    class Net(nn.Module):
        kinds = {"p", "q", "r", "s"}
        def __init__(self, n=3):
            super().__init__()
            self.layer = nn.Linear(n, 2)
        def forward(self, x):
            return self.layer(x) if "p" in {"p", "q", "r"} | NAMES else x

    X = np.arange(12.0, dtype="f4").reshape(4, 3)
    made = Net()
    nn.init.ones_(made.layer.weight), nn.init.ones_(made.layer.bias)
    made.register_forward_hook(lambda *_: None)
    net = NeuralNetClassifier(
        Net, module__n=3, criterion=nn.CrossEntropyLoss, verbose=0, train_split=None,
        callbacks=[EpochScoring(lambda net, X, y: 1 in {1, 2}, name="zero")],
    )
    values = [X, torch.tensor(X), Net, made, net, NAMES, {"a": {"x", "y"}, (1, "b"): 2}]
    values.append(list(values))

    def made_once(store, n, log):
        def work():
            log.append(n)
            return Net(n), clone(net)
        return cached(check_memory(store), fingerprint([net, n]), work)
"""
WORKER = f"""{SCRIPT}
    import json, pickle, sys, warnings

    warnings.simplefilter("error")
    theirs, made_once, log = *pickle.load(sys.stdin.buffer), []
    results = [made_once(sys.argv[1], n, log) for n in (1, 2)]
    assert all(type(module) is net.module for module, net in results)
    assert not any(isinstance(module, Net) for module, _ in results)
    keys = [[fingerprint(value) for value in some] for some in (values, theirs)]
    print(json.dumps([keys, log, [m.layer.weight.tolist() for m, _ in results]]))
"""


@pytest.mark.slow  # three processes
def test_other_processes_have_the_same_keys_and_results(tmp_path):
    # classes and functions of a script, which no process can import
    made_once = define(SCRIPT, "made_once")
    script = made_once.__globals__
    values = script["values"]
    keys, log, store = list(map(fingerprint, values)), [], tmp_path / "store"
    assert len(set(keys)) == len(keys)
    made_once(store, 1, log)
    job = bytes(dumps((values, made_once)))  # as joblib sends it
    out = json.loads(run(WORKER, store, input=job, cwd=tmp_path))
    (own_keys, sent_keys), worker_log, weights = out
    assert own_keys == sent_keys == keys
    assert worker_log == [2]
    for n, expected in zip((1, 2), weights, strict=True):
        module, net = made_once(store, n, log)
        assert type(module) is net.module is script["Net"]
        assert module.layer.weight.tolist() == expected
    assert log == [1]
    assert len(entries(tmp_path)) == 2


SEARCH = f"""{SCRIPT}
    import os, sys, warnings
    from pathlib import Path
    from sklearn.base import BaseEstimator
    from sklearn.model_selection import GridSearchCV

    warnings.simplefilter("error")
    torch.set_num_threads(1)

    class Fitted(BaseEstimator):
        def __init__(self, net, prior=1.0, memory=None, log=None):
            self.net, self.prior, self.memory, self.log = net, prior, memory, log

        def fit(self, X, y):
            def work():
                (Path(self.log) / (fingerprint(X) + str(os.getpid()))).touch()
                return clone(self.net).fit(X, y)
            key = fingerprint([self.net, X, y])
            self.net_ = cached(check_memory(self.memory), key, work)
            return self

        def score(self, X, y):
            return self.net_.score(X, y) - self.prior

    X = np.random.default_rng(0).normal(size=(30, 3)).astype("f4")
    y = np.arange(30) % 2
    net.set_params(max_epochs=1)
    model = Fitted(net, memory=sys.argv[1], log=sys.argv[2])
    grid = dict(prior=[1.0, 2.0, 3.0])
    for n_jobs in (2, 1):
        search = GridSearchCV(model, grid, cv=3, n_jobs=n_jobs, error_score="raise")
        best = search.fit(X, y).best_estimator_
        assert type(best.net_.module_) is Net
        print(len(list(Path(sys.argv[2]).iterdir())))
"""


@pytest.mark.slow  # three processes
def test_a_parallel_grid_search_trains_once_per_fold(tmp_path):
    # classes and functions of a script, which its workers cannot import
    log = tmp_path / "log"
    log.mkdir()
    out = run(SEARCH, tmp_path / "store", log)
    first, second = map(int, out.split())
    assert len(entries(tmp_path)) == 4  # three folds, and all rows
    assert 4 <= first < 8  # the workers may begin the same fold at the same time
    assert second == first


@pytest.mark.slow  # two processes
def test_an_edit_anywhere_in_this_package_makes_new_keys(tmp_path):
    package = Path(sklaplace.__file__).parent
    shutil.copytree(package, tmp_path / "sklaplace")
    source = "from sklaplace.core.fingerprint import fingerprint; print(fingerprint(1))"
    keys = [run(source, root=tmp_path, cwd=tmp_path)]
    with open(tmp_path / "sklaplace" / "posterior" / "gaussian.py", "a") as file:
        file.write("# edited\n")
    keys.append(run(source, root=tmp_path, cwd=tmp_path))
    assert keys[0] == f"{fingerprint(1)}\n".encode()
    assert keys[1] != keys[0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.arange(6.0)[::2],
        torch.zeros(0, 2),
        torch.ones(2).bfloat16(),
        torch.complex(torch.ones(2), torch.ones(2)).conj(),
        torch.eye(2).to_sparse(),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.tensor(True),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}",
)
def test_tensors_of_all_kinds_come_back_the_same(tmp_path, tensor):
    _, back = (cached(check_memory(tmp_path), "a", lambda: tensor) for _ in range(2))
    assert back is not tensor
    assert type(back) is type(tensor)
    assert back.dtype == tensor.dtype
    assert back.layout == tensor.layout
    assert back.requires_grad == tensor.requires_grad
    assert torch.equal(back.to_dense(), tensor.to_dense())
    if tensor.layout == torch.strided:  # products depend on strides in the last bits
        assert back.stride() == tensor.stride()
        back.detach().zero_()  # writable
