"""skops: estimators are stored, and loaded with the published list of types."""

import copy
import pickle

import numpy as np
import pytest
import torch
from files.write import FORMATS, check
from nets import MLP, classifier, regressor
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier, NeuralNetRegressor
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


@pytest.mark.parametrize(
    "path",
    [path for folder in FORMATS for path in sorted(folder.glob("*.skops"))],
    ids=lambda path: path.stem,
)
def test_files_of_earlier_versions_are_loaded(path):
    check(sio.load(path, trusted=TRUSTED), path)


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
