"""Regression: closed forms, noise, intervals, joint samples, shapes."""

import pickle
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from nets import (
    MLP,
    QUICK,
    LinearModel,
    SqueezedMLP,
    initialised,
    regressor,
    seeded,
    waves,
)
from numpy.testing import assert_allclose
from scipy import stats
from scipy.stats import norm
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, WhiteKernel
from sklearn.linear_model import BayesianRidge, PoissonRegressor, Ridge
from skorch import NeuralNetRegressor
from torch import nn

from sklaplace import (
    DeepEnsembleRegressor,
    LaplaceRegressor,
    LaplaceRegressorCV,
    VariationalRegressor,
)
from sklaplace.likelihoods import (
    Categorical,
    HeteroscedasticNLLLoss,
    Poisson,
    RegressionLikelihood,
)
from sklaplace.likelihoods.output_hessian import Factored

FLOAT64 = {"module__dtype": torch.float64}
PRECISION, NOISE = 0.7, 0.3
GIVEN = {"prior_precision": PRECISION, "sigma_noise": NOISE, "residual": "none"}
FIXED = {"prior_precision": 1.0, "sigma_noise": 0.2, "residual": "none"}
FULL = {"hessian_structure": "full"}


def around(net, **settings):
    """Return an estimator that keeps the net's weights."""
    return LaplaceRegressor(FrozenEstimator(net), **settings)


def linear_net(weights, bias=None):
    """Return a float64 network of one linear layer with given weights (c, i)."""
    weights = np.atleast_2d(weights)
    n_out, n_in = weights.shape
    sizes = {"module__n_in": n_in, "module__n_out": n_out}
    net = initialised(regressor(LinearModel, module__bias=bias is not None, **sizes))
    with torch.no_grad():
        net.module_.head.weight.copy_(torch.tensor(weights))
        if bias is not None:
            net.module_.head.bias.copy_(torch.tensor(np.atleast_1d(bias)))
    return net


def map_weights(X, y, precision=PRECISION, noise=NOISE):
    """Return a linear model's MAP weights (i,), for one precision or one each."""
    H = X.T @ X / noise**2 + precision * np.eye(X.shape[1])
    return np.linalg.solve(H, X.T @ y / noise**2)


def process(X, y, precision=PRECISION, noise=NOISE):
    """Return the posterior as a Gaussian process with a linear kernel."""
    kernel = ConstantKernel(1 / precision, "fixed") * DotProduct(0.0, "fixed")
    kernel = kernel + WhiteKernel(noise**2, "fixed")
    return GaussianProcessRegressor(kernel, optimizer=None).fit(X, y)


@pytest.fixture(scope="module")
def line():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 3))
    y = X @ [1.0, -2.0, 0.5] + NOISE * rng.normal(size=40)
    return X, y, rng.normal(size=(9, 3))


@pytest.fixture(scope="module")
def rows():
    return waves(dtype=np.float64)


@pytest.fixture(scope="module")
def net(rows):
    X, y = rows
    return seeded(regressor(**FLOAT64), X, y[:, None])


@pytest.fixture(scope="module")
def model(net, rows):
    return around(net, subset_of_weights="all", **FIXED, **FULL).fit(*rows)


