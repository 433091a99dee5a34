"""
Far from the data
=================

Predictions should be uncertain for inputs that differ from all training samples:
probabilities should become equal, and prediction bands should become wide. We compare
four baselines with three versions of Laplace. The baselines are a network alone, a
network with temperature scaling, five networks, and a Gaussian process. The versions of
Laplace are the default, the default without the residual that grows with the distance
from the data, and a version whose prior precision maximises the marginal likelihood.
See :ref:`far` in the user guide.

The script takes four minutes on one core. This page shows only the first seed in the
tables.
"""

# %%
# Data
# ----
#
# The points far away lie in random directions from the mean of the data. Their distance
# is four times the 90 % quantile of the distances in the data. For digits, the points
# far away are images of noise.

import sys
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import softmax
from sklearn.datasets import (
    load_breast_cancer,
    load_digits,
    load_wine,
    make_blobs,
    make_moons,
)
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier, NeuralNetRegressor
from torch import nn

from sklaplace import DeepEnsembleClassifier, LaplaceClassifier, LaplaceRegressor
from sklaplace.plotting import ConfidenceDisplay

torch.set_num_threads(1)  # small networks gain nothing from more

FACTORS = 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0
SEEDS = range(1 if "sphinx_gallery" in sys.modules else 4)
DATA = {
    "moons": lambda seed: make_moons(300, noise=0.2, random_state=seed),
    "blobs": lambda seed: make_blobs(
        300, centers=4, cluster_std=1.5, random_state=seed
    ),
    "digits": lambda seed: load_digits(return_X_y=True),
    "wine": lambda seed: load_wine(return_X_y=True),
    "breast cancer": lambda seed: load_breast_cancer(return_X_y=True),
}


def samples(name, seed):
    X, y = DATA[name](seed)
    parts = train_test_split(X, y, test_size=0.4, random_state=seed, stratify=y)
    scaler = StandardScaler(with_std=name != "digits").fit(parts[0])
    X, X_test = (scaler.transform(part).astype(np.float32) for part in parts[:2])
    rng = np.random.default_rng(seed)
    if name == "digits":
        far = scaler.transform(rng.uniform(0, 16, size=(400, 64)))
    else:
        far = rng.normal(size=(400, X.shape[1]))
        radius = 4 * np.quantile(np.linalg.norm(X, axis=1), 0.9)
        far *= radius / np.linalg.norm(far, axis=1, keepdims=True)
    scale = 8 if name == "digits" else 1  # pixels are from 0 to 16
    return X / scale, X_test / scale, *parts[2:], far.astype(np.float32) / scale


# %%
# Models
# ------


def mlp(n_inputs, n_outputs):
    return nn.Sequential(
        nn.Linear(n_inputs, 50),
        nn.ReLU(),
        nn.Linear(50, 50),
        nn.ReLU(),
        nn.Linear(50, n_outputs),
    )


def classifier(n_inputs, n_classes):
    return NeuralNetClassifier(
        mlp,
        module__n_inputs=n_inputs,
        module__n_outputs=n_classes,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=3e-3,
        batch_size=64,
        max_epochs=100,
        verbose=0,
    )


def with_temperature(net, X, y):
    """Scale the logits so that the NLL of the held-out labels is minimal."""
    held_out = net.get_split_datasets(X, y)[1].indices
    logits = net.forward(X[held_out]).numpy().astype(float)

    def nll(log_scale):
        return log_loss(y[held_out], softmax(np.exp(log_scale) * logits, axis=1))

    scale = np.exp(minimize_scalar(nll, bounds=(-4, 4), method="bounded").x)
    return lambda X: softmax(scale * net.forward(X).numpy(), axis=1)


