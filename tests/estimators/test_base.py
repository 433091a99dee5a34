"""What both estimators promise: order, batches, state left alone, weights."""

import copy
import inspect as python_inspect
from dataclasses import fields
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import global_rng_states
from nets import (
    MLP,
    BatchNormMLP,
    RowsSeen,
    TanhMLP,
    TwoInputs,
    blobs,
    classifier,
    initialised,
    regressor,
    seeded,
    waves,
)
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import predefined_split

from sklaplace import LaplaceClassifier, LaplaceRegressor

ESTIMATORS = [LaplaceClassifier, LaplaceRegressor]
TRAINING_ROWS = "ignore:sigma_noise comes from the training"

# What the posterior is made of: subset, structure, and how the prior is found.
SETTINGS = [
    {"prior_precision": 1.0},
    {"prior_precision": "marglik"},
    {"prior_precision": "marglik", "refine": True},
    {
        "prior_precision": "marglik",
        "hessian_structure": "lowrank",
        "structure_params": {"rank": 4},
    },
    {
        "prior_precision": 1.0,
        "prior_structure": "layerwise",
        "subset_of_weights": "all",
        "hessian_structure": "gp",
        "structure_params": {"n_points": 7},
    },
    {"prior_precision": "marglik", "hessian_structure": "nystrom"},
    {"prior_precision": 1.0, "subset_of_weights": "all", "refine": True},
    {
        "prior_precision": 1.0,
        "subset_of_weights": "all",
        "hessian_structure": "variational",
    },
    {"prior_precision": "marglik", "curvature": "ef"},
    {"prior_precision": 1.0, "subset_of_weights": "trainable"},
    {
        "prior_precision": "marglik",
        "subset_of_weights": "subnetwork",
        "subset_params": {"n_weights": 9},
        "hessian_structure": "full",
    },
    {
        "prior_precision": 1.0,
        "subset_of_weights": "subnetwork",
        "subset_params": {"n_weights": 9, "by": "swag"},
        "random_state": 0,
    },
    {
        "prior_precision": 1.0,
        "curvature": "ggn_mc",
        "curvature_params": {"n_draws": 3},
        "refine": True,
        "random_state": 0,
    },
    {
        "prior_precision": 1e4,
        "subset_of_weights": "all",
        "hessian_structure": "full",
        "curvature": "hessian",
    },
    {"prior_precision": 1.0, "hessian_structure": "diag", "prior_structure": "diag"},
    {"prior_precision": "marglik", "prior_structure": "layerwise"},
    {"prior_precision": 1.0, "subset_of_weights": "all"},
    {
        "prior_precision": 1.0,
        "subset_of_weights": "all",
        "hessian_structure": "full",
    },
]


def data_for(kind, **params):
    return blobs(**params) if kind is LaplaceClassifier else waves(**params)


def fresh_rows(kind, **params):
    """Other rows from the same distribution."""
    X, y = data_for(kind, n=120, **params)
    return X[60:], y[60:]


def net_for(kind, **params):
    return classifier(**params) if kind is LaplaceClassifier else regressor(**params)


def as_target(kind, y):
    """Targets as the bare net takes them: a regressor's have an axis of outputs."""
    return y if kind is LaplaceClassifier else y.reshape(len(y), -1)


def complete(kind, settings):
    """Settings with a noise level that is found as the prior precision is."""
    if kind is LaplaceClassifier:
        return settings
    prior = settings.get("prior_precision", "auto")
    return {"sigma_noise": prior if isinstance(prior, str) else 0.2, **settings}


@pytest.fixture(scope="module")
def frozen64():
    """A trained float64 net per estimator, frozen, with its rows."""
    found = {}
    for kind in ESTIMATORS:
        X, y = data_for(kind, dtype=np.float64)
        net = net_for(kind, module__dtype=torch.float64)
        found[kind] = FrozenEstimator(seeded(net, X, as_target(kind, y))), X, y
    return found


def everything(model, X):
    """Mean, variance (full for classes) and evidence as one vector."""
    moments = model.latent_mean_and_variance(X, full_cov=True)
    evidence = [model.log_marginal_likelihood_value_]
    return np.concatenate([*map(np.ravel, moments), evidence])


# ------------------------------------------------------------ batches and order
@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("settings", SETTINGS)
class TestBatchesAndOrder:
    def test_batch_size_changes_nothing(self, kind, settings, frozen64):
        net, X, y = frozen64[kind]
        settings = complete(kind, settings)
        whole = everything(kind(net, **settings).fit(X, y), X)
        for batch_size in (1, 7, 1000):
            model = kind(net, batch_size=batch_size, **settings).fit(X, y)
            np.testing.assert_allclose(
                everything(model, X), whole, rtol=1e-10, atol=1e-10
            )

    def test_predictions_follow_shuffled_rows_exactly(self, kind, settings, frozen64):
        net, X, y = frozen64[kind]
        model = kind(net, **complete(kind, settings)).fit(X, y)
        order = np.random.default_rng(1).permutation(len(X))
        straight = model.latent_mean_and_variance(X)
        shuffled = model.latent_mean_and_variance(X[order])
        for there, here in zip(straight, shuffled, strict=True):
            np.testing.assert_array_equal(there[order], here)
        np.testing.assert_array_equal(model.predict(X)[order], model.predict(X[order]))

    def test_order_of_training_rows(self, kind, settings, frozen64):
        net, X, y = frozen64[kind]
        settings = complete(kind, settings)
        order = np.random.default_rng(1).permutation(len(X))
        straight = kind(net, **settings).fit(X, y)
        shuffled = kind(net, **settings).fit(X[order], y[order])
        np.testing.assert_allclose(
            everything(shuffled, X), everything(straight, X), rtol=1e-10, atol=1e-10
        )


