"""Metadata routing: weights and held-out samples in scikit-learn's tools."""

from contextlib import nullcontext

import numpy as np
import pytest
from nets import blobs, classifier, regressor, waves
from numpy.testing import assert_array_equal
from sklearn import config_context
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklaplace import (
    LaplaceClassifier,
    LaplaceRegressor,
    LaplaceRegressorCV,
    SWAGClassifier,
)

X, Y = blobs()
X_VAL, Y_VAL = X[:30] + np.float32(0.1), Y[:30]
WEIGHTS = np.linspace(0.1, 2, 60)
HELD_OUT = {"X_val": X_VAL, "y_val": Y_VAL}
REQUESTED = {"sample_weight": True, "X_val": True, "y_val": True}


@pytest.fixture(autouse=True)
def routing():
    with config_context(enable_metadata_routing=True):
        yield


@pytest.fixture
def model():
    net = classifier(max_epochs=5)
    model = LaplaceClassifier(net, prior_precision="validation", random_state=0)
    return model.set_fit_request(**REQUESTED).set_score_request(sample_weight=True)


def assert_same_fit(found, expected, rows=X):
    assert found.prior_precision_ == expected.prior_precision_
    assert_array_equal(found.predict_proba(rows), expected.predict_proba(rows))


def test_pipeline_transforms_held_out_samples(model):
    """The pipeline transforms only the samples that `transform_input` names."""
    data, scaler = (100 * X, Y), StandardScaler().set_fit_request(sample_weight=False)
    held_out = {"X_val": 100 * X_VAL, "y_val": Y_VAL}
    pipeline = make_pipeline(scaler, model, transform_input=["X_val"])
    found = pipeline.fit(*data, sample_weight=WEIGHTS, **held_out)[-1]
    held_out["X_val"] = scaler.transform(held_out["X_val"])
    rows = scaler.transform(data[0])
    expected = clone(model).fit(rows, Y, sample_weight=WEIGHTS, **held_out)
    assert_same_fit(found, expected, rows)


@pytest.mark.slow
def test_grid_search_splits_weights_and_keeps_held_out_samples_whole(model):
    grid, folds = {"temperature": [0.5, 2.0]}, KFold(2)
    search = GridSearchCV(model, grid, cv=folds, error_score="raise")
    search.fit(X, Y, sample_weight=WEIGHTS, **HELD_OUT)
    expected = clone(search.best_estimator_)
    expected.fit(X, Y, sample_weight=WEIGHTS, **HELD_OUT)
    assert_same_fit(search.best_estimator_, expected)
    for number, (train, test) in enumerate(folds.split(X)):
        own = clone(model).set_params(temperature=0.5)
        own.fit(X[train], Y[train], sample_weight=WEIGHTS[train], **HELD_OUT)
        score = own.score(X[test], Y[test], sample_weight=WEIGHTS[test])
        assert search.cv_results_[f"split{number}_test_score"][0] == score


GROUPS = np.arange(60) // 3


def test_groups_through_a_pipeline_and_cross_validation():
    model = LaplaceClassifier(classifier(max_epochs=5), random_state=0)
    pipeline = make_pipeline(StandardScaler(), model.set_fit_request(groups=True))
    rows = StandardScaler().fit_transform(X)
    expected = clone(model).fit(rows, Y, groups=GROUPS)
    found = pipeline.fit(X, Y, groups=GROUPS)[-1]
    assert_same_fit(found, expected, rows)
    assert found.prior_precision_ != clone(model).fit(rows, Y).prior_precision_
    folds, given = GroupKFold(2), {"groups": GROUPS}
    options = {"return_estimator": True, "params": given, "error_score": "raise"}
    found = cross_validate(pipeline, X, Y, cv=folds, **options)["estimator"]
    for fitted, (train, _) in zip(found, folds.split(X, Y, GROUPS), strict=True):
        rows = StandardScaler().fit_transform(X[train])
        expected = clone(model).fit(rows, Y[train], groups=GROUPS[train])
        assert_same_fit(fitted[-1], expected, rows)


@pytest.mark.parametrize("kind", [LaplaceClassifier, SWAGClassifier])
def test_groups_of_held_out_samples_through_a_pipeline(kind):
    held_out = {**HELD_OUT, "groups_val": np.arange(30) // 3}
    model = kind(classifier(max_epochs=2)).set_fit_request(
        **dict.fromkeys(held_out, True)
    )
    make_pipeline(StandardScaler(), model).fit(X, Y, **held_out)
    held_out["groups_val"] = np.arange(3)
    with pytest.raises(ValueError, match=r"groups_val has shape \(3,\)"):
        make_pipeline(StandardScaler(), model).fit(X, Y, **held_out)


@pytest.mark.parametrize(
    "cv", [None, pytest.param(4, marks=pytest.mark.slow), GroupKFold(3)]
)
def test_groups_are_passed_to_folds_of_a_search(cv):
    net, grid = regressor(max_epochs=2), [0.1, 10.0]
    data, n = waves(), {None: 5, 4: 4}.get(cv, 3)
    search = LaplaceRegressorCV(net, prior_precisions=grid, cv=cv, random_state=0)
    search.set_params(sigma_noise=0.3).fit(*data, groups=GROUPS)
    splits = list(GroupKFold(n).split(*data, GROUPS))
    expected = clone(search).set_params(cv=splits).fit(*data, groups=GROUPS)
    scores = (s.cv_results_["mean_test_score"] for s in (search, expected))
    assert_array_equal(*scores)
    assert search.n_splits_ == n


# ------------------------------------------------- held-out samples in other units
UNSCALED = "columns of X_val is far outside the range of X"


@pytest.mark.parametrize("named", [True, False])
def test_untransformed_held_out_samples_are_warned_of(model, named):
    held_out = {"X_val": 100 * X_VAL, "y_val": Y_VAL}
    settings = {"transform_input": ["X_val"]} if named else {}
    scaler = StandardScaler().set_fit_request(sample_weight=False)
    pipeline = make_pipeline(scaler, model, **settings)
    with pytest.warns(UserWarning, match=UNSCALED) if not named else nullcontext():
        pipeline.fit(100 * X, Y, **held_out)


@pytest.mark.parametrize(("shift", "warns"), [(0.9, False), (1.6, True)])
def test_ranges_of_held_out_samples_may_differ(shift, warns):
    """A column's median may exceed the training range by at most half the range."""
    X, y = waves()
    other = np.full_like(X[:9], 0.0)
    other[:, 0] = X[:, 0].min() + shift * np.ptp(X[:, 0])
    model = LaplaceRegressor(regressor(), random_state=0)
    with pytest.warns(UserWarning, match="1 of 2 columns") if warns else nullcontext():
        model.fit(X, y, X_val=other, y_val=y[:9])


def test_held_out_labels_that_cannot_be_predicted_are_warned_of(model):
    """The warning does not depend on the link; the labels are equally probable."""
    y_val = np.random.default_rng(0).permutation(Y_VAL)
    for link in ("bridge", "mc"):
        clone_ = clone(model).set_params(link_approx=link)
        with pytest.warns(UserWarning, match="better than equal class probabilities"):
            clone_.fit(X, Y, X_val=X_VAL, y_val=y_val)
        assert np.abs(clone_.predict_proba(X) - 1 / 3).max() < 0.1
