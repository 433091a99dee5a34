"""Elbo: objective, noise, custom training steps and row weights."""

import numpy as np
import pytest
import torch
from nets import MLP, QUICK, blobs, classifier, regressor, waves
from objectives import (
    DOUBLE,
    LABELS,
    NUMBERS,
    Steps,
    X,
    agrees,
    double,
    entropy,
    network,
    normal,
)
from skorch import NeuralNetClassifier
from torch import nn
from torch.distributions import Normal

from sklaplace import VariationalClassifier, VariationalRegressor
from sklaplace.core.random import private_rng
from sklaplace.likelihoods import Categorical


# ------------------------------------------------------------------------- noise
def learned(net, **settings):
    settings = {"sigma_noise": "learned", "random_state": 0} | settings
    return VariationalRegressor(net, **settings)


class TestLearnedNoise:
    @pytest.mark.slow
    def test_follows_the_squared_residuals_of_the_draws(self):
        Z, y = waves(dtype=np.float64)
        net = regressor(**DOUBLE, max_epochs=1200, lr=0.02)
        model = learned(net, n_samples=400).fit(Z, y)
        drawn = model.sample_y(Z, 2000, random_state=1)
        # what noise adds has a mean square of its own
        squares = np.mean((drawn - y[:, None]) ** 2) - model.sigma_noise_**2
        # a running mean over 20 draws
        assert model.sigma_noise_ == pytest.approx(np.sqrt(squares), rel=0.15)

    def test_is_used_from_the_first_step(self):
        net = regressor(**DOUBLE, max_epochs=1, callbacks=[Steps()])
        model = learned(net, kl_weight=0.5).fit(X, NUMBERS)
        (step,) = Steps.seen
        f = network(double(n_out=1), step["w"])(step["X"])[:, 0]
        sigma = (f - torch.tensor(NUMBERS)).square().mean().sqrt()
        assert model.sigma_noise_ == pytest.approx(float(sigma))
        agrees(step, double(n_out=1), normal(NUMBERS, sigma), 0.5 / 20)

    def test_each_column_has_its_own(self):
        net = regressor(**DOUBLE, module__n_out=2, max_epochs=1, callbacks=[Steps()])
        y = np.stack([NUMBERS, 5 * NUMBERS], 1)
        model = learned(net, kl_weight=0.5).fit(X, y)
        (step,) = Steps.seen
        f = network(double(n_out=2), step["w"])(step["X"])
        sigma = (f - torch.tensor(y)).square().mean(0).sqrt()
        np.testing.assert_allclose(model.sigma_noise_, sigma)

        def nll(f):
            return -Normal(f, sigma).log_prob(torch.tensor(y)).sum(1).mean()

        agrees(step, double(n_out=2), nll, 0.5 / 20)

    def test_weights_of_rows_count(self):
        weight = np.linspace(0.5, 2, 20)
        net = regressor(**DOUBLE, max_epochs=1, callbacks=[Steps()])
        model = learned(net).fit(X, NUMBERS, sample_weight=weight)
        (step,) = Steps.seen
        f = network(double(n_out=1), step["w"])(step["X"])[:, 0].numpy()
        squares = np.average((f - NUMBERS) ** 2, weights=weight)
        assert model.sigma_noise_ == pytest.approx(np.sqrt(squares))


# ------------------------------------------------------------------ nets of one's own
class PlainStep(NeuralNetClassifier):
    """A net whose step does not pass ``training=True``."""

    def more(self, _Xi):
        return ()

    def train_step_single(self, batch, **fit_params):
        self._set_training(True)
        Xi, yi = batch
        y_pred = self.infer(Xi, **fit_params)
        loss = self.get_loss(y_pred, yi, *self.more(Xi))
        loss.backward()
        return {"loss": loss, "y_pred": y_pred}


class OwnStep(PlainStep):
    """A net that calls ``get_loss`` with positional arguments."""

    def more(self, Xi):
        return Xi, True


OWN = {**QUICK, **DOUBLE, "criterion": nn.CrossEntropyLoss, "max_epochs": 2}


