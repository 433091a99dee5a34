"""Small networks and skorch nets shared by several test modules.

All classes are at module level, so that nets and their estimators can be pickled.
"""

from typing import ClassVar

import numpy as np
import torch
from skorch import NeuralNetBinaryClassifier, NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import Callback
from torch import nn
from torch.nn import functional


class MLP(nn.Module):
    """One tanh layer and a linear head, for logits or means."""

    def __init__(self, n_in=2, n_out=3, width=6, dtype=torch.float32):
        super().__init__()
        self.hidden = nn.Linear(n_in, width, dtype=dtype)
        self.head = nn.Linear(width, n_out, dtype=dtype)

    def forward(self, X):
        return self.head(torch.tanh(self.hidden(X)))


class SqueezedMLP(MLP):
    """An MLP without an axis of outputs: (b,)."""

    def forward(self, X):
        return super().forward(X).squeeze(-1)


class SoftmaxMLP(MLP):
    """Probabilities from a Softmax module."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, X):
        return self.softmax(super().forward(X))


class FunctionalSoftmaxMLP(MLP):
    """Probabilities from a function, which hooks cannot see."""

    def forward(self, X):
        return functional.softmax(super().forward(X), dim=-1)


class SharpSoftmaxMLP(MLP):
    """A softmax of logits that no layer returns."""

    def forward(self, X):
        return functional.softmax(2 * super().forward(X), dim=-1)


class SharpLogSoftmaxMLP(MLP):
    """The logarithms of the outputs of `SharpSoftmaxMLP`."""

    def forward(self, X):
        return functional.log_softmax(2 * super().forward(X), dim=-1)


class SharpMLP(MLP):
    """The logits of `SharpSoftmaxMLP`."""

    def forward(self, X):
        return 2 * super().forward(X)


class SharpSigmoidMLP(MLP):
    """A sigmoid of a logit that no layer returns."""

    def forward(self, X):
        return torch.sigmoid(2 * super().forward(X))


class LogSoftmaxMLP(MLP):
    """Log-probabilities, to which NeuralNetClassifier would apply a logarithm."""

    def forward(self, X):
        return functional.log_softmax(super().forward(X), dim=-1)


class SigmoidMLP(MLP):
    """The probability of the second class, (b, 1)."""

    def forward(self, X):
        return torch.sigmoid(super().forward(X))


class TanhMLP(MLP):
    """Outputs that are nonlinear in the last layer's weights."""

    def forward(self, X):
        return torch.tanh(super().forward(X))


class ReLUNet(nn.Module):
    """Three layers with unbounded activations."""

    def __init__(self, n_in=2, n_out=3):
        super().__init__()
        self.first = nn.Linear(n_in, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, n_out)

    def forward(self, X):
        return self.head(self.second(self.first(X).relu()).relu())


class LinearModel(nn.Module):
    """One linear layer, for which Laplace with Gaussian noise is exact."""

    def __init__(self, n_in=2, n_out=1, bias=True, dtype=torch.float64):
        super().__init__()
        self.head = nn.Linear(n_in, n_out, bias=bias, dtype=dtype)

    def forward(self, X):
        return self.head(X)


class TinyCNN(nn.Module):
    """Convolution with an in-place activation, dropout, average, linear head."""

    def __init__(self, n_out=3):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(3, n_out)

    def forward(self, X):
        pooled = self.relu(self.conv(X)).mean((-2, -1))
        return self.head(self.dropout(pooled))


class EmbeddingNet(nn.Module):
    """Embedding from tokens (b, length) to logits."""

    def __init__(self, n_tokens=10, n_out=2, width=4):
        super().__init__()
        self.embedding = nn.Embedding(n_tokens, width)
        self.head = nn.Linear(width, n_out)

    def forward(self, X):
        return self.head(self.embedding(X).mean(1))


class TwoInputs(nn.Module):
    """A network whose input is a dict with entries `left` and `right`."""

    def __init__(self, n_out=2):
        super().__init__()
        self.left = nn.Linear(2, 4)
        self.right = nn.Linear(3, 4)
        self.head = nn.Linear(4, n_out)

    def forward(self, left, right):
        return self.head(torch.tanh(self.left(left) + self.right(right)))


