"""normalize_y: networks trained on normalised targets.

The reference is the same estimator, fitted to targets normalised by hand, with
predictions mapped back.
"""

import pickle

import numpy as np
import pytest
import torch
from nets import MLP, DropoutMLP, initialised, regressor, seeded, twin, waves
from numpy.testing import assert_allclose
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from skorch.dataset import Dataset
from skorch.helper import predefined_split
from torch import nn

from sklaplace import (
    DeepEnsembleRegressor,
    LaplaceRegressor,
    LaplaceRegressorCV,
    MCDropoutRegressor,
    SWAGRegressor,
    VariationalRegressor,
)
from sklaplace.likelihoods import HeteroscedasticNLLLoss

DOUBLE = {"module__dtype": torch.float64}
CENTER, SCALE = np.array([-300.0, 2e4]), np.array([70.0, 0.01])
WEIGHTS = np.random.default_rng(2).uniform(0.2, 2.0, 60)
WEIGHTS[:5] = 0.0
FIXED = {"prior_precision": 2.0, "sigma_noise": 30.0}


def problem(n_targets=None, n=60):
    """Return inputs, and targets with unusual means and scales."""
    X, y = waves(n, n_targets=n_targets, dtype=np.float64)
    columns = slice(n_targets) if n_targets else 0
    return X, CENTER[columns] + SCALE[columns] * y


def net(n_targets=None, module=MLP, **params):
    settings = {"module__n_out": n_targets or 1, "lr": 0.1, "max_epochs": 5}
    return regressor(module, **DOUBLE, **settings | params)


def by_hand(y, weights=None):
    """Return the weighted mean and standard deviation of each column."""
    mean = np.average(y, axis=0, weights=weights)
    return mean, np.sqrt(np.average((y - mean) ** 2, axis=0, weights=weights))


def fitted_pair(model, X, y, sample_weight=None, **held_out):
    """Return models fitted with normalize_y and to normalised y, and the map."""
    mean, std = by_hand(y, sample_weight)
    own = {k: (v - mean) / std if k == "y_val" else v for k, v in held_out.items()}
    found = clone(model).set_params(normalize_y=True, random_state=0)
    truth = clone(model).set_params(random_state=0)
    noise = model.sigma_noise
    if not isinstance(noise, str):
        truth.set_params(sigma_noise=noise / std)
    found.fit(X, y, sample_weight, **held_out)
    return found, truth.fit(X, (y - mean) / std, sample_weight, **own), mean, std


def assert_same_predictions(found, truth, mean, std, X, y):
    """Compare all predictions in the units of y."""
    close = {"rtol": 1e-7, "atol": 1e-9 * np.min(std) ** 2}
    m, s = truth.predict(X, return_std=True)
    both = found.predict(X, return_std=True)
    assert_allclose(both, (mean + std * m, std * s), **close)
    m, cov = truth.predict(X, return_cov=True)
    found_cov = found.predict(X, return_cov=True)[1]
    assert_allclose(found_cov / std**2, cov, rtol=1e-7, atol=1e-9)
    for method in ("predict_quantiles", "predict_interval"):
        levels = [0.1, 0.6]
        values = getattr(truth, method)(X, levels)
        axes = (slice(None), *[None] * (values.ndim - 1 - np.ndim(std)))
        if np.ndim(std):
            expected = mean[axes] + std[axes] * values
        else:
            expected = mean + std * values
        assert_allclose(getattr(found, method)(X, levels), expected, **close)
    draws = truth.sample_y(X, 3, random_state=1)
    own = (np.array(v)[..., None] if np.ndim(std) else v for v in (mean, std))
    center, scale = own
    expected = center + scale * draws
    assert_allclose(found.sample_y(X, 3, random_state=1), expected, **close)
    # the density of y is that of its normalised value over the standard deviation
    density = truth._log_proba_of(X, (y - mean) / std) - np.sum(np.log(std))
    assert_allclose(found._log_proba_of(X, y), density, rtol=1e-7)
    assert_allclose(found.sigma_noise_, std * truth.sigma_noise_, rtol=1e-7)
    assert_allclose(found.score_samples(X), truth.score_samples(X), rtol=1e-6)
    assert_allclose(found.score(X, y), truth.score(X, (y - mean) / std), rtol=1e-7)


