"""What users do first by mistake: refused by every estimator, saying what to do."""

from functools import partial

import numpy as np
import pytest
import torch
from nets import (
    MLP,
    QUIET,
    RecordTraining,
    binary_classifier,
    blobs,
    classifier,
    regressor,
    waves,
)
from refusals import CLASSIFIERS, REGRESSORS, refused, refused_fit
from skorch import NeuralNet, NeuralNetClassifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sklaplace import (
    LaplaceClassifier,
    LaplaceRanker,
)

X, Y = blobs()
X_REG, Y_REG = waves()
TWO = (Y > 0).astype(int)
PAIRS = np.random.default_rng(0).normal(size=(40, 2, 2)).astype(np.float32)
PREFERRED = (PAIRS[:, 1].sum(1) > PAIRS[:, 0].sum(1)).astype(int)
LOADER = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)))

RECORD = {"callbacks": [RecordTraining()]}
of_classes = partial(classifier, **RECORD)
of_numbers = partial(regressor, **RECORD)
of_two = partial(classifier, criterion=nn.BCEWithLogitsLoss, **RECORD)

CE = "NeuralNetClassifier(MLP, criterion=torch.nn.CrossEntropyLoss)"
MSE = "NeuralNetRegressor(MLP, criterion=torch.nn.MSELoss)"
SEVERAL = "skorch.NeuralNet with criterion=torch.nn.BCEWithLogitsLoss"
OWN = "pass likelihood=", "sklaplace.likelihoods."
ONE_LOGIT = "One logit stands for two classes", "size of its last layer to 1"
DATASET = "is a DataLoader", "fit(loader.dataset, targets)"
ALONE = "requires y to be passed", "fit(dataset, [y for _, y in dataset])"


def case(name, error, estimator, X, y, *words):
    return pytest.param(error, estimator, X, y, words, id=name)


# what is passed as estimator, X and y, and words of the message
FOR_CLASSES = [
    case("a module", TypeError, MLP(), X, Y, "got MLP", CE),
    case("its class", TypeError, MLP, X, Y, "an instance, not the class", CE),
    case(
        *("a class of nets", TypeError, NeuralNetClassifier, X, Y),
        *("class NeuralNetClassifier", "an instance, not the class"),
    ),
    case(
        *("a net for numbers", ValueError, of_numbers(), X, Y),
        *("criterion=MSELoss has no likelihood here", "or use LaplaceRegressor"),
    ),
    case(
        *("unknown loss", ValueError, of_classes(criterion=nn.MultiMarginLoss), X, Y),
        *("criterion=MultiMarginLoss", "torch.nn.CrossEntropyLoss", *OWN),
    ),
    case("a loader", TypeError, of_classes(), LOADER, Y, *DATASET),
    case(
        *("one-hot targets", ValueError, of_classes(), X, np.eye(3)[Y]),
        *("If y is one-hot, pass y.argmax(axis=1)", SEVERAL),
    ),
    case(
        *("one-hot, one logit", ValueError, binary_classifier(**RECORD), X),
        *(np.eye(2)[TWO], "if y is one-hot, pass y.argmax(axis=1)", SEVERAL),
    ),
    case(
        *("two logits", ValueError, of_two(module__n_out=2), X, TWO),
        *("2 outputs", *ONE_LOGIT, "CrossEntropyLoss"),
    ),
    case(
        *("two logits of a binary net", ValueError),
        *(binary_classifier(module__n_out=2, **RECORD), X, TWO),
        *("cannot be applied to rows", "Expected module output to have shape"),
    ),
    case(
        *("one class", ValueError, of_classes(), X, np.zeros(60, int), "y has 1 class"),
        *("two classes or more", "partial_fit(X, y, classes=...) of LaplaceClassifier"),
    ),
    case("a dataset alone", ValueError, of_classes(), LOADER.dataset, None, *ALONE),
]
FOR_NUMBERS = [
    case("a module", TypeError, MLP(), X_REG, Y_REG, "got MLP", MSE),
    case(
        *("a net for classes", ValueError, of_classes(), X_REG, Y_REG),
        *("criterion=CrossEntropyLoss", "or use ", "Classifier"),
        *("torch.nn.MSELoss", "likelihoods.Heteroscedastic"),
    ),
    case(
        *("unknown loss", ValueError, of_numbers(criterion=nn.L1Loss), X_REG, Y_REG),
        *("criterion=L1Loss", "torch.nn.MSELoss", *OWN),
    ),
    case(
        *("one-hot targets", ValueError, of_classes(), X, np.eye(3)[Y]),
        *("criterion=CrossEntropyLoss", "Classifier"),
    ),
]


