"""Checks that calls fail with helpful errors and change nothing."""

import pytest
from conftest import global_rng_states
from nets import RecordTraining, blobs, waves

from sklaplace import (
    DeepEnsembleClassifier,
    DeepEnsembleRegressor,
    LaplaceClassifier,
    LaplaceClassifierCV,
    LaplaceRegressor,
    LaplaceRegressorCV,
    MCDropoutClassifier,
    MCDropoutRegressor,
    SWAGClassifier,
    SWAGRegressor,
    VariationalClassifier,
    VariationalRegressor,
)

CLASSES, NUMBERS = blobs(), waves()
# every kind of estimator but the ranker
CLASSIFIERS = [
    LaplaceClassifier,
    LaplaceClassifierCV,
    DeepEnsembleClassifier,
    MCDropoutClassifier,
    VariationalClassifier,
    SWAGClassifier,
]
REGRESSORS = [
    LaplaceRegressor,
    LaplaceRegressorCV,
    DeepEnsembleRegressor,
    MCDropoutRegressor,
    VariationalRegressor,
    SWAGRegressor,
]
# one of each kind in every run
FIRST_QUICK = [
    kind if kind is kinds[0] else pytest.param(kind, marks=pytest.mark.slow)
    for kinds in (CLASSIFIERS, REGRESSORS)
    for kind in kinds
]


def refused(error, words, call, *models):
    """Return the error message, after checks that nothing was trained or changed."""
    RecordTraining.steps.clear()
    before = global_rng_states()
    attributes = [dict(vars(model)) for model in models]
    with pytest.raises(error, match=r"\w") as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert str(word) in message, message
    assert RecordTraining.steps == [], "training had begun"
    assert global_rng_states() == before
    for model, there in zip(models, attributes, strict=True):
        assert vars(model).keys() == there.keys()
        assert all(value is there[name] for name, value in vars(model).items())
    return message


def refused_fit(model, *words, error=ValueError, data=None, **fit):
    """Return the error message of a fit of the given model."""
    if data is None:
        is_classifier = isinstance(model, LaplaceClassifier)
        data = CLASSES if is_classifier else NUMBERS
    return refused(error, words, lambda: model.fit(*data, **fit), model)
