"""Shards, workers and checkpoints change neither posterior nor predictions.

Workers are threads here, which need no time to start; tests/clients has processes.
"""

import threading
from contextlib import contextmanager
from unittest import mock

import joblib
import numpy as np
import pytest
import torch
from nets import MLP, QUIET, blobs, classifier, regressor, waves
from refusals import refused_fit
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetBinaryClassifier
from skorch.dataset import Dataset

from sklaplace import (
    BradleyTerry,
    LaplaceClassifier,
    LaplaceRanker,
    LaplaceRegressor,
)
from sklaplace.core.parallel import ordered_map
from sklaplace.core.random import private_rng
from sklaplace.curvature import ggn
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.networks.outputs import as_forward

X, Y = blobs(90)
X_REG, Y_REG = waves(90)
NET = FrozenEstimator(classifier(module__dtype=torch.float64).fit(X.astype(float), Y))
NET_REG = FrozenEstimator(regressor().fit(X_REG, Y_REG[:, None]))
SMALL = {"batch_size": 8, "random_state": 0}
METHODS = "predict_proba", "predict_dirichlet", "score_samples", "sample_latent"
METHODS_REG = "predict", "score_samples", "sample_y", "latent_mean_and_variance"
SUBSETS = ["last_layer", "all"]


def on_threads(model, n_jobs=2):
    return clone(model).set_params(n_jobs=n_jobs)


def fitted(model, X, y, **fit_params):
    with joblib.parallel_config(backend="threading"):
        return model.fit(X, y, **fit_params)


def numbers(model, X, methods):
    """All that a fitted estimator says, as arrays."""
    posterior = model.posterior_
    found = {"evidence": model.log_marginal_likelihood_value_}
    found |= {"mean": posterior.mean, "dense": posterior.structure.dense()}
    with joblib.parallel_config(backend="threading"):
        for name in methods:
            result = getattr(model, name)(X)
            parts = result if isinstance(result, tuple) else (result,)
            for k, part in enumerate(parts):
                found[f"{name} {k}"] = getattr(part, "concentration", part)
    return {name: np.asarray(value) for name, value in found.items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


# ----------------------------------------------------------------------- workers
@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("structure", sorted(STRUCTURES))
def test_workers_change_no_bit(structure, subset):
    kind = {"hessian_structure": structure, "subset_of_weights": subset}
    model = LaplaceClassifier(NET, **kind, **SMALL, prior_precision=1.0, n_jobs=1)
    alone = numbers(fitted(model, X, Y), X, METHODS)
    assert_equal(numbers(fitted(on_threads(model), X, Y), X, METHODS), alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"prior_precision": "marglik", "curvature": "ggn_mc"},
        {"subset_of_weights": "all", "refine": True, "prior_precision": 1.0},
        {"link_approx": "mc", "pred_type": "nn"},
        {"subset_of_weights": "all", "hessian_structure": "full", "curvature": "ef"},
    ],
    ids=["default", "mc", "refitted", "nn", "ef"],
)
def test_workers_change_no_bit_under_other_settings(params):
    net = classifier(max_epochs=2)
    model = LaplaceClassifier(net, **SMALL, **params, n_jobs=1)
    alone = numbers(fitted(model, X, Y, sample_weight=1 + Y), X, METHODS)
    found = fitted(on_threads(model), X, Y, sample_weight=1 + Y)
    assert_equal(numbers(found, X, METHODS), alone)


def test_workers_change_no_bit_of_a_regression():
    tuned = {
        "subset_of_weights": "all",
        "prior_precision": "marglik",
        "sigma_noise": 0.3,
    }
    model = LaplaceRegressor(NET_REG, **SMALL, **tuned, n_jobs=1)
    alone = numbers(fitted(model, X_REG, Y_REG), X_REG, METHODS_REG)
    found = fitted(on_threads(model), X_REG, Y_REG)
    assert_equal(numbers(found, X_REG, METHODS_REG), alone)


def test_workers_change_no_bit_of_a_ranking():
    scorer = {"module__scorer": MLP(n_out=1), "max_epochs": 2}
    net = NeuralNetBinaryClassifier(BradleyTerry, **QUIET, **scorer)
    pairs, y = np.stack([X[:45], X[45:]], 1), Y[:45] % 2
    model = LaplaceRanker(net, **SMALL, n_jobs=1)
    alone = fitted(model, pairs, y).predict_proba(pairs)
    with joblib.parallel_config(backend="threading"):
        found = on_threads(model).fit(pairs, y).predict_proba(pairs)
    np.testing.assert_array_equal(found, alone)


