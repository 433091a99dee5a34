"""A posterior as the prior of the next task."""

import pickle

import numpy as np
import pytest
import torch
from cases import DOUBLE
from contracts import assert_equal
from nets import (
    LinearModel,
    RecordTraining,
    blobs,
    classifier,
    initialised,
    regressor,
    seeded,
)
from refusals import refused_fit
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from torch import nn

from sklaplace import LaplaceClassifier, LaplaceRegressor, PriorTraining
from sklaplace.posterior.tuning.evidence import marglik

STRUCTURES = ["diag", "full", "kron"]
every_structure = pytest.mark.parametrize("structure", STRUCTURES)
SIGMA, DELTA = 0.5, 0.8
TWO = {"module__n_out": 2}


# ---------------------------------------------------------------- linear and Gaussian
def linear_rows(n=24, n_features=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, n_features))
    coefficients = np.array([1.0, -2.0, 0.5])
    return X, X @ coefficients + 0.3 + SIGMA * rng.normal(size=n)


def linear_net(mean=None):
    """Return a linear network with given weights."""
    net = initialised(regressor(LinearModel, module__n_in=3))
    if mean is not None:
        with torch.no_grad():
            net.module_.head.weight.copy_(torch.as_tensor(mean[:-1]).reshape(1, -1))
            net.module_.head.bias.copy_(torch.as_tensor(mean[-1:]))
    return net


def solved(X, y, precision, mean, sigma=SIGMA, temperature=1.0):
    """Return posterior precision and mean of the linear model in closed form."""
    design = np.c_[X, np.ones(len(X))]
    P = design.T @ design / sigma**2 / temperature + precision
    b = design.T @ y / sigma**2 / temperature + precision @ mean
    return P, np.linalg.solve(P, b)


def linear_model(mean, net=None, **settings):
    net = FrozenEstimator(linear_net(mean)) if net is None else net
    kinds = {"subset_of_weights": "all", "hessian_structure": "full"}
    kinds["residual"] = "none"
    settings = {"sigma_noise": SIGMA, "batch_size": 5} | kinds | settings
    return LaplaceRegressor(net, random_state=0, **settings)


@pytest.mark.parametrize("n", [24, 3])
@pytest.mark.parametrize(
    ("prior_structure", "delta", "full"),
    [
        ("scalar", DELTA, [DELTA] * 4),
        ("layerwise", [0.8, 2.0], [0.8, 0.8, 0.8, 2.0]),
        ("diag", [0.8, 1.0, 1.2, 2.0], [0.8, 1.0, 1.2, 2.0]),
    ],
    ids=["scalar", "layerwise", "diag"],
)
def test_two_tasks_are_one(n, prior_structure, delta, full):
    """Mean, covariance and evidence are equal, also in dual form."""
    prior = {"prior_precision": delta, "prior_structure": prior_structure}
    X, y = linear_rows(2 * n)
    P1, mean1 = solved(X[:n], y[:n], np.diag(full), np.zeros(4))
    P, mean = solved(X, y, np.diag(full), np.zeros(4))
    first = linear_model(mean1, **prior).fit(X[:n], y[:n])
    second = linear_model(mean, prior=first.posterior_).fit(X[n:], y[n:])
    joint = linear_model(mean, **prior).fit(X, y)
    assert_equal(second.posterior_.precision_matrix(), torch.tensor(P), 1e-10)
    found = [m.predict(X, return_std=True) for m in (second, joint)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-9)
    total = first.log_marginal_likelihood() + second.log_marginal_likelihood()
    assert total == pytest.approx(joint.log_marginal_likelihood(), rel=1e-10)
    # the earlier posterior is the quadratic form that it stands for
    earlier = first.posterior_.as_prior()
    theta = torch.tensor(mean)
    offset = theta - torch.tensor(mean1)
    assert_equal(earlier.gradient(theta), torch.tensor(P1) @ offset, 1e-9)
    form = offset @ torch.tensor(P1) @ offset
    assert_equal(earlier.quadratic_form(theta), form, 1e-9)
    assert_equal(earlier.logdet(), torch.logdet(torch.tensor(P1)), 1e-10)


