"""Prior precisions by cross-validation: the result of a grid search at lower cost."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from costs import passes
from nets import (
    MLP,
    RecordTraining,
    TanhMLP,
    blobs,
    classifier,
    regressor,
    seeded,
    waves,
)
from refusals import refused_fit
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import log_loss
from sklearn.model_selection import (
    GridSearchCV,
    GroupKFold,
    GroupShuffleSplit,
    KFold,
    LeaveOneGroupOut,
    LeavePGroupsOut,
    StratifiedGroupKFold,
    StratifiedKFold,
)

from sklaplace import (
    LaplaceClassifier,
    LaplaceClassifierCV,
    LaplaceRegressor,
    LaplaceRegressorCV,
)
from sklaplace.metrics import gaussian_nll, neg_gaussian_nll_scorer
from sklaplace.posterior.tuning.path_search import MARGIN

X, Y = blobs(dtype=np.float64)
X_REG, Y_REG = waves(dtype=np.float64)
DOUBLE = {"module__dtype": torch.float64, "max_epochs": 8}
FEW = [0.01, 0.3, 10.0]
PLAIN = {LaplaceClassifierCV: LaplaceClassifier, LaplaceRegressorCV: LaplaceRegressor}
BOTH = list(PLAIN)
NOISE = {LaplaceClassifierCV: {}, LaplaceRegressorCV: {"sigma_noise": 0.3}}
DATA = {LaplaceClassifierCV: (X, Y), LaplaceRegressorCV: (X_REG, Y_REG)}
NETS = {LaplaceClassifierCV: classifier, LaplaceRegressorCV: regressor}
EVERYTHING = {"subset_of_weights": "all"}


def made(kind, net=None, **settings):
    fixed = {"refine": False, "residual": "none"}  # as in a grid search
    settings = {"prior_precisions": FEW, "cv": 3, "random_state": 0} | fixed | settings
    return kind(NETS[kind](**DOUBLE) if net is None else net, **settings)


for_classes = partial(made, LaplaceClassifierCV)
for_numbers = partial(made, LaplaceRegressorCV)


def recording(kind):
    return NETS[kind](**DOUBLE, callbacks=[RecordTraining()])


def fold_scores(model):
    results = model.cv_results_
    n_splits = sum(name.startswith("split") for name in results)
    return np.array([results[f"split{k}_test_score"] for k in range(n_splits)])


def grid_search(model, X, y, scoring=None, **settings):
    """Return scikit-learn's grid search with the same settings."""
    shared = model.get_params(deep=False)
    plain = PLAIN[type(model)]
    shared = {k: v for k, v in shared.items() if k in plain._get_param_names()}
    density = "neg_log_loss" if plain is LaplaceClassifier else neg_gaussian_nll_scorer
    search = GridSearchCV(
        plain(**shared | settings),
        {"prior_precision": model.prior_precisions},
        cv=model.cv,
        scoring=scoring or density,
        error_score="raise",
    )
    return search.fit(X, y)


def assert_same_choice(model, search, rtol=1e-8):
    found, wanted = model.cv_results_, search.cv_results_
    np.testing.assert_allclose(fold_scores(model), fold_scores(search), rtol=rtol)
    for name in ("mean_test_score", "std_test_score"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e3 * rtol)
    np.testing.assert_array_equal(found["rank_test_score"], wanted["rank_test_score"])
    assert model.prior_precision_ == search.best_params_["prior_precision"]
    assert model.best_index_ == search.best_index_
    assert model.best_score_ == pytest.approx(search.best_score_, rel=rtol)
    assert model.n_splits_ == search.n_splits_


# --------------------------------------------------------- the choice that it makes
# every candidate and fold refits the weights of the linearised network
REFITTED = {"refine": True, "net": classifier(TanhMLP, **DOUBLE)}
SLOW_SETTINGS = [
    REFITTED,
    REFITTED | EVERYTHING,
    {"refine": True},
    {"link_approx": "mc"},
    {"link_approx": "bridge"},
    {"prior_structure": "layerwise"},
    {"prior_structure": "diag", "hessian_structure": "diag"},
    {"temperature": 0.3, "prior_mean": 0.1},
    {"cv": StratifiedKFold(4, shuffle=True, random_state=1)},
    {"prior_precisions": (100, 1, 1)},
]


