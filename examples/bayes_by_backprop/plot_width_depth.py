"""
Width and depth under a mean-field posterior
============================================

The posterior of Bayes by Backprop is fully factorised. In the example below, this
posterior gets worse as the network becomes wider or deeper, if the number of epochs is
the same and the divergence has its full weight. The effect of the width is larger: in a
wide network, the bands are hardly wider in a gap than at the data.

The script trains 30 networks in one to two minutes.
"""

# %%
# Networks of five sizes
# ----------------------
#
# The points of a curve lie on both sides of a gap. Each seed has its own points and
# initial weights. The noise is known, so the networks differ only in their sizes: three
# widths with two hidden layers, and three depths with twenty units per layer.

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
# Three runs for each size
# ------------------------
#
# We train with the full divergence (``kl_weight=1``, Bayes' rule) and with a tenth of
# the divergence (the default). The RMSE and the negative log-likelihood (NLL) are
# measured on new points near the training points; lower is better. "At data" and "in
# gap" are standard deviations of the curve without the noise. The evidence lower bound
# (ELBO) always contains the full divergence.

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
# With the full divergence, wider and deeper networks have a lower ELBO: each additional
# weight adds its divergence from the prior, but the data do not determine additional
# weights. The network with 80 units predicts worst. The standard deviation of its curve
# at the data is several times as large as with five units, while the standard
# deviations in the gap differ little. The reason is that the noise of many independent
# weights adds up at the data. Depth does less harm: from one layer to four layers, the
# ELBO falls and the errors at the data grow, but by less than if the width is
# quadrupled.
#
# A smaller ``kl_weight`` lowers the RMSE of all networks. The ranking of the widths
# stays the same, but the ranking of the depths changes. The NLL depends on the seed,
# because individual points have a large effect if the bands are narrow.

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
# The figure shows the bands of the first seed with the full divergence.

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
# All networks are trained for the same number of epochs. A low ELBO can also mean that
# the posterior of a large network needs more epochs. For priors that are scaled with
# the width, Coker et al. (2022), "Wide mean-field Bayesian neural networks ignore the
# data", prove that the optimum itself tends to the prior. Farquhar, Smith and Gal
# (2020), "Liberty or depth", argue that depth compensates for independent weights in
# large networks. In this small network, depth does not have this effect. Use the
# smallest network that fits the data, or `LaplaceRegressor`, whose posterior has
# dependent weights.
