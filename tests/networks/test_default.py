"""Default networks: units, weights, order of rows, quality."""

import pickle

import numpy as np
import pytest
import torch
from nets import seeded
from sklearn.base import clone
from sklearn.datasets import load_iris, make_friedman1, make_moons
from sklearn.linear_model import BayesianRidge
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from sklaplace import LaplaceClassifier
from sklaplace.core.random import private_rng
from sklaplace.data.dataset import TrainingData
from sklaplace.networks.default import (
    FULL_BATCH_ROWS,
    LARGE,
    MANY_ROWS,
    MIN_NOISE,
    SMALL,
    Size,
    default_classifier,
    default_regressor,
    part_indices,
    piecewise_linear,
    with_dropout,
    without_penalty,
)
from sklaplace.networks.optimizer import CosineAdam
from sklaplace.networks.tabular import with_pieces
from sklaplace.networks.training import training_run


def _outputs(net, X):
    with torch.no_grad():
        return net.module_(torch.from_numpy(X)).numpy()


def _size(X):
    return Size.of(len(np.unique(X, axis=0)))


def _default(kind, X, y, weight=None, n_outputs=2, size=None):
    data, size = TrainingData(X, y, weight), size or _size(X)
    if kind == "regressor":
        return default_regressor(data, size)
    return default_classifier(data, size, n_outputs)


def _trained(kind, X, y, seed=0, n_outputs=2):
    return seeded(_default(kind, X, y, n_outputs=n_outputs), X, y, seed)


def _short(net):
    return net.set_params(optimizer__n_steps=50)


def _problem(kind, n=40, d=3, n_outputs=2, seed=0):
    rng = np.random.RandomState(seed)
    X = rng.randn(n, d)
    if kind == "classifier":
        y = rng.randint(n_outputs, size=n)
        y[:n_outputs] = np.arange(n_outputs)
        return X, y
    return X, np.sin(X[:, :1]) + X @ rng.randn(d, n_outputs) + rng.randn(n, n_outputs)


every_kind = pytest.mark.parametrize("kind", ["classifier", "regressor"])
VARIANTS = {
    "default": lambda net: net,
    "without penalty": lambda net: _short(without_penalty(net)),
    "with dropout": lambda net: _short(with_dropout(net)),
}
every_variant = pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
SHAPES = [
    *[(10, 10, 1), (15, 10, 2), (30, 3, 3), (60, 10, 2), (200, 5, 3)],
    (700, 5, 3),
    pytest.param(2600, 5, 3, marks=pytest.mark.slow),
]


class TestStandardisation:
    @pytest.mark.parametrize("constant", [0.0, 0.1, -1e300, 3e7])
    def test_constant_column_has_scale_one(self, constant):
        X, y = _problem("classifier", 23, 3, 2)
        X[:, 1] = constant
        X[5, 1], weight = 7.0, np.ones(23)
        weight[5] = 0.0  # what a dropped row holds must not matter
        net = _default("classifier", X, y, weight)
        assert net.module__scale[1] == 1.0
        np.testing.assert_allclose(net.module__center[1], constant)

    @pytest.mark.parametrize("n", [30, MANY_ROWS])
    def test_huge_and_tiny_values_stay_finite(self, n):
        X, y = _problem("classifier", n, 3, 2)
        X = X * [1e307, 1e-300, 1.0]
        net = _trained("classifier", X, y)
        assert np.isfinite(net.module__scale).all()
        assert np.isfinite(_outputs(net, X)).all()

    def test_large_offset_is_kept_apart_from_spread(self):
        column = 1.6e9 + np.arange(50.0)
        net = _default("regressor", column[:, None], column[:, None], size=SMALL)
        np.testing.assert_allclose(net.module__scale, column.std(), rtol=1e-9)


class TestUnits:
    @every_kind
    @every_variant
    def test_predictions_do_not_depend_on_units_of_inputs(self, kind, change):
        X, y = _problem(kind, 80)
        units, origin = np.array([1e-6, 30.0, 1e5]), np.array([0.01, -50.0, 1e6])
        actual, expected = (
            seeded(change(_default(kind, rows, y)), rows, y).forward(rows)
            for rows in (X * units + origin, X)
        )
        np.testing.assert_allclose(actual, expected, atol=1e-5)

    def test_predictions_follow_units_of_targets(self):
        X, Y = _problem("regressor", 80, 3, 2)
        units, origin = np.array([1e-4, 1e6]), np.array([5.0, -1e7])
        moved = Y * units + origin
        expected = _outputs(_trained("regressor", X, Y), X)
        actual = _outputs(_trained("regressor", X, moved), X)
        np.testing.assert_allclose((actual - origin) / units, expected, atol=1e-5)

    def test_constant_target_is_predicted(self):
        X, _ = _problem("regressor", 20, 3, 1)
        Y = np.full((20, 1), 4.2)
        found = _outputs(_trained("regressor", X, Y), 3 * X)
        np.testing.assert_allclose(found, 4.2)


