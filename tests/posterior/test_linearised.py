"""Refit of all weights to the MAP estimate of the linearised network."""

import pickle

import numpy as np
import pytest
import references
import torch
from contracts import N_ROWS, assert_equal, problem
from nets import LinearModel, blobs, classifier, seeded
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator

from sklaplace import LaplaceClassifier
from sklaplace.core.random import row_hash
from sklaplace.curvature.ggn import CURVATURES
from sklaplace.curvature.jacobian import backpropagate
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.posterior import linearised
from sklaplace.posterior.linearised import LinearisedNetwork
from sklaplace.posterior.tuning.problem import LinearisedBatch

pytestmark = pytest.mark.usefixtures("rng_untouched")

CONVEX = [name for name in references.CONVEX if name != "Bernoulli"]
KINDS = ["full", "kron", "diag", "lowrank", "gp"]
ALL = {"subset_of_weights": "all", "refine": True}


class Passes:
    """Training rows in two batches, with a count of linearisations."""

    def __init__(self, found, weights=None):
        self.found, self.n = found, 0
        self.batches = found.batches(4, 2, weights=weights)

    def __iter__(self):
        self.n += 1
        for x, y, weights in self.batches:
            f, jacobian = backpropagate(self.found.forward, x, self.found.layout)
            targets = self.found.likelihood.targets(y, f)
            w = torch.ones(len(f)) if weights is None else weights
            yield LinearisedBatch(f, jacobian, targets, w, row_hash(x))


def tangent(found, structure="full", prior="scalar", weights=None, curvature="ggn"):
    posterior = found.posterior(structure, prior)
    rows = Passes(found, weights)
    makes = STRUCTURES[structure][0]
    model = LinearisedNetwork.of(posterior, rows, CURVATURES[curvature], makes)
    return model, posterior, rows


def reference(found, posterior, weights=None):
    """Return the minimum of the objective and ``H`` there, with dense ``J``."""
    J, h = found.parts.J, posterior.hyperparameters
    w = torch.ones(N_ROWS, dtype=J.dtype) if weights is None else weights
    delta = references.expand(h.prior_precision, found.layout)
    rho = delta / posterior.loss_scale
    f0 = found.forward(found.x).detach()
    targets = found.likelihood.targets(found.y, f0)
    theta = posterior.weights.clone()

    def outputs(theta):
        return f0 + torch.einsum("ncp,p->nc", J, theta - posterior.weights)

    def energy(theta):
        loss = w @ found.likelihood.loss(outputs(theta), targets)
        return loss + (rho * (theta - h.prior_mean) ** 2).sum() / 2

    for _ in range(100):  # damped Newton steps by automatic differentiation
        gradient = torch.autograd.functional.jacobian(energy, theta)
        hessian = torch.autograd.functional.hessian(energy, theta)
        step = torch.linalg.solve(hessian, gradient)
        size = 1.0
        while energy(theta - size * step) > energy(theta) and size > 1e-9:
            size /= 2
        theta = theta - size * step
        if step.abs().max() < 1e-12:
            break
    L = found.likelihood.hessian(outputs(theta)).factor()
    L = w[:, None, None] * (L @ L.mT)
    H = torch.einsum("ncp,ncd,ndq->pq", J, L, J)
    return theta, H, energy(theta), outputs(theta)


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
@pytest.mark.parametrize("likelihood", CONVEX)
@pytest.mark.parametrize("case", ["mlp", "cnn", "lstm"])
def test_the_minimum_of_the_linearised_objective(case, likelihood, prior):
    found = problem(case, likelihood)
    model, posterior, _ = tangent(found, prior=prior)
    refitted = model.refit(posterior)
    theta, H, energy, f = reference(found, posterior)
    assert_equal(refitted.mean, theta, 1e-7)
    assert_equal(model.at(refitted.mean), f, 1e-8)
    assert_equal(refitted.structure.dense(), H, 1e-7)
    # log p(D) of the tangent: curvature and loss where it is most probable
    delta = references.expand(posterior.prior_precision, found.layout)
    precision = posterior.scale * H + delta.diag()
    h = posterior.hyperparameters
    normalizer = found.likelihood.log_normalizer(h.sigma_noise)
    value = -energy * posterior.loss_scale - posterior.data_fit.n_targets * normalizer
    value = value - (torch.logdet(precision) - delta.log().sum()) / 2
    assert_equal(refitted.log_marginal_likelihood(), value, 1e-8)
    # neither the network's own weights nor its own curvature will do
    assert refitted.log_marginal_likelihood() > posterior.log_marginal_likelihood()
    if likelihood != "Gaussian":
        own = posterior.structure.dense()
        assert (own - H).abs().max() > 1e-3 * H.abs().max()


