"""
Four families of weight posteriors
==================================

Bayes by Backprop gives each weight a distribution of its own: a Gaussian, or one of
three flexible families, which can be skewed, flat or have two modes. Do weights make
use of that, and are predictions any better? On the curve below: somewhat, and no. That
is why all but the Gaussian are experimental.

On two cores with nothing else to do, this runs for about half a minute; on slower ones,
or next to other programs, for several minutes.
"""

# %%
# The curve and the network
# -------------------------
#
# Points on both sides of a gap. Each seed has its own points and its own start.

from time import process_time

import matplotlib.pyplot as plt
import numpy as np
import torch
from skorch import NeuralNetRegressor
from torch import nn

from sklaplace import VariationalRegressor
from sklaplace.metrics import gaussian_nll
from sklaplace.plotting import PredictiveBandDisplay
from sklaplace.posterior.variational import Kumaraswamy

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
# Four trainings for each seed
# ----------------------------
#
# RMSE and NLL (negative log-likelihood) are those of new points near the others; lower
# is better. "Over Gaussian" is the NLL less that of the Gaussian family on the same
# seed. The ELBO (evidence lower bound) is higher for a better posterior in the sense of
# Bayes. "In the gap" is how much wider the bands are there than at the points, noise
# aside. Seconds are those of training. All have the same weight of the divergence,
# ``kl_weight=0.03``.

GAP = np.linspace(-0.5, 0.5, 50, dtype="float32")[:, None]


def from_weights(model, X):
    """Standard deviation without the noise, averaged over samples."""
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
# No flexible family predicts better than the Gaussian by more than what differs from
# seed to seed, and the quantile family can hardly be distinguished from it. The
# Kumaraswamy family predicts somewhat worse here. All open up in the gap, and none is
# faster to train.
#
# The picture shows the first seed. There the density family has smoothed the bump on
# the left away: that is where most of its larger NLL comes from.

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
# ``P(w <= 6 u - 3) = 1 - (1 - u**a)**b``. On the left are densities of a few: one mode
# inside, at a bound, or at both. What is trained, for the sake of convergence, are the
# median and ``log a``; on the right, ``a`` grows while the median is 1. The narrower
# the density, the closer its shape comes to that of the logarithm of an exponential
# variable, which is skewed: never to a Gaussian.

BOUND = 3.0
SHAPES = (0.5, 0.5), (1.0, 3.0), (2.0, 2.0), (5.0, 1.0), (2.0, 5.0)
GROWING = 0.5, 1.0, 2.0, 4.0, 12.0


def density_of(median, a):
    """Density at the grid ``w`` of a median, as a fraction of the interval, and a."""
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
# How far is each posterior from a Gaussian? Measured is the divergence of its density
# from that of the Gaussian with the same mean and variance, by draws: the entropy that
# it lacks, in nats per weight.


def from_gaussian(posterior):
    """Entropy of the Gaussian with the same moments, less the own one, by weight."""
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
# Shapes of the first seed, each with its mean moved to zero and its standard deviation
# to one: of the weight that is farthest from a Gaussian (the extreme, thick), of the
# one that nine in ten are closer than, and of the median.

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
# The Kumaraswamy family is skewed in most of its weights: that is its shape. The
# quantile family stays a Gaussian but for single weights. The density family, linear
# between the nodes of its grid, goes farthest. None of that helps to predict: take the
# Gaussian.
