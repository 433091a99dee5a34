"""
Novelty detection
=================

A classifier assigns one of its classes to any input, often with high confidence.
``score_samples`` measures how similar an input is to the training samples.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier
from sklaplace.plotting import NoveltyDisplay

# %%
# The unknown images are digits that are rotated by 90 degrees.
X, y = load_digits(return_X_y=True)
X = (X / 16).astype("float32")
X_rest, X_known, y_rest, _ = train_test_split(X, y, random_state=0)
X_train, X_held_out, y_train, _ = train_test_split(X_rest, y_rest, random_state=0)
X_unknown = np.rot90(X_known.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64).copy()


def mlp():
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


net = NeuralNetClassifier(mlp, criterion=nn.CrossEntropyLoss, lr=0.01, max_epochs=30)
net.set_params(optimizer=torch.optim.Adam, verbose=0)
model = LaplaceClassifier(net, random_state=0).fit(X_train, y_train)
# %%
# The threshold is the score that 95 % of the held-out images exceed.
threshold = np.quantile(model.score_samples(X_held_out), 0.05)
for name, images in [("known", X_known), ("rotated", X_unknown)]:
    passed = np.mean(model.score_samples(images) >= threshold)
    print(f"{name} images above the threshold: {passed:.0%}")

figure, axes = plt.subplots(2, 2, figsize=(8, 6), layout="constrained")
largest = [model.predict_proba(images).max(1) for images in (X_known, X_unknown)]
NoveltyDisplay.from_predictions(*largest, name="largest probability", ax=axes[0])
NoveltyDisplay.from_estimator(model, X_known, X_unknown, ax=axes[1])
plt.show()
# %%
# The scores reject all rotated images and accept 94 % of the known images. The largest
# probability does not separate the two kinds of images: it is higher for rotated
# images. For classes that were left out of training, the largest probability works
# equally well:
# :doc:`/auto_examples/studies/plot_novelty`.
