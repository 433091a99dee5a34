"""Tests of the trainer, without an estimator."""

import numpy as np
import pytest
from nets import MLP, classifier, seeded
from sklearn.frozen import FrozenEstimator

from sklaplace.estimators.targets.classes import ClassTargets
from sklaplace.estimators.training.trainer import Trainer
from sklaplace.networks.data import TrainingData

RNG = np.random.RandomState(0)
X = RNG.randn(80, 2).astype(np.float32)
Y = RNG.randint(3, size=80)
DATA = TrainingData(X, Y.astype(np.int64), None)


def trainer(estimator, fraction=None):
    return Trainer(
        estimator=estimator,
        targets=ClassTargets.infer(Y, estimator),
        likelihood=None,
        seed=0,
        validation_fraction=fraction,
        alternative="LaplaceRegressor",
    )


def test_holds_out_a_fraction_where_the_net_does_not():
    found = trainer(classifier(MLP, train_split=None), 0.25).train(DATA, None, {})
    assert (len(found.train), len(found.held_out)) == (60, 20)


def test_given_validation_samples_are_the_held_out_ones():
    validation = DATA.take(np.arange(10))
    net = classifier(MLP, train_split=None)
    found = trainer(net, 0.25).train(DATA, validation, {})
    assert (len(found.train), len(found.held_out)) == (80, 10)


def test_a_frozen_net_keeps_its_weights():
    net = seeded(classifier(MLP), X, Y)
    found = trainer(FrozenEstimator(net), 0.25).train(DATA, None, {})
    assert found.net is not net
    assert found.held_out is None
    for name, value in net.module_.state_dict().items():
        assert (found.net.module_.state_dict()[name] == value).all()
    with pytest.raises(TypeError, match="unknown arguments 'epochs'"):
        trainer(FrozenEstimator(net)).train(DATA, None, {"epochs": 3})
