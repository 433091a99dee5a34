"""History: what the training of a skorch net has recorded of its own split."""

from collections.abc import Iterator

import numpy as np
from skorch import NeuralNet
from skorch.dataset import unpack_data

from sklaplace.core.random import private_rng
from sklaplace.networks.streams import Samples

# relative difference of losses that order of sums and instructions explain
_TOLERANCE = 1e-4


def recorded_split(
    net: NeuralNet, X: object, y: np.ndarray
) -> tuple[Samples, Samples] | None:
    """Training and validation data of a trained net, where its history proves them.

    The ``train_split`` of the net is applied anew. It gives the samples that the net
    held out if the history has recorded their loss at its weights, in the last epoch or
    in the best one.

    Parameters
    ----------
    net : skorch.NeuralNet
        Trained; a copy, whose mode may change.
    X, y : data
        What it may have been trained on, without weights.

    Returns
    -------
    train, valid : Dataset, or None

    Notes
    -----
    One forward pass over the validation data. A split that draws at random anew each
    time is not recognised.
    """
    losses = list(_recorded_losses(net))
    if not (losses and callable(net.train_split)):
        return None
    dataset = net.get_dataset(X, y)
    with private_rng(None):
        try:
            train, valid = net.train_split(dataset, y)
            loss = _validation_loss(net, valid)
        except (IndexError, RuntimeError, TypeError, ValueError):
            return None  # trained on other samples or targets
    is_close = np.isclose(losses, loss, rtol=_TOLERANCE, atol=0)
    return (train, valid) if is_close.any() else None


def _recorded_losses(net: NeuralNet) -> Iterator[float]:
    """Validation loss of each epoch, as skorch averages it over batches."""
    for epoch in getattr(net, "history_", None) or []:
        if any("valid_loss" in batch for batch in epoch["batches"]):
            names = "valid_loss", "valid_batch_size"
            batches = [[b[n] for n in names] for b in epoch["batches"] if names[0] in b]
            losses, sizes = np.transpose(batches)
            yield float(np.average(losses, weights=sizes))


def _validation_loss(net: NeuralNet, valid: Samples) -> float:
    """Return the validation loss at the weights of the net."""
    losses, sizes, is_flat = [], [], None
    for batch in net.get_iterator(valid, training=False):
        X, y = unpack_data(batch)
        if is_flat is None:  # or criteria would broadcast (b,) against (b, 1)
            outputs = net.evaluation_step(batch, training=False)
            is_flat = getattr(outputs, "ndim", 2) == 1 and y.shape[1:] == (1,)
        step = net.validation_step((X, y[:, 0] if is_flat else y))
        losses.append(float(step["loss"]))
        sizes.append(len(y))
    return float(np.average(losses, weights=sizes))
