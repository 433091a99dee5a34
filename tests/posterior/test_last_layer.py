from dataclasses import replace

import pytest
import references
import torch
import tuning_problems
from cases import CASES, DOUBLE, Case, Net, normal, positive, rows
from contracts import STRUCTURES_AND_PRIORS, accumulate, assert_equal
from costs import counted
from torch import nn
from tuning_problems import N_ROWS, fit

from sklaplace.curvature.ggn import GGN
from sklaplace.curvature.structures import STRUCTURES, kron
from sklaplace.curvature.structures.kron import KronAccumulator
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.likelihoods import Gaussian
from sklaplace.posterior import last_layer
from sklaplace.posterior.last_layer import LastLayerRecorder, refit_bytes

every_likelihood = pytest.mark.parametrize("likelihood", references.CONVEX)
every_structure = pytest.mark.parametrize("structure", STRUCTURES)
every_prior = pytest.mark.parametrize(("structure", "prior"), STRUCTURES_AND_PRIORS)
every_case = pytest.mark.parametrize("case", ["mlp", "without_bias", "affine_head"])

pytestmark = pytest.mark.usefixtures("rng_untouched")


def moved_network(fitted, case, theta):
    """Return the network with other weights in its last layer."""
    width = tuning_problems.WIDTHS[type(fitted.likelihood).__name__]
    forward = CASES[case].forward(width)
    parameters = dict(forward.module.named_parameters())
    for name, value in fitted.layout.unflatten(theta).items():
        parameters[name].data = value
    return forward


def gradient(fitted, posterior, case="mlp"):
    """Return the gradient (P,) of ``-log joint`` in the last layer, by autograd."""
    forward = moved_network(fitted, case, posterior.mean)
    named = dict(forward.module.named_parameters())
    leaves = [named[block.name].requires_grad_() for block in fitted.layout.blocks]
    h = posterior.hyperparameters
    f = forward(fitted.x)
    log_prob = references.log_likelihood(fitted.likelihood, f, fitted.y, h.sigma_noise)
    w = torch.ones(len(f)).double() if fitted.weights is None else fitted.weights
    theta = torch.cat([leaf.flatten() for leaf in leaves])
    delta = references.expand(h.prior_precision, fitted.layout)
    penalty = (delta * (theta - h.prior_mean) ** 2).sum() / 2
    objective = penalty - w @ log_prob / h.temperature
    parts = torch.autograd.grad(objective, leaves)
    return torch.cat([part.flatten() for part in parts])


# -------------------------------------------------------------- the linear model


@every_likelihood
@every_structure
@every_case
def test_posterior_is_that_of_the_network_with_other_weights(
    case, structure, likelihood
):
    w = positive(N_ROWS)
    fitted = fit(likelihood, structure, case=case, weights=w)
    theta = fitted.linear_model.weights + normal(fitted.layout.n_parameters, seed=3)
    found = fitted.linear_model.posterior(fitted.posterior, theta)
    forward, rows = moved_network(fitted, case, theta), [(fitted.x, fitted.y, w)]
    accumulator = STRUCTURES[structure][0](fitted.layout)
    data_fit = accumulate(forward, rows, fitted.likelihood, GGN, accumulator)
    assert_equal(found.structure.dense(), accumulator.decompose().dense(), 1e-10)
    assert_equal(found.data_fit.loss, data_fit.loss, 1e-12)
    assert_equal(found.data_fit.n_targets, data_fit.n_targets, 1e-12)
    assert torch.equal(found.mean, theta)
    assert torch.equal(found.weights, fitted.posterior.weights)
    assert found.is_refitted


# ------------------------------------------------------------------------ refit
@every_likelihood
@every_prior
def test_refit_is_at_the_most_probable_weights(structure, prior, likelihood):
    given = {"prior_mean": 0.4, "temperature": 1.6, "weights": positive(N_ROWS)}
    fitted = fit(likelihood, structure, prior, **given)
    shape = fitted.posterior.prior_precision.shape
    template = fitted.posterior.replace(prior_precision=positive(*shape, seed=6))
    found = fitted.linear_model.refit(template)
    assert gradient(fitted, found).abs().max() < 1e-6
    assert found.hyperparameters is template.hyperparameters


