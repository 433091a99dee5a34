"""Shards and workers change neither posterior nor predictions.

Workers are threads here, which need no time to start; tests/clients has processes.
"""

import threading
from unittest import mock

import joblib
import numpy as np
import pytest
import torch
from group_cases import METHODS, METHODS_REG, SUBSETS, numbers
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
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.networks.outputs import as_forward

X, Y = blobs(90)
X_REG, Y_REG = waves(90)
NET = FrozenEstimator(classifier(module__dtype=torch.float64).fit(X.astype(float), Y))
NET_REG = FrozenEstimator(regressor().fit(X_REG, Y_REG[:, None]))
SMALL = {"batch_size": 8, "random_state": 0}


def computed(model, X, y, methods, n_jobs, further=None, **fit_params):
    """All that an estimator says which threads have fitted, as arrays."""
    model = clone(model).set_params(n_jobs=n_jobs)
    with joblib.parallel_config(backend="threading"):
        model.fit(X, y, **fit_params)
        if further is not None:
            model.partial_fit(*further)
        return numbers(model, X, methods)


def assert_workers_change_no_bit(model, X, y, methods, **kwargs):
    alone = computed(model, X, y, methods, 1, **kwargs)
    found = computed(model, X, y, methods, 2, **kwargs)
    assert found.keys() == alone.keys()
    for name, value in alone.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


# ----------------------------------------------------------------------- workers
@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("structure", sorted(STRUCTURES))
def test_workers_change_no_bit(structure, subset):
    kind = {"hessian_structure": structure, "subset_of_weights": subset}
    model = LaplaceClassifier(NET, **kind, **SMALL, prior_precision=1.0)
    assert_workers_change_no_bit(model, X, Y, METHODS)


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
    model = LaplaceClassifier(classifier(max_epochs=2), **SMALL, **params)
    assert_workers_change_no_bit(model, X, Y, METHODS, sample_weight=1 + Y)


def test_workers_change_no_bit_of_a_regression():
    tuned = {"subset_of_weights": "all", "prior_precision": "marglik"}
    model = LaplaceRegressor(NET_REG, **SMALL, **tuned, sigma_noise=0.3)
    assert_workers_change_no_bit(model, X_REG, Y_REG, METHODS_REG)


def test_workers_change_no_bit_of_a_ranking():
    scorer = {"module__scorer": MLP(n_out=1), "max_epochs": 2}
    net = NeuralNetBinaryClassifier(BradleyTerry, **QUIET, **scorer)
    pairs, y = np.stack([X[:45], X[45:]], 1), Y[:45] % 2
    model = LaplaceRanker(net, **SMALL)
    assert_workers_change_no_bit(model, pairs, y, METHODS[:1])


def test_workers_change_no_bit_of_further_samples():
    model = LaplaceClassifier(NET, **SMALL, prior_precision=1.0)
    given = X[:50], Y[:50], METHODS
    assert_workers_change_no_bit(model, *given, further=(X[50:], Y[50:]))


def test_workers_change_no_bit_of_a_dataset_of_the_user():
    """Its items are computed by code of its own, in the worker."""
    model = LaplaceClassifier(NET, **SMALL, prior_precision=1.0)
    data = Own(X.astype(float), Y)
    assert_workers_change_no_bit(model, data, Y, METHODS[:2])


class Own(Dataset):
    """Half of every number, so that arrays cannot be read past it."""

    def transform(self, X, y):
        return super().transform(X / 2, y)


@pytest.mark.parametrize("structure", sorted(STRUCTURES))
def test_shards_change_nothing_but_rounding(structure):
    kind = {"hessian_structure": structure, "subset_of_weights": "all"}
    model = LaplaceClassifier(NET, **kind, **SMALL, prior_precision=1.0, n_shards=1)
    data = X.astype(float), Y, METHODS[:2], 1
    whole = computed(model, *data)
    for name, value in computed(model.set_params(n_shards=12), *data).items():
        np.testing.assert_allclose(value, whole[name], rtol=1e-7, atol=1e-9)


def test_a_thread_that_predicts_has_a_network_of_its_own():
    """Hooks and modes belong to a module, not to a thread."""
    model = LaplaceClassifier(NET, **SMALL, prior_precision=1.0, n_jobs=2)
    with joblib.parallel_config(backend="threading"):
        module = model.fit(X, Y).estimator_.module_
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

    def watched(*args, **kwargs):
        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        thread.join(timeout=10)
        yield from ordered_map(*args, **kwargs)

    model = LaplaceClassifier(NET, **SMALL, prior_precision=1.0)
    with mock.patch("sklaplace.estimators.fitting.laplace_fit.ordered_map", watched):
        model.fit(X, Y)
    assert entered


# ------------------------------------------------------------------- distributed
def test_a_group_is_needed():
    model = LaplaceClassifier(NET, distributed=True)
    refused_fit(model, "distributed=True", "torchrun", data=(X, Y))
