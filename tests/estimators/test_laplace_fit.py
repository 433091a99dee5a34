"""Tests of curvature and posterior of a trained network, without predictions.

The network is linear with Gaussian noise, so that its posterior is known exactly.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from nets import initialised, regressor
from sklearn.frozen import FrozenEstimator
from torch import nn

from sklaplace import LaplaceRegressor
from sklaplace.estimators.fitting.laplace_fit import (
    HeldOutScore,
    LaplaceSolver,
    network_at_mean,
)
from sklaplace.estimators.targets.numbers import NumberTargets
from sklaplace.estimators.training.laplace import LaplaceTrainer
from sklaplace.networks.data import TrainingData, input_type

RNG = np.random.RandomState(0)
X, Y = RNG.randn(30, 3), RNG.randn(30, 1)
DELTA, SIGMA = 2.0, 0.5


class Linear(nn.Linear):
    def __init__(self, n_out=1):
        super().__init__(3, n_out, bias=False, dtype=torch.float64)


OPTIONS = LaplaceRegressor(
    prior_precision=DELTA,
    sigma_noise=SIGMA,
    refine=False,
    subset_of_weights="all",
    hessian_structure="full",
)._check_options()


def data(rows):
    return TrainingData(X[rows], Y[rows], None)


def fitted(rows=slice(None), options=OPTIONS):
    """The solver, what it accumulated, and the posterior."""
    net = initialised(regressor(Linear))
    targets = Y, input_type(net), None, SIGMA, "LaplaceClassifier"
    trainer = LaplaceTrainer(
        estimator=FrozenEstimator(net),
        targets=NumberTargets.infer(*targets),
        likelihood=None,
        seed=0,
        validation_fraction=None,
        alternative="LaplaceClassifier",
        options=options,
    )
    solver = LaplaceSolver(options, seed=0)
    fit = solver.accumulate(trainer.train(data(rows), None, {}))
    return solver, fit, solver.posterior(fit, HeldOutScore())


@pytest.mark.parametrize("refine", [False, True])
def test_the_posterior_of_a_linear_model_is_exact(refine):
    _, _, posterior = fitted(options=replace(OPTIONS, refine=refine))
    precision = X.T @ X / SIGMA**2 + DELTA * np.eye(3)
    np.testing.assert_allclose(posterior.precision_matrix(), precision, rtol=1e-12)
    if refine:
        mean = np.linalg.solve(precision, X.T @ Y[:, 0] / SIGMA**2)
        np.testing.assert_allclose(posterior.mean, mean, rtol=1e-9)


def test_parts_add_up_to_all_samples():
    solver, fit, before = fitted(slice(12))
    rest = network_at_mean(before, fit.network, data(slice(12, None)))
    found, (_, _, whole) = solver.add(before, rest), fitted()
    for answer in ("precision_matrix", "log_marginal_likelihood"):
        values = (getattr(posterior, answer)() for posterior in (found, whole))
        np.testing.assert_allclose(*values, rtol=1e-12)


@pytest.mark.parametrize("refine", [False, True])
def test_stored_fits_keep_training_samples_only_where_they_are_used(refine):
    _, fit, _ = fitted(options=replace(OPTIONS, refine=refine))
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