def assert_same_latents(found, truth, mean, std, X):
    m, v = truth.latent_mean_and_variance(X)
    found_mean, found_variance = found.latent_mean_and_variance(X)
    assert_allclose(found_mean, mean + std * m, rtol=1e-9)
    assert_allclose(found_variance, std**2 * v, rtol=1e-7)
    cov = truth.latent_mean_and_variance(X, full_cov=True)[1]
    outer = np.multiply.outer(np.atleast_1d(std), np.atleast_1d(std))
    found_cov = found.latent_mean_and_variance(X, full_cov=True)[1]
    assert_allclose(found_cov, outer * cov, rtol=1e-7, atol=1e-12 * np.max(outer))


@pytest.mark.filterwarnings("ignore:sigma_noise is estimated from training")
@pytest.mark.parametrize(
    "options",
    [
        {},
        FIXED,
        {"prior_precision": "marglik"},
        {"pred_type": "nn", "subset_of_weights": "all", "prior_precision": 20.0},
    ],
    ids=["auto", "fixed", "marglik", "nn"],
)
@pytest.mark.parametrize("n_targets", [None, 1, 2])
def test_laplace_predicts_in_the_units_of_y(options, n_targets):
    X, y = problem(n_targets)
    model = LaplaceRegressor(net(n_targets), **options)
    pair = fitted_pair(model, X, y)
    assert_same_predictions(*pair, X[:4], y[:4])
    assert_same_latents(*pair, X[:4])


@pytest.mark.parametrize("options", [{}, {"sigma_noise": np.array([3.0, 0.2])}])
def test_weights_and_held_out_samples(options):
    X, y = problem(2, n=90)
    held_out = {"X_val": X[60:], "y_val": y[60:]}
    model = LaplaceRegressor(net(2), **options)
    pair = fitted_pair(model, X[:60], y[:60], WEIGHTS, **held_out)
    assert_same_predictions(*pair, X[:4], y[:4])


@pytest.mark.parametrize("n_targets", [None, 2])
def test_evidence_is_that_of_the_density_of_y(n_targets):
    X, y = problem(n_targets)
    model = LaplaceRegressor(net(n_targets, train_split=None), **FIXED)
    found, truth, _, std = fitted_pair(model, X, y, WEIGHTS)
    change = -WEIGHTS.sum() * np.sum(np.log(std))
    expected = truth.log_marginal_likelihood_value_ + change
    assert_allclose(found.log_marginal_likelihood_value_, expected)
    # each column has the same noise in its own unit
    asked = {"prior_precision": 5.0, "sigma_noise": 40.0}
    own = {**asked, "sigma_noise": 40.0 / std}
    expected = truth.log_marginal_likelihood(**own) + change
    assert_allclose(found.log_marginal_likelihood(**asked), expected)
    default = found.log_marginal_likelihood(sigma_noise=30.0)
    assert_allclose(default, found.log_marginal_likelihood_value_)
    assert_allclose(found.sigma_noise_, 30.0)


@pytest.mark.slow
def test_more_samples_and_recalibration():
    X, y = problem(2, n=90)
    mean, std = by_hand(y[:60])
    found, truth, *units = fitted_pair(LaplaceRegressor(net(2)), X[:60], y[:60])
    for model, targets in ((found, y), (truth, (y - mean) / std)):
        model.partial_fit(X[60:80], targets[60:80])
        model.recalibrate(X[80:], targets[80:])
    assert_allclose(found.sigma_scaling_, truth.sigma_scaling_)
    assert_same_predictions(found, truth, *units, X[:4], y[:4])


