import numpy as np
import pytest
from sklearn.metrics import auc

from sklaplace.metrics import ood_auroc, ood_fpr
from sklaplace.plotting import NoveltyDisplay


@pytest.fixture(scope="module")
def scores():
    rng = np.random.default_rng(0)
    return rng.normal(1, 1, size=50), rng.normal(0, 2, size=30)


def test_the_roc_curve_has_the_area_of_the_metric(scores):
    display = NoveltyDisplay.from_predictions(*scores, name="entropy")
    assert auc(*display.roc_.get_data()) == pytest.approx(ood_auroc(*scores))
    label = f"AUROC {ood_auroc(*scores):.3f}, FPR95 {ood_fpr(*scores):.3f}"
    assert display.roc_.get_label() == label
    assert display.axes_[0].get_xlabel() == "entropy"


def test_histograms_share_bins_and_are_densities(scores):
    display = NoveltyDisplay.from_predictions(*scores, bins=12)
    (known, edges, _), (unknown, others, _) = display.histograms_
    assert len(edges) == 13
    np.testing.assert_array_equal(edges, others)
    for density, values in ((known, scores[0]), (unknown, scores[1])):
        shown = values.clip(edges[0], edges[-1])
        expected, _ = np.histogram(shown, edges, density=True)
        np.testing.assert_allclose(density, expected)
        assert (density * np.diff(edges)).sum() == pytest.approx(1)


def test_extreme_scores_are_counted_in_the_outer_bins(scores):
    inside = np.append(scores[0], [-1e6])
    display = NoveltyDisplay.from_predictions(
        np.tile(inside, 9), np.tile(scores[1], 99)
    )
    (density, edges, _), _ = display.histograms_
    assert edges[0] > -100
    assert density[0] * (edges[1] - edges[0]) >= 1 / 51
    given = NoveltyDisplay.from_predictions(*scores, bins=[-1, 0, 1])
    np.testing.assert_array_equal(given.histograms_[0][1], [-1, 0, 1])
