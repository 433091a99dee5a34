"""Properties that every display has, over one registry of displays."""

import sys
from dataclasses import fields

import matplotlib as mpl
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
    logistic,
    ridge,
)
from matplotlib import cbook
from matplotlib.artist import Artist
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression
from sklearn.svm import LinearSVC

from sklaplace import LaplaceClassifier, LaplaceRegressor, plotting

N_AXES = {"NoveltyDisplay": 2, "UncertaintyDisplay": 3}
of_displays = pytest.mark.parametrize("name", plotting.__all__)


def draw(name, *samples, estimator=None, **options):
    """Draw a display from its estimator and samples, or from others."""
    case = CASES[name]
    estimator = case.estimator() if estimator is None else estimator
    options = case.options | options
    samples = samples or case.samples
    return getattr(plotting, name).from_estimator(estimator, *samples, **options)


def contents(display):
    """Return everything that was drawn on the axes of a display, as numbers."""
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
    with pytest.raises(ValueError, match=f"{n + 1} axes, but {n} are plotted on"):
        draw(name, ax=axes)


@pytest.mark.usefixtures("rng_untouched")
@of_displays
def test_samples_and_settings_of_matplotlib_stay(name):
    samples = [np.copy(values) for values in CASES[name].samples]
    settings = mpl.rcParams.copy()
    draw(name, *samples)
    for used, original in zip(samples, CASES[name].samples, strict=True):
        np.testing.assert_array_equal(used, original)
    assert mpl.rcParams == settings


@pytest.mark.parametrize(
    ("name", "keyword", "attribute"),
    [(name, *style) for name in CASES for style in CASES[name].styles.items()],
)
def test_styles_reach_their_artists(name, keyword, attribute):
    display = draw(name, **{keyword: {"alpha": 0.123}})
    parts = cbook.flatten([getattr(display, attribute)])
    alphas = {part.get_alpha() for part in parts if isinstance(part, Artist)}
    assert alphas == {0.123}


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        (name, CASES[name].styles["surface_kw"])
        for name in CASES
        if "surface_kw" in CASES[name].styles
    ],
)
def test_surfaces_take_colour_maps_and_levels(name, attribute):
    style = {"cmap": "magma", "levels": [0.0, 0.5, 1.0]}
    for surface in np.ravel(getattr(draw(name, surface_kw=style), attribute)):
        assert surface.get_cmap().name == "magma"
        assert surface.levels.tolist() == [0.0, 0.5, 1.0]


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
    model = LaplaceRegressor if is_regression else LaplaceClassifier
    y = LINE[1] if is_regression else MOONS[1]
    display = draw(name, X, estimator=model(random_state=0).fit(X, y))
    found = [(axes.get_xlabel(), axes.get_ylabel()) for axes in display.axes_]
    assert found == labels


@pytest.mark.parametrize(
    ("name", "n_features"),
    [("PredictiveBandDisplay", 1), ("ConfidenceDisplay", 2), ("UncertaintyDisplay", 2)],
)
def test_other_numbers_of_features_are_refused(name, n_features):
    message = f"X has 3 features, but this display needs {n_features}"
    with pytest.raises(ValueError, match=message):
        draw(name, np.zeros((5, 3)))


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
    with pytest.raises(TypeError, match=f"{type(other).__name__} (has no|does not)"):
        draw(name, estimator=other)


GRID = [
    ({"grid_resolution": 1}, "grid_resolution=1 is not an integer of at least 2"),
    ({"grid_resolution": 2.5}, "resolution=2.5 is not an integer of at least 2"),
]
RANGE = [
    ({"eps": -1.0}, "eps=-1.0 is not valid"),
    ({"eps": np.nan}, "eps=nan is not valid"),
    ({"eps": "wide"}, "eps='wide' is not valid"),
]
REFUSED = {
    "ConfidenceDisplay": GRID + RANGE,
    "DirichletDisplay": GRID,
    "PredictiveBandDisplay": [
        *GRID,
        *RANGE,
        ({"coverage": 1.0}, r"coverage=1.0 is not between 0 and 1"),
        ({"coverage": (0.5, -0.1)}, r"coverage=-0.1 is not between"),
        ({"coverage": ()}, r"coverage has shape \(0,\)"),
    ],
    "PriorPathDisplay": [
        ({"prior_precisions": [1.0, -1.0]}, r"prior_precisions.* is not positive")
    ],
    "RegressionCalibrationDisplay": [
        ({"levels": 1.5}, "levels=1.5 is not between 0 and 1"),
        ({"kind": "both"}, "kind='both' is not known"),
        ({"sample_weight": [1.0]}, "inconsistent numbers of samples"),
    ],
    "ReliabilityDisplay": [
        ({"kind": "top_label", "classes": [0]}, "Pass kind='per_class'"),
        ({"classes": ["rose"]}, r"\['rose'\]. Choose among"),
        ({"classes": []}, "has no class"),
        ({"kind": "all"}, "kind='all' is not known"),
        ({"strategy": "wide"}, "strategy='wide' is not known"),
        ({"n_bins": 0}, "n_bins=0 is not valid"),
        ({"sample_weight": [1.0]}, "inconsistent numbers of samples"),
    ],
    "RiskCoverageDisplay": [
        ({"sample_weight": [1.0]}, "inconsistent numbers of samples")
    ],
    "UncertaintyDisplay": [
        *GRID,
        *RANGE,
        ({"method": "bayes"}, "method='bayes' is not known"),
    ],
    "WeightPosteriorDisplay": [
        ({"weights": [-1]}, "weights has values between -1 and -1"),
        ({"weights": [10**6]}, "but the posterior has"),
        ({"weights": [0.5]}, "are no positions. Pass integers"),
        ({"weights": []}, "are no positions"),
        ({"weights": [[0]]}, "are no positions"),
    ],
}
REFUSALS = [(name, *refusal) for name in REFUSED for refusal in REFUSED[name]]


