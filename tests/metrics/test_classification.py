import numpy as np
import pytest
from sklearn.metrics import brier_score_loss

from sklaplace.metrics import brier_score, expected_calibration_error

PROBA = np.array([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]])
LABELS = np.array([0, 1, 1, 1])
of_classes = pytest.mark.parametrize(
    "metric", [expected_calibration_error, brier_score]
)


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


def test_calibrated_predictions_have_small_error():
    rng = np.random.default_rng(0)
    proba = rng.dirichlet(np.ones(3), size=20_000)
    labels = (rng.uniform(size=(20_000, 1)) > proba.cumsum(axis=1)).sum(axis=1)
    # Each of the 15 bins contributes at most a binomial error of √(n_bin/4)/n.
    bound = 3 * 15 * np.sqrt(20_000 / 15 / 4) / 20_000
    assert expected_calibration_error(labels, proba) < bound
    assert expected_calibration_error(labels, np.eye(3)[proba.argmax(1)]) > 0.2


def test_brier_score_by_hand_and_twice_the_binary_one():
    expected = 2 * np.mean([0.1**2, 0.8**2, 0.4**2, 0.3**2])
    assert brier_score(LABELS, PROBA) == pytest.approx(expected)
    assert brier_score_loss(LABELS, PROBA[:, 1]) == pytest.approx(expected / 2)


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
        (LABELS, 5 * PROBA - 2, {}, r"values between -1.5 and 2.5. Give probabilities"),
        (LABELS, PROBA / 2, {}, r"sum to values between 0.5 and 0.5. Divide each row"),
        ([0, 0, 0, 0], PROBA, {}, r"2 columns, but y_true has 1 classes. Give labels="),
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


def test_bins_must_exist():
    for n_bins in (0, 2.5, "a", None):
        with pytest.raises(ValueError, match=r"n_bins=.* is not valid. Use at least 1"):
            expected_calibration_error(LABELS, PROBA, n_bins=n_bins)
