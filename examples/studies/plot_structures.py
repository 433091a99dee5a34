"""
How much of the curvature to keep
=================================

This study compares seven structures of the curvature for one network, one prior and one
noise level. The network is small enough for the full curvature. The other structures
approximate the full curvature at a lower cost.
"""

# %%
# The network
# -----------

import pickle

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetRegressor
from torch import nn

from sklaplace import LaplaceRegressor

torch.set_num_threads(1)  # small networks gain nothing from more

rng = np.random.default_rng(0)
x = np.concatenate([rng.uniform(-3, -1, 60), rng.uniform(1, 3, 60)])
y = np.sin(2 * x) + 0.3 * x + 0.15 * rng.normal(size=len(x))
X, y = x.reshape(-1, 1).astype("float32"), y.astype("float32")


def mlp():
    return nn.Sequential(
        nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)
    )


net = NeuralNetRegressor(
    mlp,
    optimizer=torch.optim.Adam,
    lr=0.01,
    max_epochs=200,
    train_split=None,
    verbose=0,
)
torch.manual_seed(0)
net.fit(X, y[:, None])

# %%
# Seven structures
# ----------------
#
# The memory is the size of the pickled structure. The error is the mean relative error
# of the standard deviations over the axis, compared with the full curvature. The
# evidence is the quantity that ``prior_precision="marglik"`` maximises.

settings = {
    "full": {"hessian_structure": "full"},
    "kron": {"hessian_structure": "kron"},
    "diag": {"hessian_structure": "diag"},
    "lowrank, 20": {"hessian_structure": "lowrank", "structure_params": {"rank": 20}},
}
for name in ("gp", "nystrom", "variational"):
    points = {"n_points": 20}
    settings[f"{name}, 20"] = {"hessian_structure": name, "structure_params": points}

grid = np.linspace(-4, 4, 200).reshape(-1, 1).astype("float32")
models, spreads = {}, {}
for name, options in settings.items():
    model = LaplaceRegressor(
        FrozenEstimator(net),
        subset_of_weights="all",
        prior_precision=1.0,
        sigma_noise=0.15,
        residual="none",
        random_state=0,
        **options,
    )
    models[name] = model.fit(X, y)
    mean, variance = models[name].latent_mean_and_variance(grid)
    spreads[name] = np.sqrt(variance[:, 0])

print(f"{'':16}{'memory':>10}{'error':>10}{'evidence':>11}")
for name, model in models.items():
    structure = model.posterior_.structure
    size = len(pickle.dumps(structure))
    error = np.mean(np.abs(spreads[name] / spreads["full"] - 1))
    evidence = model.log_marginal_likelihood_value_
    print(f"{name:16}{size / 1024:7.0f} KiB{error:10.1%}{evidence:11.1f}")

# %%
# Between the two groups of points and beyond them, the data contain little information.
# ``gp`` keeps the curvature of twenty samples. ``nystrom`` keeps the curvature of all
# samples in the span of the Jacobians of twenty samples. ``variational`` chooses twenty
# samples with a larger span. Outside the span, the variance is the prior variance.
# The bands of these three structures are therefore never too narrow. The bands of
# ``lowrank`` are never too narrow either.

figure, axes = plt.subplots(
    2, 4, figsize=(10, 5), sharex=True, sharey=True, layout="constrained"
)
for ax, (name, spread) in zip(axes.flat, spreads.items(), strict=False):
    mean = models[name].predict(grid)
    for factor, shade in ((2, 0.25), (1, 0.45)):
        ax.fill_between(
            grid[:, 0],
            mean - factor * spread,
            mean + factor * spread,
            color="C0",
            alpha=shade,
            linewidth=0,
        )
    ax.plot(grid[:, 0], mean, color="C0")
    ax.plot(X[:, 0], y, "k.", markersize=3)
    ax.set(title=name, ylim=(-4, 4))
    ax.spines[["top", "right"]].set_visible(False)
axes.flat[-1].axis("off")
plt.show()
