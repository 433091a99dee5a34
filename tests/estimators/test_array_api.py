"""Array API: tensors where scikit-learn dispatches on them, and where it does not."""

import numpy as np
import pytest
import torch
from nets import blobs, classifier, regressor, waves
from numpy.testing import assert_allclose, assert_array_equal
from refusals import refused
from sklearn import config_context
from sklearn.base import clone

from sklaplace import (
    DeepEnsembleClassifier,
    LaplaceClassifier,
    LaplaceClassifierCV,
    LaplaceRanker,
    LaplaceRegressor,
    metrics,
)

ROWS, NUMBERS = blobs(), waves()
PAIRS = np.stack([ROWS[0][:30], ROWS[0][30:]], 1), np.arange(30) % 2
MODELS = {
    "classifier": (LaplaceClassifier(classifier(max_epochs=2), random_state=0), ROWS),
    "search": (LaplaceClassifierCV(classifier(max_epochs=2), random_state=0), ROWS),
    "ensemble": (
        DeepEnsembleClassifier(classifier(max_epochs=2), random_state=0),
        ROWS,
    ),
    "regressor": (LaplaceRegressor(regressor(max_epochs=2), random_state=0), NUMBERS),
    "ranker": (LaplaceRanker(random_state=0), PAIRS),
}


@pytest.fixture(autouse=True)
def dispatch():
    with config_context(array_api_dispatch=True):
        yield


def tensors(data):
    return [torch.tensor(values) for values in data]


ARGUMENTS = "X", "y", "sample_weight", "X_val", "y_val"
GIVEN = [(kind, name) for kind in MODELS for name in ARGUMENTS]
GIVEN.remove(("search", "X_val"))
GIVEN.remove(("search", "y_val"))


@pytest.mark.parametrize(("kind", "name"), GIVEN)
def test_fit_refuses_tensors(kind, name):
    model, (X, y) = MODELS[kind]
    given = {"X": X, "y": y, "sample_weight": np.ones(len(X))}
    if name.endswith("_val"):
        given |= {"X_val": X, "y_val": y}
    given[name] = torch.tensor(given[name])
    words = f"{name} is", "numpy(force=True)", "array_api_dispatch=False"
    refused(TypeError, words, lambda: model.fit(**given), model)


@pytest.fixture(scope="module")
def fitted():
    return {kind: clone(model).fit(*data) for kind, (model, data) in MODELS.items()}


@pytest.mark.parametrize("kind", MODELS)
def test_arrays_are_unaffected(kind, fitted):
    model, (X, y) = fitted[kind], MODELS[kind][1]
    found = model.predict(X)
    with config_context(array_api_dispatch=False):
        again = clone(model).fit(*tensors((X, y)))  # tensors are converted
        assert_array_equal(again.predict(torch.tensor(X)), found)


METHODS = (
    "predict",
    "predict_proba",
    "predict_log_proba",
    "predict_dirichlet",
    "predict_uncertainty",
    "predict_set",
    "predict_top_k",
    "predict_interval",
    "sample_proba",
    "sample_y",
    "latent_mean_and_variance",
)


@pytest.mark.parametrize("kind", MODELS)
def test_predictions_refuse_tensors(kind, fitted):
    model, X = fitted[kind], torch.tensor(MODELS[kind][1][0])
    asked = [getattr(model, name) for name in METHODS if hasattr(model, name)]
    assert len(asked) >= 4
    for ask in asked:
        refused(TypeError, ["X is", "numpy(force"], lambda ask=ask: ask(X), model)


def test_more_samples_and_items_refuse_tensors(fitted):
    model, ranker = fitted["regressor"], fitted["ranker"]
    new = tensors(NUMBERS)
    for ask in (model.partial_fit, model.recalibrate, model.score):
        refused(TypeError, ["X is"], lambda ask=ask: ask(*new), model)
    items = torch.tensor(PAIRS[0][:, 0])
    refused(TypeError, ["items is"], lambda: ranker.predict_score(items), ranker)


def test_predictive_takes_tensors(fitted):
    model, X = fitted["regressor"], NUMBERS[0]
    mean, _ = model.predictive(torch.tensor(X))
    expected, _ = model.latent_mean_and_variance(X)
    assert_allclose(mean.numpy(), expected, rtol=1e-5, atol=1e-5)  # float32


@pytest.mark.parametrize("name", ["brier_score", "expected_calibration_error"])
def test_scores_of_probabilities_are_floats(name):
    score = getattr(metrics, name)
    y = np.array([0, 1, 1, 0])
    proba = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.7, 0.3]])
    found = score(*tensors((y, proba)))
    assert isinstance(found, float)
    assert found == score(y, proba)


def test_scores_of_numbers_are_floats():
    y, mean, std = np.array([0.0, 1.0]), np.array([0.5, 1.5]), np.array([1.0, 2.0])
    bounds = np.stack([mean - std, mean + std], 1)
    for score, given in (
        (metrics.gaussian_nll, (y, mean, std)),
        (metrics.gaussian_crps, (y, mean, std)),
        (metrics.interval_coverage, (y, bounds)),
        (metrics.ood_auroc, (mean, std)),
    ):
        found = score(*tensors(given))
        assert isinstance(found, float)
        assert found == score(*given)
