"""Properties of every display, tested over one registry of displays."""

import sys
from dataclasses import fields
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import polars as pl
import pytest
from displays import (
    CASES,
    IRIS,
    LABELS,
    LINE,
    MOONS,
    SEVERAL,
    X,
    laplace,
    laplace_regressor,
    logistic,
    ridge,
)
from matplotlib import cbook
from matplotlib.artist import Artist
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.svm import LinearSVC

from sklaplace import plotting

N_AXES = {"NoveltyDisplay": 2, "UncertaintyDisplay": 3}
of_displays = pytest.mark.parametrize("name", plotting.__all__)


def draw(name, *samples, estimator=None, **options):
    """Draw a display from its own or other estimators and samples."""
    case = CASES[name]
    estimator = case.estimator() if estimator is None else estimator
    options = case.options | options
    samples = samples or case.samples
    return getattr(plotting, name).from_estimator(estimator, *samples, **options)


def contents(display):
    """Return everything drawn on the axes of a display, as numbers."""
    found = []
    for axes in display.axes_:
        found += [line.get_xydata() for line in axes.lines]
        for collection in axes.collections:
            found += [path.vertices for path in collection.get_paths()]
            found.append(collection.get_offsets())
    return found


def assert_same(display, other):
    drawn = contents(display)
    assert drawn
    for values, again in zip(drawn, contents(other), strict=True):
        np.testing.assert_array_equal(values, again)
    for axes, others in zip(display.axes_, other.axes_, strict=True):
        assert axes.get_xlabel() == others.get_xlabel()
        assert axes.get_ylabel() == others.get_ylabel()


@of_displays
def test_takes_a_pipeline(name):
    estimator = CASES[name].estimator()
    steps = Pipeline([("scaler", FunctionTransformer()), ("model", estimator)])
    assert_same(draw(name, estimator=steps), draw(name, estimator=estimator))


@of_displays
def test_the_fields_hold_all_that_is_drawn(name):
    display = draw(name)
    stored = {f.name: getattr(display, f.name) for f in fields(display)}
    assert_same(display, type(display)(**stored).plot())


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].predict])
def test_estimators_and_their_predictions_look_the_same(name):
    case = CASES[name]
    predictions, options = case.predict(case.estimator(), *case.samples)
    kind = getattr(plotting, name)
    labels = {"name": draw(name).name} if hasattr(kind, "name") else {}
    other = kind.from_predictions(*predictions, **case.options, **options, **labels)
    assert_same(draw(name), other)


@of_displays
def test_axes_are_used_and_no_figure_is_made(name):
    display = draw(name)
    figure, axes = plt.subplots(1, N_AXES.get(name, 1), squeeze=False)
    open_figures = plt.get_fignums()
    ax = list(axes[0]) if name in N_AXES else axes[0, 0]
    other = draw(name, ax=ax)
    assert_same(display, other)
    assert display.plot(ax) is display
    assert (display.axes_, display.figure_) == (list(axes[0]), figure)
    assert plt.get_fignums() == open_figures
    display.plot()
    assert display.axes_[0] not in axes


@of_displays
def test_other_numbers_of_axes_are_refused(name):
    n = N_AXES.get(name, 1)
    _, axes = plt.subplots(1, n + 1)
    with pytest.raises(ValueError, match=f"{n + 1} axes, but this display needs {n}"):
        draw(name, ax=axes)


@pytest.mark.parametrize(
    ("name", "keyword", "attribute"),
    [(name, *style) for name in CASES for style in CASES[name].styles.items()],
)
def test_styles_reach_their_artists(name, keyword, attribute):
    display = draw(name, **{keyword: {"alpha": 0.123}})
    parts = cbook.flatten([getattr(display, attribute)])
    alphas = {part.get_alpha() for part in parts if isinstance(part, Artist)}
    assert alphas == {0.123}


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("PredictiveBandDisplay", [("speed", "")]),
        ("ConfidenceDisplay", [("speed", "size")]),
        ("UncertaintyDisplay", [("speed", "size"), ("speed", ""), ("speed", "")]),
    ],
)
def test_features_of_frames_label_the_axes(name, labels, frame):
    columns = zip(("speed", "size"), CASES[name].samples[0].T, strict=False)
    X = frame(dict(columns))
    is_regression = CASES[name].samples is LINE
    model = laplace_regressor() if is_regression else laplace("moons")
    y = LINE[1] if is_regression else MOONS[1]
    display = draw(name, X, estimator=clone(model).fit(X, y))
    found = [(axes.get_xlabel(), axes.get_ylabel()) for axes in display.axes_]
    assert found == labels


@of_displays
def test_missing_matplotlib_says_what_to_install(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'pip install "sklaplace\[plot\]"'):
        draw(name)


@of_displays
def test_estimators_have_to_be_fitted(name):
    with pytest.raises(NotFittedError, match="not fitted yet"):
        draw(name, estimator=clone(CASES[name].estimator()))


