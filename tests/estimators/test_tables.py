"""Data frames without preprocessing, and sparse matrices."""

import datetime as dt
import pickle
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pandas as pd
import polars as pl
import pytest
from nets import classifier, regressor
from refusals import refused, refused_fit
from scipy import sparse
from sklearn import config_context
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from sklaplace import (
    DeepEnsembleClassifier,
    LaplaceClassifier,
    LaplaceClassifierCV,
    LaplaceRegressor,
    MCDropoutRegressor,
    SWAGClassifier,
    VariationalRegressor,
)
from sklaplace.data.table import Table

N = 120
pytestmark = pytest.mark.filterwarnings("ignore:There are no held-out samples")


def columns(seed=0):
    """Return columns of all kinds, as lists."""
    rng = np.random.default_rng(seed)
    return {
        "number": rng.normal(size=N).tolist(),
        "gap": [None if n % 5 == 0 else float(n % 7) for n in range(N)],
        "string": rng.choice(["a", "b", "c"], N).tolist(),
        "hole": [[None, "u", "v"][n % 3] for n in range(N)],
        "bool": (rng.random(N) > 0.5).tolist(),
        "maybe": [[None, True, False][n % 3] for n in range(N)],
        "name": [f"row {n}" for n in range(N)],
        "nothing": [None] * N,
    }


