"""Noise levels of several target columns: evidence, maximum, tuning after fit."""

import numpy as np
import pytest
import torch
from nets import regressor, seeded, waves
from numpy.testing import assert_allclose
from refusals import refused
from scipy.optimize import minimize
from scipy.stats import multivariate_normal
from sklearn.frozen import FrozenEstimator
from torch import nn
from torch.autograd import gradcheck

from sklaplace import LaplaceRegressor, LaplaceRegressorCV
from sklaplace.curvature.ggn import CURVATURES
from sklaplace.estimators.fitting.noise import loss_per_target
from sklaplace.networks.trained import TrainedNetwork

DOUBLE = {"module__dtype": torch.float64}
LEVELS = np.array([0.2, 0.9])
# structures of a last layer, of which the curvature follows under any levels
SEPARABLE = ["kron", "diag", "full"]


def problem(n=80, noise=(0.1, 0.8)):
    """Return training and other samples with two target columns of different noise."""
    X, y = waves(n, n_targets=2, dtype=np.float64)
    y = y + np.array(noise) * np.random.default_rng(1).normal(size=y.shape)
    half = n // 2
    return (X[:half], y[:half]), (X[half:], y[half:])


def model(**settings):
    """Return an estimator around a trained network."""
    (X, y), _ = problem()
    net = FrozenEstimator(seeded(regressor(**DOUBLE, module__n_out=2), X, y))
    return LaplaceRegressor(net, **{"random_state": 0, "refine": False} | settings)


def fitted(**settings):
    """Return the estimator fitted with a fixed prior and one noise level."""
    settings = {"prior_precision": 5.0, "sigma_noise": 0.3} | settings
    return model(**settings).fit(*problem()[0])


def dense_evidence(found, structure, delta, levels):
    """Return the dense Laplace evidence of the last layer's weights and biases."""
    (X, y), _ = problem()
    module = found.estimator_.module_
    with torch.no_grad():
        h = torch.tanh(module.hidden(torch.tensor(X))).numpy()
        f = module(torch.tensor(X)).numpy()
    theta = torch.cat([module.head.weight.flatten(), module.head.bias])
    theta = theta.detach().numpy()
    eye = np.eye(2)
    # rows of the Jacobian: (n, c, P), weights first
    J = np.concatenate(
        [
            np.einsum("kl,ni->nkli", eye, h).reshape(len(X), 2, -1),
            eye + 0 * f[..., None],
        ],
        axis=2,
    )
    H = np.einsum("nkp,nkq,k->pq", J, J, levels**-2.0)
    n_weights = module.head.weight.numel()
    is_weight = np.arange(len(theta)) < n_weights
    if structure == "kron":  # between weights and biases there is nothing
        H = H * (is_weight[:, None] == is_weight)
    if structure == "diag":
        H = np.diag(np.diag(H))
    P = H + delta * np.eye(len(theta))
    log_p = np.sum(-(((y - f) / levels) ** 2) / 2 - np.log(levels * np.sqrt(2 * np.pi)))
    change = np.linalg.slogdet(P)[1] - len(theta) * np.log(delta)
    return log_p - (change + delta * theta @ theta) / 2


@pytest.mark.parametrize("structure", SEPARABLE)
def test_evidence_is_that_of_the_dense_formula(structure):
    found = fitted(hessian_structure=structure)
    for levels in (LEVELS, np.array([0.5, 0.4])):
        expected = dense_evidence(found, structure, 3.0, levels)
        assert found.log_marginal_likelihood(3.0, levels) == pytest.approx(expected)
    expected = dense_evidence(found, structure, 3.0, np.full(2, 0.4))
    assert found.log_marginal_likelihood(3.0, 0.4) == pytest.approx(expected)
    assert found.log_marginal_likelihood(None, found.sigma_noise_) == pytest.approx(
        found.log_marginal_likelihood_value_
    )


