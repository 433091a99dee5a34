"""Growth of time and memory with samples, width and classes.

Usage::

    python tests/benchmarks/scaling.py

The script prints a Markdown table for the last layer and for all weights of a network
with two hidden layers, with Kronecker and diagonal curvature. A separate process
measures each line on one thread. Times are CPU times, in units of the time that plain
torch needs for the same samples in batches of 256: one forward pass (f) for the last
layer, forward and backward passes (fb) for all weights. ``fit`` fits a frozen network
with a given prior precision. It includes the inspection of the network and the
eigendecompositions of Kronecker factors. Predictions are class probabilities of 1,000
samples by ``link_approx="probit"``, as `predict_top_k` returns them. Memory is the peak
of the process above the peak of network and data, in MiB.
"""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from benchmarks.compare import resident, say, seconds
from benchmarks.libraries import Case, estimator, nothing, plain_passes
from benchmarks.workloads import Workload, mlp

N_FEATURES, N_PREDICTED, TOP, REPEATS = 64, 1000, 5, 3
SIZES = 1000, 128, 10  # samples, width and classes
HEADERS = "weights", "structure", "N", "width", "C", "P"
HEADERS += "fit", "MiB", "predict", "MiB"


def lines() -> list[tuple[str, ...]]:
    """Yield subset, structure and sizes of each line; one size varies at a time."""
    n, width, c = SIZES
    both = [(many, width, c) for many in (1000, 10_000, 100_000)]
    both += [(n, wide, c) for wide in (512, 1024)]
    # a factor of 8,192 outputs and less has eigenvectors
    last = [(n, width, many) for many in (100, 1000, 10_000, 50_000)]
    return [
        (subset, structure, *map(str, sizes))
        for subset, more in (("last_layer", last), ("all", [(n, width, 100)]))
        for structure in ("kron", "diag")
        for sizes in both + more
    ]


def measure(subset: str, structure: str, n: int, width: int, n_classes: int) -> None:
    """Measure and print one line."""
    torch.set_num_threads(1)
    work = Workload(
        partial(mlp, N_FEATURES, width, width, n_classes),
        (N_FEATURES,),
        n_classes,
        n_fit=n,
        n_predict=N_PREDICTED,
        quick={},
        batch_size=256,
    )
    (X, y), net = work.fit_data(), work.net()
    net.classes = np.arange(n_classes)
    new, backward = X[np.arange(N_PREDICTED) % n], subset == "all"
    few = replace(work, n_fit=min(n, N_PREDICTED))
    units = [
        median(seconds((nothing, plain_passes(each, backward))) for _ in range(REPEATS))
        for each in (work, few)
    ]
    before = resident("VmHWM")
    options = {"prior_precision": float(width)}
    model = estimator(Case("", subset, structure), work, net, **options)

    def fit(_: None) -> None:
        model.fit(X, y).predict_proba(new[:1])  # with all decompositions

    def predict(_: None) -> None:
        model.predict_top_k(new, TOP)

    of_fit, of_fit_mib = seconds((nothing, fit)), resident("VmHWM") - before
    of_predict = median(seconds((nothing, predict)) for _ in range(REPEATS))
    unit = "fb" if backward else "f"
    sizes = n, width, n_classes, model.posterior_.layout.n_parameters
    cells = [subset, structure, *(f"{size:,}" for size in sizes)]
    cells += [f"{of_fit / units[0]:.1f} {unit}", f"{of_fit_mib:.0f}"]
    cells += [f"{of_predict / units[1]:.1f} {unit}"]
    say(f"| {' | '.join(cells)} | {resident('VmHWM') - before:.0f} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(*sys.argv[1:3], *map(int, sys.argv[3:]))
        sys.exit()
    for row in (HEADERS, ["---"] * len(HEADERS)):
        say(f"| {' | '.join(row)} |")
    for line in lines():
        subprocess.run([sys.executable, __file__, *line], check=True)
