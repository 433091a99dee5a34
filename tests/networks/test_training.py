"""Training: skorch's behaviour is kept, and nothing is left behind."""

import pickle

import numpy as np
import pytest
import torch
from nets import (
    BatchNormMLP,
    RecordTraining,
    SoftmaxMLP,
    binary_classifier,
    blobs,
    classifier,
    regressor,
    waves,
)
from sklearn.base import clone
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, EpochScoring
from skorch.dataset import Dataset, ValidSplit
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)

from sklaplace import (
    DeepEnsembleClassifier,
    LaplaceClassifier,
    LaplaceRegressor,
    MCDropoutClassifier,
    SWAGClassifier,
    VariationalClassifier,
)
from sklaplace.core.random import private_rng
from sklaplace.data.dataset import TrainingData
from sklaplace.networks.training import training_run

FIXED = {"prior_precision": 1.0, "random_state": 0}
WEIGHTS = np.linspace(0.5, 2, 60)
X, Y = blobs()
weighted_or_not = pytest.mark.parametrize("weights", [None, WEIGHTS])


# ----------------------------------------------------------- skorch's own behaviour
def states(net):
    return [value.clone() for value in net.module_.state_dict().values()]


class Sees(Callback):
    """Callback that keeps its arguments from the beginning of training."""

    def on_train_begin(self, net, X=None, y=None, **kwargs):
        self.X_, self.y_ = X, y


def skorch_defaults(*callbacks, **settings):
    """Return a net with skorch's default split and scores."""
    options = {"max_epochs": 3, "verbose": 0, "callbacks": [*callbacks], **settings}
    return NeuralNetClassifier(SoftmaxMLP, **options)


