import numpy as np

from sklaplace.metrics import area_under_risk_coverage, risk_coverage_curve
from sklaplace.plotting import RiskCoverageDisplay


def test_errors_of_a_classifier(moons, logistic):
    X, y = moons
    names = np.array(["no", "yes"])
    model = type(logistic)().fit(X, names[y])
    weights = np.arange(60)
    draw = RiskCoverageDisplay.from_estimator
    display = draw(model, X, names[y], sample_weight=weights)
    losses = model.predict(X) != names[y]
    assert 0 < losses.mean() < 1
    given = losses, model.predict_proba(X).max(axis=1)
    expected = risk_coverage_curve(*given, sample_weight=weights)
    np.testing.assert_array_equal(display.line_.get_data(), expected)
    area = area_under_risk_coverage(*given, sample_weight=weights)
    assert display.line_.get_label() == f"LogisticRegression (AURC {area:.3g})"
    assert display.ax_.get_ylabel() == "risk: mean error"


def test_squared_errors_of_a_regressor(line, ridge):
    display = RiskCoverageDisplay.from_estimator(ridge, *line, name="ridge")
    mean, std = ridge.predict(line[0], return_std=True)
    expected = risk_coverage_curve((line[1] - mean) ** 2, -std)
    np.testing.assert_array_equal(display.line_.get_data(), expected)
    assert display.ax_.get_ylabel() == "risk: mean squared error"
