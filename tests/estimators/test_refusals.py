"""Invalid calls raise helpful errors before training, and change nothing.

Tables by kind: options, networks, targets, inputs, and calls of fitted estimators.
"""

import copy
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import global_rng_states
from nets import (
    MLP,
    QUIET,
    DropoutMLP,
    LinearModel,
    LogSoftmaxMLP,
    RecordTraining,
    ReLUNet,
    SigmoidMLP,
    SoftmaxMLP,
    binary_classifier,
    blobs,
    classifier,
    initialised,
    regressor,
    seeded,
    waves,
)
from refusals import CLASSIFIERS, REGRESSORS, refused, refused_fit
from sklearn.base import clone, is_classifier
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.utils._param_validation import InvalidParameterError
from skorch import NeuralNet, NeuralNetClassifier, NeuralNetRegressor
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import predefined_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sklaplace import (
    LaplaceClassifier,
    LaplaceClassifierCV,
    LaplaceRanker,
    LaplaceRegressor,
    LaplaceRegressorCV,
    MCDropoutClassifier,
    MCDropoutRegressor,
    VariationalRegressor,
)
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.likelihoods import HeteroscedasticNLLLoss

X, Y = blobs()
X_REG, Y_REG = waves()
TWO = (Y > 0).astype(int)
PAIRS = np.random.default_rng(0).normal(size=(40, 2, 2)).astype(np.float32)
PREFERRED = (PAIRS[:, 1].sum(1) > PAIRS[:, 0].sum(1)).astype(int)
RECORD = {"callbacks": [RecordTraining()]}
of_classes = partial(classifier, **RECORD)
of_numbers = partial(regressor, **RECORD)


def for_classes(net=None, **settings):
    return LaplaceClassifier(of_classes() if net is None else net, **settings)


def for_numbers(net=None, **settings):
    return LaplaceRegressor(of_numbers() if net is None else net, **settings)


def table(cases):
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


# ------------------------------------------------------------------------ options
def shown(value):
    """Return a test id without memory addresses, which differ between processes."""
    plain = str | int | float | list | dict | None
    return repr(value) if isinstance(value, plain) else type(value).__name__


def settings(*words, **params):
    """Return parameters of an estimator, and expected words of the error message."""
    name = ",".join(f"{name}={shown(value)}" for name, value in params.items())
    return pytest.param(params, words, id=name)


def structure(name, *words, **params):
    return settings(*words, hessian_structure=name, structure_params=params)


def subset(name, *words, **params):
    return settings(*words, subset_of_weights=name, subset_params=params or None)


