"""
Intervals that hold what they say
=================================

The noise is not the same everywhere, or the network has learned its training samples
too well: then 90 % intervals do not hold 90 % of new targets. ``recalibrate`` finds the
factor for all standard deviations under which held-out samples are most probable.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import make_friedman1
from sklearn.model_selection import train_test_split
from skorch import NeuralNetRegressor
from torch import nn

from sklaplace import LaplaceRegressor

X, y = make_friedman1(1200, noise=2.0, random_state=0)
X_rest, X_test, y_rest, y_test = train_test_split(X, y, test_size=600, random_state=0)
X_train, X_new, y_train, y_new = train_test_split(X_rest, y_rest, random_state=0)


def mlp():
    return nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 1))


net = NeuralNetRegressor(
    mlp,
    optimizer=torch.optim.Adam,
    lr=0.01,
    max_epochs=300,
    train_split=None,
    verbose=0,
)
# noise by the evidence, which takes residuals of the training samples
options = {"sigma_noise": "marglik", "prior_precision": "marglik"}
model = LaplaceRegressor(net, normalize_y=True, random_state=0, **options)
model.fit(X_train, y_train)

nominal = np.linspace(0.05, 0.95, 19)


def coverage():
    found = []
    for level in nominal:
        low, high = model.predict_interval(X_test, coverage=level).T
        found.append(np.mean((low <= y_test) & (y_test <= high)))
    return found


figure, ax = plt.subplots(figsize=(5, 4), layout="constrained")
ax.plot([0, 1], [0, 1], color="0.6", lw=1)
ax.plot(nominal, coverage(), marker="o", ms=3, color="#D55E00", label="after fit")
model.recalibrate(X_new, y_new)
ax.plot(nominal, coverage(), marker="o", ms=3, color="#0072B2", label="recalibrated")
ax.set(xlabel="nominal coverage", ylabel="fraction of test targets", aspect="equal")
ax.legend()
plt.show()