def test_two_tasks_are_one_under_a_noise_level_for_each_column():
    X, y = linear_rows()
    Y = np.c_[y, 2 * y[::-1]]
    net = FrozenEstimator(initialised(regressor(LinearModel, module__n_in=3, **TWO)))
    settings = {"net": net, "sigma_noise": [SIGMA, 3 * SIGMA]}
    first = linear_model(None, prior_precision=DELTA, **settings).fit(X[:12], Y[:12])
    second = linear_model(None, prior=first.posterior_, **settings).fit(X[12:], Y[12:])
    joint = linear_model(None, prior_precision=DELTA, **settings).fit(X, Y)
    expected = joint.posterior_.precision_matrix()
    assert_equal(second.posterior_.precision_matrix(), expected, 1e-10)
    ratio = np.divide(*joint.latent_mean_and_variance(X)[1].T)
    assert (ratio < 1).all()  # the levels are not those of equal columns


def test_three_tasks_with_other_noise_and_temperature():
    X, y = linear_rows(30)
    P, mean = DELTA * np.eye(4), np.zeros(4)
    prior = {"prior_precision": DELTA}
    for k, (sigma, temperature) in enumerate([(0.5, 1.0), (1.5, 2.0), (0.3, 0.7)]):
        part = slice(10 * k, 10 * k + 10)
        P, mean = solved(X[part], y[part], P, mean, sigma, temperature)
        given = {"sigma_noise": sigma, "temperature": temperature}
        model = linear_model(mean, **prior, **given).fit(X[part], y[part])
        assert_equal(model.posterior_.precision_matrix(), torch.tensor(P), 1e-10)
        prior = {"prior": model.posterior_}


def test_training_ends_at_the_joint_mean():
    X, y = linear_rows(48)
    _, mean1 = solved(X[:24], y[:24], DELTA * np.eye(4), np.zeros(4))
    _, mean = solved(X, y, DELTA * np.eye(4), np.zeros(4))
    first = linear_model(mean1, prior_precision=DELTA).fit(X[:24], y[:24])
    steps = {"max_epochs": 400, "lr": 0.1, "optimizer": torch.optim.SGD}
    callbacks = [PriorTraining(first.posterior_)]
    net = regressor(LinearModel, module__n_in=3, callbacks=callbacks, **steps)
    second = linear_model(None, net, prior=first.posterior_, batch_size=None)
    second.fit(X[24:], y[24:])
    assert_equal(second.posterior_.mean, torch.tensor(mean), 1e-8)
    joint = linear_model(mean, prior_precision=DELTA).fit(X, y)
    total = first.log_marginal_likelihood() + second.log_marginal_likelihood()
    assert total == pytest.approx(joint.log_marginal_likelihood(), rel=1e-8)


# ----------------------------------------------------------------------- any network
def fitted(net, X, y, **settings):
    settings = {"subset_of_weights": "all", "random_state": 0} | settings
    settings["residual"] = "none"
    return LaplaceClassifier(FrozenEstimator(net), **settings).fit(X, y)


@every_structure
@pytest.mark.parametrize("subset", ["all", "last_layer", ["hidden"]])
@pytest.mark.parametrize("curvature", ["ggn", "ef"])
def test_at_the_same_weights_it_is_partial_fit(structure, subset, curvature):
    X, y = blobs(n=40, dtype=np.float64)
    net = initialised(classifier(module__dtype=DOUBLE))
    kinds = {"subset_of_weights": subset, "curvature": curvature}
    kinds["hessian_structure"] = structure
    first = fitted(net, X[:25], y[:25], prior_precision=DELTA, **kinds)
    second = fitted(net, X[25:], y[25:], prior=first.posterior_, **kinds)
    before = first.posterior_.precision_matrix().clone()
    joint = clone(first).fit(X[:25], y[:25]).partial_fit(X[25:], y[25:])
    expected = joint.posterior_.precision_matrix()
    assert_equal(second.posterior_.precision_matrix(), expected, 1e-10)
    proba = joint.predict_proba(X)
    np.testing.assert_allclose(second.predict_proba(X), proba, rtol=1e-8)
    assert second.prior_precision_ == DELTA
    assert torch.equal(first.posterior_.precision_matrix(), before)
    # only for full and diag are precisions sums
    P = second.posterior_.earlier
    offset = torch.linspace(-1, 1, len(P.mean), dtype=DOUBLE)
    assert_equal(P.gradient(P.mean + offset), before @ offset, 1e-10)


