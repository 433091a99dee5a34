"""
Intervals that hold what they say
=================================

The noise is not the same everywhere, or the network has learned its training samples
too well: then 90 % intervals do not hold 90 % of new targets. ``recalibrate`` finds the
factor for all standard deviations under which held-out samples are most probable.
"""

from functools import partial

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_friedman1
from sklearn.model_selection import train_test_split
from skorch import NeuralNetRegressor
from torch import nn

from sklaplace import LaplaceRegressor
from sklaplace.plotting import RegressionCalibrationDisplay

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

display = partial(RegressionCalibrationDisplay.from_estimator, model, X_test, y_test)
figure, axes = plt.subplots(1, 2, figsize=(9, 4.5), layout="constrained")
display(name="after fit", ax=axes[0])
model.recalibrate(X_new, y_new)
display(name="recalibrated", ax=axes[1])
plt.show()