class TestClosedForms:
    """For linear networks, the Laplace approximation is exact."""

    @pytest.mark.parametrize("structure", ["full", "kron"])
    @pytest.mark.parametrize("refine", [False, True])
    def test_is_a_gaussian_process(self, structure, refine, line):
        X, y, new = line
        # a refitted head may start anywhere
        net = linear_net(np.zeros(3) if refine else map_weights(X, y))
        model = around(net, hessian_structure=structure, refine=refine, **GIVEN)
        exact = process(X, y)
        evidence = model.fit(X, y).log_marginal_likelihood_value_
        assert evidence == pytest.approx(exact.log_marginal_likelihood_value_, abs=1e-6)
        for question in ("return_std", "return_cov"):
            found = model.predict(new, **{question: True})
            expected = exact.predict(new, **{question: True})
            assert_allclose(found[0], expected[0], atol=1e-6)
            assert_allclose(found[1], expected[1], atol=1e-6)

    @pytest.mark.parametrize("structure", ["full", "kron"])
    def test_empirical_bayes_is_bayesian_ridge(self, structure, line):
        X, y, new = line
        flat = {"alpha_1": 0, "alpha_2": 0, "lambda_1": 0, "lambda_2": 0}
        ridge = BayesianRidge(
            fit_intercept=False, tol=1e-12, max_iter=5000, compute_score=True, **flat
        ).fit(X, y)
        settings = {"prior_precision": "marglik", "hessian_structure": structure}
        settings |= {"sigma_noise": "marglik", "residual": "none"}
        model = around(linear_net(np.zeros(3)), refine=True, **settings).fit(X, y)
        # the fixed point is iterated until logarithms move by less than 1e-4, and
        # its error is quadratic in that of the evidence
        assert model.prior_precision_ == pytest.approx(ridge.lambda_, rel=1e-4)
        assert model.sigma_noise_ == pytest.approx(ridge.alpha_**-0.5, rel=1e-4)
        expected = ridge.predict(new, return_std=True)
        assert_allclose(model.predict(new, return_std=True), expected, atol=1e-6)
        evidence = model.log_marginal_likelihood_value_
        assert evidence == pytest.approx(ridge.scores_[-1], abs=1e-6)

    def test_prior_mean(self, line):
        X, y, new = line
        centre = np.array([1.0, -1.0, 2.0])
        weights = centre + map_weights(X, y - X @ centre)
        model = around(linear_net(np.zeros(3)), prior_mean=centre, refine=True, **GIVEN)
        assert_allclose(model.fit(X, y).predict(new), new @ weights, atol=1e-6)

    @pytest.mark.parametrize(
        ("settings", "precision", "noise"),
        [
            (
                {"prior_precision": [0.1, 1.0, 10.0], "prior_structure": "diag"},
                np.array([0.1, 1.0, 10.0]),
                NOISE,
            ),
            ({"temperature": 4.0}, PRECISION, 2 * NOISE),
        ],
        ids=["a prior per weight", "a temperature of the likelihood"],
    )
    def test_variances(self, settings, precision, noise, line):
        X, y, new = line
        H = X.T @ X / noise**2 + precision * np.eye(3)
        net = linear_net(map_weights(X, y, precision))
        model = around(net, **{**GIVEN, **FULL, **settings}).fit(X, y)
        _, variance = model.latent_mean_and_variance(new)
        expected = np.einsum("ni,ij,nj->n", new, np.linalg.inv(H), new)
        assert_allclose(variance[:, 0], expected, rtol=1e-10)

    def test_weights_are_those_of_weighted_ridge(self, line):
        X, y, new = line
        weights = np.linspace(0, 3, len(X))
        model = around(linear_net(np.zeros(3)), refine=True, **GIVEN)
        ridge = Ridge(PRECISION * NOISE**2, fit_intercept=False)
        found, expected = (
            m.fit(X, y, sample_weight=weights).predict(new) for m in (model, ridge)
        )
        assert_allclose(found, expected, atol=1e-6)


def test_columns_of_unequal_scale_are_warned_of():
    X, y = waves(60)
    net = regressor(module__n_out=2, max_epochs=60)
    model = LaplaceRegressor(net, prior_precision=1.0, sigma_noise=1.0)
    with pytest.warns(UserWarning, match="their errors have equal weight"):
        model.fit(X, np.column_stack([y, 12 * y]))


def test_noise_is_drawn_for_each_row(model, rows):
    X, n = np.repeat(rows[0][:1], 2, axis=0), 20_000
    draws = model.sample_y(X, n)
    # the function is shared, so that twice the noise variance remains
    expected = pytest.approx(2 * 0.2**2, rel=5 * (2 / n) ** 0.5)
    assert (draws[0] - draws[1]).var() == expected


