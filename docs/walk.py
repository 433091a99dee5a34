"""Trace the calls of a fit and of a prediction, and write the contributor's map.

Usage, from the root of a checkout::

    python docs/walk.py [--check]

The script fits a small classifier and predicts with it. It writes the calls that lead
to the landmarks below to ``docs/walk.inc``, each call with its file. ``--check`` fails
if the file is out of date.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from sklearn.datasets import load_iris

import sklaplace
from sklaplace import LaplaceClassifier

PACKAGE = Path(sklaplace.__file__).parent
PAGE = Path(__file__).with_name("walk.inc")
# Qualified names of the functions that a reader looks for.
FIT = {
    *("LaplaceOptions.of", "ClassTargets.encode", "Trainer.hold_out", "train"),
    *("infer_network_spec", "accumulate", "_Batch.add", "KronAccumulator.update"),
    *("KronAccumulator.decompose", "NoveltyRecorder.add", "tune_on_validation"),
    *("LinearModel.refit", "BaseLaplace._set_fitted", "Residual.of"),
}
PREDICT = {"BaseLaplace._check_inputs", "EigenPrecision.functional_covariance"}
PREDICT |= {"mean_field"}
# Files with helpers that are called everywhere.
LEFT_OUT = {"core", "options/workers.py", "likelihoods", "networks/shards.py"}

Call = tuple[str, str]  # qualified name, and file


class Node:
    """A call and the calls below it, in the order of their first occurrence."""

    def __init__(self) -> None:
        self.calls: dict[Call, Node] = {}

    def lines(self, depth: int = 0) -> list[str]:
        """Return one line for each call, indented by its depth."""
        found = []
        for (name, file), node in self.calls.items():
            found.append(f"{'  ' * depth}{name}".ljust(58) + file)
            found += node.lines(depth + 1)
        return found


def call_of(frame: FrameType) -> Call | None:
    """Return the name and the file of a call, or None outside the package."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE) or "<" in frame.f_code.co_qualname:
        return None
    file = path.relative_to(PACKAGE).as_posix()
    if any(file.startswith(part) or file.endswith(part) for part in LEFT_OUT):
        return None
    return frame.f_code.co_qualname, file


def traced(work: Callable[[], Any], landmarks: set[str]) -> Node:
    """Return the calls that lead to the landmarks while ``work`` runs."""
    root = Node()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or frame.f_code.co_qualname not in landmarks:
            return
        calls: list[Call] = []
        above: FrameType | None = frame
        while above is not None:
            calls += [call] if (call := call_of(above)) else []
            above = above.f_back
        node = root
        for call in reversed(calls):
            node = node.calls.setdefault(call, Node())

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return root


def page() -> str:
    """Return the text of the map."""
    X, y = load_iris(return_X_y=True)
    model = LaplaceClassifier(random_state=0)
    fit = traced(lambda: model.fit(X, y), FIT)
    predict = traced(lambda: model.predict_proba(X[:3]), PREDICT)
    return "\n".join([*fit.lines(), "", *predict.lines(), ""])


def main() -> None:
    """Write the map, or check it."""
    parser = argparse.ArgumentParser(description="Write or check the map.")
    parser.add_argument("--check", action="store_true")
    found = page()
    if not parser.parse_args().check:
        PAGE.write_text(found, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != found:
        sys.exit(f"docs/{PAGE.name} is out of date: run docs/walk.py.")


if __name__ == "__main__":
    main()
