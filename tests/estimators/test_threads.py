"""Predictions in threads, forked processes, and the caller's contexts."""

import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from nets import MLP, BatchNormMLP, blobs, classifier, regressor, seeded, waves
from shared import HANGS
from sklearn.base import is_classifier
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV
from sklearn.utils.parallel import ThreadpoolController

from sklaplace import (
    DeepEnsembleClassifier,
    LaplaceClassifier,
    LaplaceRegressor,
    LaplaceRegressorCV,
    MCDropoutRegressor,
    SWAGClassifier,
    VariationalRegressor,
)
from sklaplace.networks.tabular import TabularNetwork

# Calls of each thread in the longest test; set it to 1000 before a release.
CALLS = int(os.environ.get("SKLAPLACE_TEST_CALLS", "8"))
X, Y = blobs(120)
R_X, R_Y = waves(120)


def fitted_classifier(**params):
    net = seeded(classifier(BatchNormMLP), X, Y)
    settings = {"prior_precision": 1.0, "random_state": 0} | params
    return LaplaceClassifier(FrozenEstimator(net), **settings).fit(X, Y)


def fitted_regressor(**params):
    net = regressor(max_epochs=3, train_split=None)
    settings = {"prior_precision": 1.0, "sigma_noise": 0.3, "random_state": 0} | params
    return LaplaceRegressor(net, **settings).fit(R_X, R_Y)


def gradient(model):
    """Return the gradient of all variances in the inputs."""
    x = torch.from_numpy(X.copy()).requires_grad_()
    model.predictive(x)[1].sum().backward()
    return x.grad.numpy()


def flags(model):
    module = model.estimator_.module_
    modes = [m.training for m in module.modules()]
    return modes, [p.requires_grad for p in module.parameters()]


def test_many_threads_predict_score_and_differentiate_as_one():
    """Regression test: another thread switched the network during a prediction."""
    model = fitted_classifier()
    model.estimator_.module_.train()
    calls = [
        model.predict_proba,
        model.latent_mean_and_variance,
        lambda x: model.score(x, Y),
        lambda x: gradient(model),
    ]
    expected, before = [call(X) for call in calls], flags(model)
    together = threading.Barrier(16)

    def work(start):
        together.wait(HANGS)
        for step in range(start, start + CALLS):
            which = step % len(calls)
            np.testing.assert_array_equal(calls[which](X), expected[which])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))  # raises the error of a thread
    assert flags(model) == before


def test_streams_of_other_threads_are_not_rewound():
    """Regression test: predictions restored old states, and numbers repeated."""
    model = fitted_classifier(pred_type="nn", n_samples=8)
    ends = threading.Event()

    def predict():
        while not ends.is_set():
            model.predict_proba(X)
            model.score(X, Y)

    torch.manual_seed(7)
    expected = torch.rand(20_000)
    generator = np.random.RandomState(7)
    expected_numpy = generator.uniform(size=20_000)
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(predict) for _ in range(2)]
        # one at a time, so that predictions come between
        drawn = torch.stack([torch.rand(()) for _ in range(20_000)])
        drawn_numpy = [np.random.uniform() for _ in range(20_000)]  # noqa: NPY002
        ends.set()
        for task in running:
            task.result()
    assert torch.equal(drawn, expected)
    np.testing.assert_array_equal(drawn_numpy, expected_numpy)


def test_another_network_predicts_while_one_is_trained():
    """A service must not wait for the training of the next model."""
    model, started, done = fitted_classifier(), threading.Event(), threading.Event()

    class Waits(MLP):
        def forward(self, X):
            if self.training:
                started.set()
                assert done.wait(HANGS), "no prediction while this network was trained"
            return super().forward(X)

    def train():
        net = classifier(Waits, max_epochs=1, train_split=None)
        LaplaceClassifier(net, random_state=0).fit(X, Y)

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        assert started.wait(HANGS)
        model.predict_proba(X)
        done.set()
        training.result()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_processes_forked_while_threads_predict_and_train_do_not_wait():
    """Regression test: a child inherited a lock held by a thread of its parent."""
    model, ends = fitted_classifier(), threading.Event()
    context = multiprocessing.get_context("fork")

    def repeat(work):
        while not ends.is_set():
            work()

    def train():
        LaplaceClassifier(classifier(max_epochs=1), random_state=0).fit(X, Y)

    expected = model.predict_proba(X)
    refitted = fitted_regressor().predict(R_X)

    def child():
        np.testing.assert_array_equal(model.predict_proba(X), expected)
        assert all(flags(model)[1])
        np.testing.assert_array_equal(fitted_regressor().predict(R_X), refitted)

    with ThreadPoolExecutor(2) as pool:
        works = train, lambda: model.predict_proba(X)
        running = [pool.submit(repeat, work) for work in works]
        children = [context.Process(target=child, daemon=True) for _ in range(10)]
        for process in children:
            process.start()
            model.predict_proba(X)  # the other threads go on meanwhile
        for process in children:
            process.join(HANGS)
        ends.set()
    assert not any(task.exception() for task in running)
    codes = [process.exitcode for process in children]
    assert codes == [0] * 10  # None: it never ended


