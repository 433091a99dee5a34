"""
Reliability of the defaults
===========================

This study compares the default settings with other methods on small data sets. Most
methods use the same ordinary network. The measures for classification are the accuracy,
the negative log-likelihood (NLL), the Brier score and the expected calibration error
(ECE). The measures for regression are the coverage and the width of 90 % intervals, the
interval score, and the continuous ranked probability score (CRPS).

The results are means over test samples and seeds. Each seed has its own samples and
initial weights. There are 15 seeds for data sets with at most 150 training samples,
because their coverage varies most, and 5 seeds for larger data sets. At the end, the
script prints which claims hold, and lists the data sets that violate a claim.

In the full run, the 90 % intervals of the default cover between 85 and 95 % for all 15
targets with at least 50 samples. The ratio of the interval score of the default to that
of split conformal intervals is 0.895 on average, and at most 1.00 for each target. The
mean NLL of the default is 0.240, compared with 0.340 for the network alone. On each
data set, the NLL of the default is at most 0.014 above that of the network.

.. code-block:: bash

   cd examples/studies
   python plot_trust.py               # 5 or 15 seeds, half an hour on two cores
   python plot_trust.py --epochs 300  # networks trained for too many epochs
   python plot_trust.py --quick       # some data sets, one seed: shown on this page
"""

# %%
# The data
# --------
#
# The data sets come from scikit-learn's loaders and generators. One quarter of the
# samples from a loader is used for testing. A generator has 1,000 test samples, and the
# number of its training samples is in parentheses. Inputs and regression targets are
# standardised.

import argparse
import re
import sys
import time
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from joblib import Parallel, delayed
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn import datasets
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from sklearn.linear_model import BayesianRidge
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier, NeuralNetRegressor
from threadpoolctl import threadpool_limits
from torch import nn

from sklaplace import (
    DeepEnsembleClassifier,
    DeepEnsembleRegressor,
    LaplaceClassifier,
    LaplaceRegressor,
)
from sklaplace.metrics import brier_score, expected_calibration_error, gaussian_crps

QUICK = (
    *("wine", "iris", "moons (60)", "blobs (300)"),
    *("friedman1 (20)", "only noise (200)", "diabetes", "unequal noise (500)"),
)
LOADED = {"return_X_y": True}
ONLY_NOISE = {"n_features": 10, "n_informative": 0, "noise": 1.0}


def last_column(name):
    """Return the last column of a data set as targets, the others as inputs."""
    data = getattr(datasets, f"load_{name}")().data
    return data[:, :-1], data[:, -1]


def friedman1(n_samples, random_state, noise="normal"):
    """Return samples of Friedman's function, whose standard deviation is 5."""
    X, y = datasets.make_friedman1(n_samples, random_state=random_state)
    rng = np.random.default_rng(random_state)
    draws = {
        "normal": rng.normal,
        "heavy-tailed": lambda size: rng.standard_t(2.5, size),
        "skewed": lambda size: rng.exponential(2, size),
        "unequal": lambda size: 6 * X[:, 3] ** 2 * rng.normal(size=size),
    }
    return X, y + draws[noise](size=n_samples)


def two_targets(n_samples, random_state, n_features):
    """Return linear targets with standard deviation 4 and noise of 0.5 and 4."""
    X, y = datasets.make_regression(
        n_samples, n_features, n_targets=2, random_state=random_state
    )
    noise = np.random.default_rng(random_state).normal(size=y.shape)
    return X, 4 * y / y.std(0) + [0.5, 4] * noise


