"""
The weight of the prior: ``kl_weight``
======================================

Bayes by Backprop minimises the loss of the samples plus ``kl_weight`` times the
divergence of the posterior from the prior. Training with ``kl_weight=1`` corresponds to
Bayes' rule, and maximises the evidence lower bound (ELBO). This study varies
``kl_weight`` and the number of epochs on a small data set, and compares the ELBO with
the accuracy.

The script takes about half a minute on two idle cores, and several minutes on slow or
busy cores.
"""

# %%
# The samples and the network
# ---------------------------
#
# The samples are a hundred points from two moons. The network has about five weights
# for each point.

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import make_moons
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import VariationalClassifier
from sklaplace.plotting import ConfidenceDisplay

torch.set_num_threads(1)  # small networks gain nothing from more

SEEDS = (0, 1, 2)
KL_WEIGHTS = (0.001, 0.01, 0.1, 1.0)
EPOCHS = (50, 200, 600)
ROWS = 100


def moons(n_rows, seed):
    X, y = make_moons(n_rows, noise=0.25, random_state=seed)
    return X.astype("float32"), y


def mlp():
    return nn.Sequential(
        nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2)
    )


def variational(kl_weight, epochs, seed):
    net = NeuralNetClassifier(
        mlp,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=0.02,
        batch_size=-1,
        max_epochs=epochs,
        train_split=None,
        verbose=0,
    )
    return VariationalClassifier(net, kl_weight=kl_weight, random_state=seed)


# %%
# The effect of the weight
# ------------------------
#
# The accuracy and the negative log-likelihood (NLL, lower is better) are measured on
# new samples. The ELBO is computed on the training samples, always with
# ``kl_weight=1``. The prior has a standard deviation of one. If the posterior of a
# weight keeps this standard deviation, the weight has learned nothing from the data.

X_test, y_test = moons(2000, 1000)
NAMES = "accuracy", "NLL", "ELBO", "KL", "weight std"
models, runs = {}, {}
for seed in SEEDS:
    X, y = moons(ROWS, seed)
    for kl_weight in KL_WEIGHTS:
        for epochs in EPOCHS:
            model = variational(kl_weight, epochs, seed).fit(X, y)
            models[kl_weight, epochs, seed] = model
            proba = model.predict_proba(X_test)
            scores = (
                accuracy_score(y_test, proba.argmax(1)),
                log_loss(y_test, proba),
                model.elbo_,
                model.kl_,
                float(model.posterior_.variance().sqrt().mean()),
            )
            runs.setdefault((kl_weight, epochs), []).append(scores)
# (kl_weight, epochs) -> mean or standard deviation of each score
means = {key: np.mean(values, 0) for key, values in runs.items()}
stds = {key: np.std(values, 0) for key, values in runs.items()}

print(f"{'epochs':>6}{'kl_weight':>11}" + "".join(f"{name:>17}" for name in NAMES))
for epochs in EPOCHS:
    for kl_weight in KL_WEIGHTS:
        line = f"{epochs:6}{kl_weight:11g}"
        pairs = zip(means[kl_weight, epochs], stds[kl_weight, epochs], strict=True)
        for name, (mean, std) in zip(NAMES, pairs, strict=True):
            form = ".0f" if name in ("ELBO", "KL") else ".3f"
            line += f"{mean:9{form}} ±{std:6{form}}"
        print(line)

# %%
# *Training with* ``kl_weight=1`` *underfits.* A hundred samples cannot determine five
# hundred weights. After the longest training with ``kl_weight=1``, the posteriors are
# nearly as wide as the prior. The accuracy and the NLL on new samples are worse than
# with ``kl_weight=0.1``.
#
# *The ELBO does not reveal underfitting.* For each number of epochs, the ELBO is
# highest with ``kl_weight=1``. The ELBO measures how close a posterior is to the exact
# posterior under this prior, and not how well it predicts.
#
# *A short training can look better.* After the shortest training, the standard
# deviations are near their initial values, and the ELBO is far from its final value.
# With ``kl_weight=1``, the accuracy and the NLL are nevertheless better than after the
# longest training. With the smallest values of ``kl_weight``, the NLL is also better
# after the shortest training, because longer training overfits. Only with
# ``kl_weight=0.1`` is the NLL about the same after all three numbers of epochs. Compare
# values of ``kl_weight`` after the same number of epochs, and use the ELBO in
# ``model.estimator_.history`` to check whether the training has converged.

