import numpy as np
import pytest
from scipy import integrate, stats
from sklearn.datasets import make_regression
from sklearn.linear_model import BayesianRidge, LinearRegression
from sklearn.metrics import brier_score_loss
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklaplace.metrics import (
    brier_score,
    expected_calibration_error,
    gaussian_crps,
    gaussian_nll,
    interval_coverage,
    neg_gaussian_nll_scorer,
    ood_auroc,
)

PROBA = np.array([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]])
LABELS = np.array([0, 1, 1, 1])
of_classes = pytest.mark.parametrize(
    "metric", [expected_calibration_error, brier_score]
)
of_gaussians = pytest.mark.parametrize("metric", [gaussian_nll, gaussian_crps])


@pytest.fixture
def gaussians():
    rng = np.random.default_rng(0)
    return rng.normal(size=(6, 2)), rng.normal(size=(6, 2)), rng.gamma(2, size=(6, 2))


# Classification


def test_calibration_error_by_hand():
    # Two bins, (0, .5] empty; one bin of confidence .75 and accuracy 3/4.
    assert expected_calibration_error(LABELS, PROBA, n_bins=2) == pytest.approx(0)
    # Bins of width .1: |1−.9|, |0−.8|, |1−.6|, |1−.7|, one row each.
    error = expected_calibration_error(LABELS, PROBA, n_bins=10)
    assert error == pytest.approx((0.1 + 0.8 + 0.4 + 0.3) / 4)


def test_bins_are_closed_on_the_right():
    proba = [[0.5, 0.5], [0.25, 0.75]]
    # .5 and .75 share no bin when (.25, .5] and (.5, .75] are bins.
    error = expected_calibration_error([0, 0], proba, n_bins=4, labels=[0, 1])
    assert error == pytest.approx((0.5 + 0.75) / 2)


def test_calibrated_predictions_have_small_error():
    rng = np.random.default_rng(0)
    proba = rng.dirichlet(np.ones(3), size=20_000)
    labels = (rng.uniform(size=(20_000, 1)) > proba.cumsum(axis=1)).sum(axis=1)
    # Each of the 15 bins contributes at most a binomial error of √(n_bin/4)/n.
    bound = 3 * 15 * np.sqrt(20_000 / 15 / 4) / 20_000
    assert expected_calibration_error(labels, proba) < bound
    assert expected_calibration_error(labels, np.eye(3)[proba.argmax(1)]) > 0.2


def test_brier_score_by_hand_and_twice_the_binary_one():
    expected = 2 * np.mean([0.1**2, 0.8**2, 0.4**2, 0.3**2])
    assert brier_score(LABELS, PROBA) == pytest.approx(expected)
    assert brier_score_loss(LABELS, PROBA[:, 1]) == pytest.approx(expected / 2)


@of_classes
def test_single_column_is_the_second_class(metric):
    assert metric(LABELS, PROBA[:, 1]) == pytest.approx(metric(LABELS, PROBA))


@of_classes
def test_labels_give_the_order_of_columns(metric):
    names = np.array(["cat", "dog"])
    expected = metric(LABELS, PROBA)
    assert metric(names[LABELS], PROBA) == pytest.approx(expected)
    swapped = metric(names[LABELS], PROBA[:, ::-1], labels=["dog", "cat"])
    assert swapped == pytest.approx(expected)
    assert np.isfinite(metric(["dog"], [[0.2, 0.8]], labels=["cat", "dog"]))
    objects = names[LABELS].astype(object)
    assert metric(objects, PROBA) == pytest.approx(expected)


@of_classes
def test_class_weights_count_rows(metric):
    weights = np.array([2, 1, 0, 3])
    repeated = metric(np.repeat(LABELS, weights), np.repeat(PROBA, weights, axis=0))
    assert metric(LABELS, PROBA, sample_weight=weights) == pytest.approx(repeated)


@of_classes
@pytest.mark.parametrize(
    ("y_true", "y_proba", "options", "message"),
    [
        (LABELS, 5 * PROBA - 2, {}, r"values between -1.5 and 2.5. Give probabilities"),
        (LABELS, PROBA / 2, {}, r"sum to values between 0.5 and 0.5. Divide each row"),
        ([0, 0, 0, 0], PROBA, {}, r"2 columns, but y_true has 1 classes. Give labels="),
        (LABELS, PROBA, {"labels": [0, 1, 2]}, r"2 columns, but labels has 3 classes"),
        ([0, 1, 2, 7], PROBA, {"labels": [0, 2]}, r"has the class 1, which is not in"),
        (["a"] * 4, PROBA, {"labels": [0, 1]}, r"has the class 'a', which is not in"),
        ([0, 1], PROBA, {}, r"inconsistent numbers of samples"),
        (LABELS, np.full((4, 2), np.nan), {}, r"y_proba contains NaN"),
        (LABELS, PROBA, {"sample_weight": [1, 1]}, r"inconsistent numbers of samples"),
        (LABELS, PROBA, {"sample_weight": np.zeros(4)}, r"sample_weight sums to zero"),
        (LABELS, PROBA, {"sample_weight": [1, 1, 1, -1]}, r"(?i)negative values"),
    ],
)
def test_class_metrics_name_what_is_wrong(metric, y_true, y_proba, options, message):
    with pytest.raises(ValueError, match=message):
        metric(y_true, y_proba, **options)