OF_KRON = "structure_params", "It accepts 'weight_sharing'.", "has 'rank'"
NO_DRAWS = {"curvature": "ggn_mc", "curvature_params": {"n_draws": 0}}
FOUR = {"prior_precision": np.ones(4), "hessian_structure": "diag"}
DRAWS = {"subset_of_weights": "all", "pred_type": "nn"}
FOR_CLASSES = [
    structure("kron", *OF_KRON, "'kron' does not accept", rank=3),
    structure("kron", "['weight_sharing']='sum'", "'expand'", weight_sharing="sum"),
    structure("lowrank", "structure_params['rank']=0", "Choose", rank=0),
    structure("lowrank", "structure_params['tolerance']=1", tolerance=1),
    settings("It accepts none.", curvature_params={"rank": 1}),
    settings("curvature_params['n_draws']=0", **NO_DRAWS),
    subset(["kronecker"], "['kronecker'] is not known"),
    subset([], "is not a list of names"),
    subset("all", "'all' does not accept", "accepts none", by="random"),
    subset(["head"], "a list of names does not accept", by="random"),
    subset("subnetwork", "subset_params['by']=3", by=3),
    subset("subnetwork", "subset_params['n_weights']=0", n_weights=0),
    subset("subnetwork", "by='magnitude' does not accept", lr=0.1),
    subset("subnetwork", "by='swag' does not accept", by="swag", max_rank=3),
    subset("subnetwork", "['lr']=0 is not positive", by="swag", lr=0),
    subset("subnetwork", "but the network has", n_weights=10**6),
    subset("subnetwork", "not a list of integers", indices=[0.5]),
    subset("subnetwork", "negative", indices=[-1]),
    subset("subnetwork", "ascending order", indices=[3, 1]),
    subset("subnetwork", "Leave out 'by'", indices=[1], by="random"),
    settings("'kron'. Choose hessian_structure='full'", curvature="hessian"),
    settings("shape (21,)", "'diag'", prior_precision=np.ones(21)),
    settings("shape (2,)", "'layerwise'", prior_precision=np.ones(2)),
    settings("shape (4,)", "'diag'", "(21,)", **FOUR, prior_structure="diag"),
    settings("prior_structure='diag'", "'kron'", "'scalar'", prior_structure="diag"),
    settings("(5,)", "(21,)", prior_mean=np.zeros(5)),
    settings("refine=True", "pred_type='nn'", "'glm'", **DRAWS, refine=np.True_),
    settings("class_weight", "[1, 2]", class_weight={0: 1.0, 5: 2.0}),
    settings("class_weight", "'a'", class_weight={0: "a", 1: 1, 2: 1}),
    settings("class_weight=", "has negative", class_weight={0: -1.0, 1: 1.0, 2: 1.0}),
]
EF = "refine=True cannot be used with curvature='ef'"
BY_EVIDENCE = {"sigma_noise": "marglik", "prior_precision": "validation"}
FOR_NUMBERS = [
    settings(EF, curvature="ef", refine=True, sigma_noise="auto"),
    settings("sigma_noise='marglik'", "prior_precision='validation'", **BY_EVIDENCE),
    settings("sigma_noise has shape", sigma_noise=np.ones(2)),
]
NOT_POSITIVE = [0, -1.0, np.nan, np.inf, None, True]
COUNTS = [0, -1, 1.5, "a", True]
NAMES = "subset_of_weights", "hessian_structure", "curvature", "prior_structure"
# what no estimator allows
INVALID = {
    **{name: ["KRON", None] for name in (*NAMES, "pred_type", "link_approx")},
    "structure_params": [3, [1, 2, 3], "kron"],
    "class_weight": [3, "balance"],
    "prior_precision": [*NOT_POSITIVE, "marglick", np.ones(0), [1.0, -2.0]],
    "sigma_noise": [*NOT_POSITIVE, "marglick", [], np.ones((60, 1)), [0.1, -0.2]],
    "temperature": [*NOT_POSITIVE, [1.0]],
    "prior_mean": [np.nan, "a", None, [0.0, np.inf]],
    "refine": ["yes", 1, 0, None, np.array([True, False])],
    "validation_fraction": [0, 1, 5, -0.1, np.nan, "a", None, True],
    "n_samples": COUNTS,
    "batch_size": COUNTS,
    "random_state": ["a", -1, 1.5, np.random.default_rng(0)],
    "verbose": ["x", -1, None],
    "dirichlet_approx": ["Bridge", "mc", None, ["bridge"]],
    "n_jobs": [0, 2.5, "two", True],
    "n_estimators": [0, -1, 2.5, "many", None, True],
    "n_snapshots": [1, 2.5],
    "steps_per_snapshot": [0],
    "lr": [0.0, "fast"],
    "max_rank": [1],
    "residual": [-1.0, 0.0, np.nan, np.inf, "all", None, [0.1, 0.2]],
    "prior_precisions": [[], [[1.0, 2.0]], ["a"], [1.0, -1.0], [np.inf], 0.0, "auto"],
    "prior": ["normal"],
    "prior_params": [3],
    "kl_schedule": [None],
    "kl_weight": [0, "auto", np.inf],
    "bound": [-1.0],
    "prior_scale": [None],
}


class TestOptions:
    @pytest.mark.parametrize(("params", "words"), FOR_CLASSES)
    def test_of_a_classifier(self, params, words):
        refused_fit(for_classes(**params), *words)

    @pytest.mark.parametrize(("params", "words"), FOR_NUMBERS)
    def test_of_a_regressor(self, params, words):
        refused_fit(for_numbers(**params), *words)

    @pytest.mark.parametrize("kind", CLASSIFIERS + REGRESSORS)
    def test_invalid_values(self, kind):
        net = (of_classes if kind in CLASSIFIERS else of_numbers)(DropoutMLP)
        data = (X, Y) if kind in CLASSIFIERS else (X_REG, Y_REG)
        for name in INVALID.keys() & {*kind._get_param_names()}:
            for value in INVALID[name]:
                words = f"The {name!r} parameter of {kind.__name__}", f"Got {value!r}"
                model, error = kind(net, **{name: value}), InvalidParameterError
                refused_fit(model, *words, error=error, data=data)

    @pytest.mark.parametrize("make", [np.array, torch.tensor])
    def test_numbers_without_axes_are_numbers(self, make):
        names = "prior_precision", "sigma_noise", "temperature", "prior_mean"
        params = dict.fromkeys(names, make(0.5))
        net = FrozenEstimator(initialised(regressor()))
        model = LaplaceRegressor(net, residual=make(0.1), **params).fit(X_REG, Y_REG)
        params = dict.fromkeys(names, make([0.5]))
        same = LaplaceRegressor(net, residual=make([0.1]), **params).fit(X_REG, Y_REG)
        found = [m.predict(X_REG, return_std=True) for m in (model, same)]
        np.testing.assert_allclose(*found, rtol=1e-6)
        value = model.log_marginal_likelihood(make(3.0))
        assert model.log_marginal_likelihood(make([3.0])) == value

    def test_validation_without_rows(self):
        model = for_classes(prior_precision="validation")
        refused_fit(model, "X_val", "marglik", data=(X[:40], Y[:40]))
        net = FrozenEstimator(initialised(classifier()))
        refused_fit(for_classes(net, prior_precision="validation"), "X_val and y_val")


