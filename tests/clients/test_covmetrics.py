"""covmetrics: whether the coverage of intervals depends on the inputs."""

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier

from sklaplace.metrics import coverage_by_category

covmetrics = pytest.importorskip("covmetrics")


@pytest.fixture
def unseen(numbers):
    """Return samples that the model was not trained on, and its 90 % intervals."""
    pairs = zip(numbers.cal, numbers.test, strict=True)
    X, y = (np.concatenate(pair) for pair in pairs)
    return X, y, numbers.model.predict_interval(X, coverage=0.9)


def excess_risk(inside, X):
    """Return the excess risk of the target coverage 0.9.

    The value is a lower bound of the mean distance of the conditional coverage from
    0.9, up to the standard error of a mean.
    """
    # small leaves would fit the noise of zeros and ones
    options = {"min_samples_leaf": 50, "max_iter": 20, "random_state": 0}
    ert = covmetrics.ERT(HistGradientBoostingClassifier, **options)
    return ert.evaluate(X, inside.astype(float), 0.1)


def test_coverage_depends_on_the_inputs_only_with_constant_widths(
    numbers, unseen, figure
):
    X, y, interval = unseen
    found = excess_risk((interval[:, 0] <= y) & (y <= interval[:, 1]), X)
    residuals = np.abs(y - numbers.model.predict(X))
    constant = excess_risk(residuals <= np.quantile(residuals, 0.9), X)
    error = np.sqrt(0.9 * 0.1 / len(y))
    assert found < 3 * error
    assert constant > found + 3 * np.sqrt(2) * error
    figure(excess_risk=found, with_constant_widths=constant)


def test_gap_of_coverages_is_that_of_categories(unseen):
    X, y, interval = unseen
    inside = (interval[:, 0] <= y) & (y <= interval[:, 1])
    categories = np.abs(X[:, 0]).astype(int)
    _, coverage, _, _ = coverage_by_category(y, interval, categories)
    gap = covmetrics.CovGap().evaluate(categories, inside.astype(float), 0.1)
    assert gap == pytest.approx(np.abs(coverage - 0.9).mean())
