"""The most probable classes and their probabilities, batch by batch."""

import numpy as np
import pytest
import segmentation
import tagging
from costs import counted
from nets import MLP, LinearModel, blobs, classifier, initialised, seeded
from refusals import refused
from sklearn.frozen import FrozenEstimator

from sklaplace import LaplaceClassifier

X, Y = blobs(n_classes=4)
NEW = blobs(seed=1, n_classes=4)[0]


def fitted(**options):
    net = FrozenEstimator(seeded(classifier(MLP, module__n_out=4), X, Y))
    model = LaplaceClassifier(net, prior_precision=1.0, random_state=0, **options)
    return model.fit(X, Y)


def sorted_proba(model, k, rows=NEW):
    """Return classes and probabilities by sorting ``predict_proba`` along axis 1."""
    proba = model.predict_proba(rows)
    order = np.argsort(-proba, axis=1, kind="stable")[:, :k]
    return model.classes_[order], np.take_along_axis(proba, order, 1)


def assert_sorted(model, k, rows=NEW):
    found = model.predict_top_k(rows, k)
    for part, expected in zip(found, sorted_proba(model, k, rows), strict=True):
        np.testing.assert_array_equal(part, expected)
        assert part.dtype == expected.dtype


@pytest.mark.parametrize("batch_size", [None, 1, 7])
@pytest.mark.parametrize("link", ["auto", "probit", "gumbel"])
@pytest.mark.parametrize("k", [1, 3, 4])
def test_equals_sorted_probabilities(k, link, batch_size):
    assert_sorted(fitted(link_approx=link, batch_size=batch_size), k)


def test_equally_probable_classes_come_in_order():
    net = initialised(classifier(LinearModel, module__n_out=5))
    net.module_.head.weight.data.zero_()
    net.module_.head.bias.data[:] = net.module_.head.bias.new_tensor([0, 1, 0, 1, 0])
    net.classes = range(5)
    options = {"prior_precision": 1.0, "link_approx": "probit"}
    model = LaplaceClassifier(FrozenEstimator(net), **options)
    model.fit(X.astype(float), Y)
    classes, proba = model.predict_top_k(np.zeros((2, 2)), 4)
    np.testing.assert_array_equal(classes, [[1, 3, 0, 2]] * 2)
    assert proba[0, 0] == proba[0, 1]
    assert_sorted(model, 5, np.zeros((2, 2)))


def test_maps_have_classes_at_each_position():
    maps = segmentation.fitted(segmentation.net().fit(segmentation.X, segmentation.Y))
    assert_sorted(maps, 2, segmentation.X)
    classes, _ = maps.predict_top_k(segmentation.X, 1)
    assert classes.shape == (30, 1, *segmentation.POSITIONS)
    np.testing.assert_array_equal(classes[:, 0], maps.predict(segmentation.X))


def test_what_is_refused():
    model = fitted()
    for k in (0, 1.5, True, "2"):
        words = [f"k={k!r} is not an integer"]
        refused(ValueError, words, lambda k=k: model.predict_top_k(NEW, k), model)
    tags = tagging.fitted(tagging.net().fit(tagging.X, tagging.Y.astype(float)))
    words = ["matrix of labels", "predict_proba"]
    refused(ValueError, words, lambda: tags.predict_top_k(tagging.X, 1), tags)


@pytest.mark.slow
def test_probabilities_of_all_samples_are_never_there_together():
    """With batches of n/40 rows, the largest tensor is at most a tenth of (n, C)."""
    n, c = 800, 2_000
    rows = np.random.default_rng(0).normal(size=(n, 3))
    net = classifier(LinearModel, module__n_in=3, module__n_out=c)
    net = initialised(net)
    net.classes = range(c)
    model = LaplaceClassifier(
        FrozenEstimator(net),
        hessian_structure="diag",
        prior_precision=1.0,
        batch_size=20,
    ).fit(rows[:40], np.arange(40) % 20)
    with counted() as costs:
        classes, _ = model.predict_top_k(rows)
    assert classes.shape == (n, 5)
    assert costs.largest <= n * c // 10
    assert costs.peak < 8 * n * c


def test_many_classes_are_predicted_batch_by_batch():
    """From 1,024 classes on, no array has a probability of each sample and class."""
    n, c = 200, 1_100
    rows = np.random.default_rng(0).normal(size=(n, 2))
    net = initialised(classifier(LinearModel, module__n_out=c))
    net.classes = range(c)
    options = {"hessian_structure": "diag", "prior_precision": 1.0, "batch_size": 10}
    model = LaplaceClassifier(FrozenEstimator(net), link_approx="probit", **options)
    model.fit(rows[:40], np.arange(40) % 20)
    expected = model.predict_proba(rows).argmax(1)
    with counted() as costs:
        np.testing.assert_array_equal(model.predict(rows), expected)
        assert model.score(rows, expected) == 1
    assert costs.largest <= n * c // 5
