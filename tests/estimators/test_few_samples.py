"""Prior precision and noise with no, few, or net-selected held-out samples."""

import copy
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import ClassVar

import numpy as np
import pytest
import torch
from nets import MLP, QUICK, blobs, classifier, regressor, seeded, waves
from numpy.testing import assert_allclose
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetRegressor
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import predefined_split
from torch import nn

from sklaplace import (
    DeepEnsembleRegressor,
    LaplaceClassifier,
    LaplaceRegressor,
)
from sklaplace.data.split import MIN_ROWS, hash_folds, row_keys
from sklaplace.estimators.training.folds import FOLDS_OF_MANY, MANY_SAMPLES, N_FOLDS
from sklaplace.estimators.training.laplace import FEW as FOLDED
from sklaplace.estimators.training.laplace import FEW_FOR_NOISE, MIN_HELD_OUT

pytestmark = pytest.mark.usefixtures("full_training")


def noise(n, seed=0):
    """Return targets independent of the inputs, and an equal number of test targets."""
    rng = np.random.default_rng(seed)
    X, y = rng.standard_normal((n + 500, 8)), rng.standard_normal(n + 500)
    return X[:n].astype("f4"), y[:n].astype("f4"), X[n:].astype("f4"), y[n:]


def overfitting_net(**settings):
    """Return a net that memorises thirty samples."""
    layers = nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    settings = {"max_epochs": 100, "lr": 0.01, **settings}
    return regressor(nn.Sequential(*layers), optimizer=torch.optim.Adam, **settings)


def coverage(model, X, y):
    interval = model.predict_interval(X, coverage=0.9)
    return np.mean((interval[:, 0] <= y) & (y <= interval[:, 1]))


# ----------------------------------------------------------------------------- folds
@pytest.mark.parametrize("stratify", [True, False])
def test_folds_are_a_partition_that_keeps_copies_together(stratify):
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((40, 2)), np.repeat([0, 1], [30, 10])
    X, y = np.concatenate([X, X[:5]]), np.concatenate([y, y[:5]])
    keys = row_keys(X, 45, 0)
    folds = hash_folds(keys, y, 5, stratify=stratify)
    assert sorted(np.concatenate([held for _, held in folds])) == list(range(45))
    for rows, held in folds:
        assert sorted([*rows, *held]) == list(range(45))
        assert {*held} & set(range(5)) == {row - 40 for row in held if row >= 40}
        if stratify:
            assert len(np.unique(X[held][y[held] == 1], axis=0)) == 2
    for _, held in folds:  # in an order that does not depend on that of the samples
        assert not np.array_equal(held, np.sort(held))
    order = rng.permutation(45)
    keys = row_keys(X[order], 45, 0)
    again = hash_folds(keys, y[order], 5, stratify=stratify)
    for (_, held), (_, same) in zip(folds, again, strict=True):
        assert sorted(order[same]) == sorted(held)


# ---------------------------------------------------------------------- few samples
@pytest.mark.slow
# networks that interpolate have several maxima of the evidence; which of them is found,
# and in how many steps, depends on rounding
@pytest.mark.filterwarnings("ignore:The fixed point of the evidence")
@pytest.mark.parametrize("train_split", [None, ValidSplit(5)], ids=["all", "split"])
@pytest.mark.parametrize("prior", ["auto", "marglik"])
def test_intervals_of_few_samples_cover(prior, train_split):
    """Residuals of training samples are a fifth of the residuals of new samples."""
    found = []
    for seed in range(3):
        X, y, X_test, y_test = noise(30, seed)
        net = overfitting_net(train_split=train_split)
        model = LaplaceRegressor(net, prior_precision=prior, random_state=seed)
        found.append(coverage(model.fit(X, y), X_test, y_test))
    assert 0.8 <= np.mean(found) <= 0.97


class Noted(MLP):
    """A module that records the first column of the samples that it is trained on."""

    seen: ClassVar[list] = []

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.groups = set()
        Noted.seen.append(self.groups)

    def forward(self, X):
        if self.training:
            self.groups.update(X[:, 0].tolist())
        return super().forward(X)