def test_batch_size_changes_no_validation_path(frozen64):
    net, X, y = frozen64[LaplaceClassifier]
    found = []
    for batch_size in (None, 1, 7):
        model = LaplaceClassifier(
            net, prior_precision="validation", batch_size=batch_size, random_state=0
        )
        model.fit(X, y, X_val=X[::2], y_val=y[::2])
        found.append(model.predict_proba(X))
    np.testing.assert_allclose(found[1], found[0], atol=1e-10)
    np.testing.assert_allclose(found[2], found[0], atol=1e-10)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_default_is_trained_alike_on_permuted_rows(kind):
    # Rounding grows by a factor of about 1.3 in each of 35 steps of L-BFGS, hence
    # from 1e-16 to 1e-12; measured 2e-13 in the mean. Variances are compared
    # relatively, those of flat directions being about 1/prior_precision.
    X, y = data_for(kind, dtype=np.float64)
    order = np.random.default_rng(1).permutation(len(X))
    straight = kind(random_state=0).fit(X, y)
    shuffled = kind(random_state=0).fit(X[order], y[order])
    mean, variance = straight.latent_mean_and_variance(X)
    mean2, variance2 = shuffled.latent_mean_and_variance(X)
    np.testing.assert_allclose(mean2, mean, atol=1e-9)
    np.testing.assert_allclose(variance2, variance, rtol=1e-8)


def test_float32_batches_agree_to_its_precision():
    X, y = blobs()
    net = FrozenEstimator(seeded(classifier(), X, y))
    model = LaplaceClassifier(net, prior_precision=1.0).fit(X, y)
    whole = model.predict_proba(X)
    one_by_one = np.concatenate([model.predict_proba(X[i : i + 1]) for i in range(60)])
    # float32 outputs of about 5 carry errors of 5e-7
    np.testing.assert_allclose(one_by_one, whole, atol=2e-6)


# ------------------------------------------------------------- state left alone
METHODS = {
    LaplaceClassifier: {
        "predict": lambda m, X, y: m.predict(X),
        "predict_proba": lambda m, X, y: m.predict_proba(X),
        "predict_log_proba": lambda m, X, y: m.predict_log_proba(X),
        "predict_dirichlet": lambda m, X, y: m.predict_dirichlet(X),
        "predict_uncertainty": lambda m, X, y: m.predict_uncertainty(X),
        "predict_set": lambda m, X, y: m.predict_set(X),
        "sample_proba": lambda m, X, y: m.sample_proba(X, 3),
        "latent_mean_and_variance": lambda m, X, y: m.latent_mean_and_variance(X),
        "latent_full_cov": lambda m, X, y: m.latent_mean_and_variance(X, full_cov=True),
        "log_marginal_likelihood": lambda m, X, y: m.log_marginal_likelihood(2.0),
        "score": lambda m, X, y: m.score(X, y),
    },
    LaplaceRegressor: {
        "predict": lambda m, X, y: m.predict(X),
        "predict_std": lambda m, X, y: m.predict(X, return_std=True),
        "predict_cov": lambda m, X, y: m.predict(X, return_cov=True),
        "predict_interval": lambda m, X, y: m.predict_interval(X),
        "predict_quantiles": lambda m, X, y: m.predict_quantiles(X, [0.1, 0.5]),
        "sample_y": lambda m, X, y: m.sample_y(X, 3),
        "latent_mean_and_variance": lambda m, X, y: m.latent_mean_and_variance(X),
        "log_marginal_likelihood": lambda m, X, y: m.log_marginal_likelihood(2.0, 0.3),
        "score": lambda m, X, y: m.score(X, y),
    },
}
CALLS = [(kind, name) for kind, methods in METHODS.items() for name in methods]


def parts(answer):
    """Answers with one part or several as a tuple."""
    return answer if isinstance(answer, tuple) else (answer,)


def fingerprint(net):
    """All of a skorch net that a call might change, comparable by ``==``."""
    module = net.module_
    return {
        "params": {k: repr(v) for k, v in net.get_params(deep=False).items()},
        "attributes": sorted(vars(net)),
        "history": repr(net.history),
        "class": type(net),
        "state": {k: v.numpy().tobytes() for k, v in module.state_dict().items()},
        "training": [m.training for m in module.modules()],
        "requires_grad": [p.requires_grad for p in module.parameters()],
        "gradients": [p.grad is None for p in module.parameters()],
        "hooks": [
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
            for m in module.modules()
        ],
        "optimizer": repr(net.optimizer_),
        "criterion": (type(net.criterion_), net.criterion_.reduction),
    }


def attributes(model):
    """The estimator's attributes by identity: none may be replaced."""
    return {name: id(value) for name, value in vars(model).items()}


def hand_prepared(kind):
    """A net whose module is in an unusual state, which must survive."""
    X, y = data_for(kind)
    n_out = {"module__n_out": 3 if kind is LaplaceClassifier else 1}
    net = net_for(kind, module=BatchNormMLP, **n_out)
    seeded(net, X, as_target(kind, y))
    net.module_.train()
    net.module_.norm.eval()
    net.module_.hidden.weight.requires_grad_(False)
    return net, X, y