@pytest.mark.parametrize("likelihood", ["Categorical", "Bernoulli", "Gaussian"])
def test_refit_of_separable_rows_with_large_features(likelihood):
    """Newton steps overshoot, because the loss is flat on one side of the border."""
    fitted = fit(likelihood, prior_precision=1e-3)
    f = fitted.linear_model.outputs
    y = {"Gaussian": f, "Bernoulli": f > 0, "Categorical": f.argmax(1)}[likelihood]
    x, targets = 30 * fitted.linear_model.features, fitted.likelihood.targets(y, f)
    model = replace(fitted.linear_model, features=x, targets=targets)
    start = 5 * normal(fitted.layout.n_parameters, seed=9)
    found = model.refit(fitted.posterior, start)
    rho = torch.full_like(start, 1e-3) / fitted.posterior.scale
    _, slope, _ = model.objective(found.mean, rho, torch.zeros_like(start))
    assert slope.abs().max() < 1e-6
    again = model.refit(fitted.posterior)
    assert_equal(again.mean, found.mean, 1e-4)


@every_likelihood
@every_structure
def test_rows_in_several_batches_make_the_same_posterior(
    structure, likelihood, monkeypatch
):
    fitted = fit(likelihood, structure)
    model = fitted.linear_model
    whole = model.posterior(fitted.posterior, model.weights)
    monkeypatch.setattr("sklaplace.posterior.last_layer.batch_rows", lambda _bytes: 7)
    found = model.posterior(fitted.posterior, model.weights)
    assert_equal(found.structure.dense(), whole.structure.dense(), 1e-12)


# ------------------------------------------------- more inputs than training samples
WIDE = 90


def fit_wide(likelihood="Categorical", *args, n_inputs=WIDE, **options):
    """Fit a last layer with more inputs than samples."""

    def run(net, x):
        return net.head(net.first(x).tanh())

    def make(c):
        return Net(run, first=nn.Linear(2, n_inputs), head=nn.Linear(n_inputs, c))

    return fit(likelihood, *args, case=Case(make, rows(2)), **options)


def bytes_of_blocks(n):
    """Return the bytes of matrices of size n, at most one for each of three outputs."""
    return 3 * 8 * 3 * n**2


@every_likelihood
@pytest.mark.parametrize("prior", ["scalar", "layerwise", "diag"])
@pytest.mark.parametrize(
    ("budget", "widest"),
    [
        pytest.param(bytes_of_blocks(N_ROWS), 8192, id="block of an output"),
        pytest.param(0, 8192, id="kronecker"),
        pytest.param(0, N_ROWS - 1, id="diagonal"),
    ],
)
def test_refit_by_products_of_samples_is_that_by_products_of_inputs(
    budget, widest, prior, likelihood, monkeypatch
):
    weights = positive(N_ROWS)
    fitted = fit_wide(likelihood, "diag", prior, weights=weights)
    shape = fitted.posterior.prior_precision.shape
    template = fitted.posterior.replace(prior_precision=positive(*shape, seed=6))
    expected = fitted.linear_model.refit(template)
    monkeypatch.setattr(last_layer, "BUDGET", budget)
    monkeypatch.setattr(kron, "MAX_DENSE_WIDTH", widest)
    found = fitted.linear_model.refit(template)
    # a gradient of 1e-7 and a precision of at least 0.3
    assert_equal(found.mean, expected.mean, 1e-6)


