"""Estimators that predict from draws, beyond the general contracts."""

import pickle
import warnings

import numpy as np
import pytest
import refusals
import torch
from nets import (
    MLP,
    DropoutMLP,
    RecordTraining,
    blobs,
    classifier,
    regressor,
    seeded,
    waves,
)
from scipy.stats import norm
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNet
from torch import nn

from sklaplace import (
    MCDropoutClassifier,
    SWAGClassifier,
    SWAGRegressor,
    VariationalClassifier,
    VariationalRegressor,
)

X, Y = blobs()
X_REG, Y_REG = waves(60)
CLASSIFIERS, REGRESSORS = (
    [kind for kind in kinds if not kind.__name__.startswith("Laplace")]
    for kinds in (refusals.CLASSIFIERS, refusals.REGRESSORS)
)
ALL = CLASSIFIERS + REGRESSORS
of_frozen_nets = pytest.mark.parametrize(
    "kind", [VariationalClassifier, MCDropoutClassifier, SWAGClassifier]
)


FEW = {"n_estimators": 3, "n_samples": 7, "n_snapshots": 5, "steps_per_snapshot": 2}
FEW |= {"lr": 0.03}


def make(kind, **params):
    """Return the estimator around a quick net, with few draws."""
    module = DropoutMLP if "Dropout" in kind.__name__ else MLP
    around = classifier if kind in CLASSIFIERS else regressor
    net = around(module, **{"max_epochs": 15} | params)
    few = {name: FEW[name] for name in FEW.keys() & {*kind._get_param_names()}}
    return kind(net, random_state=0, **few)


def rows_of(kind):
    return (X, Y) if kind in CLASSIFIERS else (X_REG, Y_REG)


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_several_labels_per_row(kind):
    module = DropoutMLP if kind is MCDropoutClassifier else MLP
    settings = {"verbose": 0, "train_split": None, "max_epochs": 5}
    net = NeuralNet(module, criterion=nn.BCEWithLogitsLoss, **settings)
    labels = np.stack([Y == 0, Y == 1, Y > 0], 1).astype(int)
    model = make(kind).set_params(estimator=net).fit(X, labels)
    assert model.predict_proba(X).shape == (60, 3)
    assert model.predict_dirichlet(X).shape == (60, 3, 2)
    assert model.predict_uncertainty(X).shape == (60, 3, 3)
    assert model.sample_proba(X, 4).shape == (60, 3, 4)
    assert set(np.unique(model.predict(X))) <= {0, 1}


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_weights_of_classes(kind):
    rare = np.where(np.arange(60) < 50, 0, 1)
    even = make(kind, module__n_out=2).set_params(class_weight="balanced")
    plain = make(kind, module__n_out=2)
    noise = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    shares = [m.fit(noise, rare).predict_proba(noise)[:, 1] for m in (even, plain)]
    assert shares[0].mean() > shares[1].mean()


# ------------------------------------------------------------------------- bad input
@pytest.mark.parametrize("kind", REGRESSORS)
@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("n_samples", 1, ValueError, "n_samples=1 is not an integer of at least 2"),
        ("sigma_noise", [0.1, 0.2], ValueError, "sigma_noise"),
        ("likelihood", "gaussian", TypeError, "likelihood"),
    ],
)
def test_options_that_are_refused(kind, name, value, error, words):
    if name in kind._get_param_names():
        model = make(kind, callbacks=[RecordTraining()]).set_params(**{name: value})
        refusals.refused_fit(model, words, error=error, data=rows_of(kind))


@pytest.mark.parametrize("kind", ALL)
def test_rows_that_are_not_seen(kind):
    Z, y = rows_of(kind)
    model = make(kind)
    with pytest.raises(ValueError, match="y_val is missing"):
        model.fit(Z, y, X_val=Z)
    model.fit(Z, y, X_val=Z[:20] + 0.1, y_val=y[:20])
    if kind not in CLASSIFIERS:
        alone = make(kind).fit(Z, y)
        assert model.sigma_noise_ != alone.sigma_noise_


@of_frozen_nets
def test_arguments_for_the_training_of_frozen_nets(kind):
    net = make(kind).estimator
    model = kind(FrozenEstimator(seeded(net, X, Y)), random_state=0)
    if kind is VariationalClassifier:
        model.fit(X, Y, epochs=3)
        assert len(model.estimator_.history) == 3
        return
    with pytest.raises(TypeError, match=r"'epochs'.*frozen"):
        model.fit(X, Y, epochs=3)


