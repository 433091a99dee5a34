"""Cost of the defaults: ``fit`` and ``predict_proba`` relative to the skorch net.

Without a net, the cost of ``fit`` is relative to CatBoost, if it is installed. Run
``pytest tests/benchmarks/test_default_fit.py -m benchmark -n 0 -s`` on one thread
(``OMP_NUM_THREADS=1``). The results are median ratios of CPU times, measured
alternately.
"""

import time
from functools import partial

import numpy as np
import pytest
import torch
from benchmarks.workloads import digits_data, digits_net, mlp
from sklearn.base import clone
from sklearn.datasets import make_classification, make_friedman1
from skorch import NeuralNetClassifier, NeuralNetRegressor
from skorch.dataset import ValidSplit
from torch import nn

from sklaplace import LaplaceClassifier, LaplaceRegressor
from sklaplace.data.dataset import TrainingData
from sklaplace.networks.training import training_run

# turns of fit and, since it takes milliseconds, of predict_proba
REPEATS, REPEATS_OF_PREDICT = 7, 41


def generated(n_samples, n_features, n_informative, n_classes):
    X, y = make_classification(
        n_samples,
        n_features,
        n_informative=n_informative,
        n_redundant=0,
        n_classes=n_classes,
        n_clusters_per_class=1,
        random_state=0,
    )
    net = NeuralNetClassifier(
        partial(mlp, n_features, 100, 100, n_classes),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=1e-3,
        max_epochs=20,
        verbose=0,
    )
    return X.astype(np.float32), y, net


# data and network, and the largest ratios of fit to training, of fit to the same
# training with batches that are read at once, and of predict_proba
CLASSIFIERS = {
    "digits": (lambda: (*digits_data(), digits_net()), 1.25, 1.9, 1.5),
    "5,000 x 100, 20 classes": (lambda: generated(5000, 100, 30, 20), 1.1, 1.7, 1.3),
    "10,000 x 20, 2 classes": (lambda: generated(10_000, 20, 10, 2), 0.8, 1.3, 0.5),
}
# rows, epochs, targets, whether skorch's default split holds samples out, and the
# largest ratio of fit to training
REGRESSORS = [
    (500, 60, 1, True, 3.5),
    (500, 60, 1, False, 3.5),
    (2000, 30, 1, True, 0.8),
    (5000, 20, 1, True, 0.8),
    (20_000, 10, 1, True, 0.9),
    (2000, 30, 10, True, 2),
    (2000, 30, 100, True, 8),
]
# estimator, rows, and the largest ratio of fit to CatBoost with 1,000 iterations
WITHOUT_A_NET = [
    (LaplaceRegressor, 500, 1.5),
    (LaplaceRegressor, 2000, 3),
    (LaplaceRegressor, 10_000, 2.5),
    (LaplaceClassifier, 500, 0.3),
    (LaplaceClassifier, 2000, 0.5),
    (LaplaceClassifier, 10_000, 0.7),
]


def cpu_time(function):
    before = time.process_time()
    function()
    return time.process_time() - before


def ratio(mine, other, repeats=REPEATS):
    """Return the median ratio of CPU times over several turns, after a warm-up."""
    mine(), other()
    return np.median([cpu_time(mine) / cpu_time(other) for _ in range(repeats)])


def training(net, X, y):
    torch.manual_seed(0)
    clone(net).fit(X, y)


def training_in_batches(net, X, y):
    """Train a net on batches that are read at once, as the estimators do."""
    torch.manual_seed(0)
    net = clone(net)
    with training_run(net, TrainingData(X, y, None)):
        net.fit(X, y)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifier_beside_its_network(name, shown):
    make, limit, limit_in_batches, limit_of_predict = CLASSIFIERS[name]
    X, y, net = make()
    model = LaplaceClassifier(net, random_state=0)
    of_fit = ratio(lambda: model.fit(X, y), lambda: training(net, X, y))
    in_batches = ratio(lambda: model.fit(X, y), lambda: training_in_batches(net, X, y))
    calls = [partial(each.predict_proba, X) for each in (model, model.estimator_)]
    of_predict = ratio(*calls, REPEATS_OF_PREDICT)
    shown(fit=of_fit, in_batches=in_batches, predict_proba=of_predict)
    assert of_fit <= limit
    assert in_batches <= limit_in_batches
    assert of_predict <= limit_of_predict


def test_a_thousand_classes(shown):
    X, y, net = generated(8000, 32, 20, 1000)
    model = LaplaceClassifier(net, random_state=0)
    found = {"fit": ratio(lambda: model.fit(X, y), lambda: training(net, X, y), 1)}
    for name in ("predict_set", "predict_dirichlet", "predict_uncertainty"):
        calls = [partial(getattr(model, n), X[:500]) for n in (name, "predict_proba")]
        found[name] = ratio(*calls, REPEATS_OF_PREDICT)
    shown(**found)
    assert found.pop("fit") <= 10
    assert max(found.values()) <= 4


@pytest.mark.parametrize(("n", "epochs", "n_targets", "is_split", "limit"), REGRESSORS)
def test_regressor_beside_its_network(n, epochs, n_targets, is_split, limit, shown):
    X, y = make_friedman1(n, noise=1.0, random_state=0)
    rng = np.random.default_rng(0)
    y = y[:, None] + rng.normal(size=(n, n_targets))
    X, y = X.astype(np.float32), y.astype(np.float32)
    net = NeuralNetRegressor(
        partial(mlp, 10, 64, 64, n_targets),
        optimizer=torch.optim.Adam,
        lr=2e-3,
        max_epochs=epochs,
        train_split=ValidSplit(5) if is_split else None,
        verbose=0,
    )
    model = LaplaceRegressor(net, random_state=0)
    of_fit = ratio(lambda: model.fit(X, y), lambda: training(net, X, y), 3)
    shown(fit=of_fit)
    assert of_fit <= limit


@pytest.mark.parametrize(("estimator", "n", "limit"), WITHOUT_A_NET)
def test_default_network_beside_boosting(estimator, n, limit, shown):
    catboost = pytest.importorskip("catboost")
    options = {"thread_count": 1, "verbose": False, "allow_writing_files": False}
    if estimator is LaplaceRegressor:
        X, y = make_friedman1(n, noise=1.0, random_state=0)
        boosting = catboost.CatBoostRegressor(**options)
    else:
        X, y, _ = generated(n, 20, 10, 3)
        boosting = catboost.CatBoostClassifier(**options)
    model = estimator(random_state=0)
    of_fit = ratio(lambda: model.fit(X, y), lambda: boosting.fit(X, y), 1)
    shown(fit=of_fit)
    assert of_fit <= limit
