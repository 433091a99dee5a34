"""Sample weights are counts; other weights cause a warning."""

import warnings

import numpy as np
import pytest
from nets import blobs, classifier, seeded
from sklearn.ensemble import AdaBoostClassifier, BaggingClassifier
from sklearn.frozen import FrozenEstimator

from sklaplace import (
    DeepEnsembleClassifier,
    LaplaceClassifier,
    LaplaceClassifierCV,
    VariationalClassifier,
)

X, Y = blobs()
QUICK = {"max_epochs": 2}
MODEL = LaplaceClassifier(
    FrozenEstimator(seeded(classifier(), X, Y)), prior_precision=1.0, random_state=0
)
RELATIVE = np.random.default_rng(0).uniform(0.5, 1.5, 60)
MESSAGE = "The mean of sample_weight is"


@pytest.fixture(autouse=True)
def none_shown(monkeypatch):
    monkeypatch.setattr("sklaplace.core.checks._SHOWN", set())


def shown(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if MESSAGE in str(w.message)]


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        LaplaceClassifierCV(
            classifier(**QUICK), cv=2, prior_precisions=[1.0], random_state=0
        ),
        VariationalClassifier(classifier(**QUICK), random_state=0),
        DeepEnsembleClassifier(n_estimators=1, random_state=0),
    ],
    ids=lambda model: type(model).__name__,
)
def test_weights_that_sum_to_one_are_warned_of_once(model):
    found = shown(lambda: model.fit(X, Y, sample_weight=RELATIVE / RELATIVE.sum()))
    assert len(found) == 1
    assert found[0].startswith(f"{MESSAGE} 0.017")
    assert "60 samples should count as 1." in found[0]


@pytest.mark.parametrize(
    "weights",
    [
        RELATIVE,
        RELATIVE.tolist(),
        0.2 * RELATIVE,
        5 * RELATIVE,
        np.arange(60) // 59,  # counts
        np.full(60, 1000.0),
        np.where(np.arange(60) < 2, 1.0, 0.0),
        None,
    ],
    ids=["one", "list", "few", "many", "mask", "counts", "real-mask", "none"],
)
def test_others_are_not(weights):
    assert shown(lambda: MODEL.fit(X, Y, sample_weight=weights)) == []


def test_meta_estimators_show_one_message_at_most():
    boosted = AdaBoostClassifier(MODEL, n_estimators=4, random_state=0)
    assert len(shown(lambda: boosted.fit(X, Y))) == 1
    bagged = BaggingClassifier(MODEL, n_estimators=2, random_state=0)
    assert shown(lambda: bagged.fit(X, Y)) == []
