"""Unreadable samples: an error, and nothing is lost."""

import os

import numpy as np
import pytest
from nets import blobs, classifier
from sklearn.base import clone

from sklaplace import LaplaceClassifier
from sklaplace.networks import stored

X, Y = blobs(90)


def model(net=None, **params):
    settings = {"batch_size": 8, "n_shards": 6, "random_state": 0, **params}
    return LaplaceClassifier(net or classifier(max_epochs=2), **settings)


# -------------------------------------------------------------------- unreadable data
@pytest.fixture(params=["read in parts", "read at once"])
def truncated(request, tmp_path, monkeypatch):
    """A function that maps an array in a file, and one that makes the file shorter."""
    if request.param == "read in parts":
        monkeypatch.setattr(stored, "MAX_LOADED", 0)
    wide = np.concatenate([X, np.zeros((90, 2000), "f4")], 1)
    np.save(tmp_path / "X.npy", wide)
    size = (tmp_path / "X.npy").stat().st_size

    def cut(n_bytes=size // 2):
        os.truncate(tmp_path / "X.npy", n_bytes)

    def mapped():
        np.save(tmp_path / "X.npy", wide)
        return np.load(tmp_path / "X.npy", mmap_mode="r")

    return mapped, cut


def test_a_file_that_became_shorter(truncated):
    """To read past its end would kill the process."""
    mapped, cut = truncated
    found = model(classifier(module__n_in=2002, max_epochs=1)).fit(mapped(), Y)
    source, before = mapped(), dict(vars(found))
    for data in (source, source[10:], np.asarray(source)):
        cut()
        with pytest.raises(OSError, match=r"^X .* became shorter .* bytes"):
            found.fit(data, Y[-len(data) :])
        with pytest.raises(OSError, match=r"^X .* became shorter .* bytes"):
            found.predict(data)
        assert vars(found) == before
    assert_equal_on(found, mapped(), clone(found).fit(mapped(), Y))


def assert_equal_on(found, data, expected):
    ours, theirs = (some.predict_proba(data) for some in (found, expected))
    np.testing.assert_array_equal(ours, theirs)