@pytest.mark.parametrize("curvature", [k for k in CURVATURES if k != "hessian"])
@pytest.mark.parametrize("structure", SEPARABLE)
@pytest.mark.parametrize("before", [0.3, [0.7, 0.1]], ids=["one", "two"])
def test_evidence_equals_a_fit_with_these_levels(structure, curvature, before):
    settings = {"hessian_structure": structure, "curvature": curvature}
    found = fitted(sigma_noise=before, **settings)
    expected = fitted(sigma_noise=LEVELS, **settings).log_marginal_likelihood_value_
    assert found.log_marginal_likelihood(sigma_noise=LEVELS) == pytest.approx(expected)


@pytest.mark.parametrize("structure", SEPARABLE)
def test_evidence_is_differentiable_in_each_level(structure):
    given = torch.tensor([0.3, 0.5], dtype=torch.float64)
    found = fitted(hessian_structure=structure, sigma_noise=given)
    start = torch.tensor([3.0, 0.2, 0.9], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda v: found.log_marginal_likelihood(v[0], v[1:]), start)
    # at the levels of fit, too
    start = torch.tensor([0.3, 0.5], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda v: found.log_marginal_likelihood(None, v), start)


ALL = {"subset_of_weights": "all", "hessian_structure": "diag"}
SHARED = {
    "all": ALL,
    "subnetwork": {
        "subset_of_weights": "subnetwork",
        "subset_params": {"n_weights": 9},
        "hessian_structure": "full",
    },
    "lowrank": {"hessian_structure": "lowrank"},
    "gp": {"hessian_structure": "gp"},
}


@pytest.mark.parametrize("settings", SHARED.values(), ids=SHARED)
def test_where_proportions_are_fixed_multiples_are_compared(settings):
    found = fitted(sigma_noise=LEVELS, **settings)
    expected = fitted(sigma_noise=2 * LEVELS, **settings)
    value = found.log_marginal_likelihood(sigma_noise=2 * LEVELS)
    assert value == pytest.approx(expected.log_marginal_likelihood_value_)
    s = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    levels = torch.tensor(LEVELS)
    assert gradcheck(lambda s: found.log_marginal_likelihood(None, s * levels), s)
    words = ["sigma_noise=0.5", "not a multiple of", "[0.2, 0.9]", "last_layer"]
    refused(ValueError, words, lambda: found.log_marginal_likelihood(2.0, 0.5), found)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1)])
def test_refuses_levels_of_another_number_of_columns(shape):
    found = fitted()
    words = [f"sigma_noise has shape {shape}", "shape (2,)"]
    ask = found.log_marginal_likelihood
    refused(ValueError, words, lambda: ask(None, np.ones(shape)), found)


def test_the_loss_of_the_network_is_that_under_the_levels_of_the_posterior():
    """This loss detects networks that learned nothing."""
    (X, y), _ = problem()
    found = fitted(sigma_noise=[0.7, 0.1])
    network = TrainedNetwork(found.estimator_, found.network_spec_)
    moved = found.posterior_.with_noise_levels(torch.tensor(LEVELS))
    squares = (found.predict(X) - y) ** 2 / LEVELS**2 * LEVELS.prod()
    value = loss_per_target(found.posterior_.data_fit, network, moved)
    assert value == pytest.approx(squares.mean() / 2)


# ------------------------------------------------------------------------------ tuning
@pytest.mark.parametrize("structure", SEPARABLE)
@pytest.mark.parametrize("tuner", ["marglik", "validation"])
def test_tuning_after_fit_equals_a_fit_that_tunes(structure, tuner):
    held = problem()[1]
    on_samples = tuner == "validation"
    found = fitted(hessian_structure=structure).tune(*held if on_samples else ())
    settings = {"prior_precision": tuner, "sigma_noise": tuner}
    other = model(hessian_structure=structure, **settings)
    given = dict(zip(("X_val", "y_val"), held, strict=True)) if on_samples else {}
    other.fit(*problem()[0], **given)
    for name in ("sigma_noise_", "prior_precision_", "log_marginal_likelihood_value_"):
        assert_allclose(getattr(found, name), getattr(other, name), rtol=1e-4)
    assert found.sigma_noise_[1] > 2 * found.sigma_noise_[0]
    for method in ("latent_mean_and_variance", "predict_interval"):
        answers = [getattr(m, method)(held[0]) for m in (found, other)]
        assert_allclose(*answers, rtol=1e-3)


