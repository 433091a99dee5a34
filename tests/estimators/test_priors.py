"""Prior precisions: a matrix over all selected weights, and one per group."""

import pickle
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from costs import counted
from nets import regressor, waves
from numpy.testing import assert_allclose
from scipy.optimize import minimize
from scipy.stats import multivariate_normal
from torch import nn

from sklaplace import (
    LaplaceRegressor,
    MarglikTraining,
    PriorTraining,
)
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.curvature.rows import Block, LayerRows
from sklaplace.curvature.structures.full import FullAccumulator

P = 31  # weights and bias of a last layer with 30 features


def hidden(n_features):
    """Return a network with 30 features."""
    return nn.Sequential(nn.Linear(n_features, 30), nn.Tanh(), nn.Linear(30, 1))


def fitted(n_samples=60, **settings):
    """Fit the last layer of a network with 30 features, P = 31 weights."""
    X, y = waves(n_samples)
    net = regressor(
        partial(hidden, X.shape[1]), max_epochs=20, optimizer=torch.optim.Adam
    )
    defaults = {"hessian_structure": "full", "sigma_noise": 0.3, "random_state": 0}
    return LaplaceRegressor(net, **defaults | settings).fit(X, y), X


def matrix(seed=0):
    """Return a precision matrix with correlations."""
    root = np.random.default_rng(seed).standard_normal((P, 2 * P))
    return root @ root.T / P


@pytest.mark.parametrize("n_samples", [10, 60])  # fewer rows than weights are kept
def test_posterior_is_that_of_the_dense_formulas(n_samples):
    precision, mean = matrix(), np.linspace(-1, 1, P)
    model, X = fitted(n_samples, prior=precision, prior_mean=mean)
    posterior = model.posterior_
    plain, _ = fitted(n_samples, prior_precision=1.0)
    data = plain.posterior_.precision_matrix().numpy() - np.eye(P)

    total = data + precision
    assert_allclose(posterior.precision_matrix().numpy(), total, rtol=1e-9, atol=1e-9)
    offset = posterior.mean.numpy() - mean
    penalty = np.linalg.slogdet(total)[1] - np.linalg.slogdet(precision)[1]
    penalty += offset @ precision @ offset
    evidence = float(posterior.log_likelihood()) - penalty / 2
    assert_allclose(model.log_marginal_likelihood(), evidence, rtol=1e-9)

    features = model.estimator_.module_[:2](torch.as_tensor(X))
    rows = np.column_stack([features.detach().numpy(), np.ones(len(X))])
    variances = np.einsum("np,pq,nq->n", rows, np.linalg.inv(total), rows)
    _, std = model.predict(X, return_std=True)
    assert_allclose(std**2, variances + 0.3**2, rtol=1e-4)


def test_a_diagonal_matrix_is_an_array_of_precisions():
    values = np.linspace(0.5, 3, P)
    one, X = fitted(prior=np.diag(values))
    options = {"prior_structure": "diag", "refine": False, "residual": "none"}
    other, _ = fitted(prior_precision=values, **options)
    assert_allclose(one.predict(X, return_std=True), other.predict(X, return_std=True))
    evidences = (model.log_marginal_likelihood() for model in (one, other))
    assert_allclose(*evidences)