# ----------------------------------------------------------------------- networks
TO_THREE = "3 classes", "to 3"
NO_SOFTMAX = "NLLLoss", "softmax", "CrossEntropyLoss"


def weighted(weight):
    return of_classes(criterion__weight=torch.tensor(weight))


# networks whose outputs or criterion cannot be right, trained or not
UNFIT = {
    "few outputs": (of_classes(module__n_out=2), "2 outputs", *TO_THREE),
    "one output": (of_classes(module__n_out=1), "1 output,", "3 classes"),
    "log": (of_classes(LogSoftmaxMLP, criterion=nn.NLLLoss), *NO_SOFTMAX),
    "sigmoid": (of_classes(SigmoidMLP, criterion=nn.NLLLoss), *NO_SOFTMAX[:2]),
    "binary": (binary_classifier(**RECORD), "3 classes", "CrossEntropyLoss"),
    "ignored": (of_classes(criterion__ignore_index=2), "ignore_index=2", "negative"),
    "reduction": (of_classes(criterion__reduction="none"), "criterion__reduction"),
    "inputs": (of_classes(module__n_in=5), "shape (2,)"),
    "few weights": (weighted([1.0, 2.0]), "criterion__weight", "shape (2,)", "3 cl"),
    "one weight": (weighted(1.0), "criterion__weight", "shape ()", "3 classes"),
    "integers": (weighted([1, 2, 3]), "torch.int64", "weight.float()"),
    "negative": (weighted([-1.0, 1.0, 1.0]), "criterion__weight has negative"),
    "outputs": (of_numbers(module__n_out=2), "2 outputs", "1 column.", "to 1"),
    "loss": (of_numbers(criterion=nn.HuberLoss), "HuberLoss", "MSELoss"),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", UNFIT)
def test_networks_that_do_not_fit(name, frozen):
    net, *words = UNFIT[name]
    kind = LaplaceRegressor if name in ("outputs", "loss") else LaplaceClassifier
    refused_fit(kind(FrozenEstimator(initialised(net)) if frozen else net), *words)


def test_classes_that_a_fold_lacks():
    """Folds come first, because the network suits all samples."""
    rows = Y < 2
    message = refused_fit(for_classes(of_classes()), data=(X[rows], Y[rows]))
    assert message.index("stratified folds") < message.index("to 2")
    refused_fit(for_classes(), "1 class", "stratified folds", data=(X, 0 * Y))


@pytest.mark.parametrize("kind", [LaplaceClassifier, LaplaceRegressor])
def test_unknown_arguments_name_no_base_class(kind):
    model = kind()
    calls = [
        lambda: model.predict_interval(X, unknown=1),
        lambda: model.predict_proba(X, return_std=True),
        lambda: model.predict(X, return_variance=True),
        lambda: model.tune(X, Y, prior_precision=1.0),
        lambda: model.score(X, Y, unknown=1),
    ]
    for call in calls:
        with pytest.raises((TypeError, AttributeError)) as caught:
            call()
        assert "Probabilistic" not in str(caught.value)
        assert "BaseLaplace" not in str(caught.value)


@pytest.mark.parametrize("frozen", [True, False])
def test_networks_without_weights(frozen):
    net = FrozenEstimator(classifier())
    refused_fit(for_classes(net), "no weights", "Classifier(module,", "initialize()")
    net = seeded(classifier(), X, Y)
    net.trim_for_prediction()
    net = FrozenEstimator(net) if frozen else net
    refused_fit(for_classes(net), "trimmed for prediction")


CE = "NeuralNetClassifier(MLP, criterion=torch.nn.CrossEntropyLoss)"
MSE = "NeuralNetRegressor(MLP, criterion=torch.nn.MSELoss)"
SEVERAL = "skorch.NeuralNet with criterion=torch.nn.BCEWithLogitsLoss"
OWN = "pass likelihood=", "sklaplace.likelihoods."
ONE_LOGIT = "For two classes, set", "size of the last layer to 1"
LOADER = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)))
DATASET = "is a DataLoader", "fit(loader.dataset, targets)"
ALONE = "requires y to be passed", "fit(dataset, [y for _, y in dataset])"
NO_INSTANCE = "an instance, not the class", CE
of_two = partial(of_classes, criterion=nn.BCEWithLogitsLoss)
UNKNOWN = "torch.nn.CrossEntropyLoss", *OWN
MARGIN = of_classes(criterion=nn.MultiMarginLoss)
FOR_NET = "criterion=MSELoss is not supported here", "or use ", "Regressor"
BETWEEN = "criterion=CrossEntropyLoss is not supported", "Classifier", "MSELoss"
CLASSES = "y has 1 class", "at least two classes", "partial_fit(X, y, classes=...)"
# what users of every estimator do first by mistake: error, estimator, X, y and words
OF_CLASSIFIERS = {
    "a module": (TypeError, MLP(), X, Y, "got MLP", CE),
    "its class": (TypeError, MLP, X, Y, *NO_INSTANCE),
    "a class of nets": (TypeError, NeuralNetClassifier, X, Y, "not the class"),
    "another library": (TypeError, LogisticRegression(), X, Y, "skorch"),
    "a net for numbers": (ValueError, of_numbers(), X, Y, *FOR_NET),
    "unknown loss": (ValueError, MARGIN, X, Y, *UNKNOWN),
    "a loader": (TypeError, of_classes(), LOADER, Y, *DATASET),
    "a loader alone": (TypeError, of_classes(), LOADER, None, *DATASET),
    "a dataset alone": (ValueError, of_classes(), LOADER.dataset, None, *ALONE),
    "one-hot": (
        *(ValueError, of_classes(), X, np.eye(3)[Y]),
        *("If y is one-hot, pass y.argmax(axis=1)", SEVERAL),
    ),
    "one-hot, one logit": (
        *(ValueError, binary_classifier(**RECORD), X, np.eye(2)[TWO]),
        *("If y is one-hot, pass y.argmax(axis=1)", SEVERAL),
    ),
    "two logits": (ValueError, of_two(module__n_out=2), X, TWO, *ONE_LOGIT),
    "two logits of a binary net": (
        *(ValueError, binary_classifier(module__n_out=2, **RECORD), X, TWO),
        *("cannot be applied to rows", "Expected module output to have shape"),
    ),
    "one class": (ValueError, of_classes(), X, np.zeros(60, int), *CLASSES),
}


