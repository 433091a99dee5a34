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
    quantile_crps,
    sharpness,
    weighted_interval_score,
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


def midpoints(n_levels):
    return (np.arange(n_levels) + 0.5) / n_levels


@pytest.fixture
def quantiles():
    """Return targets, ascending quantiles, symmetric levels and weights."""
    rng = np.random.default_rng(0)
    levels = np.array([0.025, 0.1, 0.5, 0.9, 0.975])
    columns = np.sort(rng.normal(size=(50, 5)))
    return rng.normal(size=50), columns, levels, rng.uniform(size=50)


def test_crps_from_quantiles_converges_to_the_gaussian_score(gaussians):
    y, mean, std = (values.ravel() for values in gaussians)
    m, exact = 5000, gaussian_crps(y, mean, std)
    columns = stats.norm.ppf(midpoints(m), mean[:, None], std[:, None])
    # The error of the midpoint rule is at most the integrand's total variation, which
    # is here at most four times its largest value, divided by 2m.
    residuals = np.abs(y[:, None] - columns).max()
    found = quantile_crps(y, columns, midpoints(m))
    assert found == pytest.approx(exact, abs=4 * 2 * residuals / (2 * m))


@pytest.mark.parametrize(("n_levels", "error"), [(20, 0.002), (100, 1e-4)])
def test_crps_of_a_calibrated_gaussian_is_hardly_too_high(n_levels, error):
    y, levels = stats.norm.ppf(midpoints(100_000)), midpoints(n_levels)
    columns = np.broadcast_to(stats.norm.ppf(levels), (len(y), n_levels))
    ratio = quantile_crps(y, columns, levels) / gaussian_crps(y, 0 * y, 0 * y + 1)
    # the mean pinball loss is a concave function of the level
    assert 0 < ratio - 1 < error


def test_crps_of_a_median_is_the_absolute_error():
    assert quantile_crps([1.0, -2.0], [[0.0], [0.0]], [0.5]) == 1.5
    assert weighted_interval_score([1.0, -2.0], [[0.0], [0.0]], [0.5]) == 1.5


def test_crps_weights_levels_by_the_range_that_they_stand_for(quantiles):
    y, columns, levels, weights = quantiles
    lengths = [0.0625, 0.2375, 0.4, 0.2375, 0.0625]
    losses = [
        mean_pinball_loss(y, q, alpha=level, sample_weight=weights)
        for q, level in zip(columns.T, levels, strict=True)
    ]
    found = quantile_crps(y, columns, levels, sample_weight=weights)
    assert found == pytest.approx(2 * np.dot(lengths, losses))
    found = weighted_interval_score(y, columns, levels, sample_weight=weights)
    assert found == pytest.approx(2 * np.mean(losses))


def test_weighted_interval_score_equals_its_definition(quantiles):
    y, columns, levels, weights = quantiles
    # Bracher et al. (2021), eq. (1): weights α/2, and 1/2 for the median
    expected = 0.5 * np.average(np.abs(y - columns[:, 2]), weights=weights)
    for k, alpha in enumerate(2 * levels[:2]):
        interval = columns[:, [k, -1 - k]]
        options = {"coverage": 1 - alpha, "sample_weight": weights}
        expected += alpha / 2 * interval_score(y, interval, **options)
    found = weighted_interval_score(y, columns, levels, sample_weight=weights)
    assert found == pytest.approx(expected / 2.5)


@pytest.mark.parametrize("metric", [quantile_crps, weighted_interval_score])
def test_scores_of_quantiles_name_what_is_wrong(metric, quantiles):
    y, columns, levels, _ = quantiles
    for wrong in (
        100 * levels,
        levels[::-1],
        [0.1, 0.5, 0.5, 0.9, 0.9],
        levels - 0.025,
    ):
        with pytest.raises(ValueError, match=r"are not ascending numbers between 0"):
            metric(y, columns, wrong)
    with pytest.raises(ValueError, match=r"has 5 columns, but there are 3 levels"):
        metric(y, columns, levels[1:4])
    crossed = columns.copy()
    crossed[7] = crossed[7, ::-1]
    with pytest.raises(ValueError, match=r"cross in row 7\. .*np\.sort"):
        metric(y, crossed, levels)
    with pytest.raises(ValueError, match=r"inconsistent numbers of samples"):
        metric(y[:3], columns, levels)
    with pytest.raises(ValueError, match=r"y_quantiles contains NaN"):
        metric(y, columns * np.nan, levels)
    with pytest.raises(ValueError, match=r"should be a 1d array"):
        metric(np.c_[y, y], columns, levels)


def test_weighted_interval_score_needs_both_levels_of_an_interval(quantiles):
    y, columns, levels, _ = quantiles
    with pytest.raises(ValueError, match=r"are not symmetric about 0.5\. Pass both"):
        weighted_interval_score(y, columns[:, 1:], levels[1:])


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