@pytest.mark.parametrize("structure", KINDS)
def test_any_structure_is_refitted_to_the_same_weights(structure):
    found = problem("mlp")
    model, posterior, _ = tangent(found, structure)
    theta, H, _, f = reference(found, posterior)
    refitted = model.refit(posterior)
    assert_equal(refitted.mean, theta, 1e-7)
    if structure not in ("kron", "diag"):
        assert_equal(refitted.structure.dense(), H, 1e-7)
    assert_equal(refitted.data_fit.loss, model.loss(f), 1e-8)


def test_sample_weights():
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0, 0.1], dtype=torch.float64)
    found = problem("mlp")
    model, posterior, _ = tangent(found, weights=weights)
    theta, H, _, _ = reference(found, posterior, weights)
    refitted = model.refit(posterior)
    assert_equal(refitted.mean, theta, 1e-7)
    assert_equal(refitted.structure.dense(), H, 1e-7)


def test_rows_are_kept_where_they_fit(monkeypatch):
    found = problem("cnn")
    model, posterior, rows = tangent(found)
    kept = model.refit(posterior)
    assert rows.n == 1
    monkeypatch.setattr(linearised, "free_bytes", lambda device: 0)
    model, posterior, rows = tangent(found)
    again = model.refit(posterior)
    assert rows.n > 2
    assert torch.equal(kept.mean, again.mean)


def test_a_linear_network_is_refitted_as_its_last_layer():
    """If the last layer has all weights, both refits must agree."""
    X, y = blobs(dtype=np.float64)
    net = classifier(LinearModel, module__n_out=3)
    net = FrozenEstimator(seeded(net, X, y))
    model = LaplaceClassifier(net, prior_precision=2.0, random_state=0, **ALL)
    proba = model.fit(X, y).predict_proba(X)
    again = model.set_params(subset_of_weights="last_layer").fit(X, y)
    np.testing.assert_allclose(again.predict_proba(X), proba, rtol=1e-8)


@pytest.mark.parametrize("prior", [1.0, "marglik", "validation"])
@pytest.mark.parametrize("structure", ["kron", "gp", "nystrom"])
def test_estimators_refine_all_weights(structure, prior, tmp_path):
    X, y = blobs(n=90)
    options = {"hessian_structure": structure, "prior_precision": prior}
    options |= {"random_state": 0, "memory": tmp_path}
    model = LaplaceClassifier(classifier(max_epochs=3), **ALL, **options)
    again = clone(model).fit(X, y)
    assert model.fit(X, y).posterior_.is_refitted
    for other in (again, pickle.loads(pickle.dumps(model))):
        proba = other.predict_proba(X)
        np.testing.assert_array_equal(proba, model.predict_proba(X))
    with pytest.raises(ValueError, match="New rows are linearised"):
        model.partial_fit(X, y)


def test_the_networks_own_draws_are_refused():
    X, y = blobs()
    model = LaplaceClassifier(classifier(), pred_type="nn", **ALL)
    with pytest.raises(ValueError, match="linearised network"):
        model.fit(X, y)
