import numpy as np
import pytest
from scipy.stats import dirichlet
from sklearn.datasets import load_iris

from sklaplace import LaplaceClassifier
from sklaplace.plotting import DirichletDisplay

CORNERS = np.array([[0, 0], [1, 0], [0.5, np.sqrt(3) / 2]])
draw = DirichletDisplay.from_predictions


@pytest.fixture(scope="module")
def model():
    X, y = load_iris(return_X_y=True)
    model = LaplaceClassifier(prior_precision=1.0, random_state=0)
    return model.fit(X, np.array(["a", "b", "c"])[y])


@pytest.mark.parametrize("alpha", [[2.0, 3.0, 4.0], [0.5, 0.5, 2.0], [1.0, 1.0, 1.0]])
def test_the_density_is_that_of_scipy(alpha):
    display = draw(alpha, grid_resolution=60)
    assert len(display.proba) == 60 * 61 / 2
    np.testing.assert_allclose(display.proba.sum(axis=1), 1)
    assert (display.proba > 0).all()
    density = np.exp(display.log_density)
    np.testing.assert_allclose(density, dirichlet(alpha).pdf(display.proba.T))
    np.testing.assert_allclose(display.mean, np.divide(alpha, np.sum(alpha)))
    # relative to the largest value on the grid
    assert display.surface_.zmax == 1
    assert display.surface_.zmin == pytest.approx(density.min() / density.max())


def test_points_and_corners_are_where_their_probabilities_are():
    display = draw([8.0, 1.0, 1.0], class_names=["x", "y", "z"])
    (point,) = display.mean_.get_xydata()
    np.testing.assert_allclose(point, np.array([0.8, 0.1, 0.1]) @ CORNERS)
    np.testing.assert_allclose(display.edges_.get_xydata(), CORNERS[[0, 1, 2, 0]])
    for text, corner, name in zip(display.texts_, CORNERS, "xyz", strict=True):
        assert text.get_text() == name
        np.testing.assert_allclose(text.get_position(), corner, atol=0.05)


def test_the_prediction_of_one_sample_is_plotted(model):
    X = load_iris().data[100:101]
    display = DirichletDisplay.from_estimator(model, X, method="bridge")
    alpha = model.predict_dirichlet(X, method="bridge")[0]
    expected = dirichlet(alpha).logpdf(display.proba.T)
    np.testing.assert_allclose(display.log_density, expected)
    assert [text.get_text() for text in display.texts_] == ["a", "b", "c"]


def test_a_narrow_distribution_is_drawn_where_it_is():
    display = draw([1e6, 2e6, 1e6])  # its density underflows on most of the grid
    near = display.proba[display.log_density.argmax()]
    np.testing.assert_allclose(near, [0.25, 0.5, 0.25], atol=0.01)
    assert display.surface_.zmax == 1