class TestShapes:
    @pytest.mark.parametrize("settings", [{}, {"subset_of_weights": "all"}])
    @pytest.mark.parametrize("weights", [None, np.linspace(0.5, 2, 60)])
    def test_squeezed_outputs_train_as_others_do(self, weights, settings):
        X, y = waves(dtype=np.float64)
        answers = []
        for module in (SqueezedMLP, MLP):
            net = regressor(module, **FLOAT64)
            model = LaplaceRegressor(net, random_state=0, **FIXED, **settings)
            model.fit(X, y, sample_weight=weights)
            frozen = around(model.estimator_, **FIXED, **settings).fit(X, y)
            answers += [m.predict(X, return_std=True) for m in (model, frozen)]
        assert_allclose(answers[:2], answers[2:], rtol=1e-9)

    def test_constant_target(self):
        X, _ = waves(dtype=np.float64)
        with pytest.warns(UserWarning, match="columns is constant"):
            model = LaplaceRegressor(random_state=0).fit(X, np.full(60, 7.0))
        mean, std = model.predict(X, return_std=True)
        assert_allclose(mean, 7.0, atol=1e-6)
        assert np.isfinite(std).all()


class TestUnits:
    """Predictions of the default estimator scale with the units of y."""

    @pytest.mark.parametrize("unit", [1e-9, 1e-3, 1e9])
    @pytest.mark.parametrize("tuner", ["marglik", "validation"])
    def test_of_any_size(self, unit, tuner):
        X, y = waves(120)
        settings = {"prior_precision": tuner, "sigma_noise": tuner}
        model = LaplaceRegressor(random_state=0, **settings)
        found, expected = (
            np.array(model.fit(X, y * s).predict(X, return_std=True)) / s
            for s in (unit, 1.0)
        )
        # training amplifies the rounding of y * unit
        assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


class TestRecalibrate:
    @pytest.fixture
    def model(self):
        """Return an overconfident model: its noise is a fifth of the true noise."""
        X, y = waves()
        net = seeded(regressor(), X, y.reshape(-1, 1))
        return around(net, prior_precision=1.0, sigma_noise=0.02).fit(X, y)

    def test_weights_repeat_rows(self, model):
        X, y = waves(n=40, seed=5)
        w = np.arange(40) % 3
        found = model.recalibrate(X, y, w).sigma_scaling_
        expected = model.recalibrate(np.repeat(X, w, 0), np.repeat(y, w))
        assert_allclose(found, expected.sigma_scaling_, rtol=1e-6)

    def test_rows_that_tell_nothing(self, model):
        X, _ = waves(n=5)
        for rows, word in (
            (X[:1], "1 row is too few"),
            (X, "noise cannot be estimated"),
        ):
            with pytest.raises(ValueError, match=word):
                model.recalibrate(rows, model.predict(rows))
            assert model.sigma_scaling_.tolist() == [1.0]


def counts(n=150, seed=0):
    """Return three features, and counts whose log-rate is linear in the features."""
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((n, 3))
    return X, generator.poisson(np.exp(X @ [0.8, -0.5, 0.3])).astype(float)


def rates(max_epochs, criterion=nn.PoissonNLLLoss):
    """Return a linear map without bias."""
    sizes = {"module__n_in": 3, "module__bias": False}
    return regressor(LinearModel, criterion=criterion, max_epochs=max_epochs, **sizes)


