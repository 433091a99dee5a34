"""Hash-based train/validation split: a key assigns each sample to one side.

A split by position changes with the order of the samples, and can put copies of a
sample on both sides. The key of a sample is a hash of its inputs and, if other samples
have the same inputs, of its targets. Therefore, the split does not depend on the order
of the samples, and copies stay together. A sample of weight two is equivalent to two
copies of the sample. Samples of an array that are equal up to `TOLERANCE` count as
copies. If the user passes groups, the key is a hash of the group instead.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from sklaplace.data.stored import StoredArray

# Largest difference between copies in each column, relative to the interquartile range,
# or to the standard deviation if half of the values are equal. The tolerance is smaller
# for more than 5,000 samples, because different samples of a single column can be that
# close.
TOLERANCE = 1e-5
# Number of neighbours to compare with each sample.
N_NEIGHBOURS = 8
# Equal targets of equal inputs can be coincidences if the number of distinct targets is
# below this fraction of the number of distinct pairs of inputs and targets.
FEW_TARGETS = 0.9
# Minimum number of distinct samples for a split. With fewer, all are training samples.
MIN_ROWS = 50
# Number of values that the search for copies converts to float64 at a time.
_BLOCK = 2**21


def row_keys(
    X: Any, n_rows: int, seed: int, groups: np.ndarray | None = None
) -> np.ndarray:
    """Return each sample's key, (n,), uint64; samples with equal keys stay together.

    Parameters
    ----------
    X : ndarray of shape (n, ...), StoredArray or other data
        Inputs. Copies in an array have the same key. In a stored array, only exactly
        equal samples have the same key. For other data, the key is a hash of the
        position.
    n_rows : int
        Number of samples n.
    seed : int
        Seed of the hash. Different seeds produce different keys.
    groups : ndarray of shape (n,) or None
        Group labels. The keys then depend only on the labels, so copies in different
        groups may have different keys.
    """
    if groups is not None:
        rows: Any = map(str.encode, groups.astype(str))
    else:
        blocks = X.blocks() if isinstance(X, StoredArray) else [np.arange(n_rows)]
        blocks = [X] if isinstance(X, np.ndarray) else blocks
        # -0.0 and 0.0 are equal but differ in bytes; adding zero turns -0.0 into 0.0
        rows = ((row + 0).tobytes() for block in blocks for row in block)
    keys = _hashes(rows, seed)
    is_array = groups is None and isinstance(X, np.ndarray)
    return shared_keys(X, keys) if is_array else keys


def sample_keys(
    X: Any, y: np.ndarray, seed: int, groups: np.ndarray | None
) -> np.ndarray:
    """Return keys (n,) that copies of a sample, or samples of a group, share.

    The parameters are described in `row_keys` and `separate_replicates`.
    """
    keys = row_keys(X, len(y), seed, groups)
    return keys if groups is not None else separate_replicates(keys, y)


def separate_replicates(keys: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return keys (n,) that differ between replicates.

    Replicates are independent samples with equal inputs. Usually, their targets differ,
    and samples with equal inputs and targets are copies. If targets have few distinct
    values (labels, counts), equal targets can be coincidences. In this case, samples
    with equal inputs are replicates if most of them have several targets, and copies
    otherwise.

    Parameters
    ----------
    keys : ndarray of shape (n,)
        Keys of the inputs, from `row_keys`.
    y : ndarray of shape (n, ...)
        Targets.
    """
    _, cell, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    rows = np.flatnonzero(sizes[cell] > 1)
    if len(rows) == 0:
        return keys
    cell, y = cell[rows], y[rows].reshape(len(rows), -1).astype(np.float64)
    copies = groups_of_copies(np.column_stack([cell, y]))
    distinct = np.unique(copies, return_index=True)[1]
    has_several = np.bincount(cell[distinct])[cell] > 1
    shift = np.where(has_several, _smallest(_hashes(y + 0.0, 0), copies), 0)
    if groups_of_copies(y).max() + 1 < FEW_TARGETS * len(distinct):
        if has_several.mean() <= 0.5:
            return keys
        order = np.argsort(copies, kind="stable")
        places = np.arange(len(order)) - np.searchsorted(copies[order], copies[order])
        shift[order] += _hashes(places[:, np.newaxis], 0)
    keys = keys.copy()
    keys[rows] += shift.astype(keys.dtype)
    return keys


