"""`torch.compile`, which skorch calls if a net has `compile=True`."""

import numpy as np
import pytest
from nets import blobs, classifier

from sklaplace import LaplaceClassifier

# dynamo looks at the gradient of every tensor
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.slow]

X, Y = blobs()
WEIGHTS = np.linspace(0.5, 1.5, 60)


@pytest.mark.parametrize(
    ("backend", "subset", "weights"),
    [
        ("eager", "last_layer", None),
        ("eager", "all", None),
        ("eager", "all", WEIGHTS),
        ("inductor", "all", WEIGHTS),  # runs a C++ compiler
    ],
    ids=["last_layer", "all", "weighted", "inductor"],
)
def test_predicts_as_without(backend, subset, weights, figure):
    options = {"subset_of_weights": subset, "random_state": 0}
    net = classifier(compile=True, compile__backend=backend, max_epochs=5)
    found = LaplaceClassifier(net, **options).fit(X, Y, weights)
    plain = LaplaceClassifier(classifier(max_epochs=5), **options).fit(X, Y, weights)
    assert hasattr(found.estimator_.module_, "_orig_mod")
    difference = np.abs(found.predict_proba(X) - plain.predict_proba(X)).max()
    assert difference < 1e-4
    figure(largest_difference=difference)
