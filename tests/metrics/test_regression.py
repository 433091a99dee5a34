import numpy as np
import pytest
from scipy import integrate, stats

from sklaplace.metrics import gaussian_crps, gaussian_nll, interval_coverage

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
