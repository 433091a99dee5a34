"""
Uncertainty-aware top-k: sets of variable size
==============================================

A top-five set always contains five classes, even if one class is certain.
``predict_set`` returns a set of variable size for each sample. The set contains all
classes that could be the most probable class, according to a Dirichlet distribution
over the class probabilities. This study repeats an experiment of Hobbhahn, Kristiadi
and Hennig, "Fast Predictive Uncertainty for Classification with Bayesian Deep Networks"
(UAI 2022), on a small scale. In the paper, the distribution is the Laplace bridge.

With IDX files of MNIST and of notMNIST or Fashion-MNIST in a folder ``DIR``, the study
uses a LeNet and these images instead, in one run:

.. code-block:: bash

   python examples/laplace_bridge/plot_top_k.py --data DIR
"""

# %%
# Few training samples
# --------------------
#
# There are only 150 training samples, so that predictions are uncertain. The network
# has one hidden layer. The study has several seeds, each with its own split and initial
# weights. The posterior of the last layer is Kronecker-factored. No samples are held
# out, so the prior precision maximises the marginal likelihood.

import argparse

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import train_test_split
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier

torch.set_num_threads(1)

SEEDS = (0, 1, 2, 3, 4)
TAILS = (0.01, 0.05, 0.1, 0.2, 0.5)
EPOCHS = 30
MOST = 2000  # images of each set, with --data
EPOCHS_OF_IMAGES = 6

parser = argparse.ArgumentParser(description="Measure sets of variable size.")
parser.add_argument("--data", metavar="DIR", help="folder of IDX files of MNIST")
folder = parser.parse_args().data

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")


def mlp():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def digits(seed):
    """Return training samples, test samples, and no unknown images."""
    X_train, X_test, y_train, y_test = train_test_split(
        images, labels, train_size=150, stratify=labels, random_state=seed
    )
    return (X_train, y_train), (X_test, y_test), {}


network, epochs, seeds = mlp, EPOCHS, SEEDS
if folder:
    from mnist import lenet, load  # the other file in the folder of this example

    network, epochs, seeds = lenet, EPOCHS_OF_IMAGES, SEEDS[:1]


def task(seed):
    """Return a trained network, training and test samples, and unknown images."""
    train, test, unknown = load(folder, MOST, seed) if folder else digits(seed)
    torch.manual_seed(seed)
    net = NeuralNetClassifier(
        network,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=3e-3,
        batch_size=32,
        max_epochs=epochs,
        train_split=None,
        verbose=0,
    ).fit(*train)
    return net, train, test, unknown


def top_accuracies(net, X, y):
    """Return the top-1 and top-2 accuracies of the network alone."""
    ranked = net.predict_proba(X).argsort(1)[:, ::-1]
    return [(ranked[:, :k] == y[:, None]).any(1).mean() for k in (1, 2)]


def laplace(net, train, precision="marglik"):
    options = {"prior_precision": precision, "residual": "none", "random_state": 0}
    return LaplaceClassifier(FrozenEstimator(net), **options).fit(*train)


# %%
# The sets
# --------
#
# A class belongs to the set if the ``1 - q`` quantile of its probability is at least
# the ``q`` quantile of the probability of a reference class. The reference is the top
# class (``reference="top"``) or the preceding class (``"previous"``). Every set
# contains the most probable class of the Dirichlet distribution. A sample is called
# "right" if this class is its true class.

OPTIONS = [(m, r) for m in ("bridge", "projection") for r in ("top", "previous")]


def sizes(model, test, q, method, reference="top"):
    """Return the set sizes, and whether set and top class contain the truth."""
    X, y = test
    members = model.predict_set(X, q=q, method=method, reference=reference)
    top = model.predict_dirichlet(X, method=method).argmax(1)
    return members.sum(1), members[np.arange(len(y)), y], top == y


def summary(k, covered, right):
    """Return one row of the table."""
    wrong = np.nan if right.all() else k[~right].mean()
    ones, tens = (k == 1).mean(), (k == 10).mean()
    return [k.mean(), covered.mean(), k[right].mean(), wrong, ones, tens]


fixed = 1.0, 10.0, 100.0
accuracies, precisions, rows, by_precision, models = [], [], {}, {}, []
for seed in seeds:
    net, train, test, unknown = task(seed)
    accuracies.append(top_accuracies(net, *test))
    model = laplace(net, train)
    for option in OPTIONS:
        for q in TAILS:
            found = sizes(model, test, q, *option)
            rows.setdefault((*option, q), []).append(found)
    models.append((model, test))
    precisions.append(float(model.prior_precision_))
    for precision in fixed:
        other = laplace(net, train, precision)
        for method in ("bridge", "projection"):
            found = summary(*sizes(other, test, 0.1, method))
            by_precision.setdefault((precision, method), []).append(found)

