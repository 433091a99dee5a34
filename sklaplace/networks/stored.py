"""StoredArray: an array on disk or in a cluster, read batch by batch.

The array is a memory-mapped numpy file or a chunked array, such as from zarr, HDF5 or
dask. It has a shape and a dtype and supports slices. Values are cast and checked on
reading.
"""

import mmap
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import sha256
from math import prod
from typing import Any

import numpy as np

from sklaplace.core.budget import BUDGET, require_bytes

# Maximum size in bytes of a memory-mapped array that is read at once.
MAX_LOADED = BUDGET
# Bytes to read at a time to check or hash all values.
_BLOCK = 16 * 2**20

Cast = Callable[[np.ndarray], np.ndarray]


def is_stored(X: object) -> bool:
    """Return whether an array is read in parts: a large memory map, or chunks."""
    if isinstance(X, np.ndarray):
        array, _ = _memory_map(X)
        # releasing the pages of a copy-on-write map would lose its changes
        return X.nbytes > MAX_LOADED and array is not None and array.mode != "c"
    return all(hasattr(X, name) for name in ("chunks", "shape", "dtype", "ndim"))


def check_file(array: object, name: str) -> None:
    """Raise OSError if the file of a memory map became shorter.

    Reading past the end of the file crashes the process.
    """
    mapped, file = _memory_map(array)
    if mapped is None or not mapped.size:
        return
    if file.size() < (size := mapped.offset + mapped.nbytes):
        raise OSError(
            f"{name} is in a file that became shorter after it was opened: "
            f"{file.size():,} of {size:,} bytes are left. Open it again when it is "
            "complete."
        )


def _memory_map(array: object) -> tuple[np.memmap | None, Any]:
    """Return the `numpy.memmap` behind an array, and its map of the file."""
    found = None
    while isinstance(array, np.ndarray):
        found = array if isinstance(array, np.memmap) else found
        array = array.base
    return (found, array) if isinstance(array, mmap.mmap) else (None, None)


class StoredArray:
    """Samples of an array that is not loaded into memory.

    Parameters
    ----------
    source : array
        A `numpy.memmap`, a view of a memmap, or an array with ``shape``, ``dtype`` and
        slices that `numpy.asarray` accepts.
    cast : callable
        Converts values to the dtype of the network, or raises an error for values that
        the network does not accept.
    rows : ndarray of int, optional
        Positions of the samples in ``source``. None means all.
    """

    def __init__(self, source: Any, cast: Cast, rows: np.ndarray | None = None) -> None:
        n = source.shape[0] if source.shape else np.nan
        if not np.isfinite(n):
            raise ValueError(
                f"X has the shape {source.shape}, with an unknown number of rows. "
                "Compute it first, as by compute_chunk_sizes() of an array of dask."
            )
        self.source, self.cast = source, cast
        self.rows = np.arange(n) if rows is None else rows
        self._row_bytes = max(1, source.dtype.itemsize * prod(source.shape[1:]))
        chunks = getattr(source, "chunks", None)  # dask lists the sizes of all chunks
        size = int(np.max(chunks[0])) if chunks else 0
        self._chunk_rows = size if size * self._row_bytes <= BUDGET else 0
        # all parts share the last chunk read
        self._chunk = lru_cache(1)(
            lambda k: np.array(source[k * size : (k + 1) * size])
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of samples, followed by the shape of a sample."""
        return (len(self.rows), *self.source.shape[1:])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: Any) -> np.ndarray:
        """Read some samples: an index, a slice, or an array of indices."""
        if np.ndim(self.rows[chosen]):
            return self.part(chosen).read()
        return self.part([chosen]).read()[0]

    def part(self, chosen: Any) -> "StoredArray":
        """Return some of the samples without reading them."""
        part = object.__new__(StoredArray)  # copying would read them, like pickling
        vars(part).update(vars(self), rows=self.rows[chosen])
        return part

    def read(self) -> np.ndarray:
        """Return all samples, cast.

        Raises
        ------
        OSError
            If the array cannot be read.
        ValueError, TypeError
            If it has values that the network does not accept.
        """
        return self.cast(self._raw())

    def _raw(self) -> np.ndarray:
        """Read all samples into memory, in their stored dtype."""
        check_file(self.source, "X")
        try:
            found = self._taken()
        except Exception as error:
            first, last = (self.rows.min(), self.rows.max()) if len(self) else (0, 0)
            raise OSError(
                f"X cannot be read at the rows {first:,} to {last:,}: {error!r}. See "
                "whether its file, or what else it is stored in, is complete."
            ) from error
        mapped, file = _memory_map(self.source)
        if mapped is not None and mapped.mode != "c" and hasattr(file, "madvise"):
            file.madvise(mmap.MADV_DONTNEED)  # pages of the map count as memory
        return found

    def _taken(self) -> np.ndarray:
        span, size = self._span(), self._chunk_rows
        if span is None:
            distinct, places = np.unique(self.rows, return_inverse=True)
            # HDF5 accepts only increasing positions
            return np.asarray(self.source[distinct])[places]
        if not 0 < len(self) < size:
            return np.array(self.source[span])
        chunks = range(span.start // size, -(-span.stop // size))
        ends = [(span.start - k * size, span.stop - k * size) for k in chunks]
        parts = zip(chunks, ends, strict=True)
        return np.concatenate([self._chunk(k)[max(0, a) : b] for k, (a, b) in parts])

    def _span(self) -> slice | None:
        """Return consecutive positions as a slice to read in one piece, or None."""
        if not (np.diff(self.rows) == 1).all():
            return None
        first = int(self.rows[0]) if len(self) else 0
        return slice(first, first + len(self))

    def blocks(self) -> Iterator[np.ndarray]:
        """Read all samples in blocks."""
        step = max(1, _BLOCK // self._row_bytes)
        return (self[start : start + step] for start in range(0, len(self), step))

    def digest(self) -> bytes:
        """Return the SHA-256 hash of all samples."""
        state = sha256(repr(self.shape).encode())
        for block in self.blocks():
            state.update(block.dtype.str.encode())
            state.update(np.ascontiguousarray(block).data)
        return state.digest()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """Read all samples into memory, or raise an error if they do not fit."""
        subject = f"X with {len(self):,} rows, read at once,"
        advice = "pass a net of your own as estimator, which is trained on batches"
        require_bytes(3 * 8 * prod(self.shape), "cpu", subject, advice)
        return np.asarray(self.read(), dtype=dtype)

    def __reduce__(self) -> Any:
        """Pickle the samples by value, unless other processes can read or compute them.

        Blocks of dask are computed at unpickling, not later. A dask worker that waits
        for a block starts other tasks, which may wait for a resource that the worker
        holds.
        """
        if type(self.source).__module__.startswith("zarr."):  # by the store's name
            return StoredArray, (self.source, self.cast, self.rows)
        if not hasattr(self.source, "__dask_graph__"):
            return StoredArray, (self._raw(), self.cast)
        span = self._span()
        (blocks,) = sys.modules["dask"].optimize(self.source[span or self.rows])
        return _computed, (blocks, self.cast)


def _computed(source: object, cast: Cast) -> StoredArray:
    return StoredArray(np.asarray(source), cast)
