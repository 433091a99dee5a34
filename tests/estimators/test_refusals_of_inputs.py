"""Inputs and settings that once raised raw errors: refused in words, or taken."""

import copy

import pytest
from nets import blobs, classifier, regressor, waves
from refusals import CLASSIFIERS, REGRESSORS, refused
from sklearn.base import clone

from sklaplace import MCDropoutClassifier, MCDropoutRegressor

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