@every_structure
def test_evidence_is_that_of_the_formula(structure):
    X, y = blobs(n=40, dtype=np.float64)
    kinds = {"hessian_structure": structure}
    nets = [initialised(classifier(module__dtype=DOUBLE), seed=seed) for seed in (0, 1)]
    first = fitted(nets[0], X[:25], y[:25], prior_precision=DELTA, **kinds)
    second = fitted(nets[1], X[25:], y[25:], prior=first.posterior_, **kinds)
    old, new = (m.posterior_.precision_matrix() for m in (first, second))
    logits = nets[1].module_(torch.tensor(X[25:])).detach()
    log_likelihood = -nn.functional.cross_entropy(
        logits, torch.tensor(y[25:]), reduction="sum"
    )
    offset = second.posterior_.mean - first.posterior_.mean
    complexity = torch.logdet(new) - torch.logdet(old) + offset @ old @ offset
    expected = float(log_likelihood - complexity / 2)
    assert second.log_marginal_likelihood() == pytest.approx(expected, rel=1e-10)


@every_structure
def test_more_rows_and_copies(structure):
    """The prior stays the same if more rows are added to the task."""
    X, y = blobs(n=60, dtype=np.float64)
    net = initialised(classifier(module__dtype=DOUBLE))
    kinds = {"hessian_structure": structure}
    first = fitted(net, X[:20], y[:20], prior_precision=DELTA, **kinds)
    at_once = fitted(net, X[20:], y[20:], prior=first.posterior_, **kinds)
    model = fitted(net, X[20:40], y[20:40], prior=first.posterior_, **kinds)
    model.partial_fit(X[40:], y[40:])
    expected = at_once.posterior_.precision_matrix()
    assert_equal(model.posterior_.precision_matrix(), expected, 1e-10)
    value = at_once.log_marginal_likelihood()
    assert model.log_marginal_likelihood() == pytest.approx(value, rel=1e-10)
    copy = pickle.loads(pickle.dumps(at_once))
    assert copy.log_marginal_likelihood() == pytest.approx(value, rel=1e-12)
    again = clone(at_once).fit(X[20:], y[20:])
    assert again.log_marginal_likelihood() == pytest.approx(value, rel=1e-12)


# ------------------------------------------------------------------------- refusals
ROWS, LABELS = blobs(n=30)
RECORD = {"callbacks": [RecordTraining()]}


@pytest.fixture(scope="module")
def earlier():
    model = LaplaceClassifier(FrozenEstimator(initialised(classifier())))
    return model.set_params(prior_precision=DELTA).fit(ROWS, LABELS)


def refused(model, *words, error=ValueError):
    """Check that the error comes before the first step and changes nothing."""
    refused_fit(model, *words, error=error, data=(ROWS, LABELS))


BOTH = {"prior_precision": "marglik", "prior_mean": 1.0}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prior_precision": 2.0}, ["'prior_precision' and prior are both given"]),
        (BOTH, ["'prior_mean', 'prior_precision' and prior"]),
        ({"prior_structure": "layerwise"}, ["'prior_structure' and prior"]),
        ({"refine": True}, ["refine=True cannot be used with prior"]),
        ({"hessian_structure": "diag"}, ["'diag'", "structure 'kron'"]),
        ({"hessian_structure": "lowrank"}, ["'lowrank'", "'diag', 'full', 'kron'"]),
        ({"subset_of_weights": "all"}, ["other weights", "'head.weight' (3, 6)"]),
        ({"subset_of_weights": "subnetwork"}, ["'indices'"]),
    ],
)
def test_settings_that_contradict_an_earlier_posterior(earlier, settings, words):
    net = classifier(**RECORD)
    refused(LaplaceClassifier(net, prior=earlier.posterior_, **settings), *words)


