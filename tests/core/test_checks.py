import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

from sklaplace.core.checks import (
    as_levels,
    as_seed,
    check_count,
    check_fraction,
    check_option,
    check_positive,
    naming,
)


@pytest.mark.parametrize("value", ["kronecker", None, 3, ["kron"], np.array(["kron"])])
def test_unknown_option(value):
    message = r"is not known\. Choose one of 'full', 'kron'"
    with pytest.raises(ValueError, match=message):
        check_option("hessian_structure", value, ["full", "kron"])


@pytest.mark.parametrize(
    "value",
    [0, -1.0, np.nan, np.inf, [], [1.0, 0.0], None, True, {}, [[1], [1, 2]]],
)
def test_not_positive(value):
    with pytest.raises(ValueError, match=r"prior_precision=.* Choose a positive num"):
        check_positive("prior_precision", value, scalar=False)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_not_a_count(value):
    with pytest.raises(ValueError, match=r"n_samples=.* not an integer of at least 1"):
        check_count("n_samples", value)


@pytest.mark.parametrize(("value", "shown"), [(90, "90"), (90.0, "90.0")])
def test_percentages_are_shown_as_given(value, shown):
    with pytest.raises(ValueError, match=rf"coverage={shown} is not between"):
        as_levels("coverage", value, "Choose one.")


@pytest.mark.parametrize("value", [0, 1, -0.5, 1.5, np.nan, True, "0.2", None])
def test_not_a_fraction(value):
    message = r"validation_fraction=.* between 0 and 1. Choose"
    with pytest.raises(ValueError, match=message):
        check_fraction("validation_fraction", value, "Choose a fraction.")


@pytest.mark.parametrize("value", [0, 2**32 - 1, np.int64(3)])
def test_seed(value):
    assert as_seed("random_state", value) == value


def test_seed_of_a_generator():
    expected = np.random.RandomState(0).randint(np.iinfo(np.int32).max)
    assert as_seed("random_state", np.random.RandomState(0)) == expected


def test_seeds_of_none_differ():
    assert as_seed("random_state", None) != as_seed("random_state", None)


@pytest.mark.parametrize("value", [-1, 2**32, 1.0, "1", True])
def test_not_a_seed(value):
    with pytest.raises(ValueError, match=r"random_state=.* cannot seed a generator"):
        as_seed("random_state", value)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Input X contains NaN.", "Input X_val contains NaN."),
        ("y has 3 rows, X.T 2", "y_val has 3 rows, X_val.T 2"),
        ("y_true, Xs and a.X", "X_val and y_val: y_true, Xs and a.X"),
        ("dim 3", "X_val and y_val: dim 3"),
    ],
)
@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_errors_name_the_argument(message, expected, kind):
    with pytest.raises(kind) as caught, naming(X="X_val", y="y_val"):
        raise kind(message)
    assert str(caught.value) == expected


@pytest.mark.parametrize("error", [KeyError("x"), NotFittedError("no")])
def test_other_errors_are_left_alone(error):
    with pytest.raises(type(error)) as caught, naming(X="X_val"):
        raise error
    assert caught.value is error
