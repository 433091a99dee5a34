import numpy as np
import pytest

from sklaplace.metrics import ood_auroc


def test_auroc_counts_ordered_pairs():
    inside, outside = np.array([0.9, 0.8, 0.5]), np.array([0.5, 0.85])
    pairs = np.subtract.outer(inside, outside)
    expected = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    assert ood_auroc(inside, outside) == pytest.approx(expected)
    assert ood_auroc(inside, inside - 1) == 1
    assert ood_auroc(inside, inside) == 0.5
    with pytest.raises(ValueError, match=r"minimum of 1 is required"):
        ood_auroc(inside, [])