def test_other_single_weights():
    net = FrozenEstimator(initialised(classifier()))
    kinds = {"subset_of_weights": "subnetwork", "hessian_structure": "full"}

    def model(*indices, **settings):
        params = {"indices": list(indices)}
        return LaplaceClassifier(net, subset_params=params, **kinds, **settings)

    prior = model(0, 3, 7, prior_precision=DELTA).fit(ROWS, LABELS).posterior_
    second = model(0, 3, 7, prior=prior).fit(ROWS, LABELS)
    assert second.posterior_.precision_matrix().shape == (3, 3)
    refused(model(0, 4, 7, prior=prior), "other weights", "3 weights of")


def test_noise_has_to_be_given():
    first = linear_model(None, prior_precision=DELTA).fit(*linear_rows())
    model = linear_model(None, prior=first.posterior_, sigma_noise="auto")
    words = "sigma_noise='auto' cannot be tuned with prior"
    refused_fit(model, words, data=linear_rows())


def test_hyperparameters_cannot_be_asked_any_more(earlier):
    frozen = FrozenEstimator(earlier.estimator_)
    model = LaplaceClassifier(frozen, prior=earlier.posterior_).fit(ROWS, LABELS)
    with pytest.raises(ValueError, match="cannot be changed, because the prior"):
        model.log_marginal_likelihood(prior_precision=2.0)
    with pytest.raises(ValueError, match="cannot be changed, because the prior"):
        marglik(model.posterior_)


# -------------------------------------------------------------------- PriorTraining
def test_the_training_starts_at_the_mean_and_adds_the_gradient(earlier):
    steps = {"max_epochs": 1, "lr": 0.0, "optimizer": torch.optim.SGD}
    net = classifier(callbacks=[PriorTraining(earlier.posterior_)], **steps)
    seeded(net, ROWS, LABELS, seed=5)
    own = dict(net.module_.named_parameters())
    found = earlier.posterior_.layout.read(net.module_)
    assert torch.equal(found, earlier.posterior_.mean)
    # at the mean the prior has no gradient
    loss = net.get_loss(net.module_(torch.tensor(ROWS)), torch.tensor(LABELS))
    gradients = torch.autograd.grad(loss, list(own.values()))
    for parameter, gradient in zip(own.values(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@every_structure
def test_gradients_are_those_of_the_quadratic(structure):
    """The gradients are compared away from the mean, after a known step."""
    X, y = blobs(n=30, dtype=np.float64)
    net = initialised(classifier(module__dtype=DOUBLE))
    first = fitted(net, X, y, prior_precision=DELTA, hessian_structure=structure)
    steps = {"optimizer": torch.optim.SGD, "lr": 0.01, "max_epochs": 2}
    callbacks = [PriorTraining(first.posterior_, temperature=1.7)]
    trained = classifier(module__dtype=DOUBLE, callbacks=callbacks, **steps)
    seeded(trained, X, y)
    P = first.posterior_.precision_matrix()
    theta = first.posterior_.mean.clone()
    layout = first.posterior_.layout
    for _ in range(2):
        leaf = theta.clone().requires_grad_()
        named = layout.unflatten(leaf)
        f = torch.func.functional_call(net.module_, named, (torch.tensor(X),))
        offset = leaf - first.posterior_.mean
        energy = nn.functional.cross_entropy(f, torch.tensor(y), reduction="sum") / 1.7
        energy = energy + offset @ P @ offset / 2
        (gradient,) = torch.autograd.grad(energy, leaf)
        theta = theta - 0.01 * 1.7 / len(X) * gradient
    assert_equal(layout.read(trained.module_), theta, 1e-10)


def test_the_callback_refuses_other_networks(earlier):
    callbacks = [PriorTraining(earlier.posterior_)]
    net = classifier(module__width=5, callbacks=callbacks)
    with pytest.raises(ValueError, match="prior covers other weights"):
        seeded(net, ROWS, LABELS)
    net = classifier(nn.Linear, callbacks=callbacks)
    net.set_params(module__in_features=2, module__out_features=3)
    with pytest.raises(ValueError, match="but the selected subset has none"):
        seeded(net, ROWS, LABELS)
