"""
How many samples is a Dirichlet worth?
======================================

The softmax of Gaussian logits is a distribution over class probabilities. We can draw
samples from this distribution, or replace it by a Dirichlet distribution in closed
form. This study measures how many samples are needed to be as close to the true
distribution as the Dirichlet distribution is. For three Gaussians over three logits,
the paper reports that the Laplace bridge is worth 750 to 10,000 samples (Hobbhahn et
al., 2022). The number depends on how the samples are counted, especially for the third
Gaussian. We report two counts, one of which is the count of the published code.

With IDX files of MNIST and of notMNIST or Fashion-MNIST in a folder ``DIR``, the
Gaussians are predictions of a LeNet for one image of each set:

.. code-block:: bash

   python examples/laplace_bridge/plot_samples.py --data DIR
"""

# %%
# Three Gaussians, and the truth
# ------------------------------
#
# The simplex is divided into ``SIDE ** 2`` small triangles, the cells of a histogram.
# The true probability of a cell is computed from the exact density at ``FINE ** 2``
# points. The softmax ignores a common shift of all logits, so the density is that of
# two differences of logits.

import argparse
from timeit import repeat

import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import multivariate_normal

from sklaplace.dirichlet import kl_projection, laplace_bridge, log_density

SIDE = 20
FINE = 40
MOST = 100_000  # samples
RUNS = 10
ROWS = 1000  # for timing
ADDED = 0.1  # samples added to each cell
EMPTY = 1e-20  # share of an empty cell in the published code

gaussians = {
    "small": ([0, 0, 0], 0.1 * np.eye(3)),
    "off-centre": ([2, -1, -1], np.eye(3)),
    "correlated": ([1, 1, -2], [[1, 0, 0.5], [0, 2, 0.3], [0.5, 0.3, 0.5]]),
}
parser = argparse.ArgumentParser(description="Count how many samples are needed.")
parser.add_argument("--data", metavar="DIR", help="folder of IDX files of MNIST")
folder = parser.parse_args().data
if folder:
    from mnist import gaussians_of_images  # the other file in this folder

    gaussians = gaussians_of_images(folder)
gaussians = {
    name: (np.array(mean, dtype=float), np.array(cov))
    for name, (mean, cov) in gaussians.items()
}


def cell(p):
    """Return the index of the small triangle that contains p (n, 3)."""
    i, j, k = np.floor(SIDE * p).astype(int).T
    return 2 * (SIDE * i + j) + (i + j + k == SIDE - 2)  # points up, or down


def centres(side):
    """Return the centres (side ** 2, 3) of the small triangles."""
    i, j = np.divmod(np.arange(side**2), side)
    up, down = i + j <= side - 1, i + j <= side - 2
    first = np.concatenate([i[up] + 1 / 3, i[down] + 2 / 3]) / side
    second = np.concatenate([j[up] + 1 / 3, j[down] + 2 / 3]) / side
    return np.stack([first, second, 1 - first - second], axis=1)


def shares(log_values):
    """Return the probabilities of the cells from log densities at the points."""
    values = np.exp(log_values - log_values.max())
    return np.bincount(cell(points), values, 2 * SIDE**2)[inside] / values.sum()


def true_log_density(p, mean, cov):
    differences = np.array([[1, 0, -1], [0, 1, -1]])
    logits = np.log(p) @ differences.T
    normal = multivariate_normal(differences @ mean, differences @ cov @ differences.T)
    return normal.logpdf(logits) - np.log(p).sum(1)


def kl(p, q):
    return np.sum(p * np.log(p / q, where=p > 0, out=np.zeros_like(p)))


points = centres(SIDE * FINE)
inside = cell(centres(SIDE))

# %%
# Five Dirichlet distributions
# ----------------------------
#
# There are three versions of the bridge. In this published experiment, the bridge is
# applied to the unchanged Gaussian. By default, ``laplace_bridge`` conditions the
# logits on a sum of zero. If the logits are correlated or have unequal variances, this
# changes the distribution of the softmax. ``predict_dirichlet`` centres the logits,
# which does not change the softmax. The correction ``bridge_norm`` is applied to
# centred logits. This correction never sharpens a prediction, and has no effect if the
# variances are as small as here.

