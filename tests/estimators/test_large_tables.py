"""Default networks of large tables, which are trained on parts of the samples."""

import numpy as np
import pytest

from sklaplace import (
    LaplaceClassifier,
    LaplaceRanker,
    LaplaceRegressor,
    MCDropoutClassifier,
    SWAGRegressor,
)
from sklaplace.networks.default import FULL_BATCH_ROWS

N = FULL_BATCH_ROWS + 300
rng = np.random.default_rng(0)
X = rng.normal(size=(N, 3))
NUMBERS = np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=N)
LABELS = 1 * (NUMBERS > 0) + (NUMBERS > 1)
PAIRS = rng.normal(size=(N, 2, 2))
CASES = {
    "regressor": (LaplaceRegressor, X, NUMBERS, "predict_quantiles"),
    "classifier": (LaplaceClassifier, X, LABELS, "predict_proba"),
    "labels": (LaplaceClassifier, X, 1 * (X[:, :2] > 0), "predict_proba"),
    "ranker": (
        LaplaceRanker,
        PAIRS,
        1 * (PAIRS[:, 1, 0] > PAIRS[:, 0, 0]),
        "predict_proba",
    ),
    "dropout": (MCDropoutClassifier, X, LABELS, "predict_proba"),
    "swag": (SWAGRegressor, X, NUMBERS, "predict"),
}


# the others take the same steps in training
SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "labels"
]


@pytest.mark.parametrize("name", ["labels", *SLOW])
def test_order_and_repetitions_do_not_matter(name):
    kind, inputs, targets, method = CASES[name]
    levels = ([0.1, 0.5, 0.9],) if method == "predict_quantiles" else ()
    weights = rng.integers(1, 3, size=N)
    rows = rng.permutation(np.repeat(np.arange(N), weights))
    weighted = kind(random_state=0).fit(inputs, targets, sample_weight=weights)
    repeated = kind(random_state=0).fit(inputs[rows], targets[rows])
    found, expected = (
        getattr(model, method)(inputs[:50], *levels) for model in (weighted, repeated)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)
