"""
The default network, from a hundred rows to thousands
=====================================================

``LaplaceClassifier()`` and ``LaplaceRegressor()`` train a default network of one of two
sizes. The small network has one hidden layer and linear inputs. The large network also
has piecewise linear functions of each column, a wider hidden layer and a stronger
penalty. It is used for tables with at least 500 distinct rows. This script fits both
sizes to tables of 100 to 2,000 rows, and compares them with scikit-learn's gradient
boosting.

In the full run, the mean change of the negative log-likelihood (NLL) from the small to
the large network is 0.012 with 100 rows, -0.010 with 200, -0.059 with 500 and -0.160
with 2,000. The large network has the lower NLL on 5 of 11 tables with 200 rows, and on
7 of 11 tables with 500 rows. The large network is worse on digits, and slightly worse
on the linear table and friedman2.

.. code-block:: bash

   cd examples/studies
   python plot_default_network.py          # two seeds, seven minutes on one core
   python plot_default_network.py --quick  # two tables, one seed: shown on this page
"""

# %%
# The tables
# ----------
#
# All tables except ``linear`` and ``classification`` are nonlinear. ``map`` simulates
# prices around three towns. Its inputs are two coordinates and six other columns, and
# only one of these six affects the price. There are 2,000 test samples. For digits, the
# test samples are those of the 1,797 images that are not used for training.

import argparse
import sys
import time
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn import datasets
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
)
from sklearn.metrics import log_loss, root_mean_squared_error

from sklaplace import LaplaceClassifier, LaplaceRegressor
from sklaplace.metrics import gaussian_nll
from sklaplace.networks import default

torch.set_num_threads(1)  # small networks gain nothing from more


def prices_on_a_map(n_samples, random_state):
    rng = np.random.default_rng(random_state)
    X = rng.normal(size=(n_samples, 8))
    X[:, :2] = rng.uniform(-1, 1, size=(n_samples, 2))
    towns = np.array([[-0.6, 0.5], [0.1, -0.4], [0.7, 0.6]])
    distances = np.linalg.norm(X[:, None, :2] - towns, axis=2)
    y = np.exp(-5 * distances).sum(1) + 0.2 * np.tanh(2 * X[:, 2])
    return X, y + 0.1 * rng.normal(size=n_samples)


def digits(n_samples, random_state):
    X, y = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(random_state).permutation(len(X))
    return X[order], y[order]


REGRESSION = {
    "friedman1": (datasets.make_friedman1, {"noise": 1.0}),
    "friedman2": (datasets.make_friedman2, {"noise": 100.0}),
    "friedman3": (datasets.make_friedman3, {"noise": 0.1}),
    "swiss roll": (datasets.make_swiss_roll, {"noise": 1.0}),
    "map": (prices_on_a_map, {}),
    "linear": (datasets.make_regression, {"n_features": 10, "noise": 50.0}),
}
CLASSIFICATION = {
    "moons": (datasets.make_moons, {"noise": 0.3}),
    "quantiles": (datasets.make_gaussian_quantiles, {"n_features": 4}),
    "hastie": (datasets.make_hastie_10_2, {}),
    "classification": (datasets.make_classification, {"flip_y": 0.1}),
    "digits": (digits, {}),
}
TABLES = REGRESSION | CLASSIFICATION
ROWS = 100, 200, 500, 1000, 2000

# %%
# The fits
# --------
#
# ``MANY_ROWS`` is the threshold between the sizes. With a huge threshold, every network
# is small, and with a threshold of one, every network is large. The times include the
# training on folds and the tuning of the prior precision.

SIZES = {"small": 10**9, "large": 1}


def scores(name, model, X, y, X_test, y_test):
    """Return the NLL and the RMSE of the test samples, and the seconds of the fit."""
    start = time.perf_counter()
    model.fit(X, y)
    seconds = time.perf_counter() - start
    if name in CLASSIFICATION:
        proba = model.predict_proba(X_test)
        return log_loss(y_test, proba, labels=model.classes_), np.nan, seconds
    if hasattr(model, "predict_interval"):
        mean, std = model.predict(X_test, return_std=True)
        nll = gaussian_nll(y_test, mean, std)
    else:
        mean, nll = model.predict(X_test), np.nan
    return nll, root_mean_squared_error(y_test, mean), seconds