class MeanAndVariance(MLP):
    """A module that returns a tuple, as torch's criterion expects."""

    def forward(self, X):
        f = super().forward(X)
        return f, nn.functional.softplus(f)


class OfTuples(nn.GaussianNLLLoss):
    def forward(self, outputs, y):
        return super().forward(outputs[0], y, outputs[1])


IN_ONE = "torch.cat([mean, variance.log()], 1)"
NLL = "sklaplace.likelihoods.HeteroscedasticNLLLoss", IN_ONE
of_variances = partial(of_numbers, MeanAndVariance)
OF_REGRESSORS = {
    "a module": (TypeError, MLP(), X_REG, Y_REG, "got MLP", MSE),
    "a net for classes": (ValueError, of_classes(), X_REG, Y_REG, *BETWEEN),
    "unknown loss": (
        *(ValueError, of_numbers(criterion=nn.L1Loss), X_REG, Y_REG),
        *("criterion=L1Loss", "torch.nn.MSELoss", *OWN),
    ),
    "means and variances": (
        *(ValueError, of_variances(criterion=nn.GaussianNLLLoss), X_REG, Y_REG),
        *("criterion=GaussianNLLLoss is not supported here", *NLL),
    ),
    "a loss of tuples": (
        *(ValueError, of_variances(criterion=OfTuples), X_REG, Y_REG),
        *("criterion=OfTuples is not supported here", *NLL),
    ),
    "means and logarithms of variances in tuples": (
        *(ValueError, of_variances(criterion=HeteroscedasticNLLLoss), X_REG, Y_REG),
        *("size of its last layer to 2", IN_ONE),
    ),
    "a loader": (TypeError, of_numbers(), LOADER, None, *DATASET),
}
OF_RANKERS = {
    "a module": (
        *(TypeError, MLP(), PAIRS, PREFERRED, "got MLP"),
        *("NeuralNetBinaryClassifier(sklaplace.BradleyTerry", "BCEWithLogitsLoss"),
    ),
    "a net for numbers": (ValueError, of_numbers(), PAIRS, PREFERRED, FOR_NET[0]),
    "several logits": (
        *(ValueError, of_classes(), PAIRS, PREFERRED),
        *("criterion=CrossEntropyLoss is not", "BCEWithLogitsLoss"),
    ),
    "one-hot": (
        *(ValueError, None, PAIRS, np.eye(2)[PREFERRED]),
        *("(40, 2)", "one of two labels per pair", "y.argmax(axis=1)"),
    ),
    "one class": (ValueError, None, PAIRS, 0 * PREFERRED, "one of two labels"),
    "a loader": (TypeError, None, LOADER, None, *DATASET),
}


def refused_case(kind, case):
    error, estimator, X, y, *words = case
    refused_fit(kind(estimator, random_state=0), *words, error=error, data=(X, y))


@pytest.mark.parametrize("kind", CLASSIFIERS)
@table(OF_CLASSIFIERS)
def test_first_mistakes_with_classifiers(kind, case):
    refused_case(kind, case)


@pytest.mark.parametrize("kind", REGRESSORS)
@table(OF_REGRESSORS)
def test_first_mistakes_with_regressors(kind, case):
    refused_case(kind, case)


@table(OF_RANKERS)
def test_first_mistakes_with_rankers(case):
    refused_case(LaplaceRanker, case)


