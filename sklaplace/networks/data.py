"""Data sets: samples with targets and sample weights, and batches of them.

Array-likes are validated by the estimators. Dicts of arrays, tuples and torch datasets
are passed to skorch unchanged; batches are those of the net's own validation loader.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from skorch.dataset import Dataset, get_len, unpack_data
from skorch.helper import SliceDict
from skorch.utils import multi_indexing, to_tensor
from torch import Tensor
from torch.utils.data import DataLoader, Subset, default_collate

Batch = tuple[Any, Any, Tensor | None]
# Options of a loader under which its batches are slices of the arrays.
_SLICING_OPTIONS = {"batch_size", "num_workers", "pin_memory"}


class RowDataset(Dataset):
    """Inputs of another dataset with targets, and sample weights, given as arrays.

    Items are ``(X, y)``, or ``(X, (y, weight))`` where there are weights.
    """

    def __init__(self, dataset: Any, y: np.ndarray, weights: np.ndarray | None) -> None:
        # skorch's callbacks look for X and y
        super().__init__(getattr(dataset, "X", dataset), y, length=len(y))
        self.dataset, self.weights = dataset, weights

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        X, _ = self.dataset[index]
        if self.weights is None:
            return X, self.y[index]
        return X, (self.y[index], self.weights[index])


def sample_weights(dataset: Any) -> np.ndarray | None:
    """Sample weights (n,) of a dataset or of a subset of one, where it has any."""
    if isinstance(dataset, Subset):
        weights = sample_weights(dataset.dataset)
        indices = np.asarray(dataset.indices, dtype=int)
        return None if weights is None else weights[indices]
    return dataset.weights if isinstance(dataset, RowDataset) else None


def collate_weighted(collate: Callable[[list[Any]], Any], items: list[Any]) -> Any:
    """Batch ``X, (y, weights)``; inputs and targets as the net's loader collates."""
    X, y = unpack_data(collate([(X, y) for X, (y, _) in items]))
    return X, (y, default_collate([weight for *_, (_, weight) in items]))


@dataclass(frozen=True)
class Batches:
    """Batches ``(x, y, weights)`` of a dataset, in order; can be iterated repeatedly.

    Attributes
    ----------
    net : skorch.NeuralNet
        Its ``iterator_valid`` and its options are used.
    dataset : Dataset
        With or without sample weights.
    batch_size : int
        Samples per batch.
    """

    net: Any
    dataset: Any
    batch_size: int

    def __iter__(self) -> Iterator[Batch]:
        options = self.net.get_params_for("iterator_valid")
        slices = self.net.iterator_valid is DataLoader and options.keys() <= (
            _SLICING_OPTIONS
        )
        arrays = _arrays(self.dataset) if slices else None
        batches = self._sliced(arrays) if arrays else self._loaded(options)
        for x, y, w in batches:
            yield self._on_device(x), self._on_device(y), self._on_device(w)

    def _sliced(self, arrays: "_Arrays") -> Iterator[Batch]:
        """Batches of arrays, without a loop over samples."""
        for start in range(0, len(self.dataset), self.batch_size):
            batch = slice(start, start + self.batch_size)
            # indexing copies, so that no in-place layer writes to the user's arrays
            x, y, w = (
                None if values is None else torch.tensor(values[rows[batch]])
                for values, rows in arrays
            )
            yield x, y, w

    def _loaded(self, options: dict[str, Any]) -> Iterator[Batch]:
        """Batches of the net's loader."""
        options["batch_size"] = self.batch_size
        loader = self.net.iterator_valid(self.dataset, **options)
        weighted = sample_weights(self.dataset) is not None
        if weighted:
            loader.collate_fn = partial(collate_weighted, loader.collate_fn)
        for batch in loader:
            x, y = unpack_data(batch)
            yield (x, *y) if weighted else (x, y, None)

    def _on_device(self, value: Any) -> Any:
        if value is None:
            return None
        device = self.net.device
        if device is None:  # legal: wherever the module is
            device = next(self.net.module_.parameters()).device
        return to_tensor(value, device=device)


# inputs, targets and weights, each with the positions of the dataset's samples in it
_Arrays = list[tuple[np.ndarray | None, np.ndarray]]


def _arrays(dataset: Any) -> _Arrays | None:
    """Arrays that a dataset consists of; None for datasets with code of their own."""
    if type(dataset) is Dataset:
        X, y = dataset.X, dataset.y
        if not (isinstance(X, np.ndarray) and isinstance(y, np.ndarray | None)):
            return None
        rows = np.arange(len(X))
        return [(X, rows), (y, rows), (None, rows)]
    if type(dataset) not in (Subset, RowDataset):
        return None
    arrays = _arrays(dataset.dataset)
    if arrays is None:
        return None
    if isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices, dtype=int)
        return [(values, rows[indices]) for values, rows in arrays]
    rows = np.arange(len(dataset))
    return [arrays[0], (dataset.y, rows), (dataset.weights, rows)]


def first_rows(net: Any, dataset: Any, n: int = 3) -> Any:
    """Inputs of the first n samples of a dataset, as one batch."""
    first = Subset(dataset, list(range(min(n, len(dataset)))))
    return next(iter(Batches(net, first, n)))[0]


def take_rows(X: Any, indices: np.ndarray) -> Any:
    """Selected samples of any data that skorch can index, torch datasets included."""
    if _is_dataset(X):
        return Subset(X, indices.tolist())
    return multi_indexing(X, indices)


@dataclass(frozen=True)
class TrainingData:
    """Samples, targets encoded for the criterion, and sample weights or None."""

    X: Any
    y: np.ndarray
    sample_weight: np.ndarray | None

    def take(self, rows: np.ndarray) -> "TrainingData":
        """Samples at the given positions."""
        w = self.sample_weight
        return TrainingData(
            take_rows(self.X, rows), self.y[rows], None if w is None else w[rows]
        )

    def weighted(self, sample_weight: np.ndarray) -> "TrainingData":
        """Data with sample weights, without the samples of weight zero."""
        kept = np.flatnonzero(sample_weight)
        if len(kept) == 0:
            raise ValueError(
                "All entries of sample_weight are zero. At least one row needs a "
                "positive weight."
            )
        data = TrainingData(self.X, self.y, sample_weight)
        return data if len(kept) == len(sample_weight) else data.take(kept)

    def dataset(self, net: Any) -> Any:
        """Dataset of the net, with sample weights where there are any."""
        dataset = net.get_dataset(self.X, self.y)
        if self.sample_weight is None and not _is_dataset(self.X):
            return dataset
        return RowDataset(dataset, self.y, self.sample_weight)


def _is_dataset(X: Any) -> bool:
    return isinstance(X, torch.utils.data.Dataset)


def is_opaque(X: Any) -> bool:
    """Whether X is passed to skorch as given: a dict, a dataset, a tuple of arrays."""
    if issparse(X):  # one of scipy's formats is a dict
        return False
    return _is_dataset(X) or isinstance(X, (Mapping, tuple, SliceDict))


def count_rows(X: Any) -> int:
    """Number of samples in any data that skorch can index; refuses empty data."""
    n = len(X) if _is_dataset(X) else get_len(X)
    if n == 0:
        raise ValueError("X has 0 rows. Pass at least one.")
    return int(n)


def check_length(X: Any, y: np.ndarray) -> None:
    """Refuse samples and targets of different number."""
    n = count_rows(X)
    if n != len(y):
        raise ValueError(
            f"X has {n} rows, but y has {len(y)}. Pass one target per row."
        )
