"""A prior precision matrix of all selected weights."""

import numpy as np
import pytest
import torch
from nets import regressor, waves
from numpy.testing import assert_allclose
from torch import nn

from sklaplace import LaplaceClassifier, LaplaceRegressor

P = 31  # weights and bias of a last layer with 30 features


def fitted(n_samples=60, **settings):
    """Fit the last layer of a network with 30 features, P = 31 weights."""
    X, y = waves(n_samples)

    def module():
        return nn.Sequential(nn.Linear(X.shape[1], 30), nn.Tanh(), nn.Linear(30, 1))

    net = regressor(module, max_epochs=20, optimizer=torch.optim.Adam)
    defaults = {"hessian_structure": "full", "sigma_noise": 0.3, "random_state": 0}
    return LaplaceRegressor(net, **defaults | settings).fit(X, y), X


def matrix(seed=0):
    """Return a precision matrix with correlations."""
    root = np.random.default_rng(seed).standard_normal((P, 2 * P))
    return root @ root.T / P


@pytest.mark.parametrize("n_samples", [10, 60])  # fewer rows than weights are kept
def test_posterior_is_that_of_the_dense_formulas(n_samples):
    precision, mean = matrix(), np.linspace(-1, 1, P)
    model, X = fitted(n_samples, prior=precision, prior_mean=mean)
    posterior = model.posterior_
    plain, _ = fitted(n_samples, prior_precision=1.0)
    data = plain.posterior_.precision_matrix().numpy() - np.eye(P)

    total = data + precision
    assert_allclose(posterior.precision_matrix().numpy(), total, rtol=1e-9, atol=1e-9)
    offset = posterior.mean.numpy() - mean
    penalty = np.linalg.slogdet(total)[1] - np.linalg.slogdet(precision)[1]
    penalty += offset @ precision @ offset
    evidence = float(posterior.log_likelihood()) - penalty / 2
    assert_allclose(model.log_marginal_likelihood(), evidence, rtol=1e-9)

    features = model.estimator_.module_[:2](torch.as_tensor(X))
    rows = np.column_stack([features.detach().numpy(), np.ones(len(X))])
    variances = np.einsum("np,pq,nq->n", rows, np.linalg.inv(total), rows)
    _, std = model.predict(X, return_std=True)
    assert_allclose(std**2, variances + 0.3**2, rtol=1e-4)


def test_a_diagonal_matrix_is_an_array_of_precisions():
    values = np.linspace(0.5, 3, P)
    one, X = fitted(prior=np.diag(values))
    other, _ = fitted(prior_precision=values, prior_structure="diag")
    assert_allclose(one.predict(X, return_std=True), other.predict(X, return_std=True))
    evidences = (model.log_marginal_likelihood() for model in (one, other))
    assert_allclose(*evidences)


def test_all_weights_of_a_classifier():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((40, 2)).astype("float32")
    y = np.arange(40) % 3
    settings = {"subset_of_weights": "all", "hessian_structure": "full"}
    plain = LaplaceClassifier(prior_precision=2.0, random_state=0, **settings)
    p = len(plain.fit(X, y).posterior_.mean)
    same = plain.set_params(prior_precision="auto", prior=2 * np.eye(p))
    expected = plain.posterior_.precision_matrix()
    found = same.fit(X, y).posterior_.precision_matrix()
    assert_allclose(found.numpy(), expected.numpy(), rtol=1e-6, atol=1e-6)


def asymmetric():
    wrong = matrix()
    wrong[0, 1] += 1
    return wrong


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prior": np.eye(3)}, [r"\(3, 3\)", r"shape \(31, 31\)"]),
        ({"prior": np.ones((P, 2))}, [r"\(31, 2\)", "symmetric"]),
        ({"prior": asymmetric()}, ["symmetric"]),
        ({"prior": -np.eye(P)}, ["positive definite"]),
        ({"prior": np.ones((P, P))}, ["positive definite"]),
        ({"prior": np.full((P, P), np.nan)}, ["prior"]),
        ({"prior": np.eye(P), "hessian_structure": "kron"}, ["'kron'", "'full'"]),
        ({"prior": np.eye(P), "prior_precision": 2.0}, ["prior_precision"]),
        ({"prior": np.eye(P), "prior_structure": "diag"}, ["prior_structure"]),
        ({"prior": np.eye(P), "sigma_noise": "auto"}, ["sigma_noise"]),
        ({"prior": np.eye(P), "refine": True}, ["refine"]),
        ({"prior_precision": np.eye(P) + 0.1}, ["prior="]),
    ],
)
def test_what_does_not_fit_is_refused(settings, words):
    with pytest.raises(ValueError, match=words[0]) as error:
        fitted(**settings)
    for word in words:
        assert error.match(word)


def test_hyperparameters_cannot_be_changed_afterwards():
    model, _ = fitted(prior=matrix())
    with pytest.raises(ValueError, match="matrix"):
        model.log_marginal_likelihood(2.0)
    with pytest.raises(ValueError, match="matrix"):
        model.tune()
