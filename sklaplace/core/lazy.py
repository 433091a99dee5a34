"""Lazy: properties that are computed once."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: N801
    """`functools.cached_property` without the lock that it has in Python 3.11.

    That lock is one for all instances. A process which is forked while another thread
    computes the property has a copy of it that nobody releases.
    """

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock = nullcontext()