@pytest.mark.parametrize("joint", [False, True])
def test_gaussian_in_the_graph_of_the_inputs(joint):
    X, y = problem(2)
    found, truth, mean, std = fitted_pair(LaplaceRegressor(net(2), **FIXED), X, y)
    x = torch.tensor(X[:6].reshape(2, 3, -1) if joint else X[:6])
    m, cov = (t.detach().numpy() for t in truth.predictive(x, joint=joint))
    center, scale = (np.tile(v, 3 if joint else 1) for v in (mean, std))
    found_mean, found_cov = found.predictive(x.requires_grad_(), joint=joint)
    assert_allclose(found_mean.detach(), center + scale * m)
    expected = cov * np.multiply.outer(scale, scale)
    assert_allclose(found_cov.detach(), expected, rtol=1e-7, atol=1e-12)
    found_mean.sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "model",
    [
        VariationalRegressor(net(2), n_samples=10),
        VariationalRegressor(net(2), n_samples=10, sigma_noise=np.array([20.0, 3.0])),
        MCDropoutRegressor(net(2, DropoutMLP), n_samples=10),
        DeepEnsembleRegressor(net(2), n_estimators=2),
        SWAGRegressor(net(2), n_snapshots=5, n_samples=10),
    ],
    ids=["variational", "known noise", "dropout", "ensemble", "swag"],
)
def test_estimators_of_draws(model):
    X, y = problem(2)
    found, truth, mean, std = fitted_pair(model, X, y)
    assert_same_predictions(found, truth, mean, std, X[:4], y[:4])
    if isinstance(model, VariationalRegressor):
        is_held_out = isinstance(model.sigma_noise, str)
        n = 48 if is_held_out else 60
        expected = truth.elbo_ - n * np.log(std).sum()
        assert_allclose(found.elbo_, expected)


def test_means_and_variances_as_outputs():
    X, y = problem()
    heteroscedastic = net(2, criterion=HeteroscedasticNLLLoss)
    model = LaplaceRegressor(heteroscedastic, prior_precision=2.0)
    found, truth, mean, std = fitted_pair(model, X, y)
    m, s = truth.predict(X, return_std=True)
    both = found.predict(X, return_std=True)
    assert_allclose(both, (mean + std * m, std * s), rtol=1e-9)
    interval = mean + std * truth.predict_interval(X)
    assert_allclose(found.predict_interval(X), interval, rtol=1e-6)
    m, v = truth.latent_mean_and_variance(X)
    found_mean, found_variance = found.latent_mean_and_variance(X)
    shift = np.array([mean, 2 * np.log(std)])
    factor = np.array([std, 1.0])
    assert_allclose(found_mean, shift + factor * m, rtol=1e-9)
    assert_allclose(found_variance, factor**2 * v, rtol=1e-7)
    assert found.sigma_noise_ == 1.0


