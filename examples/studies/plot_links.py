"""
From logits to probabilities: what each link costs
==================================================

Around a network, logits are Gaussian. The probabilities are the average softmax under
that Gaussian, which has no closed form: a link approximates it. This page measures the
error and the time of each; ``link_approx="auto"`` follows from it.
"""

# %%
# Gaussians and the reference
# ---------------------------
#
# Means are twice standard normal. Three kinds of covariances stand for many: random
# matrices; the posterior of a last layer under a weak prior, which is wide for classes
# that are rarely predicted and weakly correlated; and covariances of low rank, two
# directions and a hundredth of noise. All are centred, as the softmax is invariant to a
# shift of all logits, and scaled to an average variance of
# ``sd²``. The reference is the average over thousands of
# points.

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
# The sum over classes of absolute errors, averaged over samples: two at worst. The link
# that ``"auto"`` takes for this number of classes has a star. With very many classes
# and large deviations, the last digit is beyond the reference.

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
# ``probit_uncentred`` is the published form of ``probit``: it takes the variance of
# each logit as it is, while all other links centre the logits. The errors of both, for
# independent logits of equal variance, and with a shift added that all logits of a
# sample have in common, of the same and of ten times the variance. The softmax does not
# depend on such a shift. Posteriors with Kronecker factors have one, for instance.

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
# Independent logits of few classes are served better without centring, which takes a
# part of their variance away. With any shift in common it is the other way round, from
# ten classes on under the same variance, everywhere under ten times that.
#
# How long
# --------
#
# Microseconds per sample for standard deviations of one, on one thread, from
# covariances (or from variances alone, for links that need no more).

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
# What to take
# ------------
#
# For two classes ``mean_field`` errs by less than 0.01 at every deviation, ``gumbel``
# by 0.001 at most, for several times the cost.
#
# For more, it is between ``mc``, which averages over a hundred points of the joint
# distribution, and ``gumbel``, which treats logits as independent and is nearly exact
# if they are:
#
# * *Random matrices.* For 16 classes and a deviation of 2, ``mc`` errs by 0.044 and
#   ``gumbel`` by 0.069, in half the time. For 30 classes ``mc`` is the better one at a
#   deviation of 1 (0.008 and 0.025), but not at 4 (0.141 and 0.072). For a hundred
#   classes ``gumbel`` is better at a deviation of 1, too (0.015 and 0.056), and takes a
#   quarter of the time.
# * *A last layer.* Logits are weakly correlated, and ``gumbel`` is better from a
#   deviation of 1 on for any number of classes: 0.001 and 0.006 for ten, 0.005 and
#   0.041 for three hundred.
# * *Low rank.* The points have two directions to cover, and logits are far from
#   independent: for a hundred classes and a deviation of 4, ``mc`` errs by 0.074,
#   ``gumbel`` by 0.591.
#
# ``"auto"`` takes ``mc`` up to 16 classes and ``gumbel`` above, whatever the
# covariance. Where it has low rank, set ``link_approx="mc"``.
#
# ``probit``, the usual closed form, is the cheapest. For many classes and moderate
# deviations it errs more than the softmax of the mean (random matrices, three hundred
# classes, deviation 1: 0.163 and 0.082), for large ones less (deviation 4: 0.431 and
# 0.650). ``sodpp`` is the best closed form up to a deviation of 0.3, and not to be used
# above 1: for two classes and a deviation of 2, it errs by 0.502, and the softmax of
# the mean by 0.304. The two bridges belong to their Dirichlet distribution, not here.

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
