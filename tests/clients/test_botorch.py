"""BoTorch: batch acquisition functions of the joint predictive, with gradients."""

import numpy as np
import pytest
import torch
from nets import MLP, regressor

from sklaplace import LaplaceRegressor

pytest.importorskip("botorch")
from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.distributions import MultivariateNormal

BOUNDS = torch.tensor([[-2.0, -2.0], [2.0, 2.0]], dtype=torch.float64)


class LaplaceModel(Model):
    """A fitted `LaplaceRegressor` with one output, as a BoTorch model."""

    num_outputs = 1
    batch_shape = torch.Size()

    def __init__(self, regressor):
        super().__init__()
        self.regressor = regressor

    def posterior(self, X, *args, observation_noise=False, **kwargs):
        mean, cov = self.regressor.predictive(X.flatten(0, -3), joint=True)
        # equal points have a singular covariance
        added = 1e-6 * cov.diagonal(dim1=1, dim2=2).mean()
        if observation_noise:
            added = added + self.regressor.sigma_noise_**2
        cov = cov + added * torch.eye(X.shape[-2])
        moments = mean.unflatten(0, X.shape[:-2]), cov.unflatten(0, X.shape[:-2])
        return GPyTorchPosterior(MultivariateNormal(*moments))


def objective(X):
    """Return the objective, which has its maximum of one at (0.5, -0.5)."""
    return np.exp(-((X - [0.5, -0.5]) ** 2).sum(-1))


@pytest.fixture(scope="module")
def model():
    X = np.random.default_rng(0).uniform(-2, 2, size=(60, 2))
    X = X[objective(X) < 0.7]  # none near the maximum
    y = objective(X)
    params = {"module__width": 20, "max_epochs": 300}
    net = regressor(MLP, module__dtype=torch.float64, **params)
    settings = {"subset_of_weights": "all", "hessian_structure": "full"}
    settings |= {"prior_precision": "marglik", "sigma_noise": "marglik"}
    model = LaplaceRegressor(net, random_state=0, **settings).fit(X, y)
    return LaplaceModel(model), X, y


@pytest.fixture(scope="module")
def acquisition(model):
    model, _, y = model
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=0)
    return qLogExpectedImprovement(model, best_f=float(y.max()), sampler=sampler)


def test_gradient_of_three_points_is_that_of_finite_differences(acquisition):
    points = torch.tensor([[[0.4, -0.4], [0.9, -0.2], [-1.0, 1.0]]]).double()
    points.requires_grad_()
    (found,) = torch.autograd.grad(acquisition(points).sum(), points)
    assert torch.isfinite(found).all()
    step, expected = 1e-5, torch.zeros_like(points)
    with torch.no_grad():
        for index in np.ndindex(*points.shape):
            shift = torch.zeros_like(points)
            shift[index] = step
            rise = acquisition(points + shift) - acquisition(points - shift)
            expected[index] = rise / (2 * step)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert found.abs().max() > 1e-2


def test_a_point_that_is_there_already_adds_nothing(acquisition):
    """Without covariances, the point would count as another attempt."""
    point = torch.tensor([[[0.5, -0.5]]]).double()
    once, twice = acquisition(point), acquisition(point.expand(1, 2, 2))
    assert abs(once - twice) < 0.02


def test_optimised_batch_improves_on_the_samples(model, acquisition, figure):
    y = model[2]
    options = {"batch_limit": 4, "maxiter": 30}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found, value = optimize_acqf(
            acquisition, BOUNDS, q=3, num_restarts=2, raw_samples=16, options=options
        )
    assert torch.isfinite(value)
    best = objective(found.numpy()).max()
    figure(samples=y.max(), proposed=best)
    assert best > y.max()
    # proposals differ, since their predictions are correlated
    assert torch.pdist(found).min() > 1e-3