@pytest.mark.parametrize("kind", CLASSIFIERS)
@pytest.mark.parametrize(("error", "estimator", "X", "y", "words"), FOR_CLASSES)
def test_of_classifiers(kind, error, estimator, X, y, words):
    refused_fit(kind(estimator, random_state=0), *words, error=error, data=(X, y))


@pytest.mark.parametrize("kind", REGRESSORS)
@pytest.mark.parametrize(("error", "estimator", "X", "y", "words"), FOR_NUMBERS)
def test_of_regressors(kind, error, estimator, X, y, words):
    refused_fit(kind(estimator, random_state=0), *words, error=error, data=(X, y))


@pytest.mark.parametrize("kind", [*CLASSIFIERS, *REGRESSORS, LaplaceRanker])
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [(LOADER, TypeError, DATASET), (LOADER.dataset, ValueError, ALONE)],
    ids=["loader", "dataset"],
)
def test_no_targets_at_all(kind, given, error, words):
    """``fit(loader)`` and ``fit(dataset)`` are told what to pass, too."""
    model = kind()
    refused(error, words, partial(model.fit, given), model)


@pytest.mark.parametrize("reason", ["several", "none", "few rows", "a net for them"])
def test_columns_that_are_meant_as_several_labels(reason):
    """Those of a row with several or none, few rows, and nets that take columns."""
    columns, net, n = np.eye(3)[Y], None, 60
    if reason in ("several", "none"):
        columns[0] = reason == "several"
    if reason == "few rows":
        n = 9
    if reason == "a net for them":
        net = NeuralNet(MLP, nn.BCEWithLogitsLoss, max_epochs=1, **QUIET)
    fixed = {"prior_precision": 1.0, "random_state": 0}
    model = LaplaceClassifier(net, **fixed).fit(X[:n], columns[:n].astype(np.float32))
    assert model.predict_proba(X).shape == (60, 3)


@pytest.mark.parametrize(
    ("error", "estimator", "X", "y", "words"),
    [
        case(
            *("a module", TypeError, MLP(), PAIRS, PREFERRED, "got MLP"),
            *("NeuralNetBinaryClassifier(sklaplace.BradleyTerry", "BCEWithLogitsLoss"),
        ),
        case(
            *("a net for numbers", ValueError, of_numbers(), PAIRS, PREFERRED),
            *("criterion=MSELoss", "or use LaplaceRegressor"),
        ),
        case(
            *("several logits", ValueError, of_classes(), PAIRS, PREFERRED),
            *("criterion=CrossEntropyLoss has no", "BCEWithLogitsLoss"),
        ),
        case(
            *("one-hot", ValueError, None, PAIRS, np.eye(2)[PREFERRED]),
            *("(40, 2)", "A pair has one of two labels", "y.argmax(axis=1)"),
        ),
        case(
            *("one class", ValueError, None, PAIRS, 0 * PREFERRED),
            "A pair has one of two labels",
        ),
    ],
)
def test_of_the_ranker(error, estimator, X, y, words):
    refused_fit(LaplaceRanker(estimator), *words, error=error, data=(X, y))


@pytest.mark.parametrize("y", [None, Y])
def test_loaders_to_tune_on(y):
    model = LaplaceClassifier(random_state=0).fit(X, Y)
    words = "is a DataLoader", "tune(loader.dataset, targets)"
    refused(TypeError, words, partial(model.tune, LOADER, y), model)


# ------------------------------------------------------------ a net that has weights
