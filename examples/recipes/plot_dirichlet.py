"""
Dirichlet distributions on the simplex
======================================

``predict_dirichlet`` returns a distribution over the class probabilities of a sample,
and not only their mean.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import make_blobs
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier
from sklaplace.plotting import DirichletDisplay

# %%
# The sample lies where three classes overlap.
centers = [[-2, 0], [2, 0], [0, 3]]
X, y = make_blobs(3000, centers=centers, cluster_std=1.5, random_state=0)
X = X.astype("float32")
sample = np.array([[0, 1]], dtype="float32")


def mlp():
    return nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 3))


net = NeuralNetClassifier(mlp, criterion=nn.CrossEntropyLoss, lr=0.01, max_epochs=30)
net.set_params(optimizer=torch.optim.Adam, verbose=0)
options = {"prior_precision": "marglik", "residual": "none", "random_state": 0}
model = LaplaceClassifier(net, **options)

figure, axes = plt.subplots(1, 4, figsize=(12, 3.2), layout="constrained")
for label, color, marker in [(0, "#0072B2", "o"), (1, "#E69F00", "s"), (2, "k", "^")]:
    shown = X[:300][y[:300] == label]
    axes[0].scatter(*shown.T, s=8, color=color, marker=marker, label=label)
axes[0].scatter(*sample.T, s=150, color="#D55E00", marker="*", zorder=3)
axes[0].set(ylim=(-8, 8), title="the star is predicted")
axes[0].legend(title="class", loc="lower center", ncols=3)
# %%
# We fit the model to 30, 300 and 3,000 samples. Without the residual, the epistemic
# uncertainty is due to the weights alone. The two uncertainties are in nats.
for ax, n_samples in zip(axes[1:], [30, 300, 3000], strict=True):
    model.fit(X[:n_samples], y[:n_samples])
    alpha = model.predict_dirichlet(sample)
    _, aleatoric, epistemic = model.predict_uncertainty(sample)[0]
    parts = f"aleatoric {aleatoric:.2f}, epistemic {epistemic:.2f}"
    print(f"{n_samples} samples: concentrations {alpha[0].round(1)}, {parts}")
    DirichletDisplay.from_estimator(model, sample, ax=ax)
    ax.set_title(f"{n_samples} training samples\n{parts} nats", fontsize="medium")
plt.show()
# %%
# More training samples make the distribution narrower: the epistemic uncertainty falls.
# The aleatoric uncertainty remains, because the classes overlap.
