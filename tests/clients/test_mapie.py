"""MAPIE: conformal intervals and sets, and a martingale that detects drift."""

import numpy as np
import pytest
from nets import regressor as skorch_regressor
from scipy import stats
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.model_selection import KFold

from examples import functions_of
from sklaplace import LaplaceRegressor

regression = pytest.importorskip("mapie.regression")
classification = pytest.importorskip("mapie.classification")
scores = pytest.importorskip("mapie.conformity_scores")
testing = pytest.importorskip("mapie.exchangeability_testing")

# three standard deviations of a coverage of .9 from 450 and on 600 samples
TOLERANCE = 3 * np.sqrt(0.9 * 0.1 * (1 / 450 + 1 / 600))


class Quantile(RegressorMixin, BaseEstimator):
    """A regressor that predicts one quantile of a fitted `LaplaceRegressor`."""

    def __init__(self, model, alpha):
        self.model, self.alpha = model, alpha

    @property
    def n_features_in_(self):
        """Return the number of features, which tells MAPIE that the model is fitted."""
        return self.model.n_features_in_

    def fit(self, X, y):
        raise NotImplementedError  # the model is fitted

    def predict(self, X):
        return self.model.predict_quantiles(X, self.alpha)


class Deviation(Quantile):
    """A regressor that predicts a fitted `LaplaceRegressor`'s standard deviation."""

    def predict(self, X):
        return self.model.predict(X, return_std=True)[1]


class Monitor:
    """A test of whether new rows are exchangeable with rows held out from training."""

    def __init__(self, model, X_held_out, level=0.01):
        self.model, self.scores = model, list(model.score_samples(X_held_out))
        self.test = testing.OnlineMartingaleTest(test_level=level, random_state=0)

    def update(self, X):
        """Return whether there has been an alarm, up to the last row of X."""
        for score in self.model.score_samples(X):
            p_value = self.test.compute_p_value(score, self.scores)
            self.test.update_simple_jumper_martingale(p_value)
            self.scores.append(score)
        return max(self.test.martingale_value_history) > self.test.reject_threshold


def covered(bounds, y):
    return (bounds[:, 0, 0] <= y) & (y <= bounds[:, 1, 0])


def coverage_where_noisy(conformal, numbers):
    """Return the coverage on all test samples, and on the noisiest third."""
    conformal.conformalize(*numbers.cal)
    X, y = numbers.test
    inside = covered(conformal.predict_interval(X)[1], y)
    return inside.mean(), inside[np.abs(X[:, 0]) > 2].mean()


@pytest.mark.parametrize("n_samples", [10, 19, 20, 137])
def test_split_conformal_intervals_of_the_table_of_methods(numbers, n_samples):
    X, y = (part[:n_samples] for part in numbers.cal)
    conformal = regression.SplitConformalRegressor(
        numbers.model, confidence_level=0.9, prefit=True
    ).conformalize(X, y)
    mean, bounds = conformal.predict_interval(numbers.test[0])
    ours = functions_of("studies/plot_trust.py")["conformal_half_width"]
    (half,) = ours((y - numbers.model.predict(X)).reshape(-1, 1))
    expected = np.stack([mean - half, mean + half], axis=1)
    np.testing.assert_allclose(bounds[:, :, 0], expected, rtol=1e-6, atol=1e-6)


def test_too_few_residuals_for_the_coverage_have_infinite_intervals():
    ours = functions_of("studies/plot_trust.py")["conformal_half_width"]
    residuals = np.arange(16.0).reshape(8, 2)
    assert np.isinf(ours(residuals)).all()
    assert ours(residuals, coverage=0.5).tolist() == [8, 9]


def test_intervals_by_residuals_and_by_our_deviations(numbers, figure):
    settings = {"confidence_level": 0.9, "prefit": True}
    plain = regression.SplitConformalRegressor(numbers.model, **settings)
    residual = Deviation(numbers.model, None)
    score = scores.ResidualNormalisedScore(residual, prefit=True)
    ours = regression.SplitConformalRegressor(
        numbers.model, conformity_score=score, **settings
    )
    everywhere, noisy = coverage_where_noisy(plain, numbers)
    assert everywhere == pytest.approx(0.9, abs=TOLERANCE)
    assert noisy < 0.85  # as wide as elsewhere
    found, where_noisy = coverage_where_noisy(ours, numbers)
    assert found == pytest.approx(0.9, abs=TOLERANCE)
    assert where_noisy == pytest.approx(0.9, abs=0.06)
    figure(coverage=found, where_noisy=where_noisy, by_residuals=noisy)


def test_conformalised_quantiles(numbers, figure):
    members = [Quantile(numbers.model, alpha) for alpha in (0.05, 0.95, 0.5)]
    conformal = regression.ConformalizedQuantileRegressor(
        members, confidence_level=0.9, prefit=True
    )
    found, where_noisy = coverage_where_noisy(conformal, numbers)
    assert found == pytest.approx(0.9, abs=TOLERANCE)
    assert where_noisy == pytest.approx(0.9, abs=0.06)
    figure(coverage=found, where_noisy=where_noisy)


