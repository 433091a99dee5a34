"""What all estimators that predict from draws promise."""

import copy
import pickle

import numpy as np
import pytest
import torch
from conftest import global_rng_states
from nets import (
    MLP,
    BatchNormMLP,
    RecordTraining,
    blobs,
    classifier,
    regressor,
    seeded,
    waves,
)
from refusals import refused_fit
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNet
from skorch.callbacks import Callback
from torch import nn

from sklaplace import (
    DeepEnsembleClassifier,
    DeepEnsembleRegressor,
    MCDropoutClassifier,
    MCDropoutRegressor,
    SWAGClassifier,
    SWAGRegressor,
    VariationalClassifier,
    VariationalRegressor,
    dirichlet,
)

X, Y = blobs()
X_REG, Y_REG = waves(60)
CLASSIFIERS = [
    VariationalClassifier,
    MCDropoutClassifier,
    DeepEnsembleClassifier,
    SWAGClassifier,
]
REGRESSORS = [
    VariationalRegressor,
    MCDropoutRegressor,
    DeepEnsembleRegressor,
    SWAGRegressor,
]
ALL = CLASSIFIERS + REGRESSORS
FAMILIES = {"posterior": ["gaussian", "density"]}
# Sums of a few numbers in float32, taken in another order
SINGLE = {"rtol": 0, "atol": 2e-6}


def make(kind, **params):
    """The estimator around a quick net, with few draws."""
    module = BatchNormMLP if "Dropout" in kind.__name__ else MLP
    around = classifier if kind in CLASSIFIERS else regressor
    net = around(module, **{"max_epochs": 15} | params)
    few = {"n_estimators": 3} if "Ensemble" in kind.__name__ else {"n_samples": 7}
    if "SWAG" in kind.__name__:
        few |= {"n_snapshots": 5, "steps_per_snapshot": 2, "lr": 0.03}
    return kind(net, random_state=0, **few)


def rows_of(kind):
    return (X, Y) if kind in CLASSIFIERS else (X_REG, Y_REG)


@pytest.fixture(scope="module")
def models():
    return {kind: make(kind).fit(*rows_of(kind)) for kind in ALL}


@pytest.fixture(params=ALL, ids=lambda kind: kind.__name__)
def model(request, models):
    return models[request.param]


@pytest.fixture
def Z(model):
    return rows_of(type(model))[0]


@pytest.fixture(params=CLASSIFIERS, ids=lambda kind: kind.__name__)
def classes(request, models):
    return models[request.param]


@pytest.fixture(params=REGRESSORS, ids=lambda kind: kind.__name__)
def numbers(request, models):
    return models[request.param]


def answers(model, X):
    """What the model says of rows, one entry of each array per row."""
    latent, variance = model.latent_mean_and_variance(X)
    if type(model) in CLASSIFIERS:
        return {
            "proba": model.predict_proba(X),
            "mean": latent,
            "variance": variance,
            "uncertainty": model.predict_uncertainty(X),
            "drawn": model.sample_proba(X, 4),
        }
    mean, std = model.predict(X, return_std=True)
    quantiles = model.predict_quantiles(X, [0.1, 0.9])
    return {"mean": mean, "std": std, "quantiles": quantiles, "variance": variance}


def same(found, expected, **tolerance):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, **tolerance, err_msg=name)


