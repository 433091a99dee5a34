"""What all displays do: draw on given axes, draw again, name what is missing."""

import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression
from sklearn.svm import LinearSVC

from sklaplace import LaplaceClassifier, plotting

DISPLAYS = [getattr(plotting, name) for name in plotting.__all__]
of_displays = pytest.mark.parametrize("kind", DISPLAYS, ids=lambda kind: kind.__name__)
N_AXES = {"NoveltyDisplay": 2, "UncertaintyDisplay": 3}
SEVERAL = [kind for kind in DISPLAYS if kind.__name__ in N_AXES]


@pytest.fixture(scope="module")
def laplace(moons):
    return LaplaceClassifier(random_state=0, hessian_structure="diag").fit(*moons)


@pytest.fixture(scope="module")
def iris_laplace():
    return LaplaceClassifier(random_state=0).fit(*load_iris(return_X_y=True))


@pytest.fixture
def arguments(kind, request, line, moons):
    """What a display's from_estimator takes, as a tuple and a dict."""
    model = request.getfixturevalue
    found = {
        "ConfidenceDisplay": lambda: ((model("logistic"), moons[0]), {}),
        "DirichletDisplay": lambda: ((model("iris_laplace"), np.ones((1, 4))), {}),
        "NoveltyDisplay": lambda: ((model("laplace"), moons[0], moons[0] + 3), {}),
        "PredictiveBandDisplay": lambda: ((model("ridge"), *line), {}),
        "PriorPathDisplay": lambda: ((model("laplace"),), {}),
        "RegressionCalibrationDisplay": lambda: ((model("ridge"), *line), {}),
        "ReliabilityDisplay": lambda: ((model("logistic"), *moons), {}),
        "RiskCoverageDisplay": lambda: ((model("logistic"), *moons), {}),
        "UncertaintyDisplay": lambda: (
            (model("laplace"), moons[0]),
            {"grid_resolution": 5},
        ),
        "WeightPosteriorDisplay": lambda: ((model("laplace"),), {}),
    }
    return found[kind.__name__]()


def axes_of(display):
    return getattr(display, "axes_", None) or [display.ax_]


def contents(display):
    """Everything that was drawn, as numbers."""
    found = []
    for axes in axes_of(display):
        found += [line.get_xydata() for line in axes.lines]
        for collection in axes.collections:
            found += [path.vertices for path in collection.get_paths()]
            found.append(collection.get_offsets())
        found += [np.array(patch.get_extents().bounds) for patch in axes.patches]
    return found


@pytest.mark.usefixtures("rng_untouched")
@of_displays
def test_a_display_is_drawn_again_on_other_axes(kind, arguments):
    given, options = arguments
    display = kind.from_estimator(*given, **options)
    first, drawn = axes_of(display), contents(display)
    assert len(drawn) > 0
    figure, axes = plt.subplots(1, N_AXES.get(kind.__name__, 1), squeeze=False)
    ax = list(axes[0]) if kind in SEVERAL else axes[0, 0]
    assert display.plot(ax) is display
    assert axes_of(display) == list(axes[0])
    assert display.figure_ is figure
    for before, after in zip(drawn, contents(display), strict=True):
        # bars are measured in pixels of their axes
        if before.ndim == 2:
            np.testing.assert_array_equal(before, after)
    display.plot()
    assert axes_of(display)[0] not in [*first, *axes[0]]


@of_displays
def test_missing_matplotlib_says_what_to_install(monkeypatch, kind, arguments):
    given, options = arguments
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'pip install "sklaplace\[plot\]"'):
        kind.from_estimator(*given, **options)


@pytest.mark.parametrize("kind", SEVERAL)
def test_other_numbers_of_axes_are_refused(kind, arguments):
    given, options = arguments
    _, ax = plt.subplots()
    with pytest.raises(ValueError, match=f"1 axes, but {N_AXES[kind.__name__]} are"):
        kind.from_estimator(*given, ax=ax, **options)


@of_displays
def test_estimators_have_to_be_fitted(kind, arguments):
    given, options = arguments
    with pytest.raises(NotFittedError, match="not fitted yet"):
        kind.from_estimator(clone(given[0]), *given[1:], **options)


@of_displays
def test_estimators_that_cannot_predict_it_are_refused(kind, arguments):
    given, options = arguments
    X = np.random.default_rng(0).normal(size=(20, 2))
    takes_numbers = kind.__name__ in (
        "PredictiveBandDisplay",
        "RegressionCalibrationDisplay",
    )
    other = LinearRegression() if takes_numbers else LinearSVC()
    other.fit(X[:, : np.shape(given[1])[1] if len(given) > 1 else 2], X[:, 0] > 0)
    with pytest.raises(TypeError, match=f"{type(other).__name__} (has no|does not)"):
        kind.from_estimator(other, *given[1:], **options)