# %%
# Size and coverage
# -----------------
#
# "Length" is the mean size of all sets. "Right" and "wrong" are the mean sizes for
# right and wrong samples. "k = 1" is the fraction of sets with a single class, and "k =
# 10" the fraction of sets with all ten classes.

HEADS = "length", "coverage", "right", "wrong", "k = 1", "k = 10"
top_1, top_2 = np.mean(accuracies, 0)
means = {key: np.mean([summary(*run) for run in runs], 0) for key, runs in rows.items()}


def header(title, names=HEADS):
    print(f"\n{title:22}" + "".join(f"{name:>10}" for name in names))


def line(name, values):
    print(f"{name:22}" + "".join(f"{value:10.3f}" for value in values))


print(f"network alone: top-1 {top_1:.3f}, top-2 {top_2:.3f}")
print(f"prior precision: {min(precisions):.1f} to {max(precisions):.1f}")
for method, reference in OPTIONS:
    header(f"{method}, {reference}")
    for q in TAILS:
        line(f"q = {q:g}", means[method, reference, q])
print("\npublished (ImageNet, DenseNet-121, bridge, q = 0.1):")
print("length 2.04, coverage 0.829 (top-1 0.744, top-5 0.920);")
print("k = 1 for about 40,000 of 50,000 images")
for name, X in unknown.items():  # with --data only
    header(f"{name}, top", ("length", "k = 1", "k = 10"))
    for method in ("bridge", "projection"):
        for q in TAILS:
            k = model.predict_set(X, q=q, method=method).sum(1)
            line(f"{method}, q = {q:g}", [k.mean(), (k == 1).mean(), (k == 10).mean()])

# %%
# The sets grow as ``q`` falls, and they are larger if the network is wrong. The sets of
# the bridge at ``q = 0.1`` have about the same coverage as the top two classes of the
# network, with about one and a half classes on average. Most of these sets contain a
# single class. The projection returns larger sets with a higher coverage for the same
# ``q``, because its Dirichlet distribution is wider. With ``reference="previous"``, the
# sets are even larger. The parameter ``q`` does not determine the coverage.
#
# Other priors
# ------------
#
# The size of the sets depends on the prior as much as on ``q``. If the prior precision
# is tuned, ``fit`` also refits the last layer, which makes the logits smaller. If the
# prior precision is a number, the weights do not change. The concentrations of the
# bridge grow with the logits, so its sets are then small for every precision, and miss
# the true class more often. The sizes of the sets of the projection change with the
# prior precision.

header("q = 0.1, top")
for method in ("bridge", "projection"):
    for precision in fixed:
        found = np.mean(by_precision[precision, method], 0)
        line(f"{method}, {precision:g}", found)

# %%
# Distribution of the sizes
# -------------------------
#
# Most wrong samples have sets of several classes, and most right samples have a single
# class. Some sets of the bridge contain all ten classes, because small concentrations
# do not exclude any class.

BLUE, ORANGE = "#0072B2", "#E69F00"
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
values = np.arange(1, 11)
for ax, method in zip(axes, ("bridge", "projection"), strict=True):
    k, _, right = (
        np.concatenate(parts) for parts in zip(*rows[method, "top", 0.1], strict=True)
    )
    for shift, part, name, color in [
        (-0.2, right, "right", BLUE),
        (0.2, ~right, "wrong", ORANGE),
    ]:
        share = (k[part][:, None] == values).mean(0)
        ax.bar(values + shift, share, 0.4, color=color, label=f"top class {name}")
    ax.set(title=method, xlabel="classes in the set (q = 0.1)", xticks=values)
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("fraction of samples")
axes[1].legend(frameon=False)

# %%
# The figure shows the first test digits for which the set of the bridge has two to
# seven classes. The most probable class comes first.

model, (X, y) = models[0]
members = model.predict_set(X, q=0.1, method="bridge")
order = model.predict_dirichlet(X, method="bridge").argsort(1)[:, ::-1]
figure, panels = plt.subplots(1, 6, figsize=(9, 2.2), layout="constrained")
for ax, size in zip(panels, range(2, 8), strict=True):
    ax.axis("off")
    found = np.flatnonzero(members.sum(1) == size)
    if len(found):
        row = found[0]
        side = int(X[row].size ** 0.5)
        ax.imshow(X[row].reshape(side, side), cmap="gray_r")
        names = " ".join(str(name) for name in order[row, :size])
        ax.set_title(f"true: {y[row]}\n{names}", fontsize=11)
plt.show()
