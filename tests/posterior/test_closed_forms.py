"""Linear networks with Gaussian noise, for which Laplace is exact."""

import math

import numpy as np
import pytest
import torch
from cases import DOUBLE, normal
from contracts import accumulate, assert_equal, hyperparameters
from scipy import stats
from torch import nn

from sklaplace.curvature.ggn import GGN
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.likelihoods import Gaussian
from sklaplace.networks.forward import Forward
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.last_layer import LastLayerRecorder
from sklaplace.posterior.predictive import glm

N, FEATURES = 25, 4
DELTA, SIGMA = 0.7, 0.4
# single weights are no linear model that can be refitted
LINEAR = [subset for subset in SUBSETS if subset != "subnetwork"]

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("rng_untouched")]


def data(*, orthogonal=False):
    X = normal(N, FEATURES, seed=1)
    if orthogonal:
        X = torch.linalg.qr(X)[0] * torch.tensor([1.0, 2.0, 3.0, 4.0])
    y = X @ normal(FEATURES, seed=2) + 0.8 + SIGMA * normal(N, seed=3)
    return X, y, normal(7, FEATURES, seed=4)


def exact_posterior(X, y, structure, *, bias, subset="last_layer"):
    """Return the posterior at a linear network's MAP weights, and the network."""
    module = nn.utils.skip_init(nn.Linear, FEATURES, 1, bias=bias, dtype=DOUBLE)
    for index, parameter in enumerate(module.parameters()):
        parameter.data = normal(*parameter.shape, seed=10 + index)
    forward = Forward(module, module)
    module.requires_grad_(False)
    layout = SUBSETS[subset](forward, X)
    accumulator = STRUCTURES[structure][0](layout)
    rows = LastLayerRecorder(torch.ones(1, 1, dtype=DOUBLE))
    batches = [(X[:10], y[:10], None), (X[10:], y[10:], None)]
    data_fit = accumulate(forward, batches, Gaussian(), GGN, accumulator, rows.add)
    weights = layout.read(module)
    posterior = GaussianPosterior(
        mean=weights,
        weights=weights,
        structure=accumulator.decompose(),
        layout=layout,
        likelihood=Gaussian(),
        data_fit=data_fit,
        hyperparameters=hyperparameters(prior_precision=DELTA, sigma_noise=SIGMA),
    )
    model = rows.build(posterior, GGN, STRUCTURES[structure][0])
    return model.refit(posterior), forward


def textbook(X, y, X_new):
    """Return mean, latent deviation and evidence (Bishop 2006, section 3.3)."""
    P = X.T @ X / SIGMA**2 + DELTA * torch.eye(X.shape[1]).double()
    cov = torch.linalg.inv(P)
    mean = cov @ X.T @ y / SIGMA**2
    marginal = SIGMA**2 * torch.eye(len(X)).double() + X @ X.T / DELTA
    density = stats.multivariate_normal(np.zeros(len(X)), marginal.numpy())
    std = (X_new @ cov * X_new).sum(1).sqrt()
    return X_new @ mean, std, density.logpdf(y.numpy())


def with_ones(X):
    return torch.cat([X, torch.ones(len(X), 1, dtype=DOUBLE)], 1)


# structure, bias, orthogonal inputs: where the structure is no approximation
EXACT = [("full", True, False), ("full", False, False), ("kron", False, False)]
EXACT += [(structure, False, True) for structure in STRUCTURES]
every_exact = pytest.mark.parametrize(("structure", "bias", "orthogonal"), EXACT)


@every_exact
@pytest.mark.parametrize("subset", LINEAR)
def test_textbook(structure, bias, orthogonal, subset):
    X, y, X_new = data(orthogonal=orthogonal)
    posterior, forward = exact_posterior(X, y, structure, bias=bias, subset=subset)
    mean, cov = glm(posterior, forward, X_new)
    design = with_ones if bias else torch.clone
    expected_mean, std, log_evidence = textbook(design(X), y, design(X_new))
    assert_equal(mean.squeeze(1), expected_mean, 1e-8)
    assert_equal(cov.flatten().sqrt(), std, 1e-8)
    found = posterior.log_marginal_likelihood()
    assert math.isclose(found, log_evidence, rel_tol=1e-10)