@pytest.mark.parametrize(("name", "options", "message"), REFUSALS)
def test_options_out_of_range_are_named_and_leave_no_figure(name, options, message):
    with pytest.raises(ValueError, match=message):
        draw(name, **options)
    assert plt.get_fignums() == []


@of_displays
def test_unknown_options_are_named_and_leave_no_figure(name):
    with pytest.raises(TypeError, match="'lin_kw'"):
        draw(name, lin_kw={})
    assert plt.get_fignums() == []


@pytest.mark.parametrize(
    ("name", "estimator", "samples", "message"),
    [
        (
            "DirichletDisplay",
            "iris",
            [IRIS[0][:2]],
            "X has 2 samples, but one Dirichlet",
        ),
        ("DirichletDisplay", "moons", [MOONS[0][:1]], r"alpha has shape \(2,\)"),
        (
            "PredictiveBandDisplay",
            ridge,
            [X, [1.0, 2.0]],
            "y has 2 entries, but X has 60 rows",
        ),
        (
            "PredictiveBandDisplay",
            SEVERAL,
            [X],
            "predicts 2 targets, but one can be plotted",
        ),
        ("RegressionCalibrationDisplay", SEVERAL, LINE, "predicts 2 targets"),
        (
            "RiskCoverageDisplay",
            ridge,
            [X, X],
            r"y has shape \(60, 1\), but \(60,\) is",
        ),
        (
            "RiskCoverageDisplay",
            logistic,
            [MOONS[0], [1]],
            r"y has shape \(1,\), but probabilities",
        ),
        (
            "UncertaintyDisplay",
            "labels",
            LABELS[:1],
            r"shape \(2, 3\), but that of one label",
        ),
    ],
)
def test_other_shapes_are_named_and_leave_no_figure(name, estimator, samples, message):
    if isinstance(estimator, str):
        estimator = laplace(estimator)
    elif estimator is not SEVERAL:
        estimator = estimator()
    with pytest.raises(ValueError, match=message):
        draw(name, *samples, estimator=estimator)
    assert plt.get_fignums() == []


@pytest.mark.parametrize(
    ("name", "predictions", "message"),
    [
        (
            "DirichletDisplay",
            [[1.0, 2.0]],
            r"alpha has shape \(2,\), class_names has 3",
        ),
        ("DirichletDisplay", [[1.0, 2.0, 0.0]], "positive"),
        ("NoveltyDisplay", [[], [1.0]], "minimum of 1 is required"),
        ("NoveltyDisplay", [[1.0], [np.inf]], "confidence_out contains infinity"),
        ("NoveltyDisplay", [[1.0], [[1.0, 2.0]]], "1d array"),
        (
            "RegressionCalibrationDisplay",
            [[0, 1], [0, 1], [1, 0]],
            "y_std has the value 0.0",
        ),
        (
            "RegressionCalibrationDisplay",
            [[0, 1], [0], [1, 1]],
            r"shapes \(1,\) and \(2,\). Pass one number per",
        ),
        (
            "RegressionCalibrationDisplay",
            [[0], [0, 1], [1, 1]],
            "inconsistent numbers of samples",
        ),
        (
            "RegressionCalibrationDisplay",
            [[0], [[0, 1]], [[1, 1]]],
            "plot several targets one by one",
        ),
        ("RiskCoverageDisplay", [[1.0], [1.0, 2.0]], "inconsistent numbers of samples"),
    ],
)
def test_wrong_predictions_are_named_and_leave_no_figure(name, predictions, message):
    with pytest.raises(ValueError, match=message):
        getattr(plotting, name).from_predictions(*predictions)
    assert plt.get_fignums() == []
