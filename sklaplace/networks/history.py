"""History: what the training of a skorch net has recorded of its own split."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from skorch.dataset import unpack_data

from sklaplace.core.random import private_rng

# relative difference of losses that order of sums and instructions explain
_TOLERANCE = 1e-4


def recorded_split(net: Any, X: Any, y: np.ndarray) -> tuple[Any, Any] | None:
    """Training and validation data of a trained net, where its history proves them.

    The ``train_split`` of the net is applied anew. It gives the samples that the net
    held out if their loss at its weights is one that the history has recorded: that of
    the last epoch, or of the best one.

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
            return None  # other samples or targets than those of its training
    is_close = np.isclose(losses, loss, rtol=_TOLERANCE, atol=0)
    return (train, valid) if is_close.any() else None


def untrained(net: Any, n_samples: int) -> Any | None:
    """Return a net that can be trained as a net was, if its history tells how.

    Its module is constructed anew, and it has as many epochs as were recorded.

    Parameters
    ----------
    net : skorch.NeuralNet
        Trained.
    n_samples : int
        Samples that it should have been trained on.

    Returns
    -------
    net : skorch.NeuralNet or None
        A clone with new parameters. None where an epoch has recorded another number of
        samples, or where the module was an instance, whose weights are no longer those
        before training.
    """
    epochs = getattr(net, "history_", None) or []
    sizes = {_n_recorded(epoch) for epoch in epochs}
    if sizes != {n_samples} or isinstance(net.module, torch.nn.Module):
        return None
    return clone(net).set_params(max_epochs=len(epochs))


def _n_recorded(epoch: dict[str, Any]) -> int:
    """Training and validation samples of an epoch."""
    names = "train_batch_size", "valid_batch_size"
    return sum(batch.get(name, 0) for batch in epoch["batches"] for name in names)


def _recorded_losses(net: Any) -> Iterator[float]:
    """Validation loss of each epoch, as skorch averages it over batches."""
    names = "valid_loss", "valid_batch_size"
    for epoch in getattr(net, "history_", None) or []:
        batches = [[b[n] for n in names] for b in epoch["batches"] if names[0] in b]
        if batches:
            losses, sizes = np.transpose(batches)
            yield float(np.average(losses, weights=sizes))


def _validation_loss(net: Any, valid: Any) -> float:
    """The same at the weights of the net."""
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