class TestAgainstGridSearch:
    @pytest.mark.parametrize("structure", ["kron", "diag", "full"])
    @pytest.mark.parametrize("subset", ["last_layer", "all"])
    @pytest.mark.parametrize("kind", BOTH)
    def test_structures(self, kind, structure, subset):
        chosen = {"hessian_structure": structure, "subset_of_weights": subset}
        model = made(kind, **chosen, **NOISE[kind]).fit(*DATA[kind])
        assert_same_choice(model, grid_search(model, *DATA[kind]))

    @pytest.mark.parametrize(
        "settings",
        [
            {"pred_type": "nn"},
            *(pytest.param(slow, marks=pytest.mark.slow) for slow in SLOW_SETTINGS),
        ],
    )
    def test_settings(self, settings):
        model = for_classes(**settings)
        search = grid_search(model, X, Y)
        model.fit(X, Y)
        model.prior_precision_ = np.max(model.prior_precision_)
        assert_same_choice(model, search, 1e-6 if "net" in settings else 1e-8)

    @pytest.mark.slow
    @pytest.mark.parametrize("scoring", ["neg_log_loss", "roc_auc", "accuracy"])
    def test_scorers(self, scoring):
        y = np.where(Y == 1, "one", "other")
        model = for_classes(classifier(module__n_out=2, **DOUBLE), scoring=scoring)
        assert_same_choice(model.fit(X, y), grid_search(model, X, y, scoring))

    @pytest.mark.parametrize("kind", BOTH)
    def test_predictions_are_those_of_the_plain_estimator(self, kind):
        X, y = DATA[kind]
        model = made(kind).fit(X, y)
        params = model.cv_results_["params"][model.best_index_]
        params = {"random_state": 0, "refine": False, "residual": "none"} | params
        plain = PLAIN[kind](recording(kind), **params).fit(X, y)
        names = {
            LaplaceClassifierCV: ["predict_proba", "sample_proba"],
            LaplaceRegressorCV: ["predict_interval", "sample_y"],
        }
        for name in ["predict", "latent_mean_and_variance", *names[kind]]:
            found, expected = (getattr(m, name)(X) for m in (model, plain))
            np.testing.assert_array_equal(found, expected)
        value = model.log_marginal_likelihood(2.0)
        assert value == plain.log_marginal_likelihood(2.0)
        assert isinstance(model, PLAIN[kind])

    @pytest.mark.slow
    def test_two_targets_are_scored_by_their_sum(self):
        X, y = waves(n_targets=2, dtype=np.float64)
        net = regressor(module__n_out=2, **DOUBLE)
        model = for_numbers(net, sigma_noise=0.2).fit(X, y)
        search = grid_search(model, X, y)
        np.testing.assert_allclose(fold_scores(model), 2 * fold_scores(search))


# ------------------------------------------------------------------ refitted weights
class TestRefine:
    @pytest.mark.parametrize("kind", BOTH)
    def test_auto_refits_where_held_out_rows_become_more_probable(self, kind):
        X, y = DATA[kind]
        settings = {"prior_precisions": [1e-4, 1e-2, 1.0, 100.0], **NOISE[kind]}
        net = NETS[kind](**DOUBLE | {"max_epochs": 1})
        auto, kept, refitted = (
            made(kind, net, refine=refine, **settings).fit(X, y)
            for refine in ("auto", False, True)
        )
        scores = [fold_scores(model) for model in (kept, refitted)]
        gains = 20 * (scores[1] - scores[0]).sum(0)  # each fold has 20 rows
        assert (gains > MARGIN).any()
        expected = np.where(gains > MARGIN, scores[1], scores[0])
        np.testing.assert_allclose(fold_scores(auto), expected, rtol=1e-8)
        same = refitted if gains[auto.best_index_] > MARGIN else kept
        same.set_params(prior_precisions=[auto.prior_precision_]).fit(X, y)
        np.testing.assert_array_equal(auto.predict(X), same.predict(X))

    def test_auto_keeps_weights_outside_the_last_layer(self):
        auto, kept = (
            for_classes(refine=refine, **EVERYTHING).fit(X, Y)
            for refine in ("auto", False)
        )
        np.testing.assert_array_equal(fold_scores(auto), fold_scores(kept))
        assert not auto.posterior_.is_refitted