class TestWeightsAndOrder:
    @every_kind
    @pytest.mark.parametrize(("n", "d", "n_outputs"), SHAPES)
    @pytest.mark.parametrize("seed", [0, 1])
    def test_weights_equal_repeated_and_shuffled_rows(
        self, kind, n, d, n_outputs, seed
    ):
        X, y = _problem(kind, n, d, n_outputs, seed)
        rng = np.random.RandomState(seed + 1)
        # estimators leave out samples without weight, which would count in parts
        weight = rng.randint(n >= FULL_BATCH_ROWS, 5, size=n)
        weight[:n_outputs] = 1
        rows = rng.permutation(np.repeat(np.arange(n), weight))
        weight = weight.astype(float)
        net = _default(kind, X, y, weight, n_outputs)
        with private_rng(0), training_run(net, TrainingData(X, y, weight)):
            net.fit(X, y)
        repeated = _trained(kind, X[rows], y[rows], n_outputs=n_outputs)
        # predict_proba of skorch's regressor is its predict
        actual, expected = net.predict_proba(X), repeated.predict_proba(X)
        # hundreds of steps of Adam on all rows amplify rounding errors, which differ
        # between machines; the largest of 24 differences on two of them was 9.2e-7
        atol = 1e-5 if MANY_ROWS <= n < FULL_BATCH_ROWS else 1e-7
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


class TestParts:
    def test_hold_every_row_once_whatever_the_order(self):
        rng = np.random.RandomState(0)
        X, order = rng.randn(700, 2).round(1), rng.permutation(700)
        number = part_indices(X, 100)
        np.testing.assert_array_equal(part_indices(X[order], 100), number[order])
        n_distinct = len(np.unique(X, axis=0))
        assert len(np.unique(number)) == np.ceil(n_distinct / 100)
        assert np.ptp(np.bincount(number)) < 30

    def test_equal_rows_share_a_part(self):
        X = np.repeat(np.arange(-25.0, 25), 4)[:, None]
        X[X == 0] = [0.0, -0.0, 0.0, -0.0]
        number = part_indices(X, 5).reshape(50, 4)
        assert (number == number[:, :1]).all()
        np.testing.assert_array_equal(np.bincount(number[:, 0]), 5)

    def test_small_tables_are_one_part(self):
        assert not part_indices(np.arange(9.0)[:, None], 10).any()

    @every_kind
    def test_units_do_not_matter(self, kind):
        X, y = _problem(kind, 60)
        units, origin = np.array([1e-6, 30.0, 1e5]), np.array([0.01, -50.0, 1e6])
        target_units, target_origin = (30.0, 5.0) if kind == "regressor" else (1, 0)
        moved, expected = (
            seeded(
                _default(kind, rows, targets, size=LARGE).set_params(
                    part_size=20, optimizer__n_steps=50
                ),
                rows,
                targets,
            ).forward(rows)
            for rows, targets in (
                (X * units + origin, y * target_units + target_origin),
                (X, y),
            )
        )
        actual = (moved - target_origin) / target_units
        np.testing.assert_allclose(actual, expected, atol=1e-5)

    @every_kind
    def test_mean_of_their_losses_is_that_of_all_rows(self, kind):
        class Evaluating(CosineAdam):
            def step(self, closure):
                losses.extend(float(closure().detach()) for _ in range(3))

        X, y = _problem(kind, 60)
        weight = np.linspace(0.1, 3, 60)
        net = _default(kind, X, y, weight, size=LARGE)
        net.set_params(optimizer=Evaluating)
        means = []
        for part_size in (None, 20):  # three parts
            losses = []
            net.set_params(part_size=part_size)
            with private_rng(0), training_run(net, TrainingData(X, y, weight)):
                net.fit(X, y)
            means.append(np.mean(losses))
        assert losses[0] != losses[1]
        assert means[0] == pytest.approx(means[1], rel=1e-12)


