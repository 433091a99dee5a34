"""Array API: tensors with scikit-learn's dispatch, beyond the contracts."""

import numpy as np
import pytest
import torch
from nets import blobs, classifier, regressor, waves
from numpy.testing import assert_allclose
from refusals import refused
from sklearn import config_context

from sklaplace import LaplaceClassifier, LaplaceRanker, LaplaceRegressor, metrics

(X, Y), NUMBERS = blobs(), waves()
PAIRS = np.stack([X[:30], X[30:]], 1), np.arange(30) % 2


@pytest.fixture(autouse=True)
def dispatch():
    with config_context(array_api_dispatch=True):
        yield


def tensors(data):
    return [torch.tensor(values) for values in data]


@pytest.mark.parametrize("name", ["X_val", "y_val"])
def test_rows_to_tune_on_may_not_be_tensors(name):
    model = LaplaceClassifier(classifier(max_epochs=2), random_state=0)
    given = {"X": X, "y": Y, "X_val": X, "y_val": Y}
    given[name] = torch.tensor(given[name])
    words = f"{name} is", "numpy(force=True)", "array_api_dispatch=False"
    refused(TypeError, words, lambda: model.fit(**given), model)


def test_more_samples_and_items_refuse_tensors():
    model = LaplaceRegressor(regressor(max_epochs=2), random_state=0).fit(*NUMBERS)
    for ask in (model.partial_fit, model.recalibrate, model.score):
        refused(TypeError, ["X is"], lambda ask=ask: ask(*tensors(NUMBERS)), model)
    mean, _ = model.predictive(torch.tensor(NUMBERS[0]))  # which takes them
    expected, _ = model.latent_mean_and_variance(NUMBERS[0])
    assert_allclose(mean.numpy(), expected, rtol=1e-5, atol=1e-5)  # float32
    ranker = LaplaceRanker(random_state=0).fit(*PAIRS)
    items = torch.tensor(PAIRS[0][:, 0])
    refused(TypeError, ["items is"], lambda: ranker.predict_score(items), ranker)


LABELS = np.array([0, 1, 1, 0])
PROBA = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.7, 0.3]])
TARGETS, MEAN, STD = np.array([[0.0, 1.0], [0.5, 1.5], [1.0, 2.0]])


@pytest.mark.parametrize(
    ("score", "given"),
    [
        (metrics.brier_score, (LABELS, PROBA)),
        (metrics.expected_calibration_error, (LABELS, PROBA)),
        (metrics.gaussian_nll, (TARGETS, MEAN, STD)),
        (metrics.gaussian_crps, (TARGETS, MEAN, STD)),
        (metrics.interval_coverage, (TARGETS, np.stack([MEAN - STD, MEAN + STD], 1))),
        (metrics.quantile_crps, (TARGETS, MEAN[:, None], [0.5])),
        (metrics.ood_auroc, (MEAN, STD)),
    ],
)
def test_scores_are_floats(score, given):
    found = score(*tensors(given))
    assert isinstance(found, float)
    assert found == score(*given)
