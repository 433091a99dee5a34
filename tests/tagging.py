"""Several labels per row: data, a network and a fitted estimator."""

import numpy as np
import torch
from nets import MLP, QUICK
from scipy.special import expit
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNet
from torch import nn

from sklaplace import LaplaceClassifier

N_LABELS = 3


def tagged(n=90, dtype=np.float64):
    """Return rows, and labels that depend on the rows to different degrees."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 2))
    logits = X @ rng.normal(size=(2, N_LABELS)) * [3.0, 1.0, 0.3] + [0.0, 1.0, -1.0]
    Y = (rng.random((n, N_LABELS)) < expit(logits)).astype(int)
    return X.astype(dtype), Y


X, Y = tagged()


def net(module=MLP, criterion=nn.BCEWithLogitsLoss, **params):
    """Return a float64 net with one output per label."""
    settings = {"module__n_out": N_LABELS, "module__dtype": torch.float64, **QUICK}
    return NeuralNet(module, criterion, **settings | params)


def fitted(trained, **settings):
    settings = {"prior_precision": 1.0, "random_state": 0} | settings
    return LaplaceClassifier(FrozenEstimator(trained), **settings).fit(X, Y)
