"""
From logits to probabilities: error and cost of each link
=========================================================

The Laplace approximation of a network returns Gaussian logits. The probabilities are
the expected softmax under this Gaussian. The expectation has no closed form, so a link
approximates it. This page measures the error and the time of each link. The choice of
``link_approx="auto"`` follows from these results.
"""

# %%
# Gaussians and the reference
# ---------------------------
#
# The mean logits are standard normal draws multiplied by two. There are three kinds of
# covariances:
#
# * random matrices;
# * the posterior of a last layer under a weak prior: logits are weakly correlated, and
#   rarely predicted classes have large variances;
# * matrices of rank two, plus a diagonal of 0.01.
#
# All covariances are centred, because the softmax is invariant to a shift of all
# logits. They are scaled to an average variance of ``sd²``. The reference is the
# average over 4,096 points.

from time import perf_counter

import matplotlib.pyplot as plt
import numpy as np
import torch

from sklaplace.core.random import sobol_normals
from sklaplace.dirichlet.links import LINKS, choose_link
from sklaplace.dirichlet.logits import centre

torch.set_num_threads(1)

CLASSES = (2, 3, 10, 16, 30, 100, 300)
DEVIATIONS = (0.1, 0.3, 1.0, 2.0, 4.0, 8.0)
ROWS = 24
POINTS = 4096


def random_matrix(A, p):
    return A @ A.mT / len(p)


def last_layer(A, p):
    precision = len(p) * (torch.diag(p) - torch.outer(p, p)) + 0.1 * torch.eye(len(p))
    return torch.linalg.inv(precision).expand_as(A)


def low_rank(A, p):
    return A[..., :2] @ A[..., :2].mT + 0.01 * torch.eye(len(p))