def test_workers_change_no_bit_of_further_samples():
    first, second = slice(0, 50), slice(50, 90)
    model = LaplaceClassifier(NET, **SMALL, prior_precision=1.0, n_jobs=1)
    twin = on_threads(model)
    for some in (model, twin):
        fitted(some, X[first], Y[first])
        with joblib.parallel_config(backend="threading"):
            some.partial_fit(X[second], Y[second])
    assert_equal(numbers(twin, X, METHODS), numbers(model, X, METHODS))


@pytest.mark.parametrize("structure", sorted(STRUCTURES))
def test_shards_change_nothing_but_rounding(structure):
    kind = {"hessian_structure": structure, "subset_of_weights": "all"}
    model = LaplaceClassifier(NET, **kind, **SMALL, prior_precision=1.0, n_shards=1)
    whole = numbers(model.fit(X.astype(float), Y), X, METHODS[:2])
    many = clone(model).set_params(n_shards=12).fit(X.astype(float), Y)
    for name, value in numbers(many, X, METHODS[:2]).items():
        np.testing.assert_allclose(value, whole[name], rtol=1e-7, atol=1e-9)


def test_a_thread_that_predicts_has_a_network_of_its_own():
    """Hooks and modes belong to a module, not to a thread."""
    model = LaplaceClassifier(NET, **SMALL, prior_precision=1.0, n_jobs=2)
    fitted(model, X, Y)
    module = model.estimator_.module_
    hooks = [len(part._forward_hooks) for part in module.modules()]
    modes = [part.training for part in module.modules()]
    numbers(model, X, METHODS)
    assert hooks == [len(part._forward_hooks) for part in module.modules()]
    assert modes == [part.training for part in module.modules()]


def test_no_lock_is_held_while_workers_compute():
    """A worker of dask takes on a second fit while the first one waits for others."""
    entered = []

    def enter():
        with private_rng(0), as_forward(NET.estimator).frozen():
            entered.append(True)

    def watched(*args):
        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        thread.join(timeout=10)
        yield from ordered_map(*args)

    model = LaplaceClassifier(NET, **SMALL, prior_precision=1.0)
    with mock.patch("sklaplace.estimators.saved_sums.ordered_map", watched):
        model.fit(X, Y)
    assert entered


# ------------------------------------------------------------------- checkpoints
class InterruptionError(Exception):
    """Of a fit, between two shards."""


@contextmanager
def breaking_after(n_shards):
    left = [n_shards]

    def add_pass(*args):
        if not left[0]:
            raise InterruptionError
        left[0] -= 1
        return ggn.add_pass(*args)

    with mock.patch("sklaplace.estimators.curvature_sums.add_pass", add_pass):
        yield


def in_shards(**params):
    return LaplaceClassifier(classifier(max_epochs=1), **SMALL, n_shards=6, **params)


def tried(model, folder, n_shards):
    """Whether a fit ends that may add up so many shards."""
    with breaking_after(n_shards):
        try:
            model.fit(X, Y, checkpoint=folder)
        except InterruptionError:
            assert not hasattr(model, "posterior_")
            return False
    return True


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"prior_precision": "marglik", "hessian_structure": "diag"},
        {"hessian_structure": "nystrom", "prior_precision": 1.0},
        {"subset_of_weights": "all", "refine": True, "prior_precision": 1.0},
    ],
    ids=["default", "marglik", "two passes", "refitted"],
)
def test_an_interrupted_fit_goes_on(params, tmp_path):
    folder, model = tmp_path / "fit", in_shards(**params)
    expected = numbers(clone(model).fit(X, Y), X, METHODS[:2])
    n_tries = 1
    while not tried(model, folder, 2):
        n_tries += 1
    assert n_tries > 2
    assert_equal(numbers(model, X, METHODS[:2]), expected)
    assert not folder.exists()


def test_a_fit_goes_on_with_other_workers(tmp_path):
    model = in_shards(n_jobs=1)
    expected = numbers(clone(model).fit(X, Y), X, METHODS[:2])
    with joblib.parallel_config(backend="threading"):
        while not tried(model, tmp_path / "fit", 2):
            model.set_params(n_jobs=3 - model.n_jobs)
    assert_equal(numbers(model, X, METHODS[:2]), expected)


