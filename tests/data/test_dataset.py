"""Batches of datasets: every sample occurs once, with its target and weight."""

import numpy as np
import pytest
import torch
from nets import blobs, classifier, seeded
from sklearn.frozen import FrozenEstimator
from skorch.dataset import Dataset
from torch.utils.data import DataLoader, Subset

from sklaplace import LaplaceClassifier
from sklaplace.data.dataset import Batches, RowDataset, take_rows

FIXED = {"prior_precision": 1.0, "random_state": 0}
WEIGHTS = np.linspace(0.5, 2, 60)
ODD = list(range(1, 60, 2))
CHOICES = [
    {"shuffle": True},
    {"drop_last": True},
    {"sampler": ODD},
    {"batch_sampler": [ODD]},
    {"drop_last": True, "num_workers": 0, "timeout": 0},
]
X, Y = blobs()
DATA = Dataset(X, Y)


class Doubled(DataLoader):
    """A user-defined loader that doubles the inputs of the dataset."""

    def __iter__(self):
        for X, y in super().__iter__():
            yield 2 * X, y


class Shifted(Dataset):
    """A user-defined dataset that adds one to every input."""

    def transform(self, X, y):
        X, y = super().transform(X, y)
        return X + 1, y


class TestBatches:
    def all_rows(self, net, dataset, batch_size):
        X, y, w = zip(*Batches(net, dataset, batch_size), strict=True)
        weights = None if w[0] is None else torch.cat(w)
        return torch.cat(X), torch.cat(y), weights

    @pytest.mark.parametrize("batch_size", [1, 7, 60, 100])
    def test_hold_every_row_once_in_order(self, batch_size):
        net = classifier(iterator_train__shuffle=True)
        found = self.all_rows(net, DATA, batch_size)
        np.testing.assert_array_equal(found[0], X)
        np.testing.assert_array_equal(found[1], Y)
        assert found[2] is None

    def test_hand_out_copies(self):
        (x, _, _), *_ = Batches(classifier(), DATA, 60)
        x.zero_()
        assert np.abs(X).max() > 0

    @pytest.mark.parametrize(
        ("rows", "words"),
        [(range(50), "50 of 60"), ([*range(60), 0], "more than 60")],
    )
    def test_refuse_loaders_that_choose_rows(self, rows, words):
        class Choosing(DataLoader):
            def __init__(self, dataset, **options):
                super().__init__(Subset(dataset, rows), **options)

        with pytest.raises(ValueError, match=f"iterator_valid=Choosing yields {words}"):
            list(Batches(classifier(iterator_valid=Choosing), DATA, 7))

    def test_subsets(self):
        inner = Subset(DATA, list(range(10, 30)))
        outer = Subset(inner, [3, 1])
        found, *_ = self.all_rows(classifier(), outer, 5)
        np.testing.assert_array_equal(found, X[[13, 11]])

    @pytest.mark.parametrize("weights", [None, WEIGHTS[:3]])
    def test_targets_of_a_subset_belong_to_its_rows(self, weights):
        rows = [50, 1, 2]
        inner = Subset(DATA, rows)
        dataset = RowDataset(inner, Y[rows], weights)
        found = self.all_rows(classifier(), dataset, 2)
        np.testing.assert_array_equal(found[0], X[rows])
        np.testing.assert_array_equal(found[1], Y[rows])
        if weights is not None:
            np.testing.assert_array_equal(found[2], weights)
        last = Subset(dataset, [2])
        found = self.all_rows(classifier(), last, 2)
        np.testing.assert_array_equal(found[0], X[[2]])
        np.testing.assert_array_equal(found[1], Y[[2]])

    def test_loaders_of_ones_own_are_used(self):
        found, *_ = self.all_rows(classifier(iterator_valid=Doubled), DATA, 7)
        np.testing.assert_array_equal(found, 2 * X)

    def test_data_sets_of_ones_own_are_used(self):
        found, *_ = self.all_rows(classifier(), Shifted(X, Y), 7)
        np.testing.assert_array_equal(found, X + 1)

    def test_subsets_of_ones_own_are_used(self):
        class Negated(Subset):
            def __getitem__(self, index):
                X, y = super().__getitem__(index)
                return -X, y

            def __getitems__(self, indices):
                return [self[index] for index in indices]

        found, *_ = self.all_rows(classifier(), Negated(DATA, [5, 3]), 7)
        np.testing.assert_array_equal(found, -X[[5, 3]])

    @pytest.mark.parametrize("loader", [DataLoader, Doubled])
    def test_draw_nothing(self, loader, rng_untouched):
        net = classifier(iterator_valid=loader, iterator_valid__timeout=0)
        list(Batches(net, DATA, 7))

    @pytest.mark.parametrize("loader", [DataLoader, Doubled])
    @pytest.mark.parametrize("option", CHOICES, ids=list)
    def test_hold_every_row_whatever_the_loader_would_choose(self, option, loader):
        settings = {f"iterator_valid__{name}": v for name, v in option.items()}
        net = classifier(iterator_valid=loader, **settings)
        found = self.all_rows(net, DATA, 7)
        np.testing.assert_array_equal(found[0], X * (2 if loader is Doubled else 1))
        np.testing.assert_array_equal(found[1], Y)


@pytest.mark.parametrize("parameter", ["iterator_valid", "dataset"])
def test_estimator_sees_data_through_the_nets_own_classes(parameter):
    own = {"iterator_valid": Doubled, "dataset": Shifted}[parameter]
    moved = {"iterator_valid": lambda X: 2 * X, "dataset": lambda X: X + 1}[parameter]
    plain = seeded(classifier(), X, Y)
    net = classifier(**{parameter: own}).initialize()
    net.module_.load_state_dict(plain.module_.state_dict())
    model = LaplaceClassifier(FrozenEstimator(net), **FIXED).fit(X, Y)
    expected = LaplaceClassifier(FrozenEstimator(plain), **FIXED).fit(moved(X), Y)
    np.testing.assert_allclose(
        model.predict_proba(X), expected.predict_proba(moved(X)), atol=1e-6
    )


def test_take_rows():
    X, _ = blobs()
    rows = np.array([4, 2])
    np.testing.assert_array_equal(take_rows(X, rows), X[rows])
    np.testing.assert_array_equal(take_rows({"a": X}, rows)["a"], X[rows])
    assert len(take_rows(Dataset(X), rows)) == 2
