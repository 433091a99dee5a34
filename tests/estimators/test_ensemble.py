"""Deep ensembles: independently initialised networks and their average."""

import numpy as np
import pytest
import torch
from nets import (
    MLP,
    RecordTraining,
    RowsSeen,
    binary_classifier,
    blobs,
    classifier,
    regressor,
    seeded,
    waves,
)
from refusals import refused_fit
from scipy.optimize import minimize_scalar
from scipy.stats import norm
from sklearn.frozen import FrozenEstimator
from skorch.dataset import ValidSplit
from torch import nn

from sklaplace import DeepEnsembleClassifier, DeepEnsembleRegressor
from sklaplace.likelihoods import HeteroscedasticNLLLoss

X, Y = blobs()
X_REG, Y_REG = waves(80)
# skorch answers in float32
SINGLE = {"rtol": 0, "atol": 1e-6}


def of_classes(net=None, n=3, **options):
    net = classifier() if net is None else net
    return DeepEnsembleClassifier(net, n_estimators=n, random_state=0, **options)


def of_numbers(n, data=(X_REG, Y_REG), **params):
    model = DeepEnsembleRegressor(regressor(**params), n_estimators=n, random_state=0)
    return model.fit(*data)


@pytest.fixture(scope="module")
def classes():
    return of_classes().fit(X, Y)


@pytest.fixture(scope="module")
def numbers():
    return of_numbers(3, max_epochs=60)


class TestAverage:
    def test_probabilities_are_the_mean_of_the_networks_own(self, classes):
        softmax = [torch.softmax(net.forward(X), -1) for net in classes.estimators_]
        expected = torch.stack(softmax).mean(0)
        np.testing.assert_allclose(classes.predict_proba(X), expected, **SINGLE)

    def test_probabilities_of_one_logit(self):
        X, y = blobs(n_classes=2)
        model = of_classes(binary_classifier()).fit(X, y)
        expected = np.mean([net.predict_proba(X) for net in model.estimators_], axis=0)
        np.testing.assert_allclose(model.predict_proba(X), expected, **SINGLE)

    def test_moments_are_those_of_the_networks(self, numbers):
        outputs = np.stack([net.predict(X_REG)[:, 0] for net in numbers.estimators_])
        mean, variance = numbers.latent_mean_and_variance(X_REG)
        np.testing.assert_allclose(mean[:, 0], outputs.mean(0), **SINGLE)
        np.testing.assert_allclose(variance[:, 0], outputs.var(0, ddof=1), **SINGLE)
        _, std = numbers.predict(X_REG, return_std=True)
        expected = np.cov(outputs.T) + numbers.sigma_noise_**2 * np.eye(len(X_REG))
        np.testing.assert_allclose(std, np.sqrt(expected.diagonal()), **SINGLE)
        _, cov = numbers.predict(X_REG, return_cov=True)
        np.testing.assert_allclose(cov, expected, **SINGLE)

    def test_draws_are_networks(self, classes):
        own = [torch.softmax(net.forward(X), -1).numpy() for net in classes.estimators_]
        drawn = classes.sample_proba(X, 12, random_state=0)
        chosen = [
            np.flatnonzero([np.allclose(one, p, **SINGLE) for p in own])
            for one in np.moveaxis(drawn, -1, 0)
        ]
        assert {len(found) for found in chosen} == {1}
        assert len({int(found[0]) for found in chosen}) > 1

    def test_one_network_is_the_plain_one(self):
        model = of_classes(n=1).fit(X, Y)
        (net,) = model.estimators_
        assert net is model.estimator_
        expected = torch.softmax(net.forward(X), -1)
        np.testing.assert_allclose(model.predict_proba(X), expected, **SINGLE)
        _, variance = model.latent_mean_and_variance(X, full_cov=True)
        assert not variance.any()
        assert not model.predict_uncertainty(X)[:, 2].any()
        alpha = model.predict_dirichlet(X)
        assert np.isfinite(alpha).all()
        assert (alpha > 0).all()


class TestTraining:
    def test_starts_do_not_depend_on_their_number(self, classes):
        fewer = of_classes(n=2).fit(X, Y)
        for net, other in zip(fewer.estimators_, classes.estimators_, strict=False):
            np.testing.assert_array_equal(net.forward(X), other.forward(X))


def best_noise(mean, variance, y, weight):
    """Return the best noise, found on a grid and refined."""

    def loss(log_sigma):
        std = np.sqrt(variance + np.exp(2 * log_sigma))
        return -np.sum(weight * norm.logpdf(y, mean, std))

    grid = np.linspace(-8, 3, 400)
    best = grid[np.argmin([loss(value) for value in grid])]
    bounds = best - 0.1, best + 0.1
    return np.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x)


