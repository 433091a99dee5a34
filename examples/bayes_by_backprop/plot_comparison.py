"""
Laplace and other methods: scores and costs
===========================================

This study compares Laplace for the last layer and for all weights, Bayes by Backprop,
SWAG, Monte-Carlo dropout, a deep ensemble, and the network alone. All methods use the
same architecture and the same samples. The study measures accuracy, calibration,
detection of out-of-distribution inputs, and cost.

The script takes about a minute on two idle cores, and several minutes on slow or busy
cores.
"""

# %%
# Digits
# ------
#
# The known images are the digits 0 to 7. The unknown images are the digits 8 and 9, and
# inverted test images. Of the known digits, 40 % are used for training, 10 % are held
# out, and 50 % are used for testing. The study is repeated for several seeds, each with
# its own split and initial weights.

import warnings
from time import process_time

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.ticker import NullLocator
from sklearn.datasets import load_digits
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import train_test_split
from skorch import NeuralNetClassifier, NeuralNetRegressor
from skorch.dataset import Dataset
from skorch.helper import predefined_split
from torch import nn

from sklaplace import (
    DeepEnsembleClassifier,
    DeepEnsembleRegressor,
    LaplaceClassifier,
    LaplaceRegressor,
    MCDropoutClassifier,
    MCDropoutRegressor,
    SWAGClassifier,
    SWAGRegressor,
    VariationalClassifier,
    VariationalRegressor,
)
from sklaplace.metrics import (
    expected_calibration_error,
    gaussian_nll,
    interval_coverage,
    ood_auroc,
)
from sklaplace.plotting import PredictiveBandDisplay

torch.set_num_threads(1)
# the study measures the effect that this warning describes
warnings.filterwarnings("ignore", "The posterior predicts", UserWarning)

SEEDS = (0, 1, 2)
EPOCHS = 18
CURVE_EPOCHS = 150
MORE = 4
KL_WEIGHT = 0.01

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
known = labels < 8


def split_digits(seed):
    """Return training samples, held-out samples and test samples."""
    X, X_test, y, y_test = train_test_split(
        images[known],
        labels[known],
        test_size=0.5,
        stratify=labels[known],
        random_state=seed,
    )
    X_train, X_val, y_train, y_val = train_test_split(
        X, y, test_size=0.2, stratify=y, random_state=seed
    )
    return (X_train, y_train), (X_val, y_val), (X_test, y_test)


# %%
# All methods use the same architecture. Only the network of Monte-Carlo dropout is
# trained with dropout.


def mlp(n_inputs, width, n_outputs, activation, rate):
    return nn.Sequential(
        nn.Linear(n_inputs, width),
        activation(),
        nn.Dropout(rate),
        nn.Linear(width, width),
        activation(),
        nn.Dropout(rate),
        nn.Linear(width, n_outputs),
    )


def digits_net(val, epochs, rate=0.0):
    return NeuralNetClassifier(
        mlp,
        module__n_inputs=64,
        module__width=64,
        module__n_outputs=8,
        module__activation=nn.ReLU,
        module__rate=rate,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=3e-3,
        batch_size=32,
        max_epochs=epochs,
        train_split=None,
        verbose=0,
    )


# %%
# The methods
# -----------
#
# * *Laplace* starts from the trained network. Two versions choose the prior precision
#   on the held-out samples. A third version, "marglik", chooses it by the marginal
#   likelihood. These versions have no residual: only the weights are uncertain. The
#   fourth version adds the residual to the last layer, as by default; see :ref:`far`.
# * *Bayes by Backprop* is trained from scratch for four times as many epochs as the
#   network, because it converges more slowly. A second version starts from the trained
#   network, and is trained for as many epochs as this network. The weight of the
#   divergence (``kl_weight``) is smaller than the default, which tends to favour the
#   method.
# * *SWAG* continues from a trained network with a thousand steps of gradient descent.
# * The *deep ensemble* has five networks.
#
# Methods that draw weights or dropout masks use a hundred draws. The fit times include
# the training of the initial network.


def seconds(function, *args):
    """Return the processor time and the result of a function."""
    start = process_time()
    found = function(*args)
    return process_time() - start, found


