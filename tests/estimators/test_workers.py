"""Shards and workers change neither posterior nor predictions.

Workers are threads here, which need no time to start; tests/clients has processes.
"""

import threading
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

    def watched(*args, **kwargs):
        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        thread.join(timeout=10)
        yield from ordered_map(*args, **kwargs)

    model = LaplaceClassifier(NET, **SMALL, prior_precision=1.0)
    with mock.patch("sklaplace.estimators.laplace_fit.ordered_map", watched):
        model.fit(X, Y)
    assert entered


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
