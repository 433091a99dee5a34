"""
Failures of the bridge on the simplex
=====================================

This page shows five Gaussians over three logits. For each Gaussian, it compares the
true distribution of the class probabilities with three Dirichlet distributions: the
Laplace bridge, its correction for large variances, and the projection. Each triangle is
the simplex, and each corner stands for certainty about one class. KL is the divergence
from the truth in nats.
"""

# %%
# The Gaussians
# -------------
#
# The softmax ignores a common shift of all logits. We therefore centre all Gaussians,
# as ``predict_dirichlet`` does. Conditioning on a sum of zero then has no effect.

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.tri import Triangulation
from scipy.special import gammaln, logsumexp
from scipy.stats import multivariate_normal

from sklaplace.dirichlet import kl_projection, laplace_bridge, log_density, mean

SIDE = 150  # cells in the figure
NODES = 60  # quadrature nodes per dimension

gaussians = {
    "small": ([0.5, 0, -0.5], 0.1 * np.eye(3)),
    "large": ([0.5, 0, -0.5], 9 * np.eye(3)),
    "off-centre": ([2, -1, -1], 0.3 * np.eye(3)),
    "correlated": ([0.5, 0, -0.5], [[2, 1.8, -1], [1.8, 2, -1], [-1, -1, 1]]),
    "nearly singular": ([0, 0, 0], np.outer([1, -1, 0], [1, -1, 0]) + 0.01 * np.eye(3)),
}
centring = np.eye(3) - 1 / 3
gaussians = {
    name: (centring @ np.array(m), centring @ np.array(cov) @ centring)
    for name, (m, cov) in gaussians.items()
}
METHODS = {
    "bridge": laplace_bridge,
    "bridge_norm": lambda m, cov: laplace_bridge(m, cov, norm="guarded"),
    "projection": kl_projection,
}
alphas = {
    (name, method): function(*gaussian)
    for name, gaussian in gaussians.items()
    for method, function in METHODS.items()
}

# %%
# Exact divergences
# -----------------
#
# Here, the divergences are computed without samples. The truth is a normal distribution
# of two differences of logits, so its entropy is known. Expectations are sums over
# Gauss-Hermite nodes.

differences = np.array([[1, 0, -1], [0, 1, -1]])
nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
first, second = (axis.ravel() for axis in np.meshgrid(nodes, nodes))
weights = np.outer(weights, weights).ravel() / (2 * np.pi)


def log_proba_at_nodes(m, cov):
    root = np.linalg.cholesky(differences @ cov @ differences.T)
    two = np.stack([first, second], axis=1) @ root.T + differences @ m
    logits = np.column_stack([two, np.zeros(len(two))])
    return logits - logsumexp(logits, axis=1, keepdims=True)


def kl(m, cov, alpha):
    expected = weights @ log_proba_at_nodes(m, cov)  # of log p
    entropy = multivariate_normal(cov=differences @ cov @ differences.T).entropy()
    log_beta = gammaln(alpha).sum() - gammaln(alpha.sum())
    return log_beta - alpha @ expected - entropy


distance = {key: kl(*gaussians[key[0]], alpha) for key, alpha in alphas.items()}
true_means = {
    name: weights @ np.exp(log_proba_at_nodes(*gaussian))
    for name, gaussian in gaussians.items()
}

print(f"{'':16}{'':12}{'KL':>8}{'mean':>12}{'total':>15}")
for name, true_mean in true_means.items():
    print(f"{name:16}{'truth':12}{'':10}" + " ".join(f"{p:.3f}" for p in true_mean))
    for method in METHODS:
        alpha = alphas[name, method]
        means = " ".join(f"{p:.3f}" for p in mean(alpha))
        value = distance[name, method]
        print(f"{name:16}{method:12}{value:8.3f}  {means}{alpha.sum():10.1f}")

# %%
# Densities
# ---------
#
# The colours show the square root of the density, with a separate scale for each row.
# The scale ends at the 99.5 % quantile of the true density over the triangle.

rows, places = np.divmod(np.arange((SIDE + 1) ** 2), SIDE + 1)
keep = (rows > 0) & (places > 0) & (rows + places < SIDE)
p = np.stack([rows, places, SIDE - rows - places], axis=1)[keep] / SIDE
across, up = p[:, 1] + p[:, 2] / 2, p[:, 2] * np.sqrt(3) / 2
mesh = Triangulation(across, up)


def true_density(m, cov):
    normal = multivariate_normal(differences @ m, differences @ cov @ differences.T)
    return np.exp(normal.logpdf(np.log(p) @ differences.T) - np.log(p).sum(1))


figure, axes = plt.subplots(
    5, 4, figsize=(8, 9.4), sharex=True, sharey=True, layout="constrained"
)
for row, (name, gaussian) in zip(axes, gaussians.items(), strict=True):
    panels = {"truth": true_density(*gaussian)}
    colours = PowerNorm(0.5, vmin=0, vmax=np.quantile(panels["truth"], 0.995))
    for method in METHODS:
        panels[method] = np.exp(log_density(alphas[name, method], p))
    for ax, (label, density) in zip(row, panels.items(), strict=True):
        ax.tripcolor(mesh, density, norm=colours, shading="gouraud", rasterized=True)
        ax.plot([0, 1, 0.5, 0], [0, 0, np.sqrt(0.75), 0], color="black", lw=0.8)
        ax.set(aspect="equal", xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        value = distance.get((name, label))
        title = label if value is None else f"{label}, KL {value:.3g}"
        ax.set_title(title, fontsize="medium")
    row[0].set_ylabel(name)
for number, x, y in [(1, -0.06, 0), (2, 1.06, 0), (3, 0.58, 0.83)]:
    axes[0, 0].text(x, y, number, ha="center", va="center")
plt.show()

# %%
# Results
# -------
#
# *Small variance.* As the variances vanish, the truth and the projection approach the
# softmax of the mean logits. For more than two classes, the mean of the bridge differs
# from this softmax, however small the variances are. Here, the bridge underestimates
# the probability of the first class. The error is larger for the off-centre Gaussian.
#
# *Large variance.* The bridge has the same mean as for small variances, because the
# mean logits are the same. Only its total concentration is lower. The correction is
# meant for this case. The correction helps here, but the projection is better. The
# correction has no effect on the other Gaussians in this figure.
#
# *Correlated.* The bridge uses only the variances of the logits. The third class has
# the largest variance and therefore the lowest concentration. Its true probability is
# about three times as large as its probability under the bridge.
#
# *Nearly singular.* The first two logits are opposites and uncertain, and the third
# logit lies between them with little uncertainty. Because of this small variance, the
# bridge is confident in the third class. The true distribution lies along a curve,
# which no Dirichlet distribution can follow. However, the projection assigns the same
# probability to all three classes.
