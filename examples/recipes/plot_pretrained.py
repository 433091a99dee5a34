"""
A torch model that is trained already
=====================================

The module is handed to skorch as an instance, and the net is frozen: ``fit`` measures
the curvature around its weights and does not train it. Give ``fit`` the samples that
the module was trained on, and a few that it was not, to choose the prior with.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier

X, y = load_digits(return_X_y=True)
X = (X / 16).astype("float32")
X_rest, X_test, y_rest, y_test = train_test_split(X, y, random_state=0)
X_train, X_val, y_train, y_val = train_test_split(X_rest, y_rest, random_state=0)

# any training loop
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
for _ in range(500):
    optimizer.zero_grad()
    logits = module(torch.from_numpy(X_train))
    nn.functional.cross_entropy(logits, torch.from_numpy(y_train)).backward()
    optimizer.step()

# the three lines
net = NeuralNetClassifier(module, criterion=nn.CrossEntropyLoss).initialize()
model = LaplaceClassifier(FrozenEstimator(net), random_state=0)
model.fit(X_train, y_train, X_val=X_val, y_val=y_val)

with torch.no_grad():
    alone = module(torch.from_numpy(X_test)).softmax(1).numpy()
proba = model.predict_proba(X_test)
figure, ax = plt.subplots(figsize=(5, 3.5), layout="constrained")
for name, values, color in [
    ("module alone", alone, "#D55E00"),
    ("with Laplace", proba, "#0072B2"),
]:
    wrong = values.argmax(1) != y_test
    label = f"{name}, NLL {log_loss(y_test, values):.3f}"
    ax.plot(sorted(values.max(1)[wrong]), marker="o", ms=4, color=color, label=label)
ax.set(xlabel="wrong predictions, sorted", ylabel="their confidence", ylim=(0, 1.02))
ax.legend()
plt.show()