@pytest.mark.parametrize("delta", [1e-2, 1.0, 1e4])
def test_newton_steps_by_products_of_samples_are_exact_for_squared_errors(delta):
    fitted = fit_wide("Gaussian", "diag", n_inputs=1300)
    model, f = fitted.linear_model, fitted.linear_model.outputs
    rho = delta * positive(fitted.layout.n_parameters)
    v = normal(len(rho), seed=2)
    found = model.preconditioner_at(f, rho, torch.float64)(v)
    # differences of v/ρ and what samples explain of it round to eps·H/ρ, H below 1e5
    assert_equal(model.curvature_at(f, rho, DOUBLE)(found), v, 1e-7)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_refit_makes_no_matrix_over_pairs_of_inputs(structure):
    """A Kronecker factor above the width limit keeps its diagonal, as in ``fit``."""
    n_inputs = kron.MAX_DENSE_WIDTH + 1
    fitted = fit_wide("Categorical", structure, n_inputs=n_inputs)
    with counted() as costs:
        found = fitted.linear_model.refit(fitted.posterior)
        found.log_marginal_likelihood()
    assert costs.largest <= N_ROWS * n_inputs
    assert max(costs.eigh + costs.cholesky) <= N_ROWS


def test_factors_of_fewer_samples_than_inputs_are_diagonalised_as_roots():
    fitted = fit_wide("Categorical", "kron", n_inputs=400)
    with counted() as costs:
        fitted.posterior.log_marginal_likelihood()
        fitted.linear_model.refit(fitted.posterior).log_marginal_likelihood()
    assert N_ROWS in costs.eigh
    assert max(costs.eigh) <= N_ROWS


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("n_inputs", [400, 2000])
def test_refit_takes_no_more_memory_than_is_checked_before(n_inputs, structure):
    fitted = fit_wide("Categorical", structure, n_inputs=n_inputs)
    with counted() as costs:
        fitted.linear_model.refit(fitted.posterior)
    expected = refit_bytes(fitted.layout, N_ROWS, 3)
    if structure == "kron":
        expected += KronAccumulator.n_bytes(fitted.layout)
    vectors = 20 * 8 * fitted.layout.n_parameters  # of conjugate gradients
    assert costs.peak <= expected + last_layer.BUDGET + vectors


# ------------------------------------------------ where there is no linear model
def test_no_model_where_a_nonlinearity_follows_the_last_layer():
    """The first rows look linear; one late row does not."""

    def run(net, x):
        h = net.head(x)
        return torch.where((x[:, :1] > 2).expand_as(h), h**2, h)

    fitted = fit(case=Case(lambda c: Net(run, head=nn.Linear(2, c)), rows(2)))
    assert (fitted.x[:, 0] > 2).any()
    assert not (fitted.x[:4, 0] > 2).any()
    assert fitted.linear_model is None


def test_no_model_where_positions_are_averaged():
    assert fit().linear_model is not None
    assert fit(case="head_on_positions").linear_model is None


def test_no_model_where_the_bias_is_used_once_more():
    """The weight looks like a last layer, but the bias counts three times."""

    def run(net, x):
        return net.head(net.first(x).tanh()) + 2 * net.head.bias

    def make(c):
        return Net(run, first=nn.Linear(2, 3), head=nn.Linear(3, c))

    assert fit(case=Case(make, rows(2))).linear_model is None


@pytest.mark.parametrize("size", [1e-5, 1.0, 1e5])
def test_single_precision(size):
    """The outputs may have any unit; rounding is relative to the outputs."""
    forward = CASES["affine_head"].forward(3)
    forward.module.mix *= size
    forward.module.float()
    x = CASES["affine_head"].rows(N_ROWS).float()
    layout = SUBSETS["last_layer"](forward, x)
    found = tuning_problems.head_map(forward, x, layout)
    collected = LastLayerRecorder(found)
    y = forward(x).detach()
    accumulator = STRUCTURES["diag"][0](layout)
    accumulate(forward, [(x, y, None)], Gaussian(), GGN, accumulator, collected.add)
    template = replace(fit().posterior, layout=layout, likelihood=Gaussian())
    assert collected.build(template, GGN, STRUCTURES["diag"][0]) is not None
    assert_equal(found.T, forward.module.mix.double(), 1e-6)
