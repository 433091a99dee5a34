"""
Prior precision: cross-validation and evidence
==============================================

There are two common criteria for the prior precision. Cross-validation needs held-out
samples, and the evidence (marginal likelihood) needs none.
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

# %%
# ``LaplaceClassifierCV`` trains one network for each fold, and tries all prior
# precisions on the samples that this network has not seen.
model = LaplaceClassifierCV(
    net, prior_precisions=np.logspace(-3, 3, 13), cv=3, random_state=0
).fit(X, y)

# %%
# The figure shows both criteria for the same prior precisions.
display = PriorPathDisplay.from_estimator(model)
best = display.prior_precisions[display.evidence.argmax()]
print(f"prior precision by cross-validation: {model.prior_precision_:.3g}")
print(f"prior precision by evidence:         {best:.3g}")
display.ax_.set(ylabel="mean log-likelihood of a held-out sample")
plt.show()

# %%
# The two criteria disagree by a factor of ten: cross-validation chooses a prior
# precision of 10, and the evidence chooses 1.