class BatchNormMLP(nn.Module):
    """Batch normalisation, whose buffers only training may change."""

    def __init__(self, n_in=2, n_out=3):
        super().__init__()
        self.hidden = nn.Linear(n_in, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(6, n_out)

    def forward(self, X):
        return self.head(self.dropout(torch.tanh(self.norm(self.hidden(X)))))


class DropoutMLP(MLP):
    """An MLP with dropout, whose mode and masks matter."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dropout = nn.Dropout(0.3)

    def forward(self, X):
        return self.head(self.dropout(torch.tanh(self.hidden(X))))


class SortedMLP(MLP):
    """The last layer sees the samples in another order, so it has no features."""

    def forward(self, X):
        h = torch.tanh(self.hidden(X))
        order = h.sum(1).argsort()
        return self.head(h[order])[order.argsort()]


class Compiled(nn.Module):
    """A wrapper with the structure of a module from `torch.compile`."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module

    def forward(self, *args, **kwargs):
        return self._orig_mod(*args, **kwargs)


class CompilingClassifier(NeuralNetClassifier):
    """A net that wraps its module like `compile=True`, but without a compiler."""

    def initialized_instance(self, instance_or_cls, kwargs):
        instance = super().initialized_instance(instance_or_cls, kwargs)
        is_bare = isinstance(instance, nn.Module) and not isinstance(instance, Compiled)
        return Compiled(instance) if is_bare else instance


class SizeToData(Callback):
    """Callback that sets the module's input and output size from the data."""

    def __repr__(self):
        return "SizeToData()"  # without an address, which would differ per process

    def on_train_begin(self, net, X=None, y=None, **kwargs):
        classifies = isinstance(net, NeuralNetClassifier)
        columns = np.reshape(y, (len(y), -1))
        n_out = len(np.unique(y)) if classifies else columns.shape[1]
        net.set_params(module__n_in=X.shape[1], module__n_out=n_out)


class RecordTraining(Callback):
    """Callback that records every training step in a list of the class."""

    steps: ClassVar[list] = []

    def on_batch_end(self, net, batch=None, training=False, **kwargs):
        if training:
            RecordTraining.steps.append(len(batch[0]))


class RowsSeen(Callback):
    """Callback that records the training rows and validation rows of the net."""

    trained: ClassVar[list] = []
    validated: ClassVar[list] = []

    def on_batch_end(self, net, batch=None, training=False, **kwargs):
        seen = RowsSeen.trained if training else RowsSeen.validated
        seen.extend(batch[0].cpu().numpy().tolist())


QUIET = {"verbose": 0, "train_split": None, "callbacks": "disable"}
# quick, and full batch
QUICK = {"max_epochs": 20, "lr": 0.05, "optimizer": torch.optim.Adam, "batch_size": -1}
QUICK |= QUIET


def _one_output(module):
    return {"module__n_out": 1} if isinstance(module, type) else {}


def classifier(module=MLP, **params):
    """Return a quick, silent, full-batch net for logits."""
    settings = {"criterion": nn.CrossEntropyLoss, **QUICK, **params}
    return NeuralNetClassifier(module, **settings)


def binary_classifier(module=MLP, **params):
    """Return a quick net with one logit."""
    return NeuralNetBinaryClassifier(module, **_one_output(module) | QUICK | params)


def regressor(module=MLP, **params):
    """Return a quick, silent net for one target."""
    return NeuralNetRegressor(module, **_one_output(module) | QUICK | params)


def seeded(net, X, y, seed=0):
    """Train the net from a fixed state of torch's generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return net.fit(X, y)


def initialised(net, seed=0):
    """Initialise the net with random weights, without training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return net.initialize()


def blobs(n=60, n_classes=3, n_features=2, seed=0, dtype=np.float32):
    """Return samples of slightly overlapping classes."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % n_classes
    centres = rng.normal(size=(n_classes, n_features)) * 2
    X = centres[y] + rng.normal(size=(n, n_features))
    return X.astype(dtype), y


def waves(n=60, n_features=2, n_targets=None, seed=0, dtype=np.float32):
    """Return features, and a smooth function of the features plus noise of 0.1."""
    rng = np.random.default_rng(seed)
    directions = rng.normal(size=(n_features, n_targets or 1))
    X = rng.normal(size=(n, n_features))
    angles = X @ directions
    Y = np.sin(angles) + 0.1 * rng.normal(size=angles.shape)
    return X.astype(dtype), (Y if n_targets else Y[:, 0]).astype(dtype)


def twin(net, trained):
    """Return the untrained net with the weights of another net."""
    initialised(net).module_.load_state_dict(trained.module_.state_dict())
    return net
