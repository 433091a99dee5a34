import numpy as np
import pytest
from displays import laplace_regressor
from scipy.stats import norm

from sklaplace.metrics import interval_coverage, sharpness
from sklaplace.plotting import RegressionCalibrationDisplay

of_predictions = RegressionCalibrationDisplay.from_predictions


def test_coverage_is_that_of_the_intervals(line, ridge):
    X, y = line
    display = RegressionCalibrationDisplay.from_estimator(
        ridge, X, y, levels=[0.9, 0.5], sample_weight=np.arange(60)
    )
    mean, std = ridge.predict(X, return_std=True)
    levels, found = display.line_.get_data()
    assert levels.tolist() == [0.5, 0.9]
    for level, frequency in zip(levels, found, strict=True):
        half = norm.ppf((1 + level) / 2) * std
        interval = np.c_[mean - half, mean + half]
        expected = interval_coverage(y, interval, sample_weight=np.arange(60))
        assert frequency == pytest.approx(expected)
    sharp = sharpness(std, sample_weight=np.arange(60))
    assert display.line_.get_label() == f"BayesianRidge (sharpness {sharp:.3g})"
    assert display.ax_.get_ylabel() == "empirical coverage"


def test_a_regressor_with_quantiles_is_asked_for_them(line):
    X, y = line
    model = laplace_regressor()
    display = RegressionCalibrationDisplay.from_estimator(model, X, y, kind="quantile")
    quantiles = model.predict_quantiles(X, display.levels)
    expected = (y[:, None] <= quantiles).mean(axis=0)
    np.testing.assert_allclose(display.line_.get_ydata(), expected)
    assert display.ax_.get_xlabel() == "quantile level"
    intervals = RegressionCalibrationDisplay.from_estimator(model, X, y, levels=0.8)
    expected = interval_coverage(y, model.predict_interval(X, 0.8))
    assert intervals.frequency == pytest.approx(expected)


def test_exact_predictions_are_on_the_diagonal():
    z = norm.ppf((np.arange(1000) + 0.5) / 1000)
    for kind in ("interval", "quantile"):
        display = of_predictions(5 + 2 * z, [5.0] * 1000, [2.0] * 1000, kind=kind)
        # one sample of a thousand on either side
        np.testing.assert_allclose(display.frequency, display.levels, atol=2.1e-3)
        assert display.sharpness == pytest.approx(4)
        assert len(display.levels) == 19
