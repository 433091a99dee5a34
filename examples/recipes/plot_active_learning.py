"""
Active learning: which sample to label next
===========================================

The mutual information of a label and the weights (BALD) shows which labels help most.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier

# %%
# The pool contains 450 images and 1,500 means of two images. The label of a mean is one
# of its two digits at random. More labels do not reduce this aleatoric uncertainty.
torch.manual_seed(0)
torch.set_num_threads(1)  # small networks gain nothing from more
X, y = load_digits(return_X_y=True)
X = (X / 16).astype("float32")
X_pool, X_test, y_pool, y_test = train_test_split(X, y, test_size=0.5, random_state=0)
rng = np.random.default_rng(0)
pair = rng.integers(len(y_pool), size=(2, 1500))
y_pair = np.where(rng.random(1500) < 0.5, *y_pool[pair])
y_pool = np.concatenate([y_pool[:450], y_pair])
X_pool = np.concatenate([X_pool[:450], X_pool[pair].mean(0)])
# %%
# Each round fits a model and labels the ten samples with the largest uncertainty.
mlp = nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10))
net = NeuralNetClassifier(mlp, criterion=nn.CrossEntropyLoss, max_epochs=60, lr=0.01)
net.set_params(optimizer=torch.optim.Adam, train_split=None, verbose=0)
model = LaplaceClassifier(net, subset_of_weights="all", prior_precision="marglik")


def accuracies(column, seed):
    rng = np.random.default_rng(seed)
    labelled = [rng.choice(np.flatnonzero(y_pool == k)) for k in range(10)]
    for _ in range(7):
        model.set_params(random_state=seed).fit(X_pool[labelled], y_pool[labelled])
        yield model.score(X_test, y_test)
        uncertainty = np.c_[model.predict_uncertainty(X_pool), rng.random(len(y_pool))]
        uncertainty[labelled] = -1
        labelled = np.r_[labelled, uncertainty[:, column].argsort()[-10:]]


columns = {"epistemic": (2, "#0072B2"), "total": (0, "#D55E00"), "random": (3, "black")}
for name, (column, color) in columns.items():
    mean = np.mean([[*accuracies(column, seed)] for seed in range(2)], axis=0)
    print(f"{name}: accuracy {mean[-1]:.3f} with 70 labels")
    plt.plot(range(10, 80, 10), mean, marker="o", color=color, label=name)
plt.gca().set(xlabel="labelled samples", ylabel="test accuracy, mean of two runs")
plt.legend(title="next samples by")
plt.show()
# %%
# With 70 labels, the epistemic uncertainty leads to the highest accuracy. Total
# uncertainty also favours means of two images, and is hardly better than random choice.
