"""StoredArray: an array on a disk or in a cluster, of which a batch is read at a time.

Memory-mapped files of numpy, and arrays in chunks, as those of zarr, HDF5 and dask: all
have a shape, a dtype and slices. Values are cast and checked as they are read.
"""

import mmap
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import numpy as np
from scipy.sparse import issparse
from torch import Tensor

from sklaplace.core.budget import BUDGET, require_bytes

# A memory-mapped array of at most so many bytes is read at once.
MAX_LOADED = BUDGET
# Bytes to read at once, to check or hash all values.
_BLOCK = 16 * 2**20

Rows = range | np.ndarray


def is_stored(X: Any) -> bool:
    """Whether an array is read in parts: a large file in a memory map, or chunks."""
    if isinstance(X, np.ndarray):
        return X.nbytes > MAX_LOADED and _memory_map(X) is not None
    if isinstance(X, Tensor) or issparse(X):
        return False
    return all(hasattr(X, name) for name in ("chunks", "shape", "dtype", "ndim"))


class ShorterFileError(OSError):
    """A file that became shorter after it was mapped to memory."""


def check_file(array: Any, name: str) -> None:
    """Raise if the file of a memory map became shorter.

    To read past its end would kill the process.
    """
    found = _memory_map(array, with_own_changes=True)
    if found is None or not array.size:  # numpy knows no offset of nothing
        return
    while not isinstance(array, np.memmap):
        array = array.base
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    if found.size() < start + len(found):
        raise ShorterFileError(
            f"{name} is in a file that became shorter after it was opened: "
            f"{found.size():,} of {start + len(found):,} bytes are left. Open it again "
            "when it is complete."
        )


