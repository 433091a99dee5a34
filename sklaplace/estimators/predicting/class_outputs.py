"""Results of a classifier for each sample, computed batch by batch.

The probabilities of all classes for all samples are never in memory at once.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sklaplace.estimators.targets.classes import ClassTargets


def largest(proba: Tensor, k: int) -> Tensor:
    """Return columns and values of the k largest entries of each row, (b, k, 2).

    Entries are in descending order. Ties are in the order of the columns.
    """
    values = np.ascontiguousarray(proba.cpu().numpy())
    lowest = torch.from_numpy(values).topk(k, -1).values[:, -1].numpy()
    columns = np.empty((len(values), k), dtype=np.intp)
    for n, (row, limit) in enumerate(zip(values, lowest, strict=True)):
        candidates = np.flatnonzero(row >= limit)
        columns[n] = candidates[np.argsort(-row[candidates], kind="stable")[:k]]
    pairs = columns.astype(np.float64), np.take_along_axis(values, columns, 1)
    return torch.from_numpy(np.stack(pairs, -1))


def log_proba_of(targets: ClassTargets, proba: np.ndarray, y: ArrayLike) -> np.ndarray:
    """Return the finite log-probability of each sample's labels, (n,)."""
    labels = targets.check(y)
    known = ~targets.is_ignored(labels)
    codes = targets.target_type.encode(labels[known], targets.classes)
    chosen = proba[known.ravel()][np.arange(len(codes)), codes.ravel()]
    found = np.zeros(labels.shape)
    found[known] = np.log(np.maximum(chosen, np.finfo(np.float64).tiny))
    return found.reshape(len(labels), -1).sum(1)
