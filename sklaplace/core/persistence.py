"""Persistence: what pickle keeps of an object, in a file and on the way to a worker."""

import copyreg
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from typing import Any

_IS_FOR_WORKER: ContextVar[bool] = ContextVar("is_for_worker", default=False)


@contextmanager
def for_worker() -> Iterator[None]:
    """Pickle for another process, which continues a computation and returns at once.

    What objects have cached goes along, and what is sent in another form does not.
    """
    token = _IS_FOR_WORKER.set(True)
    try:
        yield
    finally:
        _IS_FOR_WORKER.reset(token)


class FieldsOnly:
    """A dataclass that is pickled without what it has cached."""

    def __getstate__(self) -> dict[str, Any]:
        """Fields alone, from which the rest is computed again."""
        if _IS_FOR_WORKER.get():
            return dict(vars(self))
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


def worker_state(state: dict[str, Any], sent_apart: Iterable[str]) -> dict[str, Any]:
    """Return a state, `for_worker` without some entries, and unchanged otherwise."""
    if not _IS_FOR_WORKER.get():
        return state
    return {k: v for k, v in state.items() if k not in {*sent_apart}}


def pickled(value: Any, state: dict[str, Any]) -> Any:
    """What ``__reduce_ex__`` returns for an object with a state that pickle takes.

    That of a subclass of a user's comes first.
    """
    if not type(value).__getstate__.__module__.startswith("sklaplace."):
        return object.__reduce_ex__(value, 2)
    return copyreg.__newobj__, (type(value),), state  # type: ignore[attr-defined]
