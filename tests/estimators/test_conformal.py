"""Conformal intervals and sets: definition, guarantee and errors."""

import pickle
from functools import partial

import numpy as np
import pytest
from nets import (
    MLP,
    RecordTraining,
    blobs,
    classifier,
    regressor,
    seeded,
    waves,
)
from numpy.testing import assert_allclose, assert_array_equal
from refusals import refused
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import (
    GroupKFold,
    KFold,
    LeaveOneGroupOut,
    LeaveOneOut,
    ShuffleSplit,
)
from skorch import NeuralNet
from torch import nn

from sklaplace import (
    DeepEnsembleClassifier,
    DeepEnsembleRegressor,
    LaplaceClassifier,
    LaplaceRegressor,
)
from sklaplace.estimators.predicting.conformal import Conformal

pytestmark = pytest.mark.usefixtures("rng_untouched")
FIXED = {"prior_precision": 1.0, "random_state": 0}
QUICK = {"sigma_noise": 0.3, "residual": "none", **FIXED}
CLASSES, NUMBERS = blobs(90), waves(90)
TWO = waves(90, n_targets=2)


def halves(X, y):
    return (X[::2], y[::2]), (X[1::2], y[1::2])


def contains(ends, y):
    return (ends[..., 0] <= y) & (y <= ends[..., 1])


# -------------------------------------------------------------------- the guarantee
@pytest.mark.parametrize(("n", "coverage"), [(19, 0.9), (20, 0.9), (49, 0.5)])
def test_coverage_is_the_rank_by_the_number_of_scores(n, coverage):
    rng, runs = np.random.default_rng(0), 4000
    levels, rank, inside = np.array([coverage]), np.ceil((n + 1) * coverage), 0
    for scores in rng.uniform(size=(runs, n + 1, 1)):
        conformal = Conformal.of([], [scores[:-1]], {}, None)
        # the score of a target is the target itself
        ends = conformal.interval(
            [s[None] for s in conformal.signed_scores(levels, joint=False)], levels
        )
        inside += ends[0, 0, 0, 0] <= scores[-1, 0] <= ends[0, 0, 1, 0]
        members = conformal.members([scores[-1:]], coverage)
        assert members.item() == (scores[-1, 0] <= ends[0, 0, 1, 0])
    exact = rank / (n + 1)
    assert exact >= coverage
    assert abs(inside / runs - exact) < 4 * np.sqrt(exact * (1 - exact) / runs)


def test_joint_intervals_contain_all_outputs_of_samples_up_to_the_rank():
    train, (X, y) = halves(*TWO)
    model = LaplaceRegressor(regressor(module__n_out=2), **QUICK).fit(*train)
    model.conformalize(X, y)
    ends = model.predict_interval(X, 0.8, method="joint")
    each = model.predict_interval(X, 0.8, method="conformal")
    least = int(np.ceil((len(y) + 1) * 0.8))
    assert least - 1 <= contains(ends, y).all(1).sum() <= least
    assert contains(each, y).all(1).sum() < least - 1
    assert ends.shape == (len(X), 2, 2)


def test_intervals_of_scaled_noise_contain_the_calibration_samples():
    X, y = load_diabetes(return_X_y=True)
    train, (X, y) = halves(X[:300], y[:300])
    model = LaplaceRegressor(random_state=0).fit(*train)
    model.recalibrate(X[::2], y[::2]).conformalize(X, y)
    for coverage in (0.5, 0.8, 0.95):
        ends = model.predict_interval(X, coverage, method="conformal")
        assert contains(ends, y).sum() >= int(np.ceil((len(y) + 1) * coverage)) - 1


# ---------------------------------------------------------------------------- folds
def of_folds(model, X, y, folds):
    """Return the models of the folds with their held-out samples."""
    for train, test in folds:
        yield clone(model).fit(X[train], y[train]), X[test], y[test]


