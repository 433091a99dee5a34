import numpy as np
import pytest
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss

from sklaplace.metrics import (
    adaptive_calibration_error,
    brier_score,
    class_sharpness,
    expected_calibration_error,
    maximum_calibration_error,
    reliability_curve,
)

PROBA = np.array([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]])
LABELS = np.array([0, 1, 1, 1])
CALIBRATION_ERRORS = [
    adaptive_calibration_error,
    expected_calibration_error,
    maximum_calibration_error,
]
of_classes = pytest.mark.parametrize("metric", [*CALIBRATION_ERRORS, brier_score])


def test_calibration_error_by_hand():
    # Two bins, (0, .5] empty; one bin of confidence .75 and accuracy 3/4.
    assert expected_calibration_error(LABELS, PROBA, n_bins=2) == pytest.approx(0)
    # Bins of width .1: |1−.9|, |0−.8|, |1−.6|, |1−.7|, one row each.
    error = expected_calibration_error(LABELS, PROBA, n_bins=10)
    assert error == pytest.approx((0.1 + 0.8 + 0.4 + 0.3) / 4)


def test_bins_are_closed_on_the_right():
    proba = [[0.5, 0.5], [0.25, 0.75]]
    # .5 and .75 share no bin when (.25, .5] and (.5, .75] are bins.
    error = expected_calibration_error([0, 0], proba, n_bins=4, labels=[0, 1])
    assert error == pytest.approx((0.5 + 0.75) / 2)


@of_classes
def test_single_column_is_the_second_class(metric):
    assert metric(LABELS, PROBA[:, 1]) == pytest.approx(metric(LABELS, PROBA))


@of_classes
def test_labels_give_the_order_of_columns(metric):
    names = np.array(["cat", "dog"])
    expected = metric(LABELS, PROBA)
    assert metric(names[LABELS], PROBA) == pytest.approx(expected)
    swapped = metric(names[LABELS], PROBA[:, ::-1], labels=["dog", "cat"])
    assert swapped == pytest.approx(expected)
    assert np.isfinite(metric(["dog"], [[0.2, 0.8]], labels=["cat", "dog"]))
    objects = names[LABELS].astype(object)
    assert metric(objects, PROBA) == pytest.approx(expected)


@of_classes
def test_class_weights_count_rows(metric):
    weights = np.array([2, 1, 0, 3])
    repeated = metric(np.repeat(LABELS, weights), np.repeat(PROBA, weights, axis=0))
    assert metric(LABELS, PROBA, sample_weight=weights) == pytest.approx(repeated)


@of_classes
@pytest.mark.parametrize(
    ("y_true", "y_proba", "options", "message"),
    [
        (
            LABELS,
            5 * PROBA - 2,
            {},
            r"values between -1.5 and 2.5.* Pass probabilities",
        ),
        (LABELS, PROBA / 2, {}, r"row sums between 0.5 and 0.5.*divide each row"),
        ([0, 0, 0, 0], PROBA, {}, r"2 columns, but y_true has 1 classes. Pass labels="),
        (LABELS, PROBA, {"labels": [0, 1, 2]}, r"2 columns, but labels has 3 classes"),
        ([0, 1, 2, 7], PROBA, {"labels": [0, 2]}, r"has the class 1, which is not in"),
        (["a"] * 4, PROBA, {"labels": [0, 1]}, r"has the class 'a', which is not in"),
        ([0, 1], PROBA, {}, r"inconsistent numbers of samples"),
        (LABELS, np.full((4, 2), np.nan), {}, r"y_proba contains NaN"),
        (LABELS, PROBA, {"sample_weight": [1, 1]}, r"inconsistent numbers of samples"),
        (LABELS, PROBA, {"sample_weight": np.zeros(4)}, r"sample_weight sums to zero"),
        (LABELS, PROBA, {"sample_weight": [1, 1, 1, -1]}, r"(?i)negative values"),
    ],
)
def test_class_metrics_name_what_is_wrong(metric, y_true, y_proba, options, message):
    with pytest.raises(ValueError, match=message):
        metric(y_true, y_proba, **options)


