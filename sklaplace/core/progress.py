"""Printed messages and progress bars of a fit.

`reporting` opens a scope for one estimator. Phases and loops inside the scope need no
extra arguments. A scope belongs to one thread, so code in other threads or processes
prints nothing. Estimators do not store scopes.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class Reporter:
    """Messages and progress bar of one scope.

    Parameters
    ----------
    title : str
        Name of the estimator, at the start of each line.
    verbose : int or bool
        0 prints nothing, 1 prints phases with their durations, and 2 also shows
        progress bars. Invalid values are treated as 0 here, and raise an error later.
    """

    def __init__(self, title: str, verbose: Any) -> None:
        is_known = isinstance(verbose, Integral | np.bool_)
        self.title, self.verbose = title, int(verbose) if is_known else 0
        self.in_phase, self.bar = False, None

    def line(self, text: str) -> None:
        """Print a line, unless the scope is silent."""
        if self.verbose > 0:
            print(f"[{self.title}] {text}")  # noqa: T201

    def open_bar(self, label: str, total: int) -> Any:
        """Return a new bar, or None if a bar is already open or bars are not shown.

        Bars are shown if ``verbose`` is at least 2 and tqdm is installed.
        """
        if self.verbose < 2 or self.bar is not None or (new := _bars()) is None:
            return None
        self.bar = new(total=total, desc=f"[{self.title}] {label}", leave=False)
        return self.bar

    def close_bar(self) -> None:
        """Close the bar, if one is open."""
        if self.bar is not None:
            bar, self.bar = self.bar, None
            bar.close()


class _Scopes(threading.local):
    """The current scope of each thread, silent by default."""

    current = Reporter("", 0)


_scopes = _Scopes()


def _bars() -> Callable[..., Any] | None:
    """Return tqdm's bar class for a terminal or notebook, or None without tqdm."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm


@contextmanager
def reporting(title: str, verbose: object) -> Iterator[Reporter]:
    """Open a scope, and restore the enclosing scope afterwards.

    The bar is closed even after an error.
    """
    around, reporter = _scopes.current, Reporter(title, verbose)
    _scopes.current = reporter
    try:
        yield reporter
    finally:
        reporter.close_bar()
        _scopes.current = around


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Print the name and duration of a phase when it ends.

    Nested phases are part of the outer phase and are not printed.
    """
    reporter = _scopes.current
    if reporter.in_phase or reporter.verbose < 1:
        yield
        return
    reporter.in_phase, start = True, time.perf_counter()
    try:
        yield
    finally:
        reporter.in_phase = False
        reporter.close_bar()
    reporter.line(f"{name}: {duration(time.perf_counter() - start)}")


def line(text: str) -> None:
    """Print a line, except within a phase, where one line is printed at the end."""
    if not (reporter := _scopes.current).in_phase:
        reporter.line(text)


def tracked(items: Iterable[T], label: str, total: int) -> Iterator[T]:
    """Yield items, with a progress bar if bars are shown.

    A nested loop shows a bar only if the outer loop has a single step.
    """
    reporter = _scopes.current
    bar = reporter.open_bar(label, total) if total > 1 else None
    try:
        for item in items:
            yield item
            if bar is not None:
                bar.update()
    finally:
        # the phase may have closed the bar before this iterator ends
        if bar is not None and reporter.bar is bar:
            reporter.close_bar()


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes and seconds, or hours and minutes."""
    if seconds < 0.05:  # would be 0.0 s
        return "under 0.1 s"
    if seconds < 59.95:  # from here on, 60.0 s
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return "{} h {} min".format(*divmod(minutes, 60))