def test_intervals_of_folds_are_those_of_the_definition():
    (X, y), (X_new, _) = halves(*NUMBERS)
    model = LaplaceRegressor(regressor(), **QUICK).fit(X, y)
    folds = KFold(3, shuffle=True, random_state=0)
    model.conformalize(X, y, cv=folds)
    folds = [*folds.split(X)]
    low, high = [], []
    for part, X_part, y_part in of_folds(model, X, y, folds):
        mean, std = part.predict(X_part, return_std=True)
        scores = np.abs(y_part - mean) / std
        mean, std = (v[:, None] for v in part.predict(X_new, return_std=True))
        low.append(mean - scores * std)
        high.append(mean + scores * std)
    low, high = (np.sort(np.hstack(side), axis=1) for side in (low, high))
    rank = int(np.ceil(0.9 * (len(y) + 1)))
    expected = np.stack([low[:, len(y) - rank], high[:, rank - 1]], axis=1)
    model = pickle.loads(pickle.dumps(model))
    found = model.predict_interval(X_new, 0.9, method="conformal")
    assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    joint = model.predict_interval(X_new, [0.5, 0.9], method="joint")
    assert_allclose(joint[..., 1], expected, rtol=1e-5, atol=1e-5)


def test_sets_of_folds_are_those_of_the_definition():
    (X, y), (X_new, _) = halves(*CLASSES)
    y = np.array(["c", "a", "b"])[y]
    model = LaplaceClassifier(classifier(), **FIXED).fit(X, y)
    folds = [*KFold(3).split(X)]
    members = model.conformalize(X, y, cv=folds).predict_set(
        X_new, q=0.2, method="conformal"
    )
    n_below = np.zeros(members.shape)
    for part, X_part, y_part in of_folds(model, X, y, folds):
        codes = np.searchsorted(part.classes_, y_part)
        scores = 1 - part.predict_proba(X_part)[np.arange(len(codes)), codes]
        own = 1 - part.predict_proba(X_new)
        n_below += (scores < own[..., None]).sum(-1)
    expected = n_below < np.ceil(0.8 * (len(y) + 1))
    expected[np.arange(len(X_new)), model.predict_proba(X_new).argmax(1)] = True
    assert_array_equal(members, expected)


@pytest.mark.parametrize("kind", [DeepEnsembleClassifier, DeepEnsembleRegressor])
def test_folds_do_not_depend_on_the_order_of_samples(kind):
    is_classifier = kind is DeepEnsembleClassifier
    X, y = CLASSES if is_classifier else NUMBERS
    net = classifier() if is_classifier else regressor()
    model = kind(net.set_params(batch_size=-1), n_estimators=2, random_state=0)
    order = np.random.default_rng(0).permutation(len(y))
    found = []
    for rows in (np.arange(len(y)), order):
        model.fit(X, y).conformalize(X[rows], y[rows], cv=2)
        if is_classifier:
            found.append(model.predict_set(X, q=0.2, method="conformal"))
        else:
            found.append(model.predict_interval(X, 0.8, method="conformal"))
    assert_allclose(*found, rtol=1e-3, atol=1e-3)


def test_a_class_can_be_missing_from_a_fold():
    X, y = CLASSES
    kept = np.flatnonzero((y < 2) | (np.cumsum(y == 2) == 1))
    model = LaplaceClassifier(**FIXED).fit(X[kept], y[kept])
    model.conformalize(X[kept], y[kept], cv=3)
    assert model.predict_set(X, q=0.1, method="conformal").any(1).all()


def test_leaving_one_out_is_allowed():
    X, y = NUMBERS[0][:12], NUMBERS[1][:12]
    model = LaplaceRegressor(regressor(), **QUICK).fit(X, y)
    model.conformalize(X, y, cv=LeaveOneOut())
    assert len(model._conformal.models) == 12
    assert np.isfinite(model.predict_interval(X, method="conformal")).all()


