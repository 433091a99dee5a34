"""Cost of the defaults: ``fit`` and ``predict_proba`` relative to the skorch net.

Run ``pytest tests/benchmarks/test_default_fit.py -m benchmark -n 0 -s``. The results
are median ratios of CPU times, measured alternately on one thread.
"""

import time
from functools import partial

import numpy as np
import pytest
import torch
from benchmarks.workloads import digits_data, digits_net, mlp
from sklearn.base import clone
from sklearn.datasets import make_classification
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier

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


# data and network, and the largest ratios of fit and of predict_proba
CASES = {
    "digits": (lambda: (*digits_data(), digits_net()), 1.35, 1.3),
    "5,000 x 100, 20 classes": (lambda: generated(5000, 100, 30, 20), 1.35, 1.3),
    "10,000 x 20, 2 classes": (lambda: generated(10_000, 20, 10, 2), 1.15, 0.5),
}


def cpu_time(function):
    before = time.process_time()
    function()
    return time.process_time() - before


def ratio(mine, other, repeats=REPEATS):
    """Return the median ratio of CPU times over several turns, after a warm-up."""
    mine(), other()
    return np.median([cpu_time(mine) / cpu_time(other) for _ in range(repeats)])


@pytest.mark.parametrize("name", CASES)
def test_cost_beside_the_network(name, shown):
    make, fit_limit, predict_limit = CASES[name]
    X, y, net = make()
    model = LaplaceClassifier(net, random_state=0)

    def train():
        torch.manual_seed(0)
        clone(net).fit(X, y)

    of_fit = ratio(lambda: model.fit(X, y), train)
    calls = [partial(each.predict_proba, X) for each in (model, model.estimator_)]
    of_predict = ratio(*calls, REPEATS_OF_PREDICT)
    shown(fit=of_fit, predict_proba=of_predict)
    assert of_fit <= fit_limit
    assert of_predict <= predict_limit