figure, axes = plt.subplots(1, 4, figsize=(10, 2.9), layout="constrained")
COLORS = dict(zip(EPOCHS, ("#56B4E9", "#0072B2", "#000000"), strict=True))
LABELS = {
    "accuracy": "test accuracy",
    "NLL": "test NLL (nats)",
    "ELBO": "ELBO (nats)",
    "weight std": "mean std of a weight",
}
for ax, (name, label) in zip(axes, LABELS.items(), strict=True):
    place = NAMES.index(name)
    for epochs, color in COLORS.items():
        mean, std = (
            np.array([values[w, epochs][place] for w in KL_WEIGHTS])
            for values in (means, stds)
        )
        ax.plot(KL_WEIGHTS, mean, "o-", color=color, ms=4, label=f"{epochs} epochs")
        ax.fill_between(
            KL_WEIGHTS, mean - std, mean + std, color=color, alpha=0.15, lw=0
        )
    ax.set(xscale="log", xlabel="kl_weight", title=label)
    ax.spines[["top", "right"]].set_visible(False)
axes[3].axhline(1, color="#6e6e6e", ls=":", lw=1)
axes[3].annotate("prior", (KL_WEIGHTS[0], 1), (0, 3), textcoords="offset points")
axes[3].set_ylim(0, 1.15)
axes[0].legend(frameon=False, fontsize="small")
plt.show()

# %%
# The next figure shows the confidence of the predictions after the longest training.

figure, axes = plt.subplots(
    1,
    len(KL_WEIGHTS),
    figsize=(10, 2.7),
    sharex=True,
    sharey=True,
    layout="constrained",
)
X, y = moons(ROWS, SEEDS[0])
for ax, kl_weight in zip(axes, KL_WEIGHTS, strict=True):
    display = ConfidenceDisplay.from_estimator(
        models[kl_weight, EPOCHS[-1], SEEDS[0]],
        X,
        eps=1.0,
        ax=ax,
        surface_kw={"levels": np.linspace(0.5, 1, 21)},
    )
    for label, color, marker in [(0, "white", "o"), (1, "black", "^")]:
        ax.scatter(
            *X[y == label].T, s=10, c=color, marker=marker, edgecolor="black", lw=0.4
        )
    ax.set(title=f"kl_weight {kl_weight:g}", xticks=[], yticks=[])
figure.colorbar(
    display.surface_, ax=axes, label="confidence", ticks=np.linspace(0.5, 1, 6)
)
plt.show()

# %%
# How to choose the weight
# ------------------------
#
# Choose ``kl_weight`` by the predictions on held-out samples, and not by the ELBO. Use
# the same number of epochs as in the final training.

X, y = moons(ROWS, SEEDS[0])
search = GridSearchCV(
    variational(0.1, EPOCHS[1], SEEDS[0]),
    {"kl_weight": list(KL_WEIGHTS)},
    scoring="neg_log_loss",
    cv=StratifiedKFold(3, shuffle=True, random_state=0),
)
search.fit(X, y)
chosen = search.best_params_["kl_weight"]
print(f"{'kl_weight':>9}{'NLL, held out':>15}{'NLL, new rows':>15}")
for kl_weight, score in zip(
    KL_WEIGHTS, search.cv_results_["mean_test_score"], strict=True
):
    model = models[kl_weight, EPOCHS[1], SEEDS[0]]
    loss = log_loss(y_test, model.predict_proba(X_test))
    mark = "  <- chosen" if kl_weight == chosen else ""
    print(f"{kl_weight:9g}{-score:15.3f}{loss:15.3f}{mark}")
