"""Comparison with laplace-torch where it is correct; skipped if it is not installed.

laplace-torch excludes current versions of some packages, so the tests do not depend on
it. ``tests/benchmarks/compare.py`` explains how to install laplace-torch. Then run::

    peers/bin/pip install -e ".[test]"
    peers/bin/python -m pytest tests/posterior/test_laplace_torch.py

The tests leave out known differences: links that depend on the variance of a shift of
all logits (probit), the empirical Fisher matrix of regression, which lacks a factor of
two in laplace-torch, Kronecker factors of convolutions with bias, and the Gaussian
process, which keeps only the diagonal ``p (1 - p)`` of the likelihood's Hessian in
laplace-torch.
"""

import copy

import pytest
import torch
from cases import normal
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sklaplace import LaplaceClassifier, LaplaceRegressor, dirichlet

laplace = pytest.importorskip("laplace", reason="laplace-torch is not installed")
curvature = pytest.importorskip("laplace.curvature")

N, TOLERANCE = 30, 1e-6
DELTA, SIGMA, TEMPERATURE = 0.7, 0.6, 1.3

every_likelihood = pytest.mark.parametrize(
    "likelihood", ["classification", "regression"]
)
every_structure = pytest.mark.parametrize("structure", ["full", "kron", "diag"])
pytestmark = [
    pytest.mark.parametrize("subset", ["all", "last_layer"]),
    pytest.mark.filterwarnings("ignore"),  # those of the other library
]


def close(found, expected):
    expected = torch.as_tensor(expected).detach()
    found = torch.as_tensor(found).detach()
    assert found.shape == expected.shape
    error = float((found - expected).abs().max())
    assert error <= TOLERANCE * max(1.0, float(expected.abs().max()))


@pytest.fixture
def both(likelihood, subset, structure):
    """Return both models with the same weights, and new rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        is_class = likelihood == "classification"
        X, points = normal(N, 4, seed=1), normal(7, 4, seed=2)
        y = torch.arange(N) % 3 if is_class else normal(N, 3, seed=3)
        criterion = nn.CrossEntropyLoss if is_class else nn.MSELoss
        net = NeuralNet(copy.deepcopy(module), criterion, verbose=0, train_split=None)
        kind = LaplaceClassifier if is_class else LaplaceRegressor
        settings = {
            "subset_of_weights": subset,
            "hessian_structure": structure,
            "prior_precision": DELTA,
            "temperature": TEMPERATURE,
        } | ({} if is_class else {"sigma_noise": SIGMA})
        net = FrozenEstimator(net.initialize())
        ours = kind(net, random_state=0, **settings).fit(X.numpy(), y.numpy())
        settings["backend"] = curvature.CurvlinopsGGN
        theirs = laplace.Laplace(module, likelihood, **settings)
        theirs.fit(DataLoader(TensorDataset(X, y), batch_size=10))
    return ours, theirs, points


def theirs_dense(theirs, structure):
    """Return laplace-torch's posterior precision, (P, P)."""
    precision = theirs.posterior_precision
    if structure == "full":
        return precision
    return precision.diag() if structure == "diag" else precision.to_matrix()


@every_structure
@every_likelihood
def test_posterior_precision(both, structure):
    ours, theirs, _ = both
    expected = theirs_dense(theirs, structure)
    close(ours.posterior_.precision_matrix(), expected)


@every_structure
@every_likelihood
def test_functional_covariance(both):
    ours, theirs, points = both
    mean, cov = theirs._glm_predictive_distribution(points)
    found = ours.latent_mean_and_variance(points.numpy(), full_cov=True)
    close(found[0], mean)
    close(found[1], cov)


@every_structure
@every_likelihood
def test_log_evidence_and_its_gradient(both):
    ours, theirs, _ = both
    delta = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)
    expected = theirs.log_marginal_likelihood(prior_precision=delta)
    (slope,) = torch.autograd.grad(expected, delta)
    own = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    found = ours.posterior_.replace(prior_precision=own).log_marginal_likelihood()
    close(found, expected.squeeze())
    close(torch.autograd.grad(found, own)[0], slope.squeeze())


@every_structure
@pytest.mark.parametrize("likelihood", ["classification"])
def test_mean_of_the_laplace_bridge(both):
    """Both libraries project the Gaussian to logits that sum to zero."""
    ours, theirs, points = both
    mean, cov = ours.latent_mean_and_variance(points.numpy(), full_cov=True)
    expected = theirs(points, pred_type="glm", link_approx="bridge")
    alpha = dirichlet.laplace_bridge(torch.tensor(mean), torch.tensor(cov))
    close(dirichlet.mean(alpha), expected)
