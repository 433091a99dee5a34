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
        return _hashes(map(str.encode, groups.astype(str)), seed)
    blocks: Iterable[np.ndarray] = [np.arange(n_rows)]  # positions
    if isinstance(X, StoredArray):
        blocks = X.blocks()
    elif isinstance(X, np.ndarray):
        blocks = [X]
    # -0.0 and 0.0 are equal but differ in bytes; adding zero turns -0.0 into 0.0
    rows = ((row + 0).tobytes() for block in blocks for row in block)
    keys = _hashes(rows, seed)
    return shared_keys(X, keys) if isinstance(X, np.ndarray) else keys


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

    The keys of replicates are shifted by a hash of their targets. If equal targets can
    be coincidences, the replicates with equal targets are numbered, and a hash of this
    number is added, too. All other keys stay the same.

    Parameters
    ----------
    keys : ndarray of shape (n,)
        Keys of the inputs, from `row_keys`.
    y : ndarray of shape (n, ...)
        Targets.
    """
    # index of each sample's inputs among the distinct inputs
    _, inputs, counts = np.unique(keys, return_inverse=True, return_counts=True)
    rows = np.flatnonzero(counts[inputs] > 1)
    if len(rows) == 0:
        return keys
    # from here on, only samples whose inputs occur more than once
    inputs, y = inputs[rows], y[rows].reshape(len(rows), -1).astype(np.float64)
    # index of each sample's pair of inputs and targets, and the first sample of each
    pair = groups_of_copies(np.column_stack([inputs, y]))
    first_of_pair = np.unique(pair, return_index=True)[1]
    # whether the inputs of each sample occur in several pairs, that is, with several
    # targets
    has_several = np.bincount(inputs[first_of_pair])[inputs] > 1
    # copies up to the tolerance have different hashes, and take the smallest; adding
    # zero turns -0.0 into 0.0, which has other bytes
    shift = np.where(has_several, _smallest_of_group(_hashes(y + 0.0, 0), pair), 0)
    n_distinct_targets = groups_of_copies(y).max() + 1
    if n_distinct_targets < FEW_TARGETS * len(first_of_pair):
        if has_several.mean() <= 0.5:  # most are copies
            return keys
        # samples of a pair are replicates, too, so each needs a shift of its own
        order = np.argsort(pair, kind="stable")
        # place of each sample within its pair: the distance from the pair's first
        places = np.arange(len(order)) - np.searchsorted(pair[order], pair[order])
        shift[order] += _hashes(places[:, np.newaxis], 0)
    keys = keys.copy()
    keys[rows] += shift.astype(keys.dtype)
    return keys


def hash_split(
    keys: np.ndarray, y: np.ndarray, fraction: float, *, stratify: bool
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the indices of training and validation samples.

    Of each stratum (class, or all samples), the distinct keys with the smallest hashes
    are held out.

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
    strata, key_index = _strata_of_keys(keys, y, stratify)  # per key, per sample
    if len(strata) < MIN_ROWS:
        return None
    is_held_out = np.zeros(len(strata), dtype=bool)
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)  # in ascending order of keys
        # at least one key of each stratum is for training
        n_held_out = min(round(fraction * len(members)), len(members) - 1)
        is_held_out[members[:n_held_out]] = True
    is_held_out = is_held_out[key_index]  # from keys to samples
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
    strata, key_index = _strata_of_keys(keys, y, stratify)  # per key, per sample
    fold_of_key = np.empty(len(strata), dtype=int)
    # stratum by stratum, keys are dealt out to the folds in turn
    fold_of_key[np.argsort(strata, kind="stable")] = np.arange(len(strata)) % n_folds
    # samples in the order of their keys, and the fold of each
    order = np.argsort(key_index, kind="stable")
    fold = fold_of_key[key_index[order]]
    fold_numbers = range(min(n_folds, len(strata)))
    return [(order[fold != k], order[fold == k]) for k in fold_numbers]


def groups_of_copies(X: np.ndarray) -> np.ndarray:
    """Return the group number of each sample, (n,); copies have the same number.

    The standardised samples are projected onto a random direction, and sorted. Each
    sample is then compared with its next neighbours in this order, column by column.
    The groups are the connected components of the graph of copies.

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
    # with a fixed seed, equal data always have equal groups
    direction = np.random.default_rng(0).standard_normal(p)
    # coordinates of the samples along the direction, and two divisors of each column:
    # twice its largest value, to avoid overflow, and then its spread
    along, size, scale = np.zeros(n), np.empty((p, 1)), np.empty((p, 1))
    for block in blocks:
        Z = X[:, block].T.astype(np.float64)  # (columns, n)
        largest = np.abs(Z).max(axis=1, keepdims=True)
        # with values between -1/2 and 1/2, differences are at most one
        size[block] = np.where(largest > 0, 2 * largest, 1)
        Z /= size[block]
        Z -= Z[:, :1].copy()  # constant columns become zero
        low, high = np.quantile(Z, [0.25, 0.75], axis=1, keepdims=True)
        spread = np.where(high > low, high - low, Z.std(axis=1, keepdims=True))
        scale[block] = np.where(spread > 0, spread, 1)
        along += direction[block] @ (Z / scale[block])
    order = np.argsort(along, kind="stable")
    # 0.05 / n is below TOLERANCE for more than 5,000 samples
    tolerance = min(TOLERANCE, 0.05 / n)
    # bound on the distance of copies along the direction: the largest sum of columns'
    # differences, plus far more than the rounding errors of float64
    nearest = tolerance * np.abs(direction).sum() + 1e-9 * np.abs(along)
    edges = []  # pairs of copies, as arrays of shape (2, number of pairs)
    for lag in range(1, min(N_NEIGHBOURS + 1, n)):
        pairs = np.stack([order[:-lag], order[lag:]])
        # a cheap test first; few pairs are left for the comparison of all columns
        is_near = along[pairs[1]] - along[pairs[0]] <= nearest[pairs].max(axis=0)
        pairs = pairs[:, is_near]
        for block in blocks:
            left, right = (X[rows, block] / size[block].T for rows in pairs)
            gap = np.abs(left - right) / scale[block].T
            pairs = pairs[:, (gap <= tolerance).all(axis=1)]
        edges.append(pairs)
    # a single sample has no pairs
    first, second = np.concatenate(edges, axis=1) if edges else ([], [])
    graph = coo_array((np.ones(len(first)), (first, second)), shape=(n, n))
    return np.asarray(connected_components(graph, directed=False)[1])


