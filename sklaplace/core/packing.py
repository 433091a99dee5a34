"""Packing: tensors as pickle stores them in the form of arrays."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


def reduced_as_array(value: Tensor) -> Any:
    """Return what pickle stores of a plain tensor as an array, None for others.

    As arrays tensors load several times as fast as in torch's own form.
    """
    is_plain = value.is_contiguous() and value.device.type == "cpu"
    if is_plain and not (value.requires_grad or vars(value)):
        with suppress(TypeError, RuntimeError):  # of torch's dtypes
            return torch.from_numpy, (value.numpy(),)
    return None
