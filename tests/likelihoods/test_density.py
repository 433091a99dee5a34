"""Likelihoods given only by a log-density, compared with closed forms."""

import math

import numpy as np
import pytest
import torch
from cases import normal
from nets import MLP, regressor, waves
from numpy.testing import assert_allclose
from scipy import stats
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetRegressor
from torch import distributions, nn

from examples import functions_of
from sklaplace import LaplaceRegressor
from sklaplace.likelihoods import DensityLikelihood, Gaussian

LEVELS = np.array([1e-3, 0.025, 0.5, 0.9, 0.9999])
SIGMAS = [1e-3, 0.3, 100.0]


class Normal(DensityLikelihood):
    def __init__(self, sigma=0.3):
        self.sigma = sigma

    def log_prob(self, f, y):
        return distributions.Normal(f, self.sigma).log_prob(y)


class Of(DensityLikelihood):
    """Likelihood defined by a torch distribution."""

    def __init__(self, make):
        self.make = make

    def log_prob(self, f, y):
        return self.make(f).log_prob(y)


class OfPositive(Of):
    is_positive = True


def log_normal(f):
    return distributions.LogNormal(f, 0.5)


def exponential(f):
    return distributions.Exponential(f.exp())


def narrow(f):
    return distributions.Normal(f + 1e4, 1e-3)


SINGLE = {
    "t": (Of(lambda f: distributions.StudentT(4.0, f, 0.5)), stats.t(4, scale=0.5)),
    "gumbel": (Of(lambda f: distributions.Gumbel(f, 2.0)), stats.gumbel_r(scale=2)),
    "laplace": (Of(lambda f: distributions.Laplace(f, 0.5)), stats.laplace(scale=0.5)),
    "exponential": (OfPositive(exponential), stats.expon()),
    "log-normal": (OfPositive(log_normal), stats.lognorm(0.5)),
    "narrow": (Of(narrow), stats.norm(1e4, 1e-3)),
}


def outputs(n=20):
    """Return means and variances (n, 1), as arrays."""
    mean, log_std = normal(n, 1, seed=1).numpy(), normal(n, 1, seed=2).numpy()
    return 3 * mean, np.exp(3 * log_std - 2)


class TestNormal:
    @pytest.mark.parametrize("sigma", SIGMAS)
    def test_predictions(self, sigma):
        """The noise may be much narrower or wider than the output."""
        (mean, var), given = outputs(), Gaussian()
        own = Normal(sigma)
        expected = given.moments(mean, var, sigma)
        for found, value in zip(own.moments(mean, var, 1.0), expected, strict=True):
            assert_allclose(found, value, rtol=1e-9, atol=1e-12)
        std = np.sqrt(expected[1])[..., None]
        found = own.quantiles(mean, var, 1.0, LEVELS)
        error = (found - given.quantiles(mean, var, sigma, LEVELS)) / std
        assert np.abs(error).max() < 3e-3
        tensors = [torch.from_numpy(a) for a in (mean, var, mean + np.sqrt(var))]
        assert_allclose(
            own.log_density(*tensors, 1.0), given.log_density(*tensors, sigma), 1e-9
        )

    @pytest.mark.parametrize("sigma", SIGMAS)
    def test_joint_moments(self, sigma):
        mean, var = outputs(4)
        cov = 0.3 * np.sqrt(var * var.T) + 0.7 * np.diag(var[:, 0])
        found, expected = (
            kind.joint_moments(mean, cov[..., None], sigma)[1]
            for kind in (Normal(sigma), Gaussian())
        )
        assert_allclose(found, expected, rtol=1e-8)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_given_outputs(self, dtype):
        f = normal(40, 2, seed=3).to(dtype)
        root = Normal(0.3).root_hessian(f)
        torch.testing.assert_close(root, torch.full_like(f, 1 / 0.3))
        u = torch.linspace(0.001, 0.999, 80, dtype=torch.float64).reshape(40, 2)
        expected = f.double() + 0.3 * torch.special.ndtri(u)
        drawn = Normal(0.3).draw(f, u)
        torch.testing.assert_close(drawn, expected.to(dtype), rtol=1e-4, atol=1e-4)
        assert drawn.dtype == root.dtype == dtype

    def test_draws_of_targets(self):
        f = normal(2, 1, 4000, seed=4).numpy()
        drawn = Normal(0.5).sample(f, 1.0, np.random.default_rng(0))
        assert stats.kstest((drawn - f).ravel() / 0.5, "norm").pvalue > 0.01

    def test_estimator(self):
        """Predictions equal those of the built-in likelihood with the same noise."""
        X, y = waves(60, dtype=np.float64)
        net = regressor(MLP, max_epochs=20, module__dtype=torch.float64)
        found = []
        for likelihood, noise in ((None, 0.3), (Normal(0.3), 1.0)):
            options = {"likelihood": likelihood, "sigma_noise": noise}
            options |= {"prior_precision": 2.0, "refine": False, "residual": "none"}
            options["random_state"] = 0
            model = LaplaceRegressor(net, **options).fit(X, y)
            found.append(
                [
                    *model.predict(X, return_std=True),
                    model.predict(X[:5], return_cov=True)[1],
                    model.predict_interval(X, 0.8),
                    model.log_marginal_likelihood(),
                ]
            )
        for own, known in zip(*found, strict=True):
            assert_allclose(own, known, rtol=1e-4, atol=1e-4)


