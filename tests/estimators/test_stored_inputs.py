"""Inputs on disk: the results equal results from arrays, with bounded memory."""

import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from nets import blobs, classifier
from refusals import refused_fit
from sklearn.frozen import FrozenEstimator

from sklaplace import LaplaceClassifier
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.data import stored

X, Y = blobs(120)
NET = FrozenEstimator(classifier().fit(X, Y))
NEW = classifier(max_epochs=2)
SMALL = {"random_state": 0, "batch_size": 16}
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "large_file.py"


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(stored, "MAX_LOADED", 0)


@pytest.fixture
def mapped(tmp_path):
    """Return an array as a memory map, with another dtype than the network."""

    def write(array, dtype="f8"):
        np.save(tmp_path / "array.npy", array.astype(dtype))
        return np.load(tmp_path / "array.npy", mmap_mode="r")

    return write


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures_are_those_of_an_array(structure, mapped):
    options = {"subset_of_weights": "all", "prior_precision": 1.0}
    model = LaplaceClassifier(NET, **SMALL, **options, hessian_structure=structure)
    expected = model.fit(X, Y).predict_proba(X)
    found = model.fit(mapped(X), Y).predict_proba(mapped(X))
    np.testing.assert_array_equal(found, expected)


def test_further_and_held_out_samples(mapped):
    model = LaplaceClassifier(NET, **SMALL)
    held_out = {"X_val": X[90:], "y_val": Y[90:]}
    expected = model.fit(X[:60], Y[:60], **held_out).partial_fit(X[60:90], Y[60:90])
    dense = expected.posterior_.structure.dense()
    held_out["X_val"] = mapped(X)[90:]
    found = model.fit(mapped(X)[:60], Y[:60], **held_out)
    found.partial_fit(mapped(X)[60:90], Y[60:90])
    np.testing.assert_array_equal(found.posterior_.structure.dense(), dense)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda X: np.where(X[100] == X, np.nan, X), ["X contains NaN"]),
        (lambda X: X[:, 0], ["shape (120,)"]),
        (lambda X: X[:0], ["0 sample"]),
        (lambda X: X * 1e300, ["too large for float32"]),
    ],
    ids=["NaN", "one axis", "no rows", "too large"],
)
def test_what_is_no_input_is_refused_before_training(change, words, mapped):
    model = LaplaceClassifier(NEW, **SMALL)
    values = change(X.astype("f8"))
    refused_fit(model, *words, data=(mapped(values), Y[: len(values)]))


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


def test_fits_are_taken_from_memory(mapped, tmp_path):
    model = LaplaceClassifier(NEW, **SMALL, memory=str(tmp_path / "memory"))
    expected = model.fit(mapped(X), Y).predict_proba(X)
    with mock.patch(
        "sklaplace.estimators.training.trainer.training_run", side_effect=AssertionError
    ):
        found = model.fit(mapped(X), Y).predict_proba(X)
        with pytest.raises(AssertionError):
            model.fit(mapped(X + 1), Y)
    np.testing.assert_array_equal(found, expected)
