import numpy as np
import pytest
from displays import laplace

from sklaplace.plotting import UncertaintyDisplay

draw = UncertaintyDisplay.from_estimator


def test_the_maps_are_what_the_classifier_predicts(moons):
    model = laplace("moons")
    display = draw(model, moons[0], grid_resolution=12, eps=2.0, method="mc")
    grid = np.c_[display.xx0.ravel(), display.xx1.ravel()]
    np.testing.assert_allclose(grid.min(axis=0), moons[0].min(axis=0) - 2)
    expected = model.predict_uncertainty(grid, method="mc").reshape(12, 12, 3)
    np.testing.assert_array_equal(display.uncertainty, expected)
    for k, (axes, surface) in enumerate(
        zip(display.axes_, display.surfaces_, strict=True)
    ):
        assert axes.get_title() == ("total", "aleatoric", "epistemic")[k]
        assert surface.zmax == pytest.approx(expected[..., k].max())
        # one scale for all, from zero to the largest total
        np.testing.assert_allclose(surface.levels[[0, -1]], [0, expected.max()])
    assert display.colorbar_.mappable is display.surfaces_[0]


def test_no_uncertainty_at_all_is_drawn():
    grid = np.meshgrid([0.0, 1.0], [0.0, 1.0])
    zeros = np.zeros((2, 2, 3))
    display = UncertaintyDisplay(xx0=grid[0], xx1=grid[1], uncertainty=zeros)
    assert len(display.plot(colorbar=False).surfaces_) == 3
    assert display.colorbar_ is None