class TestCounts:
    @pytest.fixture
    def model(self):
        settings = {"prior_precision": 15.0, "refine": True, "random_state": 0, **FULL}
        return LaplaceRegressor(rates(1), **settings).fit(*counts())

    def test_most_probable_weights_are_those_of_a_linear_model(self, model):
        alone = PoissonRegressor(alpha=0.1, fit_intercept=False, tol=1e-10)
        expected = alone.fit(*counts()).coef_
        assert_allclose(model.posterior_.mean, expected, atol=1e-6)

    def test_the_empirical_fisher_matrix_has_no_noise_that_is_chosen(self, model):
        other = clone(model).set_params(curvature="ef").fit(*counts())
        assert_allclose(other.posterior_.mean, model.posterior_.mean, atol=1e-6)

    def test_predictions(self, model):
        X, y = counts(n=4000, seed=1)
        mean, std = model.predict(X, return_std=True)
        m, v = model.latent_mean_and_variance(X)
        assert_allclose(mean, np.exp(m + v / 2)[:, 0])
        assert mean.shape == std.shape == y.shape
        # the model is right: standard errors of a mean and of a share
        assert abs(((y - mean) / std).mean()) < 5 / np.sqrt(4000)
        low, high = model.predict_interval(X, 0.9).T
        assert (low == np.round(low)).all()
        inside = ((y >= low) & (y <= high)).mean()
        assert inside > 0.9 - 5 * 0.3 / np.sqrt(4000)
        assert model.score(X, y) > 0.4

    def test_cross_validation(self):
        grid = [0.1, 10.0, 1e4]
        model = LaplaceRegressorCV(
            rates(5), prior_precisions=grid, cv=3, refine=True, random_state=0
        ).fit(*counts())
        scores = model.cv_results_["mean_test_score"]
        assert model.prior_precision_ == pytest.approx(grid[scores.argmax()])
        # mean log-probability: below zero, and best for a prior that allows the truth
        assert (scores < 0).all()
        assert scores[2] < scores[:2].max() - 0.1

    def test_what_cannot_be(self, model):
        X, y = counts()
        for wrong in (y - 1, y + 0.5):
            with pytest.raises(ValueError, match="not counts"):
                model.fit(X, wrong)
        with pytest.raises(ValueError, match=r"sigma_noise=0\.3.*no noise level"):
            clone(model).set_params(sigma_noise=0.3).fit(X, y)
        with pytest.raises(ValueError, match="Poisson does not have"):
            model.recalibrate(X, y)
        with pytest.raises(ValueError, match="no observation noise"):
            model.log_marginal_likelihood(sigma_noise=1.0)


def noisy(n=600, seed=0):
    """Return data whose noise grows tenfold from left to right."""
    generator = np.random.default_rng(seed)
    X = generator.uniform(-1, 1, (n, 1)).astype(np.float32)
    noise = 0.1 * 10 ** ((X[:, 0] + 1) / 2)
    y = np.sin(3 * X[:, 0]) + noise * generator.standard_normal(n)
    return X, y.astype(np.float32)


class TestNoiseThatDepends:
    @pytest.fixture
    def net(self):
        sizes = {"module__n_in": 1, "module__n_out": 2, "module__width": 30}
        training = {"criterion": HeteroscedasticNLLLoss, "lr": 0.02, "max_epochs": 150}
        return regressor(**sizes, **training)

    @pytest.mark.filterwarnings("ignore:Held-out rows are predicted best with no")
    def test_predictions(self, net):
        model = LaplaceRegressor(net, random_state=0, **FULL).fit(*noisy())
        X, y = noisy(2000, seed=1)
        mean, std = model.predict(X, return_std=True)
        assert mean.shape == std.shape == y.shape
        left, right = X[:, 0] < -0.5, X[:, 0] > 0.5
        assert std[right].mean() > 2.5 * std[left].mean()
        low, high = model.predict_interval(X, 0.9).T
        for side in (left, right):
            inside = ((y >= low) & (y <= high))[side].mean()
            assert 0.8 < inside < 0.97
        assert model.latent_mean_and_variance(X[:5])[0].shape == (5, 2)
        assert not model.posterior_.is_refitted

    def test_widths_that_do_not_fit(self, net):
        narrow = clone(net).set_params(module__n_out=1)
        words = r"returns 1 output, but y has 1 column.*to 2"
        with pytest.raises(ValueError, match=words):
            LaplaceRegressor(narrow).fit(*noisy(60))
        with pytest.raises(ValueError, match="refine=True needs a loss that is convex"):
            LaplaceRegressor(net, prior_precision=1.0, refine=True).fit(*noisy(60))


