"""Worker processes of loky and dask: results are identical to the last bit.

A search around the fit or a killed dask worker does not change the result either. A
killed loky worker is an error; see tests/core/test_parallel.py. Arrays of zarr and dask
have the same results as numpy arrays.
"""

import os
import signal
from pathlib import Path

import joblib
import numpy as np
import pytest
from nets import blobs, classifier, regressor, waves
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV
from skorch.dataset import Dataset

from sklaplace import LaplaceClassifier, LaplaceRegressor

distributed = pytest.importorskip("distributed")
da = pytest.importorskip("dask.array")
zarr = pytest.importorskip("zarr")

pytestmark = pytest.mark.slow  # processes have to import torch

X, Y = blobs(240)
X_REG, Y_REG = waves(240)
FROZEN = FrozenEstimator(classifier().fit(X, Y))
SMALL = {"batch_size": 8, "random_state": 0, "n_jobs": 1}
ALL = {"subset_of_weights": "all", "hessian_structure": "kron"}
CLASSES = LaplaceClassifier(classifier(max_epochs=3), **SMALL)
CASES = {
    "default": (CLASSES, X, Y),
    "all weights": (clone(CLASSES).set_params(**ALL), X, Y),
    "regression": (LaplaceRegressor(regressor(max_epochs=3), **SMALL), X_REG, Y_REG),
}
GRID = {"prior_precision": [0.1, 10.0], "subset_of_weights": ["last_layer", "all"]}


@pytest.fixture(scope="module", params=["loky-2", "loky-4", "dask-2", "dask-4"])
def workers(request):
    """Yield the name of the backend and the number of processes."""
    name, n = request.param.split("-")
    if name == "loky":
        yield name, int(n)
        return
    options = {"threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with (
        distributed.LocalCluster(n_workers=int(n), **options) as cluster,
        distributed.Client(cluster),
    ):
        yield name, int(n)


of_two = pytest.mark.parametrize("workers", ["loky-2", "dask-2"], indirect=True)
on_dask = pytest.mark.parametrize("workers", ["dask-2"], indirect=True)


def of_posterior(model):
    posterior = model.posterior_
    return {
        "evidence": model.log_marginal_likelihood_value_,
        "mean": posterior.mean,
        "precision": posterior.structure.dense(),
    }


def of_predictions(model, X):
    if isinstance(model, LaplaceRegressor):
        std = model.predict(X, return_std=True)
        found = *std, model.sample_y(X, 3, random_state=0)
    else:
        found = model.predict_proba(X), model.predict_dirichlet(X)
    return {"predictions": np.column_stack(found), "scores": model.score_samples(X)}


def computed(model, X, y, name=None, n_jobs=1):
    """Return posterior and predictions of an estimator fitted in workers."""
    model = clone(model).set_params(n_jobs=n_jobs)
    with joblib.parallel_config(backend=name or "sequential"):
        model.fit(X, y)
        return of_posterior(model) | of_predictions(model, X)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_processes_change_no_bit(workers, case):
    assert_equal(computed(*CASES[case], *workers), computed(*CASES[case]))


class Deadly(Dataset):
    """Dataset that kills the first worker process to read a sample in the middle."""

    def __init__(self, X, y, mark):
        super().__init__(X, y)
        self.caller, self.mark, self.middle = os.getpid(), mark, X[len(X) // 2]

    def transform(self, X, y):
        if os.getpid() != self.caller and (self.middle == X).all():
            try:
                Path(self.mark).touch(exist_ok=False)
            except FileExistsError:
                return super().transform(X, y)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().transform(X, y)


@on_dask
def test_a_killed_process_changes_no_bit(workers, tmp_path):
    mark = tmp_path / "killed"
    model = LaplaceClassifier(FROZEN, **ALL, **SMALL, prior_precision=1.0)
    expected = computed(model, Dataset(X, Y), Y)
    assert_equal(computed(model, Deadly(X, Y, mark), Y, *workers), expected)
    assert mark.exists()


@of_two
def test_a_search_around_the_fit(workers):
    name, n_jobs = workers
    model = LaplaceClassifier(FROZEN, **SMALL)
    search = GridSearchCV(model, GRID, scoring="neg_log_loss", cv=2)
    alone = clone(search).fit(X, Y).cv_results_["mean_test_score"]
    nested = search.set_params(n_jobs=n_jobs, estimator__n_jobs=n_jobs)
    with joblib.parallel_config(backend=name):
        found = nested.fit(X, Y).cv_results_["mean_test_score"]
    assert len(np.unique(alone)) == 4
    np.testing.assert_array_equal(found, alone)


def of_zarr(path):
    array = zarr.create_array(path, shape=X.shape, chunks=(50, 2), dtype=X.dtype)
    array[:] = X
    return array


STORED = {
    "zarr": of_zarr,
    "dask of zarr": lambda path: da.from_zarr(of_zarr(path)),
    "dask of numpy": lambda path: da.from_array(X, chunks=(50, 1)),
    "in the cluster": lambda path: da.from_array(X, chunks=(50, 2)).persist(),
}


@on_dask
@pytest.mark.parametrize("name", STORED)
def test_stored_arrays_are_as_those_of_numpy(workers, name, tmp_path):
    array = STORED[name](str(tmp_path / "X.zarr"))
    expected = computed(CLASSES, X, Y)
    assert_equal(computed(CLASSES, array, Y), expected)
    assert_equal(computed(CLASSES, array, Y, *workers), expected)


class Noted:
    """Rows of X, with a record of the processes that read them."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __call__(self, block):
        Path(self.folder, str(os.getpid())).touch()
        return block


@on_dask
def test_blocks_are_computed_by_the_workers(workers, tmp_path):
    blocks = da.from_array(X, chunks=(40, 2))
    array = blocks.map_blocks(Noted(tmp_path), dtype=X.dtype, meta=X[:0])
    pids = {str(pid) for pid in distributed.get_client().run(os.getpid).values()}
    model = LaplaceClassifier(FROZEN, **SMALL, prior_precision=1.0)
    assert_equal(computed(model, array, Y, *workers), computed(model, X, Y))
    assert {file.name for file in tmp_path.iterdir()} <= pids