def _strata_of_keys(
    keys: np.ndarray, y: np.ndarray, stratify: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the stratum of each distinct key, and the index (n,) of each sample's key.

    The distinct keys are in ascending order. With ``stratify``, the strata are classes.
    Otherwise there is a single stratum. A key with several classes belongs to the class
    with the fewest keys.
    """
    key_index = np.unique(keys, return_inverse=True)[1]
    y = y if stratify else np.zeros(len(keys))
    labels, codes = np.unique(y, return_inverse=True)
    # all distinct pairs of a key and a class; meanwhile, a pair is a single integer
    pairs = np.unique(key_index * len(labels) + codes)
    key, classes = np.divmod(pairs, len(labels))
    n_keys_of_class = np.bincount(classes)
    # by key, then by the number of keys of the class; ties stay in the order of classes
    order = np.lexsort((n_keys_of_class[classes], key))
    # in this order, the first pair of each key has the class with the fewest keys; the
    # pairs were sorted by key before, so the positions of the first ones are the same
    first_of_key = order[np.unique(key, return_index=True)[1]]
    return classes[first_of_key], key_index


def shared_keys(X: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the smallest key among the copies of each sample, (n,)."""
    return _smallest_of_group(keys, groups_of_copies(X))


def _smallest_of_group(keys: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the smallest key in the group of each sample, (n,)."""
    smallest = np.full(groups.max() + 1, np.iinfo(keys.dtype).max, dtype=keys.dtype)
    np.minimum.at(smallest, groups, keys)
    return smallest[groups]


def _hashes(rows: Iterable[Any], seed: int) -> np.ndarray:
    """Return a hash of the bytes of each row, (n,), uint64."""
    key = seed.to_bytes(8, "little")
    # eight bytes are one uint64; bytes(row) also reads a row of an array
    hashes = [blake2b(bytes(row), digest_size=8, key=key).digest() for row in rows]
    return np.frombuffer(b"".join(hashes), dtype=np.uint64)