def gaussians(kind, n_classes, sd):
    generator = torch.Generator().manual_seed(n_classes)
    rows = ROWS if n_classes < 100 else max(1, ROWS // 3)
    A, mean = (
        torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
        for shape in ((n_classes, n_classes), (n_classes,))
    )
    p = torch.randn(n_classes, generator=generator).double().softmax(-1)
    mean, cov = centre(2 * mean, kind(A, p).double())
    average = cov.diagonal(dim1=-2, dim2=-1).mean(-1)
    return mean, cov * (sd**2 / average)[:, None, None]


def softmax_of_mean(mean, cov, draws):
    return mean.softmax(-1)


centring = {name: link for name, link in LINKS.items() if link.centred}
links = {"softmax": softmax_of_mean, **centring}
kinds = {
    "random matrices": random_matrix,
    "a last layer": last_layer,
    "low rank": low_rank,
}

# %%
# Errors
# ------
#
# The error is the sum of absolute errors over the classes, averaged over the samples.
# Its maximum is two. A star marks the link that ``"auto"`` chooses for this number of
# classes. With very many classes and large deviations, the reference is too coarse for
# the last digit to be correct.

errors = {}
for kind, make in kinds.items():
    for n_classes in CLASSES:
        reference = sobol_normals(POINTS, n_classes, seed=1)
        draws = sobol_normals(100, n_classes, seed=0)
        for sd in DEVIATIONS:
            mean, cov = gaussians(make, n_classes, sd)
            truth = LINKS["mc"](mean, cov, reference)
            for name, link in links.items():
                distance = (link(mean, cov, draws) - truth).abs().sum(-1).mean()
                errors[kind, n_classes, sd, name] = distance.item()

for kind in kinds:
    print(f"\n{kind}\n{'K':>4}{'sd':>5}", *(f"{name:>12}" for name in links), sep="")
    for n_classes in CLASSES:
        for sd in DEVIATIONS:
            line = f"{n_classes:4}{sd:5}"
            for name in links:
                star = "*" if name == choose_link(n_classes) else " "
                line += f"{errors[kind, n_classes, sd, name]:11.3f}{star}"
            print(line.rstrip())

# %%
# Without centring
# ----------------
#
# ``probit_uncentred`` is the published form of ``probit``. It uses the variances of the
# logits without centring, while all other links centre the logits. The table shows the
# errors of both links for independent logits of equal variance. We then add a random
# shift that all logits of a sample share. The variance of the shift is one or ten times
# the variance of the logits. The softmax does not depend on the shift.
# Kronecker-factored posteriors, for example, contain a common shift.

COMMON = (0, 1, 10)
of_common_shift = {}
print(f"{'':4}{'common variance / variance':>30}")
print(f"{'K':>4}" + "".join(f"{c:>10} probit{'uncentred':>11}" for c in COMMON))
for n_classes in (2, 3, 4, 10, 30):
    generator = torch.Generator().manual_seed(n_classes)
    mean = 2 * torch.randn(ROWS, n_classes, generator=generator).double()
    reference = sobol_normals(POINTS, n_classes, seed=1)
    line = f"{n_classes:4}"
    for common in COMMON:
        cov = (torch.eye(n_classes).double() + common).expand(ROWS, -1, -1)
        truth = LINKS["mc"](mean, cov, reference)
        for name, width in (("probit", 17), ("probit_uncentred", 11)):
            distance = (LINKS[name](mean, cov, draws) - truth).abs().sum(-1).mean()
            of_common_shift[n_classes, common, name] = distance.item()
            line += f"{distance:{width}.3f}"
    print(line)

# %%
# For independent logits of few classes, the uncentred form is better, because centring
# removes a part of their variance. With a common shift of the same variance as the
# logits, centring is better for ten or more classes. With a shift of ten times this
# variance, centring is better for every number of classes.
#
# Time
# ----
#
# The table shows microseconds per sample on one thread for standard deviations of one.
# The links receive covariances, or only variances if these suffice.

costs = {}
for n_classes in CLASSES:
    mean, cov = gaussians(random_matrix, n_classes, 1.0)
    mean, cov = mean.repeat(10, 1), cov.repeat(10, 1, 1)
    variances = cov.diagonal(dim1=-2, dim2=-1).contiguous()
    draws = sobol_normals(100, n_classes, seed=0)
    for name, link in centring.items():
        spread = variances if LINKS[name].diagonal else cov
        seconds = []
        for _ in range(3):
            start = perf_counter()
            link(mean, spread, draws)
            seconds.append(perf_counter() - start)
        costs[n_classes, name] = 1e6 * min(seconds) / len(mean)

print(f"{'K':>4}", *(f"{name:>12}" for name in centring), sep="")
for n_classes in CLASSES:
    line = f"{n_classes:4}"
    for name in centring:
        star = "*" if name == choose_link(n_classes) else " "
        line += f"{costs[n_classes, name]:11.1f}{star}"
    print(line.rstrip())

# %%
# Which link to use
# -----------------
#
# For two classes, the error of ``mean_field`` is less than 0.01 at every deviation. The
# error of ``gumbel`` is at most 0.001, at several times the cost.
#
# For more classes, the best links are ``mc`` and ``gumbel``. ``mc`` averages over a
# hundred points of the joint distribution. ``gumbel`` treats the logits as independent,
# and is nearly exact if they are independent:
#
# * *Random matrices.* For 16 classes and a deviation of 2, the error of ``mc`` is
#   0.044. ``gumbel`` takes half the time, with an error of 0.069. For 30 classes,
#   ``mc`` is better at a deviation of 1 (0.008 and 0.025), but worse at 4 (0.141 and
#   0.072). For a hundred classes, ``gumbel`` is also better at a deviation of 1 (0.015
#   and 0.056), in a quarter of the time.
# * *A last layer.* The logits are weakly correlated. For deviations of 1 and more,
#   ``gumbel`` is better for every number of classes: 0.001 and 0.006 for ten classes,
#   0.005 and 0.041 for three hundred.
# * *Low rank.* The points of ``mc`` cover only two directions, and the logits are far
#   from independent. For a hundred classes and a deviation of 4, the error of ``mc`` is
#   0.074, and the error of ``gumbel`` is 0.591.
#
# ``"auto"`` chooses ``mc`` for up to 16 classes and ``gumbel`` for more, for every
# covariance. If your covariances have low rank, set ``link_approx="mc"``.
#
# ``probit``, the usual closed form, is the cheapest link. For many classes and moderate
# deviations, its error is larger than the error of the softmax of the mean (random
# matrices, three hundred classes, deviation 1: 0.163 and 0.082). For large deviations,
# the error of ``probit`` is smaller than that of the softmax (deviation 4: 0.431 and
# 0.650). ``sodpp`` is the best closed form up to a deviation of 0.3. Do not use
# ``sodpp`` for deviations above 1: for two classes and a deviation of 2, its error is
# 0.502, and the error of the softmax of the mean is 0.304. The figure does not show the
# two bridges, because they are approximations of a Dirichlet distribution.

shown = {
    "softmax": ("#6e6e6e", ":"),
    "probit": ("#E69F00", "--"),
    "mean_field": ("#CC79A7", "-."),
    "sodpp": ("#D55E00", (0, (8, 2, 1, 2, 1, 2))),
    "mc": ("#009E73", "-"),
    "gumbel": ("#0072B2", (0, (10, 3))),
}
figure, axes = plt.subplots(
    len(kinds),
    len(CLASSES[1:]),
    figsize=(10, 7),
    sharex=True,
    sharey=True,
    layout="constrained",
    squeeze=False,
)
for row, kind in zip(axes, kinds, strict=True):
    for ax, n_classes in zip(row, CLASSES[1:], strict=True):
        for name, (color, style) in shown.items():
            values = [errors[kind, n_classes, sd, name] for sd in DEVIATIONS]
            values = np.clip(values, 1e-5, 2)
            ax.loglog(DEVIATIONS, values, color=color, linestyle=style, label=name)
        ax.set(ylim=(1e-4, 2))
        ax.spines[["top", "right"]].set_visible(False)
    row[0].set_ylabel(f"{kind}\nerror")
for ax, n_classes in zip(axes[0], CLASSES[1:], strict=True):
    ax.set_title(f"{n_classes} classes")
for ax in axes[-1]:
    ax.set_xlabel("sd of logits")
figure.legend(
    *axes[0, 0].get_legend_handles_labels(),
    loc="outside lower center",
    ncols=6,
    handlelength=4,
)
plt.show()
