"""Priors, noise and data at the limits of double precision."""

import numpy as np
import pytest
import torch
from nets import initialised, regressor, waves
from sklearn.frozen import FrozenEstimator
from torch import nn

from sklaplace import LaplaceRegressor

pytestmark = pytest.mark.numerical

# nearly no noise, and a wide prior
EXTREME = {
    "prior_precision": 1e-4,
    "sigma_noise": 1e-6,
    "subset_of_weights": "all",
    "residual": "none",
}


def smooth_net(dtype):
    """Return a net of 61 weights whose Jacobians on a line span few directions."""
    torch_dtype = getattr(torch, np.dtype(dtype).name)
    module = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    return initialised(regressor(module.to(torch_dtype)))


def line(n, dtype):
    X = np.random.default_rng(0).normal(size=(n, 1)).astype(dtype)
    return X, np.sin(X)


def variances_by_qr(net, X, new, delta, sigma):
    """Return output variances from a QR decomposition of ``[J/σ; √δ]``."""
    module = net.module_

    def jacobian(inputs):
        found = []
        for x in torch.as_tensor(inputs):
            gradients = torch.autograd.grad(module(x), list(module.parameters()))
            found.append(torch.cat([g.flatten() for g in gradients]))
        return torch.stack(found)

    rows = jacobian(X)
    prior = torch.eye(rows.shape[1], dtype=rows.dtype) * delta**0.5
    triangle = torch.linalg.qr(torch.cat([rows / sigma, prior])).R
    root = torch.linalg.solve_triangular(triangle.T, jacobian(new).T, upper=False)
    return (root**2).sum(0).numpy()


@pytest.mark.parametrize("structure", ["full", "gp"])
def test_fewer_samples_than_weights_are_right(structure):
    """JJᵀ in float64 loses the directions that the prior leaves uncertain."""
    net = smooth_net(np.float64)
    X, y = line(12, np.float64)
    new = np.linspace(-2, 2, 7)[:, None]
    model = LaplaceRegressor(
        FrozenEstimator(net), hessian_structure=structure, **EXTREME
    ).fit(X, y)
    found = model.latent_mean_and_variance(new)[1][:, 0]
    expected = variances_by_qr(net, X, new, 1e-4, 1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    assert np.isfinite(model.sample_y(new, 3)).all()


@pytest.mark.parametrize(
    ("structure", "n", "dtype"),
    [("full", 120, np.float64), ("kron", 12, np.float64), ("full", 12, np.float32)],
)
def test_what_rounding_would_decide_is_refused(structure, n, dtype):
    """Products of rows, or float32 Jacobians, lose the information."""
    net = smooth_net(dtype)
    model = LaplaceRegressor(
        FrozenEstimator(net), hessian_structure=structure, **EXTREME
    )
    with pytest.raises(ValueError, match="prior_precision is so small"):
        model.fit(*line(n, dtype))
    assert not hasattr(model, "posterior_")


@pytest.mark.parametrize("size", [1e-160, 1e-20, 1e30, 1e100, 1e160, 1e300])
@pytest.mark.parametrize("given", ["y", "y_val"])
def test_targets_of_sizes_that_lose_their_squares_are_refused(size, given):
    X, y = waves(60, dtype=np.float64)
    targets = {"y": y, "y_val": y, given: y * size}
    net = regressor(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double())
    model = LaplaceRegressor(net)
    with pytest.raises(ValueError, match=f"{given} has values up to"):
        model.fit(X, targets["y"], X_val=X, y_val=targets["y_val"])
    assert not net.initialized_


STRUCTURES = ["full", "kron", "diag", "gp", "nystrom", "variational"]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_derivatives_that_overflow_are_refused(structure):
    X, y = line(60, np.float64)
    far = X.copy()
    far[3] = 1e200
    net = FrozenEstimator(initialised(regressor(nn.Linear(1, 1).double())))
    model = LaplaceRegressor(
        net, hessian_structure=structure, prior_precision=1.0, sigma_noise=1.0
    )
    with pytest.raises(ValueError, match=r"not finite.* X"):
        model.fit(far, y)
    posterior = model.fit(X, y).posterior_
    with pytest.raises(ValueError, match=r"not finite.* X"):
        model.partial_fit(far, y)
    assert model.posterior_ is posterior
