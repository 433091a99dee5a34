"""Tests of regression targets, without an estimator."""

import numpy as np
import pytest
from nets import initialised, regressor
from torch import nn

from sklaplace.estimators.targets.numbers import NumberTargets
from sklaplace.likelihoods import Gaussian
from sklaplace.networks.data import TrainingData, input_type

TYPE = input_type(None)


def infer(y, sigma_noise="auto"):
    return NumberTargets.infer(y, TYPE, None, sigma_noise, "LaplaceClassifier")


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2)])
def test_columns_in_the_dtype_of_the_network(shape):
    y = np.arange(np.prod(shape)).reshape(shape)
    targets = infer(y)
    codes = targets.encode(y)
    assert codes.shape == (5, targets.n_outputs)
    assert codes.dtype == TYPE.dtype
    assert targets.drop_axis(codes).shape == shape


def test_other_numbers_of_columns():
    with pytest.raises(ValueError, match="y has 2 columns, but y has 1 in fit"):
        infer(np.zeros(3)).encode(np.zeros((3, 2)))


def test_labels_are_no_numbers():
    with pytest.raises(ValueError, match="use LaplaceClassifier"):
        infer(np.zeros(2)).encode(np.array(["a", "b"]))


def test_noise_of_each_column_becomes_proportions():
    targets = infer(np.zeros((3, 2)), np.array([1.0, 4.0]))
    assert targets.adapt(Gaussian()).relative == pytest.approx((0.5, 2.0))
    with pytest.raises(ValueError, match="sigma_noise has shape"):
        infer(np.zeros((3, 3)), np.array([1.0, 4.0]))


def test_noise_that_the_likelihood_does_not_have():
    net = initialised(regressor(criterion=nn.PoissonNLLLoss))
    infer(np.ones(3)).check_values(net, np.ones((3, 1)))
    with pytest.raises(ValueError, match="has no noise level"):
        infer(np.ones(3), 0.5).check_values(net, np.ones((3, 1)))


def test_the_default_net_has_one_output_per_column():
    X, y = np.random.RandomState(0).randn(20, 3), np.random.RandomState(1).randn(20, 2)
    net = infer(y).default_net(TrainingData(X, y, None)).initialize()
    assert net.forward(X).shape == (20, 2)
