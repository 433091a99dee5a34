"""Cost of a last layer with 50,000 outputs, in forward passes of that layer.

Run by ``pytest tests/benchmarks/test_many_outputs.py -m benchmark -n 0 -s``. CPU times
on one thread.
"""

import time
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from nets import QUIET
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier

N, N_FEATURES, N_CLASSES = 1000, 768, 50_000
BATCH = 100


def cpu_time(function):
    start = time.process_time()
    function()
    return time.process_time() - start


def peak():
    """Peak memory of this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@pytest.mark.filterwarnings("ignore:The number of unique classes")  # of random labels
@pytest.mark.parametrize("link", ["probit", "gumbel"])
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_fifty_thousand_outputs(structure, link):
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((N, N_FEATURES)).astype("f4")
    y = rng.integers(N_CLASSES, size=N)
    torch.manual_seed(0)
    head = nn.Linear(N_FEATURES, N_CLASSES)
    options = {"criterion": nn.CrossEntropyLoss, **QUIET}
    net = NeuralNetClassifier(nn.Sequential(head), **options).initialize()
    model = LaplaceClassifier(
        FrozenEstimator(net),
        hessian_structure=structure,
        prior_precision=1.0,
        link_approx=link,
        random_state=0,
    )

    def forward():
        with torch.no_grad():
            for start in range(0, N, BATCH):
                head(torch.from_numpy(X[start : start + BATCH]))

    forward()
    one, before = median(cpu_time(forward) for _ in range(5)), peak()
    classes = np.arange(N_CLASSES)
    fit = cpu_time(lambda: model.partial_fit(X, y, classes=classes)) / one
    fitted = peak()
    model.predict_top_k(X[:BATCH], 5)
    found = median(cpu_time(lambda: model.predict_top_k(X, 5)) for _ in range(3)) / one
    memory = f"{fitted - before:.0f} and {peak() - before:.0f} MiB"
    print(f"\n{structure}, {link}: fit {fit:.1f}, top 5 {found:.1f}; {memory}")  # noqa: T201
    assert found <= (6 if link == "probit" else 25)
