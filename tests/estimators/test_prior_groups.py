"""Groups of parameter tensors that share one prior precision each."""

import numpy as np
import pytest
import torch
from nets import regressor, waves
from numpy.testing import assert_allclose
from scipy.optimize import minimize
from torch import nn

from sklaplace import LaplaceRegressor, MarglikTraining

GROUPS = ["backbone", "head"]
STRUCTURES = [
    "kron",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("full", "diag", "lowrank", "gp")
    ),
]


class Net(nn.Module):
    """A backbone of two layers and a head."""

    def __init__(self, n_out=1):
        super().__init__()
        layers = nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()
        self.backbone, self.head = nn.Sequential(*layers), nn.Linear(6, n_out)

    def forward(self, X):
        return self.head(self.backbone(X))


def fitted(**settings):
    X, y = waves(60)
    net = regressor(Net, max_epochs=40, optimizer=torch.optim.Adam)
    defaults = {"subset_of_weights": "all", "hessian_structure": "full"}
    defaults |= {"prior_precision": "marglik", "prior_structure": GROUPS}
    options = defaults | {"random_state": 0} | settings
    return LaplaceRegressor(net, **options).fit(X, y)


def test_evidence_is_maximised_over_groups():
    model = fitted(sigma_noise=0.2)

    def loss(logs):
        return -model.log_marginal_likelihood(np.exp(logs))

    best = minimize(loss, np.zeros(2), options={"gtol": 1e-6})
    assert model.prior_precision_.shape == (2,)
    assert_allclose(np.log(model.prior_precision_), best.x, atol=1e-3)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("prior", ["auto", "marglik"])
def test_tensors_of_a_group_are_equal(structure, prior):
    model = fitted(prior_precision=prior, hessian_structure=structure)
    first, second = model.prior_precision_
    assert first != second
    expected = [first] * 4 + [second] * 2
    assert model.posterior_.prior_precision.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_given_numbers(structure):
    """Groups equal separate tensors with the same numbers."""
    settings = {"hessian_structure": structure, "sigma_noise": 0.2}
    model = fitted(prior_precision=[1.0, 20.0], **settings)
    same = [1.0] * 4 + [20.0] * 2
    expected = fitted(prior_precision=same, prior_structure="layerwise", **settings)
    X = waves(20, seed=1)[0]
    assert_allclose(*(m.predict(X, return_std=True) for m in (model, expected)))
    evidence = model.log_marginal_likelihood()
    assert model.log_marginal_likelihood([1.0, 20.0]) == pytest.approx(evidence)
    assert model.log_marginal_likelihood([2.0, 20.0]) != pytest.approx(evidence)


@pytest.mark.parametrize("prior", ["auto", "marglik"])
@pytest.mark.parametrize(
    "subset", ["last_layer", pytest.param("all", marks=pytest.mark.slow)]
)
def test_one_group_of_all_is_a_scalar(subset, prior):
    """This also holds if the last layer is refitted, which uses another search."""
    settings = {"prior_precision": prior, "subset_of_weights": subset}
    model = fitted(prior_structure=[""], **settings)
    expected = fitted(prior_structure="scalar", **settings)
    assert_allclose(model.prior_precision_, [expected.prior_precision_], rtol=1e-3)
    assert model.sigma_noise_ == pytest.approx(expected.sigma_noise_, rel=1e-4)


def test_groups_take_geometric_means_of_a_callback():
    X, y = waves(60)
    callback = MarglikTraining()
    net = regressor(Net, max_epochs=20, callbacks=[("prior", callback)])
    options = {"subset_of_weights": "all", "random_state": 0}
    model = LaplaceRegressor(net, prior_structure=GROUPS, **options).fit(X, y)
    (found,) = (c for _, c in model.estimator_.callbacks_ if type(c) is type(callback))
    logs = np.log([value for _, value in sorted(found.precisions_.items())])
    sizes = np.array([6, 12, 6, 36, 1, 6])  # biases before weights
    first = np.average(logs[:4], weights=sizes[:4])
    second = np.average(logs[4:], weights=sizes[4:])
    assert_allclose(np.log(model.prior_precision_), [first, second])
    tensors = model.posterior_.prior_precision.numpy()
    assert_allclose(np.log(tensors), [first] * 4 + [second] * 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prior_structure": ["backbone"]}, "'head.bias', 'head.weight' exactly once"),
        ({"prior_structure": ["", "head"]}, "'head.bias', 'head.weight' exactly once"),
        ({"prior_structure": ["backbone", "haed"]}, "names 'haed', which contains no"),
        ({"prior_structure": [*GROUPS, 3]}, "names '3', which contains no selected"),
        ({"subset_of_weights": "last_layer"}, "subset_of_weights='all' selects all"),
        ({"prior_structure": []}, "exactly once"),
        ({"prior_precision": [1.0, 2.0, 3.0]}, r"one number or shape \(2,\)"),
        ({"hessian_structure": "nystrom"}, "cannot be used with hessian_structure"),
    ],
)
def test_what_cannot_be(settings, words):
    with pytest.raises(ValueError, match=words):
        fitted(**settings)
