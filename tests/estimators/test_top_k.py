"""The most probable classes and their probabilities, batch by batch."""

import numpy as np
import tagging
from costs import counted
from nets import LinearModel, blobs, classifier, initialised
from refusals import refused
from sklearn.frozen import FrozenEstimator

from sklaplace import LaplaceClassifier


def around(net, n_classes, X, y, **options):
    """Return an estimator of many classes, of which y may have a few."""
    net.classes = range(n_classes)
    options = {"prior_precision": 1.0, "random_state": 0, **options}
    return LaplaceClassifier(FrozenEstimator(net), **options).fit(X, y)


def test_equally_probable_classes_come_in_order():
    X, y = blobs(n_classes=4, dtype=np.float64)
    net = initialised(classifier(LinearModel, module__n_out=5))
    net.module_.head.weight.data.zero_()
    net.module_.head.bias.data[:] = net.module_.head.bias.new_tensor([0, 1, 0, 1, 0])
    model = around(net, 5, X, y, link_approx="probit")
    classes, proba = model.predict_top_k(np.zeros((2, 2)), 4)
    np.testing.assert_array_equal(classes, [[1, 3, 0, 2]] * 2)
    assert proba[0, 0] == proba[0, 1]
    assert classes.dtype == model.classes_.dtype


def test_what_is_refused():
    model = LaplaceClassifier(classifier(max_epochs=1), prior_precision=1.0)
    X, y = blobs()
    model.fit(X, y)
    for k in (0, 1.5, True, "2"):
        words = [f"k={k!r} is not an integer"]
        refused(ValueError, words, lambda k=k: model.predict_top_k(X, k), model)
    tags = tagging.fitted(tagging.net().fit(tagging.X, tagging.Y.astype(float)))
    words = ["matrix of labels", "predict_proba"]
    refused(ValueError, words, lambda: tags.predict_top_k(tagging.X, 1), tags)


def test_many_classes_are_predicted_batch_by_batch():
    """From 1,024 classes on, no array has a probability of each sample and class."""
    n, c = 200, 1_100
    rows = np.random.default_rng(0).normal(size=(n, 2))
    net = initialised(classifier(LinearModel, module__n_out=c))
    options = {"hessian_structure": "diag", "batch_size": 10, "link_approx": "probit"}
    model = around(net, c, rows[:40], np.arange(40) % 20, **options)
    expected = model.predict_proba(rows).argmax(1)
    with counted() as costs:
        np.testing.assert_array_equal(model.predict(rows), expected)
        assert model.score(rows, expected) == 1
        np.testing.assert_array_equal(model.predict_top_k(rows)[0][:, 0], expected)
    assert costs.largest <= n * c // 5
    assert costs.peak < 8 * n * c
