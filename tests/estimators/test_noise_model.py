"""Input-dependent noise, compared with simulations of known noise."""

import pickle
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import expon, norm
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetRegressor
from skorch.dataset import ValidSplit
from torch import nn

from sklaplace import LaplaceRegressor
from sklaplace.noise.model import MIN_RESIDUALS, NoiseModel
from sklaplace.noise.residuals import Predictions, Residuals

LEVELS = np.array([0.05, 0.25, 0.5, 0.75, 0.95])


def predictions(n=2000, n_outputs=1, seed=0):
    rng = np.random.default_rng(seed)
    inputs = rng.uniform(-1, 1, size=(n, 3))
    mean = rng.standard_normal((n, n_outputs))
    values = np.tanh(inputs), inputs, mean, np.full((n, n_outputs), 1e-4)
    return Predictions(*map(torch.from_numpy, values))


def residuals(given, values, weights=None):
    n = len(values)
    weights = np.ones(n) if weights is None else weights
    return Residuals(given, values, weights, np.arange(n))


MOMENTS = "mean", "variance"


def of_batch(model, given):
    noise, rows = model.of_batch(*vars(given).values())
    return noise.numpy(), rows.numpy()


def quantiles(model, given, levels=LEVELS):
    """Return quantiles of residuals (n, c, q); the constant levels are one."""
    noise, rows = of_batch(model, given)
    scores = np.broadcast_to(norm.ppf(levels), (*noise.shape, len(levels)))
    std = np.sqrt(given.variance.numpy() + noise**2)[..., None]
    return std * model.standardised(rows, scores)


def scales(given):
    return given.inputs[:, :1].exp().numpy()


def drawn(given, seed=1, kind=norm):
    rng = np.random.default_rng(seed)
    values = kind.ppf(rng.uniform(size=given.mean.shape))
    return scales(given) * (values - kind.mean())


