"""Trace the calls of fits and predictions, and write the contributor's map.

Usage, from the root of a checkout::

    python docs/walk.py [--check]

The script fits small estimators and predicts with them. It writes the calls that lead
to the landmarks below to ``docs/walk.inc``, each call with its file. An arrow marks a
call whose own calls are listed further up. ``--check`` fails if the file is out of
date. A landmark that is not called is an error.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from sklearn.datasets import load_diabetes, load_iris
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from torch import nn

import sklaplace
from sklaplace import LaplaceClassifier, LaplaceRegressor

PACKAGE = Path(sklaplace.__file__).parent
PAGE = Path(__file__).with_name("walk.inc")
# Qualified names of the functions that a reader looks for.
FIT = {
    *("LaplaceOptions.of", "ClassTargets.encode", "infer_network_spec"),
    *("KronAccumulator.update", "KronAccumulator.decompose"),
    *("tune_on_validation", "LinearModel.refit", "BaseLaplace._set_fitted"),
    *("NoveltyRecorder.observe_batch", "Residual.of", "training_run"),
}
FIT_WITH_FOLDS = FIT | {"hash_folds"}
FIT_WITH_NET = FIT | {"Trainer.hold_out"}
PREDICT = {"NetEstimator._check_inputs", "EigenPrecision.functional_covariance"}
PREDICT |= {"mc"}
INTERVAL = {"NetEstimator._check_inputs", "NoiseModel.of_batch"}
INTERVAL |= {"Precision.output_covariance", "Gaussian.quantiles"}
# Files with helpers that are called everywhere.
HELPERS = {"cache", "checks", "parallel", "progress", "random"}
# Syntax that Python implements as functions.
SYNTAX = "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"

Call = tuple[str, str]  # qualified name, and file


class Node:
    """A call and the calls below it, in the order of their first occurrence."""

    def __init__(self) -> None:
        self.calls: dict[Call, Node] = {}

    def lines(self, depth: int, listed: set[Call]) -> list[str]:
        """Return one line for each call, indented by its depth.

        ``listed`` contains the calls whose own calls have been listed, and is extended.
        """
        lines = []
        for call, node in self.calls.items():
            name, file = call
            is_listed = bool(node.calls) and call in listed
            listed.add(call)
            indented = f"{'  ' * depth}{name}{' ↑' * is_listed}"
            lines.append(f"{indented:<60}{file}")
            if not is_listed:
                lines += node.lines(depth + 1, listed)
        return lines


def call_of(frame: FrameType) -> Call | None:
    """Return the name and the file of a call, or None if the map leaves it out."""
    path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
    if not path.is_relative_to(PACKAGE) or name.endswith(SYNTAX):
        return None
    if path.parent.name == "core" and path.stem in HELPERS:
        return None
    return name.replace("<locals>.", ""), path.relative_to(PACKAGE).as_posix()


def traced(work: Callable[[], Any], landmarks: set[str]) -> list[str]:
    """Return the lines of the calls that lead to the landmarks while ``work`` runs."""
    root, unmet = Node(), set(landmarks)

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or frame.f_code.co_qualname not in landmarks:
            return
        unmet.discard(frame.f_code.co_qualname)
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
    if unmet:
        sys.exit(f"docs/walk.py: {sorted(unmet)} are not called. Name other landmarks.")
    return root.lines(0, set())


def maps() -> dict[str, list[str]]:
    """Return the lines of each map, by its title."""
    X, y = load_iris(return_X_y=True)
    X = StandardScaler().fit_transform(X).astype("float32")
    default = LaplaceClassifier(random_state=0)
    net = NeuralNetClassifier(
        nn.Linear,
        module__in_features=4,
        module__out_features=3,
        criterion=nn.CrossEntropyLoss,
        train_split=None,
        verbose=0,
    )
    own = LaplaceClassifier(net, random_state=0)
    reg = LaplaceRegressor(random_state=0)
    X_reg, y_reg = load_diabetes(return_X_y=True)
    reg.fit(X_reg, y_reg)
    return {
        "A fit of the default network, with folds": traced(
            lambda: default.fit(X, y), FIT_WITH_FOLDS
        ),
        "A fit of a net, with held-out samples": traced(
            lambda: own.fit(X, y), FIT_WITH_NET
        ),
        "predict_proba": traced(lambda: default.predict_proba(X[:3]), PREDICT),
        "predict_interval": traced(lambda: reg.predict_interval(X_reg[:3]), INTERVAL),
    }


def page() -> str:
    """Return the text of the maps."""
    return "\n".join(
        f"{title}\n\n" + "\n".join([*lines, ""]) for title, lines in maps().items()
    )


def main() -> None:
    """Write the map, or check it."""
    parser = argparse.ArgumentParser(description="Write or check the map.")
    parser.add_argument("--check", action="store_true")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"docs/{PAGE.name} is out of date: run docs/walk.py.")


if __name__ == "__main__":
    main()
