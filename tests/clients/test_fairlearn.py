"""fairlearn: reductions that fit with sample weights."""

import numpy as np
import pytest
from nets import blobs, classifier

from sklaplace import LaplaceClassifier

reductions = pytest.importorskip("fairlearn.reductions")
metrics = pytest.importorskip("fairlearn.metrics")


def test_demographic_parity(figure):
    X, y = blobs(200, n_classes=2)
    group = (X[:, 0] > np.median(X[:, 0])).astype(int)
    net = classifier(module__n_out=2, max_epochs=10)
    model = LaplaceClassifier(net, prior_precision=1.0, random_state=0)

    def difference(predicted):
        return metrics.demographic_parity_difference(
            y, predicted, sensitive_features=group
        )

    plain = difference(model.fit(X, y).predict(X))
    constraint = reductions.DemographicParity(difference_bound=0.05)
    reduced = reductions.ExponentiatedGradient(model, constraint, max_iter=5)
    reduced.fit(X, y, sensitive_features=group)
    fair = difference(reduced.predict(X, random_state=0))
    assert plain > 0.3
    assert fair < plain / 2
    figure(plain=plain, constrained=fair)