CLASSIFICATION = {
    "digits": (datasets.load_digits, LOADED),
    "wine": (datasets.load_wine, LOADED),
    "breast cancer": (datasets.load_breast_cancer, LOADED),
    "iris": (datasets.load_iris, LOADED),
    "moons (60)": (datasets.make_moons, {"noise": 0.3}),
    "moons (200)": (datasets.make_moons, {"noise": 0.3}),
    "circles (200)": (datasets.make_circles, {"noise": 0.2, "factor": 0.5}),
    "blobs (300)": (datasets.make_blobs, {"n_features": 5, "cluster_std": 5.0}),
    "quantiles (500)": (datasets.make_gaussian_quantiles, {"n_features": 4}),
    "wrong labels (500)": (datasets.make_classification, {"flip_y": 0.3}),
    "hastie (1000)": (datasets.make_hastie_10_2, {}),
}
REGRESSION = {
    "friedman1 (20)": (friedman1, {}),
    "two targets (30)": (two_targets, {"n_features": 5}),
    "friedman1 (40)": (friedman1, {}),
    "sparse (60)": (datasets.make_sparse_uncorrelated, {}),
    "friedman1 (100)": (friedman1, {}),
    "petal width": (last_column, {"name": "iris"}),
    "proline": (last_column, {"name": "wine"}),
    "only noise (200)": (datasets.make_regression, ONLY_NOISE),
    "friedman3 (300)": (datasets.make_friedman3, {"noise": 0.1}),
    "diabetes": (datasets.load_diabetes, LOADED),
    "two targets (400)": (two_targets, {"n_features": 20}),
    "friedman2 (400)": (datasets.make_friedman2, {"noise": 100.0}),
    "heavy tails (500)": (friedman1, {"noise": "heavy-tailed"}),
    "unequal noise (500)": (friedman1, {"noise": "unequal"}),
    "swiss roll (1000)": (datasets.make_swiss_roll, {"noise": 1.0}),
    "skewed noise (2000)": (friedman1, {"noise": "skewed"}),
    "friedman1 (5000)": (friedman1, {}),
}


def n_training(name):
    """Return the number of training samples in the name of a generated data set."""
    return int(re.search(r"\((\d+)\)", name)[1]) if "(" in name else None


def samples(name, seed, make, options):
    """Return standardised inputs and targets, for training and for testing."""
    n = n_training(name)
    if n is not None:
        options = {"n_samples": n + 1000, "random_state": seed, **options}
    X, y = make(**options)
    sizes = {"test_size": 0.25} if n is None else {"train_size": n}
    if name in CLASSIFICATION:
        y = sizes["stratify"] = np.unique(y, return_inverse=True)[1]
    X, X_test, *y = train_test_split(X, y, random_state=seed, **sizes)
    scaler = StandardScaler().fit(X)
    return *(scaler.transform(part).astype("float32") for part in (X, X_test)), *y


# %%
# The network
# -----------
#
# The network has two hidden layers of 64 units and is trained with Adam. By default,
# skorch holds out one fifth of the samples. Laplace is tuned on these samples. The
# held-out samples also determine the temperature, the noise of the network alone, and
# the split conformal intervals.


def mlp(n_inputs, n_outputs):
    hidden = nn.Linear(n_inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(64, n_outputs))


def network(kind, n_inputs, n_outputs, epochs, **options):
    options |= {"module__n_inputs": n_inputs, "module__n_outputs": n_outputs}
    options |= {"optimizer": torch.optim.Adam, "lr": 1e-3, "batch_size": 64}
    return kind(mlp, max_epochs=epochs, verbose=0, **options)


def timed(fit, *arguments):
    """Return the result of a function, its seconds, and whether it warned."""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(*arguments)
    return result, time.perf_counter() - start, bool(caught)


# %%
# We fit Laplace in six ways:
#
# * ``default``: the default settings
# * ``frozen``: a frozen network that held out the same samples during its training
# * ``marglik``: prior precision and noise with the largest marginal likelihood
# * ``no net``: the default network
# * ``no split``: a net without a split; the estimator may hold out samples itself
# * ``frozen all``: a frozen network that was trained on all samples; the estimator
#   warns and keeps its predictions

OURS = ["default", "frozen", "marglik", "no net", "no split", "frozen all"]