def fit_all(kinds, new_net, epochs, rate, structures, train, val, seed):
    """Return fitted models and their fit times, by method."""
    laplace, variational, swag, dropout, ensemble = kinds
    few, many = epochs
    fixed = {"random_state": seed}
    weighted = fixed | {"kl_weight": KL_WEIGHT}

    def around(net, weights, prior="validation", residual="none"):
        model = laplace(
            FrozenEstimator(net),
            subset_of_weights=weights,
            hessian_structure=structures[weights],
            prior_precision=prior,
            residual=residual,
            **fixed,
        )
        rows = {"X_val": val[0], "y_val": val[1]} if prior == "validation" else {}
        return model.fit(*train, **rows)

    single = ensemble(new_net(val, few), n_estimators=1, **fixed)
    before, alone = seconds(single.fit, *train)
    net = alone.estimator_
    several = ensemble(new_net(val, few), n_estimators=5, **fixed)
    rows = {
        "network alone": (before, alone),
        "Laplace, last layer": seconds(around, net, "last_layer"),
        "Laplace, all weights": seconds(around, net, "all"),
        "Laplace, marglik": seconds(around, net, "all", "marglik"),
        "Laplace, with residual": seconds(
            around, net, "last_layer", "validation", "auto"
        ),
        "variational, from the trained network": seconds(
            variational(FrozenEstimator(net), **weighted).fit, *train
        ),
        "variational, from scratch": seconds(
            variational(new_net(val, many), **weighted).fit, *train
        ),
        "SWAG": seconds(swag(new_net(val, few), **fixed).fit, *train),
        "MC dropout": seconds(dropout(new_net(val, few, rate), **fixed).fit, *train),
        "deep ensemble": seconds(several.fit, *train),
    }
    models = {name: model for name, (_, model) in rows.items()}
    times = {name: time for name, (time, _) in rows.items()}
    for name in times:
        if name.startswith("Laplace") or name.endswith("trained network"):
            times[name] += before
    return models, times


def with_costs(scores, models, times, X):
    """Return the scores with the costs relative to the network alone."""
    predict = {
        name: seconds(getattr(model, "predict_proba", model.predict), X)[0]
        for name, model in models.items()
    }
    for name, found in scores.items():
        found["fit"] = times[name] / times["network alone"]
        found["predict"] = predict[name] / predict["network alone"]
    return scores


def show(title, runs):
    """Print means and standard deviations over the seeds, one line per method."""
    names = list(runs[0]["network alone"])
    print(f"{title:39}" + "".join(f"{name:>15}" for name in names))
    for method in runs[0]:
        line = f"{method:39}"
        for name in names:
            values = [run[method][name] for run in runs]
            form = ".1f" if name in (*COSTS, "std, gap/data") else ".3f"
            mean, std = np.mean(values), np.std(values)
            entry = "-" if np.isnan(mean) else f"{mean:{form}} ±{std:6{form}}"
            line += f"{entry:>15}"
        print(line)


COSTS = "fit", "predict"

# %%
# Scores
# ------
#
# For the negative log-likelihood (NLL) and the expected calibration error (ECE), lower
# is better. The AUROC measures how well the confidence (the largest probability)
# separates known digits from unknown images: 0.5 is chance and 1 is perfect. Costs are
# relative to the network alone.


def digits_scores(model, test):
    X, y = test
    proba = model.predict_proba(X)
    confidence = proba.max(1)
    eights, inverted = (
        model.predict_proba(rows).max(1) for rows in (images[~known], 1 - X)
    )
    return {
        "accuracy": accuracy_score(y, proba.argmax(1)),
        "NLL": log_loss(y, proba),
        "ECE": expected_calibration_error(y, proba),
        "AUROC 8, 9": ood_auroc(confidence, eights),
        "AUROC inv.": ood_auroc(confidence, inverted),
    }