def test_the_posterior_is_that_of_the_network_without_autocast():
    expected = fitted_classifier(subset_of_weights="all")
    net = FrozenEstimator(expected.estimator_)
    model = LaplaceClassifier(
        net, prior_precision=1.0, random_state=0, subset_of_weights="all"
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.fit(X, Y)
    moments = [m.latent_mean_and_variance(X) for m in (model, expected)]
    np.testing.assert_array_equal(*moments)


@contextmanager
def noted(kind):
    """Yield the numbers of threads in calls of a kind of module."""
    numbers = set()

    def note(module, *_):
        if isinstance(module, kind):
            numbers.add(torch.get_num_threads())

    with torch.nn.modules.module.register_module_forward_hook(note):
        yield numbers


def blas_number():
    """Return the largest number of threads of the loaded BLAS libraries."""
    libraries = ThreadpoolController().select(user_api="blas").info()
    return max(library["num_threads"] for library in libraries)


DEFAULTS = [
    LaplaceClassifier(random_state=0),
    LaplaceRegressor(random_state=0),
    LaplaceRegressorCV(random_state=0, cv=2, prior_precisions=[0.1, 1.0]),
    DeepEnsembleClassifier(n_estimators=2, random_state=0),
    MCDropoutRegressor(n_samples=4, random_state=0),
    SWAGClassifier(n_samples=4, n_snapshots=3, random_state=0),
    VariationalRegressor(n_samples=4, random_state=0),
]


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("model", DEFAULTS, ids=lambda m: type(m).__name__)
def test_the_default_network_uses_one_thread(model):
    """Regression test: two threads cost several times the CPU time of one."""
    x, y = (X, Y) if is_classifier(model) else (R_X, R_Y.ravel())
    with noted(TabularNetwork) as numbers:
        model.fit(x, y).predict(x)
    assert numbers == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_two_threads")
def test_another_network_keeps_its_threads_also_in_a_fit_that_fails():
    with noted(MLP) as numbers:
        LaplaceClassifier(classifier(max_epochs=1), random_state=0).fit(X, Y).predict(X)
    assert numbers == {2}
    with pytest.raises(ValueError, match="NaN"):
        LaplaceClassifier(random_state=0).fit(X * np.nan, Y)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_two_threads")
def test_threads_that_fit_and_predict_at_once_leave_the_setting():
    """The setting belongs to the process; the last thread restores it."""
    fixed = {"prior_precision": 1.0, "sigma_noise": 0.3, "random_state": 0}
    fitted = LaplaceRegressor(**fixed).fit(R_X, R_Y.ravel())
    expected = fitted.predict(R_X, return_std=True)

    def work(fits):
        for _ in range(2):
            model = fitted
            if fits:
                model = LaplaceRegressor(**fixed).fit(R_X, R_Y.ravel())
            found = model.predict(R_X, return_std=True)
            np.testing.assert_array_equal(found, expected)
        return torch.get_num_threads()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, [True, True, False])) == [2] * 3
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 2
    assert blas_number() == 2


# ------------------------------------------------------------------ worker processes
MANY = blobs(240)
GRID = {"prior_precision": [0.1, 1.0, 10.0]}


class Timed(MLP):
    """A module that logs the time, process and thread count of each evaluation."""

    def __init__(self, folder, **params):
        super().__init__(**params)
        self.folder = folder

    def forward(self, X):
        begin = time.monotonic()  # one clock for all processes
        time.sleep(2e-3)
        found = super().forward(X)
        note = begin, time.monotonic(), torch.get_num_threads(), os.getpid()
        with Path(self.folder, str(os.getpid())).open("a") as file:
            file.write(" ".join(map(str, note)) + "\n")
        return found


@pytest.fixture
def timed(tmp_path):
    net = classifier(Timed, module__folder=str(tmp_path), max_epochs=1).fit(*MANY)
    params = {"batch_size": 8, "random_state": 0, "prior_precision": 1.0}
    return LaplaceClassifier(FrozenEstimator(net), **params)


def evaluations(folder):
    """Return begin, end, thread count and process of each evaluation in workers."""
    found = [np.loadtxt(file, ndmin=2) for file in folder.iterdir()]
    rows = np.concatenate(found)
    return rows[rows[:, 3] != os.getpid()]


def most_threads_at_once(rows):
    """Return the largest sum of threads over overlapping evaluations."""
    begins = [(begin, n) for begin, _, n, _ in rows]
    ends = [(end, -n) for _, end, n, _ in rows]
    return max(np.cumsum([n for _, n in sorted(begins + ends)]))


@pytest.fixture
def _processes():
    """Use worker processes in which torch may use two threads each."""
    with joblib.parallel_config(backend="loky", inner_max_num_threads=2):
        yield


@pytest.mark.slow  # processes have to import torch
@pytest.mark.usefixtures("_processes")
def test_each_worker_computes_on_one_thread(timed, tmp_path):
    timed.set_params(n_jobs=2).fit(*MANY).predict_proba(MANY[0])
    rows = evaluations(tmp_path)
    assert len(rows) >= 60  # batches of fit and of predict_proba
    assert set(rows[:, 2]) == {1}
    assert most_threads_at_once(rows) <= 2


@pytest.mark.slow
@pytest.mark.usefixtures("_processes")
@pytest.mark.parametrize("inner", [None, 2])
def test_a_search_uses_no_more_threads_than_requested(timed, inner, tmp_path):
    """Two processes use two threads each, by torch or by inner workers."""
    timed.set_params(n_jobs=inner)
    GridSearchCV(timed, GRID, cv=2, n_jobs=2, refit=False).fit(*MANY)
    rows = evaluations(tmp_path)
    assert set(rows[:, 2]) <= {1, 2}
    assert most_threads_at_once(rows) <= 4