def laplaces(kind, net, X, y, seed):
    """Return model, seconds and warning by name; two models are the bare network."""
    net_all = clone(net).set_params(train_split=None)
    torch.manual_seed(seed)
    fits = {"net all": timed(clone(net_all).fit, X, y)}
    fits["default"] = timed(kind(net, random_state=seed).fit, X, y)
    alone = fits["default"][0].estimator_
    fits["net"] = alone, np.sum(alone.history[:, "dur"]), False
    for name, model in {
        "marglik": kind(net, prior_precision="marglik", random_state=seed),
        "no net": kind(random_state=seed),
        "no split": kind(net_all, random_state=seed),
    }.items():
        fits[name] = timed(model.fit, X, y)
    for name, base in {"frozen": "net", "frozen all": "net all"}.items():
        trained, seconds, _ = fits[base]
        frozen = kind(FrozenEstimator(trained), random_state=seed)
        model, more, warned = timed(frozen.fit, X, y)
        fits[name] = model, seconds + more, warned
    return fits


def some(X, seed):
    """Return at most 500 rows, because the cost of Gaussian processes is cubic."""
    return np.random.default_rng(seed).permutation(len(X))[:500]


# %%
# Classification
# --------------


def classify(name, epochs, seed):
    """Return accuracy, NLL, Brier score, ECE, seconds, warning by set and method."""
    X, X_test, y, y_test = samples(name, seed, *CLASSIFICATION[name])
    loss = {"criterion": nn.CrossEntropyLoss}
    net = network(NeuralNetClassifier, X.shape[1], y.max() + 1, epochs, **loss)
    fits = laplaces(LaplaceClassifier, net, X, y, seed)
    ensemble = DeepEnsembleClassifier(net, random_state=seed)
    fits["five nets"] = timed(ensemble.fit, X, y)
    rows, kernel = some(X, seed), 1.0 * RBF(X.shape[1] ** 0.5)
    process = GaussianProcessClassifier(kernel)
    fits["process"] = timed(process.fit, X[rows], y[rows])
    found = {m: (fit[0].predict_proba(X_test), *fit[1:]) for m, fit in fits.items()}
    alone, *rest = fits["net"]
    held_out = net.get_split_datasets(X, y)[1].indices
    scale = inverse_temperature(alone.forward(X[held_out]).numpy(), y[held_out])
    found["scaled"] = softmax(scale * alone.forward(X_test).numpy(), axis=1), *rest
    return {
        (name, method): [*class_scores(y_test, proba.astype("float64")), *rest]
        for method, (proba, *rest) in found.items()
    }


def class_scores(y, proba):
    # a Gaussian process of scikit-learn can return -1e-13
    proba = proba.clip(0) / proba.clip(0).sum(1, keepdims=True)
    labels = np.arange(proba.shape[1])
    scores = log_loss, brier_score, expected_calibration_error
    accuracy = accuracy_score(y, proba.argmax(1))
    return [accuracy, *(score(y, proba, labels=labels) for score in scores)]


def inverse_temperature(logits, y):
    """Return the factor of the logits with the smallest NLL (Guo et al. 2017)."""

    def nll(log_scale):
        scaled = np.exp(log_scale) * logits.astype("float64")
        return -log_softmax(scaled, axis=1)[np.arange(len(y)), y].mean()

    return np.exp(minimize_scalar(nll, bounds=(-5, 5)).x)


# %%
# Regression
# ----------
#
# Data sets with several targets have one row for each target in the tables.