class TestNoiseOfEachOutput:
    LEVELS = (0.1, 0.7)

    def rows(self, n=60):
        X, y = waves(n=n, dtype=np.float64)
        return X, np.stack([y, 3 - 5 * y], 1)

    def test_of_a_linear_network_is_that_of_two(self):
        """A net without hidden layers splits into independent outputs."""
        X, Y = self.rows()
        options = {"prior_precision": 0.5, "refine": True, **FULL}
        net = regressor(LinearModel, module__n_out=2)
        model = LaplaceRegressor(net, sigma_noise=self.LEVELS, **options).fit(X, Y)
        mean, std = model.predict(X, return_std=True)
        assert_allclose(model.sigma_noise_, self.LEVELS)
        evidence = 0.0
        for k, sigma in enumerate(self.LEVELS):
            alone = LaplaceRegressor(
                regressor(LinearModel), sigma_noise=sigma, **options
            ).fit(X, Y[:, k])
            expected = alone.predict(X, return_std=True)
            assert_allclose((mean[:, k], std[:, k]), expected, atol=1e-8)
            evidence += alone.log_marginal_likelihood_value_
        assert model.log_marginal_likelihood_value_ == pytest.approx(evidence)


class CountsByHand(nn.Module):
    """A user-defined criterion for counts."""

    reduction = "mean"

    def forward(self, outputs, y):
        return (outputs.exp() - y * outputs).mean()


@dataclass(frozen=True)
class StudentT(RegressionLikelihood):
    """Student's t log-density with four degrees of freedom and scale one half."""

    df: float = 4.0
    width_of_noise: float = 0.5
    is_convex = False

    @property
    def noise(self):
        return stats.t(self.df, scale=self.width_of_noise)

    @property
    def fisher(self):
        return (self.df + 1) / (self.df + 3) / self.width_of_noise**2

    def loss(self, f, y):
        z = (y - f) ** 2 / (self.df * self.width_of_noise**2)
        return ((self.df + 1) / 2 * torch.log1p(z) - self.noise.logpdf(0)).sum(-1)

    def gradient(self, f, y):
        scale = self.df * self.width_of_noise**2 + (y - f) ** 2
        return (self.df + 1) * (f - y) / scale

    def hessian(self, f):
        return Factored((f.new_ones(f.shape) * self.fisher**0.5).diag_embed())

    def hessian_operator(self, f):
        return lambda u: self.fisher * u

    def draw(self, f, u):
        return f + torch.as_tensor(self.noise.ppf(u.numpy())).to(f)

    def moments(self, mean, variance, noise):
        return mean, variance + self.noise.var()

    def joint_moments(self, mean, cov, noise):
        return mean, cov + self.noise.var() * np.eye(len(cov))[:, :, None]

    def quantiles(self, mean, variance, noise, levels):
        _, total = self.moments(mean, variance, noise)
        return mean[..., None] + np.sqrt(total)[..., None] * norm.ppf(levels)

    def sample(self, f, noise, generator):
        return f + self.width_of_noise * generator.standard_t(self.df, f.shape)

    def log_density(self, mean, variance, y, noise):
        z, w = np.polynomial.hermite_e.hermegauss(32)
        f = mean.numpy()[..., None] + np.sqrt(variance.numpy())[..., None] * z
        p = self.noise.pdf(y.numpy()[..., None] - f)
        return torch.from_numpy(np.log(p @ w / w.sum()).sum(-1))


class Detached(StudentT):
    def loss(self, f, y):
        return super().loss(f.detach(), y)


class WrongGradient(StudentT):
    def gradient(self, f, y):
        return 2 * super().gradient(f, y)


class NoiseToChoose(StudentT):
    has_noise = True


class HeavyTails(nn.Module):
    """The loss of `StudentT`, in other units."""

    def forward(self, outputs, y):
        return 3 * StudentT().loss(outputs, y).sum()


class OfTwo(NeuralNetRegressor):
    """A net whose loss receives all outputs, and has a constant penalty."""

    def get_loss(self, y_pred, y_true, X=None, training=False):
        mean, _ = y_pred
        return StudentT().loss(mean, y_true).mean() + X.abs().mean()


class TwoOutputs(MLP):
    def forward(self, X):
        f = super().forward(X)
        return f, f.exp()


