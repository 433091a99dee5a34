"""
Error bars that widen where data are missing
============================================

A small network learns a curve from points with a gap in the middle. Near the points,
the bands should be as wide as the noise. In the gap and beyond the ends, the curve is
unknown, so the bands should be wider.
"""

# %%
# The data
# --------

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetRegressor
from torch import nn

from sklaplace import LaplaceRegressor
from sklaplace.metrics import gaussian_nll, interval_coverage
from sklaplace.plotting import PredictiveBandDisplay

torch.set_num_threads(1)  # small networks gain nothing from more

NOISE = 0.15
rng = np.random.default_rng(0)


def curve(x):
    return np.sin(2 * x) + 0.3 * x


def draw(*ranges, n):
    """Return n noisy points of the curve from each of the ranges."""
    x = np.concatenate([rng.uniform(low, high, n) for low, high in ranges])
    y = curve(x) + NOISE * rng.normal(size=len(x))
    return x.reshape(-1, 1).astype("float32"), y.astype("float32")


near = [(-3.0, -1.0), (1.0, 3.0)]
away = [(-4.0, -3.0), (-1.0, 1.0), (3.0, 4.0)]
X_train, y_train = draw(*near, n=60)
X_val, y_val = draw(*near, n=20)

# %%
# The network
# -----------
#
# The network is trained once. It stays frozen in all fits below.


def mlp():
    return nn.Sequential(
        nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)
    )


net = NeuralNetRegressor(
    mlp,
    optimizer=torch.optim.Adam,
    lr=0.01,
    batch_size=32,
    max_epochs=200,
    train_split=None,
    verbose=0,
)
torch.manual_seed(0)
net.fit(X_train, y_train[:, None])

# %%
# Six kinds of error bars
# -----------------------
#
# The first kind of error bar shows only the noise. Its standard deviation is the error
# of the network on the held-out samples in ``X_val``, and a very large prior precision
# fixes the weights. The other four kinds differ in two choices: whether the last layer
# or all weights are uncertain, and whether the prior precision and the noise are chosen
# on ``X_val`` or by the marginal likelihood of the training samples. These five kinds
# have no residual, so only the weights widen their bands. The last kind adds the
# residual, as ``LaplaceRegressor`` does by default; see :ref:`far`.

errors = net.predict(X_val).ravel() - y_val
noise_only = {"prior_precision": 1e9, "sigma_noise": np.sqrt(np.mean(errors**2))}
last = {"subset_of_weights": "last_layer", "hessian_structure": "full"}
every = {"subset_of_weights": "all", "hessian_structure": "full"}
marglik = {"prior_precision": "marglik", "sigma_noise": "marglik"}
common = {"residual": "none", "random_state": 0}
settings = {
    "noise only": noise_only,
    "last layer, X_val": last,
    "last layer, marglik": last | marglik,
    "all weights, X_val": every,
    "all weights, marglik": every | marglik,
    "last layer, residual": last | {"residual": "auto"},
}
models = {
    name: LaplaceRegressor(FrozenEstimator(net), **common | options).fit(
        X_train, y_train, X_val=X_val, y_val=y_val
    )
    for name, options in settings.items()
}

# %%
# The comparison
# --------------
#
# We predict new points near the training points, and other points in the gap and beyond
# the ends. The table shows the fraction of points inside the 90 % interval, and the
# negative log-likelihood (NLL, lower is better).

tests = [draw(*near, n=500), draw(*away, n=500)]
print(f"{'':22}{'near the data':>20}{'away from the data':>21}")
print(f"{'':22}{'inside':>12}{'NLL':>8}{'inside':>13}{'NLL':>8}{'noise':>10}")
for name, model in models.items():
    numbers = ""
    for X, y in tests:
        inside = interval_coverage(y, model.predict_interval(X, coverage=0.9))
        loss = gaussian_nll(y, *model.predict(X, return_std=True))
        numbers += f"{inside:12.1%}{loss:8.2f} "
    print(f"{name:22}{numbers}{model.sigma_noise_:9.3f}")

# %%
# Near the data, all kinds agree. Away from the data, they disagree: neither the
# training samples nor ``X_val`` determine how wide the bands should be. The widths
# there depend on the prior precision and on which weights are uncertain. With the
# marginal likelihood, the bands are the widest if all weights are uncertain. If only
# the last layer is uncertain, the bands are then hardly wider than the noise. With the
# residual, the bands widen although only the last layer is uncertain.

figure, axes = plt.subplots(
    1, 4, figsize=(12, 3.6), sharex=True, sharey=True, layout="constrained"
)
x = np.linspace(-4, 4, 200)
for ax, name in zip(
    axes,
    ["noise only", "last layer, X_val", "all weights, marglik", "last layer, residual"],
    strict=True,
):
    PredictiveBandDisplay.from_estimator(models[name], X_train, y_train, eps=1, ax=ax)
    ax.plot(x, curve(x), color="black", linestyle=":", label="truth")
    ax.set(title=name, ylim=(-4, 4))
    ax.spines[["top", "right"]].set_visible(False)
axes[0].legend(frameon=False, fontsize="small", ncols=2, loc="lower center")
plt.show()
