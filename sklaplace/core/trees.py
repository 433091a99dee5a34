"""Trees of tensors: network inputs in nested dicts, lists and tuples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# Samples as users pass them, and a batch as the network receives it.
Inputs: TypeAlias = (
    ArrayLike | Mapping[str, ArrayLike] | Sequence[Any] | Dataset[Any] | DataLoader[Any]
)
Batch: TypeAlias = Tensor | dict[str, Any] | list[Any] | tuple[Any, ...]


def leaves(x: object) -> Iterator[Any]:
    """Yield the leaves of a tree; dicts are read in the order of sorted keys."""
    if isinstance(x, (dict, list, tuple)):
        children = [x[key] for key in sorted(x)] if isinstance(x, dict) else x
        yield from chain.from_iterable(map(leaves, children))
    else:
        yield x


def mapped(function: Callable[[Any], Any], x: object) -> Any:
    """Apply a function to each leaf of a tree."""
    if isinstance(x, dict):
        return {key: mapped(function, value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return _maker(x)(mapped(function, value) for value in x)
    return function(x)


def mapped_tensors(
    function: Callable[[Any], Any], value: object, kinds: Any = (Tensor, nn.Module)
) -> Any:
    """Apply a function to objects of some kinds in sequences and dataclasses.

    ``kinds`` is a type or a tuple of types. Values without changed parts are returned
    unchanged; other values are copied. A value that several objects share is mapped
    once and stays shared.
    """
    memo: dict[int, Any] = {}  # mapped values, by the ``id`` of the original

    def mapped_once(value: object) -> Any:
        # the caller's value keeps all originals alive, so no ``id`` is used twice
        if id(value) not in memo:
            memo[id(value)] = rebuilt(value)
        return memo[id(value)]

    def rebuilt(value: object) -> Any:
        if isinstance(value, kinds):
            return function(value)
        # a torch.Size is a tuple without tensors
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            new = type(value)(map(mapped_once, value))
            is_unchanged = all(a is b for a, b in zip(new, value, strict=True))
            return value if is_unchanged else new
        if is_dataclass(value) and not isinstance(value, type):
            old = {field.name: getattr(value, field.name) for field in fields(value)}
            entries = {name: mapped_once(entry) for name, entry in old.items()}
            # an unchanged object keeps its cached properties
            is_unchanged = all(entries[name] is old[name] for name in old)
            return value if is_unchanged else type(value)(**entries)
        return value

    return mapped_once(value)


def _maker(x: object) -> Callable[[Any], Any]:
    """Return the constructor for a list, tuple or named tuple."""
    return getattr(type(x), "_make", type(x))


def copied(x: object) -> Any:
    """Copy a tree and its tensors."""
    return mapped(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, x)


def tree_rows(x: object, rows: slice | int | Tensor) -> Any:
    """Select samples from a batch, which is a tree of tensors."""
    return mapped(lambda leaf: leaf[rows], x)


def without_groups(x: object) -> tuple[Any, int]:
    """Flatten tensors (b, q, ...) to samples (b·q, ...); return them and q.

    Raise ValueError unless all tensors have the same second axis with q > 0.
    """
    # (q,) of each tensor, or () without a second axis
    group_sizes = {tuple(leaf.shape[1:2]) for leaf in leaves(x)}
    # different sizes, no second axis, or an empty one
    if len(group_sizes) > 1 or group_sizes & {(), (0,)}:
        shapes = [tuple(leaf.shape) for leaf in leaves(x)]
        raise ValueError(
            f"x has no groups of samples in its second axis: shapes {shapes}. Pass "
            "tensors of shape (b, q, ...) with the same q > 0, or joint=False."
        )
    q = next(leaves(x)).shape[1]
    return mapped(lambda leaf: leaf.flatten(0, 1), x), q
