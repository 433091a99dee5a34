import numpy as np
import pytest

from sklaplace.metrics import (
    area_under_risk_coverage,
    ood_auroc,
    ood_fpr,
    risk_coverage_curve,
)


def test_auroc_counts_ordered_pairs():
    inside, outside = np.array([0.9, 0.8, 0.5]), np.array([0.5, 0.85])
    pairs = np.subtract.outer(inside, outside)
    expected = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    assert ood_auroc(inside, outside) == pytest.approx(expected)
    assert ood_auroc(inside, inside - 1) == 1
    assert ood_auroc(inside, inside) == 0.5
    with pytest.raises(ValueError, match=r"minimum of 1 is required"):
        ood_auroc(inside, [])


@pytest.mark.parametrize("tpr", [0.25, 0.9, 0.95])
def test_fpr_is_that_of_the_highest_threshold_that_accepts_enough(tpr):
    # one decimal, so that there are ties within and between the samples
    rng = np.random.default_rng(0)
    inside = rng.normal(1, 1, size=40).round(1)
    outside = rng.normal(0, 1, size=30).round(1)
    enough = [t for t in inside if (inside >= t).mean() >= tpr]
    expected = (outside >= max(enough)).mean()
    assert ood_fpr(inside, outside, tpr=tpr) == pytest.approx(expected)


def test_fpr_at_its_limits():
    assert ood_fpr([2, 3], [0, 1]) == 0
    assert ood_fpr([0, 1], [2, 3]) == 1
    with pytest.raises(ValueError, match=r"tpr=95 is not between 0 and 1"):
        ood_fpr([1], [0], tpr=95)
    with pytest.raises(ValueError, match=r"confidence_out contains NaN"):
        ood_fpr([1], [np.nan])


def test_risk_is_the_mean_loss_of_the_most_confident():
    rng = np.random.default_rng(0)
    losses, confidence = rng.normal(size=30) ** 2, rng.normal(size=30).round(1)
    coverage, risk = risk_coverage_curve(losses, confidence)
    thresholds = np.unique(confidence)[::-1]
    assert len(thresholds) < 30  # there are ties
    answered = confidence >= thresholds[:, None]
    np.testing.assert_allclose(coverage, answered.mean(axis=1))
    expected = [losses[rows].mean() for rows in answered]
    np.testing.assert_allclose(risk, expected)
    # each sample's confidence is a threshold once
    area = np.mean([losses[confidence >= c].mean() for c in confidence])
    assert area_under_risk_coverage(losses, confidence) == pytest.approx(area)


def test_weights_of_risk_count_samples():
    losses, confidence = np.array([1.0, 0.0, 3.0]), np.array([0.2, 0.9, 0.5])
    weights = np.array([2, 3, 0])
    repeated = np.repeat(losses, weights), np.repeat(confidence, weights)
    expected = risk_coverage_curve(*repeated)
    found = risk_coverage_curve(losses, confidence, sample_weight=weights)
    np.testing.assert_allclose(found, expected)
    area = area_under_risk_coverage(losses, confidence, sample_weight=weights)
    assert area == pytest.approx(area_under_risk_coverage(*repeated))


def test_risk_names_what_is_wrong():
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        risk_coverage_curve([0, 1], [0.5])
    with pytest.raises(ValueError, match="losses contains NaN"):
        area_under_risk_coverage([np.nan], [0.5])
