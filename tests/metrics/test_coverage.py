import numpy as np
import pytest

from sklaplace.metrics import coverage_by_category, interval_coverage

Y = [0.0, 1.0, 1.5, 2.0]
INTERVAL = [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [2.0, 5.0]]
SETS = np.array([[1, 1, 0], [0, 0, 1], [1, 1, 1], [0, 1, 0]], dtype=bool)


def test_intervals_of_each_category():
    names, coverage, size, weight = coverage_by_category(Y, INTERVAL, list("bbca"))
    assert names.tolist() == ["a", "b", "c"]
    assert coverage.tolist() == [1, 1, 0]
    assert size.tolist() == [3, 1, 1]
    assert weight.tolist() == [1, 2, 1]


def test_sets_of_each_category():
    labels = ["x", "y", "z"]
    found = coverage_by_category(list("xyzy"), SETS, [7, 7, 2, 2])
    expected = [2, 7], [1, 0.5], [2, 1.5], [2, 2]
    assert [values.tolist() for values in found] == [list(e) for e in expected]
    # classes that the samples lack, in the order of the columns
    rows = [0, 3]
    found = coverage_by_category(["x", "y"], SETS[rows], [1, 1], labels=labels)
    assert found[1].tolist() == [1]
    found = coverage_by_category(["x", "y"], SETS[rows], [1, 1], labels=labels[::-1])
    assert found[1].tolist() == [0.5]


def test_weights_count_samples():
    weights = [3, 1, 0, 2]
    rows = np.repeat(np.arange(4), weights)
    found = coverage_by_category(Y, INTERVAL, [0, 1, 2, 1], sample_weight=weights)
    repeated = coverage_by_category(
        np.take(Y, rows), np.take(INTERVAL, rows, 0), np.take([0, 1, 2, 1], rows)
    )
    for values, expected in zip(found, repeated, strict=True):
        assert values[:2].tolist() == expected.tolist()
    assert np.isnan(found[1][2])
    assert np.isnan(found[2][2])
    assert found[3][2] == 0


def test_one_category_has_the_coverage_of_all_samples():
    _, coverage, size, weight = coverage_by_category(Y, INTERVAL, np.zeros(4))
    assert coverage == interval_coverage(Y, INTERVAL)
    assert (size, weight) == (1.5, 4)


def test_categories_name_what_is_wrong():
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        coverage_by_category(Y, INTERVAL, [0, 1])
    with pytest.raises(ValueError, match="should be a 1d array"):
        coverage_by_category(Y, INTERVAL, np.zeros((4, 2)))
    with pytest.raises(ValueError, match=r"y_pred has 3 columns\. Pass lower"):
        coverage_by_category(Y, np.ones((4, 3)), [0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"y_pred has the lower bound 1.0 above"):
        coverage_by_category([0], [[1, 0]], [0])
    with pytest.raises(ValueError, match=r"y_pred has 3 columns, but y_true has 2"):
        coverage_by_category([0, 1, 0, 1], SETS, [0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"the class 5, which is not in labels"):
        coverage_by_category([0, 1, 0, 5], SETS, [0, 0, 1, 1], labels=[0, 1, 2])
    with pytest.raises(ValueError, match="dim 3"):
        coverage_by_category([0, 1, 0, 5], SETS[:, None], [0, 0, 1, 1])
