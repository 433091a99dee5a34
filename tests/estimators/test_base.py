"""What both estimators promise: order, batches, state left alone, weights."""

import copy
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from nets import (
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
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.frozen import FrozenEstimator
from skorch.dataset import ValidSplit

from sklaplace import LaplaceClassifier, LaplaceRegressor

ESTIMATORS = [LaplaceClassifier, LaplaceRegressor]

MAY_USE_TRAINING_ROWS = pytest.mark.filterwarnings(
    "ignore:There are no rows that the network did not"
)
LABELS_AT_RANDOM = pytest.mark.filterwarnings("ignore:Under no prior precision are")
ALL = {"subset_of_weights": "all"}
FULL = {"hessian_structure": "full"}


def under(prior_precision, **settings):
    return {"prior_precision": prior_precision, **settings}


def subnetwork(**params):
    return {"subset_of_weights": "subnetwork", "subset_params": params}


def structure(name, **params):
    return {"hessian_structure": name, "structure_params": params}


# What the posterior is made of: subset, structure, and how the prior is found.
SETTINGS = [
    under(1.0),
    under("marglik"),
    under("marglik", refine=True),
    under("marglik", **structure("lowrank", rank=4)),
    under(1.0, prior_structure="layerwise", **ALL, **structure("gp", n_points=7)),
    under("marglik", hessian_structure="nystrom"),
    under(1.0, **ALL, refine=True),
    under(1.0, **ALL, hessian_structure="variational"),
    under("marglik", curvature="ef"),
    under(1.0, subset_of_weights="trainable"),
    under("marglik", **subnetwork(n_weights=9), **FULL),
    under(1.0, **subnetwork(n_weights=9, by="swag"), random_state=0),
    under(
        1.0,
        curvature="ggn_mc",
        curvature_params={"n_draws": 3},
        refine=True,
        random_state=0,
    ),
    under(1e4, **ALL, **FULL, curvature="hessian"),
    under(1.0, hessian_structure="diag", prior_structure="diag"),
    under("marglik", prior_structure="layerwise"),
    under(1.0, **ALL),
    under(1.0, **ALL, **FULL),
]


def data_for(kind, **params):
    return blobs(**params) if kind is LaplaceClassifier else waves(**params)


def fresh_rows(kind, **params):
    """Other rows from the same distribution."""
    return tuple(values[60:] for values in data_for(kind, n=120, **params))


def net_for(kind, **params):
    return classifier(**params) if kind is LaplaceClassifier else regressor(**params)


def as_target(kind, y):
    """Targets as the bare net takes them: a regressor's have an axis of outputs."""
    return y if kind is LaplaceClassifier else y.reshape(len(y), -1)


@dataclass(frozen=True)
class Problem:
    """An estimator to make, the net that it is made around, and rows."""

    kind: type
    net: Any
    X: np.ndarray
    y: np.ndarray

    def make(self, **settings):
        """Not fitted, with a noise level that is found as the prior precision is."""
        if self.kind is LaplaceRegressor:
            prior = settings.get("prior_precision", "auto")
            noise = prior if isinstance(prior, str) else 0.2
            settings = {"sigma_noise": noise, **settings}
        return self.kind(self.net, **settings)

    def fit(self, **settings):
        return self.make(**settings).fit(self.X, self.y)

    def train(self):
        seeded(self.net, self.X, as_target(self.kind, self.y))
        return self

    def frozen(self):
        return replace(self, net=FrozenEstimator(self.net))

    def everything(self, model):
        """Mean, variance (full for classes) and evidence as one vector."""
        moments = model.latent_mean_and_variance(self.X, full_cov=True)
        evidence = [model.log_marginal_likelihood_value_]
        return np.concatenate([*map(np.ravel, moments), evidence])

    def assert_same(self, model, other, tolerance=0):
        found, expected = self.everything(model), self.everything(other)
        assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@cache
def trained_in_float64(kind):
    net = net_for(kind, module__dtype=torch.float64)
    return Problem(kind, net, *data_for(kind, dtype=np.float64)).train().frozen()


@pytest.fixture(params=ESTIMATORS)
def kind(request):
    return request.param


@pytest.fixture
def frozen(kind):
    """Around a trained float64 net, frozen."""
    return trained_in_float64(kind)


# ------------------------------------------------------------ batches and order
@pytest.mark.parametrize("settings", SETTINGS)
class TestBatchesAndOrder:
    def test_batch_size_changes_nothing(self, settings, frozen):
        whole = frozen.fit(**settings)
        for batch_size in (1, 7, 1000):
            model = frozen.fit(batch_size=batch_size, **settings)
            frozen.assert_same(model, whole, 1e-10)

    def test_predictions_follow_shuffled_rows_exactly(self, settings, frozen):
        X, model = frozen.X, frozen.fit(**settings)
        order = np.random.default_rng(1).permutation(len(X))
        straight = *model.latent_mean_and_variance(X), model.predict(X)
        X = X[order]
        shuffled = *model.latent_mean_and_variance(X), model.predict(X)
        for there, here in zip(straight, shuffled, strict=True):
            assert_array_equal(there[order], here)

    def test_order_of_training_rows(self, settings, frozen):
        order = np.random.default_rng(1).permutation(len(frozen.X))
        shuffled = frozen.make(**settings).fit(frozen.X[order], frozen.y[order])
        frozen.assert_same(shuffled, frozen.fit(**settings), 1e-10)


def test_batch_size_changes_no_validation_path():
    problem = trained_in_float64(LaplaceClassifier)
    X, y = problem.X, problem.y
    found = []
    for batch_size in (None, 1, 7):
        model = problem.make(**under("validation"), batch_size=batch_size)
        model.set_params(random_state=0).fit(X, y, X_val=X[::2], y_val=y[::2])
        found.append(model.predict_proba(X))
    assert_allclose(found[1], found[0], atol=1e-10)
    assert_allclose(found[2], found[0], atol=1e-10)


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
    assert_allclose(mean2, mean, atol=1e-9)
    assert_allclose(variance2, variance, rtol=1e-8)


# ------------------------------------------------------------- state left alone


@contextmanager
def interrupted():
    """By the user, while curvature is being accumulated."""
    name = "sklaplace.curvature.accumulation.backpropagate_in_parts"
    with (
        mock.patch(name, side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        yield


# ---------------------------------------------------------------------- weights
INTEGER_WEIGHTS = np.random.default_rng(3).integers(0, 4, 60)
REPEATED = np.repeat(np.arange(60), INTEGER_WEIGHTS)


class TestSampleWeight:
    @pytest.mark.parametrize("settings", SETTINGS)
    def test_integer_weights_repeat_rows_of_a_frozen_net(self, settings, frozen):
        X, y = frozen.X, frozen.y
        weighted = frozen.make(**settings).fit(X, y, sample_weight=INTEGER_WEIGHTS)
        repeated = frozen.make(**settings).fit(X[REPEATED], y[REPEATED])
        frozen.assert_same(weighted, repeated, 1e-8)

    @MAY_USE_TRAINING_ROWS
    @pytest.mark.parametrize("own_net", [True, False])
    @pytest.mark.parametrize(
        ("weights", "rows"),
        [(INTEGER_WEIGHTS, REPEATED), (INTEGER_WEIGHTS > 0, INTEGER_WEIGHTS > 0)],
        ids=["repeated", "dropped"],
    )
    def test_integer_weights_repeat_rows_in_full_batch_training(
        self, kind, own_net, weights, rows
    ):
        X, y = data_for(kind, dtype=np.float64)
        net = net_for(kind, module__dtype=torch.float64) if own_net else None
        problem = Problem(kind, net, X, y)
        weighted = problem.make(random_state=0).fit(X, y, weights.astype(float))
        repeated = problem.make(random_state=0).fit(X[rows], y[rows])
        # measured 2e-12; training multiplies rounding, as with permuted rows
        problem.assert_same(weighted, repeated, 1e-8)

    def test_rows_of_weight_zero_are_not_looked_at(self, kind):
        X, y = data_for(kind)
        weights = np.where(np.arange(len(X)) < 5, 0.0, 1.0)
        wild = np.where(weights[:, None] > 0, X, np.float32(1e30))
        problem = Problem(kind, net_for(kind, max_epochs=2), X, y)
        models = [problem.make(random_state=0).fit(Z, y, weights) for Z in (X, wild)]
        problem.assert_same(*models)


# -------------------------------------------------- which rows serve which purpose
SPLIT = ValidSplit(4, stratified=False)


def recorded(problem, rows=None, train_split=None, **settings):
    """A model, and the rows trained on, as many as its curvature has."""
    RowsSeen.trained.clear()
    net = net_for(
        problem.kind, max_epochs=1, callbacks=[RowsSeen()], train_split=train_split
    )
    model = replace(problem, net=net).make(random_state=0, **settings)
    model.fit(problem.X, problem.y, **rows or {})
    trained = {tuple(row) for row in RowsSeen.trained}
    assert len(trained) == model.posterior_.data_fit.n_targets
    return model, trained


class TestRows:
    @pytest.fixture
    def problem(self, kind):
        return Problem(kind, None, *data_for(kind))

    @pytest.fixture
    def fresh(self, kind):
        """Other rows to tune on, and the same with other targets."""
        X, y = fresh_rows(kind)
        other = (y + 1) % 3 if kind is LaplaceClassifier else y + 5
        return {"X_val": X, "y_val": y}, {"X_val": X, "y_val": other}

    @pytest.mark.parametrize(
        ("n", "settings", "n_trained"),
        [
            (60, under(1.0), 60),
            (60, under("marglik"), 60),
            (40, under("marglik"), 40),
            (60, {"validation_fraction": 0.3}, 42),
        ],
        ids=["fixed", "marglik", "marglik-few", "validation"],
    )
    def test_as_many_as_stated_are_kept_from_training_and_curvature(
        self, n, settings, n_trained, problem
    ):
        problem = replace(problem, X=problem.X[:n], y=problem.y[:n])
        _, trained = recorded(problem, **settings)
        assert len(trained) == n_trained
        assert trained <= set(map(tuple, problem.X.tolist()))

    def test_rows_of_train_split_are_tuned_on(self, kind, problem):
        model, trained = recorded(problem, train_split=SPLIT)
        assert len(trained) == 45
        # the first of four folds is held out; only its targets are changed
        y = problem.y.copy()
        y[:15] = y[:15][::-1] if kind is LaplaceClassifier else y[:15] + 5
        other, _ = recorded(replace(problem, y=y), train_split=SPLIT)
        weights = (m.estimator_.module_.parameters() for m in (model, other))
        for a, b in zip(*weights, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert other.prior_precision_ != model.prior_precision_

    @LABELS_AT_RANDOM
    def test_given_rows_are_tuned_on_and_nothing_else(self, problem, fresh):
        model, trained = recorded(problem, fresh[0])
        assert trained == set(map(tuple, problem.X.tolist()))
        other, _ = recorded(problem, fresh[1])
        assert other.prior_precision_ != model.prior_precision_


# ------------------------------------------------------------------- the evidence
class TestEvidence:
    def test_is_that_of_a_fit_at_the_value_asked(self, frozen):
        found = frozen.fit(prior_precision=2.0).log_marginal_likelihood(7.0)
        other = frozen.fit(prior_precision=7.0)
        expected = other.log_marginal_likelihood_value_
        assert found == pytest.approx(expected, rel=1e-12)

    def test_marglik_maximises_it(self, frozen):
        model = frozen.fit(prior_precision="marglik", refine=False)
        best = model.log_marginal_likelihood_value_
        for factor in (0.9, 1.1):
            value = model.log_marginal_likelihood(factor * model.prior_precision_)
            assert value < best


# ---------------------------------------------------------------------- the rest


def test_an_initialised_net_counts_as_trained():
    net = initialised(classifier())
    model = LaplaceClassifier(FrozenEstimator(net), prior_precision=1.0).fit(*blobs())
    assert model.n_iter_ == 1
    weights = (n.module_.parameters() for n in (model.estimator_, net))
    for mine, yours in zip(*weights, strict=True):
        torch.testing.assert_close(mine, yours, rtol=0, atol=0)


def test_names_of_an_earlier_fit_are_forgotten():
    X, y = blobs()
    model = LaplaceClassifier(classifier(), random_state=0).fit(X, y)
    assert model.n_features_in_ == 2
    both = {"left": X, "right": np.ones((len(X), 3), "f4")}
    model.set_params(estimator=classifier(TwoInputs, module__n_out=3)).fit(both, y)
    assert not hasattr(model, "n_features_in_")


@pytest.mark.parametrize("refine", [False, np.False_])
def test_numpys_false_is_no_wish_to_refit(refine):
    """A parameter grid makes numpy's flags; this head is not linear."""
    X, y = blobs()
    net = FrozenEstimator(seeded(classifier(TanhMLP), X, y))
    model = LaplaceClassifier(net, prior_precision=1.0, refine=refine)
    assert not model.fit(X, y).posterior_.is_refitted


# ---------------------------------------------------------- weights that are drawn
@cache
def drawing(kind, subset):
    problem = trained_in_float64(kind)
    settings = under(3.0, subset_of_weights=subset, pred_type="nn", random_state=0)
    return problem.fit(**settings)


def with_params(model, **params):
    """Another estimator with the same fit, whose parameters are set apart."""
    return copy.copy(model).set_params(**params)


class TestDrawnWeights:
    @pytest.fixture
    def model(self, kind):
        """All weights are drawn."""
        return drawing(kind, "all")

    @pytest.fixture
    def X(self, frozen):
        return frozen.X

    def test_of_a_linear_head_are_those_of_the_linearised_network(self, kind, X):
        model = drawing(kind, "last_layer")
        linearised = with_params(model, pred_type="glm")
        if kind is LaplaceClassifier:
            draws = linearised.sample_proba(X, model.n_samples, model._seed)
            assert_allclose(model.predict_proba(X), draws.mean(-1), atol=1e-12)
        else:
            draws = linearised._outputs().sample(X, model.n_samples, model._seed)
            mean, variance = model.latent_mean_and_variance(X)
            assert_allclose(mean, draws.mean(-1), atol=1e-12)
            assert_allclose(variance, draws.var(-1, ddof=1), atol=1e-12)
            _, expected = linearised.latent_mean_and_variance(X)
            # a variance of a hundred draws has a relative error of √(2/99) = .14
            ratio = variance / expected
            assert 0.4 < ratio.min() < 1 < ratio.max() < 1.9

    def test_of_all_weights_are_not(self, model, X):
        linearised = with_params(model, pred_type="glm")
        ours, theirs = (m._outputs().sample(X, 5, 0) for m in (model, linearised))
        assert abs(ours - theirs).max() > 1e-3

    def test_have_no_gaussian_in_the_graph(self, model, X):
        with pytest.raises(ValueError, match=r"pred_type='nn' has no Gaussian.*'glm'"):
            model.predictive(torch.tensor(X))

    def test_gaussian_in_the_graph(self, model, X):
        model = with_params(model, pred_type="glm")
        x = torch.tensor(X[:4], requires_grad=True)
        mean, cov = model.predictive(x)
        expected = model.latent_mean_and_variance(X[:4], full_cov=True)
        assert_allclose(mean.detach(), expected[0], atol=1e-10)
        assert_allclose(cov.detach(), expected[1], atol=1e-10)
        (mean.sum() + cov.sum()).backward()
        assert x.grad.abs().sum() > 0
        assert all(p.grad is None for p in model.estimator_.module_.parameters())

    def test_rows_in_the_graph_that_cannot_be(self, model, X):
        model = with_params(model, pred_type="glm")
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


# -------------------------------------------------------------------- more rows
class TestPartialFit:
    @pytest.mark.parametrize("settings", SETTINGS)
    def test_equals_one_fit_on_all_rows(self, settings, frozen, rng_untouched):
        X, y = frozen.X, frozen.y
        # what is tuned would be tuned on other rows
        settings = {**settings, "prior_precision": 1e4, "refine": False}
        if settings.get("subset_of_weights") == "subnetwork":
            settings["subset_params"] = {"indices": [0, 3, 5, 11]}
        w = 0.5 + np.arange(len(X)) % 3
        whole, model = frozen.make(**settings).fit(X, y, w), frozen.make(**settings)
        first, *others = np.array_split(np.random.default_rng(0).permutation(60), 3)
        model.fit(X[first], y[first], w[first])
        for rows in others:
            assert model.partial_fit(X[rows], y[rows], sample_weight=w[rows]) is model
        frozen.assert_same(model, whole, 1e-9)

    def test_of_a_refitted_head_is_at_that_head(self, frozen):
        """The same rows again double the curvature and the loss there."""
        model = frozen.fit(**under(3.0, refine=True), **FULL)
        before = model.posterior_
        assert before.is_refitted
        trained = [p.clone() for p in model.estimator_.module_.parameters()]
        after = model.partial_fit(frozen.X, frozen.y).posterior_
        torch.testing.assert_close(
            after.structure.dense(), 2 * before.structure.dense(), rtol=1e-9, atol=1e-9
        )
        torch.testing.assert_close(after.data_fit.loss, 2 * before.data_fit.loss)
        assert torch.equal(after.mean, before.mean)
        weights = model.estimator_.module_.parameters()
        assert all(map(torch.equal, trained, weights))

    @pytest.mark.parametrize(
        "change",
        [
            {"hessian_structure": "diag"},
            {"curvature": "ef"},
            {"subset_of_weights": "all"},
            {"hessian_structure": "lowrank", "structure_params": {"rank": 3}},
        ],
    )
    def test_after_a_change_of_settings(self, change, frozen):
        model = frozen.fit(prior_precision=1.0).set_params(**change)
        with pytest.raises(ValueError, match=f"'{next(iter(change))}'.* changed since"):
            model.partial_fit(frozen.X, frozen.y)

    def test_after_a_change_that_no_repr_shows(self, kind):
        """Arrays of more than a thousand entries are printed in part."""
        X, y = data_for(kind)
        problem = Problem(kind, net_for(kind, module__width=500), X, y).train().frozen()
        every = np.arange(1200)
        indices = np.delete(every, 600)
        settings = under(1.0, **subnetwork(indices=indices), hessian_structure="diag")
        model = problem.fit(**settings)
        model.set_params(subset_params={"indices": indices.copy()}).partial_fit(X, y)
        model.set_params(subset_params={"indices": np.delete(every, 601)})
        with pytest.raises(ValueError, match="'subset_params' changed since"):
            model.partial_fit(X, y)

    def test_that_leaves_no_gaussian(self, frozen):
        """Curvature is added until its negative eigenvalues are beyond the prior."""
        settings = {**ALL, **FULL, "curvature": "hessian"}
        posterior = frozen.fit(prior_precision=1e4, **settings).posterior_
        lowest = float(posterior.scale * posterior.structure.eigenvalues[0])
        assert lowest < 0
        model = frozen.fit(prior_precision=-1.5 * lowest, **settings)
        before = model.posterior_
        with pytest.raises(ValueError, match="not positive definite"):
            model.partial_fit(frozen.X, frozen.y)
        assert model.posterior_ is before

    def test_that_fails_changes_nothing(self, frozen, rng_untouched):
        X, y, model = frozen.X, frozen.y, frozen.fit(prior_precision=1.0)
        before, attributes = frozen.everything(model), dict(vars(model))
        with pytest.raises(ValueError, match="features"):
            model.partial_fit(X[:, :-1], y)
        with pytest.raises(ValueError, match="egative"):
            model.partial_fit(X, y, sample_weight=-np.ones(len(y)))
        with interrupted():
            model.partial_fit(X, y)
        assert vars(model) == attributes
        assert_array_equal(frozen.everything(model), before)
