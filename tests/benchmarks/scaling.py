"""How time and memory grow with samples, width and classes.

Usage::

    python tests/benchmarks/scaling.py [--markdown]

For the last layer and for all weights of a network of two hidden layers, with Kronecker
and diagonal curvature. Each line is a process of its own, on one thread. Times are CPU
times, in units of what plain torch needs for the same samples in batches of 256: one
forward pass (f) for the last layer, forward and backward (fb) for all weights. ``fit``
is around a frozen network with a given prior precision, and includes inspection of the
network and the eigendecompositions of Kronecker factors. Predictions are the classes'
probabilities of 1,000 samples by ``link_approx="probit"``, as `predict_top_k` returns
them. Memory is the peak of the process beyond that of network and data, in MiB.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from benchmarks.workloads import mlp
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetClassifier
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sklaplace import LaplaceClassifier

N_FEATURES, N_PREDICTED, BATCH, TOP, REPEATS = 64, 1000, 256, 5, 3


@dataclass(frozen=True)
class Line:
    """One line of the table: sizes, and what is fitted."""

    subset: str
    structure: str
    n: int = 1000
    width: int = 128
    n_classes: int = 10


def lines() -> list[Line]:
    """One size varies at a time."""
    found = []
    for structure in ("kron", "diag"):
        last, whole = Line("last_layer", structure), Line("all", structure)
        for n in (1000, 10_000, 100_000):
            found += [replace(line, n=n) for line in (last, whole)]
        for width in (512, 1024):
            found += [replace(line, width=width) for line in (last, whole)]
        # a factor of 8,192 outputs and less has eigenvectors
        for n_classes in (100, 1000, 10_000, 50_000):
            found.append(replace(last, n_classes=n_classes))
        found.append(replace(whole, n_classes=100))
    return sorted(found, key=lambda line: (line.subset != "last_layer", line.structure))


def peak() -> float:
    """Peak memory of this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def cpu_time(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def plain(module: nn.Module, x: Tensor, y: Tensor, *, backward: bool) -> None:
    """Forward, or forward and backward, for all samples."""
    for rows, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
        with torch.set_grad_enabled(backward):
            f = module(rows)
        if backward:
            cross_entropy(f, labels, reduction="sum").backward()


def measure(line: Line) -> dict[str, float]:
    """Ratios of times, and memory, of one line."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((line.n, N_FEATURES)).astype("f4")
    y = np.arange(line.n) % line.n_classes
    torch.manual_seed(0)
    module = partial(mlp, N_FEATURES, line.width, line.width, line.n_classes)
    net = NeuralNetClassifier(module, criterion=nn.CrossEntropyLoss, verbose=0)
    net.initialize()
    net.classes = np.arange(line.n_classes)
    x, labels = torch.from_numpy(X), torch.from_numpy(y)
    once = partial(plain, net.module_, backward=line.subset == "all")
    new = X[np.arange(N_PREDICTED) % line.n]
    once(x[:BATCH], labels[:BATCH])
    unit = median(cpu_time(lambda: once(x, labels)) for _ in range(REPEATS))
    given = x[:N_PREDICTED], labels[:N_PREDICTED]
    unit_of_new = median(cpu_time(lambda: once(*given)) for _ in range(REPEATS))
    net.module_.zero_grad()
    before = peak()
    model = LaplaceClassifier(
        FrozenEstimator(net),
        subset_of_weights=line.subset,
        hessian_structure=line.structure,
        prior_precision=float(line.width),
        refine=False,
        link_approx="probit",
        random_state=0,
    )

    def fit() -> None:
        model.fit(X, y).predict_proba(new[:1])  # with all decompositions

    def predict() -> None:
        model.predict_top_k(new, TOP)

    found = {"fit": cpu_time(fit) / unit, "fit MiB": peak() - before}
    found["predict"] = median(cpu_time(predict) for _ in range(REPEATS)) / unit_of_new
    found["predict MiB"] = peak() - before
    return found | {"P": model.posterior_.layout.n_parameters}


HEADERS = "weights", "structure", "N", "width", "C", "P"
HEADERS += "fit", "MiB", "predict", "MiB"


def cells(line: Line, found: dict[str, float]) -> list[str]:
    """One line as text."""
    unit = "f" if line.subset == "last_layer" else "fb"
    sizes = line.n, line.width, line.n_classes, int(found["P"])
    times = [f"{found[key]:.1f} {unit}" for key in ("fit", "predict")]
    memory = [f"{found[f'{key} MiB']:.0f}" for key in ("fit", "predict")]
    return [
        line.subset,
        line.structure,
        *(f"{size:,}" for size in sizes),
        *(times[0], memory[0], times[1], memory[1]),
    ]


def show(row: list[str] | tuple[str, ...], *, markdown: bool) -> None:
    """Print one line."""
    text = "  ".join(cell.rjust(10) for cell in row)
    if markdown:
        text = f"| {' | '.join(row)} |"
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--line", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.line:
        found = measure(Line(**json.loads(options.line)))
        sys.stdout.write(json.dumps(found))
        return
    show(HEADERS, markdown=options.markdown)
    if options.markdown:
        show(["---"] * len(HEADERS), markdown=True)
    for line in lines():
        command = [sys.executable, __file__, "--line", json.dumps(asdict(line))]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        row = cells(line, json.loads(found.stdout))
        show(row, markdown=options.markdown)


if __name__ == "__main__":
    main()