# -------------------------------------------------------------------- the noise
class TestNoise:
    def naive(self, settings, prior_precision, sigma_noise, X=X_REG, y=Y_REG):
        """Return the mean log-density of held-out rows, with one fit per fold."""
        total = 0.0
        chosen = {"prior_precision": prior_precision, "sigma_noise": sigma_noise}
        kept = {"refine": False, "residual": "none", "random_state": 0}
        model = LaplaceRegressor(regressor(**DOUBLE), **kept | chosen | settings)
        for train, test in KFold(3).split(X):
            model.fit(X[train], y[train])
            mean, std = model.predict(X[test], return_std=True)
            total -= len(test) * gaussian_nll(y[test], mean, std)
        return total / len(y)

    @pytest.mark.slow
    @pytest.mark.parametrize("settings", [{}, {"refine": True}, EVERYTHING], ids=str)
    def test_makes_the_held_out_rows_of_all_folds_most_probable(self, settings):
        model = for_numbers(**settings).fit(X_REG, Y_REG)
        results = model.cv_results_
        for i, value in enumerate(FEW):
            sigma = results["param_sigma_noise"][i]
            tried = {"prior_precision": value, "sigma_noise": sigma}
            assert results["params"][i] == tried
            best = self.naive(settings, value, sigma)
            assert results["mean_test_score"][i] == pytest.approx(best, rel=1e-8)
            for factor in (0.5, 0.98, 1.02):
                assert self.naive(settings, value, factor * sigma) < best
        assert model.sigma_noise_ == results["param_sigma_noise"][model.best_index_]

    def test_whatever_the_score_is(self):
        by_density = for_numbers().fit(X_REG, Y_REG).cv_results_
        by_error = for_numbers(scoring="neg_mean_squared_error").fit(X_REG, Y_REG)
        np.testing.assert_array_equal(
            by_density["param_sigma_noise"], by_error.cv_results_["param_sigma_noise"]
        )
        assert by_error.best_index_ == 0  # the mean says nothing about the prior

    @pytest.mark.filterwarnings("ignore:y or one of its columns is constant")
    @pytest.mark.parametrize("targets", [np.zeros(60), np.full(60, 3.0)])
    def test_of_constant_targets(self, targets):
        model = for_numbers().fit(X_REG, targets)
        assert model.sigma_noise_ > 0
        assert np.isfinite(model.cv_results_["mean_test_score"]).all()


# --------------------------------------------------------------------- the price
class TestPrice:
    @pytest.mark.parametrize("settings", [{}, {"refine": True}, EVERYTHING], ids=str)
    @pytest.mark.parametrize("kind", BOTH)
    def test_one_training_and_one_pass_of_held_out_samples_per_fold(
        self, kind, settings
    ):
        RecordTraining.steps.clear()
        grid = np.logspace(-3, 3, 6)
        model = made(kind, recording(kind), prior_precisions=grid, **settings)
        with passes(MLP) as rows:
            model.fit(*DATA[kind])
        n_epochs = DOUBLE["max_epochs"]
        assert RecordTraining.steps == [60] * n_epochs + [40] * 3 * n_epochs
        assert rows.count(20) == 3

    @pytest.mark.parametrize("subset", ["last_layer", "all"])
    def test_batches_of_held_out_samples(self, subset):
        with passes(MLP) as rows:
            small = for_classes(batch_size=7, subset_of_weights=subset).fit(X, Y)
        batches = [n for n in rows if n in (6, 7)]
        assert batches[-9:] == [7, 7, 6] * 3
        whole = for_classes(subset_of_weights=subset).fit(X, Y)
        np.testing.assert_allclose(fold_scores(small), fold_scores(whole), rtol=1e-12)

    def test_a_frozen_network_is_not_trained(self):
        net = seeded(classifier(**DOUBLE, callbacks=[RecordTraining()]), X, Y)
        RecordTraining.steps.clear()
        model = for_classes(FrozenEstimator(net)).fit(X, Y)
        assert RecordTraining.steps == []
        assert_same_choice(model, grid_search(model, X, Y))

    @pytest.mark.parametrize("kind", BOTH)
    def test_memory_keeps_the_folds(self, kind, tmp_path):
        X, y = DATA[kind]
        model = made(kind, recording(kind), memory=tmp_path, **NOISE[kind])

        def n_trainings(**params):
            RecordTraining.steps.clear()
            model = clone(made_once).set_params(**params)
            fits.append(model.fit(X, y))
            return len(RecordTraining.steps) / DOUBLE["max_epochs"]

        made_once, fits = model, []
        assert n_trainings(memory=None) == 4
        assert n_trainings() == 4
        assert n_trainings(prior_precisions=[0.5, *FEW], n_jobs=1) == 0
        assert n_trainings(cv=2) == 3
        wanted, model, again, _ = fits
        assert_same_choice(model, grid_search(model, X, y))
        np.testing.assert_array_equal(fold_scores(again)[:, 1:], fold_scores(wanted))
        np.testing.assert_array_equal(model.predict(X), wanted.predict(X))


