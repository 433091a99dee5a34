import numpy as np
from displays import laplace_regressor
from scipy.stats import norm
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklaplace.plotting import PredictiveBandDisplay

draw_bands = PredictiveBandDisplay.from_estimator


def edges(band):
    """Return the lower and upper edge of a band at its x values."""
    x, y = band.get_paths()[0].vertices.T
    values = np.unique(x)
    return (
        np.array([y[x == value].min() for value in values]),
        np.array([y[x == value].max() for value in values]),
    )


def test_bands_hold_what_the_regressor_predicts(ridge, line):
    display = draw_bands(
        ridge, line[0], coverage=(0.5, 0.9), grid_resolution=30, eps=0.5
    )
    x, drawn = display.line_.get_data()
    low, high = line[0].min() - 0.5, line[0].max() + 0.5
    np.testing.assert_allclose(x, np.linspace(low, high, 30))
    mean, std = ridge.predict(x[:, None], return_std=True)
    np.testing.assert_allclose(drawn, mean)
    # the widest comes first, so that the narrower ones are seen on top of it
    for band, level in zip(display.bands_, [0.9, 0.5], strict=True):
        half = norm.ppf((1 + level) / 2) * std
        lower, upper = edges(band)
        np.testing.assert_allclose(lower, mean - half)
        np.testing.assert_allclose(upper, mean + half)
        assert band.get_label() == f"{level:.0%} interval"
    assert display.points_ is None
    assert display.figure_ is display.ax_.figure


def test_bands_of_laplace_in_a_pipeline(line):
    model = make_pipeline(StandardScaler(), clone(laplace_regressor())).fit(*line)
    display = draw_bands(model, *line, coverage=0.8, eps=1.0)
    assert display.coverage == 0.8
    grid = model[:-1].transform(display.x[:, None])
    interval = model[-1].predict_interval(grid, coverage=0.8)
    (band,) = display.bands_
    np.testing.assert_allclose(np.stack(edges(band), axis=1), interval)
    np.testing.assert_allclose(display.points_.get_offsets(), np.c_[line[0], line[1]])


def test_bands_keep_the_dtype(line):
    class Model:
        def predict(self, X, return_std):
            self.dtype = X.dtype
            return X[:, 0], np.ones(len(X))

    model = Model()
    draw_bands(model, line[0].astype(np.float32))
    assert model.dtype == np.float32
    draw_bands(model, np.arange(5)[:, None])
    assert model.dtype == np.float64