CLASSIFIERS = (
    LaplaceClassifier,
    VariationalClassifier,
    SWAGClassifier,
    MCDropoutClassifier,
    DeepEnsembleClassifier,
)
# the first training loads code; its time should not count for any method
DeepEnsembleClassifier(digits_net(None, 1)).fit(images[:100], labels[:100] % 8)
digits_runs = []
for seed in SEEDS:
    train, val, test = split_digits(seed)
    models, times = fit_all(
        CLASSIFIERS,
        digits_net,
        (EPOCHS, MORE * EPOCHS),
        0.2,
        {"last_layer": "kron", "all": "kron"},
        train,
        val,
        seed,
    )
    scores = {name: digits_scores(model, test) for name, model in models.items()}
    digits_runs.append(with_costs(scores, models, times, test[0]))
show("digits", digits_runs)

# %%
# The accuracies hardly differ. The deep ensemble has the lowest NLL. It predicts faster
# than the other methods that average networks or draws, but its training is expensive.
# Laplace with held-out samples predicts almost like the network alone, because these
# samples favour a large prior precision. Laplace adds little to the training time, and
# predicts faster than the methods that use draws.
#
# The two AUROC columns lead to different conclusions. For the digits 8 and 9, all
# methods are similar. On inverted images, the methods differ:
#
# * Laplace with the residual detects nearly all inverted images, with about the same
#   NLL as the network alone.
# * Without the residual, Laplace with held-out samples improves the AUROC least.
#   Dropout and the ensemble improve it more.
# * Bayes by Backprop from scratch detects many inverted images, with about the same NLL
#   as the network alone, but its training takes longest.
# * Laplace with the marginal likelihood detects just as many inverted images, and
#   slightly more of the digits 8 and 9 than all other methods. This version adds almost
#   nothing to the training time. However, it is strongly underconfident on known
#   digits, with by far the highest NLL and ECE.
# * Bayes by Backprop from the trained network stays close to this network, and so does
#   SWAG with its default learning rate.

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#6e6e6e"
COLORS = {
    "network alone": GREY,
    "Laplace, last layer": BLUE,
    "Laplace, all weights": BLUE,
    "Laplace, marglik": BLUE,
    "Laplace, with residual": BLUE,
    "variational, from the trained network": ORANGE,
    "variational, from scratch": ORANGE,
    "SWAG": "#D55E00",
    "MC dropout": GREEN,
    "deep ensemble": "#CC79A7",
}
PANELS = {
    "NLL": "NLL (nats)",
    "ECE": "calibration error",
    "AUROC inv.": "AUROC,\ninverted images",
    "fit": "time to fit",
    "predict": "time to predict",
}
names = [method.replace(", ", ",\n", 1) for method in COLORS]
figure, axes = plt.subplots(
    1, len(PANELS), figsize=(10, 4), sharey=True, layout="constrained"
)
for ax, (name, label) in zip(axes, PANELS.items(), strict=True):
    for place, (method, color) in enumerate(COLORS.items()):
        values = [run[method][name] for run in digits_runs]
        ax.plot(values, [place] * len(values), "o", color=color, ms=4, alpha=0.5)
        ax.plot(np.mean(values), place, "|", color=color, ms=16, mew=2.5)
    if name in COSTS:
        ax.set(xscale="log", xlim=(0.7, 150), xticks=[1, 10, 100])
        ax.xaxis.set_major_formatter("{x:g} ×")
        ax.xaxis.set_minor_locator(NullLocator())
    elif name in ("NLL", "ECE"):
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter("")
    ax.set(xlabel=label, yticks=range(len(COLORS)), yticklabels=names)
    ax.grid(axis="y", color="0.92")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
axes[0].invert_yaxis()
plt.show()

# %%
# A curve with a gap
# ------------------
#
# The second task is a regression on one feature, with samples on both sides of a gap.
# The test samples are near the training samples. ``coverage`` is the fraction of test
# targets inside the 90 % intervals, and ``in the gap`` is the fraction of the curve
# inside the 90 % intervals in the gap. ``std, gap/data`` is the standard deviation due
# to the weights: its mean in the gap, divided by its mean at the data. Read this ratio
# together with the figure.


def curve(x):
    return np.sin(2 * x) + 0.3 * x


