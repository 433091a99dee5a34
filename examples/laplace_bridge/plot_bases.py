"""
The two bases of the Laplace bridge
===================================

A Dirichlet distribution is far from normal in the basis of the probabilities, and close
to normal in the basis of the logits. The Laplace bridge is a Laplace approximation in
the basis of the logits: it matches a Dirichlet distribution with a Gaussian. This page
first shows both bases for two classes, where the Dirichlet distribution is a Beta
distribution. It then shows five Gaussians from the published code, which demonstrate
the limits of the bridge (Hobbhahn, Kristiadi and Hennig, 2022).
"""

# %%
# Three Beta distributions in two bases
# -------------------------------------
#
# A change of variables from the probability ``p`` to the logit ``log p / (1 - p)``
# multiplies the density by ``p (1 - p)``, which moves its maximum. In the basis of the
# probability, a density with concentrations below one has no maximum inside the
# interval, so it has no Laplace approximation. For other densities, the Laplace
# approximation extends beyond the interval. In the basis of the logit, every Beta
# distribution has one maximum and two tails (MacKay, 1998).

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.special import betaln, log_expit
from scipy.stats import beta, norm

from sklaplace.core.random import sobol_normals
from sklaplace.dirichlet import inverse_bridge, kl_projection, laplace_bridge, mean
from sklaplace.dirichlet.links import LINKS

BETAS = [(0.8, 0.9), (4, 2), (2, 7)]
COLOURS = "#0072B2", "#E69F00", "#009E73"

p = np.linspace(0.001, 0.999, 999)
logits = np.linspace(-8, 8, 801)


def density_of_logit(x, a, b):
    """Return the density of the logit of a Beta-distributed probability."""
    return np.exp(a * log_expit(x) + b * log_expit(-x) - betaln(a, b))


def laplace_of_probability(a, b):
    """Return the Laplace approximation over probabilities, or None if none exists."""
    if min(a, b) <= 1:
        return None
    mode = (a - 1) / (a + b - 2)
    curvature = (a - 1) / mode**2 + (b - 1) / (1 - mode) ** 2
    return norm(mode, curvature**-0.5)


def laplace_of_logit(a, b):
    """Return the inverse bridge for the first logit minus the second logit."""
    centre, cov = inverse_bridge(np.array([a, b], dtype=float))
    difference = np.array([1, -1])
    return norm(difference @ centre, (difference @ cov @ difference) ** 0.5)


figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for (a, b), color in zip(BETAS, COLOURS, strict=True):
    left.plot(p, beta.pdf(p, a, b), color=color, label=f"Beta({a:g}, {b:g})")
    right.plot(logits, density_of_logit(logits, a, b), color=color)
    approximation = laplace_of_probability(a, b)
    if approximation is not None:
        wider = np.linspace(-0.2, 1.2, 400)
        left.plot(wider, approximation.pdf(wider), color=color, linestyle="--")
    right.plot(logits, laplace_of_logit(a, b).pdf(logits), color=color, linestyle="--")
left.plot([], [], color="0.4", linestyle="--", label="Laplace approximation")
left.set(xlabel="probability of the first class", ylabel="density", ylim=(0, 4))
right.set(xlabel="logit, log p / (1 - p)", ylim=(0, 0.7))
for ax in (left, right):
    ax.spines[["top", "right"]].set_visible(False)
left.legend(frameon=False)
plt.show()

# %%
# The bridge maps each Beta distribution on the right to its dashed Gaussian, and each
# of these Gaussians back to its Beta distribution.
#
# Five Gaussians
# --------------
#
# Three of the Gaussians are for two classes: a simple one, one from a known image, and
# one from an unknown image with large variances. The fourth Gaussian has three classes
# with unequal variances, and the fifth has five classes with large variances. The
# published code prints the mean of 10,000 samples, and the mean of the corrected
# bridge, ``norm="published"``. The published code conditions the logits on a sum of
# zero.