def test_the_network_is_trained_once(tmp_path):
    model, folder = in_shards(), tmp_path / "fit"
    assert not tried(model, folder, 3)
    trained = (folder / "rank-0-networks.checkpoint").read_bytes()
    with mock.patch("sklaplace.estimators.trainer.train", side_effect=AssertionError):
        assert not tried(model, folder, 1)
    assert (folder / "rank-0-networks.checkpoint").read_bytes() == trained


def test_data_in_memory_are_not_stored(tmp_path):
    wide = np.concatenate([X, np.zeros((90, 2000), "f4")], 1)
    model = in_shards(prior_precision="marglik")
    model.set_params(estimator__module__n_in=2002)
    with breaking_after(2), pytest.raises(InterruptionError):
        model.fit(wide, Y, checkpoint=tmp_path)
    n_weights = 4 * 2002 * 6
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert max(sizes) < 4 * n_weights < wide.nbytes


@pytest.mark.parametrize(
    "change",
    [
        {"X": X + 1},
        {"y": (Y + 1) % 3},
        {"sample_weight": 1 + Y},
        {"subset_of_weights": "all"},
        {"random_state": 1},
        {"n_shards": 5},
        {"estimator__max_epochs": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_files_of_another_fit_are_refused(change, tmp_path):
    model = in_shards()
    assert not tried(model, tmp_path, 3)
    data = {"X": X, "y": Y} | {k: v for k, v in change.items() if k not in PARAMS}
    model.set_params(**{k: v for k, v in change.items() if k in PARAMS})
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="another fit"):
        model.fit(**data, checkpoint=tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


PARAMS = {"subset_of_weights", "random_state", "n_shards", "estimator__max_epochs"}


def test_a_damaged_file_is_computed_again(tmp_path):
    model = in_shards()
    expected = numbers(clone(model).fit(X, Y), X, METHODS[:2])
    for name in ("networks", "sums-0", "sums-0-rows-0"):
        assert not tried(model, tmp_path, 3)
        file = tmp_path / f"rank-0-{name}.checkpoint"
        file.write_bytes(file.read_bytes()[:-10])
    assert_equal(
        numbers(model.fit(X, Y, checkpoint=tmp_path), X, METHODS[:2]), expected
    )


@pytest.mark.parametrize(
    ("checkpoint", "error", "words"),
    [
        (3, TypeError, ["checkpoint", "int", "path"]),
        ("file", OSError, ["checkpoint=", "folder"]),
    ],
)
def test_what_is_no_folder_is_refused(checkpoint, error, words, tmp_path):
    if checkpoint == "file":
        checkpoint = tmp_path / "file"
        checkpoint.touch()
    with pytest.raises(error) as raised:
        in_shards().fit(X, Y, checkpoint=checkpoint)
    assert all(word in str(raised.value) for word in words)


def test_a_seed_is_needed(tmp_path):
    model = in_shards().set_params(random_state=None)
    message = refused_fit(model, "random_state", data=(X, Y), checkpoint=tmp_path)
    assert "checkpoint" in message


def test_a_full_disk(tmp_path, file_size_limit):
    """What was saved is kept, and the next fit goes on from it."""
    model = in_shards(hessian_structure="full", subset_of_weights="all")
    expected = numbers(clone(model).fit(X, Y), X, METHODS[:2])
    with file_size_limit(4000), pytest.raises(OSError, match="checkpoint=") as raised:
        model.fit(X, Y, checkpoint=tmp_path)
    assert "make space" in str(raised.value)
    assert not hasattr(model, "posterior_")
    assert not [file for file in tmp_path.iterdir() if "new" in file.name]
    assert_equal(
        numbers(model.fit(X, Y, checkpoint=tmp_path), X, METHODS[:2]), expected
    )


@pytest.fixture
def file_size_limit():
    resource = pytest.importorskip("resource")

    @contextmanager
    def limited(n_bytes):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


# ------------------------------------------------------------------- distributed
def test_a_group_is_needed():
    model = LaplaceClassifier(NET, distributed=True)
    refused_fit(model, "distributed=True", "torchrun", data=(X, Y))


def test_a_dataset_of_the_user():
    """Its items are computed by code of its own, in the worker."""
    model = LaplaceClassifier(NET, **SMALL, prior_precision=1.0, n_jobs=1)
    data = Own(X.astype(float), Y)
    alone = numbers(fitted(model, data, Y), X, METHODS[:2])
    found = fitted(on_threads(model), data, Y)
    assert_equal(numbers(found, X, METHODS[:2]), alone)


class Own(Dataset):
    """Half of every number, so that arrays cannot be read past it."""

    def transform(self, X, y):
        return super().transform(X / 2, y)
