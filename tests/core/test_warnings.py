import warnings

import pytest
from sklearn.utils.parallel import Parallel, delayed

from sklaplace.core.checks import warn_user


def searched(n_fits):
    """Reset the registry of warnings, as a scikit-learn search does."""
    Parallel(n_jobs=1)(delayed(warn_user)("narrow intervals") for _ in range(n_fits))


def test_one_warning_for_each_line_that_searches():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(2):
            searched(5)
        for _ in range(3):
            warn_user("another message")
    lines = [(str(warning.message), warning.lineno) for warning in shown]
    assert len(lines) == len(set(lines)) == 2
    assert all(warning.filename == __file__ for warning in shown)


@pytest.mark.parametrize("action", ["always", "error"])
def test_filters_that_show_all_warnings_do(action):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(action)
        for _ in range(3):
            if action == "error":
                with pytest.raises(UserWarning, match="noise"):
                    warn_user("noise")
            else:
                warn_user("noise")
    assert len(shown) == (3 if action == "always" else 0)


def test_ignored_warnings_are_ignored_and_shown_later():
    def warned():
        warn_user("nothing to see")

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("ignore")
        warned()
        assert shown == []
        warnings.simplefilter("default")
        warned()
    assert len(shown) == 1