CENTRE = np.eye(3) - 1 / 3
METHODS = {
    "bridge, published": lambda m, S: laplace_bridge(m, S, project=False),
    "bridge, zero sum": laplace_bridge,
    "bridge, centred": lambda m, S: laplace_bridge(m @ CENTRE, CENTRE @ S @ CENTRE),
    "bridge_norm, centred": lambda m, S: laplace_bridge(
        m @ CENTRE, CENTRE @ S @ CENTRE, norm="guarded"
    ),
    "projection": kl_projection,
}
alphas = {
    name: {method: function(*gaussian) for method, function in METHODS.items()}
    for name, gaussian in gaussians.items()
}
print("Concentrations of the bridge as published")
for name, found in alphas.items():
    print(f"{name:12}", *(f"{a:8.3f}" for a in found["bridge, published"]))

# %%
# Histograms of samples
# ---------------------
#
# We compute the KL divergence of the histogram from the truth in nats, as a mean over
# runs. The divergence is infinite if an empty cell has a positive true probability. A
# small number must therefore be added to every cell, and the result depends on this
# number:
#
# * A tenth of a sample is added to every cell. The histogram is then a slightly
#   smoothed estimate of the density, as is usual with few samples.
# * A share of 1e-20 is added to every cell, as in the published code. The true
#   probability of empty cells is then multiplied by 46 nats, the logarithm of 1e20. If
#   the truth is spread over the simplex, many samples are needed to leave few cells
#   empty.
#
# The published code estimates the truth from 100,000 samples on a grid of 561 cells.
# Here, the truth is exact on 400 cells.
#
# The times are measured for many Gaussians at once, and divided by the number of
# Gaussians. They include drawing the samples and computing their softmax, or computing
# the closed form.

counts = np.unique(np.geomspace(1, MOST, 51).round().astype(int))


def draw(mean, cov, n, rng):
    logits = rng.normal(size=(n, 3)) @ np.linalg.cholesky(cov).T + mean
    values = np.exp(logits - logits.max(1, keepdims=True))
    return values / values.sum(1, keepdims=True)


def seconds(function):
    return min(repeat(function, number=1, repeat=7))


rng = np.random.default_rng(0)
truth, sampled, sampled_published, distance, duration = {}, {}, {}, {}, {}
for name, (mean, cov) in gaussians.items():
    truth[name] = shares(true_log_density(points, mean, cov))
    curves, published = np.zeros((2, RUNS, len(counts)))
    for run in range(RUNS):
        drawn = cell(draw(mean, cov, MOST, rng))
        for i, n in enumerate(counts):
            histogram = np.bincount(drawn[:n], minlength=2 * SIDE**2)[inside]
            smoothed = histogram + ADDED
            curves[run, i] = kl(truth[name], smoothed / smoothed.sum())
            published[run, i] = kl(truth[name], histogram / n + EMPTY)
    sampled[name], sampled_published[name] = curves.mean(0), published.mean(0)
    batch = np.tile(mean, (ROWS, 1)), np.tile(cov, (ROWS, 1, 1))
    for method, function in METHODS.items():
        approximate = shares(log_density(alphas[name][method], points))
        distance[name, method] = kl(truth[name], approximate)
        duration[name, method] = seconds(lambda f=function, b=batch: f(*b)) / ROWS
per_sample = seconds(lambda: draw(mean, cov, MOST, rng)) / MOST

# %%
# The table
# ---------
#
# The table shows the smallest number of samples whose histogram is at least as close to
# the truth as the Dirichlet distribution, by both counts. The column ``time`` is the
# time to draw these samples (first count), divided by the time of the closed form.
# "Flat" is the uniform density.


def enough(curve, value):
    """Return the smallest count that reaches a value, or MOST if none does."""
    is_close = curve <= value
    return int(counts[is_close.argmax()]) if is_close.any() else MOST


def shown(curve, value):
    sign = "" if (curve <= value).any() else ">"
    return f"{sign}{enough(curve, value)}"