def regress(name, epochs, seed):
    """Return coverage, width, score, CRPS, seconds, warning by target and method."""
    X, X_test, y, y_test = samples(name, seed, *REGRESSION[name])
    y, y_test = ((part - y.mean(0)) / y.std(0) for part in (y, y_test))
    y, y_test = (part.astype("float32").reshape(len(part), -1) for part in (y, y_test))
    net = network(NeuralNetRegressor, X.shape[1], y.shape[1], epochs)
    fits = laplaces(LaplaceRegressor, net, X, y, seed)
    ensemble = DeepEnsembleRegressor(net, random_state=seed)
    fits["five nets"] = timed(ensemble.fit, X, y)
    alone, *rest = fits.pop("net")
    del fits["net all"]
    found = {}
    for method, (model, *more) in fits.items():
        gaussian = np.stack(model.predict(X_test, return_std=True))
        found[method] = model.predict_interval(X_test), gaussian, more
    rows, kernel = some(X, seed), 1.0 * RBF(X.shape[1] ** 0.5) + WhiteKernel()
    process = GaussianProcessRegressor(kernel)
    found["process"] = per_target(process, X[rows], y[rows], X_test)
    found["ridge"] = per_target(BayesianRidge(), X, y, X_test)
    held_out = net.get_split_datasets(X, y)[1].indices
    residuals, mean = y[held_out] - alone.predict(X[held_out]), alone.predict(X_test)
    gaussian = np.stack([mean, 0 * mean + np.sqrt(np.mean(residuals**2, axis=0))])
    found["net"] = interval_around(mean, 1.645 * gaussian[1]), gaussian, rest
    found["conformal"] = (
        interval_around(mean, conformal_half_width(residuals)),
        None,
        rest,
    )
    labels = [f"{name}, {j}" for j in range(y.shape[1])] if y.shape[1] > 1 else [name]
    return {
        (label, method): [
            *interval_scores(y_test[:, j], interval[:, j]),
            np.nan if g is None else gaussian_crps(y_test[:, j], *g[:, :, j]),
            *more,
        ]
        for method, (interval, g, more) in found.items()
        for j, label in enumerate(labels)
    }


def interval_around(mean, half):
    return np.stack([mean - half, mean + half], axis=2)


def per_target(model, X, y, X_test):
    """Fit a model to each target; return intervals, moments, seconds, no warning."""
    fits = [timed(clone(model).fit, X, target) for target in y.T]
    mean, std = np.stack([m.predict(X_test, return_std=True) for m, *_ in fits], axis=2)
    seconds = sum(seconds for _, seconds, _ in fits)
    return interval_around(mean, 1.645 * std), np.stack([mean, std]), [seconds, False]


def conformal_half_width(residuals, coverage=0.9):
    """Return half widths of split conformal intervals (Papadopoulos et al. 2002).

    There is one per column of residuals. It is infinite if there are too few residuals.
    """
    rank = int(np.ceil((len(residuals) + 1) * coverage))
    none = np.full((1, residuals.shape[1]), np.inf)
    ascending = np.concatenate([np.sort(np.abs(residuals), axis=0), none])
    return ascending[min(rank, len(ascending)) - 1]


def interval_scores(y, interval):
    """Return coverage, mean width, mean interval score (Gneiting, Raftery 2007)."""
    (low, high), width = interval.T, np.mean(interval[:, 1] - interval[:, 0])
    outside = np.maximum(low - y, 0) + np.maximum(y - high, 0)
    return [np.mean(outside == 0), width, width + 20 * outside.mean()]


# %%
# Run everything
# --------------

parser = argparse.ArgumentParser(description="Measure the default settings.")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--seeds", type=int, default=5)
parser.add_argument("--n-jobs", type=int, default=2)
options = parser.parse_args(["--quick"] if "sphinx_gallery" in sys.modules else None)


def n_seeds(name, make, arguments):
    """Return the number of seeds: three times as many for 150 samples or fewer."""
    if options.quick:
        return 1
    n = n_training(name) or 0.75 * len(make(**arguments)[1])
    return options.seeds * (3 if n <= 150 else 1)


def run(function, *arguments):
    torch.set_num_threads(1)
    with threadpool_limits(1):
        return function(*arguments)


