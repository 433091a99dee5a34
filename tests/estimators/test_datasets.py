"""Samples that are not an array in memory give the results of that array.

They are subsets of datasets, datasets of the user, streams, and files.
"""

import re
import subprocess
import sys
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from nets import MLP, RecordTraining, blobs, classifier, seeded
from refusals import refused, refused_fit
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetClassifier
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import SliceDataset
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    random_split,
)

from sklaplace import (
    DeepEnsembleClassifier,
    LaplaceClassifier,
    LaplaceClassifierCV,
    SWAGClassifier,
)
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.data import stored

X, Y = blobs(90)
DATA = Dataset(X, Y)
ORDER = np.random.default_rng(0).permutation(90)
SPLIT = random_split(DATA, [60, 30], generator=torch.Generator().manual_seed(0))
JOINED = ConcatDataset(SPLIT[::-1])
JOINED_ROWS = np.concatenate([part.indices for part in SPLIT[::-1]])
SLICES, SLICED_Y = (SliceDataset(DATA, idx=i) for i in (0, 1))
# each with the positions of its samples
SUBSETS = {
    "slices": (SLICES, np.arange(90)),
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
NET = FrozenEstimator(seeded(classifier(), X, Y))
NEW = classifier(**QUICK)
ENSEMBLE = DeepEnsembleClassifier(NEW, n_estimators=2, random_state=0)
MODELS = {
    "trained": LaplaceClassifier(NEW, **FIXED),
    "train_split": LaplaceClassifier(
        classifier(train_split=ValidSplit(3, stratified=True), **QUICK),
        prior_precision="validation",
        random_state=0,
    ),
    "frozen": LaplaceClassifier(NET, **FIXED),
    "cv": LaplaceClassifierCV(NEW, **CV),
    "ensemble": ENSEMBLE,
}


# -------------------------------------------------------------------------- subsets
@pytest.mark.parametrize(("data", "rows"), SUBSETS.values(), ids=list(SUBSETS))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_fit_and_predictions(model, weighted, data, rows):
    weights = np.arange(len(rows)) % 3 / 2 if weighted else None
    y = SLICED_Y if data is SLICES else Y[rows]
    found = clone(model).fit(data, y, sample_weight=weights)
    expected = clone(model).fit(X[rows], Y[rows], sample_weight=weights)
    np.testing.assert_allclose(
        found.predict_proba(data), expected.predict_proba(X[rows]), atol=1e-6
    )
    assert found.score(data, y) == expected.score(X[rows], Y[rows])


def test_masks_are_no_positions():
    mask = Subset(DATA, (Y > 0))
    words = "boolean", "numpy.flatnonzero"
    refused_fit(MODELS["trained"], *words, data=(mask, Y))
    model = clone(MODELS["frozen"]).fit(X, Y)
    refused(ValueError, words, lambda: model.predict(mask), model)


# ------------------------------------------------------ datasets with code of their own
class Scaled(Dataset):
    """A dataset that scales every number, so its arrays cannot be read directly."""

    def transform(self, X, y):
        return super().transform(0.3 * X, y)


class Scaling(NeuralNetClassifier):
    """A net whose datasets scale the inputs."""

    def get_dataset(self, X, y=None):
        return Scaled(X, y)


@pytest.mark.parametrize("kind", ["of the user", "of the net"])
def test_workers_change_no_bit_of_a_dataset(kind):
    """The dataset's own code computes its items in the worker."""
    net = Scaling(MLP, criterion=nn.CrossEntropyLoss, max_epochs=2, verbose=0)
    net, data = (net, X) if kind == "of the net" else (NET, Scaled(X, Y))
    model = LaplaceClassifier(net, prior_precision=1.0, random_state=0, batch_size=4)
    answers = []
    for n_jobs in (None, 1, 2):
        with joblib.parallel_config(backend="threading"):
            model.set_params(n_jobs=n_jobs).fit(data, Y)
            answers.append([model.predict_proba(data), model.score_samples(data)])
    for found in answers[1:]:
        assert all(map(np.array_equal, found, answers[0]))


# -------------------------------------------------------------------------- streams
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
    model = LaplaceClassifier(net, **OPTIONS, **params)
    found = clone(model).fit(Stream(X, Y), Y, weights)
    same_posterior(found, model.fit(X, Y, weights))


def test_streams_of_samples_to_tune_on():
    model = LaplaceClassifier(NET, **OPTIONS, refine=False)
    held_out = {"X_val": X[60:], "y_val": Y[60:]}
    found = model.fit(Stream(X[:60]), Y[:60], **held_out).prior_precision_
    assert found == model.fit(X[:60], Y[:60], **held_out).prior_precision_
    held_out["X_val"] = Stream(X[60:])
    assert found == model.fit(X[:60], Y[:60], **held_out).prior_precision_


def test_streams_without_samples_to_tune_on():
    """What splits off samples, or trains on folds, is left out."""
    with pytest.warns(UserWarning, match="held out|no held-out samples"):
        model = LaplaceClassifier(NET, **OPTIONS).fit(Stream(X), Y)
    assert model.prior_precision_ > 0


def test_streams_of_further_samples():
    model = LaplaceClassifier(NET, prior_precision=1.0, **OPTIONS)
    found = clone(model).fit(Stream(X[:40]), Y[:40])
    found.partial_fit(Stream(X[40:]), Y[40:])
    same_posterior(found, model.fit(X[:40], Y[:40]).partial_fit(X[40:], Y[40:]))


NEEDS_A_SPLIT = LaplaceClassifier(classifier(train_split=ValidSplit(5)))
NEEDS_ROWS = LaplaceClassifier(NET, prior_precision="validation")
ZERO = {"sample_weight": np.arange(90) != 3}
# each with words of the message, its stream, and further arguments of fit
REFUSED = {
    "train_split": (NEEDS_A_SPLIT, ["train_split=None", "X_val"], Stream(X), {}),
    "validation": (NEEDS_ROWS, ["X_val"], Stream(X), {}),
    "folds": (LaplaceClassifierCV(NEW), ["folds"], Stream(X), {}),
    "draws": (SWAGClassifier(NEW), ["draws"], Stream(X), {}),
    "zero weights": (LaplaceClassifier(NET), ["zero weights"], Stream(X), ZERO),
    "fewer samples": (MODELS["frozen"], ["80 samples"], Stream(X, n=80), {}),
    "more samples": (
        *(MODELS["frozen"], ["more than 90"]),
        *(Stream(np.tile(X, (2, 1))), {}),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_streams_that_are_refused(case):
    model, words, stream, options = REFUSED[case]
    refused_fit(model, "IterableDataset", *words, data=(stream, Y), **options)


@pytest.mark.slow  # other processes, which take long to end
def test_workers_of_a_loader_are_refused():
    net = classifier().fit(X, Y)
    net.iterator_valid__num_workers = 2
    model = LaplaceClassifier(FrozenEstimator(net), prior_precision=1.0)
    with pytest.raises((ValueError, RuntimeError), match="num_workers"):
        model.fit(Stream(X), Y)


def test_streams_are_predicted_batch_by_batch():
    model = LaplaceClassifier(NET, prior_precision=1.0).fit(X, Y)
    for method in (model.predict_proba, model.score_samples, model.predict_dirichlet):
        with pytest.raises(ValueError, match="each batch of a"):
            method(Stream(X))
    loader = DataLoader(Stream(X), batch_size=7)
    found = np.concatenate([model.predict_proba(batch) for batch, _ in loader])
    np.testing.assert_allclose(found, model.predict_proba(X), rtol=1e-5)


def test_ensembles_train_on_streams():
    found = clone(ENSEMBLE).fit(Stream(X), Y).predict_proba(X)
    expected = clone(ENSEMBLE).fit(X, Y).predict_proba(X)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# ---------------------------------------------------------------------------- files
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "large_file.py"


@pytest.fixture
def mapped(tmp_path, monkeypatch):
    """Return a function that stores an array as a memory map, here of any size.

    The dtype of the file is not that of the network.
    """
    monkeypatch.setattr(stored, "MAX_LOADED", 0)

    def write(array):
        np.save(tmp_path / "array.npy", array.astype("f8"))
        return np.load(tmp_path / "array.npy", mmap_mode="r")

    return write


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures_of_files_are_those_of_an_array(structure, mapped):
    options = {"subset_of_weights": "all", "prior_precision": 1.0}
    model = LaplaceClassifier(NET, **OPTIONS, **options, hessian_structure=structure)
    expected = model.fit(X, Y).predict_proba(X)
    found = model.fit(mapped(X), Y).predict_proba(mapped(X))
    np.testing.assert_array_equal(found, expected)


def test_files_of_further_and_held_out_samples(mapped):
    model = LaplaceClassifier(NET, **OPTIONS)
    held_out = {"X_val": X[70:], "y_val": Y[70:]}
    expected = model.fit(X[:40], Y[:40], **held_out).partial_fit(X[40:70], Y[40:70])
    dense = expected.posterior_.structure.dense()
    held_out["X_val"] = mapped(X)[70:]
    found = model.fit(mapped(X)[:40], Y[:40], **held_out)
    found.partial_fit(mapped(X)[40:70], Y[40:70])
    np.testing.assert_array_equal(found.posterior_.structure.dense(), dense)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda X: np.where(X[80] == X, np.nan, X), ["X contains NaN"]),
        (lambda X: X[:, 0], ["shape (90,)"]),
        (lambda X: X[:0], ["0 sample"]),
        (lambda X: X * 1e300, ["too large for float32"]),
    ],
    ids=["NaN", "one axis", "no rows", "too large"],
)
def test_files_that_are_refused(change, words, mapped):
    values = change(X.astype("f8"))
    data = mapped(values), Y[: len(values)]
    refused_fit(LaplaceClassifier(NEW, **OPTIONS), *words, data=data)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="of Linux")
def test_memory_does_not_grow_with_the_file():
    """Only the targets of 8 bytes use memory, a few MiB here.

    The features of the smaller file stay in memory; the larger file's do not.
    """
    peaks = []
    for gigabytes in ("0.4", "1.6"):
        command = [sys.executable, SCRIPT, gigabytes]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks.append(int(re.search(r"predictions (\d+) MiB", found.stdout)[1]))
    assert max(peaks) < 1024
    assert peaks[1] - peaks[0] < 100


def test_fits_on_files_are_taken_from_memory(mapped, tmp_path):
    net = classifier(**QUICK, callbacks=[RecordTraining()])
    model = LaplaceClassifier(net, **OPTIONS, memory=str(tmp_path / "memory"))
    expected = model.fit(mapped(X), Y).predict_proba(X)
    RecordTraining.steps.clear()
    found = model.fit(mapped(X), Y).predict_proba(X)
    assert not RecordTraining.steps
    model.fit(mapped(X + 1), Y)
    assert RecordTraining.steps
    np.testing.assert_array_equal(found, expected)
