"""Subsets of datasets have the same results as the corresponding arrays."""

import numpy as np
import pytest
import torch
from nets import blobs, classifier, seeded
from refusals import refused, refused_fit
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from skorch.dataset import Dataset, ValidSplit
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split

from sklaplace import (
    DeepEnsembleClassifier,
    LaplaceClassifier,
    LaplaceClassifierCV,
)

X, Y = blobs(90)
DATA = Dataset(X, Y)
ORDER = np.random.default_rng(0).permutation(90)
SPLIT = random_split(DATA, [60, 30], generator=torch.Generator().manual_seed(0))
JOINED = ConcatDataset(SPLIT[::-1])
JOINED_ROWS = np.concatenate([part.indices for part in SPLIT[::-1]])
# each with the positions of its samples
SUBSETS = {
    "subset": (Subset(DATA, ORDER.tolist()), ORDER),
    "indices in an array": (Subset(DATA, ORDER), ORDER),
    "indices in a tensor": (Subset(DATA, torch.as_tensor(ORDER)), ORDER),
    "nested": (Subset(Subset(DATA, ORDER), ORDER[:80]), ORDER[ORDER[:80]]),
    "random_split": (SPLIT[0], np.array(SPLIT[0].indices)),
    "concatenation": (JOINED, JOINED_ROWS),
    "subset of a concatenation": (Subset(JOINED, ORDER), JOINED_ROWS[ORDER]),
    "tensors": (
        Subset(TensorDataset(torch.as_tensor(X), torch.as_tensor(Y)), ORDER),
        ORDER,
    ),
}
FIXED = {"prior_precision": 1.0, "random_state": 0, "refine": False}
QUICK = {"max_epochs": 3}
CV = {"cv": 3, "prior_precisions": [0.1, 1.0], "random_state": 0}
MODELS = {
    "trained": LaplaceClassifier(classifier(**QUICK), **FIXED),
    "train_split": LaplaceClassifier(
        classifier(train_split=ValidSplit(3, stratified=True), **QUICK),
        prior_precision="validation",
        random_state=0,
    ),
    "frozen": LaplaceClassifier(FrozenEstimator(seeded(classifier(), X, Y)), **FIXED),
    "cv": LaplaceClassifierCV(classifier(**QUICK), **CV),
    "ensemble": DeepEnsembleClassifier(
        classifier(**QUICK), n_estimators=2, random_state=0
    ),
}
OF_SUBSETS = pytest.mark.parametrize(
    ("data", "rows"), SUBSETS.values(), ids=list(SUBSETS)
)


@OF_SUBSETS
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_fit_and_predictions(model, weighted, data, rows):
    weights = np.arange(len(rows)) % 3 / 2 if weighted else None
    found = clone(model).fit(data, Y[rows], sample_weight=weights)
    expected = clone(model).fit(X[rows], Y[rows], sample_weight=weights)
    np.testing.assert_allclose(
        found.predict_proba(data), expected.predict_proba(X[rows]), atol=1e-6
    )
    assert found.score(data, Y[rows]) == expected.score(X[rows], Y[rows])


def test_masks_are_no_positions():
    mask = Subset(DATA, (Y > 0))
    words = "boolean", "numpy.flatnonzero"
    refused_fit(MODELS["trained"], *words, data=(mask, Y))
    model = clone(MODELS["frozen"]).fit(X, Y)
    refused(ValueError, words, lambda: model.predict(mask), model)