@pytest.mark.parametrize("score", ["lac", "aps"])
def test_sets_of_classes(score, classes, figure):
    conformal = classification.SplitConformalClassifier(
        classes.model,
        confidence_level=0.9,
        prefit=True,
        conformity_score=score,
        random_state=0,
    )
    conformal.conformalize(*classes.cal)
    X, y = classes.test
    _, sets = conformal.predict_set(X)
    found = sets[np.arange(len(y)), y, 0].mean()
    assert found > 0.9 - TOLERANCE  # aps may cover more
    assert sets.sum(1).mean() < 3
    figure(coverage=found, size=sets[..., 0].sum(1).mean())


def test_our_intervals_are_those_of_scores_scaled_by_our_deviations(numbers):
    score = scores.ResidualNormalisedScore(Deviation(numbers.model, None), prefit=True)
    theirs = regression.SplitConformalRegressor(
        numbers.model, confidence_level=0.9, prefit=True, conformity_score=score
    ).conformalize(*numbers.cal)
    expected = theirs.predict_interval(numbers.test[0])[1][:, :, 0]
    ours = numbers.model.conformalize(*numbers.cal)
    found = ours.predict_interval(numbers.test[0], 0.9, method="conformal")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_our_intervals_by_folds_are_theirs_for_constant_noise(numbers):
    net = skorch_regressor(module__n_in=1, max_epochs=10)
    fixed = {"prior_precision": 1e12, "refine": False, "residual": "none"}
    model = LaplaceRegressor(net, sigma_noise=0.5, random_state=0, **fixed)
    (X, y), folds = numbers.train, KFold(3)
    theirs = regression.CrossConformalRegressor(
        model, confidence_level=0.9, method="plus", cv=folds, random_state=0
    ).fit_conformalize(X, y)
    expected = theirs.predict_interval(numbers.test[0])[1][:, :, 0]
    ours = clone(model).fit(X, y).conformalize(X, y, cv=folds)
    found = ours.predict_interval(numbers.test[0], 0.9, method="conformal")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_our_sets_are_theirs_with_the_top_class(classes):
    theirs = classification.SplitConformalClassifier(
        classes.model, confidence_level=0.8, prefit=True, conformity_score="lac"
    ).conformalize(*classes.cal)
    X, _ = classes.test
    expected = theirs.predict_set(X)[1][..., 0]
    expected[np.arange(len(X)), classes.model.predict(X)] = True
    ours = classes.model.conformalize(*classes.cal)
    found = ours.predict_set(X, q=0.2, method="conformal")
    np.testing.assert_array_equal(found, expected)


def test_cross_conformal_intervals_clone_and_fit(numbers):
    net = skorch_regressor(module__n_in=1, max_epochs=10)
    model = LaplaceRegressor(net, sigma_noise=0.5, random_state=0)
    conformal = regression.CrossConformalRegressor(model, cv=3, random_state=0)
    conformal.fit_conformalize(*numbers.train)
    X, y = numbers.test
    assert covered(conformal.predict_interval(X)[1], y).mean() > 0.9 - TOLERANCE


def test_a_martingale_rarely_alarms_without_drift(classes, figure):
    """By Ville's inequality, the probability of an alarm is at most the level."""
    level, n_streams, rng = 0.1, 100, np.random.default_rng(0)
    rows, n_alarms = np.concatenate([classes.cal[0], classes.test[0]]), 0
    for _ in range(n_streams):
        held_out, stream = np.split(rng.permutation(rows)[:600], 2)
        n_alarms += Monitor(classes.model, held_out, level).update(stream)
    assert n_alarms <= stats.binom.ppf(0.999, n_streams, level)
    figure(level=level, alarms=n_alarms / n_streams)


def test_a_martingale_detects_drift(classes, figure):
    monitor = Monitor(classes.model, classes.cal[0])
    before, after = np.split(classes.test[0], 2)
    assert not monitor.update(before)
    after = after + 2.0 * after.std(axis=0)
    delay = next(n for n, row in enumerate(after, 1) if monitor.update(row[None]))
    # a bet multiplies the wealth by at most 1.5, and 1 / level must be reached
    assert np.log(100) / np.log(1.5) < delay < 50
    figure(delay=delay)


def test_the_order_of_calls_does_not_matter_to_a_martingale(classes):
    at_once, one_by_one = (Monitor(classes.model, classes.cal[0]) for _ in range(2))
    X = classes.test[0][:20]
    at_once.update(X)
    for row in X:
        one_by_one.update(row[None])
    np.testing.assert_allclose(
        at_once.test.martingale_value_history,
        one_by_one.test.martingale_value_history,
        rtol=1e-6,
    )