def trainings(model, *data, **options):
    """Return what the networks that are trained in one fit record."""
    Noted.seen.clear()
    model.fit(*data, **options)
    return [groups for groups in Noted.seen if groups]


def n_trainings(*args, **options):
    return len(trainings(*args, **options))


FEW, FEW_REG = blobs(MIN_ROWS - 1), waves(MIN_ROWS - 1)


@pytest.mark.filterwarnings("ignore:Held-out rows are predicted best")
def test_only_few_samples_without_others_are_tuned_by_folds():
    quick, split = regressor(Noted, max_epochs=2), ValidSplit(5)
    model = LaplaceRegressor(quick, refine=False, residual="none", random_state=0)
    assert n_trainings(model, *FEW_REG) == N_FOLDS + 1
    X, y = waves(FEW_FOR_NOISE)
    n_folds = min(N_FOLDS, FOLDS_OF_MANY)  # at least MANY_SAMPLES
    assert n_trainings(model, X[1:], y[1:]) == n_folds + 1
    assert n_trainings(model, X, y) == 1
    many = X[:MANY_SAMPLES], y[:MANY_SAMPLES]
    assert n_trainings(model, *many) == n_folds + 1
    assert n_trainings(model, *(part[1:] for part in many)) == N_FOLDS + 1
    constant = LaplaceRegressor(quick, sigma_noise="homoscedastic", random_state=0)
    assert n_trainings(constant, X[:FOLDED], y[:FOLDED]) == 1
    fixed = LaplaceRegressor(quick, prior_precision=1.0, random_state=0)
    assert n_trainings(fixed, X[:FOLDED], y[:FOLDED]) == 1
    few = X[:FOLDED], 2 * (y[:FOLDED] > 0)  # counts have no noise to model
    counts = regressor(Noted, criterion=nn.PoissonNLLLoss, max_epochs=2)
    assert n_trainings(LaplaceRegressor(counts, random_state=0), *few) == 1
    assert n_trainings(model, *FEW_REG, X_val=X, y_val=y) == 1
    for fixed in ({"prior_precision": 1.0, "sigma_noise": 0.1}, SEEN):
        model = LaplaceRegressor(quick, random_state=0, **fixed)
        assert n_trainings(model, *FEW_REG) == 1
    model = LaplaceClassifier(classifier(Noted, max_epochs=2), random_state=0)
    assert n_trainings(model, *FEW) == N_FOLDS + 1
    model = LaplaceRegressor(regressor(Noted, train_split=split, max_epochs=2))
    assert n_trainings(model, *waves(FOLDED - 1)) == N_FOLDS + 1


class Flat(MLP):
    """A network with outputs (b,)."""

    def forward(self, X):
        return super().forward(X)[:, 0]


def test_held_out_samples_of_folds_have_the_axes_of_the_outputs(monkeypatch):
    shapes, forward = set(), nn.MSELoss.forward

    def noted(self, outputs, targets):
        shapes.add((outputs.ndim, targets.ndim))
        return forward(self, outputs, targets)

    monkeypatch.setattr(nn.MSELoss, "forward", noted)
    net = regressor(partial(Flat, n_out=1), train_split=ValidSplit(5), max_epochs=2)
    LaplaceRegressor(net, random_state=0).fit(*waves(60))
    assert shapes == {(1, 1)}


class Normalised(nn.Sequential):
    """A module that cannot train on a batch of one sample."""

    def __init__(self):
        super().__init__(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, X):
        if self.training and len(X) == 1:
            raise ValueError("one sample has no variance")
        return super().forward(X)


def test_folds_whose_training_fails_are_left_out():
    X, y = waves(322)
    net = NeuralNetRegressor(Normalised, **QUICK | {"max_epochs": 2, "batch_size": 128})
    model = LaplaceRegressor(net.set_params(train_split=None), random_state=0)
    with pytest.warns(UserWarning, match=r"failed on [1-4] of 5 folds.*no variance"):
        model.fit(X, y)
    assert 0.5 * y.std() < model.sigma_noise_ < 2 * y.std()


