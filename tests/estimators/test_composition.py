"""Composition: estimators inside scikit-learn tools, copied and stored."""

import warnings

import numpy as np
import pytest
from nets import blobs, classifier, regressor, seeded, waves
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import VotingClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklaplace import LaplaceClassifier, LaplaceRegressor


@pytest.fixture(scope="module")
def rows():
    return blobs()


@pytest.fixture(scope="module")
def net(rows):
    return seeded(classifier(), *rows)


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


class TestMeta:
    @pytest.mark.slow
    @pytest.mark.parametrize("method", ["sigmoid", "isotonic", "temperature"])
    def test_calibration(self, method, rows):
        X, y = rows
        model = LaplaceClassifier(classifier(), random_state=0)
        calibrated = CalibratedClassifierCV(model, method=method, cv=2).fit(X, y)
        assert calibrated.score(X, y) > 0.5
        inner = [c.estimator for c in calibrated.calibrated_classifiers_]
        proba = [estimator.predict_proba(X) for estimator in inner]
        assert not np.allclose(*proba)

    @pytest.mark.filterwarnings("ignore:There are no held-out samples")
    def test_voting(self, rows, net):
        X, y = rows
        members = [
            ("frozen", LaplaceClassifier(FrozenEstimator(net), random_state=0)),
            ("default", LaplaceClassifier(random_state=0)),
            ("logistic", LogisticRegression()),
        ]
        voting = VotingClassifier(members, voting="soft").fit(X, y)
        each = [member.predict_proba(X) for member in voting.estimators_]
        np.testing.assert_allclose(voting.predict_proba(X), np.mean(each, 0))
        assert not np.allclose(each[0], each[1])


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
