"""Samples that come one after another."""

import numpy as np
import pytest
import torch
from nets import blobs, classifier
from refusals import refused_fit
from sklearn.frozen import FrozenEstimator
from skorch.dataset import ValidSplit
from torch.utils.data import DataLoader, IterableDataset

from sklaplace import (
    DeepEnsembleClassifier,
    LaplaceClassifier,
    LaplaceClassifierCV,
    SWAGClassifier,
)

X, Y = blobs(90)
NET = FrozenEstimator(classifier().fit(X, Y))
SPLIT = classifier(train_split=ValidSplit(5))
NEW = classifier(max_epochs=3, train_split=None)
OPTIONS = {"random_state": 0, "batch_size": 20}


class Stream(IterableDataset):
    """Samples that can only be iterated over."""

    def __init__(self, X, y=None, n=None):
        self.X, self.y, self.n = X, np.zeros(len(X)) if y is None else y, n

    def __iter__(self):
        return zip(self.X[: self.n], self.y, strict=False)


def same_posterior(model, other):
    for name in ("mean", "prior_precision"):
        found, expected = (getattr(m.posterior_, name) for m in (model, other))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found, expected = (m.posterior_.structure.dense() for m in (model, other))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# --------------------------------------------------------------------------- fits
@pytest.mark.parametrize("net", [NET, NEW], ids=["frozen", "new"])
@pytest.mark.parametrize("weights", [None, 1.0 + Y], ids=["no weights", "weights"])
@pytest.mark.parametrize(
    "params",
    [
        {"prior_precision": "marglik"},
        {"prior_precision": 1.0, "refine": True},
        {"prior_precision": 1.0, "subset_of_weights": "all"},
        {"prior_precision": 1.0, "hessian_structure": "nystrom"},
    ],
    ids=["marglik", "refitted", "all", "two passes"],
)
def test_a_stream_is_fitted_as_an_array(net, weights, params):
    model = LaplaceClassifier(net, **OPTIONS, **params).fit(Stream(X, Y), Y, weights)
    same_posterior(
        model,
        LaplaceClassifier(net, **OPTIONS, **params).fit(X, Y, weights),
    )


def test_samples_to_tune_on():
    model = LaplaceClassifier(NET, **OPTIONS, refine=False)
    held_out = {"X_val": X[60:], "y_val": Y[60:]}
    found = model.fit(Stream(X[:60]), Y[:60], **held_out).prior_precision_
    assert found == model.fit(X[:60], Y[:60], **held_out).prior_precision_
    held_out["X_val"] = Stream(X[60:])
    assert found == model.fit(X[:60], Y[:60], **held_out).prior_precision_


def test_without_samples_to_tune_on():
    """What splits off samples, or trains on folds, is left out."""
    with pytest.warns(UserWarning, match="held out|no held-out samples"):
        model = LaplaceClassifier(NET, **OPTIONS).fit(Stream(X), Y)
    assert model.prior_precision_ > 0


def test_further_samples():
    model = LaplaceClassifier(NET, prior_precision=1.0, **OPTIONS)
    model.fit(Stream(X[:40]), Y[:40]).partial_fit(Stream(X[40:]), Y[40:])
    other = LaplaceClassifier(NET, prior_precision=1.0, **OPTIONS)
    same_posterior(model, other.fit(X[:40], Y[:40]).partial_fit(X[40:], Y[40:]))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (LaplaceClassifier(SPLIT), ["train_split=None", "X_val"]),
        (LaplaceClassifier(NET, prior_precision="validation"), ["X_val"]),
        (LaplaceClassifierCV(NEW), ["folds"]),
        (SWAGClassifier(NEW), ["draws"]),
    ],
    ids=["train_split", "validation", "folds", "draws"],
)
def test_what_needs_a_choice_is_refused(model, words):
    refused_fit(model, "IterableDataset", *words, data=(Stream(X), Y))


def test_weights_of_zero_are_refused():
    weights = np.ones(90)
    weights[3] = 0
    words = "IterableDataset", "zero weights"
    refused_fit(
        LaplaceClassifier(NET), *words, data=(Stream(X), Y), sample_weight=weights
    )


@pytest.mark.parametrize(("n", "words"), [(80, "80 samples"), (None, "more than 85")])
def test_other_numbers_of_samples_are_refused(n, words):
    y = Y[:85] if n is None else Y
    model = LaplaceClassifier(NET, prior_precision=1.0)
    refused_fit(model, "IterableDataset", words, data=(Stream(X, n=n), y))


@pytest.mark.slow  # other processes, which take long to end
def test_workers_of_a_loader_are_refused():
    net = classifier().fit(X, Y)
    net.iterator_valid__num_workers = 2
    model = LaplaceClassifier(FrozenEstimator(net), prior_precision=1.0)
    with pytest.raises((ValueError, RuntimeError), match="num_workers"):
        model.fit(Stream(X), Y)


@pytest.mark.slow
def test_predictions_name_what_to_use():
    model = LaplaceClassifier(NET, prior_precision=1.0).fit(X, Y)
    for method in (model.predict_proba, model.score_samples, model.predict_dirichlet):
        with pytest.raises(ValueError, match="each batch of a"):
            method(Stream(X))


def test_predictions_for_each_batch_of_a_loader():
    model = LaplaceClassifier(NET, prior_precision=1.0).fit(X, Y)
    loader = DataLoader(Stream(X), batch_size=7)
    found = np.concatenate([model.predict_proba(batch) for batch, _ in loader])
    np.testing.assert_allclose(found, model.predict_proba(X), rtol=1e-5)


def test_ensembles_train_on_streams():
    ensemble = DeepEnsembleClassifier(NEW, n_estimators=2, random_state=0)
    found = ensemble.fit(Stream(X), Y).predict_proba(X)
    expected = ensemble.fit(X, Y).predict_proba(X)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