@pytest.mark.parametrize("n", [5, 60])
def test_samples_that_the_net_brings_are_tuned_on_if_they_are_enough(n):
    X, y = waves(n, seed=1)
    split = predefined_split(Dataset(X, y[:, None]))
    net = regressor(Noted, train_split=split)
    model = LaplaceRegressor(net, random_state=0)
    expected = 1 if n > MIN_HELD_OUT else N_FOLDS + 1
    assert n_trainings(model, *FEW_REG) == expected
    if n > MIN_HELD_OUT:
        net.set_params(train_split=None)
        given = LaplaceRegressor(net, random_state=0).fit(*FEW_REG, X_val=X, y_val=y)
        assert model.sigma_noise_ == pytest.approx(given.sigma_noise_)


@pytest.mark.usefixtures("rng_untouched")
def test_the_network_is_that_of_all_samples():
    """Random draws and callbacks of the folds leave no trace."""
    found = LaplaceClassifier(classifier(), random_state=0).fit(*FEW)
    fixed = LaplaceClassifier(classifier(), prior_precision=1.0, random_state=0)
    states = (m.estimator_.module_.state_dict() for m in (found, fixed.fit(*FEW)))
    for one, other in zip(*(state.values() for state in states), strict=True):
        assert torch.equal(one, other)


