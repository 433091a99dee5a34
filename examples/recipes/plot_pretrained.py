"""
A torch model that is already trained
=====================================

Laplace can be added to any trained torch module without training it again.
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

# %%
# The module can come from any training loop.
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
for _ in range(500):
    optimizer.zero_grad()
    logits = module(torch.from_numpy(X_train))
    nn.functional.cross_entropy(logits, torch.from_numpy(y_train)).backward()
    optimizer.step()

# %%
# Pass the module to a skorch net, and freeze the net. ``fit`` then uses the trained
# network as it is. Pass the training samples of the module to ``fit``, and a few other
# samples for the choice of the prior precision.
net = NeuralNetClassifier(module, criterion=nn.CrossEntropyLoss).initialize()
model = LaplaceClassifier(FrozenEstimator(net), random_state=0)
model.fit(X_train, y_train, X_val=X_val, y_val=y_val)

# %%
# The figure shows the confidence of the wrong predictions.
with torch.no_grad():
    alone = module(torch.from_numpy(X_test)).softmax(1).numpy()
probas = {"module alone": alone, "with Laplace": model.predict_proba(X_test)}
for (name, proba), color in zip(probas.items(), ["#D55E00", "#0072B2"], strict=True):
    wrong = proba.argmax(1) != y_test
    print(label := f"{name}, NLL {log_loss(y_test, proba):.3f}")
    plt.plot(sorted(proba.max(1)[wrong]), marker="o", color=color, label=label)
plt.gca().set(xlabel="wrong predictions, sorted", ylabel="confidence", ylim=(0, 1.02))
plt.legend()
plt.show()
# %%
# Laplace lowers the NLL from 0.160 to 0.106: the wrong predictions are less confident.
