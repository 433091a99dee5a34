"""Arrays of numbers and labels: values that numpy would convert wrongly are refused."""

import datetime as dt
from decimal import Decimal

import numpy as np
import pytest
import torch

from sklaplace.data.arrays import (
    as_labels,
    as_numbers,
    check_columns,
    check_finite,
    detached,
)

DATES = [
    np.datetime64("2020-01-01"),
    np.datetime64("NaT", "D"),
    np.timedelta64(0, "D"),
    dt.date(2020, 1, 1),
    dt.datetime(2020, 1, 1),
    dt.timedelta(0),
    dt.time(9),
]


def objects(*values):
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def shown(value):
    return f"{type(value).__name__} {value}"


class TestNumbers:
    @pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8", "u1", "?"])
    def test_stay_as_they_are(self, dtype):
        values = np.ones(3, dtype)
        assert as_numbers(values, "X") is values

    def test_of_objects(self):
        values = as_numbers(objects(1, True, "2.5", Decimal(3), None, "nan"), "X")
        np.testing.assert_array_equal(values, [1, 1, 2.5, 3, np.nan, np.nan])

    @pytest.mark.parametrize("date", DATES, ids=shown)
    @pytest.mark.parametrize("in_objects", [True, False])
    def test_are_not_dates(self, date, in_objects):
        values = objects(1.0, date) if in_objects else np.array([date, date])
        with pytest.raises(TypeError, match=r"X has dates .* Convert them to numbers"):
            as_numbers(values, "X")

    @pytest.mark.parametrize(
        ("entry", "error"),
        [("red", ValueError), ({"a": 1}, TypeError), (10**400, ValueError)],
        ids=["word", "dict", "large integer"],
    )
    def test_of_other_objects(self, entry, error):
        with pytest.raises(error, match=r"items is not an array of numbers: .* Encode"):
            as_numbers(objects(1.0, entry), "items")

    def test_of_ragged_lists(self):
        with pytest.raises(ValueError, match="y cannot be converted to an array"):
            as_numbers([[1.0], [1.0, 2.0]], "y")

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_are_finite(self, value):
        word = "NaN" if np.isnan(value) else "infinity"
        with pytest.raises(ValueError, match=f"y contains {word}"):
            check_finite(np.array([0.0, value]), "y")


class TestLabels:
    @pytest.mark.parametrize(
        "values",
        [
            [1, 2],
            [1.0, 2.0],
            [True, False],
            ["a", "nan"],
            np.array(["2020-01-01", "2020-01-02"], "M8[D]"),
            np.array([1, 2], "m8[D]"),
            objects("a", "b"),
            objects(b"a", b"b"),
        ],
    )
    def test_of_one_type_stay_as_they_are(self, values):
        found = as_labels(values, "y")
        assert found.dtype == np.asarray(values).dtype
        np.testing.assert_array_equal(found, values)

    def test_numbers_in_objects_are_numbers(self):
        assert as_labels(objects(1, np.int64(2)), "y").dtype == np.int64
        assert as_labels(objects(True, False), "y").dtype == bool


@pytest.mark.parametrize(
    "dtype",
    [
        "datetime64[ns]",
        "datetime64[us, UTC]",
        "timedelta64[ns]",
        "period[D]",
        "Date",
        "Duration(time_unit='us')",
        "timestamp[us][pyarrow]",
    ],
)
def test_columns_of_dates(dtype):
    class Frame:
        columns, dtypes = ("a", "when"), ("float64", dtype)

    with pytest.raises(TypeError, match="X has dates or times, in column 'when'"):
        check_columns(Frame(), "X")


def test_tensors_become_what_numpy_has():
    x = torch.randn(3, 2, requires_grad=True)
    assert not detached(x).requires_grad
    half = detached(x.bfloat16())
    assert half.dtype == torch.float32
    assert torch.equal(half.bfloat16(), x.bfloat16())
    assert detached([1.0]) == [1.0]


@pytest.mark.parametrize("name", ["y", "y_val"])
def test_targets_cannot_be_imputed(name):
    with pytest.raises(ValueError, match=rf"{name} contains NaN\. Leave out") as caught:
        check_finite(np.array([np.nan]), name)
    assert "impute" not in str(caught.value)
    with pytest.raises(ValueError, match=r"X contains NaN\. .* impute"):
        check_finite(np.array([np.nan]), "X")
