"""
Quickstart: digits that the network has never seen
==================================================

A small convolutional network learns the handwritten digits 0 to 7. Then it is shown
8 and 9. A good classifier is right about known digits *and* uncertain about unknown
ones. We compare the network alone with Laplace around it.
"""

# %%
# The data
# --------
#
# Half of the known digits are for training. The unknown ones are for testing only.

import sys
import tempfile
from pathlib import Path

import joblib
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits, make_moons
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier
from sklaplace.metrics import brier_score, expected_calibration_error, ood_auroc
from sklaplace.plotting import ConfidenceDisplay

torch.set_num_threads(1)  # small networks gain nothing from more

images, labels = load_digits(return_X_y=True)
known = labels < 8
X_train, X_test, y_train, y_test = train_test_split(
    images[known], labels[known], test_size=0.5, stratify=labels[known], random_state=0
)
X_unknown = images[~known]

# %%
# The network
# -----------
#
# An ordinary skorch net. The pipeline turns rows of 64 pixels into images.


class CNN(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Linear(64, 8),
        )


def to_images(X):
    return (X / 16).astype("float32").reshape(-1, 1, 8, 8)


net = NeuralNetClassifier(
    CNN,
    criterion=nn.CrossEntropyLoss,
    optimizer=torch.optim.Adam,
    lr=3e-3,
    batch_size=32,
    max_epochs=20,
    verbose=0,
)

# %%
# Laplace around it
# -----------------
#
# ``fit`` trains the network and then measures its uncertainty. By default, the prior
# precision is tuned on the samples that skorch held out.

model = make_pipeline(
    FunctionTransformer(to_images), LaplaceClassifier(net, random_state=0)
)
model.fit(X_train, y_train)

# %%
# Empirical Bayes needs no such samples. It takes the prior precision with the highest
# marginal likelihood. The network is trained once more here, from the same seed.

marglik = make_pipeline(
    FunctionTransformer(to_images),
    LaplaceClassifier(net, prior_precision="marglik", random_state=0),
)
marglik.fit(X_train, y_train)

# %%
# Or search a grid, as for any estimator. With the trained network frozen, each value
# costs no more than a pass over the data. Most of these samples, though, were used in
# training: a search on held-out samples is better.

trained = model[-1].estimator_
search = GridSearchCV(
    make_pipeline(
        FunctionTransformer(to_images),
        LaplaceClassifier(FrozenEstimator(trained), random_state=0),
    ),
    {"laplaceclassifier__prior_precision": np.logspace(-2, 3, 6)},
    scoring="neg_log_loss",
)
search.fit(X_train, y_train)

# %%
# Save and load
# -------------

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "digits.joblib"
    joblib.dump(model, path)
    loaded = joblib.load(path)
same = np.array_equal(loaded.predict_proba(X_test), model.predict_proba(X_test))
print(f"Predictions are the same after loading: {same}")

# %%
# The comparison
# --------------
#
# For NLL (negative log-likelihood), Brier score and ECE (expected calibration error),
# lower is better. AUROC is how well confidence separates known digits from unknown
# ones: 0.5 is chance, 1 is perfect.

alone = make_pipeline(FunctionTransformer(to_images), trained)
rows = {
    "network alone": alone,
    "Laplace, default": model,
    "Laplace, marglik": marglik,
    "Laplace, grid search": search.best_estimator_,
}


def table_row(classifier):
    proba = classifier.predict_proba(X_test)
    confidence = proba.max(axis=1)
    confidence_unknown = classifier.predict_proba(X_unknown).max(axis=1)
    return [
        accuracy_score(y_test, classifier.predict(X_test)),
        log_loss(y_test, proba),
        brier_score(y_test, proba),
        expected_calibration_error(y_test, proba),
        confidence.mean(),
        confidence_unknown.mean(),
        ood_auroc(confidence, confidence_unknown),
    ]


print(f"\n{'':20}{'known digits, 0 to 7':>45}{'unknown, 8 and 9':>18}")
names = "accuracy", "NLL", "Brier", "ECE", "conf.", "conf.", "AUROC"
print(f"{'':20}{''.join(f'{name:>9}' for name in names)}")
for name, classifier in rows.items():
    numbers = "".join(f"{number:9.3f}" for number in table_row(classifier))
    print(f"{name:20}{numbers}")

# %%
# The default takes the prior that predicts held-out samples best. These are like the
# test samples, so that test scores stay as good as they were. Empirical Bayes is less
# confident about unknown digits, and also about known ones.

# %%
# The picture
# -----------
#
# Two features can be drawn. A network learns the two moons, and predicts far away from
# them, too. Alone, it is confident nearly everywhere. With Laplace it is uncertain far
# away, most of all along the decision boundary (white).
#
# This is not the default setting, which tunes on held-out samples and adds less
# uncertainty. Here all weights are uncertain, with all their correlations,
# under the prior of highest marginal likelihood. Weight decay in training suits that.

X, y = make_moons(200, noise=0.2, random_state=0)
X = X.astype("float32")


def mlp():
    return nn.Sequential(
        nn.Linear(2, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 2)
    )


moons_net = NeuralNetClassifier(
    mlp,
    criterion=nn.CrossEntropyLoss,
    optimizer=torch.optim.Adam,
    optimizer__weight_decay=0.001,
    lr=0.01,
    batch_size=32,
    max_epochs=100,
    train_split=None,
    verbose=0,
)
moons = LaplaceClassifier(
    moons_net,
    subset_of_weights="all",
    hessian_structure="full",
    prior_precision="marglik",
    random_state=1,
)
moons.fit(X, y)

figure, axes = plt.subplots(
    1, 2, figsize=(9, 4), sharex=True, sharey=True, layout="constrained"
)
panels = {"Network alone": moons.estimator_, "With Laplace": moons}
for ax, (title, classifier) in zip(axes, panels.items(), strict=True):
    display = ConfidenceDisplay.from_estimator(
        classifier,
        X,
        eps=3.0,
        grid_resolution=200,
        ax=ax,
        surface_kw={"levels": np.linspace(0.5, 1, 21)},
    )
    for label, color, marker in [(0, "white", "o"), (1, "black", "^")]:
        ax.scatter(
            *X[y == label].T, s=14, c=color, marker=marker, edgecolor="black", lw=0.4
        )
    ax.set(title=title, xticks=[], yticks=[])
figure.colorbar(
    display.surface_, ax=axes, label="confidence", ticks=[0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
)
picture = Path(sys.argv[0]).with_name("quickstart.png")
figure.savefig(picture, dpi=150)
print(f"\nPicture saved as {picture}")
plt.show()
