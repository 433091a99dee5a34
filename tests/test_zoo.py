"""Every network with every structure and subset, compared with dense derivatives.

The tests cover the path from `fit` to predictive variances. The samples are chosen to
hide the origin of a layer's inputs. Predictions use several batch sizes and orders.
"""

import numpy as np
import pytest
import references
import torch
from nets import QUIET, RecordTraining
from refusals import refused_fit
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetRegressor
from torch import nn
from zoo import REFUSED, TRAPS, ZOO

from sklaplace import LaplaceRegressor
from sklaplace.core.trees import mapped, tree_rows
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.likelihoods import Gaussian

pytestmark = pytest.mark.usefixtures("rng_untouched")
N_TRAIN, N_TEST, N_OUTPUTS = 26, 11, 2
# what the samples of training are, the first of them or all
SAMPLES = {
    "any": lambda x: x,
    "equal": lambda x: torch.cat([x[:1].expand(9, *x.shape[1:]), x[9:]]),
    "zero": lambda x: torch.cat([0 * x[:9], x[9:]]),
    "sorted": lambda x: x[x.flatten(1)[:, 0].argsort()],
    # all on one side of a threshold, on which those of prediction are not
    "small": lambda x: x / 100,
    "large": lambda x: x.abs() + 0.8,
}
OPTIONS = {
    "all": {"subset_of_weights": "all"},
    "last_layer": {"subset_of_weights": "last_layer"},
    "subnetwork": {
        "subset_of_weights": "subnetwork",
        "subset_params": {"n_weights": 5},
    },
}
STRUCTURES = ["diag", "full", "kron", "lowrank"]
# samples that are predicted together, from the first to the last and back
BATCHES = [range(N_TEST), range(N_TEST)[::-1], [3], [7, 2], [9, 4, 0, 8, 1]]


def data(case, samples="any"):
    """Return separate inputs for training and prediction."""
    x = case.rows(N_TRAIN + N_TEST)
    train, test = tree_rows(x, slice(N_TRAIN)), tree_rows(x, slice(N_TRAIN, None))
    return mapped(SAMPLES[samples], train), test


def arrays(x):
    return mapped(lambda leaf: leaf.numpy().copy(), x)


def frozen_net(case):
    """Return a frozen float64 net, and the network of the reference."""
    forward = case.forward(N_OUTPUTS)
    net = NeuralNetRegressor(forward.module, **QUIET).initialize()
    return net, forward


def fitted(case, samples, **options):
    net, forward = frozen_net(case)
    x, x_new = data(case, samples)
    settings = {"prior_precision": 0.6, "sigma_noise": 0.8, "residual": "none"}
    model = LaplaceRegressor(FrozenEstimator(net), **settings, **options)
    y = np.linspace(-1, 1, N_TRAIN * N_OUTPUTS).reshape(N_TRAIN, -1)
    return model.fit(arrays(x), y), forward, x, x_new


def expected_variance(model, forward, x, x_new, structure):
    """Return the diagonal of ``J (H/σ² + δ)⁻¹ Jᵀ + σ²``, (b, c)."""
    layout = model.posterior_.layout
    y = torch.zeros(N_TRAIN, N_OUTPUTS, dtype=torch.float64)
    parts = references.curvature(forward, x, layout, Gaussian(), y)
    H = references.STRUCTURES[structure](parts)
    P = H / 0.8**2 + 0.6 * torch.eye(len(H), dtype=torch.float64)
    J = references.jacobian(forward, x_new, layout)
    cov = torch.einsum("ncp,pq,ncq->nc", J, torch.linalg.inv(P), J)
    return (cov + 0.8**2).detach().numpy()


def variances(model, x_new):
    """Return the variances (b, c) of all samples, batch by batch."""
    for some in BATCHES:
        batch = arrays(tree_rows(x_new, torch.tensor(list(some))))
        yield some, model.predict(batch, return_std=True)[1] ** 2


def assert_right(case, samples, subset, structure):
    options = {"hessian_structure": structure, **OPTIONS[subset]}
    model, forward, x, x_new = fitted(case, samples, **options)
    expected = expected_variance(model, forward, x, x_new, structure)
    for some, found in variances(model, x_new):
        # float64 throughout; kron has eigenvalues of factors near zero
        np.testing.assert_allclose(found, expected[list(some)], rtol=1e-7)


@pytest.mark.parametrize("subset", OPTIONS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", ZOO)
def test_variances(case, structure, subset):
    assert_right(ZOO[case], "any", subset, structure)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("samples", [name for name in SAMPLES if name != "any"])
@pytest.mark.parametrize("case", TRAPS)
def test_samples_that_hide_the_order(case, samples, structure):
    assert_right(TRAPS[case], samples, "all", structure)


# ---------------------------------------------------------------------------- refused
class Fresh(nn.Module):
    """A network of `REFUSED` by name, which skorch creates for each fit."""

    def __init__(self, name):
        super().__init__()
        self.network = REFUSED[name].forward(N_OUTPUTS).module.requires_grad_()

    def forward(self, X):
        return self.network(X)


@pytest.mark.parametrize("subset", OPTIONS)
@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("case", REFUSED)
def test_outputs_that_depend_on_the_batch(case, samples, subset):
    """The error comes before training, for any first samples."""
    x, _ = data(REFUSED[case], samples)
    settings = {"callbacks": [RecordTraining()], "verbose": 0, "max_epochs": 1}
    net = NeuralNetRegressor(Fresh, module__name=case, train_split=None, **settings)
    model = LaplaceRegressor(net, **OPTIONS[subset])
    y = np.linspace(-1, 1, N_TRAIN * N_OUTPUTS).reshape(N_TRAIN, -1)
    word = "random" if case == "noisy" else "other samples of its batch"
    refused_fit(model, word, data=(arrays(x), y))


@pytest.mark.parametrize("subset", OPTIONS)
def test_outputs_of_a_frozen_network_that_depend_on_whole_batches(subset):
    """The first batch, which has enough samples, reveals the dependence."""
    with pytest.raises(ValueError, match="other samples of its batch"):
        fitted(REFUSED["minus_mean_of_many"], "any", **OPTIONS[subset])


# ------------------------------------------------------------------------------ heads
HEADS = {
    "two_heads": ["mean", "spread"],
    "head_list": ["heads.0", "heads.1"],
    "towers": ["one", "two"],
    "chosen_head": ["one", "two"],
    "wide_and_deep": ["head", "wide"],
    "mixture": ["gate", "one", "two"],
    "residual_output": ["head"],
    "shared_head": ["head"],
    "feedback": ["head"],
    "pooling_attention": ["head"],
}


@pytest.mark.parametrize("case", HEADS)
def test_all_last_layers_are_selected(case):
    forward = ZOO[case].forward(N_OUTPUTS)
    layout = SUBSETS["last_layer"](forward, data(ZOO[case])[1])
    names = {block.name.rpartition(".")[0] for block in layout.blocks}
    assert sorted(names) == HEADS[case]


def test_head_whose_weight_is_reparametrised():
    forward = ZOO["normed_head"].forward(N_OUTPUTS)
    layout = SUBSETS["last_layer"](forward, data(ZOO["normed_head"])[1])
    assert all(block.name.startswith("2.param") for block in layout.blocks)
