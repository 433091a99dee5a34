"""
Active learning: which sample to label next
===========================================

The pool has images of digits, and more that are means of two digits, with the label of
either. Labels of these teach little, as their uncertainty is aleatoric. Total
uncertainty, the entropy of the label, is large for them all the same; its epistemic
part, the mutual information of label and weights (BALD), is not.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier

torch.set_num_threads(1)  # small networks gain nothing from more
X, y = load_digits(return_X_y=True)
X = (X / 16).astype("float32")
X_pool, X_test, y_pool, y_test = train_test_split(X, y, test_size=0.5, random_state=0)
rng = np.random.default_rng(0)
pair = rng.integers(len(y_pool), size=(2, 1500))
either = np.where(rng.random(1500) < 0.5, *y_pool[pair])
X_pool = np.concatenate([X_pool[:450], X_pool[pair].mean(0)])
y_pool = np.concatenate([y_pool[:450], either])


mlp = nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10))
net = NeuralNetClassifier(mlp, criterion=nn.CrossEntropyLoss, max_epochs=60, lr=0.01)
net.set_params(optimizer=torch.optim.Adam, train_split=None, verbose=0)
options = {"subset_of_weights": "all", "prior_precision": "marglik"}


def accuracies(column, seed):
    rng = np.random.default_rng(seed)
    labelled = [rng.choice(np.flatnonzero(y_pool == k)) for k in range(10)]
    found = []
    for _ in range(7):
        model = LaplaceClassifier(net, random_state=seed, **options)
        model.fit(X_pool[labelled], y_pool[labelled])
        found.append(model.score(X_test, y_test))
        uncertainty = np.c_[model.predict_uncertainty(X_pool), rng.random(len(y_pool))]
        uncertainty[labelled] = -1
        labelled = np.r_[labelled, uncertainty[:, column].argsort()[-10:]]
    return found


figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
colors = {"epistemic": "#0072B2", "total": "#D55E00", "random": "black"}
for name, column in [("epistemic", 2), ("total", 0), ("random", 3)]:
    mean = np.mean([accuracies(column, seed) for seed in range(2)], axis=0)
    print(f"{name}: accuracy {mean[-1]:.3f} with 70 labels")
    ax.plot(range(10, 80, 10), mean, marker="o", color=colors[name], label=name)
ax.set(xlabel="labelled samples", ylabel="test accuracy, mean of two runs")
ax.legend(title="next samples by")
plt.show()