def run_all(function, sets):
    """Return scores (seeds, 6) by set and method."""
    names = [name for name in sets if name in QUICK or not options.quick]
    jobs = [
        delayed(run)(function, name, options.epochs, seed)
        for name in reversed(names)  # the largest first
        for seed in range(n_seeds(name, *sets[name]))
    ]
    runs = {}
    found = Parallel(n_jobs=1 if options.quick else options.n_jobs)(jobs)
    for scores in reversed(found):
        for key, values in scores.items():
            runs.setdefault(key, []).append(values)
    return {key: np.array(values, dtype=float) for key, values in runs.items()}


class_runs, number_runs = (
    run_all(classify, CLASSIFICATION),
    run_all(regress, REGRESSION),
)

# %%
# The results
# -----------
#
# The other methods are:
#
# * ``net``: the network alone; in regression, the intervals come from the standard
#   deviation of the held-out residuals
# * ``net all``: the network alone, trained on all samples
# * ``scaled``: the network with temperature scaling
# * ``conformal``: split conformal intervals, which need at least nine held-out
#   residuals
# * ``five nets``: a deep ensemble
# * ``process``: a Gaussian process of at most 500 samples
# * ``ridge``: ``BayesianRidge``
#
# The times, in seconds, include training and fit on one thread.


def table(title, rows, heads, value):
    """Print a table of value(row, head)."""
    print(f"\n{title}\n{'':20}" + "".join(f"{head:>11}" for head in heads))
    for row in rows:
        values = "".join(f"{value(row, head):11.3f}" for head in heads)
        print(f"{row:20}{values}".replace("nan", "  -"))


def summary(title, runs, names, heads):
    """Print means over data sets and seeds; return the methods."""
    methods = list(dict.fromkeys(method for _, method in runs))
    means = {m: np.mean([runs[n, m].mean(0) for n in names], axis=0) for m in methods}
    heads = [*heads, "seconds", "warned"]
    table(title, methods, heads, lambda m, head: means[m][heads.index(head)])
    return methods


def above(score):
    """Return a function for the mean change of a score from the network."""

    def change(name, method):
        base = "net all" if method in ("no split", "frozen all") else "net"
        runs, base_runs = class_runs[name, method], class_runs[name, base]
        # count the loss only if the fit did not warn
        is_silent = 1 - runs[:, -1] if score == "silent NLL" else 1
        column = {"accuracy": 0, "ECE": 3}.get(score, 1)
        return np.mean(is_silent * (runs - base_runs)[:, column])

    return change


def coverage(name, method):
    inside, width, *_ = number_runs[name, method].mean(0)
    return inside if np.isfinite(width) else np.nan


def score_ratio(name, method):
    """Return the interval score divided by the score of conformal intervals."""
    score, other = (number_runs[name, m][:, 2].mean() for m in (method, "conformal"))
    return score / other if np.isfinite(other) else np.nan


print(f"{options.epochs} epochs, means over test samples and seeds")
classes = list(dict.fromkeys(name for name, _ in class_runs))
title = f"Classification, means over {len(classes)} sets"
heads = ["accuracy", "NLL", "Brier", "ECE"]
class_methods = summary(title, class_runs, classes, heads)
title = "NLL minus the NLL of the network (no split, frozen all: of net all)"
changed = [method for method in class_methods if not method.startswith("net")]
table(title, classes, changed, above("NLL"))
compared = [
    "net",
    "default",
    "scaled",
    "five nets",
    "net all",
    "no split",
    "frozen all",
]
table("ECE", classes, compared, lambda n, m: class_runs[n, m][:, 3].mean())

names = list(dict.fromkeys(name for name, _ in number_runs))
few = [name for name in names if (n_training(name) or 50) < 50]
many = [name for name in names if name not in few]
title = f"Regression, means over {len(many)} targets with at least 50 samples"
methods = summary(title, number_runs, many, ["coverage", "width", "score", "CRPS"])
table("Coverage of 90 % intervals", names, methods, coverage)
title = "Interval score divided by the score of conformal intervals (lower is better)"
table(title, names, methods, score_ratio)

