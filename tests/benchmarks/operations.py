"""Operations: what is timed, told apart from what has to be there before.

A library offers operations by name for a `Case`; each process builds its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.workloads import Workload, comparable, workload


@dataclass(frozen=True)
class Case:
    """What an operation works on; small, since it travels between processes."""

    workload: str  # key of ``WORKLOADS``, or "digits"
    subset: str = "last_layer"
    structure: str = "kron"
    backend: str | None = None  # of laplace-torch
    is_quick: bool = False  # tiny sizes
    # without what libraries define differently, see `workloads.comparable`
    is_comparable: bool = False

    def __str__(self) -> str:
        """Short, for titles and names of tests."""
        subset = self.subset.replace("_layer", "")
        return f"{self.workload} {subset}/{self.structure}"

    def load(self) -> Workload:
        found = workload(self.workload, is_quick=self.is_quick)
        return comparable(found) if self.is_comparable else found


@dataclass(frozen=True)
class Operation:
    """A function to time, and one that makes a fresh argument for each call."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Any]

    def __call__(self) -> Any:
        return self.run(self.prepare())


def nothing() -> None:
    """Prepare nothing."""


class NotOfferedError(Exception):
    """The installed version of a library cannot do this."""


class Library(Protocol):
    """One of the libraries that are compared."""

    versions: tuple[str, ...]

    def operation(self, case: Case, name: str) -> Operation:
        """Build an operation; what comes before it happens here, untimed."""

    def moments(self, case: Case) -> Any:
        """Means (n, c) and covariances (n, c, c) of outputs, all in float64."""
