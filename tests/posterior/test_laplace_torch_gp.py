"""The same Gaussian process as laplace-torch's, where it is right; see its tests.

For classes it keeps the diagonal of the likelihood's Hessian, ``p (1 - p)``; ours keeps
all of ``diag p - p pᵀ``. That is the difference, and the only one.
"""

import copy

import pytest
import references
import torch
from cases import normal
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sklaplace import LaplaceClassifier, LaplaceRegressor
from sklaplace.networks.outputs import as_forward

laplace = pytest.importorskip("laplace", reason="laplace-torch is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the other library
N, TOLERANCE = 30, 1e-6
DELTA, SIGMA, TEMPERATURE = 0.7, 0.6, 1.3


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_functional_covariance(likelihood, subset):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        is_class = likelihood == "classification"
        X, points = normal(N, 4, seed=1), normal(7, 4, seed=2)
        y = torch.arange(N) % 3 if is_class else normal(N, 3, seed=3)
        criterion = nn.CrossEntropyLoss if is_class else nn.MSELoss
        net = NeuralNet(copy.deepcopy(module), criterion, verbose=0, train_split=None)
        kind = LaplaceClassifier if is_class else LaplaceRegressor
        shared = {
            "subset_of_weights": subset,
            "hessian_structure": "gp",
            "prior_precision": DELTA,
            "temperature": TEMPERATURE,
        }
        settings = {} if is_class else {"sigma_noise": SIGMA}
        net = FrozenEstimator(net.initialize())
        ours = kind(net, **shared, **settings).fit(X.numpy(), y.numpy())
        noise = 1.0 if is_class else SIGMA
        theirs = laplace.Laplace(
            module, likelihood, n_subset=N, sigma_noise=noise, **shared
        )
        theirs.fit(DataLoader(TensorDataset(X, y), batch_size=N))
    _, cov = theirs._glm_predictive_distribution(points)
    _, found = ours.latent_mean_and_variance(points.numpy(), full_cov=True)
    p = module(X).softmax(-1).detach()
    lost = (p[:, :, None] * p[:, None]).triu(1) if is_class else torch.zeros(N, 3, 3)
    layout, forward = ours.posterior_.layout, as_forward(ours.estimator_)
    with forward.frozen():
        J = references.jacobian(forward, X, layout)
        Jp = references.jacobian(forward, points, layout)
    lost = lost + lost.mT
    precision = ours.posterior_.precision_matrix()
    more = torch.einsum("ncp,ncd,ndq->pq", J, lost.to(J), J) / TEMPERATURE
    expected = Jp @ torch.linalg.inv(precision + more) @ Jp.mT
    assert float((cov - expected).abs().max()) <= TOLERANCE
    exact = Jp @ torch.linalg.inv(precision) @ Jp.mT
    assert float((torch.tensor(found) - exact).abs().max()) <= TOLERANCE
