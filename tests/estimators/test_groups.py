"""Rows that belong together: replicates, copies, and groups such as patients."""

import signal

import numpy as np
import pandas as pd
import pytest
import torch
from nets import MLP, DropoutMLP, RecordTraining, regressor
from numpy.testing import assert_allclose, assert_array_equal
from refusals import REGRESSORS, refused_fit
from sklearn.base import clone
from sklearn.model_selection import GroupKFold, KFold
from skorch import NeuralNetRegressor
from torch import nn

from sklaplace import (
    DeepEnsembleRegressor,
    LaplaceClassifier,
    LaplaceClassifierCV,
    LaplaceRegressor,
    LaplaceRegressorCV,
    MCDropoutRegressor,
    SWAGRegressor,
    VariationalRegressor,
)
from sklaplace.estimators.predicting.conformal import Conformal
from sklaplace.networks.default import MANY_ROWS, MEDIUM, SMALL
from sklaplace.networks.tabular import TabularNetwork

LEVELS, ROWS = 6, 15


def mlp(d):
    return nn.Sequential(nn.Linear(d, 50), nn.ReLU(), nn.Linear(50, 1))


def net(d, **params):
    settings = {"optimizer": torch.optim.Adam, "lr": 0.01, "max_epochs": 60}
    return NeuralNetRegressor(mlp, module__d=d, verbose=0, **settings | params)


# ---------------------------------------------------------------------- replicates
def arms(seed, step=None):
    """Return levels of a factor and targets with noise 1; rows are sorted by level."""
    rng = np.random.default_rng(seed)
    level = np.repeat(np.arange(LEVELS), ROWS)
    y = 2.8 * rng.normal(size=LEVELS)[level] + rng.normal(size=len(level))
    return level, y if step is None else step * np.round(y / step)


def as_table(level):
    return pd.DataFrame({"arm": pd.Categorical([f"arm {k}" for k in level])})


def one_hot(level):
    return np.eye(LEVELS, dtype=np.float32)[level]


FEW = {"prior_precisions": [0.01, 0.1, 1.0, 10.0, 100.0], "random_state": 0}
MODELS = {
    "table": lambda: (LaplaceRegressor(random_state=0), as_table),
    "net": lambda: (LaplaceRegressor(net(LEVELS), random_state=0), one_hot),
    "cv": lambda: (LaplaceRegressorCV(**FEW), one_hot),
    "cv net": lambda: (LaplaceRegressorCV(net(LEVELS), **FEW), one_hot),
}


@pytest.mark.parametrize("step", [None, 1.0])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 10))]
)
@pytest.mark.filterwarnings("ignore:The net's train_split holds out all rows of")
def test_noise_of_replicates_is_the_deviation_within_levels(name, seed, step):
    level, y = arms(seed, step)
    model, inputs = MODELS[name]()
    model.fit(inputs(level), y.astype(np.float32))
    _, std = model.predict(inputs(np.arange(LEVELS)), return_std=True)
    within = np.sqrt(np.mean([y[level == k].var(ddof=1) for k in range(LEVELS)]))
    assert (std > 0.7 * within).all()
    assert (std < 1.5 * within).all()


def test_a_split_that_hides_replicates_is_replaced_for_training_only():
    level, y = arms(0)
    model = LaplaceRegressor(net(LEVELS), prior_precision=1.0, sigma_noise=1.0)
    with pytest.warns(UserWarning, match="Shuffle the rows of X and y"):
        model.fit(one_hot(level), y.astype(np.float32))
    assert model.estimator_.train_split.cv == 5
    means = [y[level == k].mean() for k in range(LEVELS)]
    assert_allclose(model.predict(one_hot(np.arange(LEVELS))), means, atol=1.0)
    order = np.random.default_rng(0).permutation(len(y))
    model.fit(one_hot(level)[order], y[order].astype(np.float32))  # without a warning


def test_the_default_folds_do_not_depend_on_the_order_of_rows():
    level, y = arms(0)
    order = np.random.default_rng(0).permutation(len(y))
    found = [
        LaplaceRegressorCV(prior_precisions=[0.1, 10.0], random_state=0)
        .fit(one_hot(level[rows]), y[rows])
        .cv_results_["mean_test_score"]
        for rows in (np.arange(len(y)), order)
    ]
    assert_allclose(*found, rtol=1e-4)


