"""skops: estimators are stored, and loaded with the published list of types."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from joblib import Memory
from nets import MLP, classifier, regressor
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import Checkpoint, EarlyStopping, LoadInitState
from skorch.dataset import ValidSplit
from torch import nn

import sklaplace
from sklaplace import (
    DeepEnsembleRegressor,
    LaplaceClassifier,
    LaplaceClassifierCV,
    LaplaceRegressor,
    MCDropoutClassifier,
    SWAGClassifier,
    VariationalClassifier,
    VariationalRegressor,
)
from sklaplace.core import serialise

sio = pytest.importorskip("skops.io")
exceptions = pytest.importorskip("skops.io.exceptions")

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 2)).astype("f4")
Y = np.array(["a", "b", "c"])[np.arange(60) % 3]
T = X[:, 0]
TRUSTED = [*sklaplace.TRUSTED_TYPES, "nets.MLP"]

MODELS = {
    "default": lambda: LaplaceClassifier(random_state=0),
    "kron": lambda: LaplaceClassifier(classifier(), random_state=0),
    "default callbacks": lambda: LaplaceClassifier(
        NeuralNetClassifier(MLP, criterion=nn.CrossEntropyLoss, verbose=0)
    ),
    "default regressor callbacks": lambda: LaplaceRegressor(
        NeuralNetRegressor(MLP, module__n_out=1, verbose=0)
    ),
    "search": lambda: LaplaceClassifierCV(classifier(), cv=2, random_state=0),
    "frozen": lambda: LaplaceClassifier(
        FrozenEstimator(classifier().fit(X, np.arange(60) % 3))
    ),
    "low rank": lambda: LaplaceRegressor(
        regressor(), subset_of_weights="all", hessian_structure="lowrank"
    ),
    "points": lambda: LaplaceRegressor(regressor(), hessian_structure="nystrom"),
    "dropout": lambda: MCDropoutClassifier(random_state=0),
    "normalised": lambda: LaplaceRegressor(
        regressor(), normalize_y=True, random_state=0
    ),
    "ensemble": lambda: DeepEnsembleRegressor(regressor(), random_state=0),
    "variational": lambda: VariationalClassifier(classifier(), random_state=0),
    "swag": lambda: SWAGClassifier(classifier(), n_snapshots=5, random_state=0),
    "variational regressor": lambda: VariationalRegressor(random_state=0),
    "grid": lambda: GridSearchCV(
        make_pipeline(StandardScaler(), LaplaceClassifier(classifier())),
        {"laplaceclassifier__temperature": [0.5, 1.0]},
        cv=2,
    ),
}


def predicted(model):
    if hasattr(model, "predict_proba"):
        return model.predict_proba(X)
    return np.stack(model.predict(X, return_std=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_estimators_are_loaded_with_the_trusted_types(name, tmp_path, figure):
    model = MODELS[name]()
    is_regressor = "Regressor" in type(model).__name__
    model.fit(X, T if is_regressor else Y)
    sio.dump(model, tmp_path / "model.skops")
    untrusted = sio.get_untrusted_types(file=tmp_path / "model.skops")
    # a grid search has types of scikit-learn that skops does not trust by itself
    others = [kind for kind in untrusted if kind.startswith("sklearn.")]
    assert set(untrusted) <= {*TRUSTED, *others}
    assert not others or name == "grid"
    back = sio.load(tmp_path / "model.skops", trusted=[*TRUSTED, *others])
    difference = np.abs(predicted(back) - predicted(model)).max()
    assert difference == 0
    figure(largest_difference=difference)
    assert set(vars(back)) == set(vars(model))
    for copied in (pickle.loads(pickle.dumps(back)), copy.deepcopy(back)):
        np.testing.assert_array_equal(predicted(copied), predicted(model))


def test_a_loaded_estimator_goes_on_fitting():
    model = LaplaceClassifier(classifier(), random_state=0).fit(X, Y)
    back = sio.loads(sio.dumps(model), trusted=TRUSTED).partial_fit(X, Y)
    np.testing.assert_array_equal(predicted(back), predicted(model.partial_fit(X, Y)))


def test_conformity_scores_and_models_of_folds():
    model = LaplaceClassifier(classifier(), random_state=0).fit(X, Y)
    model.conformalize(X, Y, cv=2)
    back = sio.loads(sio.dumps(model), trusted=TRUSTED)
    sets = [m.predict_set(X, 0.2, method="conformal") for m in (model, back)]
    np.testing.assert_array_equal(*sets)


def test_an_unfitted_estimator():
    model = LaplaceClassifier(classifier(lr=0.5), prior_precision=[1.0, 2.0])
    back = sio.loads(sio.dumps(model), trusted=TRUSTED)
    assert repr(back) == repr(model)
    assert back.estimator.lr == 0.5


def test_modules_of_the_user_have_to_be_trusted():
    data = sio.dumps(LaplaceClassifier(classifier(), random_state=0).fit(X, Y))
    with pytest.raises(exceptions.UntrustedTypesFoundException, match=r"nets\.MLP"):
        sio.loads(data, trusted=sklaplace.TRUSTED_TYPES)


WRITES = "skorch.callbacks.training.Checkpoint"


@pytest.mark.parametrize("as_class", [False, True])
@pytest.mark.parametrize("is_fitted", [False, True])
def test_callbacks_have_to_be_trusted(as_class, is_fitted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = {"callbacks__own__dirname": "made"} if as_class else {}
    callback = Checkpoint if as_class else Checkpoint(dirname="made")
    net = classifier(callbacks=[("own", callback)], train_split=ValidSplit(2), **made)
    model = LaplaceClassifier(net, random_state=0)
    model = model.fit(X, np.arange(60) % 3) if is_fitted else model
    data = sio.dumps(model)
    names = sio.get_untrusted_types(data=data)
    assert WRITES in names
    others = [name for name in names if name != WRITES]
    with pytest.raises(exceptions.UntrustedTypesFoundException, match=WRITES):
        sio.loads(data, trusted=others)
    back = sio.loads(data, trusted=names)
    assert back.get_params()["estimator__callbacks"][0][0] == "own"


@pytest.mark.parametrize(
    "callback", [Checkpoint, LoadInitState, EarlyStopping(sink=print)]
)
def test_a_manipulated_file_sets_no_callback(callback, monkeypatch):
    """The graph names the class, so that skops does not ask for it."""
    kind = callback if isinstance(callback, type) else type(callback)
    named = serialise.trusted_name
    path = f"{kind.__module__}.{kind.__name__}"
    with monkeypatch.context() as patch:
        patch.setattr(
            serialise, "trusted_name", lambda v: path if v is kind else named(v)
        )
        data = sio.dumps(LaplaceClassifier(classifier(callbacks=[callback])))
    assert {*sio.get_untrusted_types(data=data)} <= {*TRUSTED}
    with pytest.raises(ValueError, match="cannot be restored"):
        sio.loads(data, trusted=TRUSTED)


@pytest.mark.parametrize("kind", [str, Path])
def test_the_path_of_memory_is_not_taken_from_a_file(kind, tmp_path):
    """Results in the folder are unpickled, and new results are written to it."""
    model = LaplaceClassifier(memory=kind(tmp_path / "cache"), random_state=0)
    data = sio.dumps(model)
    names = sio.get_untrusted_types(data=data)
    assert sio.loads(data, trusted=names).memory is None
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert copied.memory == model.memory


def test_a_memory_has_to_be_trusted(tmp_path):
    model = LaplaceClassifier(memory=Memory(tmp_path), random_state=0)
    data = sio.dumps(model)
    name = "joblib.memory.Memory"
    with pytest.raises(exceptions.UntrustedTypesFoundException, match=name):
        sio.loads(data, trusted=TRUSTED)
    back = sio.loads(data, trusted=sio.get_untrusted_types(data=data))
    assert back.memory.location == model.memory.location


MANIPULATED = {
    "entry": lambda state: {**state, "memory": "made"},
    "no graph": lambda state: {"memory": "made", "random_state": 0},
    "graph": lambda state: serialise.to_portable({"memory": "made", "random_state": 0}),
}


@pytest.mark.parametrize("change", MANIPULATED.values(), ids=MANIPULATED)
def test_a_manipulated_file_sets_no_memory(change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write = LaplaceClassifier.__getstate__
    with monkeypatch.context() as patch:
        patch.setattr(
            LaplaceClassifier, "__getstate__", lambda self: change(write(self))
        )
        data = sio.dumps(LaplaceClassifier(random_state=0))
    assert {*sio.get_untrusted_types(data=data)} <= {*TRUSTED}
    back = sio.loads(data, trusted=TRUSTED)
    assert back.memory is None
    assert back.random_state == 0


def test_nets_of_skorch_which_unpickle_are_not_trusted():
    data = sio.dumps(classifier())
    with pytest.raises(exceptions.UntrustedTypesFoundException, match="skorch"):
        sio.loads(data, trusted=TRUSTED)


def test_dtypes_come_back():
    net = classifier(nn.Linear, module__in_features=2, module__out_features=3)
    model = LaplaceClassifier(net, random_state=0).fit(X.astype("f8"), Y)
    back = sio.loads(sio.dumps(model), trusted=sklaplace.TRUSTED_TYPES)
    assert back.posterior_.mean.dtype == torch.float64
    assert next(back.estimator_.module_.parameters()).dtype == torch.float32


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_mlflow_by_default(tmp_path):
    flavour = pytest.importorskip("mlflow.sklearn")
    model = LaplaceClassifier(classifier(), random_state=0).fit(X, Y)
    path = str(tmp_path / "model")
    options = {"skops_trusted_types": TRUSTED, "pip_requirements": []}
    flavour.save_model(model, path, **options)
    assert (tmp_path / "model" / "model.skops").exists()
    back = flavour.load_model(path)
    np.testing.assert_array_equal(predicted(back), predicted(model))
