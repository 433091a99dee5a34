"""Packing: skorch nets and tensors as pickle stores them here."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from skorch import NeuralNet
from torch import Tensor


def reduced_net(net: NeuralNet, left_out: Iterable[str] = ()) -> Any:
    """Return what pickle stores of a net: its attributes.

    skorch pickles modules apart, by plain pickle, which lacks the classes of a script.

    Parameters
    ----------
    net : skorch.NeuralNet
        The net.
    left_out : iterable of str, default=()
        Attributes that are None in the copy.
    """
    state = dict(vars(net)) | dict.fromkeys(left_out)
    return object.__new__, (type(net),), state, None, None, _set_attributes


def _set_attributes(net: NeuralNet, state: dict[str, Any]) -> None:
    vars(net).update(state)


def reduced_as_array(value: Tensor) -> Any:
    """Return what pickle stores of a plain tensor as an array, None for others.

    As arrays tensors load several times as fast as in torch's own form.
    """
    is_plain = value.is_contiguous() and value.device.type == "cpu"
    if is_plain and not (value.requires_grad or vars(value)):
        with suppress(TypeError, RuntimeError):  # of torch's dtypes
            return torch.from_numpy, (value.numpy(),)
    return None