# ------------------------------------------------------------------- determinism
class TestDeterminism:
    def test_a_seed_decides(self, model, rng_untouched):
        Z, y = rows_of(type(model))
        again = clone(model).fit(Z, y)
        same(answers(again, Z), answers(model, Z), rtol=0)
        other = clone(model).set_params(random_state=1).fit(Z, y)
        assert not np.allclose(answers(other, Z)["mean"], answers(model, Z)["mean"])

    def test_without_a_seed_each_fit_differs(self, model, rng_untouched):
        Z, y = rows_of(type(model))
        twins = [clone(model).set_params(random_state=None) for _ in range(2)]
        first, second = (answers(twin.fit(Z, y), Z)["mean"] for twin in twins)
        assert not np.allclose(first, second)

    def test_random_states_are_drawn_from(self, model):
        Z, y = rows_of(type(model))
        states = [np.random.RandomState(3) for _ in range(2)]
        twins = [clone(model).set_params(random_state=state) for state in states]
        first, second = (answers(twin.fit(Z, y), Z) for twin in twins)
        same(second, first, rtol=0)

    @pytest.mark.parametrize("batch_size", [1, 7, 1000])
    def test_batches_do_not_matter(self, model, Z, batch_size):
        other = copy.copy(model).set_params(batch_size=batch_size)
        same(answers(other, Z), answers(model, Z), **SINGLE)

    def test_order_of_rows_does_not_matter(self, model, Z):
        order = np.random.default_rng(0).permutation(len(Z))
        expected = {k: v[order] for k, v in answers(model, Z).items()}
        same(answers(model, Z[order]), expected, **SINGLE)

    def test_a_second_call_and_copies_say_the_same(self, model, Z, rng_untouched):
        expected = answers(model, Z)
        copies = copy.deepcopy(model), copy.copy(model)
        for twin in (model, *copies, pickle.loads(pickle.dumps(model))):
            same(answers(twin, Z), expected, rtol=0)

    def test_seeds_of_draws(self, model, Z):
        draw = model.sample_proba if type(model) in CLASSIFIERS else model.sample_y
        first = draw(Z, 6, random_state=1)
        np.testing.assert_array_equal(draw(Z, 6, random_state=1), first)
        assert not np.array_equal(draw(Z, 6, random_state=2), first)
        fresh = [draw(Z, 40, random_state=None) for _ in range(2)]
        assert not np.array_equal(*fresh)
        states = [np.random.RandomState(5) for _ in range(2)]
        twins = [draw(Z, 6, random_state=state) for state in states]
        np.testing.assert_array_equal(*twins)


# ------------------------------------------------------------------- left alone
class Fails(Callback):
    """Raises in the second epoch."""

    def on_epoch_end(self, net, **kwargs):
        if len(net.history) == 2:
            raise KeyError("stop")


class TestLeftAlone:
    def test_data_and_net(self, model, rng_untouched):
        Z, y = (array.copy() for array in rows_of(type(model)))
        net = model.estimator
        before = dict(vars(net))
        clone(model).set_params(estimator=net).fit(Z, y)
        answers(model, Z)
        assert vars(net) == before
        for found, expected in zip((Z, y), rows_of(type(model)), strict=True):
            np.testing.assert_array_equal(found, expected)

    def test_weights_do_not_move_in_prediction(self, model, Z):
        state = model.estimator_.module_.state_dict()
        before = {k: v.clone() for k, v in state.items()}
        answers(model, Z)
        for name, value in model.estimator_.module_.state_dict().items():
            assert torch.equal(value, before[name])

    @pytest.mark.parametrize("broken", ["rows", "labels", "training"])
    def test_failed_fits_keep_the_old_one(self, model, broken):
        Z, y = rows_of(type(model))
        expected, model = answers(model, Z), copy.copy(model)
        failing = make(type(model), callbacks=[Fails()]).estimator
        if broken == "training":
            model.set_params(estimator=failing)
        attributes, state = dict(vars(model)), global_rng_states()
        bad = {"rows": (Z * np.nan, y), "labels": (Z, y[:-1]), "training": (Z, y)}
        with pytest.raises((ValueError, KeyError), match=r"NaN|inconsistent|stop"):
            model.fit(*bad[broken])
        assert vars(model) == attributes
        assert global_rng_states() == state
        assert not failing.initialized_
        same(answers(model, Z), expected, rtol=0)


