"""Labels at every position of a map: data, a network and a fitted estimator."""

import numpy as np
import torch
from nets import QUICK
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNet
from torch import nn

from sklaplace import LaplaceClassifier

K, HEIGHT, WIDTH = 3, 2, 3
POSITIONS = HEIGHT, WIDTH
R = HEIGHT * WIDTH
WEIGHT = torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)


class Segmenter(nn.Module):
    """A network from (b, 2, h, w) to (b, K, h, w)."""

    def __init__(self, n_out=K, log_softmax=False):
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64)
        self.head = nn.Conv2d(3, n_out, 1, dtype=torch.float64)
        self.log_softmax = log_softmax

    def forward(self, X):
        f = self.head(torch.tanh(self.first(X)))
        return f.log_softmax(1) if self.log_softmax else f


def pictures(n=30):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 2, *POSITIONS))
    f = np.einsum("kc,nchw->nkhw", rng.normal(size=(K, 2)) * 2, X)
    return X, (f + rng.gumbel(size=f.shape)).argmax(1)


X, Y = pictures()


def net(module=Segmenter, criterion=nn.CrossEntropyLoss, **params):
    return NeuralNet(module, criterion, **QUICK | params)


def fitted(trained, y=Y, **settings):
    settings = {"prior_precision": 1.0, "subset_of_weights": "all"} | settings
    model = LaplaceClassifier(FrozenEstimator(trained), random_state=0)
    return model.set_params(**settings).fit(X, y)
