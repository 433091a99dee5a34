"""A file of samples that becomes shorter: an error, and nothing is lost."""

import os

import numpy as np
import pytest
from nets import blobs, classifier

from sklaplace import LaplaceClassifier
from sklaplace.networks import stored

X, Y = blobs(90)


@pytest.mark.parametrize("max_loaded", [0, stored.MAX_LOADED])
def test_a_file_that_became_shorter(max_loaded, tmp_path, monkeypatch):
    """To read past its end would kill the process."""
    monkeypatch.setattr(stored, "MAX_LOADED", max_loaded)
    wide, path = np.concatenate([X, np.zeros((90, 2000), "f4")], 1), tmp_path / "X.npy"
    net = classifier(module__n_in=2002, max_epochs=1)
    model = LaplaceClassifier(net, batch_size=8, random_state=0).fit(wide, Y)
    before = dict(vars(model))
    np.save(path, wide)
    source = np.load(path, mmap_mode="r")
    os.truncate(path, path.stat().st_size // 2)
    for data in (source, source[10:], np.asarray(source)):
        for call in (lambda X: model.fit(X, Y[-len(X) :]), model.predict):
            with pytest.raises(OSError, match=r"^X .* became shorter .* bytes"):
                call(data)
    assert vars(model) == before
