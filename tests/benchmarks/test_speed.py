"""Speed of fitting, predicting and tuning, compared between commits.

Run ``pytest tests/benchmarks -m benchmark -n 0`` with ``--benchmark-autosave``, and
later with ``--benchmark-compare``. CPU times reduce the effect of other programs.
``compare.py`` compares with other libraries.
"""

import time

import pytest
import torch
from benchmarks.libraries import Case, of_sklaplace
from benchmarks.workloads import mlp
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from sklaplace.variational import POSTERIORS, GaussianPrior
from sklaplace.variational.divergence import divergence

pytest.importorskip("pytest_benchmark")

OPERATIONS = {
    Case("W1", "last_layer", "full"): ("fit", "predict"),
    Case("W2", "last_layer", "kron"): ("fit", "predict", "tune"),
    Case("W2", "last_layer", "diag"): ("fit",),
    Case("W2", "last_layer", "full"): ("fit", "predict"),
    Case("W2", "all", "kron"): ("fit", "predict"),
    Case("W2", "all", "diag"): ("predict",),
    Case("W2", "all", "lowrank"): ("fit", "predict"),
    Case("W2", "all", "nystrom"): ("fit", "predict"),
    Case("W2-full", "last_layer", "full"): ("fit", "predict", "tune"),
    Case("W3", "last_layer", "kron"): ("fit",),
    Case("W3", "all", "diag"): ("fit",),
    Case("W5", "last_layer", "diag"): ("predict",),
}
CASES = [(case, name) for case, names in OPERATIONS.items() for name in names]


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
