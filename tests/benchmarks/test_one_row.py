"""Time of a prediction for one row, relative to the network.

Run ``pytest tests/benchmarks/test_one_row.py -m benchmark -n 0 -s``. The results are
median ratios of CPU times, measured alternately on one thread.
"""

from functools import partial

import pytest
from benchmarks.test_default_fit import ratio
from benchmarks.workloads import digits_data, digits_net

from sklaplace import LaplaceClassifier

# a call takes less than a millisecond: many are timed together
CALLS, REPEATS = 30, 15
LIMITS = {"probit": 3.0, "auto": 4.0}


def repeated(function):
    for _ in range(CALLS):
        function()


@pytest.mark.parametrize("link", LIMITS)
def test_cost_of_one_row(link, shown):
    X, y = digits_data()
    model = LaplaceClassifier(
        digits_net(5), link_approx=link, prior_precision=1.0, random_state=0
    ).fit(X, y)
    predictors = model, model.estimator_
    calls = [partial(each.predict_proba, X[:1]) for each in predictors]
    found = ratio(*(partial(repeated, call) for call in calls), REPEATS)
    shown(ratio=found)
    assert found <= LIMITS[link]
