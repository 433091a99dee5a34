"""Tests of class targets: codes and classes, without an estimator."""

import numpy as np

from sklaplace.estimators.class_targets import ClassTargets

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