# %%
# The script now checks several claims about these results. The first claims are about
# probabilities; fits of a frozen network are left out if they warn. The next claims are
# about coverage, with wider bounds for fewer than 50 samples, and about interval
# scores. The last claims repeat a published result of laplace-torch for a trained
# WideResNet on CIFAR-10. Laplace lowered its ECE from 2.0 to 0.8 percent and its NLL
# from 0.172 to 0.157, and its accuracy stayed at 94.8 percent (`documentation of
# laplace-torch <https://aleximmer.github.io/Laplace/calibration_example/>`_; Daxberger
# et al. 2021).


def verdict(method, what, names, value, low=-np.inf, high=np.inf):
    """Print a claim about a method, and the data sets that break it."""
    values = {name: value(name, method) for name in names}
    broken = {name: v for name, v in values.items() if not low <= v <= high}
    bounds = f"at most {high}" if low == -np.inf else f"in [{low}, {high}]"
    count = f"{len(values) - len(broken)} of {len(values)}"
    print(
        f"{'DOES NOT HOLD' if broken else 'holds':15}{method}: {what} {bounds}: {count}"
    )
    for name, v in broken.items():
        print(f"{'':17}{name}: {v:.4f}")


print("\nWhat should hold")
what = "NLL minus the network's"
verdict("default", what, classes, above("NLL"), high=0.01)
for method in "frozen", "frozen all":
    verdict(method, f"{what}, no warning,", classes, above("silent NLL"), high=0.03)
for method in OURS:
    verdict(method, "coverage", many, coverage, 0.85, 0.95)
    verdict(method, "coverage, n < 50,", few, coverage, 0.8, 0.97)
for method in OURS:
    mean = np.mean([score_ratio(name, method) for name in many])
    what = f"score / conformal, mean {mean:.3f},"
    verdict(method, what, ["mean"], lambda *_, m=mean: m, high=1.05)
    verdict(method, "score / conformal", many, score_ratio, high=1.05)
for method in "default", "frozen all":
    verdict(method, "ECE minus the network's", classes, above("ECE"), high=0)
    accuracy = above("accuracy")
    verdict(method, "accuracy minus the network's", classes, accuracy, -0.005, 1)

# %%
# The figure shows the results for classification and regression. Left of zero, a method
# is better than the network. Coverages should lie in the grey band.

COLORS = {
    "scaled": "#9a9a9a",
    "conformal": "#9a9a9a",
    "five nets": "#E69F00",
    "default": "#0072B2",
    "no split": "#56B4E9",
    "frozen all": "#D55E00",
}
figure, axes = plt.subplots(1, 2, figsize=(9, 5.5), layout="constrained")
panels = [(classes, class_methods, above("NLL")), (names, methods, coverage)]
for ax, (shown, present, value) in zip(axes, panels, strict=True):
    rows = np.arange(len(shown))[::-1]
    chosen = [method for method in COLORS if method in present]
    for shift, method in zip(np.linspace(0.25, -0.25, 5), chosen, strict=True):
        x = [value(name, method) for name in shown]
        style = {"color": COLORS[method], "markersize": 4.5, "label": method}
        ax.plot(x, rows + shift, "o", **style)
    ax.set(yticks=rows, yticklabels=shown)
    for row in rows:
        ax.axhline(row - 0.5, color="#e8e8e8", linewidth=0.8, zorder=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.4, 1))
axes[0].axvline(0, color="black", linewidth=0.8)
axes[0].set_xscale("symlog", linthresh=0.02)
axes[0].set_xticks([-1, -0.1, 0, 0.1], ["-1", "-0.1", "0", "0.1"])
axes[0].set(xlabel="NLL minus the NLL of the network (nats)")
axes[1].axvspan(0.85, 0.95, color="#dddddd", zorder=0)
axes[1].set(xlabel="coverage of 90 % intervals", xlim=(None, 1.01))
plt.show()
