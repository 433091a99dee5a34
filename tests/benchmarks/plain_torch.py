"""Plain torch and skorch: the units that the other libraries are measured in."""

from collections.abc import Iterator
from typing import Any

import torch
from benchmarks.operations import Case, NotOfferedError, Operation, nothing
from benchmarks.workloads import digits_data, digits_net
from sklearn.base import clone
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn


class PlainTorch:
    """Forward, forward and backward, and training, without any Laplace."""

    versions = ("torch", "skorch", "scikit-learn", "numpy")

    def operation(self, case: Case, name: str) -> Operation:
        """One of f_fit, f_predict, fb_fit, train, train_folds."""
        if case.workload == "digits":
            return _training(case, name)
        work = case.load()
        module = work.module()
        if name == "f_predict":
            X, y = work.predict_data(), None
        else:
            X, y = work.fit_data()
        batches = _Batches(X, y, work.batch_size)
        if name == "fb_fit":
            loss = nn.MSELoss if work.is_regression else nn.CrossEntropyLoss
            criterion = loss(reduction="sum")
            return Operation(nothing, lambda _: both(module, criterion, batches))
        return Operation(nothing, lambda _: forward(module, batches))

    def moments(self, case: Case) -> Any:
        """Refuse: plain networks have no variances."""
        raise NotOfferedError("plain networks have no variances")


class _Batches:
    """Slices of arrays as tensors."""

    def __init__(self, X: Any, y: Any, size: int) -> None:
        self.X, self.size = torch.as_tensor(X), size
        self.y = None if y is None else torch.as_tensor(y)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        for start in range(0, len(self.X), self.size):
            rows = slice(start, start + self.size)
            yield self.X[rows], None if self.y is None else self.y[rows]


def forward(module: nn.Module, batches: _Batches) -> None:
    """Outputs of all rows."""
    with torch.inference_mode():
        for x, _ in batches:
            module(x)


def both(module: nn.Module, criterion: nn.Module, batches: _Batches) -> None:
    """Gradient of the loss in all weights."""
    module.zero_grad()
    for x, y in batches:
        criterion(module(x), y).backward()


def _training(case: Case, name: str) -> Operation:
    X, y = digits_data()
    net = digits_net(2 if case.is_quick else 20)
    if name == "train":
        return Operation(lambda: seeded(net), lambda new: new.fit(X, y))
    folds = [rows for rows, _ in StratifiedKFold(5).split(X, y)]

    def train_folds(_: Any) -> None:
        for rows in folds:
            seeded(net).fit(X[rows], y[rows])

    return Operation(nothing, train_folds)


def seeded(net: Any) -> Any:
    """An untrained copy that starts from the same weights each time."""
    torch.manual_seed(0)
    return clone(net)
