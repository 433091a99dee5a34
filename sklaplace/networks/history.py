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
# A loss is far larger than another if it is so by more than this fraction of it.
_UNLIKE = 2.0


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


def is_retraced(net: Any, dataset: Any, others: list[tuple[Any, Any]]) -> bool:
    """Whether nets that were trained anew can stand for a net.

    They cannot where it has learned from more than its history tells, as by weights
    that were loaded: its first epoch then has a far smaller loss than theirs. Nor
    where it was trained on other samples, as many as these: its loss is then far larger
    than that of the others, also on samples that they did not see.

    Parameters
    ----------
    net : skorch.NeuralNet
        Trained; a copy, whose mode may change.
    dataset : Dataset
        Samples that it should have been trained on.
    others : list of (skorch.NeuralNet, Dataset)
        Nets that were trained on some of the samples, and the rest.

    Notes
    -----
    One forward pass over the data, and one over the rest of each.
    """
    first = np.mean([_recorded_loss(other.history_[0], "train") for other, _ in others])
    with private_rng(None):
        try:
            seen = _validation_loss(net, dataset)
        except (IndexError, RuntimeError, TypeError, ValueError):
            return False  # other samples or targets than those of its training
        losses = [_validation_loss(*other) for other in others]
    held_out = np.average(losses, weights=[len(rest) for _, rest in others])
    recorded = _recorded_loss(net.history_[0], "train")
    return not (_is_larger(float(first), recorded) or _is_larger(seen, held_out))


def _is_larger(loss: float, other: float) -> bool:
    """Whether a loss, which may be negative, is far larger than another."""
    return not loss <= other + _UNLIKE * abs(other)


def _n_recorded(epoch: dict[str, Any]) -> int:
    """Training and validation samples of an epoch."""
    names = "train_batch_size", "valid_batch_size"
    return sum(batch.get(name, 0) for batch in epoch["batches"] for name in names)


def _recorded_losses(net: Any) -> Iterator[float]:
    """Validation loss of each epoch, as skorch averages it over batches."""
    for epoch in getattr(net, "history_", None) or []:
        if any("valid_loss" in batch for batch in epoch["batches"]):
            yield _recorded_loss(epoch, "valid")


def _recorded_loss(epoch: dict[str, Any], kind: str) -> float:
    """Mean loss of the training or validation samples of an epoch."""
    names = f"{kind}_loss", f"{kind}_batch_size"
    batches = [[b[n] for n in names] for b in epoch["batches"] if names[0] in b]
    losses, sizes = np.transpose(batches)
    return float(np.average(losses, weights=sizes))


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
