"""
Reliability of the defaults
===========================

Mostly good: with held-out samples, the defaults kept or lowered the test loss of the
network alone, give or take 0.01, in 14 of 15 settings, and the 90 % intervals of
regression covered between 85 % and 95 % of the test samples in all nine. Iris and the
smallest regression problem broke a bound after 300 epochs. With nothing held out, a
good network can lose up to 0.05. These are results of the full run over four seeds.

This script measures it on small data sets, with default settings, around an ordinary
network: two hidden layers of 64 ReLU units, Adam, no weight decay, trained for 30
epochs, and for 300, which is far too long for most of them.

All scores are on test samples, as means over seeds. Each seed has its own split and its
own initial weights. Lower is better for the negative log-likelihood (NLL).

.. code-block:: bash

   python examples/plot_trust.py            # four seeds, several minutes
   python examples/plot_trust.py --quick    # one seed, 30 epochs: what is shown here
"""

# %%
# The data
# --------
#
# Inputs are standardised in a pipeline, and targets of regression by hand.

import argparse
import sys
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from joblib import Parallel, delayed
from sklearn import datasets
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import BayesianRidge
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier, NeuralNetRegressor
from torch import nn

from sklaplace import LaplaceClassifier, LaplaceRegressor
from sklaplace.metrics import gaussian_nll, interval_coverage