def test_bins_must_exist():
    for n_bins in (0, 2.5, "a", None):
        with pytest.raises(ValueError, match=r"n_bins=.* is not valid. Use at least 1"):
            expected_calibration_error(LABELS, PROBA, n_bins=n_bins)


# Regression


def test_nll_equals_the_log_density(gaussians):
    y, mean, std = gaussians
    expected = -stats.norm.logpdf(y, mean, std).mean()
    assert gaussian_nll(y, mean, std) == pytest.approx(expected)


def test_crps_equals_its_integral(gaussians):
    scores = []
    for y, mean, std in zip(*(values.ravel() for values in gaussians), strict=True):
        normal, reach = stats.norm(mean, std), 12 * std
        below, _ = integrate.quad(lambda t, n=normal: n.cdf(t) ** 2, mean - reach, y)
        above, _ = integrate.quad(lambda t, n=normal: n.sf(t) ** 2, y, mean + reach)
        scores.append(below + above)
    assert gaussian_crps(*gaussians) == pytest.approx(np.mean(scores), rel=1e-6)


def test_crps_of_a_certain_prediction_is_the_absolute_error():
    assert gaussian_crps([1.0, -2.0], [0.0, 0.0], [1e-12] * 2) == pytest.approx(1.5)


@of_gaussians
def test_one_column_may_be_flat(metric, gaussians):
    y, mean, std = (values[:, 0] for values in gaussians)
    assert metric(y, mean[:, None], std) == pytest.approx(metric(y, mean, std))


@of_gaussians
def test_regression_weights_count_rows(metric, gaussians):
    weights = np.array([1, 0, 2, 1, 1, 3])
    repeated = metric(*(np.repeat(values, weights, axis=0) for values in gaussians))
    weighted = metric(*gaussians, sample_weight=weights)
    assert weighted == pytest.approx(repeated)


@of_gaussians
def test_gaussian_metrics_name_what_is_wrong(metric, gaussians):
    y, mean, std = gaussians
    with pytest.raises(ValueError, match=r"have 2, 1 and 2 columns. Give all three"):
        metric(y, mean[:, :1], std)
    with pytest.raises(ValueError, match=r"y_std has the value 0.0. Standard dev"):
        metric(y, mean, 0 * std)
    with pytest.raises(ValueError, match=r"inconsistent numbers of samples"):
        metric(y[:3], mean, std)
    with pytest.raises(ValueError, match=r"y_mean contains NaN"):
        metric(y, mean * np.nan, std)


def test_coverage_includes_bounds():
    interval = [[0, 1], [0, 1], [0, 1], [2, 2]]
    assert interval_coverage([0, 1, 1.5, 2], interval) == 0.75
    weighted = interval_coverage([0, 1, 1.5, 2], interval, sample_weight=[1, 1, 2, 0])
    assert weighted == 0.5


def test_coverage_names_what_is_wrong():
    crossed = r"bound 1.0 above the upper bound 0.0 in row 1"
    with pytest.raises(ValueError, match=crossed):
        interval_coverage([0, 0], [[0, 1], [1, 0]])
    with pytest.raises(ValueError, match=r"has 3 columns. Give it two"):
        interval_coverage([0], [[0, 1, 2]])
    with pytest.raises(ValueError, match=r"inconsistent numbers of samples"):
        interval_coverage([0], [[0, 1], [0, 1]])


# Detection and model search


def test_auroc_counts_ordered_pairs():
    inside, outside = np.array([0.9, 0.8, 0.5]), np.array([0.5, 0.85])
    pairs = np.subtract.outer(inside, outside)
    expected = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    assert ood_auroc(inside, outside) == pytest.approx(expected)
    assert ood_auroc(inside, inside - 1) == 1
    assert ood_auroc(inside, inside) == 0.5
    with pytest.raises(ValueError, match=r"minimum of 1 is required"):
        ood_auroc(inside, [])


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