class TestFit:
    @pytest.mark.parametrize("weights", [None, np.ones(60)])
    def test_is_that_of_skorch(self, weights):
        net = classifier(BatchNormMLP, batch_size=16, iterator_train__shuffle=True)
        model = LaplaceClassifier(net, **FIXED).fit(X, Y, sample_weight=weights)
        with private_rng(model._seed):
            # the estimator peeks at the module, and at rows, outside of this state
            own = clone(net).fit(X, Y)
        for found, expected in zip(states(model.estimator_), states(own), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    @weighted_or_not
    def test_callbacks_see_the_rows(self, weights):
        net = classifier(callbacks=[("sees", Sees())])
        model = LaplaceClassifier(net, **FIXED).fit(X, Y, sample_weight=weights)
        seen = dict(model.estimator_.callbacks_)["sees"]
        np.testing.assert_array_equal(seen.X_, X)
        np.testing.assert_array_equal(seen.y_, Y)

    def test_nothing_is_left_on_the_net(self):
        model = LaplaceClassifier(classifier(), **FIXED).fit(X, Y, WEIGHTS)
        own = classifier().fit(X, Y)
        assert type(model.estimator_) is NeuralNetClassifier
        assert sorted(vars(model.estimator_)) == sorted(vars(own))
        assert model.estimator_.criterion_.reduction == "mean"
        assert model.estimator_.train_split is None
        # and it is usable by itself
        net = pickle.loads(pickle.dumps(model.estimator_))
        np.testing.assert_array_equal(net.predict(X), model.estimator_.predict(X))
        net.partial_fit(X, Y)


# ------------------------------------------------------------------- whole batches
class RowByRow(DataLoader):
    """A loader of the user's, which torch fills row by row."""


class Flat(nn.Module):
    """A module with batch norm and dropout, for inputs of any shape and dtype."""

    def __init__(self, n_features=2, n_out=3):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(n_features, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.Linear(8, n_out),
        )

    def forward(self, x):
        return self.layers(x.flatten(1).float())


class Convolutions(nn.Module):
    """A module whose results depend on the memory layout of images."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x.view(len(x), -1)  # fails unless the batch is contiguous
        return self.head(self.layers(x).flatten(1))


def trained(net, X, y, weights=None, **loaders):
    """Return the states and losses of a trained net, and torch's random state."""
    options = {"max_epochs": 3, "batch_size": 7, "iterator_train__shuffle": True}
    # samplers and generators have a state, so that each training has its own
    made = {k: v() if k in MADE else v for k, v in loaders.items()}
    net = clone(net).set_params(**options | made)
    with private_rng(0):
        with training_run(net, TrainingData(X, y, weights)):
            net.fit(X, y)
        names = "train_loss", "valid_loss"
        losses = [net.history[:, "batches", :, name] for name in names]
        return states(net), losses, torch.rand(3)


def assert_same_training(net, X, y, weights=None, **loaders):
    fast = trained(net, X, y, weights, **loaders)
    names = {"iterator_train": RowByRow, "iterator_valid": RowByRow}
    slow = trained(net, X, y, weights, **loaders | names)
    assert all(map(torch.equal, fast[0], slow[0]))
    assert fast[1] == slow[1]
    assert torch.equal(fast[2], slow[2])


MADE = [
    f"iterator_train__{name}"
    for name in ("generator", "sampler", "batch_sampler", "collate_fn")
]
OPTIONS = {
    "default": {},
    "in order": {"iterator_train__shuffle": False},
    "drop_last": {"iterator_train__drop_last": True},
    "generator": {"iterator_train__generator": torch.Generator},
    "all rows": {"batch_size": -1},
    "sampler": {
        "iterator_train__sampler": lambda: WeightedRandomSampler(range(1, 49), 30),
        "iterator_train__shuffle": False,
    },
    "batch_sampler": {
        "iterator_train__batch_sampler": lambda: BatchSampler(
            RandomSampler(range(48)), 5, drop_last=False
        ),
        "iterator_train__batch_size": 1,
        "iterator_train__shuffle": False,
    },
    "workers": {"iterator_valid__num_workers": 1},
    "collate_fn": {
        "iterator_train__collate_fn": lambda: (
            lambda rows: [
                2 * torch.tensor(np.stack([x for x, _ in rows])),
                torch.tensor([y for _, y in rows]),
            ]
        )
    },
}


class TestWholeBatches:
    """Reading batches at once changes no weight, loss or random number."""

    net = NeuralNetClassifier(
        Flat,
        criterion=nn.CrossEntropyLoss,
        lr=0.1,
        verbose=0,
        train_split=ValidSplit(5),
    )

    @weighted_or_not
    @pytest.mark.parametrize("name", OPTIONS)
    def test_options_of_loaders(self, name, weights):
        assert_same_training(self.net, X, Y, weights, **OPTIONS[name])

    @pytest.mark.parametrize(
        "dtype", ["f2", "f4", "f8", "u1", "i1", "i2", "i4", "i8", "?"]
    )
    def test_dtypes(self, dtype):
        assert_same_training(self.net, (4 * X).astype(dtype), Y)

    @pytest.mark.parametrize("shape", [(60, 1), (60, 2, 3), (60, 3, 2, 2)])
    def test_shapes(self, shape):
        inputs = np.random.default_rng(0).normal(size=shape).astype("f4")
        n_features = int(np.prod(shape[1:]))
        net = clone(self.net).set_params(module__n_features=n_features)
        assert_same_training(net, inputs, Y)

    @pytest.mark.parametrize("order", ["transposed", "F", "strided"])
    def test_memory_layouts(self, order):
        images = np.random.default_rng(0).normal(size=(60, 6, 6, 3)).astype("f4")
        images = {
            "transposed": images.transpose(0, 3, 1, 2),
            "F": np.asfortranarray(np.moveaxis(images, 3, 1).copy()),
            "strided": np.repeat(np.moveaxis(images, 3, 1), 2, 3)[..., ::2],
        }[order]
        assert not images.flags.c_contiguous
        net = clone(self.net).set_params(module=Convolutions)
        assert_same_training(net, images, Y)

    @pytest.mark.parametrize("kind", [list, tuple, set, iter, np.array, torch.tensor])
    def test_batch_samplers(self, kind):
        class Batched(BatchSampler):
            def __iter__(self):
                return map(kind, super().__iter__())

        sampler = Batched(RandomSampler(range(48)), 5, drop_last=False)
        loader = {
            "iterator_train__batch_sampler": lambda: sampler,
            "iterator_train__batch_size": 1,
            "iterator_train__shuffle": False,
        }
        if kind is not torch.tensor:  # skorch's datasets refuse tensors
            assert_same_training(self.net, X, Y, **loader)
        trained(self.net, X, Y, **loader)

    def test_loaders_have_the_dataset_of_the_net(self):
        class Reading(NeuralNetClassifier):
            def run_single_epoch(self, iterator, training, prefix, step_fn, **kwargs):
                # loaders of the user's own
                again = DataLoader(iterator.dataset, batch_size=8)
                super().run_single_epoch(again, training, prefix, step_fn, **kwargs)
                iterator.collate_fn = lambda rows: seen.extend(rows) or rows
                next(iter(iterator))

        seen = []
        trained(Reading(**self.net.get_params(deep=False)), X, Y)
        assert len(seen) == 3 * 2 * 7  # of both loaders, in each epoch

    @pytest.mark.parametrize("y_shape", [(60, 1), (60, 3)])
    @weighted_or_not
    def test_real_targets(self, y_shape, weights):
        y = np.random.default_rng(0).normal(size=y_shape).astype("f4")
        net = regressor(
            Flat, module__n_out=y_shape[1], train_split=ValidSplit(5), lr=0.01
        )
        assert_same_training(net, X, y, weights)

    @weighted_or_not
    def test_datasets(self, weights):
        rows = Subset(Dataset(X, Y), list(range(0, 60, 2)))
        some = None if weights is None else weights[::2]
        assert_same_training(self.net, rows, Y[::2], some)

    @pytest.mark.parametrize(
        ("kind", "settings"),
        [
            (LaplaceClassifier, FIXED),
            (DeepEnsembleClassifier, {"n_estimators": 2, "random_state": 0}),
            (MCDropoutClassifier, {"n_samples": 5, "random_state": 0}),
            (SWAGClassifier, {"n_snapshots": 3, "n_samples": 5, "random_state": 0}),
            (VariationalClassifier, {"n_samples": 5, "random_state": 0}),
        ],
    )
    def test_estimators(self, kind, settings):
        slow = {"iterator_train": RowByRow, "iterator_valid": RowByRow}
        fast, slow = (
            kind(clone(self.net).set_params(max_epochs=3, **loaders), **settings)
            .fit(X, Y)
            .predict_proba(X)
            for loaders in ({}, slow)
        )
        np.testing.assert_array_equal(fast, slow)

    def test_rows_of_arrays_are_not_read_one_by_one(self, monkeypatch):
        monkeypatch.setattr(Dataset, "__getitem__", None)
        trained(self.net, X, Y, WEIGHTS)

    def test_a_dataset_class_of_the_user_reads_every_row(self):
        class Rows(Dataset):
            n_reads = 0

            def __getitem__(self, index):
                Rows.n_reads += 1
                return super().__getitem__(index)

        trained(clone(self.net).set_params(dataset=Rows), X, Y)
        assert Rows.n_reads >= 3 * 60


class TestWeightedLoss:
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("kind", ["classifier", "binary", "regressor"])
    def test_is_the_weighted_mean_or_sum(self, kind, reduction):
        make, estimator, (X, y) = {
            "classifier": (classifier, LaplaceClassifier, blobs()),
            "binary": (binary_classifier, LaplaceClassifier, (blobs()[0], 1 * (Y > 0))),
            "regressor": (regressor, LaplaceRegressor, waves()),
        }[kind]
        net = make(max_epochs=1, lr=0.0, criterion__reduction=reduction)
        settings = {"sigma_noise": 0.2} if kind == "regressor" else {}
        model = estimator(net, **FIXED, **settings).fit(X, y, sample_weight=WEIGHTS)
        trained = model.estimator_
        with torch.no_grad():
            f = trained.infer(torch.tensor(X))
        targets = torch.tensor(y)
        if kind != "classifier":
            targets = targets.to(f.dtype).reshape(f.shape)
        losses = type(trained.criterion_)(reduction="none")(f, targets)
        losses = losses.reshape(60, -1).sum(1)
        total = (losses * torch.tensor(WEIGHTS)).sum()
        expected = total / WEIGHTS.sum() if reduction == "mean" else total
        assert trained.history[-1, "batches", 0, "train_loss"] == pytest.approx(
            float(expected), rel=1e-5
        )

    def test_batches_share_one_normaliser(self):
        # so that the expected step is that of the whole data, whatever the batches
        heavy = np.where(np.arange(60) < 10, 5.0, 0.5)
        options = {"lr": 1e-3, "batch_size": 10, "optimizer": torch.optim.SGD}
        net = classifier(max_epochs=1, **options)
        model = LaplaceClassifier(net, **FIXED).fit(X, Y, sample_weight=heavy)
        losses = model.estimator_.history[-1, "batches", :, "train_loss"]
        # the first batch has four times the mean weight, the others .4 times
        assert losses[0] == pytest.approx(4 / 0.4 * np.mean(losses[1:]), rel=0.5)

    def test_validation_rows_of_skorch_are_not_trained_on(self):
        RecordTraining.steps.clear()
        net = skorch_defaults(RecordTraining(), max_epochs=1)
        LaplaceClassifier(net, random_state=0).fit(X, Y, sample_weight=WEIGHTS)
        assert sum(RecordTraining.steps) == 48


@pytest.mark.parametrize("on_train", [False, True])
def test_uncached_scores_see_weighted_rows(on_train):
    scoring = EpochScoring("accuracy", on_train=on_train, use_caching=False, name="s")
    net = classifier(callbacks=[scoring], train_split=ValidSplit(4))
    model = LaplaceClassifier(net, **FIXED).fit(X, Y, sample_weight=WEIGHTS)
    assert all(0 <= score <= 1 for score in model.estimator_.history[:, "s"])
