"""Stored arrays: the samples equal the array, but are read in parts."""

import pickle

import numpy as np
import pytest

from sklaplace.data import stored
from sklaplace.data.stored import StoredArray, is_stored

N = 50
VALUES = np.arange(6.0 * N).reshape(N, 3, 2)


class Chunked:
    """An array of blocks that counts the values read."""

    chunks = (7, 3, 2)

    def __init__(self, values=VALUES):
        self.values, self.n_read = values, 0
        self.shape, self.dtype, self.ndim = values.shape, values.dtype, values.ndim

    def __getitem__(self, rows):
        assert isinstance(rows, slice)
        found = self.values[rows]
        self.n_read += len(found)
        return found


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(stored, "MAX_LOADED", 0)


@pytest.fixture(params=["r", "r+", "chunks"])
def source(request, tmp_path):
    if request.param == "chunks":
        return Chunked()
    np.save(tmp_path / "values.npy", VALUES)
    return np.load(tmp_path / "values.npy", mmap_mode=request.param)


def single(values):
    return values.astype("f4")


@pytest.fixture
def array(source):
    return StoredArray(source, single)


@pytest.mark.parametrize(
    "chosen",
    [3, slice(4, 9), slice(None, None, 3), np.array([5, 5, 2]), np.arange(6, 11)],
    ids=["one", "slice", "step", "places", "consecutive"],
)
def test_samples_are_those_of_the_array(array, chosen):
    found = array[chosen]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, VALUES[chosen])
    found[...] = -1  # of in-place layers
    np.testing.assert_array_equal(array[chosen], VALUES[chosen])


def test_parts_of_parts(array):
    part = array.part(slice(10, 40)).part(np.arange(30)[::-2]).part(slice(2, 5))
    np.testing.assert_array_equal(part.read(), VALUES[10:40][::-2][2:5])
    assert part.shape == (3, 3, 2)


def test_a_chunk_is_read_once_for_consecutive_samples():
    source = Chunked()
    array = StoredArray(source, single)
    part = array.part(slice(0, 45)).part(slice(5, 40))
    assert not source.n_read
    found = [part[k] for k in range(35)]
    np.testing.assert_array_equal(found, VALUES[5:40])
    assert source.n_read == 42  # six chunks of seven


@pytest.mark.parametrize("chunks", [None, Chunked.chunks])
def test_only_samples_are_read_without_chunks_of_fair_size(chunks, monkeypatch):
    monkeypatch.setattr(stored, "BUDGET", 7 * VALUES[0].nbytes - 1)
    source = Chunked()
    source.chunks = chunks  # None: a contiguous dataset of HDF5
    array = StoredArray(source, single)
    np.testing.assert_array_equal(array[[31, 2, 30, 2]], VALUES[[31, 2, 30, 2]])
    assert source.n_read == 3


def test_no_samples(array):
    assert array[:0].shape == (0, *VALUES.shape[1:])


def test_blocks_are_all_samples(array, monkeypatch):
    monkeypatch.setattr(stored, "_BLOCK", 7 * VALUES[0].nbytes)
    blocks = list(array.blocks())
    assert max(map(len, blocks)) == 7
    np.testing.assert_array_equal(np.concatenate(blocks), VALUES)


class Unpicklable(Chunked):
    def __reduce__(self):
        raise TypeError("h5py objects cannot be pickled")


def test_pickles_hold_the_samples(array):
    """The process that loads the pickle may not have the file."""
    for some in (array, StoredArray(Unpicklable(), single)):
        found = pickle.loads(pickle.dumps(some.part(slice(3, 9))))
        np.testing.assert_array_equal(found.read(), VALUES[3:9])


def test_what_is_stored(source, tmp_path, monkeypatch):
    assert is_stored(source)
    np.save(tmp_path / "other.npy", VALUES)
    assert not is_stored(VALUES)
    assert not is_stored(np.load(tmp_path / "other.npy", mmap_mode="c"))
    mapped = np.load(tmp_path / "other.npy", mmap_mode="r")
    assert is_stored(mapped[3:])
    assert not is_stored(mapped[[3, 4]])  # a copy
    monkeypatch.setattr(stored, "MAX_LOADED", VALUES.nbytes)
    assert is_stored(source) == isinstance(source, Chunked)


def test_changes_to_a_map_are_kept(tmp_path):
    np.save(tmp_path / "values.npy", VALUES)
    mapped = np.load(tmp_path / "values.npy", mmap_mode="r+")
    mapped[0] = 7
    array = StoredArray(mapped, single)
    assert (array[0] == 7).all()
    assert (array[0] == 7).all()


def test_an_unknown_number_of_rows():
    source = Chunked()
    source.shape = (np.nan, 3, 2)
    with pytest.raises(ValueError, match="compute_chunk_sizes"):
        StoredArray(source, single)


def test_a_whole_array_that_does_not_fit(array, little_memory):
    np.testing.assert_array_equal(np.asarray(array), VALUES)
    little_memory(100)
    with pytest.raises(ValueError, match="pass a skorch net"):
        np.asarray(array)