@of_displays
def test_estimators_that_cannot_predict_are_refused(name):
    is_regression = CASES[name].samples is LINE
    other = LinearRegression().fit(*LINE) if is_regression else LinearSVC().fit(*MOONS)
    with pytest.raises((AttributeError, TypeError), match=r"no attribute|return_std"):
        draw(name, estimator=other)


OPTIONS = {
    "ConfidenceDisplay": [
        ({"grid_resolution": 1}, "grid_resolution=1 is not an integer of at least 2"),
    ],
    "DirichletDisplay": [({"grid_resolution": 2.5}, "resolution=2.5 is not an int")],
    "PredictiveBandDisplay": [
        ({"coverage": (0.5, -0.1)}, r"coverage=-0.1 is not between"),
    ],
    "PriorPathDisplay": [({"prior_precisions": [1, -1]}, "is not positive")],
    "RegressionCalibrationDisplay": [
        ({"levels": 1.5}, "levels=1.5 is not between 0 and 1"),
        ({"kind": "both"}, "kind='both' is not known"),
        ({"sample_weight": [1.0]}, "inconsistent numbers of samples"),
    ],
    "ReliabilityDisplay": [
        ({"kind": "top_label", "classes": [0]}, "Pass kind='per_class'"),
        ({"classes": ["rose"]}, r"classes=\['rose'\] is not valid"),
        ({"classes": []}, r"classes=\[\] is not valid"),
        ({"sample_weight": [1.0]}, "inconsistent numbers of samples"),
    ],
    "RiskCoverageDisplay": [({"sample_weight": [1.0]}, "inconsistent numbers")],
    "UncertaintyDisplay": [({"method": "bayes"}, "method='bayes' is not known")],
}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [(name, *refusal) for name in OPTIONS for refusal in OPTIONS[name]],
)
def test_options_out_of_range_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        draw(name, **options)


@of_displays
def test_unknown_options_are_named(name):
    with pytest.raises(TypeError, match="'lin_kw'"):
        draw(name, lin_kw={})


WIDE = np.zeros((5, 3))
SHAPES = [
    ("PredictiveBandDisplay", ridge, [WIDE], "X has 3 features, but this .* needs 1"),
    ("ConfidenceDisplay", logistic, [WIDE], "X has 3 features, but this .* needs 2"),
    ("DirichletDisplay", partial(laplace, "iris"), [IRIS[0][:2]], r"shape \(2, 3\)"),
    ("DirichletDisplay", partial(laplace, "moons"), [MOONS[0][:1]], r"shape \(2,\)"),
    ("PredictiveBandDisplay", ridge, [X, [1.0, 2.0]], "inconsistent numbers"),
    (
        "PredictiveBandDisplay",
        lambda: SEVERAL,
        [X],
        "should be a 1d array",
    ),
    ("RegressionCalibrationDisplay", lambda: SEVERAL, LINE, "should be a 1d array"),
    ("RiskCoverageDisplay", ridge, [X, np.c_[X, X]], "have 2, 1 and 1 columns"),
    ("RiskCoverageDisplay", logistic, [MOONS[0], [1]], "inconsistent numbers"),
    ("UncertaintyDisplay", partial(laplace, "labels"), LABELS[:1], r"shape \(2, 3\)"),
]


@pytest.mark.parametrize(("name", "estimator", "samples", "message"), SHAPES)
def test_other_shapes_are_named(name, estimator, samples, message):
    with pytest.raises(ValueError, match=message):
        draw(name, *samples, estimator=estimator())


PREDICTIONS = [
    ("DirichletDisplay", [[1.0, 2.0]], r"alpha has shape \(2,\) and class_names has 3"),
    ("DirichletDisplay", [[1.0, 2.0, 0.0]], "positive"),
    ("NoveltyDisplay", [[], [1.0]], "minimum of 1 is required"),
    ("NoveltyDisplay", [[1.0], [np.inf]], "confidence_out contains infinity"),
    ("NoveltyDisplay", [[1.0], [[1.0, 2.0]]], "1d array"),
    ("RegressionCalibrationDisplay", [[0, 1], [0, 1], [1, 0]], "y_std has the value 0"),
    ("RegressionCalibrationDisplay", [[0, 1], [0], [1, 1]], "inconsistent numbers"),
    ("RegressionCalibrationDisplay", [[0], [0, 1], [1, 1]], "inconsistent numbers"),
    ("RegressionCalibrationDisplay", [[0], [[0, 1]], [[1, 1]]], "1d array"),
    ("RiskCoverageDisplay", [[1.0], [1.0, 2.0]], "inconsistent numbers of samples"),
]


@pytest.mark.parametrize(("name", "predictions", "message"), PREDICTIONS)
def test_wrong_predictions_are_named(name, predictions, message):
    with pytest.raises(ValueError, match=message):
        getattr(plotting, name).from_predictions(*predictions)
