"""Residuals of held-out samples, and the predictions that a noise model depends on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sklaplace.core.trees import Batch
from sklaplace.data.split import groups_of_copies, separate_replicates, shared_keys

Array = NDArray[np.float64]
Keys = NDArray[np.integer]

# Number of groups of residuals. Functions for a group are fitted to the other groups.
N_GROUPS = 5
# With more features or inputs than this, a noise model ignores all of them.
MOST_INPUTS = 1000
# Upper bound on the leverage of a sample when its leave-one-out variance is computed,
# which would be infinite for a leverage of one.
MOST_LEVERAGE = 0.95


@dataclass(frozen=True)
class Predictions:
    """Predictions from which a noise model computes the noise.

    Attributes
    ----------
    features : Tensor of shape (n, i)
        Features from the network. If the network has no features, i is 0.
    inputs : Tensor of shape (n, p)
        Inputs of the network. Unless the inputs are a single table, p is 0.
    mean, variance : Tensor of shape (n, c)
        Moments of the noise-free outputs.
    """

    features: Tensor
    inputs: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def of(
        cls, features: Tensor | None, x: Batch, mean: Tensor, variance: Tensor
    ) -> "Predictions":
        """Return the predictions of a batch, float64.

        Features or inputs that are missing, too many or not a table have no columns.
        """
        none = mean[:, :0].double()  # a table without columns
        inputs = x if isinstance(x, Tensor) and x.ndim == 2 else none
        features = none if features is None else features
        return cls(
            features=none if features.shape[1] > MOST_INPUTS else features.double(),
            inputs=none if inputs.shape[1] > MOST_INPUTS else inputs.double(),
            mean=mean.double(),
            variance=variance.double(),
        )


@dataclass(frozen=True)
class Residuals:
    """Residuals of held-out samples.

    Attributes
    ----------
    predictions : Predictions
        Moments predicted by networks that were not trained on the samples.
    values : ndarray of shape (n, c)
        Targets minus means.
    weights : ndarray of shape (n,)
        Positive sample weights.
    keys : ndarray of shape (n,)
        Hashes of the groups or, without groups, of the inputs.
    """

    predictions: Predictions
    values: Array
    weights: Array
    keys: Keys

    @property
    def group(self) -> Keys:
        """Group (n,) of each residual, below `N_GROUPS`; equal keys share a group.

        Distinct keys are numbered in ascending order. As keys are hashes, the numbers
        modulo `N_GROUPS` are arbitrary groups of about equal size.
        """
        return np.unique(self.keys, return_inverse=True)[1] % N_GROUPS


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
    groups : ndarray of shape (n, 1) or (n, 0)
        Hashes of the groups. If the user passed no groups, there is no column.
    """

    features: Array
    inputs: Array
    mean: Array
    variance: Array
    variance_if_seen: Array
    targets: Array
    weights: Array
    keys: Keys
    groups: Keys

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.keys)

    def __getitem__(self, rows: NDArray[np.bool_]) -> "HeldOutRows":
        """Select samples."""
        return HeldOutRows(**{name: array[rows] for name, array in vars(self).items()})

    @classmethod
    def joined(cls, parts: Sequence["HeldOutRows"]) -> "HeldOutRows":
        """Join samples."""
        arrays = {name: [vars(part)[name] for part in parts] for name in vars(parts[0])}
        return cls(**{name: np.concatenate(values) for name, values in arrays.items()})


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
    # without groups, samples with equal inputs form a group
    groups = rows.groups[:, 0] if rows.groups.size else keys
    keys = separate_replicates(keys, rows.targets)  # equal for copies only
    # consecutive numbers instead of hashes, because floats represent them exactly
    numbers = [np.unique(hashes, return_inverse=True)[1] for hashes in (keys, groups)]
    # copies in different folds may have different residuals, and are then kept apart
    copies = groups_of_copies(np.column_stack([*numbers, residuals]))
    # first copy of each sample, in an order that depends on the hashes alone
    order = np.lexsort((keys, groups))
    first = order[np.sort(np.unique(copies[order], return_index=True)[1])]
    weights = np.bincount(copies, weights=rows.weights)[copies[first]]
    groups = groups[first]
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if rows.groups.size:
        weights = weights / sizes[group]
    totals = np.bincount(group, weights=weights)  # weight of each group
    return Residuals(
        predictions=Predictions(
            features=torch.from_numpy(rows.features[first]),
            inputs=torch.from_numpy(rows.inputs[first]),
            mean=torch.from_numpy(rows.mean[first]),
            variance=torch.from_numpy(variance[first]),
        ),
        values=residuals[first],
        # the sum becomes the effective number of groups, (Σ w)² / Σ (group totals)²
        weights=weights * weights.sum() / (totals**2).sum(),
        keys=groups,
    )


def _rescaled_variance(rows: HeldOutRows, levels: Array) -> Array:
    """Return variances (n, c) as if the network for predictions had not seen a sample.

    The network of a fold has larger variances than the network for predictions, because
    it was trained on fewer samples. In a linear model with noise level s, leaving a
    sample with variance v out of the training increases its variance to
    v / (1 - v / s²). The variances in each column are divided by the weighted median of
    their ratios to this value, if the median exceeds one.
    """
    # v / s² is the leverage of the sample in the linear model
    leverage = np.minimum(rows.variance_if_seen / levels**2, MOST_LEVERAGE)
    variance_if_unseen = rows.variance_if_seen / (1 - leverage)
    ratios = rows.variance / np.maximum(variance_if_unseen, np.finfo(float).tiny)
    return rows.variance / np.maximum(1, weighted_median(ratios, rows.weights))


def weighted_median(values: Array, weights: Array) -> Array:
    """Return the weighted median of each column, (c,).

    It is the mean of the lower and the upper median.
    """

    def lower_median(values: Array) -> Array:
        """Return the smallest value up to which half the weight lies, (c,)."""
        half = np.quantile(values, 0.5, 0, weights=weights, method="inverted_cdf")
        return np.asarray(half)

    # the upper median is minus the lower median of the negative values
    return np.asarray(np.mean([lower_median(values), -lower_median(-values)], axis=0))
