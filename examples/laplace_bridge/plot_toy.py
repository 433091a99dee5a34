"""
Two moons, and confidence far from the data
===========================================

Far from its data, a network should not be confident. Laplace achieves this if the
predictions are averaged over draws. The Laplace bridge needs no draws. This study
checks whether the bridge preserves the uncertainty. According to the paper (Hobbhahn et
al., 2022), the bridge is overconfident, and its correction, ``bridge_norm``, is close
to the average over draws.
"""

# %%
# The network
# -----------
#
# As in the paper, a network with two layers of twenty units learns a hundred points. It
# is trained for a thousand epochs with Adam and a weight decay of 5e-4.

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import make_moons
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier, dirichlet

torch.set_num_threads(1)  # small networks gain nothing from more

EPOCHS = 1000
RESOLUTION = 100
WEIGHT_DECAY = 5e-4

X, y = make_moons(100, noise=0.1, random_state=62)
X = X.astype("float32")


def mlp():
    return nn.Sequential(
        nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2)
    )


net = NeuralNetClassifier(
    mlp,
    criterion=nn.CrossEntropyLoss,
    optimizer=torch.optim.Adam,
    optimizer__weight_decay=WEIGHT_DECAY,
    lr=0.001,
    batch_size=-1,
    max_epochs=EPOCHS,
    train_split=None,
    verbose=0,
)
torch.manual_seed(0)
net.fit(X, y)

# %%
# Two prior precisions
# --------------------
#
# The number 5e-4 can have two meanings. Weight decay is added to the *mean* loss over
# the samples, and the prior precision is added to the *sum*. The first setting uses
# 5e-4 as the prior precision. The second setting uses the prior precision that matches
# the weight decay: 5e-4 times the number of samples.

precisions = {
    "prior 5e-4": WEIGHT_DECAY,
    "prior 5e-4 per sample": WEIGHT_DECAY * len(X),
}
models = {
    name: LaplaceClassifier(
        FrozenEstimator(net),
        prior_precision=precision,
        hessian_structure="full",
        subset_of_weights="all",
        link_approx="mc",
        residual="none",
        random_state=0,
    ).fit(X, y)
    for name, precision in precisions.items()
}

# %%
# The confidence is the probability of the more probable class. "Far away" means more
# than one unit from every point, and "at data" means less than 0.2 from a point.

axis = np.linspace(-3, 4, RESOLUTION, dtype="float32")
grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
nearest = np.linalg.norm(grid[:, None] - X, axis=-1).min(1)
far = nearest > 1

METHODS = {
    "bridge": "bridge",
    "bridge_norm": "bridge_norm",
    "bridge_norm, published": "bridge_norm_published",
    "projection": "projection",
}
maps = {}
for name, model in models.items():
    maps[name, "network"] = net.predict_proba(grid).max(1)
    maps[name, "draws"] = model.predict_proba(grid).max(1)
    for label, method in METHODS.items():
        alpha = model.predict_dirichlet(grid, method=method)
        maps[name, label] = dirichlet.mean(alpha).max(1)
columns = ["network", "draws", *METHODS]
far_away = {key: confidence[far].mean() for key, confidence in maps.items()}
at_data = {key: confidence[nearest < 0.2].mean() for key, confidence in maps.items()}

published = {"bridge": "overconfident", "bridge_norm, published": "close to draws"}
print(f"{'Mean confidence':23}{''.join(f'{name:>23}' for name in models)}")
print(f"{'':23}{'      far away  at data' * 2}  published")
for label in columns:
    numbers = "".join(
        f"{far_away[name, label]:14.3f}{at_data[name, label]:9.3f}" for name in models
    )
    print(f"{label:23}{numbers}  {published.get(label, '')}".rstrip())

# %%
# The published claims hold for both priors. For two classes, the mean of the bridge is
# the softmax of the mean logits. The bridge is therefore as confident as the network
# for every covariance. The correction divides the mean logits by their standard
# deviation, and is as uncertain as the draws. Far from the data, the variances are
# large, so the published correction equals the guarded correction, which never sharpens
# a prediction.
#
# At the data, the draws and the correction are also less confident than the network.
# With such a weak prior, a hundred points do not determine 522 weights.
#
# The projection is the closest Dirichlet distribution, but its mean is not the true
# mean. With such large variances, the probabilities concentrate at zero and one. No
# Dirichlet distribution fits such probabilities well, and the mean of the projection is
# less confident than the draws. Use ``predict_proba`` for probabilities, and
# ``predict_dirichlet`` for a distribution over the probabilities.

shown = ["network", "draws", "bridge", "bridge_norm", "projection"]
figure, axes = plt.subplots(
    2, 5, figsize=(10, 4), sharex=True, sharey=True, layout="constrained"
)
for row, name in zip(axes, models, strict=True):
    row[0].set_ylabel(name)
    for ax, label in zip(row, shown, strict=True):
        surface = ax.contourf(
            axis,
            axis,
            maps[name, label].reshape(RESOLUTION, RESOLUTION),
            levels=np.linspace(0.5, 1, 21),
        )
        for kind, color, marker in [(0, "white", "o"), (1, "black", "^")]:
            ax.scatter(
                *X[y == kind].T, s=6, c=color, marker=marker, edgecolor="black", lw=0.3
            )
        ax.set(xticks=[], yticks=[], aspect="equal")
for ax, label in zip(axes[0], shown, strict=True):
    ax.set_title(label)
figure.colorbar(
    surface, ax=axes, label="confidence", shrink=0.9, ticks=np.linspace(0.5, 1, 6)
)
plt.show()
