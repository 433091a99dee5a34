"""
Prior precision: cross-validation and evidence
==============================================

``LaplaceClassifierCV`` tries prior precisions on held-out folds, with one training for
each fold. The evidence (marginal likelihood) needs no held-out samples. Both are shown
along the same path.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifierCV
from sklaplace.plotting import PriorPathDisplay

X, y = load_digits(return_X_y=True)
X, y = (X / 16).astype("float32")[:600], y[:600]


def mlp():
    return nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))


net = NeuralNetClassifier(
    mlp,
    criterion=nn.CrossEntropyLoss,
    optimizer=torch.optim.Adam,
    lr=0.01,
    max_epochs=50,
    train_split=None,
    verbose=0,
)
model = LaplaceClassifierCV(
    net, prior_precisions=np.logspace(-3, 3, 13), cv=3, random_state=0
).fit(X, y)

display = PriorPathDisplay.from_estimator(model)
best = display.prior_precisions[display.evidence.argmax()]
print(f"prior precision by cross-validation: {model.prior_precision_:.3g}")
print(f"prior precision by evidence:         {best:.3g}")
display.ax_.set(ylabel="mean log-likelihood of a held-out sample")
plt.show()
