"""Shards: consecutive samples of a dataset, in whole batches.

Each shard's sums over samples are computed separately and added in order. The result
therefore does not depend on the number of workers.
"""

from typing import Any

import numpy as np
from skorch.dataset import Dataset
from skorch.utils import multi_indexing
from torch.utils.data import Subset

from sklaplace.data.dataset import RowDataset, take_rows
from sklaplace.data.streams import Samples, is_stream

# Minimum number of batches in a shard, which keeps the relative overhead small.
MIN_BATCHES = 4
# Maximum number of shards by default. Each shard holds separate sums in memory.
MAX_SHARDS = 32


def shards_of(
    dataset: Samples, batch_size: int, n_shards: int | None = None
) -> list[Any]:
    """Split a dataset into shards of nearly equal size, each of which is a dataset.

    By default, the number of shards depends only on the number of batches, so that sums
    over shards do not depend on the number of workers. There are never more shards than
    batches. A stream is a single shard. If there is only one shard, it is the dataset
    itself.
    """
    n_samples = len(dataset)
    n_batches = -(-n_samples // batch_size)  # rounded up; also for a smaller last one
    if n_shards is None:
        n_shards = min(MAX_SHARDS, n_batches // MIN_BATCHES)
    n_shards = 1 if is_stream(dataset) else max(1, min(n_shards, n_batches))
    if n_shards == 1:
        return [dataset]
    # whole batches, so that each batch has the same samples for any number of shards
    starts = [k * n_batches // n_shards * batch_size for k in range(n_shards)]
    bounds = zip(starts, [*starts[1:], n_samples], strict=True)
    return [subset(dataset, slice(start, stop)) for start, stop in bounds]


def subset(dataset: Any, chosen: slice | np.ndarray) -> Any:
    """Return the dataset of the chosen samples.

    Datasets of arrays become datasets of parts of these arrays, because batches of
    arrays are slices, whereas a `Subset` is read sample by sample. Other datasets
    become a `Subset`.
    """
    if type(dataset) is RowDataset:
        weights = None if dataset.weights is None else dataset.weights[chosen]
        return RowDataset(subset(dataset.dataset, chosen), dataset.y[chosen], weights)
    if type(dataset) is Dataset:
        X, y = take_rows(dataset.X, chosen), dataset.y
        return Dataset(X, None if y is None else multi_indexing(y, chosen))
    if type(dataset) is Subset:
        return subset(dataset.dataset, np.asarray(dataset.indices, dtype=int)[chosen])
    if isinstance(chosen, slice):
        return Subset(dataset, range(len(dataset))[chosen])
    return Subset(dataset, chosen.tolist())