@pytest.mark.parametrize("kind", [*CLASSIFIERS, *REGRESSORS, LaplaceRanker])
def test_parameters_of_a_net_without_a_net(kind):
    model, new = kind(), {"random_state": 0, "estimator__max_epochs": 3}
    words = "estimator__max_epochs", "estimator=None", "pass a net as estimator"
    refused(ValueError, words, lambda: model.set_params(**new), model)
    search = GridSearchCV(model, {"estimator__max_epochs": [1, 3]})
    data = (PAIRS, PREFERRED) if kind is LaplaceRanker else (X, Y)
    refused(ValueError, words, lambda: search.fit(*data), model)
    model.set_params(estimator=of_classes(), **new)
    assert model.estimator.max_epochs == 3
    refused(ValueError, words, lambda: model.set_params(estimator=None, **new), model)


@pytest.mark.parametrize("reason", ["several", "none", "few rows", "a net for them"])
def test_columns_that_are_meant_as_several_labels(reason):
    """Cover rows with several or no labels, few rows, and nets that accept columns."""
    columns, net, n = np.eye(3)[Y], None, 9 if reason == "few rows" else 60
    if reason in ("several", "none"):
        columns[0] = reason == "several"
    if reason == "a net for them":
        net = NeuralNet(MLP, nn.BCEWithLogitsLoss, max_epochs=1, **QUIET)
    fixed = {"prior_precision": 1.0, "random_state": 0}
    model = LaplaceClassifier(net, **fixed).fit(X[:n], columns[:n].astype(np.float32))
    assert model.predict_proba(X).shape == (60, 3)


def test_one_logit_where_a_probability_is_expected():
    net = initialised(binary_classifier(criterion=nn.BCELoss))
    with torch.no_grad():
        net.module_.head.bias.fill_(5.0)
    model = for_classes(FrozenEstimator(net))
    refused_fit(model, "BCELoss", "BCEWithLogitsLoss", data=(X, TWO))


def test_double_softmax_is_warned_of_once():
    model = LaplaceClassifier(classifier(SoftmaxMLP, max_epochs=1))
    with pytest.warns(UserWarning, match="applies a second softmax") as caught:
        model.fit(X, Y)
    assert len([w for w in caught if "softmax" in str(w.message)]) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("way", ["instance", "frozen", "function", "submodule"])
def test_modules_of_torchscript(way):
    def make():
        return torch.jit.script(nn.Linear(2, 1))

    module = make if way == "function" else make()
    if way == "submodule":
        module = nn.Sequential(nn.Linear(2, 2), module)
    net = NeuralNetRegressor(module, callbacks=[RecordTraining()], verbose=0)
    net = FrozenEstimator(net.initialize()) if way == "frozen" else net
    where = "submodule '1'" if way == "submodule" else "The module of the net, Linear"
    words = where, "TorchScript", "original torch.nn.Module"
    for kind in (LaplaceRegressor, VariationalRegressor):
        refused_fit(kind(net, random_state=0), *words, error=TypeError)


# --------------------------------------------------------------------- the samples
def replaced(values, value, dtype=object):
    """Return values with a replaced seventh value."""
    values = np.asarray(values).astype(dtype)
    values.flat[7] = value
    return values


def masked(values):
    """Return the values with a masked first entry."""
    hidden = np.zeros(values.shape, dtype=bool)
    hidden.flat[0] = True
    return np.ma.MaskedArray(values, hidden)


WORDS = np.array(["a", "b", "c"])[Y]
FRAME = pd.DataFrame(X, columns=["a", "b"])
NULLABLE = FRAME.assign(b=pd.array([1, None] * 30, "Int64"))
NO_DATES = np.datetime64("NaT", "D")
# inputs of fit and predictions: error and word
INPUTS = {
    "NaN": (replaced(X, np.nan, "f4"), ValueError, "X contains NaN"),
    "inf": (replaced(X, np.inf, "f4"), ValueError, "X contains infinity"),
    "None in lists": (replaced(X, None).tolist(), ValueError, "X contains NaN"),
    "inf as text": (replaced(X, "inf"), ValueError, "X contains infinity"),
    "NA": (replaced(X, pd.NA), ValueError, "X contains NaN"),
    "nullable": (NULLABLE, ValueError, "X contains NaN"),
    "NaT": (replaced(X, NO_DATES), TypeError, "X has dates"),
    "durations": (np.full(X.shape, 5, "m8[D]"), TypeError, "X has dates"),
    "column of dates": (
        *(FRAME.assign(b=pd.date_range("2020", periods=60)), TypeError),
        "column 'b'",
    ),
    "words": (replaced(X, "red"), ValueError, "X is not an array of numbers"),
    "texts": (WORDS, TypeError, "TfidfVectorizer"),
    "list of texts": (WORDS.tolist(), TypeError, "TfidfVectorizer"),
    "column of texts": (pd.Series(WORDS), TypeError, "TfidfVectorizer"),
    "column of numbers": (FRAME["a"], ValueError, "2-dimensional"),
    "masked": (masked(X), ValueError, "X.filled(value)"),
    "masked in a list": (list(masked(X)), ValueError, "X has masked entries"),
    "no rows": (X[:0], ValueError, "0 sample"),
    "one axis": (X[:, 0], ValueError, "Expected 2D array"),
    "huge": (X.astype(float) * 1e39, ValueError, "float32"),
}
LABELS = {
    "None": (replaced(WORDS, None), "y contains NaN"),
    "NaT": (replaced(WORDS, NO_DATES), "y contains NaN"),
    "NA": (pd.Series(replaced(WORDS, pd.NA), dtype="string"), "y contains NaN"),
    "nullable": (pd.Series(replaced(Y, pd.NA), dtype="Int64"), "y contains NaN"),
    "NaN": (replaced(Y, np.nan, float), "y contains NaN"),
    "number": (replaced(WORDS, 1), "y has labels of several types"),
    "continuous": (Y_REG, "Unknown label type: continuous"),
}
NUMBERS = {
    "None": (replaced(Y_REG, None), ValueError, "y contains NaN"),
    "text": (replaced(Y_REG, "nan"), ValueError, "y contains NaN"),
    "NaT": (replaced(Y_REG, NO_DATES), TypeError, "y has dates"),
    "words": (replaced(Y_REG, "red"), ValueError, "For labels, use"),
}


