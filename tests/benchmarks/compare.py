"""Compare sklaplace with plain torch, and with laplace-torch if installed.

Usage::

    python tests/benchmarks/compare.py [--quick] [--only W2,W3] [--repeats N]

The script prints a Markdown table. The libraries take turns on one thread.

* Times are median CPU times, in units of the time that plain torch needs for the same
  rows: ``f`` is one forward pass, ``fb`` a forward and a backward pass. plain torch
  and laplace-torch use the batch size that suits them best (32 to 512); sklaplace
  chooses its own batch size.
* Memory is the peak of one more call, minus the resident memory before the call.
* Before the timings, the script compares the functional variances of both libraries
  in float64 for a few rows. laplace-torch then uses its fastest backend that agrees,
  with a ``DataLoader`` over a ``TensorDataset``.
* ``fit_ready`` is ``fit`` plus the eigendecompositions of Kronecker factors.
  sklaplace computes the decompositions at first use, laplace-torch in its fit. For
  ``kron``, ``fit_ready`` is compared with laplace-torch.
* ``tune`` only tunes the prior precision; ``fit_tune`` includes the fit and all
  decompositions.
* Numbers in brackets are targets, not results. Results that miss their target are
  bold.

Run nothing else on the machine at the same time. A full run takes about an hour.
``--quick`` takes some minutes and uses small sizes, which only show that everything
runs.

Set up an environment from the root of a checkout::

    python3 -m venv peers
    peers/bin/pip install torch -e .

Install laplace-torch without its requirements, which exclude current versions of some
packages::

    peers/bin/pip install --no-deps laplace-torch==0.3 curvlinops-for-pytorch \
        backpack-for-pytorch asdfghjkl==0.1a4 unfoldNd einconv torchmetrics \
        lightning-utilities
    peers/bin/pip install opt_einsum einops linear_operator tqdm packaging

Then ``peers/bin/python tests/benchmarks/compare.py``.
"""

import argparse
import ctypes
import gc
import importlib.util
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from benchmarks.libraries import (
    BACKENDS,
    Case,
    Operation,
    of_laplace_torch,
    of_sklaplace,
    of_torch,
    our_covariances,
    their_covariances,
)

# Calls shorter than this are repeated within one measurement.
SHORTEST = 0.05
# A call of laplace-torch may take this long.
LIMIT_SECONDS = 120
TOLERANCE = 1e-5
HAS_PEER = importlib.util.find_spec("laplace") is not None
UNITS = {"f_fit": "f", "f_predict": "f", "fb_fit": "fb"}
UNITS |= {"train": "net.fit", "train_folds": "(5 net.fit)"}


# ------------------------------------------------------------------------------ rows
@dataclass(frozen=True)
class Row:
    """An operation and its cost limits."""

    case: Case
    name: str
    unit: str  # operation of plain torch that it is measured in
    limit: float | None = None  # largest multiple of the unit
    speedup: float | None = None  # smallest quotient of laplace-torch's time and ours
    memory: float | None = None  # largest peak, in MiB over network and data

    @property
    def has_peer(self) -> bool:
        """Return whether laplace-torch supports the operation."""
        is_lazy = self.name == "fit" and self.case.structure == "kron"
        return HAS_PEER and self.case.workload != "digits" and not is_lazy


def rows_of(case: Case, unit: str, fit: Any, predict: Any, memory: Any) -> list[Row]:
    """Return the rows of a fit and its predictions, given a limit and speedup for each.

    sklaplace factorises Kronecker factors at first use, laplace-torch in its fit. The
    comparison with laplace-torch therefore uses a fit with factorisation.
    """
    limit, speedup = fit
    found = [Row(case, "fit", unit, limit, speedup, memory)]
    if case.structure == "kron":
        found.append(Row(case, "fit_ready", unit, None, speedup, memory))
    return [*found, Row(case, "predict", "f_predict", *predict, memory)]


def all_rows() -> list[Row]:
    """Return all timed operations."""
    found = []
    speedups = {"kron": 75, "diag": 10, "full": 10}
    for structure, speedup in speedups.items():
        # a full fit is bound by its matrix products, not by passes
        passes, more = (None, None) if structure == "full" else (1, 1.1)
        w2, w3, w4 = (Case(w, "last_layer", structure) for w in ("W2", "W3", "W4-256"))
        found += rows_of(w2, "fb_fit", (passes, 4), (2, speedup), 150)
        found += rows_of(w3, "fb_fit", (passes, None), (2, None), 150)
        found += rows_of(w4, "f_fit", (more, 2), (1.1, None), None)
    # the factors of 1,000 classes stay: 512² + 1000², or 512 · 1000, in float64
    for structure, peak in (("kron", 109.6), ("diag", 103.9)):
        w5 = Case("W5", "last_layer", structure)
        found += rows_of(w5, "f_fit", (6, None), (6, None), peak)
    speedups = {("W2", "kron"): 240, ("W2", "diag"): 100}
    speedups |= {("W3", "kron"): 20, ("W3", "diag"): 20}
    for structure, name in product(("kron", "diag"), ("W2", "W3", "W4-16")):
        case, is_kron = Case(name, "all", structure), structure == "kron"
        passes = 10 if is_kron and name == "W4-16" else 7 if is_kron else 6
        fit, predict = (
            (passes, 1.9 if is_kron else 2),
            (20, speedups.get((name, structure))),
        )
        found += rows_of(case, "fb_fit", fit, predict, 150)
    wide = rows_of(Case("W4", "all"), "fb_fit", (None, 1.9), (None, None), 8192)
    found += wide[:2]
    for name, fit, predict in (("W2-full", 4, 20), ("W1", 1, 1)):
        case = Case(name, "all", "full")
        found += rows_of(case, "fb_fit", (None, fit), (None, predict), None)
    for case, speedup in (
        (Case("W2"), 95),
        (Case("W2", "all"), 30),
        (Case("W2-full", "all", "full"), 50),
    ):
        found += [Row(case, "tune", "fb_fit", None, speedup)]
        found += [Row(case, "fit_tune", "fb_fit")]
    for name, unit, limit in (
        ("train", "train", 1.05),
        ("grid", "train_folds", 1.2),
        ("cross_validate", "train_folds", 1.2),
    ):
        found.append(Row(Case("digits"), name, unit, limit))
    return found


