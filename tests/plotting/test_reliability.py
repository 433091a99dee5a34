import numpy as np
import pytest
from matplotlib.colors import to_rgba
from sklearn.datasets import load_iris
from sklearn.naive_bayes import GaussianNB

from sklaplace.metrics import expected_calibration_error, reliability_curve
from sklaplace.plotting import ReliabilityDisplay


@pytest.fixture(scope="module")
def iris():
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    return GaussianNB().fit(X[:, :2], names), X[:, :2], names


def heights(bars):
    return np.array([bar.get_height() for bar in bars])


def test_the_curve_of_the_top_label_is_that_of_the_metric(iris):
    model, X, y = iris
    display = ReliabilityDisplay.from_estimator(model, X, y, n_bins=8)
    frequency, mean_proba, weight = reliability_curve(
        y, model.predict_proba(X), n_bins=8
    )
    used = weight > 0
    (line,), (bars,) = display.lines_, display.bars_
    np.testing.assert_array_equal(line.get_xdata(), mean_proba[used])
    np.testing.assert_array_equal(line.get_ydata(), frequency[used])
    np.testing.assert_array_equal(heights(bars), weight[used])
    assert heights(bars).sum() == len(y)
    error = expected_calibration_error(y, model.predict_proba(X), n_bins=8)
    assert display.calibration_error == pytest.approx(error)
    assert line.get_label() == f"GaussianNB (ECE {error:.3f})"
    np.testing.assert_array_equal(display.reference_.get_xydata(), [[0, 0], [1, 1]])


def test_each_class_has_a_curve_and_counts(iris):
    model, X, y = iris
    display = ReliabilityDisplay.from_estimator(model, X, y, kind="per_class", n_bins=5)
    assert [line.get_label() for line in display.lines_] == list(model.classes_)
    proba = model.predict_proba(X)
    for k, (line, bars) in enumerate(zip(display.lines_, display.bars_, strict=True)):
        bins = np.digitize(proba[:, k], [0.2, 0.4, 0.6, 0.8], right=True)
        used = np.unique(bins)
        frequency = [(y == model.classes_[k])[bins == b].mean() for b in used]
        np.testing.assert_allclose(line.get_ydata(), frequency)
        np.testing.assert_array_equal(heights(bars), np.bincount(bins)[used])
        assert bars[0].get_facecolor()[:3] == to_rgba(line.get_color())[:3]
    assert len({line.get_color() for line in display.lines_}) == 3


def test_counts_stay_in_the_lower_third_behind_the_curve(iris):
    display = ReliabilityDisplay.from_estimator(*iris)
    low, high = np.log(display.count_ax_.get_ylim())
    top = np.log(display.weight.max())
    assert (top - low) / (high - low) == pytest.approx(1 / 3)
    ticks = display.count_ax_.get_yticks()
    assert ticks.max() <= display.weight.max()
    assert display.ax_.get_zorder() > display.count_ax_.get_zorder()
    assert display.ax_.get_shared_x_axes().joined(display.ax_, display.count_ax_)


def test_two_displays_on_one_plot_share_the_diagonal(iris):
    first = ReliabilityDisplay.from_estimator(*iris)
    second = ReliabilityDisplay.from_estimator(*iris, name="again", ax=first.ax_)
    assert second.reference_ is first.reference_
    assert len(first.ax_.lines) == 3
    labels = [text.get_text() for text in first.ax_.get_legend().get_texts()]
    assert labels[0] == "perfectly calibrated"
    assert labels[2].startswith("again (ECE")


@pytest.fixture(scope="module")
def seven():
    """Return labels and probabilities of seven classes; 2 and 6 are perfect."""
    y = np.arange(210) % 7
    proba = np.where(y[:, None] == np.arange(7), 1.0, 0.0)
    others = np.setdiff1d(np.arange(7), [2, 6])
    proba[np.ix_(np.isin(y, others), others)] = 1 / 5
    wrong = np.isin(y, others) & (np.arange(210) < 35)
    proba[wrong] = proba[wrong][:, [1, 3, 2, 4, 5, 0, 6]]
    proba[wrong, y[wrong]] += 0.1
    proba /= proba.sum(axis=1, keepdims=True)
    return y, proba


def test_of_many_classes_the_five_with_the_largest_errors_are_drawn(seven):
    display = ReliabilityDisplay.from_predictions(*seven, kind="per_class")
    labels = [line.get_label() for line in display.lines_]
    assert labels == ["0", "1", "3", "4", "5"]
    assert len(display.bars_) == 5
    assert display.frequency.shape == (7, 10)
    assert display.ax_.get_xlabel().endswith("(5 of 7 classes)")


def test_chosen_classes_are_drawn_in_their_order(seven):
    y, proba = seven
    display = ReliabilityDisplay.from_predictions(
        y, proba, kind="per_class", classes=[6, 0]
    )
    assert [line.get_label() for line in display.lines_] == ["6", "0"]
    first = ReliabilityDisplay.from_predictions(y == 6, proba[:, 6], kind="per_class")
    np.testing.assert_allclose(
        display.lines_[0].get_xydata(), first.lines_[1].get_xydata()
    )


def test_counts_have_their_limits_as_ticks():
    values, counts = np.array([0.2, 0.8]), np.array([20, 400])
    display = ReliabilityDisplay(frequency=values, mean_proba=values, weight=counts)
    assert display.plot().count_ax_.get_yticks().tolist() == [20, 400]
