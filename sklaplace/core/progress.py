"""Progress: what a fit prints about itself, and progress bars.

`reporting` opens a scope for one estimator; phases and loops within it need not be
handed anything. A scope belongs to its thread: code that runs in other threads, or in
processes of joblib, prints nothing. Nothing of it is stored in an estimator.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

_scopes = threading.local()


class Reporter:
    """What is printed in one scope.

    Parameters
    ----------
    title : str
        Name of the estimator, which lines begin with.
    verbose : int or bool
        0 is silent, 1 prints phases with their time, 2 shows progress bars as well.
        Others than these are refused later, and are silent here.
    """

    def __init__(self, title: str, verbose: Any) -> None:
        is_known = isinstance(verbose, Integral | np.bool_)
        self.title, self.verbose = title, int(verbose) if is_known else 0
        self.process = os.getpid()  # a fork has the scope of its parent
        self.in_phase, self.bar, self.counted = False, None, ""

    def line(self, text: str) -> None:
        """Print a line, unless the scope is silent."""
        if self.verbose > 0:
            print(f"[{self.title}] {text}")  # noqa: T201

    def open_bar(self, label: str, total: int | None) -> Any:
        """Return a new bar; None if there is one already, or none is to be shown."""
        if self.verbose < 2 or self.bar is not None or (new := _bars()) is None:
            return None
        self.bar = new(total=total, desc=f"[{self.title}] {label}", leave=False)
        self.counted = label if total is None else ""
        return self.bar

    def close_bar(self) -> None:
        """Close the bar, if there is one."""
        if self.bar is not None:
            bar, self.bar = self.bar, None
            bar.close()


_SILENT = Reporter("", 0)


def _current() -> Reporter:
    found: Reporter = getattr(_scopes, "current", _SILENT)
    return found if found.process == os.getpid() else _SILENT


def _bars() -> Callable[..., Any] | None:
    """Return the class of bars, for a terminal or a notebook; None without tqdm."""
    try:
        with warnings.catch_warnings():
            # of notebooks without widgets, in which bars are text
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm


@contextmanager
def reporting(title: str, verbose: Any) -> Iterator[Reporter]:
    """Open a scope; the one around it, if any, goes on after it.

    Its bar is closed in any case.
    """
    around, reporter = _current(), Reporter(title, verbose)
    _scopes.current = reporter
    try:
        yield reporter
    finally:
        reporter.close_bar()
        _scopes.current = around


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Print the name of a phase and the time that it took, once it has ended.

    Phases within another one are parts of it, and are not printed.
    """
    reporter = _current()
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
    """Print a line of the scope; within a phase none, as its end prints one."""
    if not (reporter := _current()).in_phase:
        reporter.line(text)


def shows_bars() -> bool:
    """Whether loops have progress bars."""
    return _current().verbose > 1


def tracked(items: Iterable[T], label: str, total: int) -> Iterator[T]:
    """Yield items, with a progress bar where there is one to show.

    Loops within the loop show none, unless this one has a single step.
    """
    reporter = _current()
    bar = reporter.open_bar(label, total) if total > 1 else None
    try:
        for item in items:
            yield item
            if bar is not None:
                bar.update()
    finally:
        if bar is not None and reporter.bar is bar:
            reporter.close_bar()


def count(label: str) -> None:
    """Count a step of a loop whose length is not known, in a bar.

    The bar stays open until the phase ends; loops within the step show none.
    """
    reporter = _current()
    reporter.open_bar(label, None)
    if reporter.bar is not None and reporter.counted == label:
        reporter.bar.update()


def duration(seconds: float) -> str:
    """Return a time as text: in seconds, minutes and seconds, or hours and minutes."""
    if seconds < 0.05:
        return "under 0.1 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return "{} h {} min".format(*divmod(minutes, 60))
