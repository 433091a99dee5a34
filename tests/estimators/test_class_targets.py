"""Tests of class targets: codes, weights and classes, without an estimator."""

import numpy as np
import pytest
from nets import classifier
from torch import nn

from sklaplace.estimators.targets.classes import ClassTargets
from sklaplace.estimators.targets.label_types import MultiLabel

LABELS = np.array(["b", "a", "c", "a"])


def test_codes_follow_sorted_classes():
    targets = ClassTargets.infer(LABELS, None)
    assert targets.classes.tolist() == ["a", "b", "c"]
    codes = targets.encode(LABELS)
    assert codes.dtype == np.int64
    assert codes.tolist() == [1, 0, 2, 0]
    assert targets.n_outputs == targets.n_classes == 3


def test_given_classes_include_those_without_samples():
    targets = ClassTargets.infer(LABELS, None, classes=np.array(["a", "b", "c", "d"]))
    assert targets.n_outputs == 4
    assert targets.missing_classes(LABELS[:1]).tolist() == []
    inferred = ClassTargets.infer(LABELS, None)
    assert inferred.missing_classes(LABELS[:2]).tolist() == ["c"]


def test_balanced_classes_have_the_same_total_weight():
    targets = ClassTargets.infer(LABELS, None, class_weight="balanced")
    weights = targets.sample_weight(targets.encode(LABELS))
    totals = [weights[label == LABELS].sum() for label in targets.classes]
    np.testing.assert_allclose(totals, len(LABELS) / 3)


def test_ignored_labels_have_weight_zero():
    net = classifier(criterion__ignore_index=-1)
    y = np.array([0, -1, 1, 2])
    targets = ClassTargets.infer(y, net)
    codes = targets.encode(y)
    assert codes.tolist() == [0, -1, 1, 2]
    assert targets.sample_weight(codes).tolist() == [1, 0, 1, 1]
    assert targets.sample_weight(codes[[0, 2]]) is None
    with pytest.raises(ValueError, match="All rows have the label"):
        ClassTargets.infer(np.array([-1, -1]), net)


def test_columns_are_labels():
    y = np.array([[0, 1], [1, 1], [0, 0]])
    net = classifier(criterion=nn.BCEWithLogitsLoss)
    targets = ClassTargets.infer(y, net)
    assert targets.target_type == MultiLabel(2)
    assert targets.n_outputs == 2
    assert targets.n_classes == 2
    assert targets.encode(y).dtype == np.float32
    with pytest.raises(ValueError, match="one label per row"):
        ClassTargets.infer(y, net, class_weight="balanced")