@pytest.mark.parametrize("n_targets", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_cross_validation_chooses_noise_in_units_of_y(n_targets):
    X, y = problem(n_targets)
    options = {"prior_precisions": [0.1, 1.0, 10.0], "cv": 3, "random_state": 0}
    found = LaplaceRegressorCV(net(n_targets), normalize_y=True, **options).fit(X, y)
    mean, std = by_hand(y)
    truth = LaplaceRegressorCV(net(n_targets), **options).fit(X, (y - mean) / std)
    # each fold has units of its own
    assert_allclose(found.predict(X), mean + std * truth.predict(X), rtol=1e-6)
    assert_allclose(found.sigma_noise_, std * truth.sigma_noise_, rtol=0.05)
    assert np.shape(found.sigma_noise_) == ((n_targets,) if n_targets else ())


def test_constant_column_and_rare_digits():
    X, _ = problem()
    # rounded to float32 all targets would be equal
    y = np.stack([1e9 + waves(dtype=np.float64)[1], np.full(60, -5.0)], 1)
    model = LaplaceRegressor(
        regressor(module__n_out=2), normalize_y=True, random_state=0, **FIXED
    ).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    assert np.isfinite(mean).all()
    assert np.isfinite(std).all()
    center, scale = model._targets.scaling.center, model._targets.scaling.scale
    assert_allclose(center, [y[:, 0].mean(), -5.0])
    assert_allclose(scale, [y[:, 0].std(), 1.0])
    codes = model._targets.encode(y)
    assert len(np.unique(codes[:, 0])) == 60


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The network predicts its training targets")
def test_cache_and_pickle(tmp_path):
    X, y = problem()
    model = LaplaceRegressor(net(), normalize_y=True, memory=tmp_path, random_state=0)
    first = clone(model).fit(X, y).predict(X, return_std=True)
    again = clone(model).fit(X, y)
    np.testing.assert_array_equal(first, again.predict(X, return_std=True))
    other = clone(model).set_params(normalize_y=False).fit(X, y)
    plain = clone(other).set_params(memory=None).fit(X, y)
    np.testing.assert_array_equal(other.predict(X), plain.predict(X))
    # twice the unit: from the same entry, and in the right units
    twice = clone(model).fit(X, 2 * y).predict(X, return_std=True)
    assert_allclose(twice, 2 * np.array(first), rtol=1e-9)
    loaded = pickle.loads(pickle.dumps(again))
    np.testing.assert_array_equal(first, loaded.predict(X, return_std=True))


# ------------------------------------------------------------- the default network
UNITS = np.array([1e-3, 3e3, 1.0])
DEFAULTS = {
    "auto": LaplaceRegressor(),
    "constant": LaplaceRegressor(sigma_noise="homoscedastic"),
    "marglik": LaplaceRegressor(prior_precision="marglik", sigma_noise="marglik"),
    "all": LaplaceRegressor(subset_of_weights="all", hessian_structure="diag"),
    "refit": LaplaceRegressor(refine=True),
    "search": LaplaceRegressorCV(prior_precisions=[0.1, 10.0], cv=2),
    "ensemble": DeepEnsembleRegressor(n_estimators=2),
    "dropout": MCDropoutRegressor(n_samples=10),
    "swag": SWAGRegressor(n_snapshots=5, steps_per_snapshot=2, n_samples=10),
    "variational": VariationalRegressor(n_samples=10),
    "learned": VariationalRegressor(n_samples=10, sigma_noise="learned"),
}


def lines(n=150):
    """Return inputs, and three columns of targets with standard deviations near one."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 3))
    return X, X @ np.eye(3)[::-1] + 0.1 * rng.normal(size=(n, 3))


def assert_same_in_units(found, truth, X):
    """Compare predictions in units of the columns of y."""
    close = {"rtol": 1e-4, "atol": 1e-5}
    both = np.divide(found.predict(X, return_std=True), UNITS)
    assert_allclose(both, truth.predict(X, return_std=True), **close)
    interval = found.predict_interval(X) / UNITS[:, None]
    assert_allclose(interval, truth.predict_interval(X), **close)
    assert_allclose(found.sigma_noise_ / UNITS, truth.sigma_noise_, **close)


@pytest.mark.filterwarnings("ignore:sigma_noise is estimated from training")
@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("dropout", "swag")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in DEFAULTS
    ],
)
def test_default_network_learns_each_column_in_its_own_unit(name):
    X, z = lines()
    model = clone(DEFAULTS[name]).set_params(random_state=0)
    found, truth = clone(model).fit(X, z * UNITS), model.fit(X, z)
    assert_same_in_units(found, truth, X[:20])
    mean, std = found.predict(X, return_std=True)
    assert (np.std(mean / UNITS - z, axis=0) < 0.2).all()
    assert (np.abs(np.log(std.mean(axis=0) / UNITS / 0.1)) < np.log(4)).all()


@pytest.mark.slow
def test_default_network_with_weights_held_out_and_later_samples():
    X, z = lines()
    weights = np.random.default_rng(1).uniform(0.2, 2, 100)
    pair = []
    for y in (z * UNITS, z):
        held_out = {"X_val": X[100:], "y_val": y[100:]}
        model = LaplaceRegressor(random_state=0).fit(X[:100], y[:100], **held_out)
        model = model.fit(X[:100], y[:100], weights, **held_out)
        model.partial_fit(X[100:], y[100:]).tune(X[100:], y[100:])
        pair.append(pickle.loads(pickle.dumps(model.recalibrate(X[100:], y[100:]))))
    assert_same_in_units(*pair, X[:20])
    assert_allclose(pair[0].score(X, z * UNITS), pair[1].score(X, z), rtol=1e-5)


def test_default_network_with_constant_column():
    X, z = lines()
    y = np.column_stack([z[:, 0] * 1e4, np.full(150, 5.0), z[:, 1] * 1e-2])
    for kind in (LaplaceRegressor, DeepEnsembleRegressor):
        with pytest.warns(UserWarning, match="one of its columns is constant"):
            model = kind(random_state=0).fit(X, y)
        mean, std = model.predict(X, return_std=True)
        assert_allclose(mean[:, 1], 5)
        assert std[:, 1].max() < 1e-3
        assert model.score(X, y) > 0.95


# --------------------------------------------------------------- other networks
class Scaled(MLP):
    """A network that was trained in the units of its targets."""

    def forward(self, X):
        return super().forward(X) * torch.tensor([1e-2, 1e3, 1.0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The columns of y have standard deviations")
@pytest.mark.filterwarnings("ignore:sigma_noise is estimated from training")
@pytest.mark.parametrize("settings", [{}, {"prior_precision": "marglik"}])
def test_noise_of_frozen_network_with_columns_in_other_units(settings):
    X, z = lines()
    plain = seeded(net(3, module__n_in=3, max_epochs=200, lr=0.2), X, z)
    y = z * [1e-2, 1e3, 1]
    scaled = FrozenEstimator(twin(net(3, Scaled, module__n_in=3), plain))
    model = LaplaceRegressor(scaled, **settings, random_state=0)
    model.fit(X[:100], y[:100], X_val=X[100:], y_val=y[100:])
    errors = (model.predict(X[100:]) - y[100:]).std(axis=0)
    assert_allclose(model.sigma_noise_, errors, rtol=0.4)


# ------------------------------------------------------------------------- refusals
ROWS, TARGETS = problem(1)
FROZEN = FrozenEstimator(initialised(net()))
OWN_TARGETS = predefined_split(Dataset(ROWS[:9], TARGETS[:9]))


def later_task():
    first = LaplaceRegressor(FROZEN, **FIXED).fit(ROWS, TARGETS / 70)
    return LaplaceRegressor(net(), prior=first.posterior_, sigma_noise=1.0)


REFUSED = {
    "frozen": (lambda: LaplaceRegressor(FROZEN), "=True cannot be used with a f"),
    "search": (lambda: LaplaceRegressorCV(FROZEN), "=True cannot be used with a f"),
    "start": (lambda: VariationalRegressor(FROZEN), "=True cannot be used with a f"),
    "later task": (later_task, "=True cannot be used with pri"),
    "counts": (
        lambda: LaplaceRegressor(net(criterion=nn.PoissonNLLLoss)),
        "with Poisson",
    ),
    "targets of its own": (
        lambda: LaplaceRegressor(net(train_split=OWN_TARGETS)),
        r"rows whose targets are not.*normalize_y",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    make, words = REFUSED[name]
    y = np.arange(60) % 4 if name == "counts" else TARGETS
    with pytest.raises(ValueError, match=words):
        make().set_params(normalize_y=True).fit(ROWS, y)


# ------------------------------------------------------------------------- warning
@pytest.mark.slow
@pytest.mark.parametrize("unit", [300.0, 1e-4])
def test_units_that_are_not_learned_are_warned_of(unit):
    """Warnings are errors in pytest, so a successful fit has no warning."""
    X, y = waves(60, dtype=np.float64)
    steps = {"optimizer": torch.optim.Adam, "lr": 1e-3}
    model = LaplaceRegressor(net(**steps), random_state=0)
    with pytest.warns(UserWarning, match="no better than their mean does"):
        model.fit(X, unit * (y + 1))
    clone(model).set_params(normalize_y=True).fit(X, unit * (y + 1))
