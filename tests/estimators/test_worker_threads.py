"""The number of simultaneous threads never exceeds the request, even in a search."""

import os
import time
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from nets import MLP, blobs, classifier
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV

from sklaplace import LaplaceClassifier

pytestmark = pytest.mark.slow  # processes have to import torch

X, Y = blobs(240)
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
def model(tmp_path):
    net = classifier(Timed, module__folder=str(tmp_path), max_epochs=1).fit(X, Y)
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


@pytest.mark.usefixtures("_processes")
def test_each_worker_computes_on_one_thread(model, tmp_path):
    model.set_params(n_jobs=2).fit(X, Y).predict_proba(X)
    rows = evaluations(tmp_path)
    assert len(rows) >= 60  # batches of fit and of predict_proba
    assert set(rows[:, 2]) == {1}
    assert most_threads_at_once(rows) <= 2


@pytest.mark.usefixtures("_processes")
@pytest.mark.parametrize("inner", [None, 2])
def test_a_search_uses_no_more_threads_than_requested(model, inner, tmp_path):
    """Two processes use two threads each, by torch or by inner workers."""
    model.set_params(n_jobs=inner)
    GridSearchCV(model, GRID, cv=2, n_jobs=2, refit=False).fit(X, Y)
    rows = evaluations(tmp_path)
    assert set(rows[:, 2]) <= {1, 2}
    assert most_threads_at_once(rows) <= 4
