"""
Bayesian optimisation with gradients
====================================

The function of Forrester et al. (2008) is maximised, with its sign changed. The mean
and covariance of ``predictive`` are in torch's graph: gradients maximise the bound.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from skorch import NeuralNetRegressor

from sklaplace import LaplaceRegressor


def expensive(x):  # its maximum is 6.02, at 0.757
    return -((6 * x - 2) ** 2) * np.sin(12 * x - 4)


class Net(torch.nn.Sequential):
    def forward(self, X):
        return super().forward(12 * X - 6)  # steep enough for several extrema


def next_point(model):
    def upper_bound(x):
        mean, cov = model.predictive(x)
        return mean[:, 0] + 3 * cov[:, 0, 0].sqrt()

    x = torch.linspace(0, 1, 20)[:, None].requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.01, maximize=True)
    for _ in range(20):
        (x.grad,) = torch.autograd.grad(upper_bound(x).sum(), x)
        optimizer.step()
        x.data.clamp_(0, 1)
    return x[upper_bound(x).argmax()].detach().numpy()


torch.set_num_threads(1)  # small networks gain nothing from more
module = Net(torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
net = NeuralNetRegressor(module, optimizer=torch.optim.Adam, lr=0.03, max_epochs=100)
net.set_params(train_split=None, verbose=0)
options = {"subset_of_weights": "all", "hessian_structure": "full"}
options |= {"prior_precision": 1.0, "sigma_noise": 0.05, "normalize_y": True}
figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
for seed, color in enumerate(["#0072B2", "#D55E00", "#009E73"]):
    X = np.random.default_rng(seed).uniform(size=(3, 1))
    while len(X) < 12:
        model = LaplaceRegressor(net, random_state=seed, **options)
        model.fit(X, expensive(X[:, 0]))
        X = np.vstack([X, next_point(model)])
    best = np.maximum.accumulate(expensive(X[:, 0]))
    print(f"run {seed}: {best[2]:.2f} after 3 evaluations, {best[-1]:.2f} after 12")
    ax.plot(range(1, 13), best, marker="o", color=color, label=f"run {seed}")
ax.axhline(6.02, color="black", linestyle=":", label="maximum")
ax.set(xlabel="evaluations, of which three are random", ylabel="largest value")
ax.legend()
plt.show()
