"""
A time series with gaps
=======================

The uncertainty of a curve should be larger in gaps and after the last measurement.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from skorch import NeuralNetRegressor
from torch import nn

from sklaplace import LaplaceRegressor

# %%
# The series has a trend and a period of one year. Measurements between the years 1.6
# and 2.3 are missing.
rng = np.random.default_rng(0)
time = np.sort(rng.uniform(0, 4, 160))
time = time[(time < 1.6) | (time > 2.3)]
level = np.sin(2 * np.pi * time) + 0.4 * time
measured = level + 0.2 * rng.standard_normal(len(time))


# %%
# The network also receives the sine and cosine of time, so it can learn the period.
class Periodic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 1))

    def forward(self, X):
        angle = 2 * torch.pi * X
        return self.body(torch.cat([X - 2, angle.sin(), angle.cos()], 1))


net = NeuralNetRegressor(Periodic, lr=0.02, max_epochs=200)
net.set_params(optimizer=torch.optim.Adam, verbose=0)
options = {"subset_of_weights": "all", "prior_precision": "marglik"}
model = LaplaceRegressor(net, random_state=0, **options).fit(time[:, None], measured)
# %%
# ``latent_mean_and_variance`` describes the curve without the noise.
grid = np.linspace(0, 5, 400)
mean, variance = (v.ravel() for v in model.latent_mean_and_variance(grid[:, None]))
for name, low, high in [("measured", 2.3, 4), ("gap", 1.6, 2.3), ("future", 4, 5)]:
    std = variance[(low < grid) & (grid < high)] ** 0.5
    print(f"{name} years {low} to {high}: mean standard deviation {std.mean():.2f}")
figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
for width, opacity in [(2, "33"), (1, "55")]:
    band = mean - width * variance**0.5, mean + width * variance**0.5
    ax.fill_between(grid, *band, color="#0072B2" + opacity, lw=0)
ax.plot(grid, mean, color="#0072B2", label="mean, one and two standard deviations")
ax.scatter(time, measured, s=8, color="black", label="measured")
ax.set(xlabel="time (years)", ylabel="level")
ax.legend(loc="upper left")
plt.show()
# %%
# After the last measurement, the standard deviation is over twice as large as at the
# measurements. In the gap, it is only slightly larger: the network knows the period.
