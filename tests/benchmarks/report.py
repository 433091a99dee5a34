"""Report: results as an aligned table, as Markdown, and as JSON."""

import json
import math
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.results import Result, Verdict
from benchmarks.rows import UNITS, Row

HEADERS = "operation", "time", "in units", "target", "met"
HEADERS += "laplace-torch", "ratio", "target", "met", "MiB", "target", "met"
HEADERS += "its MiB", "agreement", "backend"
SHORT_HEADERS = "operation", "time", "in units (target)", "laplace-torch"
SHORT_HEADERS += "ratio (target)", "MiB (target)", "its MiB", "agreement (backend)"
WORDS = {True: "yes", False: "NO", None: ""}
SIGNS = {"limit": "≤", "speedup": "≥", "memory": "≤", "evaluations": "≤"}


def cells(result: Result) -> list[str]:
    row = result.row
    met = {name: WORDS[verdict.met] for name, verdict in result.verdicts().items()}
    unit = UNITS[row.unit]
    if result.skipped:
        blank = [""] * (len(HEADERS) - 2)
        return [row.title, f"skipped: {result.skipped}", *blank]
    return [
        row.title + _evaluations(result),
        _time(result, "sklaplace"),
        _number(result.multiple, f" {unit}"),
        _number(row.limit, f" {unit}", "≤ "),
        met.get("limit", ""),
        _time(result, "laplace-torch"),
        _number(result.speedup, "×"),
        _number(row.speedup, "×", "≥ "),
        met.get("speedup", ""),
        _number(result.peaks.get("sklaplace")),
        _number(row.memory, before="≤ "),
        met.get("memory", ""),
        _number(result.peaks.get("laplace-torch")),
        str(result.agreement) if result.backend else "",
        result.backend.replace("GGN", ""),
    ]


def _evaluations(result: Result) -> str:
    if result.evaluations is None:
        return ""
    return f", {result.evaluations} evaluations (≤ {result.row.evaluations})"


def _time(result: Result, library: str) -> str:
    timing = result.times.get(library)
    if timing is None:
        return ""
    if timing.seconds is None:
        return timing.error
    rows = result.peer_rows if library == "laplace-torch" else None
    few = "" if rows is None else f" ({rows} row{'s' if rows > 1 else ''})"
    return _seconds(timing.seconds) + few


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms"


def _number(value: Any, unit: str = "", before: str = "") -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if value == math.inf:
        return "failed"
    digits = f"{value:.2f}" if value < 9.995 else f"{value:,.0f}"
    if before and value == int(value):
        digits = f"{int(value):,}"
    return f"{before}{digits}{unit}"


def table(results: Iterable[Result]) -> str:
    rows = [list(HEADERS), *(cells(result) for result in results)]
    # what was skipped may run over
    widths = [
        max(len(row[i]) for row in rows if not row[1].startswith("skipped"))
        for i in range(len(HEADERS))
    ]
    pairs = (zip(row, widths, strict=True) for row in rows)
    lines = ("  ".join(cell.ljust(width) for cell, width in row) for row in pairs)
    return "\n".join(line.rstrip() for line in lines)


def line(result: Result) -> str:
    """One row in words, to watch while others are running."""
    found = [cell for cell in cells(result)[:7] if cell]
    verdicts = result.verdicts().values()
    missed = any(verdict.met is False for verdict in verdicts)
    return ", ".join(found) + (" MISSED" if missed else "")


def notes(results: Iterable[Result]) -> list[str]:
    """What the table cannot say."""
    if not any(result.agreement.is_partial for result in results):
        return []
    return [
        "† Compared without biases of convolutions: their Kronecker block is exact "
        "in sklaplace and not in laplace-torch."
    ]


def summary(results: Iterable[Result]) -> str:
    """How many targets are met, and which are not."""
    verdicts = [
        (result.row, name, verdict)
        for result in results
        for name, verdict in result.verdicts().items()
    ]
    missed = [entry for entry in verdicts if entry[2].met is False]
    n_met = sum(bool(verdict.met) for *_, verdict in verdicts)
    n_measured = n_met + len(missed)
    rest = len(verdicts) - n_measured
    lines = [f"missed: {row.title}: {_shown(row, *v)}" for row, *v in missed]
    first = f"{n_met} of {n_measured} targets met, {rest} not measured."
    return "\n".join([first, *lines])


def _shown(row: Row, name: str, verdict: Verdict) -> str:
    units = {"limit": f" {UNITS[row.unit]}", "speedup": "×", "memory": " MiB"}
    unit = units.get(name, " evaluations")
    wanted = _number(verdict.target, unit, f"{SIGNS[name]} ")
    return f"{_number(verdict.found, unit)}, not {wanted}"


def machine() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()


def environment(versions: dict[str, str]) -> str:
    return f"{machine()}; " + ", ".join(f"{k} {v}" for k, v in versions.items())


def markdown(results: list[Result], date: str, versions: dict[str, str]) -> str:
    """A table that MyST can include; what misses its target is bold."""
    rows = [SHORT_HEADERS, ["---"] * len(SHORT_HEADERS), *map(_short_cells, results)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    first = f"Measured on {date}: {environment(versions)}."
    last = [summary(results).splitlines()[0], *notes(results)]
    return "\n\n".join([first, "\n".join(lines), *last]) + "\n"


def _short_cells(result: Result) -> list[str]:
    """One row of the Markdown table, each value with its target."""
    row, verdicts = result.row, result.verdicts()
    unit, backend = UNITS[row.unit], result.backend.replace("GGN", "")

    def judged(name: str, value: Any, unit: str = "") -> str:
        verdict = verdicts.get(name)
        found = _number(value, unit)
        if verdict is None or not found:
            return found
        found += f" ({_number(verdict.target, before=f'{SIGNS[name]} ')})"
        return f"**{found}**" if verdict.met is False else found

    return [
        row.title + _evaluations(result),
        _time(result, "sklaplace"),
        judged("limit", result.multiple, f" {unit}"),
        _time(result, "laplace-torch"),
        judged("speedup", result.speedup, "×"),
        judged("memory", result.peaks.get("sklaplace")),
        _number(result.peaks.get("laplace-torch")),
        f"{result.agreement} ({backend})" if backend else "",
    ]


def as_json(results: list[Result], date: str, versions: dict[str, str]) -> str:
    content = {
        "date": date,
        "machine": machine(),
        "versions": versions,
        "results": [result.as_dict() for result in results],
    }
    return json.dumps(content, indent=1)