@pytest.fixture(scope="module")
def labels():
    """Return a fitted classifier."""
    net = FrozenEstimator(seeded(classifier(), X, Y))
    return LaplaceClassifier(net, prior_precision=1.0, random_state=0).fit(X, Y)


@pytest.fixture(scope="module")
def numbers():
    """Return a fitted regressor."""
    net = FrozenEstimator(seeded(regressor(), X_REG, Y_REG[:, None]))
    model = LaplaceRegressor(net, prior_precision=1.0, sigma_noise=0.2)
    return model.fit(X_REG, Y_REG)


NONE_HELD_OUT = {"X_val": None, "y_val": None}


class TestSamples:
    @pytest.mark.parametrize("make", [for_classes, for_numbers])
    @table(INPUTS)
    def test_inputs_of_fit(self, make, case):
        rows, error, word = case
        n = getattr(rows, "shape", Y.shape)[0]
        refused_fit(make(), word, error=error, data=(rows, Y[:n]))

    @pytest.mark.filterwarnings("ignore:X has feature names")
    @table(INPUTS)
    def test_inputs_of_predictions(self, case, labels, numbers):
        rows, error, word = case
        for model, names in (
            (labels, ["predict_proba", "predict_dirichlet", "predict_top_k"]),
            (numbers, ["predict", "predict_interval", "sample_y"]),
        ):
            for name in names:
                call = getattr(model, name)
                refused(error, [word], lambda call=call: call(rows), model)

    @pytest.mark.parametrize("kind", CLASSIFIERS)
    @table(LABELS)
    def test_labels(self, kind, case):
        y, word = case
        refused_fit(kind(of_classes()), word, data=(X, y))

    @pytest.mark.parametrize("kind", REGRESSORS)
    @table(NUMBERS)
    def test_numbers(self, kind, case, numbers):
        y, error, word = case
        refused_fit(kind(of_numbers()), word, error=error, data=(X_REG, y))
        for call in (numbers.score, numbers.partial_fit, numbers.recalibrate):
            refused(error, [word], lambda call=call: call(X_REG, y), numbers)

    def test_numbers_in_objects_are_taken(self, labels):
        found = clone(labels).fit(X.astype(object), Y.astype(object))
        assert found.classes_.dtype == labels.classes_.dtype
        proba = found.predict_proba(X.tolist())
        np.testing.assert_array_equal(proba, labels.predict_proba(X))

    @pytest.mark.parametrize(
        ("words", "fit"),
        [
            (["Complex data"], {"X": X * 1j}),
            (["rows of shape (5,)"], {"X": np.ones((60, 5), "f4")} | NONE_HELD_OUT),
            (["[60, 59]"], {"y": Y[:59]}),
            (["60 rows", "30"], {"X": {"X": X}, "y": Y[:30]}),
            (["y_val has labels that y in fit does not have: [3]"], {"y_val": Y + 1}),
            (["X_val", "NaN"], {"X_val": replaced(X, np.nan, "f4")}),
            (["[60, 3]"], {"y_val": Y[:3]}),
            (["X_val has masked entries"], {"X_val": masked(X)}),
            (["y_val has masked entries"], {"y_val": masked(Y)}),
            (["y has masked entries"], {"y": masked(Y)}),
            (["y_val is missing", "Pass both"], {"y_val": None}),
            (["X_val is missing", "Pass both"], {"X_val": None}),
            (["requires y to be passed"], {"y": None}),
            (["Negative values"], {"sample_weight": np.r_[-1.0, np.ones(59)]}),
            (["non-zero"], {"sample_weight": np.zeros(60)}),
            (["(60,)"], {"sample_weight": np.ones(3)}),
            (["1D array"], {"sample_weight": np.ones((60, 1))}),
            (["NaN"], {"sample_weight": np.full(60, np.nan)}),
            (["masked"], {"sample_weight": masked(np.ones(60))}),
        ],
    )
    def test_arguments_of_fit(self, words, fit):
        given = {"X": X, "y": Y, "X_val": X, "y_val": Y} | fit
        model = for_classes()
        refused(ValueError, words, lambda: model.fit(**given), model)

    def test_numbers_that_are_too_large_or_of_another_shape(self):
        huge = Y_REG.astype(float) * 1e60
        refused_fit(for_numbers(), "float32", "Scale y", data=(X_REG, huge))
        held_out = {"X_val": X_REG, "y_val": np.stack([Y_REG, Y_REG], 1)}
        refused_fit(for_numbers(), "2 columns", "y has 1", **held_out)

    @pytest.mark.parametrize("stratified", [False, True])
    def test_splits_of_the_net(self, stratified):
        net = of_classes(train_split=ValidSplit(5, stratified=stratified))
        words = "train_split", "cannot split 4 samples", "ValidSplit(2)"
        refused_fit(for_classes(net), *words, data=(X[:4], Y[:4]))
        net = of_classes(train_split=predefined_split(Dataset(X[::2], Y[::2] + 1)))
        refused_fit(for_classes(net), "train_split", data=(X, Y + 1))

    def test_a_last_layer_that_is_none(self):
        net = of_classes(nn.Sequential(nn.Conv1d(1, 3, 2), nn.Flatten()))
        words = "Conv1d", "subset_of_weights='all'"
        refused_fit(for_classes(net), *words, data=(X[:, None, :], Y))

    def test_misspelt_argument_of_a_frozen_net(self, labels):
        with pytest.raises(TypeError, match=r"'sample_weigth'.*frozen"):
            labels.fit(X, Y, sample_weigth=np.ones(len(X)))


