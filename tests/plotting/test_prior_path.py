import numpy as np
import pytest
from sklearn.datasets import load_iris

from sklaplace import LaplaceClassifier, LaplaceClassifierCV
from sklaplace.plotting import PriorPathDisplay

draw = PriorPathDisplay.from_estimator
# not in ascending order
PRECISIONS = [1.0, 0.01, 10.0, 0.1]


@pytest.fixture(scope="module")
def iris():
    return load_iris(return_X_y=True)


@pytest.fixture(scope="module")
def searched(iris):
    model = LaplaceClassifierCV(prior_precisions=PRECISIONS, cv=3, random_state=0)
    return model.fit(*iris)


def test_scores_are_those_of_the_search_in_ascending_order(searched):
    display = draw(searched)
    order = np.argsort(PRECISIONS)
    results = searched.cv_results_
    x, score = display.score_line_.get_data()
    np.testing.assert_array_equal(x, [0.01, 0.1, 1.0, 10.0])
    np.testing.assert_array_equal(score, results["mean_test_score"][order])
    lower, upper = display.score_band_.get_datalim(display.ax_.transData).intervaly
    std = results["std_test_score"][order]
    np.testing.assert_allclose(
        [lower, upper], [(score - std).min(), (score + std).max()]
    )
    assert display.evidence_ax_ is not display.ax_
    assert x[score.argmax()] == searched.prior_precision_ == display.chosen
    np.testing.assert_array_equal(display.chosen_.get_xdata(), display.chosen)


def test_the_evidence_is_that_of_the_estimator(searched):
    x, evidence = draw(searched).evidence_line_.get_data()
    expected = [searched.log_marginal_likelihood(value) for value in x]
    np.testing.assert_array_equal(evidence, expected)


def test_a_steep_evidence_does_not_hide_its_maximum():
    evidence = np.array([-3.0, -1.0, 0.0, -2.0, -1e6])
    display = PriorPathDisplay(
        prior_precisions=np.logspace(-2, 2, 5), evidence=evidence
    )
    low, high = display.plot().evidence_ax_.get_ylim()
    assert -7 < low < -6  # three times the median of -2
    assert 0 < high < 1
    np.testing.assert_array_equal(display.evidence_line_.get_ydata(), evidence)


def test_a_fitted_estimator_has_evidence_alone(iris):
    model = LaplaceClassifier(random_state=0, prior_precision="marglik").fit(*iris)
    display = draw(model)
    assert display.score_line_ is None
    assert display.score_band_ is None
    assert display.evidence_ax_ is display.ax_
    x, evidence = display.evidence_line_.get_data()
    assert len(x) == 25
    np.testing.assert_allclose(x[[0, -1]] / model.prior_precision_, [1e-3, 1e3])
    # the maximum was fitted, up to the posterior's mean, which stays here
    assert evidence.argmax() == 12
    assert evidence[12] == pytest.approx(model.log_marginal_likelihood_value_)
    given = draw(model, prior_precisions=[2.0, 1.0], evidence_kw={"color": "red"})
    np.testing.assert_array_equal(given.prior_precisions, [1.0, 2.0])
    assert given.evidence_line_.get_color() == "red"


def test_several_prior_precisions_have_no_single_choice(iris):
    model = LaplaceClassifier(
        random_state=0, prior_structure="layerwise", prior_precision="marglik"
    ).fit(*iris)
    assert np.ndim(model.prior_precision_) == 1
    display = draw(model)
    assert display.chosen_ is None
    centre = np.exp(np.log(model.prior_precision_).mean())
    assert display.prior_precisions[12] == pytest.approx(centre)
    expected = model.log_marginal_likelihood(display.prior_precisions[3])
    assert display.evidence[3] == expected


def test_priors_without_scores_are_refused(searched):
    with pytest.raises(ValueError, match="cv_results_ has scores for other values"):
        draw(searched, prior_precisions=[1.0])
