"""Results: what was found for a row, and whether its targets are met."""

import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.rows import Row

TOLERANCE = 1e-5


@dataclass
class Timing:
    """CPU seconds of each measurement, calls in each, and what went wrong."""

    samples: list[float] = field(default_factory=list)
    calls: int = 1
    error: str = ""

    @property
    def seconds(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None


@dataclass
class Agreement:
    """Largest relative difference of functional variances, or why there is none.

    It is partial where what both define differently was left out.
    """

    difference: float | None = None
    error: str = ""
    is_partial: bool = False

    @property
    def holds(self) -> bool:
        return self.difference is not None and self.difference <= TOLERANCE

    def __str__(self) -> str:
        """Say so, or by how much not."""
        if self.difference is None:
            return self.error or "-"
        mark = "†" if self.is_partial else ""
        return f"{'yes' if self.holds else 'NO'}{mark}, {self.difference:.0e}"


@dataclass(frozen=True)
class Verdict:
    """A target, and what was found; None if nothing was, infinite if that failed."""

    found: float | None
    target: float
    met: bool | None


@dataclass
class Result:
    """What was found for one row."""

    row: Row
    times: dict[str, Timing] = field(default_factory=dict)  # of each library
    # MiB of each library, or why there are none
    peaks: dict[str, float | str] = field(default_factory=dict)
    # between ours and the backend that was timed
    agreement: Agreement = field(default_factory=Agreement)
    backend: str = ""  # of laplace-torch
    evaluations: int | None = None  # of the evidence
    skipped: str = ""  # what the installed version lacks, if it does

    def seconds(self, library: str) -> float | None:
        """Median time of a library; infinite where sklaplace has failed."""
        timing = self.times.get(library)
        if timing and timing.error and library == "sklaplace":
            return math.inf
        return timing.seconds if timing else None

    @property
    def multiple(self) -> float | None:
        """Our time in units of plain torch."""
        return _quotient(self.seconds("sklaplace"), self.seconds("torch"))

    @property
    def speedup(self) -> float | None:
        """Time of laplace-torch in units of ours, where it was given as much to do."""
        if self.peer_rows is not None:
            return None
        return _quotient(self.seconds("laplace-torch"), self.seconds("sklaplace"))

    @property
    def peer_rows(self) -> int | None:
        """Rows that laplace-torch was given, if not all."""
        return self.row.case.load().peer_rows if self.row.has_peer else None

    def verdicts(self) -> dict[str, Verdict]:
        row = self.row
        peak = self.peaks.get("sklaplace")
        found = {
            "limit": (self.multiple, row.limit, 1),
            "speedup": (self.speedup, row.speedup, -1),
            "memory": (math.inf if isinstance(peak, str) else peak, row.memory, 1),
            "evaluations": (self.evaluations, row.evaluations, 1),
        }
        return {
            name: Verdict(value, target, _met(value, target, sign))
            for name, (value, target, sign) in found.items()
            if target is not None
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything, raw and derived, for JSON."""
        verdicts = {
            name: {**asdict(verdict), "found": _finite(verdict.found)}
            for name, verdict in self.verdicts().items()
        }
        return {
            "title": self.row.title,
            **asdict(self),
            "multiple": _finite(self.multiple),
            "speedup": _finite(self.speedup),
            "verdicts": verdicts,
        }


def _quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _finite(value: float | None) -> float | None:
    return None if value == math.inf else value


def _met(value: float | None, target: float, sign: int) -> bool | None:
    return None if value is None else sign * value <= sign * target