@pytest.fixture(scope="module")
def fitted():
    """An estimator of each kind around a net of ours, frozen."""
    found = {}
    for kind in ESTIMATORS:
        net, X, y = hand_prepared(kind)
        settings = complete(kind, {"prior_precision": 1.0})
        found[kind] = kind(FrozenEstimator(net), **settings).fit(X, y), net, X, y
    return found


class TestStateLeftAlone:
    @pytest.mark.parametrize(("kind", "name"), CALLS)
    def test_by_questions(self, kind, name, fitted, rng_untouched):
        model, net, X, y = fitted[kind]
        rows = X.copy(), y.copy()
        before = fingerprint(net), fingerprint(model.estimator_), attributes(model)
        first = METHODS[kind][name](model, X, y)
        after = fingerprint(net), fingerprint(model.estimator_), attributes(model)
        assert after == before
        np.testing.assert_array_equal(X, rows[0])
        np.testing.assert_array_equal(y, rows[1])
        again = METHODS[kind][name](model, X, y)
        for one, other in zip(parts(first), parts(again), strict=True):
            np.testing.assert_array_equal(one, other)

    # the evidence takes no rows; its bad input has a test of its own
    @pytest.mark.parametrize(
        ("kind", "name"), [call for call in CALLS if "log_marginal" not in call[1]]
    )
    def test_by_questions_that_fail(self, kind, name, fitted, rng_untouched):
        model, net, X, y = fitted[kind]
        before = fingerprint(net), fingerprint(model.estimator_), attributes(model)
        with pytest.raises(ValueError, match="5 features"):
            METHODS[kind][name](model, np.ones((4, 5), np.float32), y[:4])
        with pytest.raises(ValueError, match="NaN"):
            METHODS[kind][name](model, np.where(X > 1, np.nan, X), y)
        after = fingerprint(net), fingerprint(model.estimator_), attributes(model)
        assert after == before

    @pytest.mark.parametrize("name", [None, "hidden", "head"])
    @pytest.mark.parametrize("kind", ESTIMATORS)
    def test_by_a_network_that_raises_midway(self, kind, name, rng_untouched):
        net, X, y = hand_prepared(kind)
        settings = complete(kind, {"prior_precision": 1.0})
        model = kind(FrozenEstimator(net), **settings).fit(X, y)
        module = model.estimator_.module_
        layer = module if name is None else module.get_submodule(name)

        def fail(*args):
            raise RuntimeError("out of memory")

        layer.register_forward_hook(fail)
        before = fingerprint(model.estimator_), attributes(model)
        with pytest.raises(RuntimeError, match="out of memory"):
            model.predict(X)
        assert (fingerprint(model.estimator_), attributes(model)) == before

    @pytest.mark.filterwarnings(TRAINING_ROWS)
    @pytest.mark.parametrize("kind", ESTIMATORS)
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"prior_precision": "marglik"},
            {"prior_precision": 1.0, "subset_of_weights": "all"},
        ],
    )
    def test_by_fit_around_a_frozen_net(self, kind, settings, rng_untouched):
        net, X, y = hand_prepared(kind)
        settings = complete(kind, settings)
        rows = X.copy(), y.copy()
        before = fingerprint(net)
        model = kind(FrozenEstimator(net), **settings)
        params = {k: id(v) for k, v in model.get_params(deep=False).items()}
        model.fit(X, y)
        assert fingerprint(net) == before
        assert {k: id(v) for k, v in model.get_params(deep=False).items()} == params
        np.testing.assert_array_equal(X, rows[0])
        np.testing.assert_array_equal(y, rows[1])

    @pytest.mark.parametrize("kind", ESTIMATORS)
    @pytest.mark.parametrize("weighted", [False, True])
    def test_by_fit_that_trains(self, kind, weighted, rng_untouched):
        net, X, y = hand_prepared(kind)
        rows = X.copy(), y.copy()
        before = fingerprint(net)
        weights = np.linspace(0.5, 2, len(X)) if weighted else None
        model = kind(net, random_state=0).fit(X, y, sample_weight=weights)
        assert fingerprint(net) == before
        assert model.estimator is net
        assert model.estimator_ is not net
        assert type(model.estimator_) is type(net)
        assert model.estimator_.train_split is net.train_split
        np.testing.assert_array_equal(X, rows[0])
        np.testing.assert_array_equal(y, rows[1])

    @pytest.mark.parametrize("kind", ESTIMATORS)
    def test_by_fit_of_a_module_instance(self, kind, rng_untouched):
        X, y = data_for(kind)
        with torch.random.fork_rng(devices=[]):
            module = MLP(n_out=3 if kind is LaplaceClassifier else 1)
        net = net_for(kind, module=module)
        before = copy.deepcopy(net.module.state_dict())
        kind(net, random_state=0).fit(X, y)
        for name, value in net.module.state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)

    @pytest.mark.parametrize("kind", ESTIMATORS)
    def test_by_default_network(self, kind, rng_untouched):
        X, y = data_for(kind)
        model = kind(random_state=0).fit(X, y)
        model.predict(X)

    @pytest.mark.parametrize("kind", ESTIMATORS)
    def test_by_a_second_fit_that_fails(self, kind, fitted, rng_untouched):
        model, net, X, y = fitted[kind]
        before = fingerprint(net), fingerprint(model.estimator_), attributes(model)
        predicted = model.predict(X)
        failing = [
            lambda: model.fit(np.ones((9, 5), np.float32), y[:9]),
            lambda: model.fit(X, y, sample_weight=-np.ones(len(X))),
            lambda: model.fit(X, y, X_val=X),
            lambda: model.fit(X, None),
        ]
        for call in failing:
            with pytest.raises(ValueError, match=r"\w"):
                call()
            after = fingerprint(net), fingerprint(model.estimator_), attributes(model)
            assert after == before
        np.testing.assert_array_equal(model.predict(X), predicted)

    @pytest.mark.parametrize("kind", ESTIMATORS)
    def test_by_interrupted_curvature(self, kind, monkeypatch, rng_untouched):
        model, net, X, y = *fitted_copy(kind), *data_for(kind)
        before = fingerprint(net), fingerprint(model.estimator_), attributes(model)

        def interrupt(*args, **kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr("sklaplace.estimators.laplace_fit.accumulate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.fit(X, y)
        after = fingerprint(net), fingerprint(model.estimator_), attributes(model)
        assert after == before

    def test_a_shared_generator_is_the_only_state_that_advances(self):
        X, y = blobs()
        state = np.random.RandomState(0)
        before = global_rng_states()
        LaplaceClassifier(random_state=state).fit(X, y)
        assert global_rng_states() == before
        assert state.randint(2**31) != np.random.RandomState(0).randint(2**31)


def fitted_copy(kind):
    net, X, y = hand_prepared(kind)
    settings = complete(kind, {"prior_precision": 1.0})
    return kind(FrozenEstimator(net), **settings).fit(X, y), net


# ---------------------------------------------------------------- random state
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_random_state_decides_everything(kind):
    X, y = data_for(kind)
    net = net_for(kind, batch_size=16, max_epochs=3)
    net.set_params(iterator_train__shuffle=True)
    first = everything(kind(net, random_state=0).fit(X, y), X)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        again = everything(kind(net, random_state=0).fit(X, y), X)
    other = everything(kind(net, random_state=1).fit(X, y), X)
    np.testing.assert_array_equal(again, first)
    assert not np.allclose(other, first)


def test_without_random_state_fits_differ():
    X, y = blobs()
    net = classifier(max_epochs=1)
    seeds = {LaplaceClassifier(net).fit(X, y)._seed for _ in range(3)}
    assert len(seeds) == 3


# ---------------------------------------------------------------------- weights
INTEGER_WEIGHTS = np.random.default_rng(3).integers(0, 4, 60)
REPEATED = np.repeat(np.arange(60), INTEGER_WEIGHTS)


@pytest.mark.parametrize("kind", ESTIMATORS)
class TestSampleWeight:
    @pytest.mark.parametrize("settings", SETTINGS)
    def test_integer_weights_repeat_rows_of_a_frozen_net(
        self, kind, settings, frozen64
    ):
        net, X, y = frozen64[kind]
        settings = complete(kind, settings)
        weighted = kind(net, **settings).fit(X, y, sample_weight=INTEGER_WEIGHTS)
        repeated = kind(net, **settings).fit(X[REPEATED], y[REPEATED])
        np.testing.assert_allclose(
            everything(weighted, X), everything(repeated, X), rtol=1e-8, atol=1e-8
        )

    @pytest.mark.filterwarnings(TRAINING_ROWS)
    @pytest.mark.parametrize("own_net", [True, False])
    def test_integer_weights_repeat_rows_in_full_batch_training(self, kind, own_net):
        X, y = data_for(kind, dtype=np.float64)
        net = net_for(kind, module__dtype=torch.float64) if own_net else None
        weighted = kind(net, random_state=0).fit(X, y, sample_weight=INTEGER_WEIGHTS)
        repeated = kind(net, random_state=0).fit(X[REPEATED], y[REPEATED])
        # measured 2e-12; training multiplies rounding, as with permuted rows
        np.testing.assert_allclose(
            everything(weighted, X), everything(repeated, X), rtol=1e-8, atol=1e-8
        )

    @pytest.mark.filterwarnings(TRAINING_ROWS)
    @pytest.mark.parametrize("own_net", [True, False])
    def test_weight_zero_drops_rows(self, kind, own_net):
        X, y = data_for(kind, dtype=np.float64)
        kept = INTEGER_WEIGHTS > 0
        net = net_for(kind, module__dtype=torch.float64) if own_net else None
        weighted = kind(net, random_state=0).fit(X, y, kept.astype(float))
        dropped = kind(net, random_state=0).fit(X[kept], y[kept])
        np.testing.assert_allclose(
            everything(weighted, X), everything(dropped, X), rtol=1e-8, atol=1e-8
        )

    def test_rows_of_weight_zero_are_not_looked_at(self, kind):
        X, y = data_for(kind)
        weights = np.ones(len(X))
        weights[:5] = 0
        wild = X.copy()
        wild[:5] = 1e30
        net = net_for(kind, max_epochs=2)
        one = kind(net, random_state=0).fit(X, y, sample_weight=weights)
        other = kind(net, random_state=0).fit(wild, y, sample_weight=weights)
        np.testing.assert_array_equal(everything(one, X), everything(other, X))

    def test_equal_weights_change_nothing_but_the_strength(self, kind, frozen64):
        net, X, y = frozen64[kind]
        settings = complete(kind, {"prior_precision": 1.0})
        plain = kind(net, **settings).fit(X, y)
        doubled = kind(net, **settings).fit(X, y, sample_weight=np.full(60, 2.0))
        likelihood = plain.posterior_.log_likelihood()
        torch.testing.assert_close(doubled.posterior_.log_likelihood(), 2 * likelihood)
        assert kind(net, **settings).fit(
            X, y, sample_weight=np.ones(60)
        ).log_marginal_likelihood_value_ == pytest.approx(
            plain.log_marginal_likelihood_value_, rel=1e-13
        )

    @pytest.mark.parametrize("split", ["none", "share", "predefined"])
    def test_weights_go_with_any_split_and_loader(self, kind, split, recwarn):
        X, y = data_for(kind)
        held_out = Dataset(X[:17], as_target(kind, y)[:17])
        splits = {
            "none": None,
            "share": ValidSplit(4, stratified=False),
            "predefined": predefined_split(held_out),
        }
        net = net_for(kind, train_split=splits[split], batch_size=16, max_epochs=3)
        weights = np.linspace(0, 2, len(X))
        model = kind(net, random_state=0).fit(X, y, sample_weight=weights)
        flat = kind(net, random_state=0).fit(X, y)
        assert not np.allclose(everything(model, X), everything(flat, X))


# -------------------------------------------------- which rows serve which purpose
@pytest.mark.parametrize("kind", ESTIMATORS)
class TestRows:
    def record(self, kind, X, y, net_params=None, settings=None, **fit):
        """Rows trained on, and those that the curvature and the tuner saw."""
        RowsSeen.trained.clear()
        net = net_for(kind, max_epochs=1, callbacks=[RowsSeen()], **net_params or {})
        model = kind(net, random_state=0, **settings or {}).fit(X, y, **fit)
        return model, {tuple(row) for row in RowsSeen.trained}

    def n_curvature(self, model):
        """Rows that made the curvature."""
        return int(model.posterior_.data_fit.n_targets)

    def test_all_rows_where_nothing_is_tuned(self, kind):
        X, y = data_for(kind)
        settings = complete(kind, {"prior_precision": 1.0})
        model, trained = self.record(kind, X, y, settings=settings)
        assert trained == set(map(tuple, X.tolist()))
        assert self.n_curvature(model) == len(X)

    def test_validation_fraction_is_kept_from_training_and_curvature(self, kind):
        X, y = data_for(kind)
        settings = {"validation_fraction": 0.3}
        model, trained = self.record(kind, X, y, settings=settings)
        assert len(trained) == 42
        assert self.n_curvature(model) == 42

    def test_validation_fraction_decides(self, kind):
        X, y = data_for(kind)
        few, _ = self.record(kind, X, y, settings={"validation_fraction": 0.1})
        many, _ = self.record(kind, X, y, settings={"validation_fraction": 0.5})
        assert few.prior_precision_ != many.prior_precision_

    def test_too_few_rows_are_all_trained_on(self, kind):
        X, y = data_for(kind)
        settings = complete(kind, {"prior_precision": "marglik"})
        model, trained = self.record(kind, X[:40], y[:40], settings=settings)
        assert len(trained) == 40
        assert self.n_curvature(model) == 40

    def test_rows_of_train_split_are_tuned_on(self, kind):
        X, y = data_for(kind)
        split = ValidSplit(4, stratified=False)
        model, trained = self.record(kind, X, y, {"train_split": split})
        assert len(trained) == 45
        assert self.n_curvature(model) == 45
        # the first of four folds is held out; only its targets are changed
        changed = y.copy()
        changed[:15] = y[:15][::-1] if kind is LaplaceClassifier else y[:15] + 5
        other, _ = self.record(kind, X, changed, {"train_split": split})
        for a, b in zip(
            model.estimator_.module_.parameters(),
            other.estimator_.module_.parameters(),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert other.prior_precision_ != model.prior_precision_

    def test_given_rows_are_tuned_on_and_nothing_else(self, kind):
        X, y = data_for(kind)
        X_val, y_val = fresh_rows(kind)
        model, trained = self.record(kind, X, y, X_val=X_val, y_val=y_val)
        assert trained == set(map(tuple, X.tolist()))
        assert self.n_curvature(model) == len(X)
        shifted = (y_val + 1) % 3 if kind is LaplaceClassifier else y_val + 5
        other, _ = self.record(kind, X, y, X_val=X_val, y_val=shifted)
        assert other.prior_precision_ != model.prior_precision_

    def test_given_rows_come_before_those_of_train_split(self, kind):
        X, y = data_for(kind)
        X_val, y_val = fresh_rows(kind)
        split = {"train_split": ValidSplit(4, stratified=False)}
        own, _ = self.record(kind, X, y, split)
        given, trained = self.record(kind, X, y, split, X_val=X_val, y_val=y_val)
        assert len(trained) == 45
        assert given.prior_precision_ != own.prior_precision_

    def test_given_rows_are_tuned_on_for_a_frozen_net(self, kind, frozen64):
        net, X, y = frozen64[kind]
        X_val, y_val = fresh_rows(kind, dtype=np.float64)
        model = kind(net).fit(X, y, X_val=X_val, y_val=y_val)
        other = kind(net).fit(X, y, X_val=X_val[::2], y_val=y_val[::2])
        assert other.prior_precision_ != model.prior_precision_

    def test_given_rows_do_nothing_where_nothing_is_tuned(self, kind, frozen64):
        net, X, y = frozen64[kind]
        settings = complete(kind, {"prior_precision": 1.0})
        plain = kind(net, **settings).fit(X, y)
        given = kind(net, **settings).fit(X, y, X_val=X[:9], y_val=y[:9])
        np.testing.assert_array_equal(everything(plain, X), everything(given, X))

    def test_marglik_holds_nothing_out(self, kind):
        X, y = data_for(kind)
        settings = complete(kind, {"prior_precision": "marglik"})
        _, trained = self.record(kind, X, y, settings=settings)
        assert len(trained) == len(X)


# ------------------------------------------------------------------- the evidence
@pytest.mark.parametrize("kind", ESTIMATORS)
class TestEvidence:
    @pytest.fixture
    def model(self, kind, frozen64):
        net, X, y = frozen64[kind]
        return kind(net, **complete(kind, {"prior_precision": 2.0})).fit(X, y)

    def test_default_is_the_fitted_value(self, model):
        value = model.log_marginal_likelihood_value_
        assert model.log_marginal_likelihood() == value
        assert model.log_marginal_likelihood(2.0) == value

    def test_is_that_of_a_fit_at_the_value_asked(self, kind, model, frozen64):
        net, X, y = frozen64[kind]
        other = kind(net, **complete(kind, {"prior_precision": 7.0})).fit(X, y)
        expected = other.log_marginal_likelihood_value_
        assert model.log_marginal_likelihood(7.0) == pytest.approx(expected, rel=1e-12)

    def test_marglik_maximises_it(self, kind, frozen64):
        net, X, y = frozen64[kind]
        settings = complete(kind, {"prior_precision": "marglik", "refine": False})
        model = kind(net, **settings).fit(X, y)
        best = model.log_marginal_likelihood_value_
        for factor in (0.9, 1.1):
            value = model.log_marginal_likelihood(factor * model.prior_precision_)
            assert value < best


# ---------------------------------------------------------------------- the rest
def test_both_estimators_have_the_same_parameters_but_four():
    names = [set(python_inspect.signature(kind).parameters) for kind in ESTIMATORS]
    assert names[0] - names[1] == {
        "class_weight",
        "dirichlet_approx",
        "link_approx",
    }
    assert names[1] - names[0] == {"sigma_noise"}


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_attributes_after_fit(kind, fitted):
    model, _, X, _ = fitted[kind]
    assert model.n_features_in_ == X.shape[1]
    assert model.n_iter_ == len(model.estimator_.history)
    assert model.prior_precision_ == 1.0
    assert {"mean", "structure", "layout"} <= {f.name for f in fields(model.posterior_)}
    assert is_classifier(model) == (kind is LaplaceClassifier)


@pytest.mark.parametrize(("kind", "name"), CALLS)
def test_not_fitted(kind, name):
    X, y = data_for(kind)
    model = clone(kind())
    with pytest.raises(NotFittedError, match=f"This {kind.__name__} instance"):
        METHODS[kind][name](model, X, y)


def test_an_initialised_net_counts_as_trained():
    X, y = blobs()
    net = initialised(classifier())
    model = LaplaceClassifier(FrozenEstimator(net), prior_precision=1.0).fit(X, y)
    assert model.n_iter_ == 1
    for mine, yours in zip(
        model.estimator_.module_.parameters(), net.module_.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, yours, rtol=0, atol=0)


def test_later_training_of_a_frozen_net_does_not_reach_the_estimator():
    X, y = blobs()
    net = seeded(classifier(), X, y)
    model = LaplaceClassifier(FrozenEstimator(net), prior_precision=1.0).fit(X, y)
    before = model.predict_proba(X)
    seeded(net, X, (y + 1) % 3)
    np.testing.assert_array_equal(model.predict_proba(X), before)


def test_names_of_an_earlier_fit_are_forgotten():
    X, y = blobs()
    model = LaplaceClassifier(classifier(), random_state=0).fit(X, y)
    assert model.n_features_in_ == 2
    both = {"left": X, "right": np.ones((len(X), 3), "f4")}
    model.set_params(estimator=classifier(TwoInputs, module__n_out=3)).fit(both, y)
    assert not hasattr(model, "n_features_in_")


@pytest.mark.parametrize("verbose", [1, True])
def test_verbose_prints_one_line(verbose, capsys):
    X, y = blobs()
    model = LaplaceClassifier(classifier(), verbose=verbose, random_state=0).fit(X, y)
    printed = capsys.readouterr().out.strip().splitlines()
    assert len(printed) == 1
    assert printed[0].startswith("[LaplaceClassifier] kron posterior over")
    assert repr(model.posterior_).startswith("GaussianPosterior(Kron over")


def test_layerwise_summary_shows_the_range(capsys):
    X, y = blobs()
    settings = {"prior_structure": "layerwise", "verbose": 1, "random_state": 0}
    model = LaplaceClassifier(classifier(), **settings).fit(X, y)
    assert " to " in capsys.readouterr().out
    assert " to " in repr(model.posterior_)


def test_inference_mode_is_no_obstacle():
    X, y = blobs()
    with torch.inference_mode():
        model = LaplaceClassifier(classifier(), random_state=0).fit(X, y)
        inside = model.predict_proba(X)
    np.testing.assert_array_equal(inside, model.predict_proba(X))


def test_numpys_false_is_no_wish_to_refit():
    """A parameter grid makes numpy's flags; this head is not linear."""
    X, y = blobs()
    net = seeded(classifier(TanhMLP), X, y)
    for refine in (False, np.False_):
        model = LaplaceClassifier(
            FrozenEstimator(net), prior_precision=1.0, refine=refine
        )
        assert not model.fit(X, y).posterior_.is_refitted


# ---------------------------------------------------------- weights that are drawn
@pytest.fixture(scope="module")
def models(frozen64):
    """Fitted around a frozen net, per estimator and subset."""
    found = {}
    for kind in ESTIMATORS:
        net, X, y = frozen64[kind]
        for subset in ("last_layer", "all"):
            settings = {"prior_precision": 3.0, "subset_of_weights": subset}
            model = kind(
                net, pred_type="nn", random_state=0, **complete(kind, settings)
            )
            found[kind, subset] = model.fit(X, y), X
    return found


class TestDrawnWeights:
    @pytest.mark.parametrize("kind", ESTIMATORS)
    def test_of_a_linear_head_are_those_of_the_linearised_network(self, kind, models):
        model, X = models[kind, "last_layer"]
        linearised = clone_fitted(model).set_params(pred_type="glm")
        if kind is LaplaceClassifier:
            draws = linearised.sample_proba(X, model.n_samples, model._seed)
            np.testing.assert_allclose(
                model.predict_proba(X), draws.mean(-1), atol=1e-12
            )
        else:
            outputs = linearised._outputs
            draws = outputs.sample(X, model.n_samples, model._seed)
            mean, variance = model.latent_mean_and_variance(X)
            np.testing.assert_allclose(mean, draws.mean(-1), atol=1e-12)
            np.testing.assert_allclose(variance, draws.var(-1, ddof=1), atol=1e-12)
            _, expected = linearised.latent_mean_and_variance(X)
            # a variance of a hundred draws has a relative error of √(2/99) = .14
            ratio = variance / expected
            assert 0.4 < ratio.min() < 1 < ratio.max() < 1.9

    @pytest.mark.parametrize("kind", ESTIMATORS)
    def test_of_all_weights_are_not(self, kind, models):
        model, X = models[kind, "all"]
        linearised = clone_fitted(model).set_params(pred_type="glm")
        ours, theirs = (m._outputs.sample(X, 5, 0) for m in (model, linearised))
        assert abs(ours - theirs).max() > 1e-3

    @pytest.mark.parametrize("kind", ESTIMATORS)
    def test_are_the_same_for_every_batch_and_call(self, kind, models, rng_untouched):
        model, X = models[kind, "all"]
        ask = "predict_proba" if kind is LaplaceClassifier else "predict"
        expected = getattr(model, ask)(X)
        np.testing.assert_array_equal(getattr(model, ask)(X), expected)
        few = clone_fitted(model).set_params(batch_size=7)
        np.testing.assert_allclose(getattr(few, ask)(X), expected, atol=1e-12)
        one = np.concatenate([getattr(model, ask)(X[n : n + 1]) for n in range(5)])
        np.testing.assert_allclose(one, expected[:5], atol=1e-12)

    def test_spread_across_rows(self, models):
        model, X = models[LaplaceRegressor, "all"]
        mean, cov = model.predict(X[:6], return_cov=True)
        also, std = model.predict(X[:6], return_std=True)
        np.testing.assert_allclose(mean, also, atol=1e-12)
        np.testing.assert_allclose(np.sqrt(np.diag(cov)), std, atol=1e-12)
        assert np.linalg.eigvalsh(cov).min() > 0

    @pytest.mark.parametrize("kind", ESTIMATORS)
    def test_have_no_gaussian_in_the_graph(self, kind, models):
        model, X = models[kind, "all"]
        with pytest.raises(ValueError, match=r"pred_type='nn' has no Gaussian.*'glm'"):
            model.predictive(torch.tensor(X))

    @pytest.mark.parametrize("kind", ESTIMATORS)
    def test_gaussian_in_the_graph(self, kind, models):
        model, X = models[kind, "all"]
        model = clone_fitted(model).set_params(pred_type="glm")
        x = torch.tensor(X[:4], requires_grad=True)
        mean, cov = model.predictive(x)
        expected = model.latent_mean_and_variance(X[:4], full_cov=True)
        np.testing.assert_allclose(mean.detach(), expected[0], atol=1e-10)
        np.testing.assert_allclose(cov.detach(), expected[1], atol=1e-10)
        (mean.sum() + cov.sum()).backward()
        assert x.grad.abs().sum() > 0
        assert not any(
            p.grad is not None for p in model.estimator_.module_.parameters()
        )

    @pytest.mark.parametrize("kind", ESTIMATORS)
    def test_rows_in_the_graph_that_cannot_be(self, kind, models):
        model, X = models[kind, "all"]
        model = clone_fitted(model).set_params(pred_type="glm")
        with pytest.raises(TypeError, match="needs tensors"):
            model.predictive(X)
        x = torch.tensor(X[:2])
        for wrong, word in (
            (x[:0], "no rows"),
            (x[:, :1], "cannot be applied"),
            (x / 0, "not finite"),
        ):
            with pytest.raises(ValueError, match=word):
                model.predictive(wrong)
        mean, _ = model.predictive(x.float())
        assert mean.dtype == torch.float64

    @pytest.mark.parametrize("kind", ESTIMATORS)
    def test_one_is_no_spread(self, kind, models):
        model, X = models[kind, "all"]
        model = clone_fitted(model).set_params(n_samples=1)
        with pytest.raises(ValueError, match="n_samples=1 has no variance"):
            model.latent_mean_and_variance(X)
        if kind is LaplaceClassifier:
            assert model.predict_proba(X).shape == (len(X), 3)


def clone_fitted(model):
    """Another estimator with the same fit, whose parameters can be set apart."""
    return copy.copy(model)


# -------------------------------------------------------------------- more rows
@pytest.mark.parametrize("kind", ESTIMATORS)
class TestPartialFit:
    @pytest.mark.parametrize("settings", SETTINGS)
    def test_equals_one_fit_on_all_rows(self, kind, settings, frozen64, rng_untouched):
        net, X, y = frozen64[kind]
        # what is tuned would be tuned on other rows
        settings = complete(kind, {**settings, "prior_precision": 1e4, "refine": False})
        w = 0.5 + np.arange(len(X)) % 3
        parts = np.array_split(np.random.default_rng(0).permutation(len(X)), 3)
        if settings.get("subset_of_weights") == "subnetwork":
            settings["subset_params"] = {"indices": [0, 3, 5, 11]}
        whole = kind(net, **settings).fit(X, y, w)
        model = kind(net, **settings).fit(X[parts[0]], y[parts[0]], w[parts[0]])
        for rows in parts[1:]:
            assert model.partial_fit(X[rows], y[rows], sample_weight=w[rows]) is model
        tolerance = {"rtol": 1e-9, "atol": 1e-9}
        np.testing.assert_allclose(
            everything(model, X), everything(whole, X), **tolerance
        )

    def test_is_the_first_fit_where_there_was_none(self, kind, frozen64):
        net, X, y = frozen64[kind]
        settings = complete(kind, {"prior_precision": 1.0})
        model = kind(net, **settings).partial_fit(X, y)
        np.testing.assert_array_equal(
            everything(model, X), everything(kind(net, **settings).fit(X, y), X)
        )

    def test_of_a_refitted_head_is_at_that_head(self, kind, frozen64):
        """The same rows again double the curvature and the loss there."""
        net, X, y = frozen64[kind]
        settings = complete(kind, {"prior_precision": 3.0, "refine": True})
        model = kind(net, hessian_structure="full", **settings).fit(X, y)
        before = model.posterior_
        assert before.is_refitted
        trained = [p.clone() for p in model.estimator_.module_.parameters()]
        model.partial_fit(X, y)
        after = model.posterior_
        torch.testing.assert_close(
            after.structure.dense(), 2 * before.structure.dense(), rtol=1e-9, atol=1e-9
        )
        torch.testing.assert_close(after.data_fit.loss, 2 * before.data_fit.loss)
        assert torch.equal(after.mean, before.mean)
        for old, new in zip(
            trained, model.estimator_.module_.parameters(), strict=True
        ):
            assert torch.equal(old, new)

    @pytest.mark.parametrize(
        "change",
        [
            {"hessian_structure": "diag"},
            {"curvature": "ef"},
            {"subset_of_weights": "all"},
            {"hessian_structure": "lowrank", "structure_params": {"rank": 3}},
        ],
    )
    def test_after_a_change_of_settings(self, kind, change, frozen64):
        net, X, y = frozen64[kind]
        model = kind(net, **complete(kind, {"prior_precision": 1.0})).fit(X, y)
        model.set_params(**change)
        with pytest.raises(ValueError, match=f"'{next(iter(change))}'.* changed since"):
            model.partial_fit(X, y)

    def test_after_a_change_that_no_repr_shows(self, kind):
        """Arrays of more than a thousand entries are printed in part."""
        X, y = data_for(kind)
        net = net_for(kind, module__width=500)
        net = FrozenEstimator(seeded(net, X, as_target(kind, y)))
        every = np.arange(1200)
        indices = np.delete(every, 600)
        settings = {"subset_of_weights": "subnetwork", "hessian_structure": "diag"}
        settings = complete(kind, {"prior_precision": 1.0, **settings})
        model = kind(net, subset_params={"indices": indices}, **settings).fit(X, y)
        model.set_params(subset_params={"indices": indices.copy()}).partial_fit(X, y)
        model.set_params(subset_params={"indices": np.delete(every, 601)})
        with pytest.raises(ValueError, match="'subset_params' changed since"):
            model.partial_fit(X, y)

    def test_that_leaves_no_gaussian(self, kind, frozen64):
        """Curvature is added until its negative eigenvalues are beyond the prior."""
        net, X, y = frozen64[kind]
        settings = {
            "subset_of_weights": "all",
            "hessian_structure": "full",
            "curvature": "hessian",
        }
        settings = complete(kind, {"prior_precision": 1e4, **settings})
        model = kind(net, **settings).fit(X, y)
        lowest = float(
            model.posterior_.scale * model.posterior_.structure.eigenvalues[0]
        )
        assert lowest < 0
        settings["prior_precision"] = -1.5 * lowest
        model = kind(net, **settings).fit(X, y)
        before = model.posterior_
        with pytest.raises(ValueError, match="not positive definite"):
            model.partial_fit(X, y)
        assert model.posterior_ is before

    def test_that_fails_changes_nothing(self, kind, frozen64, rng_untouched):
        net, X, y = frozen64[kind]
        model = kind(net, **complete(kind, {"prior_precision": 1.0})).fit(X, y)
        before, attributes = everything(model, X), dict(vars(model))
        with pytest.raises(ValueError, match="features"):
            model.partial_fit(X[:, :-1], y)
        with pytest.raises(ValueError, match="egative"):
            model.partial_fit(X, y, sample_weight=-np.ones(len(y)))
        interrupted = mock.patch(
            "sklaplace.estimators.laplace_fit.accumulate", side_effect=KeyboardInterrupt
        )
        with interrupted, pytest.raises(KeyboardInterrupt):
            model.partial_fit(X, y)
        assert vars(model) == attributes
        np.testing.assert_array_equal(everything(model, X), before)