def rows_of_curve(rng, n):
    x = np.concatenate([rng.uniform(-3, -1, n), rng.uniform(1, 3, n)])
    y = curve(x) + 0.15 * rng.normal(size=2 * n)
    return x[:, None].astype("float32"), y.astype("float32")


def curve_net(val, epochs, rate=0.0):
    return NeuralNetRegressor(
        mlp,
        module__n_inputs=1,
        module__width=30,
        module__n_outputs=1,
        module__activation=nn.Tanh,
        module__rate=rate,
        optimizer=torch.optim.Adam,
        lr=0.02,
        batch_size=-1,
        max_epochs=epochs,
        train_split=predefined_split(Dataset(val[0], val[1][:, None])),
        verbose=0,
    )


def from_weights(model, X):
    """Return the standard deviation without the noise."""
    _, std = model.predict(X, return_std=True)
    return np.sqrt(np.maximum(std**2 - model.sigma_noise_**2, 0))


GAP = np.linspace(-0.5, 0.5, 50, dtype="float32")[:, None]


def curve_scores(model, test):
    X, y = test
    mean, std = model.predict(X, return_std=True)
    inside = from_weights(model, X).mean()
    gap = from_weights(model, GAP).mean()
    return {
        "RMSE": np.sqrt(np.mean((y - mean) ** 2)),
        "NLL": gaussian_nll(y, mean, std),
        "coverage": interval_coverage(y, model.predict_interval(X, coverage=0.9)),
        "in the gap": interval_coverage(curve(GAP[:, 0]), model.predict_interval(GAP)),
        "std, gap/data": gap / inside if inside > 0 else np.nan,
    }


REGRESSORS = (
    LaplaceRegressor,
    VariationalRegressor,
    SWAGRegressor,
    MCDropoutRegressor,
    DeepEnsembleRegressor,
)
curve_runs, curve_models = [], []
for seed in SEEDS:
    rng = np.random.default_rng(seed)
    train, val, test = (rows_of_curve(rng, n) for n in (40, 10, 500))
    models, times = fit_all(
        REGRESSORS,
        curve_net,
        (CURVE_EPOCHS, MORE * CURVE_EPOCHS),
        0.05,
        {"last_layer": "full", "all": "full"},
        train,
        val,
        seed,
    )
    scores = {name: curve_scores(model, test) for name, model in models.items()}
    curve_runs.append(with_costs(scores, models, times, test[0]))
    curve_models.append((models, train))
show("curve", curve_runs)

# %%
# Near the data, the network alone, all versions of Laplace, SWAG and the ensemble are
# equally good, within the variation between seeds. Bayes by Backprop from scratch
# is slightly worse. Bayes by Backprop from the trained network and dropout are less
# accurate.
#
# In the gap, Laplace with held-out samples often misses the curve: the held-out samples
# lie near the data, and do not determine how wide the bands should be in the gap. The
# residual widens the bands there. With the marginal likelihood, the bands of Laplace
# cover the curve, but are wider than necessary. The widths of the bands of the ensemble
# and of Bayes by Backprop roughly match the errors. The bands of dropout cover the
# curve, but are just as wide at the data. The bands of SWAG are narrow both in the gap
# and at the data. The bands of dropout and SWAG do not show where the gap is.
#
# If training is cheap, use an ensemble: other methods are clearly better only on
# inverted images. If the network is already trained, use Laplace with its residual,
# which detects inverted images without a higher NLL on known digits.

models, train = curve_models[0]
figure, axes = plt.subplots(
    2, 5, figsize=(12, 5), sharex=True, sharey=True, layout="constrained"
)
x = np.linspace(-4, 4, 200)
for ax, (name, model) in zip(axes.flat, models.items(), strict=True):
    PredictiveBandDisplay.from_estimator(model, *train, eps=1, ax=ax)
    ax.plot(x, curve(x), color="black", linestyle=":", label="truth")
    ax.set(title=name.replace(", ", ",\n", 1), ylim=(-4, 4), xlim=(-4, 4))
    ax.spines[["top", "right"]].set_visible(False)
figure.legend(
    *ax.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False
)
for ax in axes[-1]:
    ax.set_xlabel("x")
for ax in axes[:, 0]:
    ax.set_ylabel("y")
plt.show()