def in_pandas(values):
    frame = pd.DataFrame(values).astype({"string": "category"})
    return frame.assign(level=pd.Categorical([1, 2, 3] * (N // 3)))


def in_polars(values):
    return pl.DataFrame(values).with_columns(pl.col("string").cast(pl.Categorical))


TABLE = in_pandas(columns())
NEW = in_pandas(columns(1))
LABELS, NEW_LABELS = (
    (rows["number"] + (rows["string"] == "a") > 0.3).to_numpy() for rows in (TABLE, NEW)
)
NUMBERS = TABLE["number"].to_numpy() + 2.0 * (TABLE["string"] == "a").to_numpy()
MODELS = [
    LaplaceClassifier(random_state=0),
    LaplaceRegressor(random_state=0),
    LaplaceClassifierCV(prior_precisions=[1.0, 10.0], cv=2, random_state=0),
    DeepEnsembleClassifier(n_estimators=2, random_state=0),
    SWAGClassifier(n_snapshots=5, random_state=0),
    MCDropoutRegressor(random_state=0),
    VariationalRegressor(random_state=0),
]


def targets(model):
    return NUMBERS if "Regressor" in type(model).__name__ else LABELS


@pytest.fixture(scope="module")
def fitted():
    return LaplaceClassifier(random_state=0).fit(TABLE, LABELS)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("make", [in_pandas, in_polars])
def test_estimators_take_tables(model, make):
    rows = make(columns())
    model = clone(model).fit(rows, targets(model))
    assert model.score(rows, targets(model)) > 0.5
    assert model.n_features_in_ == rows.shape[1]
    assert list(model.feature_names_in_) == list(rows.columns)
    assert len(model.predict(make(columns(1)))) == N


def test_libraries_agree():
    models = [LaplaceClassifier(random_state=0) for _ in range(2)]
    found = [
        model.fit(rows, LABELS).predict_proba(rows)
        for model, rows in zip(
            models,
            [in_pandas(columns()).drop(columns="level"), in_polars(columns())],
            strict=True,
        )
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("kind", [pd.DataFrame, pl.DataFrame])
@pytest.mark.parametrize("net", [None, classifier(module__n_out=2)])
def test_numbers_give_the_results_of_their_array(net, kind):
    X = np.random.default_rng(0).normal(size=(N, 2)).astype("f4")
    expected = LaplaceClassifier(net, random_state=0).fit(X, LABELS).predict_proba(X)
    rows = kind(dict(zip("ab", X.T, strict=True)))
    model = LaplaceClassifier(net, random_state=0).fit(rows, LABELS)
    # frames keep columns together, so that sums are taken in another order
    np.testing.assert_allclose(
        model.predict_proba(rows), expected, rtol=1e-9 * bool(net)
    )
    with pytest.warns(UserWarning, match="valid feature names"):
        found = model.predict_proba(X)
    np.testing.assert_allclose(found, expected, rtol=1e-9 * bool(net))
    assert model.feature_names_in_.tolist() == ["a", "b"]
    with pytest.raises(ValueError, match="feature names"):
        model.predict(rows[["b", "a"]])


class TestSurprises:
    @pytest.mark.parametrize(
        "seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2))]
    )
    def test_new_levels(self, seed):
        model = LaplaceRegressor(random_state=seed).fit(TABLE, NUMBERS)
        scores, stds, means = [], [], []
        for rows in (NEW, NEW.assign(string="new"), NEW.assign(string="b")):
            mean, std = model.predict(rows, return_std=True)
            means.append(mean)
            stds.append(std)
            scores.append(model.score_samples(rows))
        assert (scores[1] < scores[2]).mean() > 0.9
        assert (stds[1] > stds[2]).mean() > 0.9
        # the mean is that of an average level
        assert np.abs(means[1] - means[2]).max() < np.ptp(NUMBERS)

    def test_missing_values_in_a_complete_column(self, fitted):
        rows = NEW.assign(number=np.nan)
        at_median = NEW.assign(number=TABLE["number"].median())
        found, expected = (fitted.score_samples(part) for part in (rows, at_median))
        assert (found < expected).all()

    def test_names_are_none(self, fitted):
        rows = TABLE.assign(name=[f"new {n}" for n in range(N)])
        found = fitted.predict_proba(rows)
        np.testing.assert_array_equal(found, fitted.predict_proba(TABLE))

    def test_more_are_more_novel(self):
        table = Table.of(TABLE)
        rows = NEW.assign(string="new"), NEW.assign(string="new", number=np.nan)
        counts = [table.encoded(part)[0, -1] for part in (NEW, *rows)]
        assert all(a < b for a, b in pairwise(counts))


def test_columns_of_many_levels_stay_small():
    rows = pd.DataFrame({"city": [f"city {n % 60}" for n in range(600)]})
    table = Table.of(rows)
    assert table.encoded(rows).shape[1] == 31
    assert (table.encoded(rows).sum(axis=1) == 1).all()
    assert table.encoded(pd.DataFrame({"city": ["new"]}))[0, -1] > 0


def test_held_out_and_further_samples():
    model = LaplaceClassifier(random_state=0)
    model.fit(TABLE, LABELS, X_val=NEW, y_val=NEW_LABELS)
    model.partial_fit(NEW, NEW_LABELS)
    assert np.isfinite(model.predict_uncertainty(NEW)).all()
    model = LaplaceRegressor(random_state=0).fit(TABLE, NUMBERS)
    assert np.isfinite(model.recalibrate(NEW, NUMBERS).predict(NEW)).all()
    model.conformalize(NEW, NUMBERS, cv=2)
    assert model.predict_interval(NEW, method="conformal").shape == (len(NEW), 2)


@pytest.mark.parametrize("model", MODELS[:4], ids=lambda model: type(model).__name__)
def test_is_stored(model):
    sio = pytest.importorskip("skops.io")
    model = clone(model).fit(TABLE, targets(model))
    restored = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(restored.predict(NEW), model.predict(NEW))
    data = sio.dumps(model)
    names = sio.get_untrusted_types(data=data)
    assert all(name.startswith("sklaplace.estimators") for name in names)
    restored = sio.loads(data, trusted=names)
    np.testing.assert_array_equal(restored.predict(NEW), model.predict(NEW))


def test_composition():
    model = LaplaceClassifier(random_state=0, prior_precision=1.0)
    assert cross_val_score(model, TABLE, LABELS, cv=2, error_score="raise").mean() > 0.5
    search = GridSearchCV(model, {"prior_precision": [1.0, 10.0]}, cv=2)
    assert search.fit(TABLE, LABELS).predict(NEW).shape == (N,)
    steps = make_pipeline(FunctionTransformer(lambda rows: rows[["string"]]), model)
    steps.set_output(transform="pandas")
    assert list(steps.fit(TABLE, LABELS)[-1].feature_names_in_) == ["string"]


IDS = [2**53, 2**53 + 1, 2**53 + 2]


def arrow(values):
    pa = pytest.importorskip("pyarrow")
    codes = pa.array(
        [values.index(v) if v is not None else None for v in spread(values)]
    )
    column = pa.DictionaryArray.from_arrays(codes, pa.array(values))
    return pd.Series(pd.arrays.ArrowExtensionArray(column))


def spread(values):
    return [None if n % 4 == 3 else values[n % 3] for n in range(N)]


# categories of identifiers, with missing values
IDENTIFIERS = {
    "int": lambda ids: pd.Categorical(pd.array(spread(ids), dtype="Int64")),
    "objects": lambda ids: pd.Categorical(pd.Series(spread(ids), dtype=object)),
    "beyond 64 bits": lambda ids: pd.Categorical(
        pd.Series(spread([v * 2**40 for v in ids]), dtype=object)
    ),
    "unsigned": lambda ids: pd.Categorical(
        pd.array(spread([v + 2**63 for v in ids]), dtype="UInt64")
    ),
    "decimal": lambda ids: pd.Categorical(spread([*map(Decimal, ids)])),
    "arrow": arrow,
}


class TestIdentifiers:
    @pytest.mark.parametrize("make", IDENTIFIERS.values(), ids=IDENTIFIERS)
    def test_large_integers_stay_distinct(self, make):
        rows = pd.DataFrame({"id": make(IDS)})
        table = Table.of(rows)
        assert table.contents == ["categories"]
        assert len(np.unique(table.encoded(rows), axis=0)) == 4
        assert (table.encoded(rows)[:, -1] == 0).all()
        new = pd.DataFrame({"id": make([v + 3 for v in IDS])})
        is_there = pd.isna(new["id"])
        assert ((table.encoded(new)[:, -1] > 0) != is_there).all()

    def test_values_of_arrow_dictionaries_are_levels(self):
        rows = pd.DataFrame({"id": arrow([1, 2, 30])})
        table = Table.of(rows)
        assert table.contents == ["categories"]
        category = pd.DataFrame({"id": pd.Categorical(spread([1, 2, 30]))})
        np.testing.assert_array_equal(table.encoded(category), table.encoded(rows))

    def test_numbers_may_lose_their_dtype(self):
        """Levels that were a category in fit may come as integers."""
        values = np.array(IDS)[np.arange(N) % 3]
        table = Table.of(pd.DataFrame({"id": pd.Categorical(values)}))
        found = table.encoded(pd.DataFrame({"id": values}))
        assert (found[:, -1] == 0).all()
        assert len(np.unique(found, axis=0)) == 3
        numbers = Table.of(pd.DataFrame({"id": np.arange(N) % 3}))
        category = pd.DataFrame({"id": pd.Categorical(np.arange(N) % 3)})
        np.testing.assert_array_equal(numbers.encoded(category)[:, 0], np.arange(N) % 3)

    def test_regression(self):
        """Means of known identifiers differ, and unknown identifiers are novel."""
        level = np.random.default_rng(0).integers(3, size=N)
        rows = pd.DataFrame({"id": pd.Categorical(np.array(IDS)[level])})
        y = 10.0 * level + np.random.default_rng(1).normal(size=N)
        model = LaplaceRegressor(random_state=0).fit(rows, y)
        assert model.score(rows, y) > 0.9
        new = pd.DataFrame({"id": pd.Categorical([2**53 + 5] * N)})
        assert model.score_samples(new).max() < model.score_samples(rows).min()


@pytest.mark.parametrize("library", ["pandas", "polars"])
@pytest.mark.parametrize("model", MODELS[:2], ids=lambda model: type(model).__name__)
def test_output_of_transformers_set_globally(model, library):
    y = targets(model)
    expected = clone(model).fit(TABLE, y).predict(NEW)
    with config_context(transform_output=library):
        np.testing.assert_array_equal(clone(model).fit(TABLE, y).predict(NEW), expected)


DATES = pd.date_range("2020", periods=3, unit="s").to_numpy()
OF_DATES = {
    **{unit: pd.Categorical(DATES.astype(f"M8[{unit}]")) for unit in ("s", "us", "ns")},
    "zoned": pd.Categorical(pd.DatetimeIndex(DATES).tz_localize("UTC")),
    "durations": pd.Categorical(pd.to_timedelta([1, 2, 3], unit="D")),
    "periods": pd.Categorical(pd.period_range("2020", periods=3, freq="Y")),
    "dates": pd.Categorical([dt.date(2020, 1, n) for n in (1, 2, 3)]),
    "and missing": pd.Categorical([*DATES[:2], None]),
}


def test_categories_of_intervals_do_not_depend_on_the_unit_of_dates():
    days = pd.date_range("2020", periods=N, unit="s").to_series(index=range(N))
    breaks = np.array(["2019", "2020-02", "2020-03", "2021"], "M8[s]")
    rows, same = (
        pd.DataFrame({"when": pd.cut(days.astype(unit), breaks.astype(unit))})
        for unit in ("M8[s]", "M8[ns]")
    )
    table = Table.of(rows)
    np.testing.assert_array_equal(table.encoded(rows), table.encoded(same))
    assert len(np.unique(table.encoded(rows), axis=0)) == 3


def repeated(values):
    return pd.Series(values).take([*range(3)] * (N // 3)).reset_index(drop=True)


# columns, an error and words
BAD = {
    "lists": ([[1]] * N, TypeError, "'bad'"),
    "dicts": ([{"a": 1}] * N, TypeError, "'bad'"),
    "mixed": ([1, "a"] * (N // 2), TypeError, "1 (int) and 'a' (str)"),
    "complex": ([1j] * N, TypeError, "complex"),
    "too large": (pd.Series([10**400] * N, dtype=object), ValueError, "too large"),
    "dates": (pd.date_range("2020", periods=N), TypeError, "'bad'"),
    "date objects": ([dt.date(2020, 1, 1)] * N, TypeError, "'bad'"),
    "NumPy durations": (
        pd.Series([np.timedelta64(1, "D")] * N, dtype=object),
        TypeError,
        "'bad' of X has dates",
    ),
    "infinity": ([np.inf] * N, ValueError, "'bad' of X contains infinity"),
    **{
        f"categories of {name}": (repeated(values), TypeError, "'bad'", "days")
        for name, values in OF_DATES.items()
    },
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_columns_that_are_refused(case):
    values, error, *words = case
    rows = TABLE.assign(bad=values)
    model = LaplaceClassifier()
    refused_fit(model, *words, "X", error=error, data=(rows, LABELS))


def test_held_out_tables_are_named(fitted):
    rows = TABLE.assign(number="a")
    held_out = {"X_val": rows, "y_val": LABELS}
    words = "X_val", "'number'", "has strings", "had numbers"
    model = LaplaceClassifier()
    refused_fit(model, *words, error=TypeError, data=(TABLE, LABELS), **held_out)


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        (lambda rows: rows.assign(string=1), TypeError, "has numbers"),
        (lambda rows: rows.assign(number="a"), TypeError, "has strings"),
        (lambda rows: rows[rows.columns[::-1]], ValueError, "same order"),
        (lambda rows: rows.drop(columns="gap"), ValueError, "feature names"),
        (lambda rows: rows[:0], ValueError, "0 samples"),
        (lambda rows: rows.to_numpy(), TypeError, "data frame"),
    ],
)
def test_other_tables_than_in_fit(change, error, word, fitted):
    refused(error, [word, "X"], lambda: fitted.predict(change(TABLE)), fitted)


def test_names_that_occur_twice():
    rows = pd.concat([TABLE, TABLE[["gap"]]], axis=1)
    refused_fit(LaplaceClassifier(), "'gap'", data=(rows, LABELS))


@pytest.mark.parametrize("net", [classifier(), regressor()])
def test_own_nets_take_numbers(net):
    kind = LaplaceClassifier if "Classifier" in type(net).__name__ else LaplaceRegressor
    model = kind(net)
    y = targets(model)
    refused_fit(
        model, "OneHotEncoder", data=(TABLE[["name", "bool"]].astype(object), y)
    )


class TestSparse:
    X = sparse.random(N, 2, 0.5, random_state=0, dtype="f4")
    FORMATS = (sparse.csr_array, sparse.csc_matrix, sparse.coo_array, sparse.dok_array)

    @pytest.mark.parametrize("form", FORMATS)
    @pytest.mark.parametrize("model", MODELS[:4], ids=lambda m: type(m).__name__)
    def test_default_network(self, model, form):
        rows, y = self.X.toarray(), targets(model)
        expected = clone(model).fit(rows, y).predict(rows)
        model = clone(model).fit(form(self.X), y)
        np.testing.assert_array_equal(model.predict(form(self.X)), expected)

    @pytest.mark.parametrize("net", [None, classifier(max_epochs=2)])
    def test_frames_with_sparse_columns(self, net):
        dense = pd.get_dummies(TABLE["name"], dtype=np.float32)
        rows = pd.get_dummies(TABLE["name"], dtype=np.float32, sparse=True)
        if net is not None:
            net = clone(net).set_params(module__n_in=dense.shape[1], module__n_out=2)
        model = LaplaceClassifier(net, prior_precision=1.0, random_state=0)
        expected = clone(model).fit(dense, LABELS).predict_proba(dense)
        found = model.fit(rows, LABELS)
        np.testing.assert_array_equal(found.predict_proba(rows), expected)
        assert found.feature_names_in_.tolist() == [*dense.columns]

    @pytest.mark.parametrize("frozen", [True, False])
    def test_own_net_reads_batches(self, frozen):
        rows, y = self.X.toarray(), np.arange(N) % 3
        net = classifier(max_epochs=2)
        net = FrozenEstimator(net.fit(rows, y)) if frozen else net
        model = LaplaceClassifier(net, random_state=0, batch_size=16)
        expected = clone(model).fit(rows, y).predict_proba(rows)
        found = clone(model).fit(self.X.tocsr(), y)
        np.testing.assert_allclose(
            found.predict_proba(self.X.tocsr()), expected, rtol=1e-5
        )
        restored = pickle.loads(pickle.dumps(found))
        np.testing.assert_allclose(restored.predict_proba(rows), expected, rtol=1e-5)

    def test_values_are_checked(self):
        rows = self.X.tocsr()
        rows.data[0] = np.nan
        for model in (LaplaceClassifier(), LaplaceClassifier(classifier())):
            refused_fit(model, "X contains NaN", data=(rows, np.arange(N) % 3))
