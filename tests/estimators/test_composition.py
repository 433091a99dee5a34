"""Composition: the estimators inside scikit-learn's tools, copied and stored."""

import warnings

import numpy as np
import pytest
from nets import blobs, classifier, regressor, seeded, waves
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import VotingClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score

from sklaplace import LaplaceClassifier, LaplaceRegressor


@pytest.fixture(scope="module")
def rows():
    return blobs()


@pytest.fixture(scope="module")
def net(rows):
    return seeded(classifier(), *rows)


# -------------------------------------------------------------------------- tools


GRID = {"prior_precision": [1e-4, 1.0, 1e4], "temperature": [0.5, 2.0]}


class TestSearch:
    @pytest.mark.slow
    @pytest.mark.parametrize("frozen", [True, False])
    def test_grid(self, frozen, rows, net):
        estimator = FrozenEstimator(net) if frozen else classifier(max_epochs=5)
        model = LaplaceClassifier(estimator, random_state=0)
        scored = {"scoring": "neg_log_loss", "cv": 3}
        search = GridSearchCV(model, GRID, n_jobs=2, error_score="raise", **scored)
        scores = search.fit(*rows).cv_results_["mean_test_score"]
        assert len(np.unique(scores)) == 6
        best = search.best_params_["prior_precision"]
        assert search.best_estimator_.prior_precision_ == best
        # a shared or lost posterior would give the score of another candidate
        for params, score in zip(search.cv_results_["params"], scores, strict=True):
            own = cross_val_score(clone(model).set_params(**params), *rows, **scored)
            # workers may run torch with other numbers of threads, in float32
            assert own.mean() == pytest.approx(score, rel=1e-4)


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

    @pytest.mark.filterwarnings("ignore:There are no rows that the network did not")
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
    shown = [w for w in shown if "sigma_noise comes from" in str(w.message)]
    assert [w.filename for w in shown] == [__file__]
