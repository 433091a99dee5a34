"""
Conformal prediction on top
===========================

Conformal prediction corrects intervals on held-out samples, so that 90 % of new targets
lie in them on average. By residuals alone, intervals are equally wide everywhere. MAPIE
can scale residuals by the predicted standard deviations: see :doc:`/clients`.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from mapie.conformity_scores import ResidualNormalisedScore
from mapie.regression import SplitConformalRegressor
from sklearn.base import BaseEstimator, RegressorMixin
from skorch import NeuralNetRegressor
from torch import nn

from sklaplace import LaplaceRegressor
from sklaplace.likelihoods import HeteroscedasticNLLLoss

rng = np.random.default_rng(0)
X = rng.uniform(-3, 3, (1500, 1)).astype("float32")
y = np.sin(X[:, 0]) + (0.1 + 0.3 * abs(X[:, 0])) * rng.standard_normal(1500)
X_train, X_held_out, X_test = np.split(X, 3)
y_train, y_held_out, y_test = np.split(y, 3)


class Deviation(RegressorMixin, BaseEstimator):
    n_features_in_ = 1  # to MAPIE, a sign that it is fitted
    fit = None  # required, but not called

    def predict(self, X):
        return model.predict(X, return_std=True)[1]


def mlp():  # two outputs: mean and noise
    return nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 2))


net = NeuralNetRegressor(mlp, criterion=HeteroscedasticNLLLoss, max_epochs=100)
net.set_params(optimizer=torch.optim.Adam, lr=0.02, verbose=0)
model = LaplaceRegressor(net, residual="none", random_state=0).fit(X_train, y_train)

scaled = ResidualNormalisedScore(Deviation(), prefit=True)
order, noisy = X_test[:, 0].argsort(), np.abs(X_test[:, 0]) > 2
figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
scores = {"residuals": "absolute", "scaled residuals": scaled}
for ax, (name, score) in zip(axes, scores.items(), strict=True):
    conformal = SplitConformalRegressor(model, 0.9, conformity_score=score)
    conformal.conformalize(X_held_out, y_held_out)
    low, high = conformal.predict_interval(X_test)[1][:, :, 0].T
    inside = (low <= y_test) & (y_test <= high)
    text = f"coverage {inside.mean():.1%}, {inside[noisy].mean():.1%} where |x| > 2"
    print(f"{name}: {text}")
    band = X_test[order, 0], low[order], high[order]
    ax.fill_between(*band, color="#0072B2", alpha=0.3)
    ax.scatter(X_test, y_test, s=5, color="black")
    ax.set(title=f"{name}\n{text}", xlabel="x")
plt.show()
