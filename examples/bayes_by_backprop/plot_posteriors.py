"""
Four families of weight posteriors
==================================

In Bayes by Backprop, each weight has its own distribution. The distribution is a
Gaussian, or belongs to one of three flexible families that can be skewed, flat or
bimodal. In the example below, some weights use this flexibility, but the predictions do
not improve. All families except the Gaussian are therefore experimental.

The script takes about half a minute on two idle cores, and several minutes on slow or
busy cores.
"""

# %%
# The curve and the network
# -------------------------
#
# The points lie on both sides of a gap. Each seed has its own points and initial
# weights.

from time import process_time

import matplotlib.pyplot as plt
import numpy as np
import torch
from skorch import NeuralNetRegressor
from torch import nn

from sklaplace import VariationalRegressor
from sklaplace.metrics import gaussian_nll
from sklaplace.plotting import PredictiveBandDisplay
from sklaplace.variational import Kumaraswamy

torch.set_num_threads(1)  # small networks gain nothing from more

FAMILIES = ("gaussian", "kumaraswamy", "quantile", "density")
SEEDS = (0, 1, 2)
EPOCHS = 800


def curve(x):
    return np.sin(2 * x) + 0.3 * x


def points(rng, n):
    x = np.concatenate([rng.uniform(-3, -1, n), rng.uniform(1, 3, n)])
    y = curve(x) + 0.15 * rng.normal(size=2 * n)
    return x[:, None].astype("float32"), y.astype("float32")


def mlp():
    return nn.Sequential(
        nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1)
    )


net = NeuralNetRegressor(
    mlp,
    optimizer=torch.optim.Adam,
    lr=0.02,
    batch_size=-1,
    max_epochs=EPOCHS,
    train_split=None,
    verbose=0,
)

# %%
# Four families for each seed
# ---------------------------
#
# All families use the same weight of the divergence, ``kl_weight=0.03``. The columns of
# the table are:
#
# * ``RMSE`` and ``NLL`` (negative log-likelihood): errors on new points near the
#   training points; lower is better
# * ``over Gaussian``: NLL minus the NLL of the Gaussian family with the same seed
# * ``ELBO``: evidence lower bound; higher is closer to the exact posterior
# * ``KL``: divergence of the posterior from the prior
# * ``in the gap``: width of the bands in the gap, relative to the width at the points,
#   without the noise
# * ``seconds``: training time

GAP = np.linspace(-0.5, 0.5, 50, dtype="float32")[:, None]


def from_weights(model, X):
    """Return the mean standard deviation without the noise."""
    _, std = model.predict(X, return_std=True)
    return np.sqrt(std**2 - model.sigma_noise_**2).mean()


NAMES = "RMSE", "NLL", "over Gaussian", "ELBO", "KL", "in the gap", "seconds"
models, runs = {}, {family: [] for family in FAMILIES}
for seed in SEEDS:
    rng = np.random.default_rng(seed)
    X, y = points(rng, 40)
    X_test, y_test = points(rng, 1000)
    for family in FAMILIES:
        start = process_time()
        model = VariationalRegressor(
            net, posterior=family, kl_weight=0.03, random_state=seed
        ).fit(X, y)
        seconds = process_time() - start
        mean, std = model.predict(X_test, return_std=True)
        scores = (
            np.sqrt(np.mean((y_test - mean) ** 2)),
            (loss := gaussian_nll(y_test, mean, std)),
            loss - (runs["gaussian"][-1][1] if family != "gaussian" else loss),
            model.elbo_,
            model.kl_,
            from_weights(model, GAP) / from_weights(model, X_test),
            seconds,
        )
        runs[family].append(scores)
        models[family, seed] = model, X, y

print(f"{'':12}" + "".join(f"{name:>16}" for name in NAMES))
for family in FAMILIES:
    line = f"{family:12}"
    for name, values in zip(NAMES, zip(*runs[family], strict=True), strict=True):
        form = ".3f" if name in NAMES[:3] else ".1f"
        line += f"{np.mean(values):9{form}} ±{np.std(values):5{form}}"
    print(line)

# %%
# No flexible family improves on the predictions of the Gaussian by more than the
# variation between seeds. The results of the quantile family are almost the same as
# those of the Gaussian. The Kumaraswamy family predicts slightly worse. The bands of
# all families are wider in the gap, and no flexible family is faster to train.
#
# The figure shows the first seed. In this run, the density family has smoothed out the
# bump on the left, which explains most of its higher NLL.

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
COLORS = dict(zip(FAMILIES, (BLUE, ORANGE, GREEN, PINK), strict=True))
figure, axes = plt.subplots(
    1, 4, figsize=(10, 2.9), sharex=True, sharey=True, layout="constrained"
)
x = np.linspace(-4, 4, 200)
for ax, family in zip(axes, FAMILIES, strict=True):
    model, X, y = models[family, SEEDS[0]]
    PredictiveBandDisplay.from_estimator(
        model,
        X,
        y,
        eps=1,
        ax=ax,
        line_kw={"color": COLORS[family]},
        band_kw={"color": COLORS[family]},
    )
    ax.plot(x, curve(x), color="black", linestyle=":", label="truth")
    ax.set(title=family, xlim=(-4, 4), ylim=(-3, 3), xlabel="x")
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("y")
plt.show()