@pytest.mark.parametrize("metric", [*CALIBRATION_ERRORS, reliability_curve])
def test_bins_must_exist(metric):
    for n_bins in (0, 2.5, "a", None):
        with pytest.raises(ValueError, match=r"n_bins=.* is not an integer"):
            metric(LABELS, PROBA, n_bins=n_bins)


@pytest.fixture(scope="module")
def three_classes():
    rng = np.random.default_rng(0)
    proba = rng.dirichlet([0.5, 1.0, 2.0], size=200)
    return rng.integers(3, size=200), proba, rng.integers(4, size=200)


def test_brier_score_is_that_of_scikit_learn(three_classes):
    y, proba, weights = three_classes
    options = {"sample_weight": weights, "labels": [0, 1, 2]}
    expected = brier_score_loss(y, proba, scale_by_half=False, **options)
    assert brier_score(y, proba, **options) == pytest.approx(expected)


def test_the_top_label_curve_gives_both_errors(three_classes):
    y, proba, weights = three_classes
    frequency, mean_proba, weight = reliability_curve(y, proba, sample_weight=weights)
    used = weight > 0
    assert 0 < used.sum() < 15  # no largest of three probabilities is below 1/3
    assert np.isnan(frequency[~used]).all()
    assert np.isnan(mean_proba[~used]).all()
    gaps = np.abs(frequency - mean_proba)[used]
    for metric, expected in (
        (expected_calibration_error, gaps @ weight[used] / weights.sum()),
        (maximum_calibration_error, gaps.max()),
    ):
        found = metric(y, proba, sample_weight=weights)
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("strategy", ["uniform", "quantile"])
def test_curves_of_classes_are_those_of_scikit_learn(three_classes, strategy):
    y, proba, _ = three_classes
    options = {"n_bins": 10, "strategy": strategy}
    found = reliability_curve(y, proba, kind="per_class", **options)
    for k, (frequency, mean_proba, weight) in enumerate(zip(*found, strict=True)):
        # the one has no empty bins, the other interpolates between two samples
        expected = calibration_curve(y == k, proba[:, k], **options)
        used = weight > 0
        np.testing.assert_allclose(frequency[used], expected[0])
        np.testing.assert_allclose(mean_proba[used], expected[1])
        assert weight.sum() == len(y)


def test_bins_of_equal_weight_have_it():
    # distinct values: 12 samples in 4 bins, and in 5, which differ by one
    proba = np.random.default_rng(0).permutation(np.linspace(0.01, 0.99, 12))
    options = {"kind": "per_class", "strategy": "quantile", "labels": [0, 1]}
    for n_bins, counts in ((4, {3}), (5, {2, 3})):
        *_, weight = reliability_curve([0] * 12, proba, n_bins=n_bins, **options)
        assert set(weight.ravel()) == counts
    # equal ones cannot be split
    *_, weight = reliability_curve([0] * 12, [0.4] * 12, n_bins=4, **options)
    assert sorted(weight[0]) == [0, 0, 0, 12]


def test_adaptive_error_by_brute_force(three_classes):
    y, proba, _ = three_classes
    errors = []
    for k in range(3):
        order = np.argsort(proba[:, k])
        for rows in np.split(order, 20):
            errors.append(abs((y[rows] == k).mean() - proba[rows, k].mean()))
    found = adaptive_calibration_error(y, proba, n_bins=20)
    assert found == pytest.approx(np.mean(errors))


def test_sharpness_is_the_probability_of_the_own_class(three_classes):
    y, proba, weights = three_classes
    found = class_sharpness(y, proba, sample_weight=weights)
    for k in range(3):
        own = np.repeat(proba[:, k], weights)[np.repeat(y, weights) == k]
        assert found[k] == pytest.approx(own.mean())
    absent = class_sharpness([0, 0], [[0.9, 0.1], [0.7, 0.3]], labels=[0, 1])
    np.testing.assert_allclose(absent, [0.8, np.nan])


@pytest.mark.parametrize("option", ["kind", "strategy"])
def test_unknown_options_of_the_curve_are_refused(option):
    with pytest.raises(ValueError, match=f"{option}='other' is not known. Choose one"):
        reliability_curve(LABELS, PROBA, **{option: "other"})
