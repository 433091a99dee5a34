"""
Bayesian optimisation with gradients
====================================

A model of an expensive function suggests where to evaluate the function next.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from skorch import NeuralNetRegressor
from torch import nn

from sklaplace import LaplaceRegressor


# %%
# The function of Forrester et al. (2008) has several extrema. We change its sign, and
# scale its inputs to lie between -6 and 6.
def expensive(x):  # its maximum is 6.02, at 3.09
    return -((x / 2 + 1) ** 2) * np.sin(x + 2)


# %%
# ``predictive`` returns a mean and a covariance through which gradients flow. The next
# point maximises an upper bound: the mean plus three standard deviations.
def next_point(model):
    x = torch.linspace(-6, 6, 20)[:, None].requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.12, maximize=True)
    for _ in range(20):
        mean, cov = model.predictive(x)
        upper_bound = mean[:, 0] + 3 * cov[:, 0, 0].sqrt()
        (x.grad,) = torch.autograd.grad(upper_bound.sum(), x)
        optimizer.step()
        x.data.clamp_(-6, 6)
    return x[upper_bound.argmax()].detach().numpy()


torch.manual_seed(0)
torch.set_num_threads(1)  # small networks gain nothing from more
mlp = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
net = NeuralNetRegressor(mlp, optimizer=torch.optim.Adam, lr=0.03, max_epochs=100)
net.set_params(train_split=None, verbose=0)
options = {"subset_of_weights": "all", "hessian_structure": "full"}
options |= {"prior_precision": 1.0, "sigma_noise": 0.05, "normalize_y": True}
for seed, color in enumerate(["#0072B2", "#D55E00", "#009E73"]):
    X = np.random.default_rng(seed).uniform(-6, 6, size=(3, 1))
    while len(X) < 12:
        model = LaplaceRegressor(net, random_state=seed, **options)
        model.fit(X, expensive(X[:, 0]))
        X = np.vstack([X, next_point(model)])
    best = np.maximum.accumulate(expensive(X[:, 0]))
    print(f"run {seed}: {best[2]:.2f} after 3 evaluations, {best[-1]:.2f} after 12")
    plt.plot(range(1, 13), best, marker="o", color=color, label=f"run {seed}")
plt.gca().set(xlabel="evaluations, of which three are random", ylabel="largest value")
plt.legend()
plt.show()
# %%
# After 12 evaluations, all runs are within 0.1 of the maximum, 6.02.
