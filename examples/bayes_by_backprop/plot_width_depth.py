"""
Width and depth under a mean-field posterior
============================================

Is the fully factorised posterior of Bayes by Backprop better or worse in a wider, or in
a deeper network? On the curve below, by Bayes' rule and in as many epochs: worse, above
all in a wider one. Its bands are then hardly wider in a gap than at the data.

This trains 30 networks, which takes one to two minutes.
"""

# %%
# Networks of five sizes
# ----------------------
#
# Points of a curve on both sides of a gap; each seed has its own points and its own
# start. The noise is known, so that the networks differ in nothing but their sizes:
# three widths of two hidden layers, and three depths of twenty units.

import matplotlib.pyplot as plt
import numpy as np
import torch
from skorch import NeuralNetRegressor
from torch import nn

from sklaplace import VariationalRegressor
from sklaplace.metrics import gaussian_nll
from sklaplace.plotting import PredictiveBandDisplay

torch.set_num_threads(1)  # small networks gain nothing from more

SIZES = (5, 2), (20, 2), (80, 2), (20, 1), (20, 4)  # width, depth
KL_WEIGHTS = (1.0, 0.1)
SEEDS = (0, 1, 2)
EPOCHS = 500
NOISE = 0.15


def curve(x):
    return np.sin(2 * x) + 0.3 * x


def points(rng, n):
    x = np.concatenate([rng.uniform(-3, -1, n), rng.uniform(1, 3, n)])
    y = curve(x) + NOISE * rng.normal(size=2 * n)
    return x[:, None].astype("float32"), y.astype("float32")


def mlp(width, depth):
    layers = [nn.Linear(1, width), nn.Tanh()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


net = NeuralNetRegressor(
    mlp,
    module__width=20,
    module__depth=2,
    optimizer=torch.optim.Adam,
    lr=0.03,
    batch_size=-1,
    max_epochs=EPOCHS,
    train_split=None,
    verbose=0,
)

# %%
# Three trainings of each
# -----------------------
#
# By Bayes' rule (``kl_weight=1``), and with a tenth of the divergence, the default.
# RMSE and NLL (negative log-likelihood) are those of new points near the others; lower
# is better. "At data" and "in gap" are standard deviations of the curve there, without
# the noise. The ELBO (evidence lower bound) is that of Bayes' rule, whatever the
# weight.

GAP = np.linspace(-0.5, 0.5, 50, dtype="float32")[:, None]
NAMES = "RMSE", "NLL", "at data", "in gap", "ELBO", "KL"


def fitted(kl_weight, size, X, y, seed):
    sized = net.set_params(module__width=size[0], module__depth=size[1])
    model = VariationalRegressor(
        sized, kl_weight=kl_weight, sigma_noise=NOISE, random_state=seed
    )
    return model.fit(X, y)


def scores(model, X, y):
    mean, std = model.predict(X, return_std=True)
    at_data, in_gap = (
        np.sqrt(model.latent_mean_and_variance(Z)[1]).mean() for Z in (X, GAP)
    )
    rmse = np.sqrt(np.mean((y - mean) ** 2))
    nll = gaussian_nll(y, mean, std)
    return rmse, nll, at_data, in_gap, model.elbo_, model.kl_


models, runs = {}, {(weight, size): [] for weight in KL_WEIGHTS for size in SIZES}
for seed in SEEDS:
    rng = np.random.default_rng(seed)
    X, y = points(rng, 40)
    X_test, y_test = points(rng, 1000)
    for weight, size in runs:
        model = fitted(weight, size, X, y, seed)
        runs[weight, size].append(scores(model, X_test, y_test))
        models[weight, size, seed] = model, X, y

for weight in KL_WEIGHTS:
    print(f"kl_weight={weight:<8g}" + "".join(f"{name:>15}" for name in NAMES))
    for size in SIZES:
        line = f"{size[0]:3} wide, {size[1]} deep "
        for name, found in zip(NAMES, np.transpose(runs[weight, size]), strict=True):
            form = ".0f" if name in ("ELBO", "KL") else ".3f"
            line += f"{found.mean():8{form}} ±{found.std():5{form}}"
        print(line)

# %%
# By Bayes' rule, a wider network has the lower ELBO, and so has a deeper one: every
# further weight has a divergence of its own from the prior, and the data do not
# determine more of them. The network of 80 units predicts worst. Its standard deviation
# at the data is several times that of the network of five, while it differs little in
# the gap: the noise of many independent weights adds up where the data would be known.
# Depth does less harm. From one layer to four of the same width, the ELBO falls and the
# errors at the data grow, but less than by four times the width.
#
# A smaller ``kl_weight`` lowers the RMSE of all, and the order of widths stays. That of
# depths does not, and the NLL depends on the seed: with narrow bands, single points
# count much.

BLUE, ORANGE = "#0072B2", "#E69F00"
STYLES = dict(zip(KL_WEIGHTS, ((BLUE, "-", "o"), (ORANGE, "--", "s")), strict=True))
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
chains = {
    "units per layer, two layers": (SIZES[:3], 0),
    "layers of 20 units": ((SIZES[3], SIZES[1], SIZES[4]), 1),
}
for ax, (name, (sizes, axis)) in zip(axes, chains.items(), strict=True):
    for weight, (color, line, marker) in STYLES.items():
        found = np.array([[run[1] for run in runs[weight, size]] for size in sizes])
        x, label = [size[axis] for size in sizes], f"kl_weight={weight:g}"
        ax.plot(x, found.mean(1), color=color, ls=line, marker=marker, label=label)
        ax.plot(x, found, color=color, ls="", marker=marker, ms=3, alpha=0.5)
    ax.set(xscale="log", xticks=x, xticklabels=x, xlabel=name)
    ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("NLL of new points")
axes[0].legend(frameon=False)
plt.show()

# %%
# The bands of the first seed, by Bayes' rule:

figure, axes = plt.subplots(
    1, 5, figsize=(11, 2.6), sharex=True, sharey=True, layout="constrained"
)
grid = np.linspace(-4, 4, 200)
for ax, size in zip(axes, SIZES, strict=True):
    model, X, y = models[KL_WEIGHTS[0], size, SEEDS[0]]
    PredictiveBandDisplay.from_estimator(
        model, X, y, eps=1, ax=ax, line_kw={"color": BLUE}, band_kw={"color": BLUE}
    )
    ax.plot(grid, curve(grid), color="black", linestyle=":")
    ax.set(title=f"{size[0]} wide, {size[1]} deep", xlim=(-4, 4), ylim=(-3, 3))
    ax.set_xlabel("x")
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("y")
plt.show()

# %%
# Differences are those after equally many epochs; a low ELBO can also mean that a large
# posterior needs more of them. Coker et al. (2022), "Wide mean-field Bayesian neural
# networks ignore the data", prove for priors that are scaled with the width that the
# optimum itself tends to the prior. Farquhar, Smith and Gal (2020), "Liberty or depth",
# argue that depth makes up for independent weights in large networks; in this small
# one it does not. Take a network that is not larger than the data ask for, or a
# `LaplaceRegressor`, whose weights are dependent.
