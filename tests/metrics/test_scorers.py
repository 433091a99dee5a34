import numpy as np
import pytest
from sklearn.datasets import make_regression
from sklearn.linear_model import BayesianRidge, LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklaplace.metrics import gaussian_nll, neg_gaussian_nll_scorer


def test_scorer_is_minus_the_nll():
    X, y = make_regression(60, 3, noise=5, random_state=0)
    model = make_pipeline(StandardScaler(), BayesianRidge()).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    weights = np.arange(60.0)
    assert neg_gaussian_nll_scorer(model, X, y) == -gaussian_nll(y, mean, std)
    weighted = -gaussian_nll(y, mean, std, sample_weight=weights)
    assert neg_gaussian_nll_scorer(model, X, y, weights) == weighted


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