# ---------------------------------------------------------------------- divergence
DIVERGING = {"optimizer": torch.optim.SGD, "max_epochs": 5}


class TestDivergence:
    """Diverged training raises a clear error, and the estimator stays unfitted."""

    @pytest.mark.parametrize(
        "model",
        [
            for_numbers(regressor(lr=1e12, **DIVERGING)),
            for_classes(classifier(ReLUNet, lr=1e20, **DIVERGING)),
        ],
        ids=["regressor", "classifier"],
    )
    def test_is_named(self, model):
        before = global_rng_states()
        words = r"(?is)diverged.*learning rate"
        with pytest.raises(ValueError, match=words):
            model.fit(*((X, Y) if is_classifier(model) else (X_REG, Y_REG)))
        assert not hasattr(model, "posterior_")
        assert global_rng_states() == before

    # further warnings, as of the refit, may come before this one or after it
    @pytest.mark.filterwarnings("ignore::UserWarning")
    @pytest.mark.parametrize("module", [MLP, SoftmaxMLP])
    def test_of_a_classifier_to_huge_finite_logits(self, module):
        criterion = nn.CrossEntropyLoss if module is MLP else nn.NLLLoss
        steps = {"optimizer": torch.optim.SGD, "lr": 1e12, "callbacks": None}
        net = classifier(module, criterion=criterion, **steps)
        with pytest.warns(UserWarning, match=r"diverged|larger than|rose"):
            LaplaceClassifier(net, random_state=0).fit(X, Y)

    def test_of_a_frozen_net(self):
        net = seeded(classifier(), X, Y)
        with torch.no_grad():
            net.module_.head.weight[0, 0] = torch.nan
        model = for_classes(FrozenEstimator(net))
        refused_fit(model, "not finite", "weights were not loaded")


# --------------------------------------------------------------- fitted estimators
@pytest.fixture(
    scope="module", params=CLASSIFIERS + REGRESSORS, ids=lambda kind: kind.__name__
)
def fitted(request):
    kind = request.param
    make = classifier if kind in CLASSIFIERS else regressor
    has_dropout = kind in (MCDropoutClassifier, MCDropoutRegressor)
    model = kind(None if has_dropout else make(max_epochs=2), random_state=0)
    few = {"cv": 2, "prior_precisions": [1.0], "n_snapshots": 3}
    model.set_params(**{k: v for k, v in few.items() if k in model.get_params()})
    return model.fit(*((X, Y) if kind in CLASSIFIERS else (X_REG, Y_REG)))


