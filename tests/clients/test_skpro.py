"""skpro: predictive distributions, given by quantiles, and their scores."""

import numpy as np
import pytest
from nets import MLP, regressor
from scipy.stats import norm
from sklearn.base import clone
from sklearn.datasets import make_friedman1
from sklearn.model_selection import KFold

from sklaplace import LaplaceRegressor

pd = pytest.importorskip("pandas")
pytest.importorskip("skpro")

from skpro.distributions import QPD_Empirical  # noqa: E402
from skpro.metrics import CRPS  # noqa: E402
from skpro.model_selection import GridSearchCV  # noqa: E402
from skpro.regression.base import BaseProbaRegressor  # noqa: E402
from skpro.regression.dummy import DummyProbaRegressor  # noqa: E402


class QuantileRegressor(BaseProbaRegressor):
    """A regressor of skpro that predicts quantiles of a regressor of sklaplace."""

    _tags = {"capability:multioutput": True}  # noqa: RUF012

    def __init__(self, estimator, n_quantiles=99):
        self.estimator, self.n_quantiles = estimator, n_quantiles
        super().__init__()

    def _fit(self, X, y):
        targets = y.to_numpy().squeeze()  # one column becomes a vector
        self.estimator_ = clone(self.estimator).fit(X, targets)
        self.columns_ = y.columns
        return self

    def _table(self, values, index):
        return pd.DataFrame(values.reshape(len(index), -1), index, self.columns_)

    def _predict(self, X):
        return self._table(self.estimator_.predict(X), X.index)

    def _predict_var(self, X):
        _, std = self.estimator_.predict(X, return_std=True)
        return self._table(std**2, X.index)

    def _predict_quantiles(self, X, alpha):
        values = self.estimator_.predict_quantiles(X, alpha).reshape(len(X), -1)
        columns = pd.MultiIndex.from_product([self.columns_, alpha])
        return pd.DataFrame(values, X.index, columns)

    def _predict_proba(self, X):
        levels = (np.arange(self.n_quantiles) + 0.5) / self.n_quantiles
        values = np.moveaxis(self.estimator_.predict_quantiles(X, levels), -1, 0)
        quantiles = self._table(values, pd.MultiIndex.from_product([levels, X.index]))
        return QPD_Empirical(quantiles, index=X.index, columns=self.columns_)


@pytest.fixture(scope="module")
def samples():
    """Return features and targets of training and of test samples, as data frames."""
    X, y = make_friedman1(300, n_features=5, noise=1.0, random_state=0)
    X = pd.DataFrame(X, columns=list("abcde"), index=range(1000, 1300))
    y = pd.DataFrame({"y": y, "twice": 2 * y}, X.index)
    return X[:200], y[:200], X[200:], y[200:]


def wrapped(n_out=1, **settings):
    sizes = {"module__n_in": 5, "module__n_out": n_out, "module__width": 20}
    net = regressor(MLP, **sizes, max_epochs=200)
    fixed = {"sigma_noise": 1.0, "residual": "none", "prior_precision": 10.0}
    fixed |= {"normalize_y": True, "random_state": 0}
    return QuantileRegressor(LaplaceRegressor(net, **fixed), **settings)


def test_score_is_that_of_the_normal_distribution(samples):
    """With a noise level and without a residual, the distributions are normal."""
    X, y, X_test, y_test = samples
    model = wrapped().fit(X, y[["y"]])
    distribution = model.predict_proba(X_test)
    mean, std = model.estimator_.predict(X_test, return_std=True)
    z = (y_test["y"].to_numpy() - mean) / std
    expected = std * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - np.pi**-0.5)
    found = CRPS(multivariate=True).evaluate_by_index(y_test[["y"]], distribution)
    # scores differ by at most twice the Wasserstein distance of the distributions,
    # the integral of the difference of quantiles
    u = (np.arange(99_000) + 0.5) / 99_000
    nearest = norm.ppf((u * 99 // 1 + 0.5) / 99)
    distance = std * np.abs(norm.ppf(u) - nearest).mean()
    assert (np.abs(found.to_numpy().ravel() - expected) <= 2 * distance).all()
    assert (distance < 0.03 * std).all()


@pytest.mark.parametrize("columns", [["y"], ["y", "twice"]], ids=["one", "two"])
def test_predictions_are_ours(samples, columns):
    X, y, X_test, _ = samples
    model = wrapped(len(columns), n_quantiles=19).fit(X, y[columns])
    ours, shape = model.estimator_, (100, len(columns))
    mean, std = (part.reshape(shape) for part in ours.predict(X_test, return_std=True))
    tables = model.predict(X_test), model.predict_var(X_test)
    distribution = model.predict_proba(X_test)
    for found in (*tables, distribution.mean()):
        assert found.index.equals(X_test.index)
        assert list(found.columns) == columns
    np.testing.assert_array_equal(tables[0], mean)
    np.testing.assert_allclose(tables[1], std**2)
    bounds = model.predict_interval(X_test, 0.9)
    expected = ours.predict_interval(X_test, 0.9).reshape(100, -1, 2)
    for index, name in enumerate(columns):
        np.testing.assert_allclose(bounds[name][0.9], expected[:, index], rtol=1e-6)
    # the tenth of 19 levels is the median
    medians = ours.predict_quantiles(X_test, 0.5).reshape(shape)
    np.testing.assert_allclose(distribution.ppf(0.5), medians)


def test_search_by_the_score(samples, figure):
    X, y, X_test, y_test = samples
    grid = {"estimator__sigma_noise": [0.01, 1.0, 100.0]}
    search = GridSearchCV(
        wrapped(), KFold(2), grid, scoring=CRPS(), error_score="raise"
    )
    search.fit(X, y[["y"]])
    assert search.best_params_ == {"estimator__sigma_noise": 1.0}
    baseline = DummyProbaRegressor().fit(X, y[["y"]])
    ours, without_inputs = (
        CRPS()(y_test[["y"]], model.predict_proba(X_test))
        for model in (search, baseline)
    )
    assert ours < without_inputs
    figure(crps=ours, without_inputs=without_inputs)
