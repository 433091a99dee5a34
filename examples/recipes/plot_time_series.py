"""
A time series with gaps
=======================

Sine and cosine of the time let a network repeat what it learned in other years. Bands
of the noise-free curve are wider in the gap, and much wider after the last measurement.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from skorch import NeuralNetRegressor
from torch import nn

from sklaplace import LaplaceRegressor

rng = np.random.default_rng(0)
time = np.sort(rng.uniform(0, 4, 160))
time = time[(time < 1.6) | (time > 2.3)]  # the gap
level = np.sin(2 * np.pi * time) + 0.4 * time
measured = level + 0.2 * rng.standard_normal(len(time))


class Periodic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 1))

    def forward(self, X):
        angle = 2 * torch.pi * X
        return self.body(torch.cat([X - 2, angle.sin(), angle.cos()], 1))


net = NeuralNetRegressor(
    Periodic, optimizer=torch.optim.Adam, lr=0.02, max_epochs=200, verbose=0
)
model = LaplaceRegressor(
    net, subset_of_weights="all", prior_precision="marglik", random_state=0
)
model.fit(time[:, None], measured)

grid = np.linspace(0, 5, 400)[:, None]
mean, variance = (v.ravel() for v in model.latent_mean_and_variance(grid))
figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
for width, opacity in [(2, "33"), (1, "55")]:
    deviation = width * variance**0.5
    ax.fill_between(
        grid[:, 0], mean - deviation, mean + deviation, color="#0072B2" + opacity, lw=0
    )
ax.plot(grid, mean, color="#0072B2", label="mean, one and two standard deviations")
ax.scatter(time, measured, s=8, color="black", label="measured")
ax.set(xlabel="time (years)", ylabel="level")
ax.legend(loc="upper left")
plt.show()