class TestNoiseModel:
    def test_noise_follows_the_inputs(self):
        given, new = predictions(), predictions(seed=2)
        model = NoiseModel.fit(residuals(given, drawn(given)), np.ones(1))
        noise, _ = of_batch(model, new)
        ratio = np.log(noise / scales(new))
        assert abs(ratio.mean()) < 0.05
        assert ratio.std() < 0.1  # of 0.58 for a constant

    def test_constant_noise_stays_constant(self):
        given, new = predictions(), predictions(seed=2)
        values = np.random.default_rng(1).standard_normal((2000, 1))
        noise, _ = of_batch(NoiseModel.fit(residuals(given, values), np.ones(1)), new)
        assert abs(np.log(noise).mean()) < 0.05
        assert np.log(noise).std() < 0.05

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", [norm, expon], ids=["normal", "skewed"])
    def test_quantiles_are_those_of_the_truth(self, kind):
        given, new = predictions(4000), predictions(seed=2)
        found = quantiles(
            NoiseModel.fit(residuals(given, drawn(given, 1, kind)), np.ones(1)), new
        )
        expected = scales(new)[..., None] * (kind.ppf(LEVELS) - kind.mean())
        error = abs(found - expected).mean(axis=0) / scales(new).mean()
        assert error.max() < 0.25  # 0.35 for skewed residuals taken as normal

    def test_coverage_is_right_in_all_and_where_noise_is_large(self):
        given, new = predictions(), predictions(4000, seed=2)
        model = NoiseModel.fit(residuals(given, drawn(given)), np.ones(1))
        low, high = np.moveaxis(quantiles(model, new, np.array([0.05, 0.95])), -1, 0)
        values = drawn(new, 3)
        inside = (low <= values) & (values <= high)
        error = (0.09 / 2000 + 0.09 / 4000) ** 0.5
        assert abs(inside.mean() - 0.9) < 4 * error
        largest = scales(new) > np.quantile(scales(new), 0.9)
        assert inside[largest].mean() > 0.84

    @pytest.mark.parametrize("n", [40, pytest.param(400, marks=pytest.mark.slow)])
    def test_moments_are_those_of_the_quantiles(self, n):
        given = predictions(n)
        model = NoiseModel.fit(residuals(given, drawn(given, 1, expon)), np.ones(1))
        noise, _ = of_batch(model, given)
        levels = (np.arange(20_000) + 0.5) / 20_000
        found = quantiles(model, given, levels)
        std = np.sqrt(given.variance.numpy() + noise**2)
        np.testing.assert_allclose(found.mean(-1) / std, 0, atol=0.02)
        np.testing.assert_allclose(found.std(-1) / std, 1, atol=0.03)

    @pytest.mark.slow
    def test_outliers_hardly_widen_intervals(self):
        given = predictions()
        clean = drawn(given)
        values, bad = clean.copy(), np.random.default_rng(5).uniform(size=2000) < 0.05
        values[bad] += 10 * np.sign(clean[bad])
        widths = []
        for rows in (clean, values):
            model = NoiseModel.fit(residuals(given, rows), np.ones(1))
            low, high = np.moveaxis(
                quantiles(model, given, np.array([0.05, 0.95])), -1, 0
            )
            widths.append(np.median(high - low))
        assert widths[1] < 1.5 * widths[0]

    def test_far_inputs_keep_the_noise_within_bounds(self):
        given = predictions()
        model = NoiseModel.fit(residuals(given, drawn(given)), np.ones(1))
        near, _ = of_batch(model, given)
        far = Predictions(*(1e6 * v for v in vars(given).values()))
        far = Predictions(far.features, far.inputs, far.mean, given.variance)
        noise, _ = of_batch(model, far)
        assert (noise <= 2 * near.max()).all()
        assert (noise >= near.min() / 2).all()

    def test_weights_equal_repeated_rows_in_any_order(self):
        given = predictions(200)
        values, weights = drawn(given), np.arange(200) % 3 + 1.0
        whole = residuals(given, values, weights)
        repeated = np.random.default_rng(3).permutation(
            np.repeat(np.arange(200), weights.astype(int))
        )
        rows = Predictions(*(v[repeated] for v in vars(given).values()))
        same = Residuals(rows, values[repeated], np.ones(len(repeated)), repeated)
        first, second = (
            quantiles(NoiseModel.fit(r, np.ones(1)), given) for r in (whole, same)
        )
        np.testing.assert_allclose(first, second, atol=1e-6)

    def test_columns_are_independent(self):
        """Noise grows with the first input in one column, and falls in the other."""
        rows = predictions(400)
        twice = {k: v.repeat(1, 2) for k, v in vars(rows).items() if k in MOMENTS}
        both = Predictions(rows.features, rows.inputs, **twice)
        growing = drawn(rows) * scales(rows)
        falling = drawn(rows, seed=2) / scales(rows)
        values = np.hstack([growing, falling])
        model = NoiseModel.fit(residuals(both, values), np.ones(2))
        noise, levels = of_batch(model, both)
        assert (np.diff(levels, axis=-1) >= 0).all()
        for column, alone in enumerate((growing, falling)):
            single = NoiseModel.fit(residuals(rows, alone), np.ones(1))
            expected = of_batch(single, rows)
            np.testing.assert_array_equal(noise[:, [column]], expected[0])
            np.testing.assert_array_equal(levels[:, [column]], expected[1])

    def test_few_or_exact_residuals_give_none(self):
        given = predictions(MIN_RESIDUALS - 1)
        assert NoiseModel.fit(residuals(given, drawn(given)), np.ones(1)) is None
        given = predictions(60)
        assert (
            NoiseModel.fit(residuals(given, 0 * given.mean.numpy()), np.ones(1)) is None
        )

    def test_inputs_without_features_or_tables_are_enough(self):
        given, values = predictions(500), drawn(predictions(500))
        given_inputs = {"x": torch.zeros(500, 2)}
        bare = Predictions.of(None, given_inputs, given.mean, given.mean)
        assert bare.features.shape == bare.inputs.shape == (500, 0)
        bare = Predictions(bare.features, bare.inputs, given.mean, given.variance)
        model = NoiseModel.fit(residuals(bare, values), np.ones(1))
        assert np.isfinite(quantiles(model, bare)).all()


# ---------------------------------------------------------------- with LaplaceRegressor
def data(n=600, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, size=(n, 2))
    std = 0.1 * np.exp(1.5 * X[:, 0])
    return X, np.sin(2 * X[:, 1]) + std * rng.standard_normal(n), std


def small_net(width=20, **settings):
    def make():
        layers = nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)
        return nn.Sequential(*layers).double()

    options = {"max_epochs": 60, "lr": 0.01, "batch_size": 32, "verbose": 0}
    options |= {"optimizer": torch.optim.Adam, "train_split": None}
    return NeuralNetRegressor(make, criterion=nn.MSELoss, **options | settings)


@pytest.fixture(scope="module")
def fitted():
    X, y, _ = data()
    return LaplaceRegressor(random_state=0).fit(X, y)


