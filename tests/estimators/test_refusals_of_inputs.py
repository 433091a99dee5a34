"""Inputs and settings that once raised raw errors: refused in words, or taken."""

import copy

import numpy as np
import pytest
from nets import RecordTraining, blobs, classifier, regressor, waves
from refusals import CLASSIFIERS, REGRESSORS, refused
from sklearn.base import clone

from sklaplace import LaplaceRegressor, MCDropoutClassifier, MCDropoutRegressor

X, Y = blobs()
X_REG, Y_REG = waves()


# ------------------------------------------------------- parameters set after fit
def rows_of(kind):
    return (X, Y) if kind in CLASSIFIERS else (X_REG, Y_REG)


@pytest.fixture(
    scope="module", params=CLASSIFIERS + REGRESSORS, ids=lambda kind: kind.__name__
)
def fitted(request):
    kind = request.param
    of_kind = classifier if kind in CLASSIFIERS else regressor
    has_dropout = kind in (MCDropoutClassifier, MCDropoutRegressor)
    net = None if has_dropout else of_kind(max_epochs=2)
    return kind(net, random_state=0).fit(*rows_of(kind))


WRONG = [("batch_size", value) for value in (-1, 0, 2.5, "a")]
WRONG += [("n_samples", value) for value in (-1, 2.5, "a", None)]
WRONG += [("n_jobs", "a")]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_predictions_refuse_what_fit_refuses(fitted, name, value):
    if name not in fitted.get_params():
        return
    model = copy.copy(fitted).set_params(**{name: value})
    data = rows_of(type(fitted))
    words = f"{name}={value!r}", "Choose"
    expected = refused(ValueError, words, lambda: clone(model).fit(*data))
    methods = ["predict", "latent_mean_and_variance"]
    methods += ["predict_proba"] if hasattr(model, "predict_proba") else []
    for method in methods:
        predict = getattr(model, method)
        assert refused(ValueError, words, lambda f=predict: f(data[0])) == expected


# ----------------------------------------------------------------- masked arrays
@pytest.fixture(scope="module")
def linear():
    return LaplaceRegressor(regressor(max_epochs=1), random_state=0).fit(X_REG, Y_REG)


def masked(values):
    """The values with the first entry masked."""
    hidden = np.zeros(values.shape, dtype=bool)
    hidden.flat[0] = True
    return np.ma.MaskedArray(values, hidden)


@pytest.mark.parametrize("name", ["X", "y", "sample_weight", "X_val", "y_val"])
def test_fit_refuses_masked_entries(name):
    data = {"X": X_REG, "y": Y_REG, "sample_weight": np.ones(len(Y_REG))}
    data |= {"X_val": X_REG, "y_val": Y_REG}
    data[name] = masked(data[name])
    model = LaplaceRegressor(regressor(callbacks=[RecordTraining()]))
    words = f"{name} has masked entries", f"{name}.filled(value)"
    refused(ValueError, words, lambda: model.fit(**data), model)


@pytest.mark.parametrize("of_rows", [lambda Z: Z, list, lambda Z: {"X": Z}])
def test_predictions_refuse_masked_entries(linear, of_rows):
    words = "X has masked entries", "X.filled(value)"
    given = of_rows(masked(X_REG))
    refused(ValueError, words, lambda: linear.predict(given), linear)


def test_scores_refuse_masked_entries(linear):
    words = "y has masked entries", "y.filled(value)"
    refused(ValueError, words, lambda: linear.score(X_REG, masked(Y_REG)), linear)


def test_masked_arrays_without_masked_entries_are_arrays(linear):
    found = linear.predict(np.ma.MaskedArray(X_REG))
    np.testing.assert_array_equal(found, linear.predict(X_REG))
