"""crepes: conformal classifiers, and regressors scaled by predicted deviations."""

import numpy as np
import pytest

crepes = pytest.importorskip("crepes")

TOLERANCE = 3 * np.sqrt(0.9 * 0.1 * (1 / 450 + 1 / 600))


def test_intervals_scaled_by_our_deviations(numbers, figure):
    def moments(X):
        return numbers.model.predict(X, return_std=True)

    mean, std = moments(numbers.cal[0])
    conformal = crepes.ConformalRegressor().fit(numbers.cal[1] - mean, sigmas=std)
    X, y = numbers.test
    mean, std = moments(X)
    bounds = conformal.predict_int(mean, sigmas=std, confidence=0.9)
    inside = (bounds[:, 0] <= y) & (y <= bounds[:, 1])
    noisy = inside[np.abs(X[:, 0]) > 2].mean()
    assert inside.mean() == pytest.approx(0.9, abs=TOLERANCE)
    assert noisy == pytest.approx(0.9, abs=0.06)
    figure(coverage=inside.mean(), where_noisy=noisy)


def test_wrapped_classifier(classes, figure):
    wrapped = crepes.WrapClassifier(classes.model)
    wrapped.calibrate(*classes.cal, seed=0)
    X, y = classes.test
    sets = wrapped.predict_set(X, confidence=0.9, seed=0)
    found = np.mean([label in members for label, members in zip(y, sets, strict=True)])
    assert found == pytest.approx(0.9, abs=TOLERANCE)
    figure(coverage=found, size=np.mean([len(members) for members in sets]))