# -------------------------------------------------------------------------- groups
def patients(seed, n_groups=40, n_rows=8, first=0):
    """Return samples with an intercept of deviation 1 per patient, and noise 0.5."""
    rng, weights = np.random.default_rng(seed), np.random.default_rng(99).normal(size=5)
    group = np.repeat(np.arange(n_groups), n_rows)
    own = rng.normal(size=(n_groups, 3))[group]
    X = np.hstack([own, rng.normal(size=(len(group), 2))])
    y = X @ weights + rng.normal(size=n_groups)[group] + 0.5 * rng.normal(size=len(X))
    return X.astype(np.float32), y.astype(np.float32), group + first


def of_groups(kind, seed):
    X, y, groups = patients(seed)
    if kind == "X_val":
        X_val, y_val, groups_val = patients(seed + 500, first=1000)
        held_out = {"X_val": X_val, "y_val": y_val, "groups_val": groups_val}
        return LaplaceRegressor(net(5), random_state=0).fit(
            X, y, groups=groups, **held_out
        )
    models = {
        "default": LaplaceRegressor(random_state=0),
        "net": LaplaceRegressor(net(5, train_split=None), random_state=0),
        "cv": LaplaceRegressorCV(**FEW),
    }
    return models[kind].fit(X, y, groups=groups)


def covered(model, seed, **options):
    X, y, _ = patients(seed + 1000, n_groups=300)
    low, high = model.predict_interval(X, **options).T
    return np.mean((low <= y) & (y <= high)), np.mean(high - low)


@pytest.mark.parametrize("kind", ["default", "net", "cv", "X_val"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 10))]
)
def test_intervals_cover_new_groups(kind, seed):
    coverage, width = covered(of_groups(kind, seed), seed)
    assert coverage >= 0.8
    # the deviation of a new target around the linear mean is √(1² + 0.5²)
    assert width < 1.5 * 2 * 1.645 * np.sqrt(1.25)


GROUPS = patients(0)[2]
MISSING = np.where(GROUPS > 0, GROUPS, np.nan)
# changed arguments of fit, and words of the message
REFUSED = [
    ({"groups": GROUPS[1:]}, ["groups has shape (319,)"]),
    ({"groups": np.zeros((320, 2))}, ["groups has shape (320, 2)"]),
    ({"groups": [None, *["a"] * 319]}, ["groups contains NaN: the label None"]),
    ({"groups": MISSING}, ["groups contains NaN. Leave out"]),
    ({"groups_val": MISSING}, ["groups_val contains NaN. Leave out"]),
    ({"groups_val": GROUPS[:3]}, ["groups_val has shape (3,)"]),
    (
        {"groups_val": GROUPS, "X_val": None, "y_val": None},
        ["groups_val has no samples. Pass X_val and"],
    ),
]


@pytest.mark.parametrize("kind", REGRESSORS)
def test_groups_that_are_refused(kind):
    """Missing groups come without advice to impute them."""
    X, y, groups = patients(0)
    sizes = {"module__n_in": 5, "callbacks": [RecordTraining()]}
    model = kind(regressor(DropoutMLP, **sizes))
    for changed, words in REFUSED:
        options = {"X_val": X + 0.1, "y_val": y, "groups": groups} | changed
        if kind is LaplaceRegressorCV and "groups_val" not in changed:
            options = changed
        elif kind is LaplaceRegressorCV:
            continue
        message = refused_fit(model, *words, data=(X, y), **options)
        assert "NaN. " not in message or message.endswith("samples.")


