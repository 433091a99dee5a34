import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import polars as pl
import pytest
from matplotlib.colors import to_rgba
from scipy.stats import norm
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.linear_model import BayesianRidge, LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklaplace import LaplaceRegressor
from sklaplace.plotting import PredictiveBandDisplay

draw_bands = PredictiveBandDisplay.from_estimator


def edges(band):
    """Lower and upper edge of a band at its x values."""
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
    model = make_pipeline(StandardScaler(), LaplaceRegressor(random_state=0))
    model.fit(*line)
    display = draw_bands(model, *line, coverage=0.8, eps=1.0)
    assert display.coverage == (0.8,)
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


def test_bands_take_axes_and_styles(ridge, line):
    figure, ax = plt.subplots()
    display = draw_bands(
        ridge,
        *line,
        ax=ax,
        line_kw={"color": "red"},
        band_kw={"color": "green", "alpha": 1.0},
        points_kw={"color": "blue"},
    )
    assert (display.ax_, display.figure_) == (ax, figure)
    assert display.line_.get_color() == "red"
    assert tuple(display.bands_[0].get_facecolor()[0]) == to_rgba("green")
    assert tuple(display.points_.get_facecolor()[0]) == to_rgba("blue")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coverage": 1.0}, r"coverage=1.0 is not between 0 and 1"),
        ({"coverage": (0.5, -0.1)}, r"coverage=-0.1 is not between"),
        ({"coverage": ()}, "coverage is empty"),
        ({"grid_resolution": 1}, "grid_resolution=1 is not an integer of at least 2"),
        ({"grid_resolution": 2.5}, "resolution=2.5 is not an integer of at least 2"),
        ({"eps": -1.0}, "eps=-1.0 is not valid"),
        ({"eps": np.nan}, "eps=nan is not valid"),
        ({"eps": "wide"}, "eps='wide' is not valid"),
        ({"y": [1.0, 2.0]}, "y has 2 entries, but X has 60 rows"),
    ],
)
def test_bands_refuse_options(ridge, line, options, message):
    with pytest.raises(ValueError, match=message):
        draw_bands(ridge, line[0], **options)


def test_bands_refuse_more_targets(line):
    model = GaussianProcessRegressor(alpha=0.1).fit(line[0], np.c_[line[1], line[1]])
    with pytest.raises(ValueError, match="predicts 2 targets, but one can be plotted"):
        draw_bands(model, line[0])


@pytest.mark.parametrize("kind", [LinearRegression, object])
def test_bands_refuse_regressors_without_std(line, kind):
    model = kind()
    if hasattr(model, "fit"):
        model.fit(*line)
    with pytest.raises(TypeError, match=r"does not predict standard deviations\. Pass"):
        draw_bands(model, line[0])


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_the_feature_name_is_kept(line, frame):
    X = frame({"speed": line[0][:, 0]})
    model = LaplaceRegressor(random_state=0).fit(X, line[1])
    assert draw_bands(model, X).ax_.get_xlabel() == "speed"


def test_several_features_are_refused(line):
    X = np.c_[line[0], line[0] ** 2]
    model = BayesianRidge().fit(X, line[1])
    with pytest.raises(ValueError, match="X has 2 features, but this display needs 1"):
        draw_bands(model, X)


def test_bands_of_lists():
    display = PredictiveBandDisplay(x=[0, 1], mean=[1, 2], std=[0.5, 1]).plot()
    assert len(display.bands_) == len(display.coverage)
    assert display.line_.get_ydata().tolist() == [1, 2]
