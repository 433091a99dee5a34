import numpy as np
import pytest
from scipy import integrate, stats
from sklearn.metrics import mean_pinball_loss

from sklaplace.metrics import (
    empirical_frequency,
    gaussian_crps,
    gaussian_nll,
    interval_coverage,
    interval_score,
    sharpness,
)

of_gaussians = pytest.mark.parametrize("metric", [gaussian_nll, gaussian_crps])


@pytest.fixture
def gaussians():
    rng = np.random.default_rng(0)
    return rng.normal(size=(6, 2)), rng.normal(size=(6, 2)), rng.gamma(2, size=(6, 2))


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
    with pytest.raises(ValueError, match=r"have 2, 1 and 2 columns. All three need"):
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


@pytest.mark.parametrize("metric", [interval_coverage, interval_score])
def test_intervals_name_what_is_wrong(metric):
    crossed = r"bound 1.0 above the upper bound 0.0 in row 1"
    with pytest.raises(ValueError, match=crossed):
        metric([0, 0], [[0, 1], [1, 0]])
    with pytest.raises(ValueError, match=r"shape \(1, 3, 2\)\. .*y_interval\[:, 0\]"):
        metric([[0, 1, 2]], [[[0, 1], [1, 2], [2, 3]]])
    with pytest.raises(ValueError, match=r"has 3 columns\. Pass lower"):
        metric([0], [[0, 1, 2]])
    with pytest.raises(ValueError, match=r"inconsistent numbers of samples"):
        metric([0], [[0, 1], [0, 1]])


@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_interval_score_is_the_sum_of_pinball_losses(coverage):
    rng = np.random.default_rng(0)
    y, interval = rng.normal(size=50), np.sort(rng.normal(size=(50, 2)))
    weights, alpha = rng.uniform(size=50), 1 - coverage
    expected = sum(
        mean_pinball_loss(y, bound, alpha=level, sample_weight=weights)
        for bound, level in zip(interval.T, [alpha / 2, 1 - alpha / 2], strict=True)
    )
    found = interval_score(y, interval, coverage=coverage, sample_weight=weights)
    assert found == pytest.approx(2 / alpha * expected)


def test_interval_score_refuses_percentages():
    with pytest.raises(ValueError, match=r"coverage=90 is not between 0 and 1"):
        interval_score([0], [[0, 1]], coverage=90)


def test_frequencies_of_exact_quantiles_are_their_levels():
    levels = np.array([0.1, 0.5, 0.8])
    y = stats.norm.ppf((np.arange(1000) + 0.5) / 1000)
    quantiles = np.tile(stats.norm.ppf(levels), (1000, 1))
    np.testing.assert_allclose(empirical_frequency(y, quantiles), levels)
    # a target at its quantile counts
    assert empirical_frequency([1.0], [[1.0, 0.5]]).tolist() == [1.0, 0.0]
    weighted = empirical_frequency([0.0, 2.0], [[1.0], [1.0]], sample_weight=[3, 1])
    assert weighted.tolist() == [0.75]


def test_frequencies_name_what_is_wrong():
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        empirical_frequency([0.0], [[1.0], [2.0]])
    with pytest.raises(ValueError, match="Expected 2D array"):
        empirical_frequency([0.0], [1.0])


def test_sharpness_is_the_mean_variance(gaussians):
    std = gaussians[2]
    assert sharpness(std) == pytest.approx(np.mean(std**2))
    weights = np.array([1, 0, 2, 1, 1, 3])
    expected = np.repeat(std[:, 0], weights) ** 2
    assert sharpness(std[:, 0], sample_weight=weights) == pytest.approx(expected.mean())
    with pytest.raises(ValueError, match=r"y_std has the value 0.0"):
        sharpness([1.0, 0.0])