@pytest.mark.parametrize("groups_val", [None, np.arange(60) // 8])
def test_held_out_samples_of_seen_groups_warn(groups_val):
    X, y, groups = patients(0)
    model = LaplaceRegressor(net(5, max_epochs=1), random_state=0)
    held_out = {"X_val": X[:60] + 0.1, "y_val": y[:60], "groups_val": groups_val}
    with pytest.warns(UserWarning, match="groups_val is missing or has groups of X"):
        model.fit(X, y, groups=groups, **held_out)


@pytest.mark.parametrize(
    "kind",
    [
        *(MCDropoutRegressor, VariationalRegressor),
        pytest.param(DeepEnsembleRegressor, marks=pytest.mark.slow),
        pytest.param(SWAGRegressor, marks=pytest.mark.slow),
    ],
)
def test_held_out_groups_count_equally_in_estimators_that_draw(kind):
    X, y, groups = patients(0)
    module = DropoutMLP if "Dropout" in kind.__name__ else MLP
    model = kind(regressor(module, module__n_in=5, max_epochs=1), random_state=0)
    once = {"X_val": X + 0.1, "y_val": y, "groups_val": groups}
    rows = np.r_[np.arange(len(y)), np.repeat(np.flatnonzero(groups == groups[0]), 20)]
    often = {name: values[rows] for name, values in once.items()}
    found, expected = (clone(model).fit(X, y, **part) for part in (often, once))
    assert_allclose(found.sigma_noise_, expected.sigma_noise_, rtol=1e-4)
    assert_allclose(found.predict(X), expected.predict(X), atol=1e-5)
    del often["groups_val"]
    assert (
        abs(clone(model).fit(X, y, **often).sigma_noise_ / found.sigma_noise_ - 1)
        > 0.01
    )


def test_groups_and_batch_norm_leave_most_rows_for_training():
    sizes = []

    class Counted(nn.BatchNorm1d):
        def forward(self, x):
            if self.training:
                sizes.append(len(x))
            return super().forward(x)

    rng = np.random.default_rng(0)
    groups = np.r_[np.repeat(np.arange(120), 16), 120]
    X = rng.normal(size=(len(groups), 2)).astype(np.float32)
    params = {"train_split": None, "max_epochs": 1, "batch_size": 16}
    module = nn.Sequential(Counted(2), nn.Linear(2, 1))
    model = LaplaceRegressor(regressor(module, **params), random_state=0)
    model.set_params(sigma_noise="homoscedastic").fit(X, X[:, 0], groups=groups)
    assert sum(sizes) > 0.7 * len(X)


@pytest.mark.parametrize("kind", ["constant X", "X_val of one group"])
def test_residuals_of_one_unit_have_constant_noise(kind):
    X, y, _ = patients(0)
    if kind == "constant X":
        model = LaplaceRegressor(random_state=0).fit(np.ones((len(y), 1)), y)
    else:
        held_out = {"X_val": X[:40], "y_val": y[:40], "groups_val": np.ones(40)}
        model = LaplaceRegressor(net(5), random_state=0).fit(X, y, **held_out)
    assert model._noise_model is None
    assert 0 < model.sigma_noise_ < 2 * y.std()


# ----------------------------------------------------------------------- conformal
def test_conformal_coverage_of_new_groups_is_the_rank_by_the_number_of_groups():
    rng, runs, n_groups = np.random.default_rng(0), 4000, 19
    sizes, inside = rng.integers(1, 9, size=n_groups + 1), []
    labels = np.repeat(np.arange(n_groups + 1), sizes)
    for _ in range(runs):
        rng.shuffle(labels)
        scores = rng.normal(size=n_groups + 1)[labels] + rng.normal(size=len(labels))
        scores = np.exp(scores)[:, None]
        known = labels < n_groups
        conformal = Conformal.of([], [scores[known]], {}, [labels[known]])
        # the score of a target is the target itself
        ends = conformal.signed_scores(np.array([0.8]), joint=False)
        ends = conformal.interval([s[None] for s in ends], np.array([0.8]))
        inside.append(np.mean(scores[~known] <= ends[0, 0, 1, 0]))
    assert abs(np.mean(inside) - 0.8) < 4 * np.std(inside) / np.sqrt(runs) + 1 / 20


@pytest.mark.parametrize(
    "cv", [None, *(pytest.param(cv, marks=pytest.mark.slow) for cv in (4, "groups"))]
)
def test_conformal_intervals_cover_new_groups(cv):
    X, y, groups = patients(0)
    model = LaplaceRegressor(regressor(nn.Linear(5, 1)), random_state=0)
    if cv is None:
        model.fit(X[:160], y[:160], groups=groups[:160])
        model.conformalize(X[160:], y[160:], groups=groups[160:])
    else:
        folds = GroupKFold(4) if cv == "groups" else cv
        model.fit(X, y, groups=groups).conformalize(X, y, cv=folds, groups=groups)
    coverage, _ = covered(model, 0, method="conformal")
    assert 0.82 < coverage < 0.99


def test_conformal_refusals():
    X, y, groups = patients(0, 19)
    model = LaplaceRegressor(regressor(nn.Linear(5, 1)), random_state=0)
    model.set_params(prior_precision=1.0, sigma_noise=1.0).fit(X, y, groups=groups)
    model.conformalize(X, y, groups=groups)
    assert np.isfinite(model.predict_interval(X, 0.95, method="conformal")).all()
    with pytest.raises(
        ValueError, match=r"from 19 groups\. Pass at least 99 groups to conform"
    ):
        model.predict_interval(X, 0.99, method="conformal")
    with pytest.raises(ValueError, match="its own held-out rows or groups"):
        model.conformalize(X, y, cv=[*KFold(3).split(X)], groups=groups)
    everything = np.arange(len(y))
    with pytest.raises(ValueError, match="its own held-out rows or groups"):
        model.conformalize(X, y, cv=[(everything, everything)], groups=groups)
    with pytest.warns(UserWarning, match="fit received groups, but conformalize did"):
        model.conformalize(X, y)


def test_folds_can_be_masks():
    X, y, _ = patients(0)
    model = LaplaceRegressor(regressor(nn.Linear(5, 1)), random_state=0)
    model.set_params(prior_precision=1.0, sigma_noise=1.0).fit(X, y)
    is_first = np.arange(len(y)) < 100
    ends = []
    for folds in (
        [(~is_first, is_first), (is_first, ~is_first)],
        [(np.arange(100, 320), np.arange(100)), (np.arange(100), np.arange(100, 320))],
    ):
        model.conformalize(X, y, cv=folds)
        ends.append(model.predict_interval(X, method="conformal"))
    assert_array_equal(*ends)


@pytest.fixture
def ctrl_c_raises():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_interrupted_folds_store_no_scores():
    class Interrupted(nn.Linear):
        def forward(self, x):
            if self.training and 1 < len(x) < 300 and self.interrupts:
                signal.raise_signal(signal.SIGINT)
            return super().forward(x)

    Interrupted.interrupts = False
    X, y, _ = patients(0)
    params = {"train_split": None, "max_epochs": 3, "batch_size": -1}
    model = LaplaceRegressor(regressor(Interrupted(5, 1), **params), random_state=0)
    model.set_params(prior_precision=1.0, sigma_noise=1.0).fit(X, y)
    Interrupted.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        model.conformalize(X, y, cv=2)
    with pytest.raises(ValueError, match="Call conformalize first"):
        model.predict_interval(X, method="conformal")


def test_labels_of_replicates_are_split_within_inputs():
    """A factor with both labels in most cells has probabilities of its frequencies."""
    rng = np.random.default_rng(0)
    level = np.repeat(np.arange(LEVELS), 40)
    p = np.linspace(0.1, 0.9, LEVELS)
    y = (rng.uniform(size=len(level)) < p[level]).astype(int)
    model = LaplaceClassifier(random_state=0).fit(as_table(level), y)
    found = model.predict_proba(as_table(np.arange(LEVELS)))[:, 1]
    frequencies = [y[level == k].mean() for k in range(LEVELS)]
    assert_allclose(found, frequencies, atol=0.2)


@pytest.mark.parametrize("n", [MANY_ROWS - 1, MANY_ROWS])
def test_networks_of_folds_have_the_size_for_all_samples(n):
    """The size depends on the number of distinct samples, not of copies or groups."""
    X = np.arange(float(n))[:, None]
    models = LaplaceRegressor(random_state=0), LaplaceClassifierCV(cv=2)
    widths = set()

    def note(module, *_):
        if isinstance(module, TabularNetwork):
            widths.add(module.hidden.out_features)

    with nn.modules.module.register_module_forward_hook(note):
        for model in models:
            model.fit(X, X[:, 0] % 2, groups=X[:, 0] // 7)
        copies = np.tile(X, (3, 1))
        models[0].fit(copies, copies[:, 0] % 2)
    assert widths == {(SMALL if n < MANY_ROWS else MEDIUM).hidden_units}
