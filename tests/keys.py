"""Small networks, nets and code that tests of keys and of the store share."""

import functools
import textwrap

import numpy as np
import torch
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace.core.fingerprint import fingerprint


class Net(nn.Module):
    def __init__(self, width=4, activation=torch.tanh):
        super().__init__()
        self.inner = nn.Linear(3, width)
        self.outer = nn.Linear(width, 2)
        self.activation = activation

    def forward(self, x):
        return self.outer(self.activation(self.inner(x)))


class Rows(torch.utils.data.Dataset):
    def __init__(self, X, y):
        self.X, self.y = X, y

    def __len__(self):
        return len(self.X)

    def __getitem__(self, index):
        return self.X[index], self.y[index]


class Box:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def seeded(make, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def data(n=20):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 3)).astype(np.float32), np.arange(n) % 2


def net(module=Net, **params):
    settings = {"criterion": nn.CrossEntropyLoss, "max_epochs": 2, "verbose": 0}
    return NeuralNetClassifier(module, **{**settings, **params})


def fitted(seed=0, **params):
    return seeded(lambda: net(**params).fit(*data()), seed)


def define(source, name, **names):
    """Execute code as a notebook would, and return what it defines."""
    scope = {"__name__": "__main__", "torch": torch, "nn": nn, **names}
    exec(textwrap.dedent(source), scope)
    return scope[name]


def differ(values):
    keys = [fingerprint(value) for value in values]
    return len(set(keys)) == len(keys)


def same(*values):
    return len({fingerprint(value) for value in values}) == 1


CLASS = """
    class Base(nn.Module):
        bias = {bias}
        def helper(self, x): return x + {shift}

    class Net(Base):
        width: int = {width}
        def __init__(self, n={n}):
            super().__init__()
            self.layer = nn.Linear(n, 2)

        def forward(self, x):
            return self.helper(self.layer(x)) * self.factor

        @property
        def factor(self): return {factor}

        @staticmethod
        def static(x): return x + {static}

        @classmethod
        def make(cls): return cls({made})

        @functools.cached_property
        def cached(self): return {cached}

        class Inner:
            value = {inner}
"""
DETAILS = dict.fromkeys(
    "bias shift width n factor static made cached inner".split(),  # noqa: SIM905
    1,
)


def redefined(**details):
    source = CLASS.format(**{**DETAILS, **details})
    return define(source, "Net", functools=functools)
