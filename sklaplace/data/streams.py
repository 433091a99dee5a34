"""RowStream: samples of an iterable dataset, read one after another, in order.

A pass over the stream is used to sum over the samples or to train on them. Samples
cannot be accessed individually, so they cannot be split, drawn or left out.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Protocol, TypeGuard

import numpy as np
from skorch.dataset import unpack_data
from torch.utils.data import IterableDataset, Subset, get_worker_info


class Samples(Protocol):
    """Dataset of known length, such as a torch dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def is_stream(X: object) -> TypeGuard[IterableDataset[object]]:
    """Return whether samples can only be read one after another."""
    return isinstance(X, IterableDataset)


class RowStream(IterableDataset[tuple[object, object]]):
    """Inputs of an iterable dataset, with targets and weights from arrays.

    Items are ``(X, y)``, or ``(X, (y, weight))`` with sample weights.

    Parameters
    ----------
    dataset : IterableDataset
        Dataset with items ``(X, y)``, iterated once per pass.
    y : ndarray of shape (n, ...)
        Targets, in the order of the dataset.
    weights : ndarray of shape (n,) or None
        Sample weights.
    """

    def __init__(
        self, dataset: Iterable[object], y: np.ndarray, weights: np.ndarray | None
    ) -> None:
        self.dataset, self.y, self.weights = dataset, y, weights

    def __len__(self) -> int:
        return len(self.y)

    def __iter__(self) -> Iterator[tuple[object, object]]:
        """Yield the inputs, targets and weights of the samples in order.

        The length of the dataset is unknown. If it differs from the number of targets,
        an error is raised at the end of the pass.
        """
        worker, n = get_worker_info(), len(self)
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                f"X is an IterableDataset, and {worker.num_workers} loader workers "
                "would each yield some of its samples, without their targets. Set "
                "iterator_train__num_workers and iterator_valid__num_workers to 0 or 1."
            )
        k = 0  # number of samples read
        for k, item in enumerate(self.dataset, 1):
            if k > n:  # no target for this item; the error follows below
                break
            y, weights = self.y[k - 1], self.weights
            yield unpack_data(item)[0], y if weights is None else (y, weights[k - 1])
        if k != n:
            raise ValueError(
                f"X is an IterableDataset with {k if k < n else f'more than {n}'} "
                f"samples, but y has {n}. Pass one target per sample. The dataset must "
                "yield all samples each time it is iterated."
            )


def some_of(dataset: Any, rows: list[int]) -> Any:
    """Return samples of a dataset; for a stream, the first ``len(rows)`` samples."""
    if not is_stream(dataset):
        return Subset(dataset, rows)
    return list(islice(dataset, len(rows)))


def require_choice(X: object) -> None:
    """Raise ValueError for streams, whose samples cannot be selected."""
    if is_stream(X):
        raise ValueError(
            "X is an IterableDataset, but train_split, folds, zero weights and random "
            "draws select samples by index. Set train_split=None and pass X_val and "
            "y_val for tuning, or use a torch Dataset with indices."
        )
