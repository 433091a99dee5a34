"""Composition: estimators inside scikit-learn tools, copied and stored."""

import warnings

import numpy as np
import pytest
from nets import regressor, seeded, waves
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklaplace import LaplaceRegressor


# -------------------------------------------------------------------------- tools
def test_a_pipeline_predicts_intervals():
    X, y = waves()
    model = make_pipeline(StandardScaler(), LaplaceRegressor(prior_precision=1.0))
    model.fit(X, y)
    rows = model[:-1].transform(X)
    for coverage in (0.8, [0.5, 0.9]):
        mean, interval = model.predict(X, coverage=coverage)
        np.testing.assert_array_equal(mean, model.predict(X))
        expected = model[-1].predict_interval(rows, coverage)
        np.testing.assert_array_equal(interval, expected)
    with pytest.raises(ValueError, match="coverage=2 is not between 0 and 1"):
        model.predict(X, coverage=2)
    with pytest.raises(ValueError, match="coverage cannot be used with return_std"):
        model.predict(X, coverage=0.9, return_std=True)


def test_a_search_warns_once_of_noise_from_training_samples():
    X, y = waves(40)
    grid = {"temperature": [0.5, 1.0, 2.0]}
    net = FrozenEstimator(seeded(regressor(), X, y[:, None]))
    search = GridSearchCV(LaplaceRegressor(net, random_state=0), grid, cv=2)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        search.fit(X, y)
    shown = [w for w in shown if "sigma_noise is estimated from" in str(w.message)]
    assert [w.filename for w in shown] == [__file__]
