"""Cost of 50,000 classes and 768 features, relative to the head alone.

Run ``pytest tests/benchmarks/test_many_classes.py -m benchmark -n 0 -s``. The results
are median ratios of CPU times, measured alternately on one thread. With a prior
precision of 768, the prior standard deviation of a logit is 1; with a prior precision
of 1, it is 28.
"""

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
    """Return an untrained head whose logits have standard deviation 1.7."""
    sizes = {"module__in_features": WIDTH, "module__out_features": N_CLASSES}
    options = {"criterion": nn.CrossEntropyLoss, "verbose": 0}
    net = NeuralNetClassifier(nn.Linear, **options, **sizes)
    torch.manual_seed(0)
    net.initialize()
    net.module_.weight.data *= 3
    net.classes = np.arange(N_CLASSES)
    return net


@pytest.mark.parametrize("prior_precision", [float(WIDTH), 1.0])
@pytest.mark.parametrize("link", ["gumbel", "probit"])
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_passes_of_the_head(structure, link, prior_precision, shown):
    net, X, rows = head(), data(N_FIT), data(N, seed=1)
    y = np.random.default_rng(0).integers(N_CLASSES // 200, size=N_FIT)
    options = {"link_approx": link, "prior_precision": prior_precision}
    options |= {"hessian_structure": structure, "random_state": 0}
    model = LaplaceClassifier(FrozenEstimator(net), **options)
    weight = net.module_.weight.detach()
    bare_fit = lambda: torch.from_numpy(X) @ weight.T  # noqa: E731
    bare = lambda: torch.from_numpy(rows) @ weight.T  # noqa: E731
    found = {
        "fit": ratio(lambda: model.fit(X, y), bare_fit),
        "predict_proba": ratio(lambda: model.predict_proba(rows), bare),
        "predict_top_k": ratio(lambda: model.predict_top_k(rows, 5), bare),
    }
    shown(**found)
    # wide logits need each of the link's nodes for each of the classes
    is_wide = link == "gumbel" and prior_precision == 1
    assert found["fit"] <= 25
    assert max(found["predict_proba"], found["predict_top_k"]) <= (25 if is_wide else 6)
