"""crepes: conformal classifiers, and regressors scaled by predicted deviations."""

import numpy as np
import pytest

from sklaplace import LaplaceRegressor

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


def test_intervals_of_categories_are_those_of_crepes(numbers):
    """The noise is constant here, so that scores are deviations from the mean."""
    X, y = numbers.cal
    model = LaplaceRegressor(sigma_noise="homoscedastic", random_state=0)
    model.fit(*numbers.train)
    categories = np.where(X[:, 0] > 0, "right", "left")
    model.conformalize(X, y, categories=categories)
    mean, std = model.predict(X, return_std=True)
    crepes_model = crepes.ConformalRegressor()
    crepes_model.fit(y - mean, sigmas=std, bins=categories)
    X, _ = numbers.test
    new = np.where(X[:, 0] > 0, "right", "left")
    mean, std = model.predict(X, return_std=True)
    expected = crepes_model.predict_int(mean, sigmas=std, bins=new, confidence=0.9)
    found = model.predict_interval(X, 0.9, method="conformal", categories=new)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_wrapped_classifier(classes, figure):
    wrapped = crepes.WrapClassifier(classes.model)
    wrapped.calibrate(*classes.cal, seed=0)
    X, y = classes.test
    sets = wrapped.predict_set(X, confidence=0.9, seed=0)
    found = np.mean([label in members for label, members in zip(y, sets, strict=True)])
    assert found == pytest.approx(0.9, abs=TOLERANCE)
    figure(coverage=found, size=np.mean([len(members) for members in sets]))