def compare(name, n, seed):
    """Return scores by model. Regression targets have a standard deviation of 1."""
    make, options = TABLES[name]
    X, y = make(n_samples=n + 2000, random_state=seed, **options)
    if name in REGRESSION:
        y = (y - y.mean()) / y.std()
    parts = X[:n], y[:n], X[n:], y[n:]
    is_regression = name in REGRESSION
    ours = LaplaceRegressor if is_regression else LaplaceClassifier
    boosting = (
        HistGradientBoostingRegressor
        if is_regression
        else HistGradientBoostingClassifier
    )
    found = {"boosting": scores(name, boosting(random_state=seed), *parts)}
    for size, threshold in SIZES.items():
        with mock.patch.object(default, "MANY_ROWS", threshold):
            found[size] = scores(name, ours(random_state=seed), *parts)
    return found


parser = argparse.ArgumentParser(description="Measure the default network.")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--seeds", type=int, default=2)
options = parser.parse_args(["--quick"] if "sphinx_gallery" in sys.modules else None)
names = ["friedman1", "moons"] if options.quick else list(TABLES)
rows = (100, 500) if options.quick else ROWS
seeds = range(1 if options.quick else options.seeds)
METHODS = ["small", "large", "boosting"]
means = {}
for name in names:
    for n in [n for n in rows if name != "digits" or n <= 1000]:
        runs = [compare(name, n, seed) for seed in seeds]
        for method in METHODS:
            means[name, n, method] = np.mean([run[method] for run in runs], axis=0)

# %%
# The results
# -----------
#
# The table shows means over the seeds. Boosting predicts no standard deviations, so it
# has no NLL for regression. The RMSE is in units of the standard deviation of the
# targets.


def row(label, n, values):
    numbers = "".join(f"{value:10.3f}" for value in values).replace("nan", "  -")
    return f"{label:16}{n:6}{numbers}"


columns = [(measure, method) for measure in range(3) for method in METHODS]
heads = "".join(f"{measure:>10}{'':20}" for measure in ("NLL", "RMSE", "seconds"))
print(f"{'':22}{heads.rstrip()}")
print(f"{'table':16}{'rows':>6}" + 3 * "".join(f"{m:>10}" for m in METHODS))
for name, n in dict.fromkeys(key[:2] for key in means):
    print(row(name, n, [means[name, n, method][m] for m, method in columns]))

print("\nMeans over tables of the change from the small to the large network")
print(f"{'rows':>6}{'NLL':>10}{'RMSE':>10}{'better NLL':>14}")
for n in rows:
    there = [name for name in names if (name, n, "small") in means]
    change = np.array([means[t, n, "large"] - means[t, n, "small"] for t in there])
    nll, rmse = change[:, 0].mean(), np.nanmean(change[:, 1])
    better = f"{np.sum(change[:, 0] < 0)} of {len(there)}"
    print(f"{n:6}{nll:10.3f}{rmse:10.3f}{better:>14}")

# %%
# The figure shows the same changes. Where the change is negative, the large network is
# better.

figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
for ax, kind in zip(axes, (REGRESSION, CLASSIFICATION), strict=True):
    for name in [name for name in names if name in kind]:
        n = [n for n in rows if (name, n, "small") in means]
        nll = [means[name, k, "large"][0] - means[name, k, "small"][0] for k in n]
        ax.plot(n, nll, "o-", markersize=4, label=name)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.axvline(default.MANY_ROWS, color="black", linestyle=":", linewidth=0.8)
    ax.set(xscale="log", xlabel="rows for training")
    ax.set_xticks(rows, [f"{n:,}" for n in rows], minor=False)
    ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small")
axes[0].set(title="Regression", ylabel="NLL, large minus small network")
axes[1].set(title="Classification")
plt.show()