class TestPieces:
    def test_rise_between_quantiles_and_are_constant_elsewhere(self):
        Z = np.linspace(-1, 1, 101)[:, None]
        pieces = piecewise_linear(Z, np.ones(101), 4)
        np.testing.assert_allclose(pieces[:, 0], 0)
        np.testing.assert_allclose(pieces[:, 1], [-1, -0.5, 0, 0.5], atol=0.03)
        found = with_pieces(torch.tensor([[-9.0], [0.0], [9.0]]), torch.tensor(pieces))
        values = found[:, 1:].numpy() * pieces[:, 4] + pieces[:, 3]
        expected = [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
        np.testing.assert_allclose(values, expected, atol=0.06)

    def test_are_standardised_and_span_piecewise_linear_functions(self):
        Z = np.random.RandomState(0).randn(300, 1)
        pieces = piecewise_linear(Z, np.ones(300), 4)
        knots = [*pieces[:, 1], Z.max()]
        encoded = with_pieces(torch.tensor(Z), torch.tensor(pieces)).numpy()[:, 1:]
        np.testing.assert_allclose(encoded.mean(0), 0, atol=1e-12)
        np.testing.assert_allclose(encoded.std(0), 1)
        target = np.interp(Z[:, 0], knots, [3.0, -1.0, 0.0, 5.0, 2.0])
        design = np.column_stack([encoded, np.ones(300)])
        coefficients = np.linalg.lstsq(design, target)[0]
        np.testing.assert_allclose(design @ coefficients, target, atol=1e-12)

    def test_columns_with_few_values_have_none(self):
        Z = np.column_stack([np.arange(40) % 2, np.zeros(40), np.arange(40) == 7])
        assert piecewise_linear(Z.astype(float), np.ones(40), 8).shape == (0, 5)

    def test_wide_tables_have_fewer(self):
        X, y = _problem("classifier", MANY_ROWS, 300, 2)
        net = _default("classifier", X, y)
        assert len(net.module__pieces) == 300 * 2
        X, y = _problem("classifier", MANY_ROWS, 600, 2)
        assert len(_default("classifier", X, y).module__pieces) == 0

    def test_repeated_rows_do_not_make_a_large_table(self):
        X, y = _problem("classifier", 100, 3, 2)
        model = LaplaceClassifier(prior_precision=1.0)
        model.fit(np.tile(X, (9, 1)), np.tile(y, 9))
        assert len(model.estimator_.module__pieces) == 0


class TestNoise:
    @pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
    def test_penalty_follows_noise(self, noise):
        rng = np.random.RandomState(0)
        X = rng.uniform(0, 6, size=(300, 1))
        Y = np.sin(1.5 * X) + noise * rng.randn(300, 1)
        penalty = _default("regressor", X, Y, size=SMALL).penalty
        share = penalty * 300 / SMALL.regression_strength
        assert share == pytest.approx(noise**2 / Y.var(), rel=0.25)

    def test_more_columns_than_rows(self):
        rng = np.random.RandomState(0)
        X, y = rng.randn(20, 500), np.arange(20) % 2
        net = _default("classifier", X, y)
        assert net.penalty > 0
        assert log_loss(y, seeded(net, X, y).predict_proba(X)) < np.log(2)

    def test_absent_class_and_constant_target_have_no_say(self):
        X, y = _problem("classifier", 30, 3, 2)
        two, three = (
            _default("classifier", X, y, n_outputs=k, size=SMALL).penalty
            for k in (2, 3)
        )
        assert three == pytest.approx(two)
        X, Y = _problem("regressor", 30, 3, 1)
        both = np.hstack([Y, np.ones_like(Y)])
        alone = _default("regressor", X, Y, size=SMALL).penalty
        assert _default("regressor", X, both, size=SMALL).penalty == pytest.approx(
            alone / 2
        )

    def test_noiseless_data_keep_a_penalty(self):
        X = np.linspace(-1, 1, 50)[:, None]
        net = _default("regressor", X, 2 * X, size=SMALL)
        assert net.penalty * 50 == pytest.approx(MIN_NOISE * SMALL.regression_strength)


class TestNets:
    @every_kind
    @every_variant
    def test_silent_clonable_and_picklable(self, kind, change, capsys):
        X, y = _problem(kind)
        net = seeded(clone(change(_default(kind, X, y))), X, y)
        assert capsys.readouterr() == ("", "")
        assert len(net.history) == 1
        for again in (pickle.loads(pickle.dumps(net)), seeded(clone(net), X, y)):
            np.testing.assert_array_equal(again.forward(X), net.forward(X))


class TestQuality:
    @pytest.mark.parametrize(
        ("data", "bound"),
        [
            (load_iris(return_X_y=True), 0.15),
            (make_moons(300, noise=0.3, random_state=0), 0.32),
        ],
        ids=["iris", "moons"],
    )
    def test_log_loss(self, data, bound):
        losses = []
        for seed in range(3):
            X, X_test, y, y_test = train_test_split(
                *data, test_size=0.25, random_state=seed, stratify=data[1]
            )
            net = _trained("classifier", X, y, seed, y.max() + 1)
            losses.append(log_loss(y_test, net.predict_proba(X_test)))
        assert np.mean(losses) < bound

    def test_steps_and_interactions_are_learned_from_many_rows(self):
        rng = np.random.RandomState(0)
        X = rng.uniform(-1, 1, size=(3000, 4))
        clean = np.where(X[:, :1] > 0.2, np.sin(5 * X[:, 1:2]), np.abs(X[:, 2:3]))
        Y, test = clean + 0.1 * rng.randn(3000, 1), slice(1000, None)
        net = _trained("regressor", X[:1000], Y[:1000])
        error = np.mean((net.predict(X[test]) - clean[test]) ** 2) / clean.var()
        assert error < 0.1

    def test_curved_regression_beats_a_linear_model(self):
        X, y = make_friedman1(1400, noise=1.0, random_state=0)
        train, test = slice(400), slice(400, None)
        Y = y[:, None]
        net = _trained("regressor", X[train], Y[train])
        error = np.mean((net.predict(X[test]) - Y[test]) ** 2)
        linear = BayesianRidge().fit(X[train], y[train]).predict(X[test])
        assert error < 0.5 * np.mean((linear - y[test]) ** 2)