class TestLikelihoodsOfOnesOwn:
    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize("kind", [LaplaceRegressor, DeepEnsembleRegressor])
    @pytest.mark.parametrize(
        "criterion", [nn.L1Loss, nn.MSELoss, HeavyTails, None, CountsByHand]
    )
    def test_a_loss_with_other_gradients_warns(self, criterion, kind, frozen):
        """The weights maximise the likelihood only if the gradients are the same."""
        X, y = waves(dtype=np.float64)
        if criterion is None:
            net = OfTwo(TwoOutputs, module__n_out=1, **QUICK, **FLOAT64)
        else:
            net = regressor(criterion=criterion, **FLOAT64)
        if frozen and kind is LaplaceRegressor:
            net = FrozenEstimator(seeded(net, X, y[:, None]))
        model = kind(net, likelihood=StudentT(), random_state=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(X, y)
        found = {str(w.message) for w in caught if "gradients" in str(w.message)}
        assert len(found) == (criterion not in (HeavyTails, None))
        if found:
            assert f"criterion={criterion.__name__}" in found.pop()

    def test_a_perfect_fit_has_no_gradients_to_compare(self):
        X, _ = waves(dtype=np.float64)
        net = regressor(criterion=HeavyTails, **FLOAT64).initialize()
        with torch.no_grad():
            for parameter in net.module_.parameters():
                parameter.zero_()
        net, settings = FrozenEstimator(net), {"prior_precision": 1.0}
        model = LaplaceRegressor(net, likelihood=StudentT(), **settings)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(X, np.zeros(len(X)))
        assert not [w for w in caught if "gradients" in str(w.message)]

    def test_bayes_by_backprop_trains_the_likelihood_itself(self):
        X, y = waves(dtype=np.float64)
        net = regressor(criterion=nn.L1Loss, **FLOAT64)
        VariationalRegressor(net, likelihood=StudentT(), random_state=0).fit(X, y)

    def test_is_the_same_as_a_known_one(self):
        X, y = counts()
        options = {"prior_precision": 15.0, "refine": True, "random_state": 0}
        found = []
        for criterion, known in ((nn.PoissonNLLLoss, None), (CountsByHand, Poisson())):
            model = LaplaceRegressor(rates(20, criterion), likelihood=known, **options)
            model.fit(X, y)
            found.append([*model.predict(X, return_std=True), model.sample_y(X)[:, 0]])
        assert_allclose(*found, rtol=1e-6)
        with pytest.raises(ValueError, match="CountsByHand is not supported here"):
            LaplaceRegressor(rates(20, CountsByHand)).fit(X, y)

    @pytest.mark.parametrize("prior", [1.0, "validation", "marglik"])
    def test_of_heavy_tails(self, prior):
        X, y = waves(n=120, dtype=np.float64)
        y[::20] += 5
        net = regressor(MLP, criterion=HeavyTails, max_epochs=60, **FLOAT64)
        settings = {"prior_precision": prior, "subset_of_weights": "all"}
        model = LaplaceRegressor(net, likelihood=StudentT(), random_state=0, **settings)
        # one that a search can clone, and a pickle keep
        model = pickle.loads(pickle.dumps(clone(model).fit(X, y)))
        mean, std = model.predict(X, return_std=True)
        assert (std**2 > stats.t.var(4, scale=0.5) - 1e-9).all()
        low, high = model.predict_interval(X, 0.9).T
        assert ((low < mean) & (mean < high)).all()
        assert model.sample_y(X[:3], 7).shape == (3, 7)
        if prior != "validation":
            mean, y = torch.tensor(mean[:, None]), torch.tensor(y)[:, None]
            expected = StudentT().loss(mean, y).sum()
            torch.testing.assert_close(model.posterior_.data_fit.loss, expected)

    @pytest.mark.parametrize(
        ("wrong", "error", "words"),
        [
            (WrongGradient(), ValueError, "gradient of WrongGradient contradicts"),
            (Detached(), ValueError, "loss of Detached cannot be differentiated"),
            (NoiseToChoose(), ValueError, "only normal noise can be estimated"),
            (StudentT, TypeError, r"not an instance .*RegressionLikelihood"),
            ("poisson", TypeError, "likelihood='poisson' is not an instance"),
            (Categorical(), TypeError, "use LaplaceClassifier"),
        ],
    )
    def test_that_cannot_be(self, wrong, error, words):
        model = LaplaceRegressor(regressor(MLP, **FLOAT64), likelihood=wrong)
        with pytest.raises(error, match=words):
            model.fit(*waves(dtype=np.float64))
