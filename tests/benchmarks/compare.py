"""Compare sklaplace with plain torch, and with laplace-torch where installed.

Usage::

    python tests/benchmarks/compare.py [--quick] [--only W2,W3] [--repeats N]
                                       [--json FILE] [--markdown FILE]

Each library runs in a process of its own on one thread, and they take turns.

* Times are medians of CPU time, in units of what plain torch needs for the same
  rows: ``f`` is one forward pass, ``fb`` forward and backward, both with the batch
  size that suits plain torch and laplace-torch best (32 to 512); sklaplace chooses
  its own.
* Memory is the peak of a separate run in a fresh process, over network, data and,
  for predictions and tuning, the fit.
* Before anything is timed, the functional variances of both libraries are compared
  in float64, for a few rows; laplace-torch then runs with the fastest of its
  backends that agree, on a ``DataLoader`` over a ``TensorDataset``.
* ``fit_ready`` is ``fit`` and the eigendecompositions of Kronecker factors, which
  sklaplace leaves to the first question and laplace-torch makes when it fits. With
  ``kron`` it is what is compared with laplace-torch.
* ``tune`` is the tuning of the prior precision alone, ``fit_tune`` includes the fit
  and all decompositions.
* Targets say what is wanted, not what was reached.

Nothing else should run on the machine meanwhile. A full run takes about an hour,
``--quick`` some minutes, with sizes that only show that everything runs.

An environment, from the root of a checkout::

    python3 -m venv peers
    peers/bin/pip install torch -e .

and for laplace-torch, whose own requirements exclude current versions of some
packages::

    peers/bin/pip install --no-deps laplace-torch==0.3 curvlinops-for-pytorch \
        backpack-for-pytorch asdfghjkl==0.1a4 unfoldNd einconv torchmetrics \
        lightning-utilities
    peers/bin/pip install opt_einsum einops linear_operator tqdm packaging

Then ``peers/bin/python tests/benchmarks/compare.py``.
"""

import argparse
import datetime as dt
import importlib.util
import shlex
import sys
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.results import Result
from benchmarks.rows import ROWS, Row
from benchmarks.runner import Runner

LIMIT_SECONDS, LIMIT_GIBIBYTES = 120.0, 14.0


def main() -> None:
    options = parsed()
    rows = selected(options)
    runner = Runner(
        libraries(options),
        repeats=1 if options.quick else options.repeats,
        seconds=options.limit,
        gibibytes=LIMIT_GIBIBYTES,
        measures_memory=not options.no_memory,
        is_quick=options.quick,
    )
    results: list[Result] = []
    try:
        versions = runner.start()
        for number, row in enumerate(rows, 1):
            results.append(runner.run(row))
            progress = f"[{number}/{len(rows)}] {report.line(results[-1])}"
            say(progress, file=sys.stderr)
    finally:
        runner.stop()
    say(report.table(results))
    say()
    for note in report.notes(results):
        say(note)
    say(report.summary(results))
    say(report.environment(versions))
    say(f"command: {shlex.join(sys.argv)}")
    date = dt.date.today().isoformat()
    if options.json:
        options.json.write_text(report.as_json(results, date, versions))
    if options.markdown:
        options.markdown.write_text(report.markdown(results, date, versions))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one call")
    parser.add_argument("--only", help="parts of titles, such as W2,digits")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--no-peer", action="store_true", help="no laplace-torch")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def selected(options: argparse.Namespace) -> list[Row]:
    parts = options.only.split(",") if options.only else [""]
    rows = [row for row in ROWS if any(part in row.title for part in parts)]
    if options.quick:
        rows = [row.quick() for row in rows if not row.is_heavy]
    return rows


def libraries(options: argparse.Namespace) -> list[str]:
    found = ["torch", "sklaplace"]
    if options.no_peer:
        return found
    if importlib.util.find_spec("laplace") is None:
        say("laplace-torch is not installed: its columns stay empty.")
        return found
    return [*found, "laplace-torch"]


def say(*words: object, **options: object) -> None:
    print(*words, flush=True, **options)  # type: ignore[call-overload]  # noqa: T201


if __name__ == "__main__":
    main()