class NeedsAll(nn.Module):
    """A network that cannot train on fewer samples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, X):
        if self.training and len(X) < len(FEW_REG[0]):
            raise RuntimeError("too few samples")
        return self.layer(X)


def test_without_folds_where_fewer_samples_cannot_be_trained_on():
    model = LaplaceRegressor(regressor(NeedsAll()), random_state=0)
    failed = pytest.warns(UserWarning, match="failed on 5 of 5 folds.*too few samples")
    with failed, pytest.warns(UserWarning, match="is estimated from training"):
        model.fit(*FEW_REG)
    assert model.sigma_noise_ > 0


# ---------------------------------------------------------------------------- groups
def grouped(n_groups, n_rows=5):
    """Return samples whose first column is the group."""
    X, y = waves(n_groups * n_rows)
    X[:, 0] = np.arange(len(X)) % n_groups
    return X, y, X[:, 0].astype(int)


WITHIN = "100% of the rows of X share a group with others, and the net's train_split"


@pytest.mark.parametrize("n_groups", [4, 30])
@pytest.mark.parametrize("split", [None, ValidSplit(5)], ids=["all", "split"])
def test_folds_hold_out_whole_groups(split, n_groups):
    X, y, groups = grouped(n_groups)
    model = LaplaceRegressor(
        regressor(Noted, train_split=split, max_epochs=2), random_state=0
    )
    with pytest.warns(UserWarning, match=WITHIN) if split else nullcontext():
        _, *folds = trainings(model, X, y, groups=groups)
    assert len(folds) == min(n_groups, N_FOLDS)
    # each group is held out once
    held_out = chain.from_iterable({*groups} - seen for seen in folds)
    assert sorted(held_out) == sorted({*groups})


@pytest.mark.parametrize("kind", [LaplaceRegressor, DeepEnsembleRegressor])
@pytest.mark.parametrize("split", [None, ValidSplit(5)], ids=["all", "split"])
def test_held_out_samples_are_whole_groups(split, kind):
    X, y, groups = grouped(FEW_FOR_NOISE)
    net = regressor(Noted, train_split=split, max_epochs=2)
    with pytest.warns(UserWarning, match=WITHIN) if split else nullcontext():
        found = trainings(model := kind(net, random_state=0), X, y, groups=groups)
    assert all(len({*groups}) / 2 < len(seen) < len({*groups}) for seen in found)
    assert net.train_split is split
    trained = getattr(model, "estimators_", None) or [model.estimator_]
    assert all(type(own.train_split) is type(split) for own in trained)


# --------------------------------------------------- frozen nets with nothing held out
SEEN = {"prior_precision": "marglik", "sigma_noise": "marglik"}
ALONE = "no held-out samples, so 'auto' leaves the network's predictions"
MAY_BE_ALONE = pytest.mark.filterwarnings(f"ignore:.*{ALONE}")


def frozen(n):
    """Return a net that has seen all samples, and the samples."""
    X, y = waves(n)
    net = regressor(Noted, max_epochs=2)
    return FrozenEstimator(seeded(net, X, y[:, None])), X, y


@pytest.mark.parametrize("n", [40, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("rng_untouched")
def test_frozen_nets_are_never_trained(n):
    net, X, y = frozen(n)
    state = copy.deepcopy(net.estimator.module_.state_dict())
    model = LaplaceRegressor(net, random_state=0)
    with pytest.warns(UserWarning, match=ALONE):
        assert n_trainings(model, X, y) == 0
    assert all(map(torch.equal, state.values(), net.module_.state_dict().values()))
    assert n_trainings(model, X, y, X_val=X, y_val=y) == 0
    assert n_trainings(LaplaceRegressor(net, **SEEN), X, y) == 0
    with pytest.raises(ValueError, match="'validation' needs held-out samples"):
        LaplaceRegressor(net, prior_precision="validation").fit(X, y)


@MAY_BE_ALONE
@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_predictions_near_the_data_are_those_of_frozen_nets(structure, subset):
    settings = {"prior_structure": structure, "subset_of_weights": subset}
    X, y = blobs(90)
    net = seeded(classifier(MLP), X, y)
    model = LaplaceClassifier(FrozenEstimator(net), residual="none", **settings)
    assert_allclose(model.fit(X, y).predict_proba(X), net.predict_proba(X), atol=1e-5)
    model.set_params(residual="auto")
    assert np.abs(model.predict_proba(X) - net.predict_proba(X)).mean() < 0.02
    assert model.predict_proba(100 * X).max() < 0.6
    X, y = waves(90)
    net = seeded(regressor(MLP), X, y[:, None])
    model = LaplaceRegressor(FrozenEstimator(net), **settings).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    assert_allclose(mean, net.predict(X)[:, 0], rtol=1e-5)
    assert np.median(std) == pytest.approx(model.sigma_noise_, rel=0.05)


@MAY_BE_ALONE
@pytest.mark.parametrize("n_targets", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_their_noise_is_that_of_cross_validation(n_targets):
    """The network has one layer, so nothing else has seen the samples."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 12)).astype(np.float32)
    Y = (X[:, :n_targets] + 0.3 * rng.normal(size=(60, n_targets))).astype(np.float32)
    net = seeded(regressor(nn.Linear(12, n_targets), max_epochs=300, lr=0.1), X, Y)
    model = LaplaceRegressor(FrozenEstimator(net), sigma_noise="auto", random_state=0)
    model.fit(X, Y)
    A = np.column_stack([X, np.ones(60)])
    gamma = np.trace(A @ np.linalg.pinv(A)) / 60
    expected = np.sqrt(np.mean((Y - net.predict(X)) ** 2, 0)) / (1 - gamma)
    assert_allclose(model.sigma_noise_, expected.squeeze(), rtol=1e-2)


@pytest.mark.slow
@MAY_BE_ALONE
@pytest.mark.parametrize(("n", "n_epochs"), [(30, 200), (200, 30)])
def test_intervals_around_frozen_nets_cover(n, n_epochs):
    """Residuals of training samples are far smaller than residuals of new samples.

    Only new samples reveal that a network has memorised its training samples.
    """
    X, y, X_test, y_test = noise(n)
    kind = partial(MLP, n_in=8, n_out=1, width=64)
    settings = {"max_epochs": n_epochs, "lr": 0.02, "optimizer": torch.optim.Adam}
    net = FrozenEstimator(seeded(regressor(kind, **settings), X, y[:, None]))
    model = LaplaceRegressor(net, random_state=0).fit(X, y)
    assert coverage(model, X_test, y_test) >= 0.8
    noise_of_training = LaplaceRegressor(net, **SEEN).fit(X, y)
    assert coverage(noise_of_training, X_test, y_test) < 0.8