# %%
# Shapes of the Kumaraswamy family
# --------------------------------
#
# With shape parameters ``a`` and ``b``, a weight ``w`` between the bounds -3 and 3 has
# ``P(w <= 6 u - 3) = 1 - (1 - u**a)**b``. The left panel shows five densities, with a
# mode inside the interval, at one bound or at both bounds. The trained parameters are
# the median and ``log a``, with which training converges better. In the right panel,
# ``a`` varies and the median is fixed at 1. As the density narrows, it does not
# approach a Gaussian: its shape approaches the density of the logarithm of an
# exponential variable, which is skewed.

BOUND = 3.0
SHAPES = (0.5, 0.5), (1.0, 3.0), (2.0, 2.0), (5.0, 1.0), (2.0, 5.0)
GROWING = 0.5, 1.0, 2.0, 4.0, 12.0


def density_of(median, a):
    """Return the density on the grid ``w`` for a median in (0, 1) and a."""
    family = Kumaraswamy(torch.zeros(1), torch.ones(1), bound=BOUND).double()
    with torch.no_grad():
        family.logit_median.fill_(np.log(median) - np.log1p(-median))
        family.log_a.fill_(np.log(a))
        return family.log_prob(torch.tensor(w)[:, None])[:, 0].exp().numpy()


w = np.linspace(-BOUND, BOUND, 602)[1:-1]
densities = {(a, b): density_of((1 - 2 ** (-1 / b)) ** (1 / a), a) for a, b in SHAPES}
narrowing = {a: density_of(4 / 6, a) for a in GROWING}
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
styles = "-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))
for ((a, b), density), color, style in zip(
    densities.items(), (*COLORS.values(), "black"), styles, strict=True
):
    left.plot(w, density, color=color, ls=style, label=f"a = {a:g}, b = {b:g}")
for (a, density), color, style in zip(
    narrowing.items(), (*COLORS.values(), "black"), styles, strict=True
):
    right.plot(w, density, color=color, ls=style, label=f"a = {a:g}")
right.axvline(1, color="0.6", lw=0.8, zorder=0)
left.set(title="shape parameters", xlabel="weight", ylabel="density", ylim=(0, 0.8))
right.set(title="median 1", xlabel="weight", ylim=(0, 1.2))
for ax in (left, right):
    ax.legend(frameon=False, fontsize="small")
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# The weights
# -----------
#
# We measure how far each posterior is from a Gaussian. The measure is the divergence of
# its density from the Gaussian with the same mean and variance. The divergence is the
# difference of the two entropies in nats per weight, estimated from draws.


def from_gaussian(posterior):
    """Return how much lower the entropy of each weight is than a Gaussian's."""
    drawn = posterior.sample(4000, torch.Generator().manual_seed(0))
    entropy = -posterior.log_prob(drawn.float()).double().mean(0)
    return (0.5 * torch.log(2 * torch.pi * torch.e * drawn.var(0)) - entropy).numpy()


lacking = {
    family: [from_gaussian(models[family, seed][0].posterior_) for seed in SEEDS]
    for family in FAMILIES
}
print(f"{'nats from a Gaussian':22}{'median':>9}{'90 %':>9}{'largest':>9}")
for family, values in lacking.items():
    numbers = [np.quantile(values, q) for q in (0.5, 0.9, 1.0)]
    print(f"{family:22}" + "".join(f"{number:9.3f}" for number in numbers))

# %%
# The figure shows densities of the first seed, standardised to mean zero and standard
# deviation one. Each panel shows three weights: the one farthest from a Gaussian (thick
# line), and those at the 90 % quantile and the median of the divergence.

RANKS = {
    "farthest": (1.0, 2.4, "-"),
    "90 %": (0.9, 1.2, "-"),
    "median": (0.5, 1.2, ":"),
}
z = np.linspace(-4, 4, 600)
figure, axes = plt.subplots(
    1, 3, figsize=(10, 3), sharex=True, sharey=True, layout="constrained"
)
for ax, family in zip(axes, FAMILIES[1:], strict=True):
    posterior = models[family, SEEDS[0]][0].posterior_
    mean, std = posterior.mean, posterior.variance().sqrt()
    grid = mean + std * torch.tensor(z)[:, None]
    density = (posterior.log_prob(grid.float()).double().exp() * std).numpy()
    order = np.argsort(lacking[family][0])
    ax.fill_between(z, np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi), color="0.88", lw=0)
    for name, (rank, width, style) in RANKS.items():
        weight = order[round(rank * (len(order) - 1))]
        line = {"color": COLORS[family], "lw": width, "ls": style}
        ax.plot(z, density[:, weight], label=name, **line)
    ax.set(title=family, xlabel="weight, standardised")
    ax.legend(frameon=False, fontsize="small")
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set(ylabel="density", ylim=(0, None))
axes[0].annotate("Gaussian", (-3.6, 0.15), color="0.4", fontsize="small")
plt.show()

# %%
# Most weights of the Kumaraswamy family are skewed, because this family has no
# symmetric narrow shapes. The weights of the quantile family stay Gaussian, with few
# exceptions. The density family, which is linear between grid nodes, is farthest from a
# Gaussian. These differences do not improve the predictions, so use the Gaussian
# family.