# ----------------------------------------------------------------------- measurements
def seconds(operation: Operation, number: int = 1) -> float:
    """Return the CPU time of one call, averaged over several calls."""
    prepare, run = operation
    arguments = [prepare() for _ in range(number)]
    gc.collect()
    start = time.process_time()
    for argument in arguments:
        run(argument)
    return (time.process_time() - start) / number


def times(operations: dict[str, Operation], repeats: int) -> dict[str, float]:
    """Return median CPU times of the libraries, which take turns."""
    first = {name: seconds(operation) for name, operation in operations.items()}
    number = {name: int(SHORTEST / max(t, 1e-5)) + 1 for name, t in first.items()}
    found: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(repeats):
        for name, operation in operations.items():
            found[name].append(seconds(operation, number[name]))
    return {name: median(values) for name, values in found.items()}


def peak(operation: Operation) -> float:
    """Return the peak of one call above the resident memory, in MiB, on Linux."""
    prepare, run = operation
    argument = prepare()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # a new peak begins
    before = resident("VmRSS")
    run(argument)
    return max(0.0, resident("VmHWM") - before)


def resident(name: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) / 1024


@contextmanager
def bounded() -> Iterator[None]:
    """Raise TimeoutError if the body takes too long."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def difference(case: Case, backend: str) -> float:
    """Return the largest difference of covariances, relative to the variances."""
    ours, theirs = our_covariances(case), their_covariances(case, backend)
    deviations = np.sqrt(np.diagonal(theirs, axis1=1, axis2=2))
    scale = deviations[:, :, None] * deviations[:, None, :]
    return float(np.abs((ours - theirs) / scale).max())


def peer_of(row: Row) -> tuple[str, Operation | None, float]:
    """Return laplace-torch's fastest correct backend, its operation and difference."""
    found: list[tuple[float, str, Operation, float]] = []
    for backend in BACKENDS:
        # a backend may lack the structure, the layers, or time and memory for both
        try:
            with bounded():
                off = difference(row.case, backend)
                operation = of_laplace_torch(row.case, row.name, backend)
                if off <= TOLERANCE:
                    found.append((seconds(operation), backend, operation, off))
        except Exception as error:
            say(f"{row.case} {row.name}, {backend}: {error!r}", file=sys.stderr)
    if not found:
        return "none", None, np.nan
    _, backend, operation, off = min(found, key=lambda entry: entry[0])
    return backend.removesuffix("GGN"), operation, off


# ----------------------------------------------------------------------------- report
HEADERS = "operation", "time", "in units (target)", "laplace-torch"
HEADERS += "ratio (target)", "MiB (target)", "its MiB", "agreement (backend)"


def judged(value: float, target: float | None, unit: str = "", sign: str = "≤") -> str:
    """Format a value with its target, in bold if the value misses the target."""
    text = f"{value:.3g}{unit}"
    if target is None:
        return text
    is_met = value <= target if sign == "≤" else value >= target
    text = f"{text} ({sign} {target:g})"
    return text if is_met else f"**{text}**"


def shown(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def measured(row: Row, repeats: int) -> list[str]:
    """Check one row, measure its time and memory, and return its table cells."""
    operations = {"torch": of_torch(row.case, row.unit)}
    operations["sklaplace"] = of_sklaplace(row.case, row.name)
    agreement = ""
    if row.has_peer:
        backend, operation, off = peer_of(row)
        agreement = f"{off:.0e} ({backend})"
        if operation is not None:
            operations["laplace-torch"] = operation
    found = times(operations, repeats)
    peaks = {name: peak(operations[name]) for name in operations if name != "torch"}
    mine = found["sklaplace"]
    cells = [
        f"{row.case} {row.name}",
        shown(mine),
        judged(mine / found["torch"], row.limit, f" {UNITS[row.unit]}"),
        *("", ""),
        judged(peaks["sklaplace"], row.memory),
        *("", agreement),
    ]
    if "laplace-torch" in found:
        theirs, n_rows = found["laplace-torch"], row.case.load().peer_rows
        cells[3], cells[6] = shown(theirs), f"{peaks['laplace-torch']:.3g}"
        cells[4] = judged(theirs / mine, row.speedup, "×", "≥")
        if n_rows is not None:  # it cannot take all, so that there is no quotient
            cells[3], cells[4] = f"{cells[3]} ({n_rows} rows)", ""
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one call")
    parser.add_argument("--only", default="", help="parts of titles: W2,digits")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    parts = options.only.split(",")
    rows = [row for row in all_rows() if any(p in f"{row.case}" for p in parts)]
    if options.quick:
        small = partial(replace, is_quick=True)
        rows = [replace(row, case=small(row.case)) for row in rows]
    if not HAS_PEER:
        say("laplace-torch is not installed: its columns stay empty.", file=sys.stderr)
    for row in (HEADERS, ["---"] * len(HEADERS)):
        say(f"| {' | '.join(row)} |")
    for each in rows:
        cells = measured(each, 1 if options.quick else options.repeats)
        say(f"| {' | '.join(cells)} |")


def say(text: str, **options: Any) -> None:
    print(text, flush=True, **options)  # noqa: T201


if __name__ == "__main__":
    main()