# ------------------------------------------------------------- scores and weights
class TestScores:
    def test_default_grid(self):
        model = LaplaceClassifierCV(classifier(), cv=2, random_state=0).fit(X, Y)
        found = model.cv_results_["param_prior_precision"]
        np.testing.assert_allclose(found, np.logspace(-3, 3, 20))

    @pytest.mark.filterwarnings("ignore::UserWarning")  # it has diverged indeed
    def test_are_finite_where_the_network_is_surely_wrong(self):
        sure = MLP(dtype=torch.float64)
        with torch.no_grad():
            sure.head.weight *= 1e5
        net = classifier(sure, lr=0.0, max_epochs=1)
        model = for_classes(net, prior_precisions=[1e8, 1e9]).fit(X, Y)
        proba = model.predict_proba(X)
        assert proba[np.arange(60), Y].min() == 0
        scores = fold_scores(model)
        assert np.isfinite(scores).all()
        assert scores.min() < -40  # scikit-learn clips at 36 nats

    def test_weights_count_in_training_and_scores(self):
        w = 0.5 + np.random.default_rng(0).random(60)
        model = for_classes().fit(X, Y, w)
        for k, (train, test) in enumerate(StratifiedKFold(3).split(X, Y)):
            for i, value in enumerate(FEW):
                plain = LaplaceClassifier(classifier(**DOUBLE), random_state=0)
                plain.set_params(prior_precision=value, refine=False, residual="none")
                proba = plain.fit(X[train], Y[train], w[train]).predict_proba(X[test])
                score = -log_loss(Y[test], proba, sample_weight=w[test])
                assert fold_scores(model)[k, i] == pytest.approx(score, rel=1e-10)
        by_name = for_classes(scoring="neg_log_loss").fit(X, Y, w)
        np.testing.assert_allclose(fold_scores(by_name), fold_scores(model), rtol=1e-10)

    def test_ignored_labels_have_no_score_and_may_have_weights(self):
        labels, w = np.where(np.arange(60) % 7, Y, -1), np.arange(1.0, 61.0)
        model = for_classes(classifier(criterion__ignore_index=-1, **DOUBLE))
        found = model.fit(X, labels, w)
        few = for_classes().fit(X[labels >= 0], labels[labels >= 0], w[labels >= 0])
        np.testing.assert_allclose(fold_scores(found), fold_scores(few))

    @pytest.mark.slow
    def test_scorers_get_weights_if_they_take_them(self):
        seen = []

        def weighted(estimator, X, y, sample_weight=None):
            seen.append(sample_weight)
            return 0.0

        for_classes(scoring=weighted).fit(X, Y)
        assert seen == [None] * 9
        seen.clear()
        w = np.arange(1.0, 61.0)
        for_classes(scoring=weighted).fit(X, Y, w)
        assert np.concatenate(seen[:3]).sum() == w.sum()
        for_classes(scoring=lambda estimator, X, y: 0.0).fit(X, Y, w)

    def test_scorers_see_the_model_as_it_would_be_fitted(self):
        seen = []

        def look(estimator, X, y):
            noise = estimator.sigma_noise, estimator.sigma_noise_
            prior = estimator.prior_precision, estimator.prior_precision_
            seen.append((type(estimator), len(set(noise)), len(set(prior))))
            return 0.0

        for_numbers(scoring=look).fit(X_REG, Y_REG)
        assert seen == [(LaplaceRegressorCV, 1, 1)] * 9

    def test_what_is_not_finite_ranks_last(self):
        def score(estimator, X, y):
            return {0.01: np.nan, 0.3: -1e9, 10.0: -np.inf}[estimator.prior_precision]

        model = for_classes(scoring=score)
        with pytest.warns(UserWarning, match="Some scores are not finite"):
            model.fit(X, Y)
        assert model.prior_precision_ == 0.3
        assert list(model.cv_results_["rank_test_score"]) == [2, 1, 2]

    def test_groups_as_a_list_of_splits(self):
        groups = np.arange(60) // 15
        splits = list(GroupKFold(4).split(X, Y, groups))
        assert for_classes(cv=splits).fit(X, Y).n_splits_ == 4
        masks = [(~np.isin(np.arange(60), test), test) for _, test in splits]
        assert for_classes(cv=iter(masks)).fit(X, Y).n_splits_ == 4


# --------------------------------------------------------------------- bad input
def refused(model, *words, data=(X, Y), **options):
    refused_fit(model, *words, data=data, **options)
    assert not hasattr(model.estimator, "module_")


