"""Networks that people use, from fit to pickle: residual, attention, recurrent."""

import pickle

import numpy as np
import pytest
import torch
from nets import QUIET
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier

N, K = 90, 3
Y = np.arange(N) % K


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm, and a shortcut."""

    def __init__(self, n_in, n_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.shortcut = nn.Sequential(
            nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False), nn.BatchNorm2d(n_out)
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        h += self.shortcut(x)
        return self.relu(h)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(ResidualBlock(4, 4, 1), ResidualBlock(4, 6, 2))
        self.head = nn.Linear(6, K)

    def forward(self, X):
        return self.head(self.blocks(self.stem(X)).mean((2, 3)))


class Transformer(nn.Module):
    """Token and position embeddings, two encoder layers, the mean over positions."""

    def __init__(self, n_words=12, length=6, width=8):
        super().__init__()
        self.tokens = nn.Embedding(n_words, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 12, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, K)

    def forward(self, X):
        h = self.encoder(self.tokens(X) + self.positions)
        return self.head(self.norm(h).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(2, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, K)

    def forward(self, X):
        return self.head(self.cells(X)[0][:, -1])


def images(generator):
    """A bright quarter tells the class."""
    X = generator.standard_normal((N, 1, 8, 8)).astype(np.float32)
    for n, label in enumerate(Y):
        X[n, 0, 4 * (label // 2) :, 4 * (label % 2) :][:4, :4] += 1.5
    return X


def sentences(generator):
    """Words of the class are frequent."""
    X = generator.integers(0, 12, (N, 6))
    own = generator.random((N, 6)) < 0.6
    return np.where(own, 4 * Y[:, None] + generator.integers(0, 4, (N, 6)), X)


def series(generator):
    """The slope of the first channel tells the class."""
    X = generator.standard_normal((N, 7, 2)).astype(np.float32)
    X[..., 0] += (Y[:, None] - 1) * np.linspace(0, 3, 7, dtype=np.float32)
    return X


@pytest.mark.parametrize(
    ("module", "data"),
    [(ResNet, images), (Transformer, sentences), (Recurrent, series)],
)
@pytest.mark.parametrize(
    ("subset", "structure"), [("all", "kron"), ("all", "diag"), ("last_layer", "full")]
)
@pytest.mark.parametrize("prior", ["validation", "marglik"])
def test_fit_tune_predict_and_pickle(module, data, subset, structure, prior):
    X = data(np.random.default_rng(0))
    training = {"optimizer": torch.optim.Adam, "lr": 0.01, "max_epochs": 25, **QUIET}
    net = NeuralNetClassifier(
        module, criterion=nn.CrossEntropyLoss, batch_size=32, **training
    )
    settings = {"subset_of_weights": subset, "hessian_structure": structure}
    model = LaplaceClassifier(
        net, prior_precision=prior, refine=False, random_state=0, **settings
    ).fit(X[:70], Y[:70])
    proba = model.predict_proba(X)
    np.testing.assert_allclose(proba.sum(1), 1, atol=1e-10)
    assert model.score(X[:70], Y[:70]) > 0.7
    one = np.concatenate([model.predict_proba(row[None]) for row in X[:4]])
    np.testing.assert_allclose(one, proba[:4], atol=1e-4)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(again.predict_proba(X), proba, atol=1e-6)
