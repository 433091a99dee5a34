"""Accelerate: nets that skorch's mixin trains."""

import pickle

import numpy as np
import pytest
from nets import MLP, QUICK, blobs, classifier
from skorch import NeuralNetClassifier
from skorch.hf import AccelerateMixin
from torch import nn

from sklaplace import DeepEnsembleClassifier, LaplaceClassifier

accelerate = pytest.importorskip("accelerate")

X, Y = blobs()


class AcceleratedClassifier(AccelerateMixin, NeuralNetClassifier):
    """A classifier on the device that Accelerate chooses."""


def net():
    accelerator = accelerate.Accelerator(cpu=True)
    options = {"accelerator": accelerator, "criterion": nn.CrossEntropyLoss}
    return AcceleratedClassifier(MLP, **options, **QUICK)


@pytest.mark.parametrize("kind", [LaplaceClassifier, DeepEnsembleClassifier])
@pytest.mark.parametrize("weights", [None, np.linspace(0.5, 1.5, 60)])
def test_predicts_as_without(kind, weights, figure):
    found = kind(net(), random_state=0).fit(X, Y, weights).predict_proba(X)
    plain = kind(classifier(), random_state=0).fit(X, Y, weights).predict_proba(X)
    np.testing.assert_allclose(found, plain, atol=1e-6)
    figure(largest_difference=np.abs(found - plain).max())


@pytest.mark.filterwarnings("ignore:Setting self.device")  # by skorch
def test_pickles():
    model = LaplaceClassifier(net(), random_state=0).fit(X, Y)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