# ------------------------------------------------------------------- scikit-learn
class TestComposition:
    def test_pipelines(self, model):
        Z, y = rows_of(type(model))
        pipe = make_pipeline(StandardScaler(), clone(model)).fit(Z, y)
        assert np.isfinite(pipe.score(Z, y))

    def test_cross_validation(self, model):
        Z, y = rows_of(type(model))
        method = "predict_proba" if type(model) in CLASSIFIERS else "predict"
        found = cross_val_predict(clone(model), Z, y, cv=2, method=method)
        assert len(found) == len(Z)
        assert np.isfinite(found).all()

    @pytest.mark.parametrize(
        ("kind", "grid"),
        [
            (VariationalClassifier, FAMILIES | {"kl_weight": [0.1, 1.0]}),
            (VariationalRegressor, {"prior": ["gaussian", "scale_mixture"]}),
            (DeepEnsembleClassifier, {"n_estimators": [1, 2]}),
            (MCDropoutRegressor, {"estimator__module__n_in": [2], "n_samples": [2, 5]}),
            (SWAGClassifier, {"lr": [0.01, 0.1], "max_rank": [2, 3]}),
        ],
    )
    def test_grid_searches(self, kind, grid):
        search = GridSearchCV(make(kind, max_epochs=3), grid, cv=2)
        search.fit(*rows_of(kind))
        assert np.isfinite(search.cv_results_["mean_test_score"]).all()
        assert set(search.best_params_) == set(grid)


# -------------------------------------------------------------------- probabilities
class TestProbabilities:
    def test_are_averages_of_draws(self, classes):
        proba = classes.predict_proba(X)
        np.testing.assert_allclose(proba.sum(1), 1)
        drawn = classes.sample_proba(X, 2000)
        assert drawn.shape == (60, 3, 2000)
        np.testing.assert_allclose(drawn.sum(1), 1)
        # predictions average 3 or 7 draws, which spread by `std`
        std = drawn.std(-1)
        assert (np.abs(drawn.mean(-1) - proba) <= 5 * std / 7**0.5 + 0.01).all()
        np.testing.assert_allclose(classes.predict_log_proba(X), np.log(proba))

    def test_labels_and_score(self, classes):
        labels = classes.predict(X)
        proba = classes.predict_proba(X)
        np.testing.assert_array_equal(labels, classes.classes_[proba.argmax(1)])
        assert classes.score(X, Y) == np.mean(labels == Y)
        weight = np.linspace(0, 1, 60)
        expected = np.average(labels == Y, weights=weight)
        assert classes.score(X, Y, sample_weight=weight) == pytest.approx(expected)

    def test_moments_are_those_of_the_draws(self, classes):
        mean, variance = classes.latent_mean_and_variance(X)
        same_mean, cov = classes.latent_mean_and_variance(X, full_cov=True)
        assert mean.shape == variance.shape == (60, 3)
        assert cov.shape == (60, 3, 3)
        np.testing.assert_allclose(same_mean, mean)
        # those alone are centred beforehand
        spread = np.einsum("nkk->nk", cov)
        np.testing.assert_allclose(spread, variance, atol=1e-9)
        assert (np.linalg.eigvalsh(cov) > -1e-9).all()

    @pytest.mark.parametrize("method", [None, *dirichlet.APPROXIMATIONS])
    def test_dirichlet(self, classes, method):
        alpha = classes.predict_dirichlet(X, method)
        assert alpha.shape == (60, 3)
        assert np.isfinite(alpha).all()
        assert (alpha > 0).all()
        uncertainty = classes.predict_uncertainty(X, method)
        assert uncertainty.shape == (60, 3)
        np.testing.assert_allclose(uncertainty[:, 0], uncertainty[:, 1:].sum(1))
        members = classes.predict_set(X, method=method)
        assert members.dtype == bool
        assert members.any(1).all()

    def test_uncertainty_is_that_of_the_draws(self, classes):
        total, aleatoric, epistemic = classes.predict_uncertainty(X).T
        proba = classes.predict_proba(X)
        entropy = -(proba * np.log(proba)).sum(1)
        np.testing.assert_allclose(total, entropy, atol=1e-9)
        assert (total <= np.log(3) + 1e-9).all()
        assert (epistemic >= 0).all()
        np.testing.assert_allclose(total, aleatoric + epistemic)
        by_draws = classes.predict_uncertainty(X, "mc")
        np.testing.assert_allclose(by_draws[:, 0], total)

    @pytest.mark.parametrize("kind", CLASSIFIERS)
    def test_labels_of_any_kind(self, kind):
        model = make(kind).fit(X, np.array(["a", "b", "c"])[Y])
        assert set(model.predict(X)) <= {"a", "b", "c"}

    @pytest.mark.parametrize("kind", CLASSIFIERS)
    def test_several_labels_per_row(self, kind):
        module = BatchNormMLP if kind is MCDropoutClassifier else MLP
        settings = {"verbose": 0, "train_split": None, "max_epochs": 5}
        net = NeuralNet(module, criterion=nn.BCEWithLogitsLoss, **settings)
        labels = np.stack([Y == 0, Y == 1, Y > 0], 1).astype(int)
        model = kind(net, random_state=0).fit(X, labels)
        assert model.predict_proba(X).shape == (60, 3)
        assert model.predict_dirichlet(X).shape == (60, 3, 2)
        assert model.predict_uncertainty(X).shape == (60, 3, 3)
        assert model.sample_proba(X, 4).shape == (60, 3, 4)
        assert set(np.unique(model.predict(X))) <= {0, 1}

    @pytest.mark.parametrize("kind", CLASSIFIERS)
    def test_weights_of_classes(self, kind):
        rare = np.where(np.arange(60) < 50, 0, 1)
        even = make(kind, module__n_out=2).set_params(class_weight="balanced")
        plain = make(kind, module__n_out=2)
        noise = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
        shares = [m.fit(noise, rare).predict_proba(noise)[:, 1] for m in (even, plain)]
        assert shares[0].mean() > shares[1].mean()