@of_frozen_nets
def test_frozen_nets_that_were_never_trained(kind):
    frozen = FrozenEstimator(classifier(DropoutMLP))
    with pytest.raises(ValueError, match="frozen network has no weights yet") as error:
        kind(frozen).fit(X, Y)
    with pytest.raises(TypeError, match="is a torch module") as another:
        kind(FrozenEstimator(DropoutMLP())).fit(X, Y)
    for text in map(str, (error.value, another.value)):
        assert "NeuralNetClassifier(module, " in text
        assert "initialize()" in text


@of_frozen_nets
def test_frozen_nets_with_the_weights_of_their_initialisation_raise_a_warning(kind):
    def fitted(net):
        make(kind).set_params(estimator=FrozenEstimator(net)).fit(X, Y)

    net = classifier(DropoutMLP).initialize()
    for untouched in (net, pickle.loads(pickle.dumps(net))):
        with pytest.warns(UserWarning, match=r"never trained.*Classifier\(module,"):
            fitted(untouched)
    trained = seeded(classifier(DropoutMLP), X, Y)
    weights = trained.module_.state_dict()
    loaded = classifier(DropoutMLP).initialize()
    loaded.module_.load_state_dict(weights)
    updated = classifier(DropoutMLP).initialize()
    with torch.no_grad():
        for parameter in updated.module_.parameters():
            parameter.sub_(0.1)
    instance = classifier(trained.module_).initialize()
    with warnings.catch_warnings(action="error", category=UserWarning):
        for touched in (trained, loaded, updated, instance):
            fitted(touched)


# ------------------------------------------------------------------ several columns
@pytest.mark.usefixtures("full_training")
@pytest.mark.parametrize(
    ("kind", "noise"),
    [
        *((kind, "auto") for kind in REGRESSORS if kind is not SWAGRegressor),
        (VariationalRegressor, "learned"),
        pytest.param(SWAGRegressor, "auto", marks=pytest.mark.slow),
    ],
)
def test_noise_of_each_column(kind, noise):
    rng, levels = np.random.default_rng(0), np.array([0.1, 1.0])
    Z = rng.normal(size=(600, 3))
    y = Z[:, :2] - Z[:, [2]] + levels * rng.normal(size=(600, 2))
    model = kind(sigma_noise=noise, random_state=0).fit(Z[:300], y[:300])
    np.testing.assert_allclose(model.sigma_noise_, levels, rtol=0.3)
    loaded = pickle.loads(pickle.dumps(model))
    interval = loaded.predict_interval(Z[300:], 0.9)
    covered = (interval[:, :, 0] < y[300:]) & (y[300:] < interval[:, :, 1])
    assert (np.abs(covered.mean(axis=0) - 0.9) < 0.06).all()
    densities = norm.logpdf(y[300:], *loaded.predict(Z[300:], return_std=True))
    np.testing.assert_allclose(loaded._log_proba_of(Z[300:], y[300:]), densities.sum(1))


@pytest.mark.parametrize("kind", REGRESSORS)
@pytest.mark.parametrize("options", [{}, {"normalize_y": True}])
@pytest.mark.parametrize("noise", [0.3, [0.1, 0.4]])
def test_given_noise_of_columns(kind, options, noise):
    Z, y = waves(60, n_targets=2)
    model = make(kind, module__n_out=2).set_params(sigma_noise=noise, **options)
    model.fit(Z, y * [1, 5])
    np.testing.assert_allclose(model.sigma_noise_, np.broadcast_to(noise, 2))
    _, variance = model.latent_mean_and_variance(Z)
    _, std = model.predict(Z, return_std=True)
    np.testing.assert_allclose(std**2, variance + np.square(noise))


# --------------------------------------------------------------------------- default
@pytest.mark.parametrize("kind", ALL)
def test_default_networks(kind, rng_untouched):
    Z, y = (part[:30] for part in rows_of(kind))
    few = {"n_snapshots": 5} if "SWAG" in kind.__name__ else {}
    model = kind(random_state=0, **few).fit(Z, y)
    # noise is a third of the variance of the numbers
    assert model.score(Z, y) > (0.7 if kind in CLASSIFIERS else 0.4)
