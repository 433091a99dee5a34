"""Hash-based train/validation split: a hash of the inputs assigns each sample.

A split by position changes with the order of the samples, and can put copies of a
sample on both sides. A split by hash does not depend on the order and keeps copies
together. A sample of weight two is therefore equivalent to two samples. Samples of an
array that are equal up to `TOLERANCE` count as copies.
"""

from hashlib import blake2b

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from sklaplace.networks.stored import StoredArray

# largest difference of copies in each column, relative to its interquartile range (or
# its standard deviation, if half of the values are equal); less for more than 5,000
# samples, which may be as close as that in a single column
TOLERANCE = 1e-5
# number of neighbours that each sample is compared with
N_NEIGHBOURS = 8
# minimum number of distinct samples for a split; fewer are all used for training
MIN_ROWS = 50


def are_few(X: object, n_rows: int, limit: int = MIN_ROWS) -> bool:
    """Return whether fewer than ``limit`` of the samples are distinct.

    Hashing stops at ``limit`` distinct samples.
    """
    n = 0
    while n < n_rows:
        n = min(max(4 * n, 2 * limit), n_rows)
        some = X[:n] if isinstance(X, np.ndarray | StoredArray) else X
        if len(np.unique(_keys(some, n, 0))) >= limit:
            return False
    return True


def hash_split(
    X: object, y: np.ndarray, fraction: float, seed: int, *, stratify: bool
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the indices of training and validation samples.

    Parameters
    ----------
    X : ndarray of shape (n, ...) or other data
        Inputs. If X is not an array, samples are hashed by position.
    y : ndarray of shape (n,) or (n, c)
        Targets, used only for stratification.
    fraction : float
        Fraction of the distinct samples in the validation set.
    seed : int
        Different seeds give different splits.
    stratify : bool
        Whether to hold out the same fraction of every class.

    Returns
    -------
    train, validation : ndarray of int
        Indices, or None if fewer than ``MIN_ROWS`` samples are distinct.
    """
    strata, inverse = _distinct(X, y, seed, stratify)
    if len(strata) < MIN_ROWS:
        return None
    is_held_out = np.zeros(len(strata), dtype=bool)
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)  # ordered by hash
        n_held_out = min(round(fraction * len(members)), len(members) - 1)
        is_held_out[members[:n_held_out]] = True
    is_held_out = is_held_out[inverse]
    if is_held_out.all() or not is_held_out.any():
        return None
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def hash_folds(
    X: object, y: np.ndarray, n_folds: int, seed: int, *, stratify: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the indices of training and validation samples of each fold.

    Parameters are as for `hash_split`. Copies of a sample are in the same fold. The
    number of folds is at most the number of distinct samples. The order of the folds
    does not depend on the order of the samples.
    """
    strata, inverse = _distinct(X, y, seed, stratify)
    fold = np.empty(len(strata), dtype=int)
    fold[np.argsort(strata, kind="stable")] = np.arange(len(strata)) % n_folds
    # ordered by hash, which is then the order of training samples
    order = np.argsort(inverse, kind="stable")
    fold = fold[inverse[order]]
    kinds = range(min(n_folds, len(strata)))
    return [(order[fold != k], order[fold == k]) for k in kinds]


def groups_of_copies(X: np.ndarray) -> np.ndarray:
    """Return a group number of each sample (n,); copies have the same number.

    Samples are compared with their neighbours along a random direction.

    Parameters
    ----------
    X : ndarray of shape (n, ...)
        Inputs.

    Notes
    -----
    Costs O(n log n + n p) for p columns.
    """
    Z = X.reshape(len(X), -1).astype(np.float64)
    largest = np.abs(Z).max(axis=0)
    Z /= np.where(largest > 0, 2 * largest, 1)  # avoids overflow
    Z -= Z[0].copy()
    low, high = np.quantile(Z, [0.25, 0.75], axis=0)
    scale = np.where(high > low, high - low, Z.std(axis=0))
    Z /= np.where(scale > 0, scale, 1)
    direction = np.random.default_rng(0).standard_normal(Z.shape[1])
    along = Z @ direction
    order = np.argsort(along, kind="stable")
    edges, tolerance = [], min(TOLERANCE, 0.05 / len(Z))
    # copies are as close along the direction, up to rounding
    nearest = tolerance * np.abs(direction).sum() + 1e-9 * np.abs(along)
    for lag in range(1, min(N_NEIGHBOURS + 1, len(Z))):
        pairs = np.stack([order[:-lag], order[lag:]])
        is_near = along[pairs[1]] - along[pairs[0]] <= nearest[pairs].max(axis=0)
        pairs = pairs[:, is_near]
        is_copy = (np.abs(Z[pairs[0]] - Z[pairs[1]]) <= tolerance).all(axis=1)
        edges.append(pairs[:, is_copy])
    first, second = np.concatenate(edges, axis=1) if edges else ([], [])
    shape = (len(Z), len(Z))
    graph = coo_array((np.ones(len(first)), (first, second)), shape=shape)
    return np.asarray(connected_components(graph, directed=False)[1])


def _distinct(
    X: object, y: np.ndarray, seed: int, stratify: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return strata of distinct samples, ordered by hash, and sample indices (n,).

    Strata are classes if ``stratify``; otherwise there is a single stratum.
    """
    hashes = _keys(X, len(y), seed)
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return (y[first] if stratify else np.zeros(len(first))), inverse


def shared_keys(X: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return keys (n,) with the smallest key of its copies for each sample."""
    groups = groups_of_copies(X)
    smallest = np.full(groups.max() + 1, np.iinfo(keys.dtype).max, dtype=keys.dtype)
    np.minimum.at(smallest, groups, keys)
    return smallest[groups]


def _keys(X: object, n_rows: int, seed: int) -> np.ndarray:
    """Return a hash of each sample, (n,), uint64, equal for copies."""
    hashes = _split_hash(X, n_rows, seed)
    return shared_keys(X, hashes) if isinstance(X, np.ndarray) else hashes


def _split_hash(X: object, n_rows: int, seed: int) -> np.ndarray:
    """Return a hash of each sample, (n,), uint64."""
    if isinstance(X, StoredArray):
        blocks = [_split_hash(block, len(block), seed) for block in X.blocks()]
        return np.concatenate(blocks)
    key = seed.to_bytes(8, "little")
    rows = np.arange(n_rows).reshape(-1, 1)
    if isinstance(X, np.ndarray):
        # adding zero turns -0.0 into 0.0; the two are equal but their bytes differ
        rows = np.ascontiguousarray(X.reshape(len(X), -1) + 0)
    hashes = [blake2b(row.tobytes(), digest_size=8, key=key).digest() for row in rows]
    return np.frombuffer(b"".join(hashes), dtype=np.uint64)
