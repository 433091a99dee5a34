import tracemalloc

import numpy as np
import pytest

from sklaplace.data.split import (
    MIN_ROWS,
    groups_of_copies,
    hash_folds,
    hash_split,
    row_keys,
    sample_keys,
)

pytestmark = pytest.mark.usefixtures("rng_untouched")


def data(n=200, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)).astype(np.float32), rng.integers(3, size=n)


def split(X, y, fraction=0.2, seed=0, *, stratify=True):
    return hash_split(row_keys(X, len(y), seed), y, fraction, stratify=stratify)


def test_parts_are_disjoint_and_complete_and_arguments_stay():
    X, y = data()
    before = X.copy(), y.copy()
    train, held = split(X, y)
    assert sorted([*train, *held]) == list(range(200))
    np.testing.assert_array_equal(X, before[0])
    np.testing.assert_array_equal(y, before[1])


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5])
def test_share_of_every_class(fraction):
    X, y = data(300)
    _, held = split(X, y, fraction)
    for label in range(3):
        n = (y == label).sum()
        assert (y[held] == label).sum() == round(fraction * n)


@pytest.mark.parametrize("stratify", [True, False])
def test_order_of_rows_does_not_matter(stratify):
    X, y = data()
    order = np.random.default_rng(1).permutation(200)
    _, held = split(X, y, stratify=stratify)
    _, permuted = split(X[order], y[order], stratify=stratify)
    assert sorted(order[permuted]) == list(held)


def test_copies_stay_together_and_do_not_change_the_split():
    """A row of weight two counts as two rows."""
    X, y = data()
    copies = np.repeat(np.arange(200), np.arange(200) % 3 + 1)
    train, held = split(X, y)
    train_copies, held_copies = split(X[copies], y[copies])
    assert set(copies[held_copies]) == set(held)
    assert set(copies[train_copies]) == set(train)


def test_replicates_stay_together_and_targets_decide_nothing():
    X, y = data()
    twice = np.concatenate([X, X])
    _, held = split(twice, np.concatenate([y, y]))
    assert {n % 200 for n in held} == {n for n in held if n < 200}
    found, same = (split(X, a, stratify=False)[1] for a in (y, 2.0 * y + 1))
    np.testing.assert_array_equal(found, same)


def test_seeds_give_other_splits():
    X, y = data()
    splits = [set(split(X, y, seed=seed)[1]) for seed in (0, 0, 1, 2**31 - 1)]
    assert splits[0] == splits[1]
    assert len({frozenset(held) for held in splits}) == 3
    assert all(len(held) == len(splits[0]) for held in splits)


def test_layout_in_memory_and_signs_of_zero_do_not_matter():
    X, y = data()
    X[::2, 0] = 0.0
    negative = X.copy()
    negative[::2, 0] = -0.0
    for twin in (negative, np.asfortranarray(X), X[:, ::-1][:, ::-1]):
        np.testing.assert_array_equal(split(X, y)[1], split(twin, y)[1])


def test_other_rows_are_told_apart_by_position():
    _, y = data()
    _, held = split({"a": None}, y)
    assert 35 < len(held) < 45
    np.testing.assert_array_equal(held, split({"b": None}, y)[1])


@pytest.mark.parametrize("n", [1, 10, MIN_ROWS - 1])
def test_few_rows_are_all_needed(n):
    X, y = data(n)
    assert split(X, y) is None
    copies = np.arange(n).repeat(100)
    assert split(X[copies], y[copies]) is None


def test_no_class_is_held_out_whole():
    X, y = data()
    y[:] = 0
    y[:3] = 1
    train, _ = split(X, y, fraction=0.9)
    assert set(y[train]) == {0, 1}


@pytest.mark.parametrize("jitter", [0.0, 1e-9, 1e-6])
def test_near_copies_stay_together(jitter):
    X, _ = data()
    rng = np.random.default_rng(1)
    rows = rng.permutation(np.repeat(np.arange(200), 5))
    copies = X[rows] * [1.0, 1e6, 1e-6]
    copies += jitter * copies.std(axis=0) * rng.uniform(-1, 1, size=copies.shape)
    y = np.zeros(1000)
    train, held = split(copies, y, stratify=False)
    assert not {*rows[train]} & {*rows[held]}
    for seen, unseen in hash_folds(row_keys(copies, 1000, 0), y, 5, stratify=False):
        assert not {*rows[seen]} & {*rows[unseen]}
    assert len(np.unique(row_keys(copies, 1000, 0))) == 200