# ----------------------------------------------------------------------- categories
@pytest.mark.parametrize(
    "names",
    [
        ["b", "a"],
        [7, -1],
        [2.5, 0.5],
        [True, False],
        np.array(["2020-01", "2021-01"], "datetime64[ns]"),
    ],
)
def test_intervals_of_categories_are_those_of_separate_calibrations(names):
    train, (X, y) = halves(*NUMBERS)
    model = LaplaceRegressor(regressor(), **QUICK).fit(*train)
    code = (np.arange(len(y)) % 3 == 0).astype(int)
    categories = np.array(names)[code]
    model.conformalize(X, y, categories=categories)
    model = pickle.loads(pickle.dumps(model))
    X_new, new = NUMBERS[0], np.array(names)[np.arange(90) % 2]
    coverages, found = [0.5, 0.9], {}
    for method in ("conformal", "joint"):
        options = {"method": method, "categories": new}
        found[method] = model.predict_interval(X_new, coverages, **options)
    assert_array_equal(*found.values())
    for name in names:
        alone = clone(model).fit(*train)
        alone.conformalize(X[categories == name], y[categories == name])
        expected = alone.predict_interval(
            X_new[new == name], coverages, method="conformal"
        )
        assert_allclose(found["conformal"][new == name], expected, rtol=1e-6)