# ------------------------------------------------------------------------- numbers
class TestNumbers:
    def test_shapes(self, numbers):
        mean, std = numbers.predict(X_REG, return_std=True)
        assert mean.shape == std.shape == (60,)
        assert numbers.predict_quantiles(X_REG, 0.5).shape == (60,)
        assert numbers.predict_interval(X_REG, [0.5, 0.9]).shape == (60, 2, 2)
        assert numbers.sample_y(X_REG, 4).shape == (60, 4)

    def test_parts_agree(self, numbers):
        mean, std = numbers.predict(X_REG, return_std=True)
        latent, variance = numbers.latent_mean_and_variance(X_REG)
        np.testing.assert_allclose(mean, latent[:, 0])
        np.testing.assert_allclose(std**2, variance[:, 0] + numbers.sigma_noise_**2)
        same_mean, cov = numbers.predict(X_REG, return_cov=True)
        np.testing.assert_allclose(same_mean, mean)
        np.testing.assert_allclose(np.diag(cov), std**2, rtol=1e-6)
        assert (np.linalg.eigvalsh(cov) > 0).all()
        lower, upper = numbers.predict_interval(X_REG, 0.9).T
        np.testing.assert_allclose(lower, mean - 1.6448536 * std, atol=1e-7)
        np.testing.assert_allclose(upper, mean + 1.6448536 * std, atol=1e-7)
        assert numbers.score(X_REG, Y_REG) == pytest.approx(r2_score(Y_REG, mean))

    def test_draws_have_the_noise(self, numbers):
        drawn = numbers.sample_y(X_REG, 1000)
        spread = numbers.predict(X_REG, return_std=True)[1]
        # 7 draws, or 3 networks, tell a deviation to a third
        ratio = drawn.std(1).mean() / spread.mean()
        assert 0.6 < ratio < 1.5

    def test_recalibration(self, numbers):
        model = copy.deepcopy(numbers)
        Z, y = waves(200, seed=0)
        Z, y = Z[60:], y[60:]
        mean, std = model.predict(Z, return_std=True)
        model.recalibrate(Z, y)
        expected = np.sqrt(np.mean(((y - mean) / std) ** 2))
        assert model.sigma_scaling_ == pytest.approx([expected])
        again, scaled = model.predict(Z, return_std=True)
        np.testing.assert_array_equal(again, mean)
        np.testing.assert_allclose(scaled, expected * std)
        model.fit(*rows_of(type(model)))
        assert model.sigma_scaling_ == [1]

    def test_two_columns(self, numbers):
        Z, y = waves(60, n_targets=2)
        model = clone(numbers)
        model.estimator.set_params(module__n_out=2)
        mean, std = model.fit(Z, y).predict(Z, return_std=True)
        assert mean.shape == std.shape == (60, 2)
        assert model.predict(Z, return_cov=True)[1].shape == (60, 60, 2)
        assert model.predict_quantiles(Z, [0.1, 0.5, 0.9]).shape == (60, 2, 3)
        assert model.sample_y(Z, 5).shape == (60, 2, 5)


