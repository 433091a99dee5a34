"""Data: rows as the network takes them, checked and cast once.

Arrays are validated as everywhere in scikit-learn and cast to the dtype of the
network's weights. Dicts of arrays and torch datasets belong to skorch and pass
as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.base import clone
from skorch.dataset import get_len
from skorch.helper import SliceDict
from torch import nn

from sklaplace.core.random import private_rng
from sklaplace.networks.training import RowDataset, take_rows


@dataclass(frozen=True)
class TrainingData:
    """Rows, targets as the criterion takes them, and weights or None."""

    X: Any
    y: np.ndarray
    sample_weight: np.ndarray | None

    def take(self, rows: np.ndarray) -> "TrainingData":
        """Some of the rows."""
        w = self.sample_weight
        return TrainingData(
            take_rows(self.X, rows), self.y[rows], None if w is None else w[rows]
        )

    def weighted(self, sample_weight: np.ndarray) -> "TrainingData":
        """With weights; rows of weight zero are left out altogether."""
        kept = np.flatnonzero(sample_weight)
        if len(kept) == 0:
            raise ValueError(
                "All entries of sample_weight are zero. At least one row needs a "
                "positive weight."
            )
        data = TrainingData(self.X, self.y, sample_weight)
        return data if len(kept) == len(sample_weight) else data.take(kept)

    def dataset(self, net: Any) -> Any:
        """The rows as a dataset of the net, with weights where there are any."""
        if self.sample_weight is None and not _is_dataset(self.X):
            return net.get_dataset(self.X, self.y)
        data = net.get_dataset(self.X, self.y)
        return RowDataset(data, self.y, self.sample_weight)


def _is_dataset(X: Any) -> bool:
    return isinstance(X, torch.utils.data.Dataset)


def is_opaque(X: Any) -> bool:
    """Whether X is for skorch to understand: a dict, a dataset, a tuple of arrays."""
    if issparse(X):  # one of scipy's formats is a dict
        return False
    return _is_dataset(X) or isinstance(X, (Mapping, tuple, SliceDict))


def count_rows(X: Any) -> int:
    """Number of rows of whatever skorch takes; refuses none at all."""
    n = len(X) if _is_dataset(X) else get_len(X)
    if n == 0:
        raise ValueError("X has 0 rows. Pass at least one.")
    return int(n)


def check_length(X: Any, y: np.ndarray) -> None:
    """Refuse rows and targets of different number."""
    n = count_rows(X)
    if n != len(y):
        raise ValueError(
            f"X has {n} rows, but y has {len(y)}. Pass one target per row."
        )


@dataclass(frozen=True)
class InputType:
    """Dtype of a network's weights, and whether it looks integers up."""

    dtype: np.dtype
    keeps_integers: bool

    def inputs(self, X: np.ndarray) -> np.ndarray:
        """Rows in the network's dtype; integers stay where they are looked up."""
        if X.dtype.kind not in "fiub":
            X = np.asarray(X, dtype=np.float64)
        if self.keeps_integers and X.dtype.kind in "iu":
            return X.astype(np.int64)
        return self.floats(X, "X")

    def floats(self, values: np.ndarray, name: str) -> np.ndarray:
        """Values in the network's dtype."""
        with np.errstate(over="ignore"):
            cast = values.astype(self.dtype)
        if not np.isfinite(cast).all() and np.isfinite(values).all():
            raise ValueError(
                f"{name} has values up to {np.abs(values).max():.0e}, too large for "
                f"{self.dtype}, the dtype of the network. Scale {name} "
                "(StandardScaler in a Pipeline), or use a float64 network."
            )
        return cast


def input_type(net: Any) -> InputType:
    """What a net takes; None stands for the default network."""
    if net is None:
        return InputType(np.dtype(np.float64), False)
    module = _peek(net)
    if module is None:
        return InputType(np.dtype(np.float32), False)
    floating = [p.dtype for p in module.parameters() if p.is_floating_point()]
    name = str(floating[0] if floating else torch.float32).removeprefix("torch.")
    looks_up = any(
        isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in module.modules()
    )
    # numpy has no bfloat16; float32 holds all of its values
    return InputType(np.dtype(name if hasattr(np, name) else "float32"), looks_up)


def _peek(net: Any) -> nn.Module | None:
    """The module of a net, made for a look if there is none; None if it cannot be."""
    if getattr(net, "initialized_", False):
        module: nn.Module = net.module_
        return module
    if isinstance(net.module, nn.Module):
        return net.module
    scratch = clone(net)
    scratch.verbose, scratch.callbacks, scratch.device = 0, "disable", "cpu"
    with private_rng(0):
        try:
            made: nn.Module = scratch.initialize().module_
            return made
        except (TypeError, ValueError, RuntimeError):
            return None  # sized by a callback when training begins
