"""Runner: ask one process per library in turns, and gather what they say.

Times are medians of the CPU time of one call, after a warm-up. A call below
`SHORTEST` seconds is repeated inside one measurement; one above `LONGEST` is
measured once, and counts as warm.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from benchmarks.operations import Case, NotOfferedError
from benchmarks.processes import FailedError, Process
from benchmarks.results import Agreement, Result, Timing
from benchmarks.rows import Row

SHORTEST, LONGEST = 0.05, 8.0
# CPU seconds that the measurements of one operation may take together
BUDGET = 12.0
MIB = 2**20
PEER = "laplace-torch"
BACKENDS = ("BackPackGGN", "AsdlGGN", "CurvlinopsGGN")
# Another backend is tried for so many times as long as the best one took.
PATIENCE, LEAST_PATIENCE = 3.0, 15.0
# sklaplace may take so many times the bound, since its rows shall not stay empty.
OWN_PATIENCE = 5.0

Job = tuple[Case, str]


@dataclass
class Runner:
    """Runs rows on the libraries that are there."""

    libraries: list[str]  # keys of ``worker.LIBRARIES``
    repeats: int  # measurements of each operation
    seconds: float  # bound of one operation of laplace-torch
    gibibytes: float  # bound of one operation
    measures_memory: bool  # in a second pass
    is_quick: bool  # with one process per library, and short measurements
    processes: dict[str, Process] = field(default_factory=dict)
    _chosen: dict[tuple[Case, str], tuple[str, str]] = field(default_factory=dict)
    _checked: dict[Case, Agreement] = field(default_factory=dict)

    def start(self) -> dict[str, str]:
        """Start all processes; versions of everything at work."""
        versions = {}
        for name in self.libraries:
            self.processes[name] = self._process(name)
            versions.update(self.processes[name].ask("versions"))
        return versions

    def _process(self, name: str) -> Process:
        patience = 1 if name == PEER else OWN_PATIENCE
        return Process(name, patience * self.seconds, self.gibibytes)

    def stop(self) -> None:
        for process in self.processes.values():
            process.stop()

    def run(self, row: Row) -> Result:
        """Check, time and weigh one row."""
        result = Result(row)
        jobs = {"torch": (row.case, row.unit), "sklaplace": (row.case, row.name)}
        try:
            self._add_peer(row, jobs, result)
            result.times.update(self._times(jobs))
            if self.measures_memory:
                result.peaks = self._peaks(jobs)
            if row.evaluations is not None:
                ask = self.processes["sklaplace"].ask
                result.evaluations = ask("evaluations", row.case)
        except NotOfferedError as error:
            result.skipped = str(error)
        return result

    def _add_peer(self, row: Row, jobs: dict[str, Job], result: Result) -> None:
        """Let laplace-torch take part with its best backend, or say why not."""
        if not row.has_peer or PEER not in self.libraries:
            return
        backend, error = self._backend(row)
        if error:
            result.times[PEER] = Timing(error=error)
            return
        case = replace(row.case, backend=backend)
        result.backend, result.agreement = backend, self._agreement(case)
        jobs[PEER] = case, row.name

    # ----------------------------------------------------------------- agreement
    def _agreement(self, case: Case) -> Agreement:
        """Of the functional variances in float64, for a few rows and points."""
        if case not in self._checked:
            self._checked[case] = self._compare(case)
        return self._checked[case]

    def _compare(self, case: Case) -> Agreement:
        work = case.load()
        small = replace(case, is_quick=case.is_quick or work.check_quick)
        is_kron = case.subset == "all" and case.structure == "kron"
        is_partial = is_kron and work.is_convolutional
        small = replace(small, is_comparable=is_partial)
        try:
            ours = self.processes["sklaplace"].ask("moments", small)
            theirs = self.processes[PEER].ask("moments", small)
        except FailedError as error:
            return Agreement(error=str(error))
        return Agreement(difference(ours[1], theirs[1]), is_partial=is_partial)

    # ------------------------------------------------------------------- backend
    def _backend(self, row: Row) -> tuple[str, str]:
        """The fastest correct backend, or an empty name and what went wrong."""
        name = "predict" if row.name == "predict" else "fit"
        key = row.case, name
        if key not in self._chosen:
            self._chosen[key] = self._fastest(row.case, name)
        return self._chosen[key]

    def _fastest(self, case: Case, name: str) -> tuple[str, str]:
        best, best_seconds, errors = "", math.inf, []
        for backend in self._candidates(case, name):
            patience = max(LEAST_PATIENCE, PATIENCE * best_seconds)
            seconds = min(self.seconds, patience)
            job = replace(case, backend=backend), name
            try:
                found = self.processes[PEER].ask("seconds", *job, seconds=seconds)
                if found < 1:  # the first time may have been slow for being the first
                    found = self.processes[PEER].ask("seconds", *job, seconds=seconds)
            except FailedError as error:
                errors.append(str(error))
                continue
            if found < best_seconds:
                best, best_seconds = backend, found
        return best, "" if best else errors[0]

    def _candidates(self, case: Case, name: str) -> list[str]:
        """Backends that are right, or all of them where none is."""
        right = self._right(case, BACKENDS)
        if name == "predict" and BACKENDS[0] not in right:
            # none makes Jacobians faster, even where its curvature is wrong
            pairs = [f"{backend}+{BACKENDS[0]}" for backend in right]
            right = [*self._right(case, pairs)[:1], *right]
        return right or list(BACKENDS)

    def _right(self, case: Case, backends: Iterable[str]) -> list[str]:
        return [b for b in backends if self._agreement(replace(case, backend=b)).holds]

    # ---------------------------------------------------------------------- time
    def _times(self, jobs: dict[str, Job]) -> dict[str, Timing]:
        """CPU times of all libraries, which take turns."""
        turns = {
            name: _Turns(self.processes[name], job, self.repeats)
            for name, job in jobs.items()
        }
        for turn in turns.values():
            turn.warm_up(self.is_quick)
        for _ in range(self.repeats):
            for turn in turns.values():
                turn.measure()
        for turn in turns.values():
            turn.forget()
        return {name: turn.timing for name, turn in turns.items()}

    # -------------------------------------------------------------------- memory
    def _peaks(self, jobs: dict[str, Job]) -> dict[str, float | str]:
        """Peak MiB of each library in a fresh process."""
        peaks: dict[str, float | str] = {}
        for name, (case, operation) in jobs.items():
            if name == "torch":
                continue
            fresh = None if self.is_quick else self._process(name)
            process = fresh or self.processes[name]
            try:
                peaks[name] = process.ask("peak", case, operation) / MIB
            except FailedError as error:
                peaks[name] = str(error)
            if fresh:
                fresh.stop()
        return peaks


class _Turns:
    """Measurements of one operation in one process."""

    def __init__(self, process: Process, job: Job, repeats: int) -> None:
        self.process, self.job = process, job
        self.left = repeats
        self.timing = Timing()

    def _ask(self, *arguments: Any) -> float | None:
        try:
            found: float = self.process.ask("seconds", *self.job, *arguments)
        except FailedError as error:
            self.timing.error, self.left = str(error), 0
            return None
        return found

    def warm_up(self, is_quick: bool) -> None:
        """Run once; plan how many calls make one measurement, and how many of them."""
        seconds = self._ask()
        if seconds is None or is_quick:
            return
        if seconds > LONGEST:
            self.timing.samples, self.left = [seconds], 0
            return
        # what is new is slow: the second call says how long it takes
        if seconds < 1:
            seconds = self._ask() or seconds
        self.timing.calls = max(1, math.ceil(SHORTEST / max(seconds, 1e-5)))
        self.left = min(self.left, max(1, int(BUDGET / seconds)))

    def measure(self) -> None:
        """Take one measurement if there are some left."""
        if self.left <= 0:
            return
        self.left -= 1
        seconds = self._ask(self.timing.calls)
        if seconds is not None:
            self.timing.samples.append(seconds)

    def forget(self) -> None:
        self.process.ask("forget")


def difference(ours: Any, theirs: Any) -> float:
    """Largest difference of covariances (n, c, c), relative to the variances."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    deviations = np.sqrt(np.diagonal(theirs, axis1=1, axis2=2))
    scale = deviations[:, :, None] * deviations[:, None, :]
    return float(np.abs((ours - theirs) / scale).max())
