"""50,000 classes of 768 features: fit and predictions beside the bare head.

Run by ``pytest tests/benchmarks/test_many_classes.py -m benchmark -n 0 -s``. Ratios of
CPU times on one thread, measured in turns; medians. A prior precision of 768 gives
logits a prior standard deviation of one, a precision of 1 one of 28.
"""

import sys

import numpy as np
import pytest
import torch
from benchmarks.test_default_fit import ratio
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetClassifier
from torch import nn

from sklaplace import LaplaceClassifier

N_CLASSES, WIDTH, N_FIT, N = 50_000, 768, 500, 200


def data(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, WIDTH, generator=generator).numpy()


def head():
    """A head with logits of standard deviation 1.7, as it is before training."""
    sizes = {"module__in_features": WIDTH, "module__out_features": N_CLASSES}
    options = {"criterion": nn.CrossEntropyLoss, "verbose": 0}
    net = NeuralNetClassifier(nn.Linear, **options, **sizes)
    torch.manual_seed(0)
    net.initialize()
    net.module_.weight.data *= 3
    net.classes = np.arange(N_CLASSES)
    return net


def unfitted(structure, **options):
    net, X = head(), data(N_FIT)
    y = np.random.default_rng(0).integers(N_CLASSES // 200, size=N_FIT)
    options = {"prior_precision": float(WIDTH), "random_state": 0} | options
    model = LaplaceClassifier(
        FrozenEstimator(net), hessian_structure=structure, **options
    )
    return net, model, X, y


@pytest.mark.benchmark
@pytest.mark.parametrize("prior_precision", [float(WIDTH), 1.0])
@pytest.mark.parametrize("link", ["gumbel", "probit"])
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_passes_of_the_head(structure, link, prior_precision):
    options = {"link_approx": link, "prior_precision": prior_precision}
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        net, model, X, y = unfitted(structure, **options)
        rows, weight = data(N, seed=1), net.module_.weight.detach()
        bare_fit = lambda: torch.from_numpy(X) @ weight.T  # noqa: E731
        bare = lambda: torch.from_numpy(rows) @ weight.T  # noqa: E731
        found = {
            "fit": ratio(lambda: model.fit(X, y), bare_fit),
            "predict_proba": ratio(lambda: model.predict_proba(rows), bare),
            "predict_top_k": ratio(lambda: model.predict_top_k(rows, 5), bare),
        }
    finally:
        torch.set_num_threads(n_threads)
    shown = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
    sys.stdout.write(f"\n{structure}, {link}, {prior_precision:g}: {shown} passes\n")
    # wide logits need each of the link's nodes for each of the classes
    is_wide = link == "gumbel" and prior_precision == 1
    assert found["fit"] <= 25
    assert max(found["predict_proba"], found["predict_top_k"]) <= (25 if is_wide else 6)