def test_intervals_of_categories_and_folds_are_those_of_the_definition():
    (X, y), (X_new, _) = halves(*NUMBERS)
    categories, new = np.arange(len(y)) // 15, np.arange(len(X_new)) % 3
    model = LaplaceRegressor(regressor(), **QUICK).fit(X, y)
    folds = KFold(3)  # each fold holds out exactly one category
    model.conformalize(X, y, cv=folds, categories=categories)
    options = {"method": "conformal", "categories": new}
    found = model.predict_interval(X_new, 0.8, **options)
    for k, (part, X_part, y_part) in enumerate(of_folds(model, X, y, folds.split(X))):
        mean, std = part.predict(X_part, return_std=True)
        limit = np.sort(np.abs(y_part - mean) / std)[int(np.ceil(0.8 * 16)) - 1]
        mean, std = part.predict(X_new[new == k], return_std=True)
        expected = np.stack([mean - limit * std, mean + limit * std], axis=1)
        assert_allclose(found[new == k], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cv", [None, 2])
def test_sets_of_categories_are_those_of_separate_calibrations(cv):
    train, (X, y) = halves(*CLASSES)
    categories = np.where(np.arange(len(y)) % 2, "odd", "even")
    model = LaplaceClassifier(classifier(), **FIXED).fit(*train)
    model.conformalize(X, y, cv=cv, categories=categories)
    found = model.predict_set(X, 0.2, method="conformal", categories=categories)
    one_by_one = [
        model.predict_set(X[[i]], 0.2, method="conformal", categories=categories[[i]])
        for i in range(9)
    ]
    assert_array_equal(np.concatenate(one_by_one), found[:9])
    if cv is None:
        for name in ("odd", "even"):
            rows = categories == name
            model.conformalize(X[rows], y[rows])
            expected = model.predict_set(X[rows], 0.2, method="conformal")
            assert_array_equal(found[rows], expected)


def test_groups_count_within_their_category():
    train, (X, y) = halves(*NUMBERS)
    model = LaplaceRegressor(regressor(), **QUICK).fit(*train)
    groups, categories = np.arange(45) // 3, np.arange(45) // 15
    model.conformalize(X, y, groups=groups, categories=categories)
    assert [sum(w.sum() for w in part.weights) for part, _ in by_category(model)] == [
        pytest.approx(5)
    ] * 3
    options = {"method": "conformal", "categories": categories}
    with pytest.raises(ValueError, match="from 5 groups of the category 0"):
        model.predict_interval(X, 0.9, **options)
    assert np.isfinite(model.predict_interval(X, 0.8, **options)).all()


def by_category(model):
    return model._conformal.by_category(model._conformal.known_categories)


@pytest.mark.slow
def test_coverage_holds_in_each_category():
    rng, covered = np.random.default_rng(0), np.zeros(2)
    X_train, y_train = rng.normal(size=(200, 2)), rng.normal(size=200)
    model = LaplaceRegressor(regressor(), **QUICK).fit(X_train, y_train)
    for _ in range(200):
        X = rng.normal(size=(300, 2))
        category = rng.integers(2, size=300)
        y = rng.normal(size=300) * (1 + 2 * category)  # noise that the model ignores
        model.conformalize(X[:200], y[:200], categories=category[:200])
        options = {"method": "conformal", "categories": category[200:]}
        inside = contains(model.predict_interval(X[200:], 0.9, **options), y[200:])
        covered += [inside[category[200:] == k].mean() for k in range(2)]
    # the exact coverage is between 0.9 and 0.9 + 1/100 on average; the error of 200
    # means, each with a standard deviation of at most 0.06
    assert (covered / 200 >= 0.9 - 4 * 0.06 / np.sqrt(200)).all()
    assert (covered / 200 <= 0.915 + 4 * 0.06 / np.sqrt(200)).all()


def test_missing_unknown_and_useless_categories():
    train, (X, y) = halves(*NUMBERS)
    model = LaplaceRegressor(regressor(), **QUICK).fit(*train)
    categories = np.where(np.arange(45) < 41, "site A", "site B")
    ask = partial(model.predict_interval, X, method="conformal")
    model.conformalize(X, y)
    with pytest.raises(ValueError, match="conformalize did not receive categories"):
        ask(categories=categories)
    model.conformalize(X, y, categories=categories)
    with pytest.raises(ValueError, match=r"the categories 'site A', 'site B'\. Pass"):
        ask()
    with pytest.raises(ValueError, match=r"no rows .* 'C'\. .* 'site A', 'site B'"):
        ask(categories=np.where(np.arange(45) < 44, "site A", "C"))
    with pytest.raises(ValueError, match="no rows of the categories 1, 2"):
        ask(categories=np.arange(45) % 2 + 1)
    with pytest.raises(ValueError, match="categories has shape"):
        ask(categories=categories[:-1])
    with pytest.raises(ValueError, match="from 4 rows of the category 'site B'"):
        ask(categories=categories)
    assert ask(coverage=0.8, categories=categories).shape == (45, 2)
    assert ask(categories=["site A"] * 45).shape == (45, 2)
    with pytest.raises(ValueError, match="have no effect on these predictions"):
        model.predict_interval(X, categories=categories)
    for wrong in (categories[:-1], [None] * 45, [np.nan] * 45):
        for cv in (None, 3):
            with pytest.raises(ValueError, match="categories"):
                model.conformalize(X, y, cv=cv, categories=wrong)
    assert ask(coverage=0.8, categories=categories).shape == (45, 2)  # as before
    X, y = CLASSES
    model = LaplaceClassifier(classifier(), **FIXED).fit(X, y)
    model.conformalize(X, y, categories=y % 2)
    for method in (None, "bridge"):
        with pytest.raises(ValueError, match="have no effect on these predictions"):
            model.predict_set(X, method=method, categories=y % 2)


# ----------------------------------------------------------------------------- sets
def test_sets_are_those_of_the_definition():
    train, (X, y) = halves(*CLASSES)
    model = LaplaceClassifier(classifier(), **FIXED).fit(*train).conformalize(X, y)
    # the most confident labels, one of which is wrong or close to it
    proba = model.predict_proba(X)
    limit = np.sort(1 - proba[np.arange(len(y)), y])[
        int(np.ceil(0.8 * (len(y) + 1))) - 1
    ]
    expected = (1 - proba <= limit) | (proba == proba.max(1, keepdims=True))
    assert_array_equal(model.predict_set(X, 0.2, method="conformal"), expected)


# --------------------------------------------------------------------------- states
def calibrated():
    train, calibration = halves(*NUMBERS)
    return LaplaceRegressor(regressor(), **QUICK).fit(*train).conformalize(*calibration)


CHANGES = {
    "fit": lambda m: m.fit(*NUMBERS),
    "partial_fit": lambda m: m.partial_fit(*NUMBERS),
    "tune": lambda m: m.tune(*NUMBERS),
    "recalibrate": lambda m: m.recalibrate(*NUMBERS),
}


@pytest.mark.parametrize("name", CHANGES)
def test_scores_are_removed_when_predictions_change(name):
    model = calibrated()
    CHANGES[name](model)
    with pytest.raises(ValueError, match="Call conformalize first"):
        model.predict_interval(NUMBERS[0], method="conformal")


def test_scores_stay_after_a_failure_and_other_predictions_stay():
    model = calibrated()
    before = model.predict_interval(NUMBERS[0], method="conformal")
    for wrong in ({"y": NUMBERS[1][:-1]}, {"y": np.full(90, np.nan)}, {"cv": 1}):
        given = {"X": NUMBERS[0], "y": NUMBERS[1]} | wrong
        with pytest.raises(ValueError):  # noqa: PT011
            model.conformalize(**given)
    with pytest.raises(ValueError, match="NaN"):
        model.fit(NUMBERS[0], np.full(90, np.nan))
    after = model.predict_interval(NUMBERS[0], method="conformal")
    assert_array_equal(before, after)
    plain = clone(model).fit(*halves(*NUMBERS)[0]).predict_interval(NUMBERS[0])
    assert_array_equal(plain, model.predict_interval(NUMBERS[0]))


def test_scores_are_of_the_same_predictions():
    model = calibrated().set_params(batch_size=7)
    model.predict_interval(NUMBERS[0], method="conformal")
    model.set_params(residual=0.5)
    with pytest.raises(ValueError, match="needs conformity scores for these predict"):
        model.predict_interval(NUMBERS[0], method="conformal")


def test_lists_and_small_coverages():
    model, (X, y) = calibrated(), NUMBERS
    model.conformalize(X.tolist(), y.tolist(), cv=2)
    assert np.isfinite(model.predict_interval(X, method="conformal")).all()
    ends = calibrated().predict_interval(X, [1e-12, 0.1], method="conformal")
    assert (np.ptp(ends[..., 0], axis=1) <= np.ptp(ends[..., 1], axis=1)).all()


@pytest.mark.parametrize("cv", [None, 2])
def test_classes_without_weight_have_scores(cv):
    (X, y), weights = CLASSES, {0: 1, 1: 1, 2: 0}
    model = LaplaceClassifier(class_weight=weights, **FIXED).fit(X, y)
    model.conformalize(X, y, cv=cv)
    assert sum(map(len, model._conformal.scores)) == len(y)
    assert model.predict_set(X, 0.2, method="conformal").shape == (len(y), 3)


# ------------------------------------------------------------------------- refusals
def test_refusals():
    model, (X, y) = calibrated(), NUMBERS
    with pytest.raises(ValueError, match="method='other' is not known"):
        model.predict_interval(X, method="other")
    with pytest.raises(
        ValueError, match=r"from 45 rows\. Pass at least 99 rows to conform"
    ):
        model.predict_interval(X, [0.5, 0.99], method="conformal")
    for cv in (ShuffleSplit(2), [(np.arange(50), np.arange(50, 90))]):
        with pytest.raises(ValueError, match="must hold out each row exactly once"):
            model.conformalize(X, y, cv=cv)
    for cv in (GroupKFold(3), LeaveOneGroupOut()):
        with pytest.raises(ValueError, match=r"groups\. Pass groups= to conformalize"):
            model.conformalize(X, y, cv=cv)
    for cv in (1, True, 0):
        with pytest.raises(ValueError, match=r"cv=.* is not an integer of at least 2"):
            model.conformalize(X, y, cv=cv)
    frozen = FrozenEstimator(seeded(regressor(), X, y[:, None]))
    model = LaplaceRegressor(frozen, **QUICK).fit(X, y)
    with pytest.raises(ValueError, match=r"this network is frozen\. Use cv=None"):
        model.conformalize(X, y, cv=5)
    X, y = CLASSES
    labels = np.eye(3)[y][:, :2].astype(int)
    net = NeuralNet(MLP, nn.BCEWithLogitsLoss, module__n_out=2, verbose=0)
    net.set_params(callbacks=[RecordTraining()], max_epochs=1)
    model = LaplaceClassifier(net, **FIXED).fit(X, labels)
    for cv in (None, 5):
        words = ["needs one label per row"]
        ask = partial(model.conformalize, X, labels, cv=cv)
        refused(ValueError, words, ask, model)
    with pytest.raises(ValueError, match="Call conformalize first"):
        model.predict_set(X, method="conformal")