def hash_split(
    keys: np.ndarray, y: np.ndarray, fraction: float, *, stratify: bool
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the indices of training and validation samples.

    Parameters
    ----------
    keys : ndarray of shape (n,)
        Keys from `sample_keys`. Samples with the same key stay on the same side.
    y : ndarray of shape (n,) or (n, c)
        Targets, used only for stratification.
    fraction : float
        Fraction of the distinct keys that are assigned to the validation set.
    stratify : bool
        Whether to hold out the same fraction of every class.

    Returns
    -------
    train, validation : ndarray of int
        Indices, or None if there are fewer than ``MIN_ROWS`` distinct keys.
    """
    strata, inverse = _distinct(keys, y, stratify)
    if len(strata) < MIN_ROWS:
        return None
    is_held_out = np.zeros(len(strata), dtype=bool)
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)  # ordered by hash
        n_held_out = min(round(fraction * len(members)), len(members) - 1)
        is_held_out[members[:n_held_out]] = True
    is_held_out = is_held_out[inverse]
    if not is_held_out.any():
        return None
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def hash_folds(
    keys: np.ndarray, y: np.ndarray, n_folds: int, *, stratify: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the indices of training and validation samples of each fold.

    The parameters are described in `hash_split`. Samples with the same key are in the
    same fold. The number of folds is at most the number of distinct keys. The order of
    the folds does not depend on the order of the samples.
    """
    strata, inverse = _distinct(keys, y, stratify)
    fold = np.empty(len(strata), dtype=int)
    fold[np.argsort(strata, kind="stable")] = np.arange(len(strata)) % n_folds
    # training samples are then in the order of their hashes
    order = np.argsort(inverse, kind="stable")
    fold = fold[inverse[order]]
    kinds = range(min(n_folds, len(strata)))
    return [(order[fold != k], order[fold == k]) for k in kinds]


def groups_of_copies(X: np.ndarray) -> np.ndarray:
    """Return the group number of each sample, (n,); copies have the same number.

    Samples are compared with their neighbours along a random direction.

    Parameters
    ----------
    X : ndarray of shape (n, ...)
        Inputs.

    Notes
    -----
    The search costs O(n log n + n p) for p columns. Its memory does not depend on p,
    because columns are converted in blocks.
    """
    X = X.reshape(len(X), -1)
    n, p = X.shape
    step = max(1, _BLOCK // n)
    blocks = [slice(start, start + step) for start in range(0, p, step)]
    direction = np.random.default_rng(0).standard_normal(p)
    along, size, scale = np.zeros(n), np.empty((p, 1)), np.empty((p, 1))
    for block in blocks:
        Z = X[:, block].T.astype(np.float64)
        largest = np.abs(Z).max(axis=1, keepdims=True)
        size[block] = np.where(largest > 0, 2 * largest, 1)
        Z /= size[block]  # avoids overflow
        Z -= Z[:, :1].copy()
        low, high = np.quantile(Z, [0.25, 0.75], axis=1, keepdims=True)
        spread = np.where(high > low, high - low, Z.std(axis=1, keepdims=True))
        scale[block] = np.where(spread > 0, spread, 1)
        along += direction[block] @ (Z / scale[block])
    order = np.argsort(along, kind="stable")
    edges, tolerance = [], min(TOLERANCE, 0.05 / n)
    # bound on the distance of copies along the direction, including rounding
    nearest = tolerance * np.abs(direction).sum() + 1e-9 * np.abs(along)
    for lag in range(1, min(N_NEIGHBOURS + 1, n)):
        pairs = np.stack([order[:-lag], order[lag:]])
        is_near = along[pairs[1]] - along[pairs[0]] <= nearest[pairs].max(axis=0)
        pairs = pairs[:, is_near]
        for block in blocks:
            a, b = (X[rows, block] / size[block].T for rows in pairs)
            gap = np.abs(a - b) / scale[block].T
            pairs = pairs[:, (gap <= tolerance).all(axis=1)]
        edges.append(pairs)
    first, second = np.concatenate(edges, axis=1) if edges else ([], [])
    graph = coo_array((np.ones(len(first)), (first, second)), shape=(n, n))
    return np.asarray(connected_components(graph, directed=False)[1])


def _distinct(
    keys: np.ndarray, y: np.ndarray, stratify: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the stratum of each distinct key, and the index of each sample's key.

    With ``stratify``, the strata are classes. Otherwise there is a single stratum. A
    key with several classes belongs to the class with the fewest keys.
    """
    inverse = np.unique(keys, return_inverse=True)[1]
    y = y if stratify else np.zeros(len(keys))
    labels, codes = np.unique(y, return_inverse=True)
    of_key, classes = np.divmod(np.unique(inverse * len(labels) + codes), len(labels))
    order = np.lexsort((np.bincount(classes)[classes], of_key))  # break ties by class
    return classes[order[np.unique(of_key, return_index=True)[1]]], inverse


def shared_keys(X: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the smallest key among the copies of each sample, (n,)."""
    return _smallest(keys, groups_of_copies(X))


def _smallest(keys: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the smallest key in the group of each sample, (n,)."""
    smallest = np.full(groups.max() + 1, np.iinfo(keys.dtype).max, dtype=keys.dtype)
    np.minimum.at(smallest, groups, keys)
    return smallest[groups]


def _hashes(rows: Iterable[Any], seed: int) -> np.ndarray:
    """Return a hash of the bytes of each row, (n,), uint64."""
    key = seed.to_bytes(8, "little")
    hashes = [blake2b(bytes(row), digest_size=8, key=key).digest() for row in rows]
    return np.frombuffer(b"".join(hashes), dtype=np.uint64)