# -------------------------------------------------------------- little is held out
@pytest.mark.parametrize("n", [1, 3, 7])
def test_few_held_out_samples_do_not_agree_by_chance(n):
    """Their noise is at least the noise of the training samples, and is widened."""
    X, y = waves()
    net = FrozenEstimator(seeded(regressor(), X[:40], y[:40, None]))
    residual = np.std(y[:40] - net.predict(X[:40])[:, 0])
    levels = []
    for seed in range(3):
        rows = 40 + np.random.default_rng(seed).permutation(20)[:n]
        model = LaplaceRegressor(net, random_state=0)
        model.fit(X[:40], y[:40], X_val=X[rows], y_val=y[rows])
        levels.append(model.sigma_noise_)
    assert min(levels) >= 0.9 * residual


# --------------------------------------------------------------- where there are none
class Deep(nn.Sequential):
    """A network whose weights are drawn in ``fit``."""

    def __init__(self):
        layers = nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
        super().__init__(*layers, nn.Linear(64, 1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2, 3])
def test_refitted_networks_do_not_reach_far_between_samples(seed):
    """Under the prior of best score, means between samples are off by five or more."""
    rng = np.random.default_rng(seed)
    x = 4 * rng.uniform(-1, 1, 450)
    x = x[np.abs(x) > 1.3][:150, None].astype("float32")
    y = np.sin(1.5 * x[:, 0]) + 0.2 * rng.standard_normal(150)
    settings = {"lr": 1e-3, "batch_size": 64, "max_epochs": 100}
    net = NeuralNetRegressor(Deep, **QUICK | settings | {"train_split": ValidSplit(5)})
    model = LaplaceRegressor(net, random_state=seed).fit(x, y.astype("float32"))
    between = np.linspace(-1.3, 1.3, 50, dtype="float32")[:, None]
    error = model.predict(between) - np.sin(1.5 * between[:, 0])
    assert model.posterior_.is_refitted
    assert np.sqrt(np.mean(error**2)) < 1.5


# ------------------------------------------------------------------ the evidence
@pytest.mark.slow
def test_noise_of_held_out_samples_under_a_prior_of_the_evidence():
    net = overfitting_net(train_split=ValidSplit(5))
    settings = {"prior_precision": "marglik", "random_state": 0}
    found = []
    for seed in range(7, -1, -1):  # forty residuals: one coverage is off by .03
        X, y, X_test, y_test = noise(200, seed)
        model = LaplaceRegressor(net, **settings).fit(X, y)
        found.append(coverage(model, X_test, y_test))
    assert 0.85 <= np.mean(found) <= 0.95
    same = LaplaceRegressor(net, sigma_noise="validation", **settings).fit(X, y)
    assert same.sigma_noise_ == model.sigma_noise_
    evidence = LaplaceRegressor(net, sigma_noise="marglik", **settings)
    with pytest.warns(UserWarning, match="worse than the network alone"):
        evidence.fit(X, y)
    assert evidence.prior_precision_ == pytest.approx(model.prior_precision_)
    assert evidence.sigma_noise_ < 0.7 * model.sigma_noise_


# ------------------------------------------------------------------- several columns
@pytest.mark.slow
@pytest.mark.parametrize("prior", ["auto", "marglik"])
@pytest.mark.parametrize("n", [40, 200])
def test_columns_have_noise_levels_of_their_own(n, prior):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n + 500, 2)).astype("float32")
    y = np.column_stack([X[:, 0], X[:, 1]]) + rng.normal(0, [0.2, 1.6], (n + 500, 2))
    y = y.astype("float32")
    net = regressor(MLP, module__n_out=2, train_split=ValidSplit(5))
    net.set_params(max_epochs=100, optimizer=torch.optim.Adam, lr=0.02)
    model = LaplaceRegressor(net, prior_precision=prior, random_state=0)
    model.fit(X[:n], y[:n])
    assert model.sigma_noise_.shape == (2,)
    assert 4 < model.sigma_noise_[1] / model.sigma_noise_[0] < 16
    interval = model.predict_interval(X[n:], coverage=0.9)
    covered = (interval[..., 0] <= y[n:]) & (y[n:] <= interval[..., 1])
    assert (covered.mean(0) >= 0.75).all()
    assert (covered.mean(0) <= 0.97).all()