NO_SCORES = "high", None, np.ones(2), {"a": 1.0}
NO_SCORERS = ["likelihood", ["accuracy"], {"a": "r2"}, 3]


def no_rows_to(do):
    return [f"Split 0 of cv has no rows to {do}"]


WITHOUT_A_CLASS = ["Split 0 of cv", "StratifiedKFold"]
ONE_GROUP = {"groups": np.where(Y == 2, 6, np.arange(60) % 6)}
NO_GROUPS = [["Pass groups= to fit"], {}]
NO_WEIGHT = {"sample_weight": np.arange(60) < 40}
# splitters, words of the message, and changed arguments of fit
BAD_FOLDS = [
    ("five", ["cv"], {}),
    (1, ["1"], {}),
    (2.5, ["cv"], {}),
    (100, ["100"], {}),
    ([], ["no splits"], {}),
    ([1, 2], ["pairs"], {}),
    ([(np.arange(30), np.array([60]))], ["pairs"], {}),
    ([(np.arange(30), np.array([1.5]))], ["pairs"], {}),
    ([(np.arange(30), np.arange(0))], no_rows_to("score with"), {}),
    ([(np.arange(0), np.arange(9))], no_rows_to("train on"), {}),
    (KFold(3), [*WITHOUT_A_CLASS, "[0]"], {"y": np.sort(Y)}),
    (
        KFold(3),
        [*WITHOUT_A_CLASS, "['a']"],
        {"y": np.array(["a", "b", "c"])[np.sort(Y)]},
    ),
    (KFold(3), ["Split 2 of cv has no rows to score"], NO_WEIGHT),
    (GroupKFold(3), ["[2]", "more than one group"], ONE_GROUP),
    (GroupKFold(3), *NO_GROUPS),
    (StratifiedGroupKFold(3), *NO_GROUPS),
    (LeaveOneGroupOut(), *NO_GROUPS),
    (LeavePGroupsOut(2), *NO_GROUPS),
    (GroupShuffleSplit(2), *NO_GROUPS),
]


class TestBadInput:
    @pytest.fixture
    def net(self):
        return recording(LaplaceClassifierCV)

    @pytest.mark.parametrize(("cv", "words", "changed"), BAD_FOLDS)
    def test_folds(self, net, cv, words, changed):
        data = {"X": X, "y": Y} | changed
        data, options = (data.pop("X"), data.pop("y")), data
        refused(for_classes(net, cv=cv), *words, data=data, **options)

    @pytest.mark.filterwarnings("ignore:The least populated class:UserWarning")
    @pytest.mark.parametrize("cv", [3, StratifiedKFold(3), KFold(3)])
    def test_a_class_with_one_row(self, net, cv):
        """The advice is not the splitter that was used."""
        y = np.where(np.arange(60) == 7, 9, Y)
        model = for_classes(net, cv=cv)
        message = refused_fit(model, "more than one row", "[9]", data=(X, y))
        assert "Stratified" not in message

    def test_a_frozen_network_knows_its_classes(self):
        order = np.argsort(Y)
        net = seeded(classifier(**DOUBLE), X, Y)
        model = for_classes(FrozenEstimator(net), cv=KFold(3)).fit(X[order], Y[order])
        assert np.isfinite(model.best_score_)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            *[({"scoring": value}, ["scoring"]) for value in NO_SCORERS],
            ({"scoring": log_loss}, []),
        ],
        ids=lambda v: re.sub(" at 0x\\w+", "", str(v)),
    )
    def test_settings(self, net, settings, words):
        refused(for_classes(net, **settings), *words)

    def test_memory(self, net):
        refused(for_classes(net, memory=3), "memory='3'")

    @pytest.mark.parametrize("noise", ["marglik", "validation", [1.0]])
    def test_noise(self, noise):
        model = for_numbers(recording(LaplaceRegressorCV), sigma_noise=noise)
        refused(model, "sigma_noise", data=(X_REG, Y_REG))

    def test_held_out_rows(self, net):
        words = "'X_val', 'y_val'", "LaplaceClassifier"
        refused(for_classes(net), *words, error=TypeError, X_val=X, y_val=Y)

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            *[(value, ["scoring returned", "one scorer"]) for value in NO_SCORES],
            (np.nan, ["No prior precision has a finite score"]),
        ],
    )
    def test_scores(self, value, words):
        refused(for_classes(scoring=lambda estimator, X, y: value), *words)

    def test_a_scorer_that_fails(self):
        def fail(estimator, X, y):
            raise RuntimeError("no score")

        refused(for_classes(scoring=fail), "no score", error=RuntimeError)