def test_training_under_the_prior_is_bayesian_linear_regression():
    """Mean, evidence and standard deviations are exact if the network is linear."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((40, P - 1)).astype("float32")
    y = (X @ np.sin(np.arange(P - 1)) + rng.standard_normal(40)).astype("float32")
    covariance = np.linalg.inv(matrix())
    settings = {"hessian_structure": "full", "prior": matrix(), "sigma_noise": 1.0}

    def fit(callbacks):
        net = regressor(
            partial(nn.Linear, P - 1, 1),
            max_epochs=60,
            batch_size=-1,
            optimizer=torch.optim.LBFGS,
            lr=1.0,
            train_split=None,
            callbacks=callbacks,
        )
        return LaplaceRegressor(net, **settings, random_state=0).fit(X, y)

    prior = fit([]).posterior_.earlier
    assert float(prior.log_likelihood()) == 0  # it has seen no data
    model = fit([PriorTraining(prior)])
    rows = np.column_stack([X, np.ones(40)]).astype(float)
    of_targets = rows @ covariance @ rows.T + np.eye(40)
    evidence = multivariate_normal(cov=of_targets).logpdf(y)
    assert_allclose(model.log_marginal_likelihood(), evidence, rtol=1e-5)
    exact = covariance @ rows.T @ np.linalg.solve(of_targets, y.astype(float))
    assert_allclose(model.posterior_.mean.numpy(), exact, atol=1e-3)


SETTINGS = {
    "temperature": {"temperature": 0.5},
    "random curvature": {"curvature": "ggn_mc"},
    "Fisher": {"curvature": "ef"},
    "Hessian": {"curvature": "hessian"},
    "shards": {"batch_size": 2},
    "all": {"subset_of_weights": "all"},
    "indices": {
        "subset_of_weights": "subnetwork",
        "subset_params": {"indices": [0, 3, 70]},
    },
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_precision_is_curvature_plus_prior(settings):
    kinds = {"prior_precision": 50.0, **settings}
    precision = fitted(40, **kinds)[0].posterior_.precision_matrix().numpy()
    n = len(precision)
    data = precision - 50 * np.eye(n)
    root = np.random.default_rng(1).standard_normal((n, 2 * n))
    prior = 50 * np.eye(n) + root @ root.T / n
    model, X = fitted(40, prior=prior, **settings)
    found = model.posterior_.precision_matrix().numpy()
    assert_allclose(found, data + prior, rtol=1e-6, atol=1e-6 * np.abs(data).max())
    again = pickle.loads(pickle.dumps(model))
    assert_allclose(again.predict(X), model.predict(X))


def test_samples_are_added():
    model, X = fitted(40, prior=matrix())
    before = model.posterior_.precision_matrix().numpy() - matrix()
    y = np.zeros(40, dtype="float32")
    after = model.partial_fit(X, y).posterior_.precision_matrix().numpy()
    assert_allclose(after, matrix() + 2 * before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", [list, torch.tensor, pd.DataFrame])
def test_forms_of_a_matrix(form):
    one, X = fitted(prior=matrix())
    other, _ = fitted(prior=form(matrix()))
    expected = one.predict(X, return_std=True)
    assert_allclose(other.predict(X, return_std=True), expected, rtol=1e-6)


def test_rounding_of_an_inverse_is_no_asymmetry():
    wrong = matrix()
    wrong[0, 1] += 1e-7 * wrong.max()
    fitted(prior=wrong)


def test_few_rows_take_no_outer_products():
    """The rows of a dual-form curvature are added to the matrix in one step."""
    rows = Block(torch.ones(50, 1, 1, 40, dtype=torch.float64))
    layout = Layout((BlockSpec("w", (40,)),))
    accumulator = FullAccumulator(layout)
    with counted() as costs:
        accumulator.add_matrix(torch.zeros(40, 40, dtype=torch.float64))
        accumulator.update(Jacobian([LayerRows((rows,))]))
    assert costs.largest <= 50 * 40


def asymmetric():
    wrong = matrix()
    wrong[0, 1] += 1
    return wrong


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prior": np.eye(3)}, [r"\(3, 3\)", r"shape \(31, 31\)"]),
        ({"prior": np.ones((P, 2))}, [r"\(31, 2\)", r"shape \(31, 31\)"]),
        ({"prior": asymmetric()}, ["symmetric"]),
        ({"prior": -np.eye(P)}, ["positive definite"]),
        ({"prior": np.ones((P, P))}, ["positive definite"]),
        ({"prior": np.full((P, P), np.nan)}, ["prior"]),
        ({"prior": np.eye(P), "hessian_structure": "kron"}, ["'kron'", "'full'"]),
        ({"prior": np.eye(P), "prior_structure": "layerwise"}, ["a matrix replaces"]),
        ({"prior": np.eye(P), "prior_precision": 2.0}, ["prior_precision"]),
        ({"prior": np.eye(P), "prior_structure": "diag"}, ["prior_structure"]),
        ({"prior": np.eye(P), "sigma_noise": "auto"}, ["sigma_noise"]),
        ({"prior": np.eye(P), "refine": True}, [r"posterior_\.earlier"]),
        ({"prior": 2.0}, ["prior"]),
        ({"prior_precision": np.eye(P)}, ["prior="]),
        ({"prior_precision": -matrix()}, ["prior="]),
    ],
)
def test_what_does_not_fit_is_refused(settings, words):
    with pytest.raises(ValueError, match=words[0]) as error:
        fitted(**settings)
    for word in words:
        assert error.match(word)


def test_hyperparameters_cannot_be_changed_afterwards():
    model, _ = fitted(prior=matrix())
    with pytest.raises(ValueError, match="matrix"):
        model.log_marginal_likelihood(2.0)
    with pytest.raises(ValueError, match="matrix"):
        model.tune()


# -------------------------------------------------- groups that share one precision
GROUPS = ["backbone", "head"]
GROUP_STRUCTURES = [
    "kron",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("full", "diag", "lowrank", "gp")
    ),
]


class Backbone(nn.Module):
    """A backbone of two layers and a head."""

    def __init__(self, n_out=1):
        super().__init__()
        layers = nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()
        self.backbone, self.head = nn.Sequential(*layers), nn.Linear(6, n_out)

    def forward(self, X):
        return self.head(self.backbone(X))


def of_groups(**settings):
    X, y = waves(60)
    net = regressor(Backbone, max_epochs=40, optimizer=torch.optim.Adam)
    defaults = {"subset_of_weights": "all", "hessian_structure": "full"}
    defaults |= {"prior_precision": "marglik", "prior_structure": GROUPS}
    options = defaults | {"random_state": 0} | settings
    return LaplaceRegressor(net, **options).fit(X, y)


def test_evidence_is_maximised_over_groups():
    model = of_groups(sigma_noise=0.2)

    def loss(logs):
        return -model.log_marginal_likelihood(np.exp(logs))

    best = minimize(loss, np.zeros(2), options={"gtol": 1e-6})
    assert model.prior_precision_.shape == (2,)
    assert_allclose(np.log(model.prior_precision_), best.x, atol=1e-3)


@pytest.mark.parametrize("structure", GROUP_STRUCTURES)
@pytest.mark.parametrize("prior", ["auto", "marglik"])
def test_tensors_of_a_group_are_equal(structure, prior):
    model = of_groups(prior_precision=prior, hessian_structure=structure)
    first, second = model.prior_precision_
    assert first != second
    expected = [first] * 4 + [second] * 2
    assert model.posterior_.prior_precision.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("structure", GROUP_STRUCTURES)
def test_given_numbers_of_groups(structure):
    """Groups equal separate tensors with the same numbers."""
    settings = {"hessian_structure": structure, "sigma_noise": 0.2}
    model = of_groups(prior_precision=[1.0, 20.0], **settings)
    same = [1.0] * 4 + [20.0] * 2
    expected = of_groups(prior_precision=same, prior_structure="layerwise", **settings)
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
    model = of_groups(prior_structure=[""], **settings)
    expected = of_groups(prior_structure="scalar", **settings)
    assert_allclose(model.prior_precision_, [expected.prior_precision_], rtol=1e-3)
    assert model.sigma_noise_ == pytest.approx(expected.sigma_noise_, rel=1e-4)


def test_groups_take_geometric_means_of_a_callback():
    X, y = waves(60)
    callback = MarglikTraining()
    net = regressor(Backbone, max_epochs=20, callbacks=[("prior", callback)])
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
def test_groups_that_cannot_be(settings, words):
    with pytest.raises(ValueError, match=words):
        of_groups(**settings)