class TestNoise:
    @staticmethod
    def assert_best(model, X, y, weight=1.0):
        mean, variance = model.latent_mean_and_variance(X)
        columns = zip(mean.T, variance.T, y.reshape(mean.shape).T, strict=True)
        expected = [best_noise(*column, weight) for column in columns]
        assert np.shape(model.sigma_noise_) == y.shape[1:]
        np.testing.assert_allclose(np.atleast_1d(model.sigma_noise_), expected, 1e-3)

    def test_maximises_the_probability_of_rows_held_out(self):
        RowsSeen.trained.clear()
        model = of_numbers(3, max_epochs=60, callbacks=[RowsSeen()])
        trained = {tuple(row) for row in RowsSeen.trained}
        held = np.array([tuple(row.tolist()) not in trained for row in X_REG])
        assert held.sum() == 16
        self.assert_best(model, X_REG[held], Y_REG[held])

    def test_of_the_nets_own_split(self):
        RowsSeen.validated.clear()
        params = {"train_split": ValidSplit(4), "callbacks": [RowsSeen()]}
        model = of_numbers(2, max_epochs=20, **params)
        rows = {tuple(row) for row in RowsSeen.validated}
        held = np.array([tuple(row.tolist()) in rows for row in X_REG])
        assert held.sum() == 20
        self.assert_best(model, X_REG[held], Y_REG[held])

    def test_of_few_rows_is_that_of_training_rows(self):
        Z, y, weight = X_REG[:30], Y_REG[:30], np.linspace(0.5, 2, 30)
        self.assert_best(of_numbers(2, (Z, y, weight)), Z, y, weight)

    def test_of_columns_maximises_the_probability_of_each(self):
        Z, y = waves(80, n_targets=2)
        y[:, 1] += np.random.default_rng(0).normal(size=80)
        weight, given = np.linspace(0.5, 2, 40), (Z[40:], y[40:])
        net = regressor(module__n_out=2, max_epochs=20)
        model = DeepEnsembleRegressor(net, n_estimators=2, random_state=0)
        self.assert_best(model.fit(*given, X_val=Z[:40], y_val=y[:40]), Z[:40], y[:40])
        model.set_params(validation_fraction=0.2).fit(Z[:40], y[:40], weight)
        self.assert_best(model, Z[:40], y[:40], weight)
        plain = model.predict(Z, return_std=True)[1]
        _, variance = model.latent_mean_and_variance(Z)
        np.testing.assert_allclose(plain**2, variance + model.sigma_noise_**2)

    def test_given_noise_holds_nothing_out(self):
        RowsSeen.trained.clear()
        net = regressor(max_epochs=1, callbacks=[RowsSeen()])
        model = DeepEnsembleRegressor(net, n_estimators=1, sigma_noise=0.3)
        assert model.fit(X_REG, Y_REG).sigma_noise_ == 0.3
        assert len(RowsSeen.trained) == len(X_REG)

    @pytest.mark.parametrize(
        ("criterion", "n_out"), [(nn.PoissonNLLLoss, 1), (HeteroscedasticNLLLoss, 2)]
    )
    def test_there_is_none_where_targets_have_their_own(self, criterion, n_out):
        RowsSeen.trained.clear()
        settings = {"max_epochs": 1, "callbacks": [RowsSeen()]}
        net = regressor(criterion=criterion, module__n_out=n_out, **settings)
        model = DeepEnsembleRegressor(net, n_estimators=1)
        assert model.fit(X_REG, np.abs(Y_REG).round()).sigma_noise_ == 1
        assert len(RowsSeen.trained) == len(X_REG)


RECORD = {"callbacks": [RecordTraining()]}


class TestRefused:
    def test_module_instances(self):
        model = DeepEnsembleClassifier(classifier(MLP(), **RECORD))
        words = "module instance", "Pass its class, with arguments as module__"
        refused_fit(model, *words, data=(X, Y))

    def test_frozen_nets(self):
        model = DeepEnsembleClassifier(FrozenEstimator(seeded(classifier(), X, Y)))
        words = "Pass the net without FrozenEstimator"
        refused_fit(model, words, data=(X, Y))


def test_networks_hold_the_same_rows_out():
    X, y = waves()
    params = {"train_split": ValidSplit(0.25), "callbacks": [RowsSeen()]}
    params["max_epochs"] = 2
    RowsSeen.trained.clear()
    RowsSeen.validated.clear()
    model = of_numbers(3, (X, y), **params)
    validated = {tuple(row) for row in RowsSeen.validated}
    assert len(validated) == 15
    assert not validated & {tuple(row) for row in RowsSeen.trained}
    assert all(type(net.train_split) is ValidSplit for net in model.estimators_)