GAUSSIANS = {
    "simple": ([0.2, -0.2], [1, 1]),
    "known image": ([-1.3802, 1.4090], [7.7495] * 2),
    "unknown image": ([5.8471, -8.5032], [0.012 * 1332.1691] * 2),
    "unequal": ([7, 2, -7], [30, 2, 1]),
    "large": ([7, 0, 2, 0, -7], [140] * 5),
}
GAUSSIANS = {
    name: (np.array(centre, dtype=float), np.diag(np.array(variances, dtype=float)))
    for name, (centre, variances) in GAUSSIANS.items()
}
PUBLISHED = {  # samples, corrected bridge
    "simple": ([0.5710, 0.4290], [0.6378, 0.3622]),
    "known image": ([0.2659, 0.7341], [0.1951, 0.8049]),
    "unknown image": ([0.9920, 0.0080], [0.9938, 0.0062]),
    "unequal": ([0.8040, 0.1959, 0.0001], [0.9090, 0.0905, 0.0005]),
    "large": (
        [0.3762, 0.1677, 0.2208, 0.1714, 0.0639],
        [0.2560, 0.1898, 0.2035, 0.1898, 0.1609],
    ),
}


def expected_softmax(centre, cov):
    """Return the true mean, from 2 ** 14 points of a low-discrepancy sequence."""
    gaussian = torch.as_tensor(centre)[None], torch.as_tensor(cov)[None]
    return LINKS["mc"](*gaussian, sobol_normals(2**14, len(centre), seed=0))[0].numpy()


METHODS = {
    "bridge": lambda *gaussian: mean(laplace_bridge(*gaussian)),
    "corrected, published": lambda *gaussian: mean(
        laplace_bridge(*gaussian, norm="published")
    ),
    "corrected, guarded": lambda *gaussian: mean(
        laplace_bridge(*gaussian, norm="guarded")
    ),
    "projection": lambda *gaussian: mean(kl_projection(*gaussian)),
}
found = {
    name: {"truth": expected_softmax(*gaussian)}
    | {method: function(*gaussian) for method, function in METHODS.items()}
    for name, gaussian in GAUSSIANS.items()
}


def row(name, method, proba):
    print(f"{name:15}{method:24}" + "".join(f"{value:8.4f}" for value in proba))


for name, by_method in found.items():
    samples, corrected = PUBLISHED[name]
    row(name, "samples, as published", samples)
    row(name, "truth", by_method["truth"])
    row(name, "corrected, as published", corrected)
    for method in METHODS:
        row(name, method, by_method[method])

# %%
# The published numbers of the corrected bridge are reproduced to all digits. The mean
# of the bridge does not depend on the size of the variances, so the bridge can be
# nearly certain of a class even if the true mean is not. The correction helps if the
# variances are large. If the variances are small, the correction makes the prediction
# sharper, as with the first Gaussian. The guarded correction never sharpens a
# prediction. The corrected bridge is too certain for unequal variances, and too
# uncertain for five classes with large variances. The mean of the projection is closest
# to the truth for four of the five Gaussians.
#
# The effect of the correction is visible in the basis of the logit. The tail of a Beta
# distribution falls like ``exp(-α |logit|)``. A wide Gaussian needs a small
# concentration α, so this tail falls slowly, and most of the probability lies where a
# class is certain. The correction makes the Gaussian narrower and moves it towards
# zero, until a Beta distribution can approximate it.

figure, axes = plt.subplots(3, 2, figsize=(9, 7), layout="constrained", sharey="row")
TWO_CLASSES = list(GAUSSIANS)[:3]
for pair, name in zip(axes, TWO_CLASSES, strict=True):
    centre, cov = GAUSSIANS[name]
    for ax, norm_of_bridge in zip(pair, (None, "published"), strict=True):
        a, b = laplace_bridge(centre, cov, norm=norm_of_bridge)
        gaussian = laplace_of_logit(a, b)
        low, high = (gaussian.mean() + s * max(gaussian.std(), 2) for s in (-4, 4))
        logits = np.linspace(min(low, -5), max(high, 5), 801)
        ax.plot(
            logits,
            density_of_logit(logits, a, b),
            color="#0072B2",
            label="Beta distribution",
        )
        ax.plot(
            logits, gaussian.pdf(logits), "--", color="#D55E00", label="Gaussian logit"
        )
        ax.set_title(f"{name}, {'corrected' if norm_of_bridge else 'bridge'}")
        ax.spines[["top", "right"]].set_visible(False)
for ax in axes[-1]:
    ax.set_xlabel("logit, log p / (1 - p)")
for ax in axes[:, 0]:
    ax.set_ylabel("density")
axes[0, 0].legend(frameon=False, fontsize="small")
plt.show()
