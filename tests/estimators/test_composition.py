"""Composition: the estimators inside scikit-learn's tools, copied and stored."""

import copy
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from nets import blobs, classifier, regressor, seeded, waves
from sklearn import config_context
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import BaggingClassifier, VotingClassifier
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import (
    GridSearchCV,
    KFold,
    RandomizedSearchCV,
    cross_val_predict,
    cross_val_score,
)
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklaplace import LaplaceClassifier, LaplaceRegressor

ESTIMATORS = [LaplaceClassifier, LaplaceRegressor]
FIXED = {"prior_precision": 1.0, "random_state": 0}
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def rows():
    return blobs()


@pytest.fixture(scope="module")
def net(rows):
    return seeded(classifier(), *rows)


FIXED = {"prior_precision": 1.0, "random_state": 0}


@pytest.fixture(scope="module")
def models(rows, net):
    """An estimator of each kind, with rows: of the last layer and of all."""
    X, y = waves()
    numbers = FrozenEstimator(seeded(regressor(), X, y[:, None]))
    frozen = FrozenEstimator(net)
    everything = {"subset_of_weights": "all", "hessian_structure": "full"}
    refitted = {"prior_precision": "marglik", "refine": True, "random_state": 0}
    made = {
        "last_layer": LaplaceClassifier(frozen, **FIXED),
        "all": LaplaceClassifier(frozen, **FIXED, **everything),
        "refitted": LaplaceClassifier(frozen, **refitted),
        "trained": LaplaceClassifier(classifier(), random_state=0),
        "default": LaplaceClassifier(random_state=0),
    }
    found = {name: (model, *rows) for name, model in made.items()}
    regression = LaplaceRegressor(numbers, sigma_noise=0.2, **FIXED), X, y
    return found | {"regressor": regression}


KINDS = ["last_layer", "all", "refitted", "trained", "default", "regressor"]


@pytest.fixture(params=KINDS)
def fitted(request, models):
    model, X, y = models[request.param]
    if not hasattr(model, "posterior_"):
        model.fit(X, y)
    return model, X, y


def answers(model, X):
    """All that depends on network, posterior or seed."""
    found = list(model.latent_mean_and_variance(X))
    found += [np.array(model.log_marginal_likelihood())]
    if isinstance(model, LaplaceClassifier):
        return [*found, model.predict_proba(X), model.sample_proba(X, 2)]
    return [*found, *model.predict(X, return_cov=True), model.sample_y(X, 2)]


def assert_same_answers(model, X, expected, rtol=1e-12):
    for found, wanted in zip(answers(model, X), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=1e-14)


def spoil(model):
    """Overwrite network and posterior in place."""
    kept = tensors(model.posterior_)
    assert len(kept) >= 5
    with torch.no_grad():
        for value in [*model.estimator_.module_.parameters(), *kept]:
            value.fill_(torch.nan)


