"""Files: size and content."""

import io
import pickle

import joblib
import numpy as np
import pytest
import torch
from nets import MLP, classifier, seeded
from refusals import CLASSIFIERS, REGRESSORS
from sklearn.frozen import FrozenEstimator

from sklaplace import LaplaceClassifier

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


class Recorder(pickle.Unpickler):
    """An unpickler that records the classes and functions that a pickle names."""

    def __init__(self, content):
        super().__init__(io.BytesIO(content))
        self.named = []

    def find_class(self, module, name):
        value = super().find_class(module, name)
        self.named += [value] if module.startswith("sklaplace") else []
        return value


def frozen(width=300):
    return FrozenEstimator(seeded(classifier(MLP(n_out=2, width=width)), X, LABELS))


def fitted(net):
    return LaplaceClassifier(net, prior_precision=1.0, random_state=0).fit(X, LABELS)


@pytest.mark.parametrize("kind", [*CLASSIFIERS, *REGRESSORS])
def test_a_file_names_only_classes_of_this_package(kind):
    """Check that functions, and private classes, can be renamed later."""
    few = {"cv": 2, "prior_precisions": [1.0], "n_snapshots": 3, "n_estimators": 2}
    few = {name: few[name] for name in few.keys() & {*kind._get_param_names()}}
    model = kind(random_state=0, **few).fit(X, LABELS)
    model.predict(X)
    file = Recorder(pickle.dumps(model))
    file.load()
    assert kind in file.named
    for value in file.named:
        assert isinstance(value, type)
        assert not value.__name__.startswith("_")


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
