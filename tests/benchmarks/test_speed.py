"""Speed of fitting, predicting and tuning, compared between commits.

Run ``pytest tests/benchmarks -m benchmark -n 0`` with ``--benchmark-autosave``, and
later with ``--benchmark-compare``. CPU times reduce the effect of other programs.
``compare.py`` compares with other libraries.
"""

import time

import pytest
import torch
from benchmarks.compare import all_rows
from benchmarks.libraries import Case, of_sklaplace
from benchmarks.workloads import mlp
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from sklaplace.variational import POSTERIORS, GaussianPrior
from sklaplace.variational.divergence import divergence

pytest.importorskip("pytest_benchmark")

# what takes seconds at most
CASES = [
    (row.case, row.name)
    for row in all_rows()
    if row.case.workload in ("W1", "W2", "W2-full", "W3", "W5")
]
FURTHER = "lowrank", "nystrom"
CASES += [(Case("W2", "all", s), name) for s in FURTHER for name in ("fit", "predict")]


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize(("case", "name"), CASES, ids=str)
def test_speed(benchmark, case, name):
    prepare, run = of_sklaplace(case, name)
    fresh = lambda: ((prepare(),), {})  # noqa: E731
    benchmark.pedantic(run, setup=fresh, rounds=5, warmup_rounds=1)


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize("name", POSTERIORS)
def test_variational_step(benchmark, name):
    """Time a training step of 85,614 weights on 128 rows, to compare with Gaussian."""
    source = torch.Generator().manual_seed(0)
    network = mlp(784, 100, 64, 10)
    shapes = {key: value.shape for key, value in network.named_parameters()}
    x = torch.randn(128, 784, generator=source)
    y = torch.randint(10, (128,), generator=source)
    n_weights = sum(shape.numel() for shape in shapes.values())
    location = 0.05 * torch.randn(n_weights, generator=source)
    posterior = POSTERIORS[name](location, torch.full_like(location, 0.05))
    optimizer = torch.optim.Adam(posterior.parameters())

    def step():
        w, log_q = posterior.sample(1, source)
        parts = w[0].split([shape.numel() for shape in shapes.values()])
        weights = {
            key: part.view(shape)
            for (key, shape), part in zip(shapes.items(), parts, strict=True)
        }
        loss = cross_entropy(functional_call(network, weights, (x,)), y)
        loss = loss + divergence(posterior, GaussianPrior(), w, log_q) / 60_000
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    benchmark.pedantic(step, rounds=100, warmup_rounds=10)
