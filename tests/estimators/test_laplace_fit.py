"""Tests of curvature and posterior of a trained network, without an estimator.

The network is linear with Gaussian noise, so that its posterior is known exactly.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from nets import initialised, regressor
from sklearn.frozen import FrozenEstimator
from torch import nn

from sklaplace.estimators.laplace_fit import (
    HeldOutScore,
    LaplaceSolver,
    network_at_mean,
)
from sklaplace.estimators.laplace_trainer import LaplaceTrainer
from sklaplace.estimators.number_targets import NumberTargets
from sklaplace.estimators.options import LaplaceOptions
from sklaplace.networks.data import TrainingData, input_type

RNG = np.random.RandomState(0)
X, Y = RNG.randn(30, 3), RNG.randn(30, 1)
DELTA, SIGMA = 2.0, 0.5


class Linear(nn.Linear):
    def __init__(self, n_out=1):
        super().__init__(3, n_out, bias=False, dtype=torch.float64)


OPTIONS = LaplaceOptions(
    likelihood=None,
    subset_of_weights="all",
    subset_params={},
    hessian_structure="full",
    structure_params={},
    curvature="ggn",
    curvature_params={},
    prior_precision=DELTA,
    prior_structure="scalar",
    prior_mean=0.0,
    prior=None,
    refine=False,
    temperature=1.0,
    validation_fraction=0.2,
    pred_type="glm",
    batch_size=None,
    sigma_noise=SIGMA,
)


def trained(data, options=OPTIONS):
    net = FrozenEstimator(initialised(regressor(Linear)))
    type_ = input_type(net.estimator)
    return LaplaceTrainer(
        estimator=net,
        targets=NumberTargets.infer(data.y, type_, None, SIGMA, "LaplaceClassifier"),
        likelihood=None,
        seed=0,
        validation_fraction=None,
        alternative="LaplaceClassifier",
        options=options,
    ).train(data, None, {})


def data(rows):
    return TrainingData(X[rows], Y[rows], None)


EVERY = np.arange(30)


@pytest.mark.parametrize("refine", [False, True])
def test_the_posterior_of_a_linear_model_is_exact(refine):
    options = replace(OPTIONS, refine=refine)
    solver = LaplaceSolver(options, seed=0)
    fit = solver.accumulate(trained(data(EVERY), options))
    posterior = solver.posterior(fit, HeldOutScore())
    precision = X.T @ X / SIGMA**2 + DELTA * np.eye(3)
    np.testing.assert_allclose(posterior.precision_matrix(), precision, rtol=1e-12)
    if refine:
        mean = np.linalg.solve(precision, X.T @ Y[:, 0] / SIGMA**2)
        np.testing.assert_allclose(posterior.mean, mean, rtol=1e-9)


def test_parts_add_up_to_all_samples():
    solver = LaplaceSolver(OPTIONS, seed=0)
    first, rest = data(EVERY[:12]), data(EVERY[12:])
    fit = solver.accumulate(trained(first))
    before = solver.posterior(fit, HeldOutScore())
    found = solver.add(before, network_at_mean(before, fit.network, rest))
    whole = solver.posterior(solver.accumulate(trained(data(EVERY))), HeldOutScore())
    np.testing.assert_allclose(
        found.precision_matrix(), whole.precision_matrix(), rtol=1e-12
    )
    np.testing.assert_allclose(
        float(found.log_marginal_likelihood()),
        float(whole.log_marginal_likelihood()),
        rtol=1e-12,
    )


def test_stored_fits_keep_training_samples_only_where_they_are_used():
    for refine in (False, True):
        options = replace(OPTIONS, refine=refine)
        solver = LaplaceSolver(options, seed=0)
        fit = solver.accumulate(trained(data(EVERY), options))
        assert (fit.stored().network.train is not None) == fit.needs_rows


@pytest.mark.parametrize(
    ("prior", "noise", "tuner"),
    [
        (1.0, 1.0, None),
        ("auto", 1.0, "auto"),
        ("auto", "marglik", "marglik"),
        ("validation", "auto", "validation"),
    ],
)
def test_the_more_specific_tuner_is_used(prior, noise, tuner):
    options = replace(OPTIONS, prior_precision=prior, sigma_noise=noise)
    assert options.tuner == tuner
    assert options.tunes_on_held_out == (tuner in ("auto", "validation"))
    assert replace(options, refine="auto").may_refit == (tuner is not None)
    assert not options.may_refit