def test_rows_of_one_crowded_column_are_no_copies():
    X = np.random.default_rng(0).uniform(size=(20_000, 1))
    assert np.bincount(groups_of_copies(X)).max() < 5


def test_single_and_constant_rows():
    assert groups_of_copies(np.ones((1, 2))).tolist() == [0]
    assert groups_of_copies(np.ones((3, 2))).tolist() == [0, 0, 0]


# ------------------------------------------------------------------------- groups
@pytest.mark.parametrize("stratify", [True, False])
def test_groups_never_cross_and_the_order_does_not_matter(stratify):
    X, y = data(600)
    rng = np.random.default_rng(0)
    groups = np.array([f"patient {k}" for k in rng.integers(80, size=600)])
    y = rng.integers(3, size=600)  # groups have several classes

    def parts(rows):
        keys = row_keys(X[rows], 600, 0, groups[rows])
        held_out = hash_split(keys, y[rows], 0.2, stratify=stratify)
        pairs = [held_out, *hash_folds(keys, y[rows], 5, stratify=stratify)]
        return [[rows[part] for part in pair] for pair in pairs]

    same = parts(np.arange(600)), parts(rng.permutation(600))
    for (train, held), (train_2, held_2) in zip(*same, strict=True):
        assert sorted([*train, *held]) == list(range(600))
        assert not {*groups[train]} & {*groups[held]}
        assert {*train} == {*train_2}
        assert {*held} == {*held_2}
        assert 8 <= len({*groups[held]}) <= 24


def test_labels_of_groups_have_equal_keys_in_all_integer_types():
    groups = np.array([3, 1, 3])
    keys = row_keys(np.eye(3), 3, 0, groups)
    assert keys[0] == keys[2] != keys[1]
    np.testing.assert_array_equal(keys, row_keys({}, 3, 0, groups.astype(np.int8)))


def test_copies_are_found_in_blocks_of_columns(monkeypatch):
    X = data(60)[0][np.arange(120) % 60].copy()
    X += 1e-8 * np.random.default_rng(0).standard_normal(X.shape)
    found = groups_of_copies(X)
    assert len(np.unique(found)) == 60
    monkeypatch.setattr("sklaplace.data.split._BLOCK", 1)
    np.testing.assert_array_equal(groups_of_copies(X), found)


def test_memory_for_copies_does_not_grow_with_columns():
    X = np.ones((500, 30_000), dtype=np.float32)
    X[:, 0] = np.arange(500) // 2
    tracemalloc.start()
    found = groups_of_copies(X)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(found, np.arange(500) // 2)
    assert peak < 2 * X.nbytes


# --------------------------------------------------------------------- replicates
def test_replicates_have_keys_of_their_own_and_copies_share_them():
    rng = np.random.default_rng(0)
    X = np.eye(4)[np.repeat(np.arange(4), 20)]
    y = rng.normal(size=80)
    assert len(np.unique(sample_keys(X, y, 0, None))) == 80
    copies = rng.permutation(np.repeat(np.arange(80), 3))
    keys = sample_keys(X[copies], y[copies], 0, None)
    assert len(np.unique(keys)) == 80
    np.testing.assert_array_equal(keys, sample_keys(X, y, 0, None)[copies])
    jitter = 1e-9 * rng.normal(size=240)
    assert len(np.unique(sample_keys(X[copies], y[copies] + jitter, 0, None))) == 80


def test_equal_labels_of_replicates_are_no_copies():
    rng = np.random.default_rng(0)
    X = np.eye(4)[np.repeat(np.arange(4), 20)]
    y = rng.integers(2, size=80)
    order = rng.permutation(80)
    keys = sample_keys(X, y, 0, None)
    assert len(np.unique(keys)) == 80
    assert set(keys) == set(sample_keys(X[order], y[order], 0, None))
    for seen, held_out in hash_folds(keys, y, 5, stratify=True):
        assert {*map(tuple, X[held_out])} <= {*map(tuple, X[seen])}


def test_copies_with_a_few_wrong_labels_are_copies():
    X, y = data(100)
    X, y = np.repeat(X, 3, axis=0), np.repeat(y, 3)
    y[::30] = (y[::30] + 1) % 3
    keys = sample_keys(X, y, 0, None)
    np.testing.assert_array_equal(keys, row_keys(X, 300, 0))