@pytest.mark.parametrize("kind", [OwnStep, PlainStep])
def test_divergence_is_in_the_loss_of_training_steps_of_ones_own(kind):
    net = kind(MLP, **OWN | {"callbacks": [Steps()]})
    VariationalClassifier(net, kl_weight=0.5, random_state=0).fit(X, LABELS)
    for step in Steps.seen:
        agrees(step, double(), entropy(), 0.5 / 20)


@pytest.mark.filterwarnings("ignore:y or one of its columns is constant")
def test_targets_that_are_met_from_the_start_do_not_stop_training():
    Z = np.random.default_rng(0).normal(size=(60, 4))
    model = VariationalRegressor(random_state=0).fit(Z, np.full(60, 3.0))
    mean, std = model.predict(Z, return_std=True)
    np.testing.assert_allclose(mean, 3, atol=0.05)
    assert std.max() < 0.1


def test_elbo_is_that_of_the_noise_of_the_objective():
    Z = np.random.default_rng(0).normal(size=(100, 4))
    model = VariationalRegressor(random_state=0).fit(Z, 10 * Z[:, 1])
    assert model.score(Z, Z[:, 1] * 10) > 0.999
    # beside the spread of the draws, there is no noise to be seen in held-out rows
    assert model.sigma_noise_ < 1e-3
    assert model.elbo_ > -1000


class OwnLoss(NeuralNetClassifier):
    """A net with a loss that the likelihood does not know."""

    def get_loss(self, *args, **kwargs):
        return 2 * super().get_loss(*args, **kwargs)


def test_loss_of_ones_own_is_refused_unless_a_likelihood_is_given():
    net = OwnLoss(MLP, **OWN | {"callbacks": [Steps()]})
    model = VariationalClassifier(net, kl_weight=0.5, random_state=0)
    with pytest.raises(ValueError, match="pass likelihood"):
        model.fit(X, LABELS)
    model.set_params(likelihood=Categorical()).fit(X, LABELS)
    agrees(Steps.seen[0], double(), entropy(), 0.5 / 20)


# ------------------------------------------------------------------ weighted rows
@pytest.mark.parametrize("kind", [VariationalClassifier, VariationalRegressor])
def test_weights_count_as_repeated_rows(kind):
    classifies = kind is VariationalClassifier
    Z, y = (blobs if classifies else waves)(dtype=np.float64, n=30)
    make = classifier if classifies else regressor
    net = make(**DOUBLE, max_epochs=40, callbacks=None)
    weight = np.arange(30) % 4
    rows = np.repeat(np.arange(30), weight)
    options = {"random_state": 0, "n_samples": 20, "kl_weight": 0.4}
    weighted = kind(net, **options).fit(Z, y, sample_weight=weight)
    repeated = kind(net, **options).fit(Z[rows], y[rows])
    assert weighted.elbo_ == pytest.approx(repeated.elbo_, rel=1e-9)
    assert weighted.kl_ == pytest.approx(repeated.kl_, rel=1e-9)
    ask = "predict_proba" if classifies else "predict"
    found, expected = getattr(weighted, ask)(Z), getattr(repeated, ask)(Z)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    histories = [model.estimator_.history for model in (weighted, repeated)]
    for key in ("train_loss", "kl", "elbo"):
        found, expected = (history[:, key] for history in histories)
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_elbo_is_that_of_the_draws_it_says():
    net = classifier(**DOUBLE, max_epochs=10)
    model = VariationalClassifier(net, random_state=0, kl_weight=0.3).fit(X, LABELS)
    generator = torch.Generator().manual_seed(model._seed)
    weights = model.posterior_.sample(20, generator)
    module, rows = double(), torch.tensor(X)
    with private_rng(0), torch.no_grad():
        losses = [20 * entropy()(network(module, w)(rows)) for w in weights]
    posterior = model.posterior_.distribution
    q = Normal(posterior.location, posterior.scale)
    kl = torch.distributions.kl_divergence(q, Normal(0.0, 1.0)).sum().item()
    assert model.kl_ == pytest.approx(kl)
    assert model.elbo_ == pytest.approx(-float(np.mean(losses)) - kl)