class TestRegressor:
    @pytest.mark.slow
    @pytest.mark.parametrize("net", [None, small_net()], ids=["default", "net"])
    def test_deviations_follow_the_inputs(self, net, full_training):
        seen = data(600 if net is None else 2000)[:2]
        model = LaplaceRegressor(net, random_state=0).fit(*seen)
        X, y, std = data(2000, seed=1)
        found = model.predict(X, return_std=True)[1]
        assert np.corrcoef(np.log(found), np.log(std))[0, 1] > 0.85
        low, high = model.predict_interval(X, 0.9).T
        for part in (X[:, 0] < -0.5, X[:, 0] > 0.5):
            assert 0.8 < ((low <= y) & (y <= high))[part].mean() < 0.97
        constant = clone(model).set_params(sigma_noise="homoscedastic").fit(*seen)
        nll = [-m._log_proba_of(X, y).mean() for m in (model, constant)]
        assert nll[0] < nll[1] - 0.1

    @pytest.mark.parametrize("noise", ["homoscedastic", 0.2])
    def test_constant_noise_on_request(self, noise):
        X, y, _ = data(200)
        model = LaplaceRegressor(sigma_noise=noise, random_state=0).fit(X, y)
        std = model.predict(X, return_std=True)[1]
        variance = model.latent_mean_and_variance(X)[1][:, 0]
        np.testing.assert_allclose(std**2, variance + model.sigma_noise_**2)

    def test_more_rows_hardly_change_it(self, fitted):
        X, y, _ = data(80, seed=1)
        expected = fitted.predict_interval(X)
        again = pickle.loads(pickle.dumps(fitted)).partial_fit(X, y)
        assert not np.allclose(again.predict_interval(X), expected, rtol=1e-6)
        np.testing.assert_allclose(again.predict_interval(X), expected, atol=0.1)

    def test_recalibration_and_tuning_scale_the_noise(self, fitted):
        X, y, _ = data(300, seed=1)
        model = pickle.loads(pickle.dumps(fitted))
        before = model.predict(X, return_std=True)[1]
        model.recalibrate(X, y)
        after = model.predict(X, return_std=True)[1]
        np.testing.assert_allclose(after, before * model.sigma_scaling_, rtol=1e-9)
        draws = model.sample_y(X[:3], 4000)
        np.testing.assert_allclose(draws.std(1) / after[:3], 1, atol=0.08)
        sigma = model.sigma_noise_
        mean = model.predict(X)
        model.tune(X, mean + 3 * (y - mean), parameters="sigma_noise")
        ratio = model.predict(X, return_std=True)[1] / before
        # the variance of the outputs is not noise, and does not change
        assert (ratio > 1).all()
        assert np.median(ratio) == pytest.approx(model.sigma_noise_ / sigma, rel=0.2)

    def test_frozen_network_learns_it_from_given_rows(self):
        X, y, _ = data()
        net = small_net().fit(X, y[:, None])
        model = LaplaceRegressor(FrozenEstimator(net), random_state=0)
        X_val, y_val, _ = data(400, seed=1)
        model.fit(X, y, X_val=X_val, y_val=y_val)
        X, _, std = data(500, seed=2)
        found = model.predict(X, return_std=True)[1]
        assert np.corrcoef(np.log(found), np.log(std))[0, 1] > 0.8


class TestCopies:
    """Copies of rows must not make intervals too narrow."""

    @pytest.mark.filterwarnings("ignore:There are no held-out samples")
    @pytest.mark.parametrize(
        ("kind", "jitter"),
        [
            ("default", 0.0),
            *(
                pytest.param(*case, marks=pytest.mark.slow)
                for case in product(["default", "split", "frozen"], [0.0, 1e-7])
                if case != ("default", 0.0)
            ),
        ],
    )
    def test_coverage(self, kind, jitter, full_training):
        rng = np.random.default_rng(0)
        rows, X_new = rng.standard_normal((100, 2)), rng.standard_normal((2000, 2))
        y, y_new = (
            np.sin(2 * X[:, 0]) + 0.5 * rng.standard_normal(len(X))
            for X in (rows, X_new)
        )
        order = rng.permutation(np.repeat(np.arange(100), 5))
        X, y = rows[order] + jitter * rng.standard_normal((500, 2)), y[order]
        net = small_net(train_split=ValidSplit(5), max_epochs=100)
        if kind == "frozen":
            torch.manual_seed(0)
            net = FrozenEstimator(net.fit(X, y[:, None]))
        model = LaplaceRegressor(None if kind == "default" else net, random_state=0)
        if kind == "default":
            model.fit(X, y)
        else:
            with pytest.warns(UserWarning, match="100% of the rows of X have copies"):
                model.fit(X, y)
        low, high = model.predict_interval(X_new).T
        assert np.mean((low <= y_new) & (y_new <= high)) > 0.85

    def test_a_net_keeps_its_split_without_copies(self):
        X, y, _ = data(200)
        X[1] = X[0]  # one copy makes no difference
        net = small_net(train_split=ValidSplit(5), max_epochs=5)
        model = LaplaceRegressor(net, random_state=0).fit(X, y)
        assert len(model.estimator_.history[0]["batches"]) == 5 + 2
