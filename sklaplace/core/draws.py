"""Draws: random numbers that belong to a row, whatever comes with it.

A row's numbers are made of its own content, so that they depend neither on the batch
nor on the order of rows, and equal rows have equal ones.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sklaplace.core.trees import leaves

# odd constants of splitmix64 (Steele, Lea and Flood 2014, "Fast splittable
# pseudorandom number generators")
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def row_hash(x: Any) -> Tensor:
    """One number per row, (b,), int64, from its content.

    Parameters
    ----------
    x : Tensor, or dict, list or tuple of tensors
        One batch of b rows.
    """
    parts = list(leaves(x))
    keys = np.zeros(len(parts[0]), dtype=np.uint64)
    for leaf in parts:
        keys = _mixed(keys + _hashed(leaf))
    return torch.from_numpy(keys.view(np.int64))


def counter_uniforms(keys: Tensor, n: int, seed: int = 0) -> Tensor:
    """Numbers strictly between zero and one, (b, n), float64, on the CPU."""
    salt = _mixed(np.array([seed], dtype=np.uint64))
    start = keys.cpu().numpy().view(np.uint64)[:, None] ^ salt
    bits = _mixed(start + _STEP * np.arange(1, n + 1, dtype=np.uint64))
    # 52 bits and a half: neither end is reached
    return torch.from_numpy(((bits >> np.uint64(12)) + 0.5) * 2.0**-52)


def _hashed(rows: Tensor) -> np.ndarray:
    """A hash of the bytes of each row, (b,), uint64."""
    plain = rows.detach().cpu().contiguous()
    if plain.is_floating_point():
        plain = plain + 0.0  # one zero, whatever its sign
    data = plain.reshape(len(plain), -1).view(torch.uint8).numpy()
    words = np.zeros((len(data), -(-data.shape[1] // 8) * 8), dtype=np.uint8)
    words[:, : data.shape[1]] = data
    numbers = words.view(np.uint64)
    places = _mixed(_STEP * np.arange(1, numbers.shape[1] + 1, dtype=np.uint64))
    hashed: np.ndarray = (_mixed(numbers) * (places | np.uint64(1))).sum(1)
    return hashed


def _mixed(z: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a one-to-one map in which each bit moves half."""
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed
