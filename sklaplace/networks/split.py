"""Hold-out: set rows aside by what they contain, not by where they stand.

A split by position changes with the order of the rows and puts copies of a row on
both sides. Here a hash of each row decides, so that the split is the same for
every order, copies stay together, and a row of weight two is treated as two rows.
"""

from hashlib import blake2b
from typing import Any

import numpy as np

# fewer distinct rows than this are all needed for training
MIN_ROWS = 50


def hash_split(
    X: Any, y: np.ndarray, fraction: float, seed: int, *, stratify: bool
) -> tuple[np.ndarray, np.ndarray] | None:
    """Indices of rows to train on and of rows to hold out.

    Parameters
    ----------
    X : ndarray of shape (n, ...) or other rows
        Rows that are no array are told apart by their position.
    y : ndarray of shape (n,) or (n, c)
        Targets; they decide nothing but the class that a row counts for.
    fraction : float
        Share of the distinct rows to hold out.
    seed : int
        Other seeds give other splits.
    stratify : bool
        Hold out that share of every class.

    Returns
    -------
    train, held_out : ndarray of int
        Or None if there are fewer than ``MIN_ROWS`` distinct rows.
    """
    keys = _keys(X, len(y), seed)
    unique, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    if len(unique) < MIN_ROWS:
        return None
    held = np.zeros(len(unique), dtype=bool)
    strata = y[first] if stratify else np.zeros(len(unique))
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)  # in the order of their hash
        n_held = min(round(fraction * len(members)), len(members) - 1)
        held[members[:n_held]] = True
    held_rows = held[inverse]
    if held_rows.all() or not held_rows.any():
        return None
    return np.flatnonzero(~held_rows), np.flatnonzero(held_rows)


def _keys(X: Any, n_rows: int, seed: int) -> np.ndarray:
    """One hash per row, (n,), uint64."""
    salt = seed.to_bytes(8, "little")
    rows = np.arange(n_rows).reshape(-1, 1)
    if isinstance(X, np.ndarray):
        # adding zero turns -0.0 into 0.0, which are equal but differ in their bytes
        rows = np.ascontiguousarray(X.reshape(len(X), -1) + 0)
    hashes = [blake2b(row.tobytes(), digest_size=8, key=salt).digest() for row in rows]
    return np.frombuffer(b"".join(hashes), dtype=np.uint64)