# ------------------------------------------------------------------------ bad input
class TestBadInput:
    """Values that every one of the six refuses, before it trains anything."""

    def refused(self, kind, words, error=ValueError, **options):
        model = make(kind, callbacks=[RecordTraining()]).set_params(**options)
        refused_fit(model, *words, error=error, data=rows_of(kind))

    @pytest.mark.parametrize("kind", ALL)
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("batch_size", 0),
            ("random_state", -1),
            ("verbose", "no"),
            ("n_samples", 0),
            ("validation_fraction", 1.0),
            ("dirichlet_approx", "bridged"),
            ("class_weight", "even"),
        ],
    )
    def test_options(self, kind, name, value):
        if name in kind().get_params():
            words = f"{name!r} parameter of {kind.__name__}", f"Got {value!r}"
            self.refused(kind, words, **{name: value})

    @pytest.mark.parametrize("kind", ALL)
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"estimator": LogisticRegression()}, "skorch"),
            ({"estimator": MLP}, "the class MLP"),
            ({"likelihood": "gaussian"}, "likelihood"),
        ],
    )
    def test_things_of_another_kind(self, kind, options, words):
        self.refused(kind, [words], TypeError, **options)

    @pytest.mark.parametrize(
        "kind", [MCDropoutRegressor, DeepEnsembleRegressor, SWAGRegressor]
    )
    @pytest.mark.parametrize("value", ["learned", 0, -1.0, None, [[0.1]], [0.1, 0.2]])
    def test_noise(self, kind, value):
        self.refused(kind, ["sigma_noise"], sigma_noise=value)

    @pytest.mark.parametrize(
        "kind", [VariationalRegressor, MCDropoutRegressor, SWAGRegressor]
    )
    def test_one_draw_of_numbers(self, kind):
        self.refused(kind, ["n_samples=1 is not an integer of at least 2"], n_samples=1)

    @pytest.mark.parametrize("kind", ALL)
    def test_rows_that_are_not_seen(self, kind):
        Z, y = rows_of(kind)
        model = make(kind)
        with pytest.raises(ValueError, match="y_val is missing"):
            model.fit(Z, y, X_val=Z)
        model.fit(Z, y, X_val=Z[:20] + 0.1, y_val=y[:20])
        if kind not in CLASSIFIERS:
            alone = make(kind).fit(Z, y)
            assert model.sigma_noise_ != alone.sigma_noise_

    def test_one_draw_has_no_variance(self, model, Z):
        if "Ensemble" in type(model).__name__:
            return
        single = copy.copy(model).set_params(n_samples=1)
        single.predict(Z) if type(model) in CLASSIFIERS else None
        with pytest.raises(ValueError, match="n_samples=1 has no variance"):
            single.latent_mean_and_variance(Z)

    @pytest.mark.parametrize(
        "kind", [VariationalClassifier, MCDropoutClassifier, SWAGClassifier]
    )
    def test_arguments_for_the_training_of_frozen_nets(self, kind):
        net = make(kind).estimator
        model = kind(FrozenEstimator(seeded(net, X, Y)), random_state=0)
        if kind is VariationalClassifier:
            model.fit(X, Y, epochs=3)
            assert len(model.estimator_.history) == 3
            return
        with pytest.raises(TypeError, match=r"'epochs'.*frozen"):
            model.fit(X, Y, epochs=3)

    @pytest.mark.parametrize(
        "kind", [VariationalClassifier, MCDropoutClassifier, SWAGClassifier]
    )
    def test_frozen_nets_that_were_never_trained(self, kind):
        frozen = FrozenEstimator(classifier(BatchNormMLP))
        with pytest.raises(ValueError, match="frozen network has no weights yet"):
            kind(frozen).fit(X, Y)


# ------------------------------------------------------------------------- default
@pytest.mark.parametrize("kind", ALL)
def test_default_networks(kind, rng_untouched):
    Z, y = (part[:30] for part in rows_of(kind))
    few = {"n_snapshots": 5} if "SWAG" in kind.__name__ else {}
    model = kind(random_state=0, **few).fit(Z, y)
    # noise is a third of the variance of the numbers
    assert model.score(Z, y) > (0.7 if kind in CLASSIFIERS else 0.4)
