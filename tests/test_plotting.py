"""Displays draw what the estimator predicts, and refuse what they cannot draw."""

import sys

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import polars as pl
import pytest
from matplotlib.colors import to_rgba
from scipy.stats import norm
from sklearn.datasets import make_blobs, make_moons
from sklearn.dummy import DummyClassifier
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.linear_model import BayesianRidge, LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

from sklaplace import LaplaceClassifier, LaplaceRegressor
from sklaplace.plotting import ConfidenceDisplay, PredictiveBandDisplay

draw_bands = PredictiveBandDisplay.from_estimator
draw_confidence = ConfidenceDisplay.from_estimator


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def line():
    generator = np.random.default_rng(0)
    X = generator.uniform(-1, 1, (60, 1))
    return X, np.sin(2 * X[:, 0]) + 0.1 * generator.normal(size=60)


@pytest.fixture(scope="module")
def ridge(line):
    return BayesianRidge().fit(*line)


@pytest.fixture(scope="module")
def moons():
    return make_moons(60, noise=0.2, random_state=0)


@pytest.fixture(scope="module")
def logistic(moons):
    return LogisticRegression().fit(*moons)


def edges(band):
    """Lower and upper edge of a band at its x values."""
    x, y = band.get_paths()[0].vertices.T
    values = np.unique(x)
    return (
        np.array([y[x == value].min() for value in values]),
        np.array([y[x == value].max() for value in values]),
    )


# ------------------------------------------------------------------------ bands
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


def test_other_numbers_of_features_are_refused(line, logistic, moons):
    X = np.c_[line[0], line[0] ** 2]
    model = BayesianRidge().fit(X, line[1])
    with pytest.raises(ValueError, match="X has 2 features, but this display needs 1"):
        draw_bands(model, X)
    with pytest.raises(ValueError, match="X has 1 features, but this display needs 2"):
        draw_confidence(logistic, moons[0][:, :1])


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


# ------------------------------------------------------------------- confidence
def boundary(contours):
    """Points of the lines of a contour set."""
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


def test_confidence_of_laplace_and_of_its_network(moons):
    X = moons[0].astype(np.float32)
    laplace = LaplaceClassifier(random_state=0).fit(X, moons[1])
    _, axes = plt.subplots(1, 2)
    options = {"grid_resolution": 10, "eps": 3.0}
    displays = [draw_confidence(laplace, X, ax=ax, **options) for ax in axes]
    assert [display.ax_ for display in displays] == list(axes)
    np.testing.assert_array_equal(*(display.surface_.levels for display in displays))


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_feature_names_are_kept(line, moons, frame):
    X = frame({"speed": line[0][:, 0]})
    model = LaplaceRegressor(random_state=0).fit(X, line[1])
    assert draw_bands(model, X).ax_.get_xlabel() == "speed"
    X = frame({"width": moons[0][:, 0], "height": moons[0][:, 1]})
    model = LogisticRegression().fit(X, moons[1])
    ax = draw_confidence(model, X, grid_resolution=5).ax_
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("width", "height")


def test_confidence_takes_styles(logistic, moons):
    display = draw_confidence(
        logistic,
        moons[0],
        grid_resolution=10,
        surface_kw={"cmap": "magma", "levels": [0.5, 0.75, 1.0]},
        boundary_kw={"colors": "red"},
    )
    assert display.surface_.get_cmap().name == "magma"
    assert len(display.surface_.levels) == 3
    assert tuple(display.boundaries_[0].get_edgecolor()[0]) == to_rgba("red")


def test_displays_are_drawn_again(ridge, line, logistic, moons):
    bands = draw_bands(ridge, *line)
    for display in (bands, draw_confidence(logistic, moons[0], grid_resolution=10)):
        first = display.ax_
        assert display.plot() is display
        assert display.ax_ is not first
    np.testing.assert_allclose(bands.line_.get_ydata(), bands.mean)


def test_confidence_refuses_what_has_no_probabilities(moons):
    with pytest.raises(TypeError, match="LinearSVC has no predict_proba"):
        draw_confidence(LinearSVC().fit(*moons), moons[0])


# ------------------------------------------------------------------- matplotlib
@pytest.mark.parametrize("display", [PredictiveBandDisplay, ConfidenceDisplay])
def test_missing_matplotlib_says_what_to_install(monkeypatch, display):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'pip install "sklaplace\[plot\]"'):
        display.from_estimator(None, None)


def test_bands_of_lists():
    display = PredictiveBandDisplay(x=[0, 1], mean=[1, 2], std=[0.5, 1]).plot()
    assert len(display.bands_) == len(display.coverage)
    assert display.line_.get_ydata().tolist() == [1, 2]