class TestOthers:
    @pytest.mark.parametrize("name", SINGLE)
    def test_given_outputs(self, name):
        likelihood, known = SINGLE[name]
        zero = np.zeros((1, 1))
        mean, variance = likelihood.moments(zero, zero, 1.0)
        assert mean == pytest.approx(known.mean(), rel=1e-4, abs=1e-9)
        assert variance == pytest.approx(known.var(), rel=1e-3)
        found = likelihood.quantiles(zero, zero, 1.0, LEVELS)[0, 0]
        error = (known.cdf(found) - LEVELS) / (LEVELS * (1 - LEVELS))
        assert np.abs(error).max() < 0.02

    @pytest.mark.parametrize(
        ("name", "information"),
        [("t", 5 / 7 / 0.25), ("gumbel", 0.25), ("laplace", 4.0), ("exponential", 1.0)],
    )
    def test_fisher_information(self, name, information):
        root = SINGLE[name][0].root_hessian(normal(5, 1, seed=5))
        torch.testing.assert_close(root**2, torch.full_like(root, information))

    @pytest.mark.parametrize("variance", [1e-4, 0.1, 1.0, 10.0])
    def test_log_normal_outputs(self, variance):
        likelihood, (mean, _) = SINGLE["log-normal"][0], outputs(8)
        var = np.full_like(mean, variance)
        known = stats.lognorm(math.sqrt(0.25 + variance), scale=np.exp(mean))
        assert_allclose(likelihood.moments(mean, var, 1.0)[0], known.mean(), 1e-8)
        assert_allclose(
            likelihood.quantiles(mean, var, 1.0, LEVELS)[:, 0],
            known.ppf(LEVELS),
            rtol=3e-3,
        )

    def test_variances_that_do_not_exist_are_infinite(self):
        cauchy = Of(lambda f: distributions.Cauchy(f, 1.0))
        assert cauchy.moments(np.zeros((1, 1)), np.ones((1, 1)), 1.0)[1] == np.inf

    def test_outputs_that_overflow_give_nan(self):
        weibull = OfPositive(
            lambda f: distributions.Weibull(f.exp(), 2.0, validate_args=False)
        )
        mean = np.array([[0.0], [1e5]])
        given = mean, np.ones((2, 1)), 1.0
        for found in (weibull.moments(*given)[0], weibull.quantiles(*given, LEVELS)):
            assert np.isfinite(found[0]).all()
            assert np.isnan(found[1]).all()

    def test_narrow_densities_far_from_zero(self):
        """The logarithm overflows everywhere except near the output."""

        def log_cosh(f, y):
            return -torch.cosh((y - f) / 0.1) - math.log(0.2 * 0.4210244382)

        likelihood = Of(None)
        likelihood.log_prob = log_cosh
        mean, variance = likelihood.moments(np.full((1, 1), 1e4), np.zeros((1, 1)), 1.0)
        assert mean == pytest.approx(1e4)
        assert 0 < variance < 0.01

    def test_densities_that_rise_towards_zero(self):
        """The density is zero beyond the bound of the targets."""
        gamma = OfPositive(lambda f: distributions.Gamma(0.1, 0.1 * (-f).exp()))
        mean, variance = gamma.moments(np.zeros((1, 1)), np.zeros((1, 1)), 1.0)
        assert mean == pytest.approx(1, rel=1e-3)
        assert variance == pytest.approx(10, rel=1e-3)

    @pytest.mark.parametrize(
        ("log_prob", "words"),
        [
            (lambda f, y: -((y - f) ** 2), "does not integrate to one: the logarithm"),
            (lambda f, y: 0 * f, "does not integrate|log_prob returns shape"),
            (lambda f, y: Normal().log_prob(f, y).sum(-1), "one log-density per"),
        ],
    )
    def test_wrong_densities_are_refused(self, log_prob, words):
        class Wrong(DensityLikelihood):
            def log_prob(self, f, y):
                return log_prob(f, y)

        with pytest.raises(ValueError, match=words):
            LaplaceRegressor(regressor(), likelihood=Wrong()).fit(*waves(40))

    def test_weights_need_the_loss_of_each_sample(self):
        class Mean(nn.Module):
            def forward(self, f, y):
                return Normal().loss(f, y).mean()

        X, y = waves(40)
        model = LaplaceRegressor(regressor(criterion=Mean), likelihood=Normal())
        with pytest.raises(ValueError, match="Mean must have an attribute reduction"):
            model.fit(X, y, sample_weight=np.ones(40))

    def test_the_default_network_is_refused(self):
        with pytest.raises(ValueError, match="trained with the same loss"):
            LaplaceRegressor(likelihood=Normal()).fit(*waves(40))

    def test_targets_that_are_not_positive_are_refused(self):
        X, y = waves(40)
        model = LaplaceRegressor(regressor(), likelihood=SINGLE["log-normal"][0])
        with pytest.raises(ValueError, match="OfPositive is for positive targets"):
            model.fit(X, y)


