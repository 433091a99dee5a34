import numpy as np
import pytest
from sklearn.datasets import make_blobs
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression

from sklaplace.plotting import ConfidenceDisplay

draw_confidence = ConfidenceDisplay.from_estimator


def boundary(contours):
    """Return the points on the lines of a contour set."""
    return np.concatenate([path.vertices for path in contours.get_paths()])


def test_confidence_is_the_largest_probability(logistic, moons):
    display = draw_confidence(logistic, moons[0], grid_resolution=25, eps=2.0)
    assert display.xx0.shape == (25, 25)
    for values, column in zip([display.xx0, display.xx1], moons[0].T, strict=True):
        limits = column.min() - 2.0, column.max() + 2.0
        np.testing.assert_allclose([values.min(), values.max()], limits)
    grid = np.c_[display.xx0.ravel(), display.xx1.ravel()]
    expected = logistic.predict_proba(grid).max(axis=1).reshape(25, 25)
    np.testing.assert_allclose(display.confidence, expected)
    np.testing.assert_allclose(display.surface_.zmax, expected.max())
    np.testing.assert_allclose(display.surface_.levels[[0, -1]], [0.5, 1.0])


def test_confidence_draws_the_level_of_one_half(logistic, moons):
    display = draw_confidence(logistic, moons[0], grid_resolution=200)
    (contours,) = display.boundaries_
    proba = logistic.predict_proba(boundary(contours))
    np.testing.assert_allclose(proba, 0.5, atol=1e-3)


def test_confidence_draws_each_class_of_three():
    X, y = make_blobs(60, centers=3, random_state=0)
    model = LogisticRegression().fit(X, y)
    display = draw_confidence(model, X, grid_resolution=200)
    assert len(display.boundaries_) == 3
    for k, contours in enumerate(display.boundaries_):
        proba = model.predict_proba(boundary(contours))
        others = np.delete(proba, k, axis=1).max(axis=1)
        np.testing.assert_allclose(proba[:, k], others, atol=0.02)
    np.testing.assert_allclose(display.surface_.levels[0], 1 / 3)


@pytest.mark.parametrize(("n_second", "confidence"), [(20, 2 / 3), (0, 1)])
def test_confidence_without_a_boundary_in_sight(moons, n_second, confidence):
    model = DummyClassifier(strategy="prior").fit(moons[0], np.arange(60) < n_second)
    display = draw_confidence(model, moons[0], grid_resolution=5)
    assert display.boundaries_ == []
    np.testing.assert_allclose(display.confidence, confidence)
