import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import make_multilabel_classification

from sklaplace import LaplaceClassifier
from sklaplace.plotting import UncertaintyDisplay

draw = UncertaintyDisplay.from_estimator


@pytest.fixture(scope="module")
def laplace(moons):
    return LaplaceClassifier(random_state=0).fit(*moons)


def test_the_maps_are_what_the_classifier_predicts(laplace, moons):
    display = draw(laplace, moons[0], grid_resolution=12, eps=2.0, method="mc")
    grid = np.c_[display.xx0.ravel(), display.xx1.ravel()]
    np.testing.assert_allclose(grid.min(axis=0), moons[0].min(axis=0) - 2)
    expected = laplace.predict_uncertainty(grid, method="mc").reshape(12, 12, 3)
    np.testing.assert_array_equal(display.uncertainty, expected)
    for k, (axes, surface) in enumerate(
        zip(display.axes_, display.surfaces_, strict=True)
    ):
        assert axes.get_title() == ("total", "aleatoric", "epistemic")[k]
        assert surface.zmax == pytest.approx(expected[..., k].max())
        # one scale for all, from zero to the largest total
        np.testing.assert_allclose(surface.levels[[0, -1]], [0, expected.max()])
    assert display.colorbar_.mappable is display.surfaces_[0]


def test_frames_scales_and_styles(laplace, moons):
    X = pd.DataFrame(moons[0], columns=["width", "height"])
    model = LaplaceClassifier(random_state=0).fit(X, moons[1])
    options = {"grid_resolution": 5, "surface_kw": {"cmap": "magma"}}
    display = draw(model, X, colorbar=False, **options)
    assert display.colorbar_ is None
    assert [axes.get_xlabel() for axes in display.axes_] == ["width"] * 3
    assert [axes.get_ylabel() for axes in display.axes_] == ["height", "", ""]
    assert display.surfaces_[2].get_cmap().name == "magma"


def test_no_uncertainty_at_all_is_drawn():
    grid = np.meshgrid([0.0, 1.0], [0.0, 1.0])
    zeros = np.zeros((2, 2, 3))
    display = UncertaintyDisplay(xx0=grid[0], xx1=grid[1], uncertainty=zeros).plot()
    assert len(display.surfaces_) == 3


def test_several_labels_and_features_are_refused(laplace):
    X, y = make_multilabel_classification(
        60, n_features=2, n_classes=2, n_labels=1, random_state=0
    )
    model = LaplaceClassifier(random_state=0).fit(X, y)
    with pytest.raises(ValueError, match=r"shape \(2, 3\), but that of one label"):
        draw(model, X, grid_resolution=4)
    with pytest.raises(ValueError, match="X has 3 features, but this display needs 2"):
        draw(laplace, np.zeros((5, 3)))
    with pytest.raises(ValueError, match="method='bayes' is not known"):
        draw(laplace, X, method="bayes", grid_resolution=4)
