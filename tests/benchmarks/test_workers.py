"""Time of the curvature with two workers, and the number of threads they use.

Run ``pytest tests/benchmarks/test_workers.py -m benchmark -n 0 -s`` on two idle cores.
"""

import os
from statistics import median
from time import perf_counter

import numpy as np
import pytest
from nets import MLP, classifier
from sklearn.frozen import FrozenEstimator

from sklaplace import LaplaceClassifier

N_TURNS = 3
SPEED_UP = 1.6


@pytest.fixture(scope="module")
def workload():
    """Return a ten-class network whose curvature takes at least ten seconds."""
    rng = np.random.default_rng(0)
    X, y = (
        rng.standard_normal((180_000, 64)).astype("f4"),
        rng.integers(10, size=180_000),
    )
    sizes = {"module__n_in": 64, "module__n_out": 10, "module__width": 512}
    net = classifier(MLP, max_epochs=1, **sizes).fit(X[:1000], y[:1000])
    options = {"subset_of_weights": "all", "prior_precision": 1.0, "random_state": 0}
    return LaplaceClassifier(FrozenEstimator(net), **options), X, y


@pytest.mark.skipif(os.cpu_count() < 2, reason="needs two cores")
def test_speed_up_with_two_workers(workload):
    model, X, y = workload
    model.set_params(n_jobs=2).fit(X[:4000], y[:4000])  # starts the workers
    found = {1: [], 2: []}
    for _ in range(N_TURNS):
        for n_jobs, times in found.items():
            start = perf_counter()
            model.set_params(n_jobs=n_jobs).fit(X, y)
            times.append(perf_counter() - start)
    ratios = [a / b for a, b in zip(*found.values(), strict=True)]
    print(f"\ncurvature: {median(found[1]):.1f} s with one worker")  # noqa: T201
    print(f"{median(found[2]):.1f} s with two, {median(ratios):.2f}")  # noqa: T201
    assert median(found[1]) >= 10
    assert median(ratios) >= SPEED_UP
