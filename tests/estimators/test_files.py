"""Files: size, version, and files of earlier versions."""

import io
import pickle
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from files.write import FILES, FORMATS, check
from nets import MLP, classifier, seeded
from sklearn.frozen import FrozenEstimator

from sklaplace import LaplaceClassifier
from sklaplace.estimators.fitting import members

STORED = [path for folder in FORMATS for path in sorted(folder.glob("*.joblib"))]
rng = np.random.default_rng(0)
X = rng.standard_normal((60, 2)).astype("f4")
LABELS = (X[:, 0] > 0).astype(int)


class Scaled(MLP):
    """A module with attributes that no state dict holds."""

    def __init__(self):
        super().__init__(n_out=2)
        self._factor, self.scales = 1.0, np.ones(5000)
        self.tail = torch.nn.Sequential()
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, X):
        factor = self._factor * float(self.scales[2500])
        return self.tail(super().forward(X)) * factor * self.scale


CHANGES = [
    lambda module: setattr(module, "_factor", 3.0),
    lambda module: module.scale.fill_(3.0),
    lambda module: module.tail.append(torch.nn.Tanh()),
    lambda module: module.scales.__setitem__(2500, 4.0),
    lambda module: module.head.bias.data.fill_(3.0),
]


def n_bytes(value):
    file = io.BytesIO()
    joblib.dump(value, file)
    return file.getbuffer().nbytes


def frozen(width=300):
    return FrozenEstimator(seeded(classifier(MLP(n_out=2, width=width)), X, LABELS))


def fitted(net):
    return LaplaceClassifier(net, prior_precision=1.0, random_state=0).fit(X, LABELS)


# scikit-learn warns of its own FrozenEstimator in another version
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.InconsistentVersionWarning")
@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_files_of_earlier_versions_are_loaded(path):
    model = joblib.load(path)
    check(model, path)
    assert not hasattr(model, "distributed")  # a parameter that was removed


def test_files_of_all_formats_are_there_and_small():
    assert {path.name for path in FORMATS} == {
        f"format_{n}" for n in range(1, members.FORMAT + 1)
    }
    sizes = [path.stat().st_size for path in Path(FILES).rglob("*") if path.is_file()]
    assert sum(sizes) < 2 * 2**20


def test_a_newer_file_says_so(monkeypatch):
    model = fitted(classifier(MLP(n_out=2)))
    monkeypatch.setattr(members, "FORMAT", 99)
    # a class that has moved is only looked for later
    newer = pickle.dumps(model).replace(b"posterior.gaussian", b"posterior.gaussiam")
    state = model.__getstate__()
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"format 99, from a newer.*Update sklaplace"):
        pickle.loads(newer)
    with pytest.raises(ValueError, match=r"format 99, from a newer.*Update sklaplace"):
        LaplaceClassifier().__setstate__(state)


class TestFrozenNetworks:
    def test_are_stored_once(self):
        model = fitted(frozen())
        weights = n_bytes(model.estimator.estimator)
        parts = n_bytes(model.posterior_), n_bytes(model._novelty)
        assert n_bytes(model) < 1.2 * (weights + sum(parts))

    def test_stay_apart_from_the_original(self):
        model = fitted(frozen())
        expected = model.predict_proba(X)
        loaded = pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            loaded.estimator.estimator.module_.head.weight.zero_()
        np.testing.assert_array_equal(loaded.predict_proba(X), expected)
        again = pickle.loads(pickle.dumps(loaded))
        np.testing.assert_array_equal(again.predict_proba(X), expected)
        assert not again.estimator.estimator.module_.head.weight.any()

    @pytest.mark.parametrize("change", CHANGES)
    def test_a_changed_original_is_no_copy(self, change):
        model = fitted(FrozenEstimator(seeded(classifier(Scaled()), X, LABELS)))
        expected = model.predict_proba(X)
        change(model.estimator.estimator.module_)
        loaded = pickle.loads(pickle.dumps(model))
        np.testing.assert_array_equal(loaded.predict_proba(X), expected)

    def test_an_unfitted_original_is_no_copy(self):
        model = fitted(frozen())
        expected = model.predict_proba(X)
        model.set_params(estimator=FrozenEstimator(classifier()))
        loaded = pickle.loads(pickle.dumps(model))
        np.testing.assert_array_equal(loaded.predict_proba(X), expected)