class TestFitted:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("batch_size", value) for value in (0, 2.5, "a")),
            *(("n_samples", value) for value in (-1, "a", None)),
            ("n_jobs", "a"),
            ("residual", -1.0),
        ],
    )
    def test_predictions_refuse_what_fit_refuses(self, fitted, name, value):
        if name not in fitted.get_params():
            return
        model = copy.copy(fitted).set_params(**{name: value})
        data = (X, Y) if is_classifier(model) else (X_REG, Y_REG)
        words = f"{name!r} parameter of", f"Got {value!r}"
        expected = refused(ValueError, words, lambda: clone(model).fit(*data))
        for method in ("predict", "latent_mean_and_variance", "predict_proba"):
            if hasattr(model, method):
                predict = getattr(model, method)
                call = partial(predict, data[0])
                assert refused(ValueError, words, call) == expected

    @pytest.mark.parametrize(
        ("name", "value"), [("link_approx", 3), ("pred_type", "x")]
    )
    def test_unknown_options_set_after_fit(self, name, value, labels):
        model = copy.copy(labels).set_params(**{name: value})
        refused(ValueError, [name, repr(value)], lambda: model.predict(X), model)

    def test_what_has_no_moments(self, labels):
        ask = partial(labels.latent_mean_and_variance, X, full_cov=True, joint=True)
        refused(ValueError, ["full_cov and joint", "Use"], ask, labels)
        model = copy.copy(labels).set_params(pred_type="nn", n_samples=1)
        ask = partial(model.latent_mean_and_variance, X)
        refused(ValueError, ["n_samples=1 has no variance"], ask, model)

    @pytest.mark.parametrize("value", [0, 1, 1.5, np.nan, 90])
    def test_levels(self, value, numbers):
        for name, call in {
            "coverage": lambda: numbers.predict_interval(X, coverage=value),
            "alpha": lambda: numbers.predict_quantiles(X, [0.5, value]),
        }.items():
            refused(ValueError, [name, "between 0 and 1"], call, numbers)

    @pytest.mark.parametrize("coverage", [1 - 1e-16, [0.5, 1 - 1e-16]])
    def test_intervals_of_almost_all_targets_name_coverage(self, numbers, coverage):
        words = "coverage=0.9999999999999999", "0.9999."
        call = partial(numbers.predict_interval, X_REG, coverage)
        assert "alpha" not in refused(ValueError, words, call, numbers)
        assert np.isfinite(numbers.predict_interval(X_REG, 1 - 1e-15)).all()

    @pytest.mark.parametrize("name", ["prior_precision", "sigma_noise"])
    @pytest.mark.parametrize("value", [0, np.nan, "marglik", [1.0, 2.0], []])
    def test_evidence_under_other_values(self, name, value, labels, numbers):
        ask = partial(numbers.log_marginal_likelihood, **{name: value})
        refused(ValueError, [name], ask, numbers)
        with pytest.raises(ValueError, match="no observation noise"):
            labels.log_marginal_likelihood(sigma_noise=1.0)

    @pytest.mark.parametrize("y", [None, Y])
    def test_loaders_to_tune_on(self, labels, y):
        words = "is a DataLoader", "tune(loader.dataset, targets)"
        refused(TypeError, words, partial(labels.tune, LOADER, y), labels)


class TestSizes:
    """Errors for lack of memory state the bytes and suggest a cheaper option."""

    @pytest.mark.parametrize("structure", STRUCTURES)
    def test_structures(self, structure, little_memory):
        little_memory(100)
        model = for_classes(subset_of_weights="all", hessian_structure=structure)
        advice = "fewer weights" if structure == "diag" else "'diag'"
        words = [structure, "parameters needs", "100 bytes are free", advice]
        refused_fit(model, *words, "subset_of_weights='last_layer'")

    @pytest.mark.parametrize("link", ["mc", "mean_field", "sodpp"])
    def test_covariances_of_a_link(self, link, little_memory):
        sizes = {"module__n_out": 30, "module__dtype": torch.float32}
        model = for_classes(of_classes(LinearModel, **sizes), link_approx=link)
        model.set_params(hessian_structure="diag", prior_precision=1.0, refine=False)
        data = X, np.arange(60) % 30
        little_memory(20_000)
        words = "a covariance between 30 outputs needs 28 KiB", "link_approx='probit'"
        refused_fit(model, *words, data=data)
        model.set_params(link_approx="auto").fit(*data).predict_proba(X)
        model.set_params(link_approx=link, pred_type="nn", n_samples=2).fit(*data)

    def test_questions(self, little_memory, labels, numbers):
        little_memory(200)
        model = copy.copy(labels)
        questions = {
            "full_cov=False": lambda: model.latent_mean_and_variance(X, full_cov=True),
            "draw fewer": lambda: model.sample_proba(X, n_samples=1000),
            "link_approx='probit'": lambda: model.predict_proba(X),
            "use return_std=True": lambda: numbers.predict(X_REG, return_cov=True),
        }
        for advice, ask in questions.items():
            refused(ValueError, ["200 bytes are free", advice], ask, model, numbers)
        model.latent_mean_and_variance(X)
        model.set_params(link_approx="probit").predict_proba(X)
        numbers.predict(X_REG, return_std=True)


@pytest.mark.parametrize(
    ("kind", "net", "scoring", "words"),
    [
        (LaplaceClassifierCV, of_classes, "roc_auc", ["multi_class"]),
        (LaplaceRegressorCV, of_numbers, "accuracy", ["continuous"]),
        (LaplaceRegressorCV, of_numbers, "neg_log_loss", ["LaplaceRegressorCV has"]),
    ],
)
def test_scores_that_do_not_suit_the_targets(kind, net, scoring, words):
    words = f"scoring={scoring!r} cannot score", *words, "scoring=None"
    refused_fit(kind(net(), scoring=scoring), *words)
