import numpy as np
import pytest

from sklaplace.core.newton import first_where


@pytest.mark.parametrize("root", [0.3, -7.0, 1e-200, 1e250])
def test_the_first_value_is_found_to_the_last_digit(root):
    ends = np.array([-1e300]), np.array([1e300])
    assert first_where(lambda x: x >= root, *ends)[0] == root


def test_values_that_are_not_numbers_end_the_search():
    ends = np.array([0.0, np.nan]), np.array([1.0, np.nan])
    found = first_where(lambda x: x >= 0.3, *ends)
    assert found[0] == 0.3
    assert np.isnan(found[1])
