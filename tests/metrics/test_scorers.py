import numpy as np
import pytest
from sklearn.datasets import load_iris, make_regression
from sklearn.linear_model import BayesianRidge, LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklaplace import LaplaceRegressor
from sklaplace.metrics import (
    area_under_risk_coverage,
    expected_calibration_error,
    gaussian_crps,
    gaussian_nll,
    interval_score,
    neg_area_under_risk_coverage_scorer,
    neg_expected_calibration_error_scorer,
    neg_gaussian_crps_scorer,
    neg_gaussian_nll_scorer,
    neg_interval_score_scorer,
)


@pytest.mark.parametrize(
    ("scorer", "metric"),
    [
        (neg_gaussian_nll_scorer, gaussian_nll),
        (neg_gaussian_crps_scorer, gaussian_crps),
    ],
)
def test_scorers_are_minus_the_metric(scorer, metric):
    X, y = make_regression(60, 3, noise=5, random_state=0)
    model = make_pipeline(StandardScaler(), BayesianRidge()).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    weights = np.arange(60.0)
    assert scorer(model, X, y) == -metric(y, mean, std)
    weighted = -metric(y, mean, std, sample_weight=weights)
    assert scorer(model, X, y, weights) == weighted


def test_scorer_of_intervals():
    X, y = make_regression(60, 3, noise=5, random_state=0)
    fixed = {"prior_precision": 1.0, "sigma_noise": 5.0, "residual": "none"}
    model = LaplaceRegressor(**fixed, random_state=0)
    model = make_pipeline(StandardScaler(), model).fit(X, y)
    interval = model[-1].predict_interval(model[:-1].transform(X), coverage=0.9)
    expected = -interval_score(y, interval, coverage=0.9)
    assert neg_interval_score_scorer(model[-1], model[:-1].transform(X), y) == expected
    assert neg_interval_score_scorer(model, X, y) == expected
    outer = make_pipeline("passthrough", model)
    assert neg_interval_score_scorer(outer, X, y) == expected
    grid = {"laplaceregressor__prior_precision": [1.0]}
    search = GridSearchCV(model, grid, cv=2).fit(X, y)
    assert neg_interval_score_scorer(search, X, y) == expected


def test_scorers_of_classifiers_know_classes_that_a_fold_lacks():
    X, y = load_iris(return_X_y=True)
    names = np.array(["a", "b", "c"])[y]
    model = LogisticRegression(max_iter=1000).fit(X, names)
    proba, rows = model.predict_proba(X), y < 2
    found = neg_expected_calibration_error_scorer(model, X[rows], names[rows])
    options = {"labels": model.classes_}
    expected = -expected_calibration_error(names[rows], proba[rows], **options)
    assert found == expected
    losses, confidence = model.predict(X) != names, proba.max(axis=1)
    assert losses.any()
    found = neg_area_under_risk_coverage_scorer(model, X, names, y)
    expected = -area_under_risk_coverage(losses, confidence, sample_weight=y)
    assert found == expected


def test_scorer_guides_a_grid_search():
    X, y = make_regression(60, 3, noise=5, random_state=0)
    grid = {"lambda_init": [1e-3, 1e9], "max_iter": [1]}
    search = GridSearchCV(BayesianRidge(), grid, scoring=neg_gaussian_nll_scorer)
    search.fit(X, y)
    assert search.best_params_["lambda_init"] == 1e-3
    assert search.best_score_ == max(search.cv_results_["mean_test_score"])


def test_scorer_needs_standard_deviations():
    X, y = make_regression(10, 1, random_state=0)
    with pytest.raises(TypeError, match="return_std"):
        neg_gaussian_nll_scorer(LinearRegression().fit(X, y), X, y)


def test_selective_prediction_takes_one_label_per_sample():
    X, y = load_iris(return_X_y=True)
    model = LogisticRegression(max_iter=1000).fit(X, y)
    with pytest.raises(ValueError, match="should be a 1d array"):
        neg_area_under_risk_coverage_scorer(model, X, np.c_[y, y])
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        neg_area_under_risk_coverage_scorer(model, X, y[:10])
