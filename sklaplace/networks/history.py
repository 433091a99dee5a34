"""History: recover a skorch net's train/validation split from its training history."""

from collections.abc import Iterator

import numpy as np
from skorch import NeuralNet
from skorch.dataset import unpack_data

from sklaplace.core.checks import warn_user
from sklaplace.core.random import private_rng
from sklaplace.data.dataset import first_rows
from sklaplace.data.streams import Samples
from sklaplace.networks.outputs import match_axes

# relative difference of losses due to summation order and CPU instructions
_TOLERANCE = 1e-4


def recorded_split(
    net: NeuralNet, X: object, y: np.ndarray
) -> tuple[Samples, Samples] | None:
    """Return a trained net's training and validation data, confirmed by its history.

    The net's ``get_split_datasets`` is called again. The split is confirmed if the
    validation loss at the current weights matches the history at any epoch, usually the
    last or the best. Otherwise, a warning says so.

    Parameters
    ----------
    net : skorch.NeuralNet
        Copy of a trained net. Its mode may change.
    X, y : data
        Candidate training data, without sample weights.

    Returns
    -------
    train, valid : Dataset, or None
        None if the history has no validation loss, or if the split is not confirmed.

    Notes
    -----
    This check costs one forward pass over the validation data. A split that changes
    with every call is not recognised.
    """
    if not (losses := list(_recorded_losses(net))):
        return None
    with private_rng(None):  # leaves torch's generators unchanged
        try:
            # as in training: the net's loss needs y with the axes of the outputs
            y = match_axes(net, first_rows(net, net.get_dataset(X, y)), y)
            train, valid = net.get_split_datasets(X, y)
            loss = _validation_loss(net, valid)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            # the net was trained on other samples or targets; NaN is close to no loss
            loss = np.nan
    if np.isclose(losses, loss, rtol=_TOLERANCE, atol=0).any():
        return train, valid
    warn_user(
        "The frozen net held out samples in its training, but splitting X does not "
        "repeat that split: its loss is not in the history. Pass X and y in the order "
        "of the training, or better the samples that it held out as X_val and y_val."
    )
    return None


def _recorded_losses(net: NeuralNet) -> Iterator[float]:
    """Yield the validation loss of each epoch, averaged over batches as in skorch."""
    for epoch in getattr(net, "history_", None) or []:
        batches = [batch for batch in epoch["batches"] if "valid_loss" in batch]
        if batches:
            losses = [batch["valid_loss"] for batch in batches]
            sizes = [batch["valid_batch_size"] for batch in batches]
            yield float(np.average(losses, weights=sizes))


def _validation_loss(net: NeuralNet, valid: Samples) -> float:
    """Return the validation loss at the net's current weights."""
    losses, sizes = [], []
    for batch in net.get_iterator(valid, training=False):
        losses.append(float(net.validation_step(batch)["loss"]))
        sizes.append(len(unpack_data(batch)[1]))
    return float(np.average(losses, weights=sizes))