worth, worth_published = {}, {}
print(f"{'':12}{'':22}{'':8}{'samples, empty cells':>22}")
print(f"{'':12}{'':22}{'KL':>8}{'+ 0.1':>11}{'1e-20':>11}{'time':>11}")
for (name, method), value in distance.items():
    both = sampled[name], sampled_published[name]
    worth[name, method], worth_published[name, method] = (
        enough(curve, value) for curve in both
    )
    columns = "".join(f"{shown(curve, value):>11}" for curve in both)
    ratio = worth[name, method] * per_sample / duration[name, method]
    print(f"{name:12}{method:22}{value:8.4f}{columns}{ratio:10.1f}x")
flat = {name: kl(p, np.full_like(p, 1 / SIDE**2)) for name, p in truth.items()}
for name, value in flat.items():
    print(f"{name:12}{'flat':22}{value:8.4f}")
print("Published: the bridge is worth 750 to 10,000 samples; correlated, 250 to 500.")

# %%
# Which results are reproduced
# ----------------------------
#
# For the first two Gaussians, every Dirichlet distribution is worth more than 250
# samples by both counts, and about 10,000 or more by the published count. The numbers
# depend on the grid. With a hundred cells instead of four hundred, the numbers of the
# first count are two to three times smaller, and the smallest number is below 250. A
# grid also hides differences within its cells. The exact divergences are larger, and
# for the off-centre Gaussian, the projection, and not the published bridge, is closest
# to the truth. The numbers are largest for small variances, because the truth is then
# nearly a Dirichlet distribution. The published bridge also loses the most accuracy for
# small variances, because it does not centre the logits.
#
# For the third Gaussian, the counts differ. By the published count, the bridge is worth
# a few hundred samples, as in the paper's code. By the other count, the bridge is worth
# about ten samples. The published bridge is then hardly closer to the truth than a flat
# distribution. It ignores covariances, and its mean does not depend on the size of the
# variances. With conditioned or centred logits, it is farther from the truth than a
# flat distribution. The projection is the closest Dirichlet distribution. Even the
# projection is worth fewer than 250 smoothed samples, because this truth does not
# resemble a Dirichlet distribution.
#
# In the figure, grey lines are histograms of an increasing number of samples. Dashed
# lines show the published count. Markers show the closed forms. The horizontal axis is
# the number of samples in the upper row, and the time in the lower row.

COLOURS = dict(
    zip(METHODS, ["#0072B2", "#56B4E9", "#009E73", "black", "#D55E00"], strict=True)
)
MARKS = dict(
    zip(METHODS, [("o", 6), ("s", 10), ("D", 6), ("x", 5), ("*", 10)], strict=True)
)
figure, axes = plt.subplots(
    2, 3, figsize=(10, 6), sharey=True, sharex="row", layout="constrained"
)
for column, (name, curve) in zip(axes.T, sampled.items(), strict=True):
    for ax, unit in zip(column, [1, per_sample * 1e6], strict=True):
        ax.loglog(counts * unit, curve, color="#6e6e6e", label="histogram of samples")
        style = {
            "color": "#6e6e6e",
            "ls": "--",
            "label": "histogram, counted as published",
        }
        ax.loglog(counts * unit, sampled_published[name], **style)
        ax.spines[["top", "right"]].set_visible(False)
    for method, color in COLOURS.items():
        value = distance[name, method]
        marker, size = MARKS[method]
        style = {"color": color, "ls": "none", "marker": marker, "ms": size}
        column[0].plot(worth[name, method], value, label=method, **style)
        column[1].plot(duration[name, method] * 1e6, value, **style)
        column[0].axhline(value, color=color, linewidth=0.8, zorder=0)
    column[0].set(title=name, xlabel="samples")
    column[1].set(xlabel="time per Gaussian (µs)")
for ax in axes[:, 0]:
    ax.set_ylabel("KL from the truth (nats)")
figure.legend(
    *axes[0, 0].get_legend_handles_labels(),
    loc="outside lower center",
    ncols=3,
    frameon=False,
)
plt.show()