# ------------------------------------------------------------------ censored durations
RECIPE = functions_of("recipes/plot_survival.py")


class TestCensoredWeibull:
    """The likelihood of the recipe, for outputs that do not depend on the inputs."""

    @pytest.fixture
    def durations(self):
        """Return durations, and minus a bound for about half of them."""
        rng = np.random.default_rng(0)
        event, end = 2 * rng.weibull(1.5, 200), rng.uniform(0, 4, 200)
        return np.where(event < end, event, -end)

    @pytest.fixture
    def model(self, durations):
        """Return an estimator with the most probable log-scale under a flat prior.

        The inputs are zeros, so the log-scale is the bias. The sum of ``|y|^k`` and the
        number of observed durations are sufficient statistics.
        """
        k, n_events = 1.5, (durations > 0).sum()
        best = math.log((np.abs(durations) ** k).sum() / n_events) / k
        module = nn.Linear(1, 1, dtype=torch.float64)
        nn.init.constant_(module.bias, best)
        net = NeuralNetRegressor(module, criterion=RECIPE["Criterion"]).initialize()
        likelihood = RECIPE["CensoredWeibull"]()
        options = {"likelihood": likelihood, "prior_precision": 3.0, "refine": False}
        model = LaplaceRegressor(FrozenEstimator(net), random_state=0, **options)
        return model.fit(np.zeros((200, 1)), durations)

    def test_gradient_at_the_maximum_likelihood(self, model, durations):
        likelihood, y = model.likelihood, torch.from_numpy(durations)[:, None]
        f = torch.from_numpy(model.latent_mean_and_variance(np.zeros((200, 1)))[0])
        gradient = likelihood.gradient(f.reshape(-1, 1), y)
        assert abs(gradient.sum()) < 1e-10 * gradient.abs().sum()

    def test_information_is_that_of_the_observed_durations(self, model, durations):
        """The Hessian of the loss, k² Σ z^k, is k² per event at the maximum."""
        _, variance = model.latent_mean_and_variance(np.zeros((1, 1)))
        precision = 1.5**2 * (durations > 0).sum() + 3.0
        assert variance.item() == pytest.approx(1 / precision, rel=1e-6)

    def test_predictions_are_uncensored(self, model):
        zero = np.zeros((1, 1))
        mean, _ = model.latent_mean_and_variance(zero)
        known = stats.weibull_min(1.5, scale=math.exp(mean.item()))
        found = model.likelihood.quantiles(mean.reshape(1, 1), zero, 1.0, LEVELS)[0, 0]
        error = (known.cdf(found) - LEVELS) / (LEVELS * (1 - LEVELS))
        assert np.abs(error).max() < 0.02

    def test_bounds_have_the_probability_of_longer_durations(self):
        """Cover outputs with a variance: the probability is a mean over outputs."""
        t, mean, var = torch.tensor([[0.2], [1.0], [5.0]]), torch.zeros(3, 1), 0.25
        given = mean.double(), torch.full_like(mean.double(), var)
        found = RECIPE["CensoredWeibull"]().log_density(*given, -t.double(), 1.0)
        z, weights = np.polynomial.hermite_e.hermegauss(80)
        survival = np.exp(-((t.numpy() / np.exp(math.sqrt(var) * z)) ** 1.5))
        expected = np.log(survival @ weights / weights.sum())
        assert_allclose(found, expected, rtol=1e-6)

    def test_durations_of_zero(self):
        with pytest.raises(ValueError, match="y has zeros"):
            RECIPE["CensoredWeibull"]().check_targets(np.array([1.0, 0.0, -1.0]))