CLASSIFICATION = {
    "digits": lambda: datasets.load_digits(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "breast cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "iris": lambda: datasets.load_iris(return_X_y=True),
    "moons": lambda: datasets.make_moons(400, noise=0.25, random_state=0),
}
REGRESSION = {
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "friedman1 (400)": lambda: datasets.make_friedman1(400, noise=1.0, random_state=0),
    "friedman1 (150)": lambda: datasets.make_friedman1(150, noise=2.0, random_state=0),
}


def split(X, y, seed, **options):
    """A quarter of the samples for testing."""
    return train_test_split(
        X.astype("float32"), y, test_size=0.25, random_state=seed, **options
    )


# %%
# The network
# -----------
#
# skorch holds out a fifth of the samples by default. ``LaplaceClassifier`` tunes on
# these.


def mlp(n_inputs, n_outputs):
    return nn.Sequential(
        nn.Linear(n_inputs, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, n_outputs),
    )


def network(kind, n_inputs, n_outputs, epochs, **options):
    return kind(
        mlp,
        module__n_inputs=n_inputs,
        module__n_outputs=n_outputs,
        optimizer=torch.optim.Adam,
        lr=1e-3,
        batch_size=64,
        max_epochs=epochs,
        verbose=0,
        **options,
    )


# %%
# Classification
# --------------
#
# Three questions per data set. How does Laplace compare with the network alone, if
# samples are held out? How does it, around a frozen network that has seen all training
# samples, if nothing is left to tune on? And what does ``LaplaceClassifier()`` do,
# without any network given?


def nll(model, X, y):
    return log_loss(y, model.predict_proba(X), labels=np.unique(y))


def classify(name, epochs, seed):
    """NLL with samples held out (own, Laplace) and with none (own, Laplace)."""
    torch.set_num_threads(1)
    X, y = CLASSIFICATION[name]()
    X_train, X_test, y_train, y_test = split(X, y, seed, stratify=y)
    shape = X.shape[1], len(np.unique(y))
    loss = {"criterion": nn.CrossEntropyLoss}

    net = network(NeuralNetClassifier, *shape, epochs, **loss)
    laplace = make_pipeline(StandardScaler(), LaplaceClassifier(net, random_state=seed))
    laplace.fit(X_train, y_train)
    scaler, alone = laplace[0], laplace[-1].estimator_
    scores = [nll(alone, scaler.transform(X_test), y_test)]
    scores += [nll(laplace, X_test, y_test)]

    torch.manual_seed(seed)
    net = network(NeuralNetClassifier, *shape, epochs, train_split=None, **loss)
    net.fit(scaler.transform(X_train), y_train)
    laplace = make_pipeline(
        StandardScaler(), LaplaceClassifier(FrozenEstimator(net), random_state=seed)
    )
    laplace.fit(X_train, y_train)
    scores += [nll(net, scaler.transform(X_test), y_test)]
    return [*scores, nll(laplace, X_test, y_test)]


def classify_by_default(name, seed):
    """NLL of the default network (own, Laplace)."""
    torch.set_num_threads(1)
    X, y = CLASSIFICATION[name]()
    X_train, X_test, y_train, y_test = split(X, y, seed, stratify=y)
    laplace = make_pipeline(StandardScaler(), LaplaceClassifier(random_state=seed))
    laplace.fit(X_train, y_train)
    scaler, alone = laplace[0], laplace[-1].estimator_
    own = nll(alone, scaler.transform(X_test).astype("float64"), y_test)
    return [own, nll(laplace, X_test, y_test)]


# %%
# Regression
# ----------
#
# Two questions: do the 90 % intervals cover 90 % of the test samples, and is the
# density no worse than that of a Bayesian linear model?


def gaussian_scores(model, X, y):
    """Coverage of the central 90 % interval and NLL of one Gaussian per row."""
    mean, std = model.predict(X, return_std=True)
    interval = mean[:, None] + std[:, None] * np.array([-1.6449, 1.6449])
    return [interval_coverage(y, interval), gaussian_nll(y, mean, std)]


def split_targets(name, seed):
    X, y = REGRESSION[name]()
    X_train, X_test, y_train, y_test = split(X, y.astype("float32"), seed)
    mean, std = y_train.mean(), y_train.std()
    return X_train, X_test, (y_train - mean) / std, (y_test - mean) / std


def regress(name, epochs, seed):
    torch.set_num_threads(1)
    X_train, X_test, y_train, y_test = split_targets(name, seed)
    net = network(NeuralNetRegressor, X_train.shape[1], 1, epochs)
    laplace = make_pipeline(StandardScaler(), LaplaceRegressor(net, random_state=seed))
    return gaussian_scores(laplace.fit(X_train, y_train), X_test, y_test)


def regress_by_default(name, seed):
    torch.set_num_threads(1)
    X_train, X_test, y_train, y_test = split_targets(name, seed)
    laplace = make_pipeline(StandardScaler(), LaplaceRegressor(random_state=seed))
    ridge = make_pipeline(StandardScaler(), BayesianRidge())
    return [
        *gaussian_scores(laplace.fit(X_train, y_train), X_test, y_test),
        *gaussian_scores(ridge.fit(X_train, y_train), X_test, y_test),
    ]


# %%
# Run everything
# --------------

parser = argparse.ArgumentParser(description="Measure the default settings.")
parser.add_argument(
    "--quick",
    action="store_true",
    default="sphinx_gallery" in sys.modules,
    help="one seed, 30 epochs",
)
parser.add_argument("--n-jobs", type=int, default=2, help="processes of the full run")
options = parser.parse_args()

seeds = range(1 if options.quick else 4)
all_epochs = [30] if options.quick else [300, 30]  # the long ones first
jobs = [
    (function, name, *epochs, seed)
    for function, names, choices in [
        (classify, CLASSIFICATION, [(n,) for n in all_epochs]),
        (regress, REGRESSION, [(n,) for n in all_epochs]),
        (classify_by_default, CLASSIFICATION, [()]),
        (regress_by_default, REGRESSION, [()]),
    ]
    for epochs in choices
    for name in names
    for seed in seeds
]


def run(function, *arguments):
    with warnings.catch_warnings():
        # warnings about small splits: the scores show their effect
        warnings.simplefilter("ignore", UserWarning)
        return function(*arguments)


n_jobs = 1 if options.quick else options.n_jobs
results = Parallel(n_jobs=n_jobs)(delayed(run)(*job) for job in jobs)
scores = {}
for (function, *key, _), result in zip(jobs, results, strict=True):
    scores.setdefault((function, *key), []).append(result)
scores = {key: np.mean(values, axis=0) for key, values in scores.items()}

# %%
# The results
# -----------
#
# The bounds are: with samples held out, no more than 0.01 above the network alone;
# around a frozen network with nothing held out, no more than 0.06 above it; intervals
# that cover between 85 % and 95 %, and an NLL of no more than 0.1 above
# ``BayesianRidge``. The rows "default" have no network given.


def verdict(holds):
    return "holds" if holds else "FAILS"


WIDTHS = "{:16}{:>7}  {:>8}{:>8}  {:5}  {:>8}{:>8}  {:5}".format

print(f"Classification: test NLL, mean over seeds: {len(seeds)}")
print(f"{'':25}{'samples held out':^23}  {'nothing held out':^23}")
print(WIDTHS("data", "epochs", *["network", "Laplace", "bound"] * 2))
points = []
for name in CLASSIFICATION:
    for epochs in sorted(all_epochs):
        own, held_out, own_all, frozen = scores[classify, name, epochs]
        points.append((name, epochs, own, held_out, own_all, frozen))
        first = f"{own:.3f}", f"{held_out:.3f}", verdict(held_out <= own + 0.01)
        second = f"{own_all:.3f}", f"{frozen:.3f}", verdict(frozen <= own_all + 0.06)
        print(WIDTHS(name, epochs, *first, *second))
    own, held_out = scores[classify_by_default, name]
    first = f"{own:.3f}", f"{held_out:.3f}", verdict(held_out <= own + 0.01)
    print(WIDTHS(name, "default", *first, "", "", "").rstrip())

print(f"\nRegression, mean over seeds: {len(seeds)}")
print(f"{'':25}{'90 % intervals':^23}  {'test NLL':^23}")
heads = "", "cover", "bound", "ridge", "Laplace", "bound"
print(WIDTHS("data", "epochs", *heads))
for name in REGRESSION:
    *default, _, ridge = scores[regress_by_default, name]
    results = [
        (epochs, *scores[regress, name, epochs]) for epochs in sorted(all_epochs)
    ]
    for epochs, coverage, loss in [*results, ("default", *default)]:
        first = "", f"{coverage:.3f}", verdict(0.85 <= coverage <= 0.95)
        second = f"{ridge:.3f}", f"{loss:.3f}", verdict(loss <= ridge + 0.1)
        print(WIDTHS(name, epochs, *first, *second))

# %%
# What is shown here is one seed, and one seed can break a bound that the mean over four
# holds: where the row "default" of wine fails, Laplace is about 0.02 above the network
# alone, and 0.006 above it on average. The full run over four seeds, which the first
# paragraph sums up, fails for iris and friedman1 (150), both after 300 epochs, which
# are left out here.
#
# In one picture: Laplace (filled) next to the network alone (hollow). The further left,
# the better.

BLUE, GREY = "#0072B2", "#6e6e6e"
figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
rows = np.arange(len(points))[::-1]
labels = [f"{name}, {epochs} epochs" for name, epochs, *_ in points]
for ax, title, first in zip(
    axes, ["Samples held out", "Nothing held out"], [2, 4], strict=True
):
    own, with_laplace = np.array([point[first : first + 2] for point in points]).T
    ax.hlines(rows, own, with_laplace, color=GREY, linewidth=1)
    ax.plot(own, rows, "o", color=GREY, markerfacecolor="white", label="network alone")
    ax.plot(with_laplace, rows, "o", color=BLUE, label="Laplace")
    ax.set(title=title, xlabel="test NLL (nats)", yticks=rows, yticklabels=labels)
    ax.set_xlim(left=0)
    ax.spines[["top", "right"]].set_visible(False)
axes[0].legend(frameon=False)
plt.show()
