"""Kinds and shapes of inputs, which must be equal in fit and predictions."""

from collections import UserDict
from typing import ClassVar

import numpy as np
import pytest
import torch
from nets import RecordTraining, blobs, classifier, seeded
from refusals import refused, refused_fit
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import SliceDict
from torch import nn
from torch.utils.data import TensorDataset

from sklaplace import (
    DeepEnsembleClassifier,
    LaplaceClassifier,
    LaplaceClassifierCV,
    LaplaceRegressor,
    MCDropoutRegressor,
    SWAGClassifier,
    VariationalClassifier,
)

X, Y = blobs()
IMAGES = np.random.default_rng(0).normal(size=(60, 1, 5, 5)).astype(np.float32)
FIXED = {"prior_precision": 1.0, "random_state": 0}
FROZEN = LaplaceClassifier(FrozenEstimator(seeded(classifier(), X, Y)), **FIXED)
QUICK = {"max_epochs": 2}


@pytest.fixture(scope="module")
def fitted():
    return clone(FROZEN).fit(X, Y)


class Sum(nn.Module):
    """A module with two named inputs; skorch counts samples by the first name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, input_ids, scale):
        return self.layer(input_ids.float() * scale.float()[:, None])


class TestMappings:
    ROWS: ClassVar[dict] = {"input_ids": X, "scale": np.linspace(1, 2, len(X))}
    MODEL = LaplaceClassifier(
        classifier(Sum, callbacks=[RecordTraining()], max_epochs=3), **FIXED
    )

    @pytest.mark.parametrize(
        "given",
        [
            UserDict(ROWS),
            {name: values.tolist() for name, values in ROWS.items()},
            UserDict({name: torch.tensor(values) for name, values in ROWS.items()}),
            SliceDict(**ROWS),
        ],
        ids=["mapping", "lists", "tensors", "slices"],
    )
    def test_are_dicts_of_arrays(self, given):
        model = clone(self.MODEL).fit(given, Y)
        expected = clone(self.MODEL).fit(self.ROWS, Y).predict_proba(self.ROWS)
        np.testing.assert_allclose(model.predict_proba(given), expected, rtol=1e-6)
        assert model.score(given, Y) == model.score(self.ROWS, Y)


class TestAxes:
    @pytest.mark.parametrize("shape", [(3, 2, 1), (3, 2, 2)])
    @pytest.mark.parametrize(
        "method", ["predict", "predict_dirichlet", "latent_mean_and_variance"]
    )
    def test_more_than_in_fit(self, shape, method, fitted):
        words = str(shape), "3 axes", "had 2 in fit"
        rows = np.ones(shape)
        refused(ValueError, words, lambda: getattr(fitted, method)(rows), fitted)
        refused(ValueError, words, lambda: fitted.partial_fit(rows, Y[:3]), fitted)


class TestDefaultNetwork:
    MODELS = (
        LaplaceClassifier(),
        LaplaceRegressor(),
        LaplaceClassifierCV(),
        DeepEnsembleClassifier(),
        MCDropoutRegressor(),
        VariationalClassifier(),
        SWAGClassifier(),
    )

    @pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
    @pytest.mark.parametrize("rows", [IMAGES, IMAGES[:, 0]], ids=["4d", "3d"])
    def test_takes_tables(self, model, rows):
        words = "estimator=None", "5, 5)", "reshape"
        refused_fit(model, *words, data=(rows, Y))

    @pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
    @pytest.mark.parametrize("rows", [{"X": X}, Dataset(X, Y)], ids=["dict", "dataset"])
    def test_takes_arrays(self, model, rows):
        refused_fit(model, "X is of type", "estimator=None", data=(rows, Y))


# ----------------------------------------------- inputs that only the network checks
UNFIT = {
    "other names": {"a": X},
    "more names": {"X": X, "b": X},
    "unequal lengths": {"X": X, "b": X[:3]},
    "a tuple": (X,),
    "a dataset without targets": TensorDataset(torch.from_numpy(X)),
}


@pytest.mark.parametrize("data", UNFIT.values(), ids=UNFIT)
def test_inputs_that_the_network_does_not_take(data):
    net = classifier(callbacks=[RecordTraining()])
    message = refused_fit(
        LaplaceClassifier(net), "X_val", data=(X, Y), X_val=data, y_val=Y
    )
    assert not message.startswith("X:")
    model = LaplaceClassifier(classifier(max_epochs=1)).fit(X, Y)
    frozen = LaplaceClassifier(FrozenEstimator(model.estimator_))
    message = refused_fit(frozen, "X_val", data=(X, Y), X_val=data, y_val=Y)
    assert not message.startswith("X:")
    refused(ValueError, ["X"], lambda: model.predict_proba(data), model)
    refused(ValueError, ["X"], lambda: model.partial_fit(data, Y), model)


def test_held_out_samples_that_the_loader_drops():
    """After the first epoch, skorch would concatenate predictions of zero batches."""
    options = {"iterator_valid__drop_last": True, "batch_size": 64}
    net = classifier(callbacks=[RecordTraining()], train_split=ValidSplit(4), **options)
    refused_fit(LaplaceClassifier(net), "drop_last", "15 held-out", data=(X, Y))
    LaplaceClassifier(net.set_params(iterator_valid__batch_size=15)).fit(X, Y)


class TestAdvice:
    """Messages say what is allowed and what to do."""

    def test_missing_values_are_for_data_frames(self):
        missing = np.where(X > 1, np.nan, X)
        with pytest.raises(ValueError, match=r"X contains NaN.* data frame may have"):
            LaplaceClassifier(random_state=0).fit(missing, Y)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU")
    @pytest.mark.parametrize("kind", [LaplaceClassifier, DeepEnsembleClassifier])
    def test_a_missing_gpu(self, kind):
        net = classifier(device="cuda", **QUICK)
        with pytest.raises(ValueError, match=r"device='cuda', but torch finds no GPU"):
            kind(net, random_state=0).fit(X, Y)

    @pytest.mark.parametrize("kind", [LaplaceClassifier, SWAGClassifier])
    def test_the_training_rows_are_not_for_tuning(self, kind):
        with pytest.raises(ValueError, match=r"X_val is X, so .* Pass other rows"):
            kind(random_state=0).fit(X, Y, X_val=X, y_val=Y)