def predictors(X, y, seed):
    """Return, for each model, a function that returns its probabilities."""
    net = classifier(X.shape[1], len(np.unique(y)))
    default = LaplaceClassifier(net, random_state=seed).fit(X, y)
    weights = LaplaceClassifier(net, residual="none", random_state=seed).fit(X, y)
    options = {"prior_precision": "marglik", "random_state": seed}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the tables show what it says
        evidence = LaplaceClassifier(net, **options).fit(X, y)
    five = DeepEnsembleClassifier(net, n_estimators=5, random_state=seed).fit(X, y)
    kernel = ConstantKernel(1.0) * RBF(np.sqrt(X.shape[1]))
    process = GaussianProcessClassifier(kernel, random_state=seed)
    process.fit(X[:300], y[:300])  # more samples take minutes
    alone = default.estimator_
    return {
        "network alone": alone.predict_proba,
        "temperature scaled": with_temperature(alone, X, y),
        "five networks": five.predict_proba,
        "Gaussian process": process.predict_proba,
        "Laplace, marglik": evidence.predict_proba,
        "Laplace, no residual": weights.predict_proba,
        "Laplace, default": default.predict_proba,
    }, default


# %%
# Tables
# ------
#
# The tables show means over the seeds. ``NLL`` is the negative log-likelihood of the
# test samples. ``conf.`` is the mean largest probability far from the data. ``AUROC``
# measures how well the entropy of the probabilities distinguishes far points from test
# samples: 0.5 is chance and 1 is perfect. The Gaussian process is fitted to at most 300
# samples.


def entropy(proba):
    return -(proba * np.log(np.clip(proba, 1e-12, 1))).sum(axis=1)


def scores(name, seed):
    X, X_test, y, y_test, far = samples(name, seed)
    found, model = predictors(X, y, seed)
    rows = {}
    for method, predict_proba in found.items():
        near, away = predict_proba(X_test), predict_proba(far)
        is_far = np.repeat([0, 1], [len(near), len(away)])
        auroc = roc_auc_score(is_far, np.concatenate([entropy(near), entropy(away)]))
        rows[method] = log_loss(y_test, near), away.max(axis=1).mean(), auroc
    epistemic = [model.predict_uncertainty(part)[:, 2] for part in (X_test, far)]
    is_far = np.repeat([0, 1], [len(X_test), len(far)])
    centre = X.mean(axis=0)
    curves = {
        method: [
            found[method](centre + factor * (X_test - centre)).max(axis=1).mean()
            for factor in FACTORS
        ]
        for method in ("network alone", "Laplace, no residual", "Laplace, default")
    }
    return rows, roc_auc_score(is_far, np.concatenate(epistemic)), curves


results = {name: [scores(name, seed) for seed in SEEDS] for name in DATA}
print(f"{'':22}{''.join(f'{name:>21}' for name in DATA)}")
print(f"{'':22}" + len(DATA) * f"{'NLL':>7}{'conf.':>7}{'AUROC':>7}")
for method in results["moons"][0][0]:
    means = [
        np.mean([r[method] for r, *_ in runs], axis=0) for runs in results.values()
    ]
    print(f"{method:22}" + "".join(f"{value:7.2f}" for value in np.ravel(means)))
of_epistemic = [[auroc for _, auroc, _ in runs] for runs in results.values()]
print(f"AUROC of the default's epistemic part, mean: {np.mean(of_epistemic):.3f}")

# %%
# In some runs on moons, the network classifies all held-out samples correctly. Every
# small temperature then fits these samples, and temperature scaling increases the NLL
# of the test samples.

# %%
# Confidence up to the horizon
# ----------------------------
#
# The figure shows the first seed of the moons. The decision boundary is white.

X, _, y, _, _ = samples("moons", 0)
found, model = predictors(X, y, 0)
panels = {
    "network alone": model.estimator_,
    "without the residual": LaplaceClassifier(
        classifier(2, 2), residual="none", random_state=0
    ).fit(X, y),
    "default": model,
}
figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
for ax, (title, fitted) in zip(axes, panels.items(), strict=True):
    display = ConfidenceDisplay.from_estimator(
        fitted,
        X,
        eps=8.0,
        grid_resolution=150,
        ax=ax,
        surface_kw={"levels": np.linspace(0.5, 1, 21)},
    )
    ax.scatter(*X.T, c=y, s=6, cmap="gray", edgecolor="black", lw=0.2)
    ax.set(title=title, xticks=[], yticks=[])
figure.colorbar(display.surface_, ax=axes, label="confidence", ticks=[0.5, 0.75, 1.0])
plt.show()

