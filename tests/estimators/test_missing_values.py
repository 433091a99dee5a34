"""Missing values, dates and labels of several types: refused in fit and prediction."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
from nets import RecordTraining, blobs, classifier, regressor, seeded, waves
from refusals import CLASSIFIERS, REGRESSORS, refused, refused_fit
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator

from sklaplace import (
    LaplaceClassifier,
    LaplaceRegressor,
)

X, Y = blobs()
X_REG, Y_REG = waves()
WORDS = np.array(["a", "b", "c"])[Y]
of_classes = partial(classifier, callbacks=[RecordTraining()])
of_numbers = partial(regressor, callbacks=[RecordTraining()])


@pytest.fixture(scope="module")
def fitted():
    net = FrozenEstimator(seeded(classifier(), X, Y))
    return LaplaceClassifier(net, prior_precision=1.0).fit(X, WORDS)


@pytest.fixture(scope="module")
def numbers():
    net = FrozenEstimator(seeded(regressor(), X_REG, Y_REG[:, None]))
    model = LaplaceRegressor(net, prior_precision=1.0, sigma_noise=0.2)
    return model.fit(X_REG, Y_REG)


def replaced(values, value):
    """Values as objects, with another one in the place of the seventh."""
    values = np.asarray(values).astype(object)
    values.flat[7] = value
    return values


FRAME = pd.DataFrame(X, columns=["a", "b"])
BAD_INPUTS = {
    "None": (replaced(X, None), ValueError, "X contains NaN"),
    "None-in-lists": (replaced(X, None).tolist(), ValueError, "X contains NaN"),
    "nan-as-text": (replaced(X, "nan"), ValueError, "X contains NaN"),
    "inf-as-text": (replaced(X, "inf"), ValueError, "X contains infinity"),
    "NA": (replaced(X, pd.NA), ValueError, "X contains NaN"),
    "nullable": (
        FRAME.assign(b=pd.array([1, None] * 30, "Int64")),
        ValueError,
        "X contains NaN",
    ),
    "NaT": (replaced(X, np.datetime64("NaT")), TypeError, "X has dates"),
    "dates": (np.full(X.shape, "2020-01-01", "M8[D]"), TypeError, "X has dates"),
    "durations": (np.full(X.shape, 5, "m8[D]"), TypeError, "X has dates"),
    "column-of-dates": (
        FRAME.assign(b=pd.date_range("2020", periods=60)),
        TypeError,
        "column 'b'",
    ),
    "words": (replaced(X, "red"), ValueError, "X is not an array of numbers"),
}
BAD_LABELS = {
    "None": (replaced(WORDS, None), "y contains NaN"),
    "nan": (replaced(WORDS, np.nan), "y contains NaN"),
    "NaT": (replaced(WORDS, np.datetime64("NaT")), "y contains NaN"),
    "NA": (pd.Series(replaced(WORDS, pd.NA), dtype="string"), "y contains NaN"),
    "nullable": (pd.Series(replaced(Y, pd.NA), dtype="Int64"), "y contains NaN"),
    "None-in-numbers": (replaced(Y, None), "y contains NaN"),
    "float-nan": (np.where(np.arange(60) == 7, np.nan, Y), "y contains NaN"),
    "number-in-words": (replaced(WORDS, 1), "y has labels of several types"),
}
BAD_NUMBERS = {
    "None": (replaced(Y_REG, None), ValueError, "y contains NaN"),
    "nan-as-text": (replaced(Y_REG, "nan"), ValueError, "y contains NaN"),
    "NA": (replaced(Y_REG, pd.NA), ValueError, "y contains NaN"),
    "NaT": (replaced(Y_REG, np.datetime64("NaT")), TypeError, "y has dates"),
    "dates": (np.full(60, "2020-01-01", "M8[D]"), TypeError, "y has dates"),
    "words": (replaced(Y_REG, "red"), ValueError, "For labels use"),
}


def cases(table):
    return [pytest.param(*values, id=name) for name, values in table.items()]


class TestMissingValues:
    """None, NaN and dates are refused in fit and in every prediction."""

    @pytest.mark.parametrize(("rows", "error", "word"), cases(BAD_INPUTS))
    @pytest.mark.parametrize(
        "model",
        [LaplaceClassifier(of_classes()), LaplaceRegressor(of_numbers())],
        ids=["classifier", "regressor"],
    )
    def test_in_inputs(self, model, rows, error, word):
        refused_fit(model, word, error=error, data=(rows, Y))

    @pytest.mark.filterwarnings("ignore:X has feature names")
    @pytest.mark.parametrize(("rows", "error", "word"), cases(BAD_INPUTS))
    def test_in_rows_to_predict(self, rows, error, word, fitted, numbers):
        for call in (fitted.predict_proba, fitted.predict_dirichlet):
            refused(error, [word], lambda call=call: call(rows), fitted)
        for name in ("predict", "predict_interval", "sample_y"):
            refused(error, [word], lambda n=name: getattr(numbers, n)(rows), numbers)

    @pytest.mark.parametrize("kind", CLASSIFIERS)
    @pytest.mark.parametrize(("labels", "word"), cases(BAD_LABELS))
    def test_in_labels(self, labels, word, kind):
        refused_fit(kind(of_classes()), word, data=(X, labels))

    @pytest.mark.parametrize("kind", REGRESSORS)
    @pytest.mark.parametrize(("targets", "error", "word"), cases(BAD_NUMBERS))
    def test_in_targets(self, targets, error, word, kind):
        refused_fit(kind(of_numbers()), word, error=error, data=(X_REG, targets))

    @pytest.mark.parametrize(("targets", "error", "word"), cases(BAD_NUMBERS))
    def test_in_targets_after_fit(self, targets, error, word, numbers):
        for call in (numbers.score, numbers.partial_fit, numbers.recalibrate):
            refused(error, [word], lambda call=call: call(X_REG, targets), numbers)

    def test_numbers_in_objects_are_taken(self):
        net = FrozenEstimator(seeded(classifier(), X, Y))
        model = LaplaceClassifier(net, prior_precision=1.0, random_state=0)
        expected = clone(model).fit(X, Y)
        found = model.fit(X.astype(object), Y.astype(object))
        assert found.classes_.dtype == expected.classes_.dtype
        np.testing.assert_array_equal(
            found.predict_proba(X.tolist()), expected.predict_proba(X)
        )
