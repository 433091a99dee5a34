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
    neg_quantile_crps_scorer,
    neg_weighted_interval_score_scorer,
    quantile_crps,
    weighted_interval_score,
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


@pytest.mark.parametrize(
    ("scorer", "metric", "n_levels"),
    [
        (neg_quantile_crps_scorer, quantile_crps, 100),
        (neg_weighted_interval_score_scorer, weighted_interval_score, 23),
    ],
)
def test_scorers_of_quantiles(scorer, metric, n_levels):
    X, y = make_regression(60, 3, noise=5, random_state=0)
    fixed = {"prior_precision": 1.0, "sigma_noise": 5.0, "residual": "none"}
    model = LaplaceRegressor(**fixed, random_state=0)
    model = make_pipeline(StandardScaler(), model).fit(X, y)
    levels = (np.arange(100) + 0.5) / 100
    if n_levels == 23:
        levels = np.r_[0.01, 0.025, np.arange(5, 100, 5) / 100, 0.975, 0.99]
    quantiles = model[-1].predict_quantiles(model[:-1].transform(X), levels)
    weights = np.arange(60.0)
    assert scorer(model, X, y) == -metric(y, quantiles, levels)
    weighted = -metric(y, quantiles, levels, sample_weight=weights)
    assert scorer(model, X, y, weights) == weighted
    # the noise is Gaussian here
    mean, std = model.predict(X, return_std=True)
    assert scorer(model, X, y) == pytest.approx(-gaussian_crps(y, mean, std), rel=0.15)
    with pytest.raises(ValueError, match="should be a 1d array"):
        scorer(model, X, np.c_[y, y])


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