def test_later_samples_enter_with_the_levels_that_were_tuned():
    (X, _), held = problem()
    found = fitted(residual="none").tune(*held)
    expected = fitted(
        prior_precision=found.prior_precision_,
        sigma_noise=found.sigma_noise_,
        residual="none",
    )
    for each in (found, expected):
        each.partial_fit(*held)
    answers = [m.latent_mean_and_variance(X) for m in (found, expected)]
    assert_allclose(*answers, rtol=1e-6)
    assert_allclose(*(m.log_marginal_likelihood_value_ for m in (found, expected)))


def test_columns_that_share_weights_keep_their_proportions_with_a_warning():
    found = fitted(**ALL)
    words = "not proportional.*Fit again with sigma_noise"
    with pytest.warns(UserWarning, match=words):
        found.tune(*problem()[1])
    assert np.ndim(found.sigma_noise_) == 0


def test_columns_have_their_own_levels_in_a_search():
    train, held = problem()
    net = regressor(**DOUBLE, module__n_out=2)
    options = {"prior_precisions": [0.1, 10.0], "cv": 2, "random_state": 0}
    found = LaplaceRegressorCV(net, **options).fit(*train)
    low, high = found.sigma_noise_
    assert high > 2 * low
    results = found.cv_results_
    assert_allclose(results["param_sigma_noise"][found.best_index_], [low, high])
    low, high = found.tune(*held).sigma_noise_
    assert high > 2 * low


def best_evidence(found):
    """Maximise the evidence over prior precision and noise levels, by scipy."""

    def loss(v):
        point = torch.tensor(v, requires_grad=True)
        value = -found.log_marginal_likelihood(point[0].exp(), point[1:].exp())
        return value.item(), torch.autograd.grad(value, point)[0].numpy()

    start = np.log([1.0, 0.5, 0.5])
    return -minimize(loss, start, jac=True, method="BFGS", options={"gtol": 1e-8}).fun


@pytest.mark.parametrize("structure", SEPARABLE)
def test_levels_maximise_the_evidence_at_the_weights_of_the_network(structure):
    tuned = {"prior_precision": "marglik", "sigma_noise": "marglik"}
    found = model(hessian_structure=structure, **tuned).fit(*problem()[0])
    assert found.log_marginal_likelihood_value_ > best_evidence(found) - 1e-3


def linear_evidence(Phi, y, delta, levels):
    """Return the closed-form evidence of linear regression for each column."""
    cov = Phi @ Phi.T / delta
    return sum(
        multivariate_normal.logpdf(t, np.zeros(len(t)), cov + s**2 * np.eye(len(t)))
        for t, s in zip(y.T, levels, strict=True)
    )


class Line(nn.Module):
    """A linear model without a bias."""

    def __init__(self, n_out):
        super().__init__()
        self.head = nn.Linear(3, n_out, bias=False, dtype=torch.float64)

    def forward(self, X):
        return self.head(X)


def test_levels_maximise_the_evidence_of_linear_regression():
    """One column has small noise, which the shared loss ignores."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(25, 3))
    y = X @ rng.normal(size=(3, 2)) + [0.05, 2.0] * rng.normal(size=(25, 2))
    tuned = {"prior_precision": "marglik", "sigma_noise": "marglik"}
    net = regressor(Line, module__n_out=2, max_epochs=3)
    found = LaplaceRegressor(net, random_state=0, **tuned).fit(X, y)

    def loss(v):
        return -linear_evidence(X, y, np.exp(v[0]), np.exp(v[1:]))

    options = {"xatol": 1e-8, "fatol": 1e-10, "maxiter": 4000, "maxfev": 4000}
    best = minimize(loss, np.zeros(3), method="Nelder-Mead", options=options)
    value = found.log_marginal_likelihood_value_
    reached = linear_evidence(X, y, found.prior_precision_, found.sigma_noise_)
    assert value == pytest.approx(reached, rel=1e-9)
    assert -best.fun - 1e-4 < value <= -best.fun + 1e-6
    assert_allclose(found.sigma_noise_, np.exp(best.x[1:]), rtol=5e-3)
    assert_allclose(found.prior_precision_, np.exp(best.x[0]), rtol=5e-3)