# %%
# Between near and far
# --------------------
#
# The test samples are moved away from the mean of the training samples, until their
# distance is up to six times as large. The figure shows the mean largest probability,
# averaged over the seeds. The dashed line is the value if all classes are equally
# probable.

figure, axes = plt.subplots(
    1, len(DATA), figsize=(12, 3.4), sharex=True, sharey=True, layout="constrained"
)
for ax, (name, runs) in zip(axes, results.items(), strict=True):
    for method in runs[0][2]:
        means = np.mean([curves[method] for *_, curves in runs], axis=0)
        ax.plot(FACTORS, means, marker=".", label=method)
    n_classes = len(np.unique(DATA[name](0)[1]))
    ax.axhline(1 / n_classes, color="gray", ls="--", label="equal probabilities")
    ax.set(title=name, xlabel="times the distance", xticks=range(1, 7))
axes[0].set(ylabel="mean confidence", ylim=(0, 1.02))
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
plt.show()

# %%
# A gap
# -----
#
# A sine is observed on both sides of a gap. Without the residual, the band stays narrow
# in some runs. With the residual, it becomes wider in the gap and beyond the data, up
# to about twice the standard deviation of the targets. Far from the data, a Gaussian
# process returns to its prior.


def waves(seed, n=150):
    rng = np.random.default_rng(seed)
    x = np.concatenate([rng.uniform(-3, -1, n // 2), rng.uniform(1, 3, n // 2)])
    y = np.sin(2 * x) + 0.1 * rng.normal(size=n)
    return x[:, np.newaxis].astype(np.float32), y.astype(np.float32)


class Tanh(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))


net = NeuralNetRegressor(
    Tanh,
    criterion=nn.MSELoss,
    optimizer=torch.optim.Adam,
    lr=1e-2,
    batch_size=32,
    max_epochs=200,
    verbose=0,
)
grid = np.linspace(-8, 8, 400, dtype=np.float32)[:, np.newaxis]
inside = np.linspace(-0.9, 0.9, 100, dtype=np.float32)[:, np.newaxis]
figure, axes = plt.subplots(
    1, 3, figsize=(12, 4), sharex=True, sharey=True, layout="constrained"
)
X, y = waves(0)
kernel = ConstantKernel(1.0) * RBF(1.0) + WhiteKernel(0.01)
bands = {
    "Laplace, no residual": LaplaceRegressor(net, residual="none", random_state=0),
    "Laplace, default": LaplaceRegressor(net, random_state=0),
    "Gaussian process": GaussianProcessRegressor(kernel, normalize_y=True),
}
for ax, (title, fitted) in zip(axes, bands.items(), strict=True):
    targets = y if "Gaussian" in title else y[:, np.newaxis]
    mean, std = map(np.ravel, fitted.fit(X, targets).predict(grid, return_std=True))
    ax.fill_between(grid[:, 0], mean - 1.645 * std, mean + 1.645 * std, alpha=0.3)
    ax.plot(grid[:, 0], mean)
    ax.scatter(X[:, 0], y, s=4, c="black")
    ax.set(title=title, ylim=(-6, 6), xlabel="x")
plt.show()

# %%
# The last table covers five seeds. The first column is the fraction of the sine in the
# gap that lies inside the 90 % band of the function. The second column is the standard
# deviation of a new target at four times the largest input, in units of the standard
# deviation of the targets.

far = np.array([[-12.0], [12.0]], dtype=np.float32)
print(f"\n{'':22}{'within the gap':>16}{'width far away':>24}")
for method, residual in {"no residual": "none", "default": "auto"}.items():
    within, widths = [], []
    for seed in range(5):
        X, y = waves(seed)
        fitted = LaplaceRegressor(net, residual=residual, random_state=seed)
        fitted.fit(X, y[:, np.newaxis])
        mean, variance = map(np.ravel, fitted.latent_mean_and_variance(inside))
        error = np.abs(np.sin(2 * inside[:, 0]) - mean)
        within.append(np.mean(error < 1.645 * np.sqrt(variance)))
        widths.append(fitted.predict(far, return_std=True)[1].mean() / y.std())
    width = f"{np.min(widths):.1f} to {np.max(widths):.1f}"
    print(f"Laplace, {method:13}{np.mean(within):16.0%}{width:>24}")
