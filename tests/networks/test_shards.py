"""Shards: every sample occurs once, in whole batches, for any dataset."""

import numpy as np
import pytest
import torch
from nets import classifier
from skorch.dataset import Dataset
from torch.utils.data import Subset, TensorDataset

from sklaplace.data.dataset import Batches, RowDataset
from sklaplace.networks.shards import MAX_SHARDS, shards_of, subset

N = 23
X = np.arange(2.0 * N, dtype=np.float32).reshape(N, 2)
Y = np.arange(N)
W = np.linspace(1, 2, N)
ODD = np.arange(N)[::-2]
PLAIN = Dataset(X, Y)
TENSORS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
DATASETS = {
    "arrays": PLAIN,
    "dict": Dataset({"a": X}, Y),
    "no targets": Dataset(X),
    "weights": RowDataset(PLAIN, Y, W),
    "subset": Subset(PLAIN, ODD.tolist()),
    "weighted subset": Subset(RowDataset(PLAIN, Y, W), ODD.tolist()),
    "tensors": TENSORS,
    "weighted tensors": RowDataset(TENSORS, Y, W),
    "subset of a subset": Subset(Subset(TENSORS, ODD.tolist()), range(7)),
}


@pytest.fixture(scope="module")
def net():
    return classifier().initialize()


def samples(net, dataset, batch_size=4):
    """Return all samples of a dataset, as arrays of numbers."""
    found = []
    for x, y, w in Batches(net, dataset, batch_size):
        x = x["a"] if isinstance(x, dict) else x
        parts = [x, *(v[:, None] for v in (y, w) if v is not None)]
        found.append(torch.cat([part.double() for part in parts], 1))
    return found


@pytest.mark.parametrize("dataset", DATASETS.values(), ids=DATASETS)
@pytest.mark.parametrize("n_shards", [None, 1, 2, 3, 100])
def test_batches_are_those_of_the_dataset(net, dataset, n_shards):
    shards = shards_of(dataset, 4, n_shards)
    found = [batch for shard in shards for batch in samples(net, shard)]
    for batch, expected in zip(found, samples(net, dataset), strict=True):
        torch.testing.assert_close(batch, expected, rtol=0, atol=0)


def test_number_of_shards():
    def count(n_samples, n_shards=None):
        dataset = Dataset(np.zeros((n_samples, 1)))
        return len(shards_of(dataset, 10, n_shards))

    assert [count(n) for n in (1, 70, 80, 10_000)] == [1, 1, 2, MAX_SHARDS]
    assert [count(100, n) for n in (1, 3, 10, 11)] == [1, 3, 10, 10]


@pytest.mark.parametrize("name", ["arrays", "dict", "weights", "weighted subset"])
def test_arrays_are_cut(name):
    """A shard does not contain the samples of other shards."""
    found = subset(DATASETS[name], slice(4, 8))
    inner = getattr(found, "dataset", found)
    assert len(found) == 4
    assert len(inner.X["a"] if name == "dict" else inner.X) == 4