class StoredArray:
    """Samples of an array that is not in memory.

    Parameters
    ----------
    source : array
        A `numpy.memmap` or a view of one; or with ``shape``, ``dtype``, ``ndim`` and
        slices that `numpy.asarray` takes.
    cast : callable
        Of an array that was read; returns it in the dtype of the network, or raises
        an error for values that it does not take.
    rows : range or ndarray of int, optional
        Positions of the samples in ``source``; None is all of them.
    """

    def __init__(
        self,
        source: Any,
        cast: Callable[[np.ndarray], np.ndarray],
        rows: Rows | None = None,
    ) -> None:
        self.source, self.cast = source, cast
        self.rows: Rows = range(_n_rows(source)) if rows is None else rows
        # the chunk that was read last, by its first row; shared by all parts
        self._chunk: dict[int, np.ndarray] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of samples, and shape of each."""
        return (len(self.rows), *self.source.shape[1:])

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: Any) -> np.ndarray:
        """Read some samples: an index, a slice, or an array of indices."""
        if isinstance(chosen, (int, np.integer)):
            row = int(self.rows[chosen])
            return self._of(range(row, row + 1)).read()[0]
        return self.part(chosen).read()

    def part(self, chosen: slice | np.ndarray) -> "StoredArray":
        """Return some of the samples, without reading them."""
        rows = self.rows
        if isinstance(chosen, slice):
            return self._of(rows[chosen])
        # a range as an array would cost as much as all samples
        if isinstance(rows, range):
            taken = rows.start + rows.step * chosen
        else:
            taken = rows[chosen]
        if len(taken) and (np.diff(taken) == 1).all():  # read in one piece
            return self._of(range(int(taken[0]), int(taken[-1]) + 1))
        return self._of(taken)

    def _of(self, rows: Rows) -> "StoredArray":
        part = object.__new__(StoredArray)  # a copy would read it, as pickle does
        vars(part).update(vars(self), rows=rows)
        return part

    def read(self) -> np.ndarray:
        """Return all samples, cast.

        Raises
        ------
        OSError
            If the array cannot be read.
        ValueError, TypeError
            If it has values that the network does not take.
        """
        return self.cast(self._raw())

    def _raw(self) -> np.ndarray:
        """Return all samples as they are stored, in memory."""
        try:
            return self._taken()
        except ShorterFileError:
            raise
        except Exception as error:
            first, last = (min(self.rows), max(self.rows)) if len(self) else (0, 0)
            raise OSError(
                f"X cannot be read at the rows {first:,} to {last:,}: {error!r}. See "
                "whether its file, or what else it is stored in, is complete."
            ) from error

    def _taken(self) -> np.ndarray:
        rows, source = self.rows, self.source
        check_file(source, "X")
        size = 0 if isinstance(source, np.ndarray) else _rows_of_chunk(source)
        if isinstance(rows, range) and rows.step == 1 and len(rows) < size:
            return self._of_chunks(rows, size)
        if isinstance(rows, range):
            found = np.array(source[rows.start : rows.stop : rows.step])
        elif isinstance(source, np.ndarray):
            found = source.take(rows, 0)
        else:  # HDF5 takes increasing indices alone
            distinct, places = np.unique(rows, return_inverse=True)
            indexed = getattr(source, "oindex", source)  # the orthogonal one of zarr
            found = np.asarray(indexed[distinct])[places]
        _release(source)
        return found

    def _of_chunks(self, rows: range, size: int) -> np.ndarray:
        """Return few consecutive samples; a chunk is read once for all that follow."""
        parts, start = [], rows.start
        while start < rows.stop:
            first = start // size * size
            if first not in self._chunk:
                chunk = np.array(self.source[first : first + size])
                self._chunk.clear()
                self._chunk[first] = chunk
            stop = min(rows.stop, first + size)
            parts.append(self._chunk[first][start - first : stop - first])
            start = stop
        return np.concatenate(parts)

    def blocks(self) -> Iterator[np.ndarray]:
        """Read all samples, some at a time."""
        row_bytes = self.source.dtype.itemsize * int(np.prod(self.shape[1:], dtype=int))
        step = max(1, _BLOCK // max(1, row_bytes))
        for start in range(0, len(self), step):
            yield self.part(slice(start, start + step)).read()

    def digest(self) -> bytes:
        """Return a SHA-256 of all samples."""
        state = sha256(repr(self.shape).encode())
        for block in self.blocks():
            state.update(block.dtype.str.encode())
            state.update(np.ascontiguousarray(block).data)
        return state.digest()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """All samples in memory, where they fit."""
        n_bytes = 8 * int(np.prod(self.shape, dtype=float))
        require_bytes(
            3 * n_bytes,
            "cpu",
            f"X with {len(self):,} rows, read at once,",
            "pass a net of your own as estimator, which is trained on batches",
        )
        return np.asarray(self.read(), dtype=dtype)

    def __reduce__(self) -> Any:
        """The samples by value if they are of a memory map, which others may lack.

        Blocks of dask are computed where this is unpickled. Later would be too late: a
        worker of dask that waits for a block takes on other tasks meanwhile, which may
        wait for what it holds.
        """
        source: Any = self.source
        rows: Rows = self.rows
        if isinstance(source, np.ndarray):
            return StoredArray, (self._raw(), self.cast)
        if type(source).__module__.startswith("zarr."):  # by the name of its store
            return StoredArray, (source, self.cast, rows)
        if not hasattr(source, "__dask_keys__"):  # HDF5, which cannot be pickled
            return StoredArray, (self._raw(), self.cast)
        chosen: Any = rows
        if isinstance(rows, range):
            chosen = slice(rows.start, rows.stop, rows.step)
        return _computed, (_culled(source[chosen]), self.cast)


def _computed(source: Any, cast: Callable[[np.ndarray], np.ndarray]) -> StoredArray:
    return StoredArray(np.asarray(source), cast)


def _n_rows(source: Any) -> int:
    n = source.shape[0] if source.ndim else np.nan
    if not np.isfinite(n):
        raise ValueError(
            f"X has the shape {source.shape}, with an unknown number of rows. Compute "
            "it first, as by compute_chunk_sizes() of an array of dask."
        )
    return int(n)


def _rows_of_chunk(source: Any) -> int:
    """Return the rows of a chunk, of which one is not read without the others.

    0 if there are no chunks, or they are large.
    """
    chunks = source.chunks
    rows = chunks[0] if chunks else 0
    size = int(rows[0] if isinstance(rows, tuple) else rows)  # dask has those of each
    row_bytes = source.dtype.itemsize * int(np.prod(source.shape[1:], dtype=int))
    return size if size * row_bytes <= BUDGET else 0


def _memory_map(array: Any, with_own_changes: bool = False) -> mmap.mmap | None:
    """Return the map of a `numpy.memmap` that an array is a view of, if it is one.

    By default not one that keeps changes to itself, which is not read in parts:
    `_release` would lose them. So might other maps, whose mode is not known.
    """
    mode = None
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            mode = array.mode
        array = array.base
    is_known = mode is not None and (mode != "c" or with_own_changes)
    return array if is_known and isinstance(array, mmap.mmap) else None


def _release(source: Any) -> None:
    """Let the system take back the pages of a memory map, which count as memory."""
    found = _memory_map(source)
    if found is not None and hasattr(found, "madvise"):  # not on Windows
        found.madvise(mmap.MADV_DONTNEED)


def _culled(source: Any) -> Any:
    """Return an array of dask without the blocks that it is not made of.

    By the protocol of collections that dask documents.
    """
    graph = source.__dask_optimize__(source.__dask_graph__(), source.__dask_keys__())
    rebuild, args = source.__dask_postpersist__()
    return rebuild(graph, *args)