def tensors(value, depth=0):
    """Every tensor in nested dataclasses, tuples and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth > 8:
        return []
    if isinstance(value, tuple | list):
        return [t for entry in value for t in tensors(entry, depth + 1)]
    if hasattr(value, "__dataclass_fields__"):
        return [t for v in vars(value).values() for t in tensors(v, depth + 1)]
    return []


# ------------------------------------------------------------- copies and storage
class TestCopies:
    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
    )
    def test_answer_alike_and_share_nothing(self, duplicate, fitted):
        model, X, _ = fitted
        expected = answers(model, X)
        twin = duplicate(model)
        assert_same_answers(twin, X, expected)
        spoil(twin)
        assert_same_answers(model, X, expected, rtol=0)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy])
    def test_refit_leaves_the_original_alone(self, duplicate, fitted):
        model, X, y = fitted
        expected = answers(model, X)
        twin = duplicate(model).set_params(prior_precision=123.0)
        twin.fit(X, y)
        assert twin.prior_precision_ == 123.0
        assert_same_answers(model, X, expected, rtol=0)

    def test_joblib_file(self, fitted, tmp_path):
        model, X, _ = fitted
        expected = answers(model, X)
        joblib.dump(model, tmp_path / "model.joblib")
        assert_same_answers(joblib.load(tmp_path / "model.joblib"), X, expected)

    @pytest.mark.slow  # another process
    def test_other_process(self, models, tmp_path):
        model, X, y = models["last_layer"]
        expected = model.fit(X, y).predict_proba(X)
        joblib.dump((model, X), tmp_path / "model.joblib")
        program = (
            "import sys, joblib, numpy as np; sys.path.insert(0, sys.argv[1])\n"
            "model, X = joblib.load(sys.argv[2] + '/model.joblib')\n"
            "np.save(sys.argv[2] + '/proba.npy', model.predict_proba(X))"
        )
        command = [sys.executable, "-c", program, str(TESTS), str(tmp_path)]
        subprocess.run(command, check=True, timeout=120)
        found = np.load(tmp_path / "proba.npy")
        # threads may differ there, hence sums in another order, in float32
        np.testing.assert_allclose(found, expected, atol=1e-6)

    def test_unfitted(self):
        model = pickle.loads(pickle.dumps(LaplaceClassifier(temperature=2.0)))
        assert model.temperature == 2.0
        with pytest.raises(NotFittedError):
            model.predict(np.ones((1, 2)))

    def test_pickle_is_not_much_larger_than_its_parts(self, fitted):
        model, _, _ = fitted
        parts = sum(t.numel() * t.element_size() for t in tensors(model.posterior_))
        net = len(pickle.dumps(model.estimator_))
        # the frozen net given and the copy in use, and the posterior
        assert len(pickle.dumps(model)) < 3 * net + 3 * parts + 50_000


class TestClone:
    def test_is_unfitted_with_equal_parameters(self, fitted):
        model, _, _ = fitted
        twin = clone(model)
        assert not hasattr(twin, "posterior_")
        params = model.get_params(deep=False)
        for name, value in twin.get_params(deep=False).items():
            if name != "estimator":
                assert value == params[name] or value is params[name]

    @pytest.mark.parametrize("kind", ["last_layer", "trained"])
    def test_fits_alike(self, models, kind):
        """With the weights of a frozen net, or trained again."""
        model, X, y = models[kind]
        expected = answers(model.fit(X, y), X)
        assert_same_answers(clone(model).fit(X, y), X, expected)

    def test_set_params_reaches_the_net(self, rows):
        model = LaplaceClassifier(classifier(max_epochs=1), random_state=0)
        model.set_params(estimator__max_epochs=3, temperature=0.5)
        assert model.fit(*rows).n_iter_ == 3


# -------------------------------------------------------------------------- tools
class TestPipeline:
    @pytest.mark.parametrize("kind", ESTIMATORS)
    @pytest.mark.parametrize("own", [True, False])
    def test_scaler_in_front(self, kind, own):
        classifies = kind is LaplaceClassifier
        X, y = blobs() if classifies else waves()
        X = X.astype(np.float64) * [1.0, 1e4]
        net = classifier() if classifies else regressor()
        model = kind(net if own else None, random_state=0)
        pipeline = make_pipeline(StandardScaler(), clone(model)).fit(X, y)
        scaled = StandardScaler().fit_transform(X)
        expected = model.fit(scaled, y).predict(scaled)
        np.testing.assert_allclose(pipeline.predict(X), expected, rtol=1e-9)

    def test_passes_keywords_of_predict(self):
        X, y = waves()
        pipeline = make_pipeline(StandardScaler(), LaplaceRegressor(random_state=0))
        mean, std = pipeline.fit(X, y).predict(X, return_std=True)
        assert mean.shape == std.shape == (60,)

    @pytest.mark.slow
    def test_frames_and_weights_by_routing(self, rows):
        X, y = rows
        table = pd.DataFrame(X, columns=["a", "b"])
        weights = np.linspace(0.1, 2, 60)
        with config_context(enable_metadata_routing=True):
            model = LaplaceClassifier(random_state=0)
            model.set_fit_request(sample_weight=True)
            model.set_score_request(sample_weight=True)
            scaler = StandardScaler().set_fit_request(sample_weight=False)
            pipeline = make_pipeline(scaler, model)
            params = {"sample_weight": weights}
            pipeline.fit(table, y, **params)
            scores = cross_val_score(pipeline, table, y, cv=2, params=params)
        direct = LaplaceClassifier(random_state=0)
        scaled = StandardScaler().fit_transform(X)
        direct.fit(scaled, y, sample_weight=weights)
        np.testing.assert_allclose(
            pipeline[-1].latent_mean_and_variance(scaled)[0],
            direct.latent_mean_and_variance(scaled)[0],
            rtol=1e-6,  # float32 input, scaled in one or two steps
        )
        assert np.isfinite(scores).all()


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

    def test_leaves_the_frozen_net_alone(self, rows, net):
        before = [p.detach().clone() for p in net.module_.parameters()]
        GridSearchCV(LaplaceClassifier(FrozenEstimator(net)), GRID, cv=2).fit(*rows)
        for found, expected in zip(net.module_.parameters(), before, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "grid",
        [
            {"hessian_structure": ["kron", "diag", "full"]},
            {"subset_of_weights": ["all", "last_layer"], "prior_precision": [1.0]},
            {"link_approx": ["probit", "mc", "mean_field"]},
            {"prior_precision": ["marglik", 1.0]},
            {"refine": np.array([True, False]), "prior_precision": ["marglik"]},
            {"estimator__lr": [0.01, 0.1], "estimator__module__width": [3, 5]},
        ],
    )
    def test_every_kind_of_option(self, grid, rows):
        model = LaplaceClassifier(classifier(max_epochs=5), random_state=0)
        scored = {"scoring": "neg_log_loss", "error_score": "raise"}
        search = GridSearchCV(model, grid, cv=2, **scored).fit(*rows)
        n = len(search.cv_results_["params"])
        assert len(np.unique(search.cv_results_["mean_test_score"])) == n

    def test_random_search_of_a_regressor(self):
        model = LaplaceRegressor(regressor(max_epochs=5), random_state=0)
        grid = {"prior_precision": np.logspace(-2, 2, 20), "sigma_noise": [0.1, 0.3]}
        settings = {"n_iter": 3, "cv": 2, "random_state": 0, "error_score": "raise"}
        search = RandomizedSearchCV(model, grid, **settings).fit(*waves())
        found = search.best_estimator_.prior_precision_
        assert found == search.best_params_["prior_precision"]


class TestCrossValidation:
    @pytest.mark.slow
    def test_predictions_are_those_of_the_folds(self, rows):
        X, y = rows
        folds = KFold(3, shuffle=True, random_state=0)
        model = LaplaceClassifier(classifier(), random_state=0)
        found = cross_val_predict(model, X, y, cv=folds, method="predict_proba")
        for train, test in folds.split(X):
            own = clone(model).fit(X[train], y[train]).predict_proba(X[test])
            np.testing.assert_allclose(found[test], own, rtol=1e-12)

    def test_scores(self, rows):
        model = LaplaceClassifier(classifier(), random_state=0)
        scores = cross_val_score(model, *rows, cv=3)
        assert scores.mean() > 0.6
        assert not hasattr(model, "posterior_")


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

    def test_calibration_of_a_fitted_model(self, models):
        model, X, y = models["last_layer"]
        expected = answers(model.fit(X, y), X)
        CalibratedClassifierCV(FrozenEstimator(model), method="sigmoid").fit(X, y)
        assert_same_answers(model, X, expected, rtol=0)

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

    @pytest.mark.slow
    def test_bagging(self, rows):
        X, y = rows
        model = LaplaceClassifier(classifier(max_epochs=5))
        bagging = BaggingClassifier(model, 3, random_state=0).fit(X, y)
        members = zip(bagging.estimators_, bagging.estimators_features_, strict=True)
        each = [member.predict_proba(X[:, features]) for member, features in members]
        assert not np.allclose(each[0], each[1])
        expected = np.mean(each, 0)
        np.testing.assert_allclose(bagging.predict_proba(X), expected, atol=1e-6)

    def test_one_regressor_per_target(self):
        X, Y = waves(n_targets=2)
        model = LaplaceRegressor(regressor(), random_state=0)
        both = MultiOutputRegressor(model).fit(X, Y)
        means = [member.predict(X) for member in both.estimators_]
        np.testing.assert_array_equal(both.predict(X), np.stack(means, 1))
        assert not np.allclose(*means)


class TestDisplay:
    def test_text_and_html(self, fitted):
        model, _, _ = fitted
        assert repr(model).startswith(type(model).__name__)
        assert type(model).__name__ in model._repr_html_()

    def test_default_parameters_are_not_printed(self):
        assert repr(LaplaceClassifier()) == "LaplaceClassifier()"
        assert repr(LaplaceRegressor(refine=False)) == "LaplaceRegressor(refine=False)"

    def test_verbose_reports_something(self, capsys, rows):
        LaplaceClassifier(random_state=0).fit(*rows)
        assert capsys.readouterr().out == ""
        LaplaceClassifier(random_state=0, verbose=1).fit(*rows)
        assert "prior" in capsys.readouterr().out


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
