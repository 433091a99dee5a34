"""StoredArray: an on-disk, distributed or sparse array that is read batch by batch.

The array is a memory-mapped numpy file, a chunked array (for example from zarr, HDF5 or
dask), or a sparse matrix. It has a shape and a dtype, and supports slicing. Values are
cast and checked when they are read.
"""

import mmap
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from scipy.sparse import issparse

from sklaplace.core.budget import BUDGET, require_bytes

# Memory-mapped arrays of up to this size in bytes are read at once.
MAX_LOADED = BUDGET
# Number of bytes to read at a time when all values are checked or hashed.
_BLOCK = 16 * 2**20

Cast = Callable[[np.ndarray], np.ndarray]


def is_stored(X: object) -> bool:
    """Return whether X is read in parts: a large map, an array in chunks, or sparse."""
    if isinstance(X, np.memmap):
        # releasing the pages of a copy-on-write map would discard its changes
        return X.nbytes > MAX_LOADED and X.mode != "c"
    names = "chunks", "shape", "dtype", "ndim"
    is_chunked = not isinstance(X, np.ndarray) and all(hasattr(X, n) for n in names)
    return is_chunked or issparse(X)


class StoredArray:
    """Samples of an array that is not loaded into memory.

    Small chunks are read whole, and the chunk that was read last is kept in memory.

    Parameters
    ----------
    source : array
        `numpy.memmap`, a sparse matrix in CSR format, or an array with ``shape``,
        ``dtype`` and slices that `numpy.asarray` accepts.
    cast : callable
        Function that converts values to the dtype of the network, or raises an error
        for values that the network does not accept.
    rows : ndarray of int, optional
        Positions of the samples in ``source``. None means all samples.
    """

    # for the hash of `core.cache`
    is_hashed_by_blocks = True

    def __init__(self, source: Any, cast: Cast, rows: np.ndarray | None = None) -> None:
        # dask has NaN for an unknown number; an array without axes has no rows
        n = source.shape[0] if source.shape else np.nan
        if not np.isfinite(n):
            raise ValueError(
                f"X has the shape {source.shape}, with an unknown number of rows. "
                "For a dask array, call compute_chunk_sizes() first."
            )
        self.source, self.cast = source, cast
        self.rows = np.arange(n) if rows is None else rows
        self._row_bytes = max(1, source.dtype.itemsize * prod(source.shape[1:]))
        # sizes of the chunks along each axis; dask lists the size of every chunk
        chunks = getattr(source, "chunks", None)
        n_rows = int(np.max(chunks[0])) if chunks else 0
        # zero without small chunks, the only ones that are read whole
        self._chunk_rows = n_rows if n_rows * self._row_bytes <= BUDGET else 0
        # reads chunk k; all parts share the chunk that was read last
        self._chunk = lru_cache(1)(
            lambda k: np.asarray(source[k * n_rows : (k + 1) * n_rows])
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of samples, followed by the shape of a sample."""
        return (len(self.rows), *self.source.shape[1:])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: Any) -> np.ndarray:
        """Read samples by a slice or an array of indices, or one by its index."""
        if np.ndim(self.rows[chosen]):
            return self.part(chosen).read()
        return self.part([chosen]).read()[0]

    def part(self, chosen: Any) -> "StoredArray":
        """Select samples without reading them."""
        part = object.__new__(StoredArray)  # copying, like pickling, would read them
        vars(part).update(vars(self), rows=self.rows[chosen])
        return part

    def read(self) -> np.ndarray:
        """Read all samples, and cast them to the dtype of the network.

        Raises
        ------
        ValueError, TypeError
            If the network does not accept some of the values.
        """
        return self.cast(self._raw())

    def _raw(self) -> np.ndarray:
        """Read all samples into memory, in their stored dtype.

        The rows of a chunked array are sorted, and read chunk by chunk. The rows of an
        array with large or no chunks are read in runs of consecutive rows. Then the
        samples are put into the order of the rows.
        """
        if issparse(self.source):
            return np.asarray(self.source[self.rows].toarray())
        if isinstance(self.source, np.ndarray):
            values = np.asarray(self.source)[self.rows]
            # pages of a memory map that were read count as memory until released
            memory_map: Any = getattr(self.source, "_mmap", None)
            if hasattr(memory_map, "madvise"):  # not on Windows
                memory_map.madvise(mmap.MADV_DONTNEED)
            return values
        if not len(self):  # there is no first chunk to read
            return np.asarray(self.source[:0])
        size = self._chunk_rows
        if size and (self.rows // size == self.rows[0] // size).all():
            return self._read_group(self.rows)  # one chunk, for instance of one sample
        distinct, places = np.unique(self.rows, return_inverse=True)
        # nonzero at the last row of each chunk or run
        is_last = np.diff(distinct // size) if size else np.diff(distinct) > 1
        groups = np.split(distinct, np.flatnonzero(is_last) + 1)
        return np.concatenate([self._read_group(rows) for rows in groups])[places]

    def _read_group(self, rows: np.ndarray) -> np.ndarray:
        """Read rows that `_raw` has grouped: of one chunk, or consecutive rows."""
        if size := self._chunk_rows:
            return self._chunk(int(rows[0]) // size)[rows % size]
        return np.asarray(self.source[int(rows[0]) : int(rows[-1]) + 1])

    def blocks(self) -> Iterator[np.ndarray]:
        """Read all samples in blocks."""
        step = max(1, _BLOCK // self._row_bytes)
        return (self[start : start + step] for start in range(0, len(self), step))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """Read all samples into memory, or raise an error if they do not fit."""
        subject = f"X with {len(self):,} rows, read at once,"
        advice = "pass a skorch net as estimator, which is trained on batches"
        # three float64 copies: as read, as cast, and as the caller computes with it
        require_bytes(3 * 8 * prod(self.shape), "cpu", subject, advice)
        return np.asarray(self.read(), dtype=dtype)

    def __reduce__(self) -> Any:
        """Pickle the samples by value, but dask blocks as their task graph.

        Unpickling computes the blocks immediately. A dask worker that waits for a block
        starts other tasks, which may wait for a resource that the worker holds.
        """
        # Pickle expects a function and its arguments, which recreate the array. The
        # rows are selected first, so the new array has all rows of its source.
        if issparse(self.source):
            return StoredArray, (self.source[self.rows], self.cast)
        if not hasattr(self.source, "__dask_graph__"):
            return StoredArray, (self._raw(), self.cast)
        # dask is loaded, because source is one of its arrays; optimize drops all tasks
        # that the rows do not need, and returns a tuple of one array
        (blocks,) = sys.modules["dask"].optimize(self.source[self.rows])
        return _computed, (blocks, self.cast)


def _computed(source: object, cast: Cast) -> StoredArray:
    return StoredArray(np.asarray(source), cast)
