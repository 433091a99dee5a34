"""Workloads: networks and data made from a seed, identical in every process.

W1 to W5 are networks with random weights, which serve for timing as well as trained
weights. "digits" is a data set on which networks are trained.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier, NeuralNetRegressor
from torch import Tensor, nn


# -------------------------------------------------------------------- networks
def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with activations between them."""
    layers: list[nn.Module] = []
    for n_inputs, n_outputs in pairwise(sizes):
        layers += [nn.Linear(n_inputs, n_outputs), activation()]
    return nn.Sequential(*layers[:-1])


def lenet() -> nn.Sequential:
    """Return LeNet-5 with ReLU and max pooling for 28 x 28 pixels, 61,706 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *mlp(400, 120, 84, 10),
    )


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut, without norm layers."""

    def __init__(self, n_inputs: int, n_outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(n_inputs, n_outputs, 3, stride, padding=1)
        self.relu = nn.ReLU()
        self.second = nn.Conv2d(n_outputs, n_outputs, 3, padding=1)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or n_inputs != n_outputs:
            self.shortcut = nn.Conv2d(n_inputs, n_outputs, 1, stride)
        self.out = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        change = self.second(self.relu(self.first(x)))
        return self.out(change + self.shortcut(x))


def resnet18(width: int = 64) -> nn.Sequential:
    """Return ResNet-18 for 32 x 32 pixels and 10 classes, without norm layers."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    n_inputs = width
    for stage in range(4):
        n_outputs = width * 2**stage
        layers += [
            ResidualBlock(n_inputs, n_outputs, 1 if stage == 0 else 2),
            ResidualBlock(n_outputs, n_outputs, 1),
        ]
        n_inputs = n_outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_inputs, 10)]
    return nn.Sequential(*layers, *head)


def bare_head(n_features: int, n_classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Identity(), nn.Linear(n_features, n_classes))


# ------------------------------------------------------------------- workloads
@dataclass(frozen=True)
class Workload:
    """A network with rows to fit and rows to predict."""

    make: Callable[[], nn.Module]  # weights come from the global generator
    shape: tuple[int, ...]  # of one row
    n_outputs: int  # classes, or columns of a regression
    n_fit: int
    n_predict: int
    quick: dict[str, Any]  # what changes for a smoke test, and for a first warm-up
    batch_size: int = 512  # of plain torch and laplace-torch
    n_check: int = 64  # rows to fit where libraries are compared in float64
    is_regression: bool = False
    peer_rows: int | None = None  # for laplace-torch, where it cannot take all
    check_quick: bool = False  # compare on the quick variant, this being too large

    @property
    def is_convolutional(self) -> bool:
        """Return whether rows are images."""
        return len(self.shape) == 3

    def module(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the network, with the same weights in every process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().to(dtype).eval()

    def data(self, n: int, seed: int, dtype: Any = np.float32) -> tuple[Any, Any]:
        """Return inputs (n, ...) and targets (n,), covering every class if n allows."""
        rng = np.random.default_rng(seed)
        X = rng.standard_normal((n, *self.shape)).astype(dtype)
        if self.is_regression:
            return X, rng.standard_normal((n, self.n_outputs)).astype(dtype)
        return X, rng.permutation(np.arange(n, dtype=np.int64) % self.n_outputs)

    def fit_data(self) -> tuple[Any, Any]:
        return self.data(self.n_fit, seed=1)

    def predict_data(self) -> Any:
        return self.data(self.n_predict, seed=2)[0]

    def net(self, dtype: torch.dtype = torch.float32) -> Any:
        """Return the network as an initialised skorch net."""
        kind = NeuralNetRegressor if self.is_regression else NeuralNetClassifier
        options = {} if self.is_regression else {"criterion": nn.CrossEntropyLoss}
        return kind(self.module(dtype), verbose=0, **options).initialize()


SMALL = {"n_fit": 40, "n_predict": 10, "n_check": 40}
TINY = {"n_fit": 20, "n_predict": 4, "n_check": 20}
SMALL_HEAD = {
    "make": partial(bare_head, 16, 50),
    "shape": (16,),
    "n_outputs": 50,
    "n_fit": 100,
    "n_predict": 100,
    "n_check": 50,
    "peer_rows": 50,
}
RESNET = Workload(
    make=resnet18,
    shape=(3, 32, 32),
    n_outputs=10,
    n_fit=64,
    n_predict=64,
    batch_size=64,
    check_quick=True,
    quick={**TINY, "make": partial(resnet18, 4)},
)

WORKLOADS = {
    "W1": Workload(
        make=partial(mlp, 1, 50, 50, 1, activation=nn.Tanh),
        shape=(1,),
        n_outputs=1,
        n_fit=1000,
        n_predict=1000,
        is_regression=True,
        quick={**SMALL, "make": partial(mlp, 1, 8, 8, 1, activation=nn.Tanh)},
    ),
    "W2": Workload(
        make=partial(mlp, 64, 128, 128, 10),
        shape=(64,),
        n_outputs=10,
        n_fit=5000,
        n_predict=1000,
        quick={**SMALL, "make": partial(mlp, 64, 16, 16, 10)},
    ),
    "W2-full": Workload(
        make=partial(mlp, 64, 32, 10),
        shape=(64,),
        n_outputs=10,
        n_fit=1000,
        n_predict=1000,
        quick={**SMALL, "make": partial(mlp, 64, 8, 10)},
    ),
    "W3": Workload(
        make=lenet,
        shape=(1, 28, 28),
        n_outputs=10,
        n_fit=1000,
        n_predict=200,
        batch_size=128,
        quick=TINY,
    ),
    "W4": RESNET,
    "W4-256": replace(RESNET, n_fit=256, n_predict=128),
    "W4-16": replace(
        RESNET,
        make=partial(resnet18, 16),
        batch_size=32,
    ),
    "W5": Workload(
        make=partial(bare_head, 512, 1000),
        shape=(512,),
        n_outputs=1000,
        n_fit=2000,
        n_predict=2000,
        peer_rows=1,
        check_quick=True,
        quick=SMALL_HEAD,
    ),
}


def workload(name: str, *, is_quick: bool = False) -> Workload:
    """Return a workload by name, or its quick variant."""
    found = WORKLOADS[name]
    return replace(found, **found.quick) if is_quick else found


def comparable(found: Workload) -> Workload:
    """Return the workload without convolution biases.

    The Kronecker block of a convolution bias is exact in sklaplace; laplace-torch sums
    outer products per pixel.
    """

    def make() -> nn.Module:
        module = found.make()
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d):
                layer.bias = None
        return module

    return replace(found, make=make)


# ---------------------------------------------------------------------- digits
def digits_data() -> tuple[Any, Any]:
    """Return images of digits as rows of 64 numbers, and their labels."""
    X, y = load_digits(return_X_y=True)
    return (X / 16).astype(np.float32), y.astype(np.int64)


def digits_net(n_epochs: int = 20) -> NeuralNetClassifier:
    """Return a typical untrained network."""
    return NeuralNetClassifier(
        partial(mlp, 64, 100, 100, 10),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=1e-3,
        max_epochs=n_epochs,
        verbose=0,
    )
