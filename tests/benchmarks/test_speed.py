"""Speed of fitting, predicting and tuning, compared between commits.

Run by ``pytest tests/benchmarks -m benchmark -n 0``; add ``--benchmark-autosave``,
and later ``--benchmark-compare``. Times are CPU times, so that other programs disturb
them less. Other libraries are in ``compare.py``.
"""

import time

import pytest
from benchmarks.operations import Case
from benchmarks.ours import Sklaplace

pytest.importorskip("pytest_benchmark")

CASES = [
    (Case("W1", "last_layer", "full"), "fit"),
    (Case("W1", "last_layer", "full"), "predict"),
    (Case("W2", "last_layer", "kron"), "fit"),
    (Case("W2", "last_layer", "kron"), "predict"),
    (Case("W2", "last_layer", "kron"), "tune"),
    (Case("W2", "last_layer", "diag"), "fit"),
    (Case("W2", "all", "kron"), "fit"),
    (Case("W2", "all", "kron"), "predict"),
    (Case("W2", "all", "diag"), "predict"),
    (Case("W2", "all", "lowrank"), "fit"),
    (Case("W2", "all", "lowrank"), "predict"),
    (Case("W2", "all", "nystrom"), "fit"),
    (Case("W2", "all", "nystrom"), "predict"),
    (Case("W2-full", "last_layer", "full"), "fit"),
    (Case("W2-full", "last_layer", "full"), "predict"),
    (Case("W2-full", "last_layer", "full"), "tune"),
    (Case("W3", "last_layer", "kron"), "fit"),
    (Case("W3", "all", "diag"), "fit"),
    (Case("W5", "last_layer", "diag"), "predict"),
]


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize(("case", "name"), CASES, ids=str)
def test_speed(benchmark, case, name):
    operation = Sklaplace().operation(case, name)

    def fresh():
        return (operation.prepare(),), {}

    benchmark.pedantic(operation.run, setup=fresh, rounds=5, warmup_rounds=1)
