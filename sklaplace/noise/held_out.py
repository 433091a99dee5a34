"""HeldOutRows: held-out samples with predictions, and their residuals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sklaplace.data.split import groups_of_copies, separate_replicates, shared_keys
from sklaplace.noise.residuals import Predictions, Residuals

Array = NDArray[np.float64]
Keys = NDArray[np.integer]

# Upper bound on the leverage of a sample when its leave-one-out variance is computed.
MOST_LEVERAGE = 0.95


@dataclass(frozen=True)
class HeldOutRows:
    """Held-out samples, with predictions of networks that were not trained on them.

    Attributes
    ----------
    features, inputs, mean, variance : ndarray of shape (n, ...)
        Arrays of `Predictions`. The network for predictions provides the features.
    variance_if_seen : ndarray of shape (n, c)
        Variances from the network for predictions, which may have been trained on the
        samples.
    targets : ndarray of shape (n, c)
        Targets in the units of the means.
    weights : ndarray of shape (n,)
        Sample weights.
    keys : ndarray of shape (n,)
        Hashes of the inputs.
    groups : ndarray of shape (n,) or None
        Hashes of the groups, or None without groups.
    """

    features: Array
    inputs: Array
    mean: Array
    variance: Array
    variance_if_seen: Array
    targets: Array
    weights: Array
    keys: Keys
    groups: Keys | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.keys)

    def __getitem__(self, rows: NDArray[np.bool_]) -> "HeldOutRows":
        """Select samples."""
        return HeldOutRows(**{name: a[rows] for name, a in self._arrays().items()})

    @classmethod
    def joined(cls, parts: Sequence["HeldOutRows"]) -> "HeldOutRows":
        """Join samples. Either all parts have groups, or none."""
        arrays = [part._arrays() for part in parts]
        names = arrays[0].keys()
        return cls(
            **{name: np.concatenate([a[name] for a in arrays]) for name in names}
        )

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """Return all arrays by name; without groups, ``"groups"`` is missing."""
        return {name: array for name, array in vars(self).items() if array is not None}


def held_out_residuals(rows: HeldOutRows, levels: Array) -> Residuals:
    """Return the residuals of held-out samples.

    Parameters
    ----------
    rows : HeldOutRows
        Samples and their predictions.
    levels : ndarray of shape (c,)
        Constant noise levels.

    Notes
    -----
    Copies of a sample count as one residual, with the sum of their weights. Weights are
    divided by the number of residuals of the group, so that all groups count equally.
    The sum of the weights is then scaled to the effective number of groups or, without
    groups, of distinct inputs (Kish 1965). More residuals at the same inputs do not
    show how the noise depends on the inputs.
    """
    rows = rows[rows.weights > 0]
    variance, residuals = _rescaled_variance(rows, levels), rows.targets - rows.mean
    keys = shared_keys(rows.inputs, rows.keys) if rows.inputs.size else rows.keys
    groups = keys if rows.groups is None else rows.groups
    keys = separate_replicates(keys, rows.targets)
    # copies may have different predictions, from different folds
    labels = [np.unique(values, return_inverse=True)[1] for values in (keys, groups)]
    copies = groups_of_copies(np.column_stack([*labels, residuals]))
    order = np.lexsort((keys, groups))
    first = order[np.sort(np.unique(copies[order], return_index=True)[1])]
    weights = np.bincount(copies, weights=rows.weights)[copies[first]]
    _, group, sizes = np.unique(groups[first], return_inverse=True, return_counts=True)
    if rows.groups is not None:
        weights = weights / sizes[group]
    totals = np.bincount(group, weights=weights)
    return Residuals(
        predictions=Predictions(
            features=torch.from_numpy(rows.features[first]),
            inputs=torch.from_numpy(rows.inputs[first]),
            mean=torch.from_numpy(rows.mean[first]),
            variance=torch.from_numpy(variance[first]),
        ),
        values=residuals[first],
        # the sum of the weights is the effective number of groups
        weights=weights * weights.sum() / (totals**2).sum(),
        keys=groups[first],
    )


def _rescaled_variance(rows: HeldOutRows, levels: Array) -> Array:
    """Return variances (n, c) as if the network for predictions had not seen a sample.

    The network of a fold has larger variances than the network for predictions, because
    it was trained on fewer samples. In a linear model with noise level s, leaving a
    sample with variance v out of the training increases its variance to
    v / (1 - v / s²). The variances in each column are divided by the weighted median of
    their ratios to this value, if the median exceeds one.
    """
    leverage = np.minimum(rows.variance_if_seen / levels**2, MOST_LEVERAGE)
    variance_if_unseen = rows.variance_if_seen / (1 - leverage)
    ratios = rows.variance / np.maximum(variance_if_unseen, np.finfo(float).tiny)
    return rows.variance / np.maximum(1, weighted_median(ratios, rows.weights))


def weighted_median(values: Array, weights: Array) -> Array:
    """Return the weighted median of each column, (c,)."""
    # the lower and the upper median
    pair = [
        sign
        * np.quantile(sign * values, 0.5, 0, weights=weights, method="inverted_cdf")
        for sign in (1, -1)
    ]
    return np.asarray(np.mean(pair, axis=0))
