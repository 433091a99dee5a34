"""Bad input: refused before training, in words that help, everything left alone."""

from functools import partial

import numpy as np
import pytest
import torch
from conftest import global_rng_states
from nets import (
    MLP,
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
from refusals import refused, refused_fit
from scipy import sparse
from sklearn.frozen import FrozenEstimator
from sklearn.utils._param_validation import InvalidParameterError
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import predefined_split
from torch import nn

from sklaplace import (
    LaplaceClassifier,
    LaplaceClassifierCV,
    LaplaceRegressor,
    LaplaceRegressorCV,
)
from sklaplace.curvature.structures import STRUCTURES

X, Y = blobs()
X_REG, Y_REG = waves()
OPTIONS = [
    "subset_of_weights",
    "hessian_structure",
    "curvature",
    "prior_structure",
    "pred_type",
    "link_approx",
]


# nets that record their training
of_classes = partial(classifier, callbacks=[RecordTraining()])
of_numbers = partial(regressor, callbacks=[RecordTraining()])


def for_classes(net=None, **settings):
    return LaplaceClassifier(of_classes() if net is None else net, **settings)


def for_numbers(net=None, **settings):
    return LaplaceRegressor(of_numbers() if net is None else net, **settings)


BOTH = pytest.mark.parametrize("make", [for_classes, for_numbers])


# ------------------------------------------------------------------------ options
def shown(value):
    """Without addresses, which would differ per process."""
    plain = str | int | float | list | dict | None
    return repr(value) if isinstance(value, plain) else type(value).__name__


def settings(*words, error=ValueError, **params):
    """A case: parameters of an estimator, and words of the message about them."""
    name = ",".join(f"{name}={shown(value)}" for name, value in params.items())
    return pytest.param(params, words, error, id=name)


def structure_params(name, *words, **params):
    return settings(*words, hessian_structure=name, structure_params=params)


def subset_params(name, *words, **params):
    return settings(*words, subset_of_weights=name, subset_params=params or None)


OF_KRON = "structure_params", "It takes 'weight_sharing'."
SUM = "structure_params['weight_sharing']='sum'"
TOLERANCE = "structure_params['tolerance']"
NO_DRAWS = {"curvature": "ggn_mc", "curvature_params": {"n_draws": 0}}
EXACT = {"curvature": "hessian"}
FOUR = {"prior_precision": np.ones(4), "hessian_structure": "diag"}
DRAWS = {"subset_of_weights": "all", "pred_type": "nn"}
OF_DRAWS = "pred_type='nn'", "pred_type='glm'"
EF = "refine=True cannot be used with curvature='ef'"

FOR_CLASSES = [
    # options of structures, curvatures and subsets
    structure_params("kron", *OF_KRON, "has 'rank'", "'kron' does not take", rank=3),
    structure_params("kron", SUM, "'expand', 'reduce'", weight_sharing="sum"),
    structure_params("lowrank", "structure_params['rank']=0", "Choose", rank=0),
    structure_params("lowrank", f"{TOLERANCE}=1", "Choose", tolerance=1),
    settings("It takes none.", curvature_params={"rank": 1}),
    settings("curvature_params['n_draws']=0", **NO_DRAWS),
    subset_params(["kronecker"], "['kronecker'] is not known"),
    subset_params([], "is not a list of names"),
    subset_params([1], "is not a list of names"),
    subset_params("all", "'all' does not take", "takes none", by="random"),
    subset_params(["head"], "a list of names does not take", by="random"),
    subset_params("subnetwork", "subset_params['by']=3", by=3),
    subset_params("subnetwork", "subset_params['n_weights']=0", n_weights=0),
    subset_params("subnetwork", "by='magnitude' does not take", lr=0.1),
    subset_params("subnetwork", "by='swag' does not take", by="swag", max_rank=3),
    subset_params("subnetwork", "['lr']=0 is not positive", by="swag", lr=0),
    subset_params("subnetwork", "but the network has", n_weights=10**6),
    subset_params("subnetwork", "not a list of integers", indices=[0.5]),
    subset_params("subnetwork", "negative", indices=[-1]),
    subset_params("subnetwork", "ascending order", indices=[3, 1]),
    subset_params("subnetwork", "Leave out 'by'", indices=[1], by="random"),
    *(
        settings(
            f"'{s}'. Choose hessian_structure='full'", **EXACT, hessian_structure=s
        )
        for s in ("kron", "diag", "lowrank")
    ),
    # the prior
    settings("prior_precision", "shape (21,)", "'diag'", prior_precision=np.ones(21)),
    settings(
        "prior_precision", "shape (2,)", "'layerwise'", prior_precision=np.ones(2)
    ),
    settings("shape (4,)", "'diag'", "(21,)", **FOUR, prior_structure="diag"),
    settings(
        "prior_structure='diag'",
        "hessian_structure='kron'",
        "'layerwise', 'scalar'",
        prior_structure="diag",
    ),
    settings("(5,)", "(21,)", prior_mean=np.zeros(5)),
    # the rest
    settings("refine=True", *OF_DRAWS, **DRAWS, refine=True),
    settings("refine=True", *OF_DRAWS, **DRAWS, refine=np.True_),
]
FOR_NUMBERS = [
    settings(EF, curvature="ef", refine=True, sigma_noise="auto"),
    settings(EF, curvature="ef", refine=True, sigma_noise="validation"),
    settings(
        "sigma_noise='marglik'",
        "prior_precision='validation'",
        sigma_noise="marglik",
        prior_precision="validation",
    ),
    settings("sigma_noise has shape", sigma_noise=np.ones(2)),
]
NOT_POSITIVE = [0, -1.0, np.nan, np.inf, None, True]
COUNTS = [0, -1, 1.5, "a", True]
# what no estimator allows
INVALID = {
    **{name: ["kronecker", "KRON", None, 1] for name in OPTIONS},
    "structure_params": [3, [1, 2, 3], "kron"],
    "class_weight": [3, [1, 2, 3], "balance"],
    "prior_precision": [*NOT_POSITIVE, "marglick", np.ones(0), [1.0, -2.0]],
    "sigma_noise": [*NOT_POSITIVE, "marglick", [], np.ones((60, 1))],
    "temperature": [*NOT_POSITIVE, [1.0]],
    "prior_mean": [np.nan, "a", None, [0.0, np.inf]],
    "refine": ["yes", 1, 0, None, np.array([True, False])],
    "validation_fraction": [0, 1, 5, -0.1, np.nan, "a", None, True],
    "n_samples": COUNTS,
    "batch_size": COUNTS,
    "random_state": ["a", -1, 1.5, np.random.default_rng(0)],
    "verbose": ["x", -1, None],
}


class TestOptions:
    @pytest.mark.parametrize(("params", "words", "error"), FOR_CLASSES)
    def test_of_a_classifier(self, params, words, error):
        refused_fit(for_classes(**params), *words, error=error)

    @pytest.mark.parametrize(("params", "words", "error"), FOR_NUMBERS)
    def test_of_a_regressor(self, params, words, error):
        refused_fit(for_numbers(**params), *words, error=error)

    @pytest.mark.parametrize("name", INVALID)
    def test_invalid_values(self, name):
        make = for_numbers if name == "sigma_noise" else for_classes
        for value in INVALID[name]:
            words = f"The {name!r} parameter of Laplace", f"Got {value!r}"
            refused_fit(make(**{name: value}), *words, error=InvalidParameterError)

    @pytest.mark.parametrize("make", [np.array, torch.tensor])
    def test_numbers_without_axes(self, make):
        data = X_REG.astype("f4"), Y_REG.astype("f4")
        names = "prior_precision", "sigma_noise", "temperature", "prior_mean"
        params = dict.fromkeys(names, make(0.5))
        net = FrozenEstimator(initialised(regressor()))
        LaplaceRegressor(net, residual=make(0.1), **params).fit(*data)

    def test_validation_without_rows(self):
        model = for_classes(prior_precision="validation")
        refused_fit(model, "X_val", "marglik", data=(X[:40], Y[:40]))
        net = FrozenEstimator(initialised(classifier()))
        refused_fit(for_classes(net, prior_precision="validation"), "X_val and y_val")


class TestEstimator:
    def test_frozen_without_weights(self):
        net = FrozenEstimator(classifier())
        refused_fit(for_classes(net), "no weights", "net.initialize()")

    @pytest.mark.parametrize("frozen", [True, False])
    def test_trimmed(self, frozen):
        net = seeded(classifier(), X, Y)
        net.trim_for_prediction()
        net = FrozenEstimator(net) if frozen else net
        refused_fit(for_classes(net), "trimmed for prediction")


TO_THREE = "3 classes", "to 3"
NO_SOFTMAX = "NLLLoss", "softmax", "CrossEntropyLoss"


@pytest.mark.parametrize("frozen", [False, True])
class TestConventions:
    """Nets whose outputs or criterion cannot be right."""

    @pytest.mark.parametrize(
        ("net", "words"),
        [
            (of_classes(module__n_out=2), ["2 outputs", *TO_THREE]),
            (of_classes(module__n_out=1), ["1 output,", "3 classes"]),
            (of_classes(LogSoftmaxMLP, criterion=nn.NLLLoss), NO_SOFTMAX),
            (of_classes(SigmoidMLP, criterion=nn.NLLLoss), NO_SOFTMAX[:2]),
            (
                binary_classifier(callbacks=[RecordTraining()]),
                ["3 classes", "CrossEntropyLoss"],
            ),
            (
                of_classes(criterion__ignore_index=2),
                ["criterion__ignore_index=2", "negative", "-1"],
            ),
            (of_classes(criterion__reduction="none"), ["criterion__reduction"]),
            (of_classes(module__n_in=5), ["shape (2,)"]),
        ],
    )
    def test_of_classifiers(self, net, words, frozen):
        net = FrozenEstimator(initialised(net)) if frozen else net
        refused_fit(for_classes(net), *words)

    @pytest.mark.parametrize(
        ("net", "words"),
        [
            (of_numbers(module__n_out=2), ["2 outputs", "1 column.", "to 1"]),
            (of_numbers(criterion=nn.HuberLoss), ["HuberLoss", "MSELoss"]),
        ],
    )
    def test_of_regressors(self, net, words, frozen):
        net = FrozenEstimator(initialised(net)) if frozen else net
        refused_fit(for_numbers(net), *words)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("weight", "words"),
    [
        ([1.0, 2.0], ["shape (2,)", "3 classes"]),
        (1.0, ["shape ()", "3 classes"]),
        ([1, 2, 3], ["torch.int64", "weight.float()"]),
    ],
    ids=["few", "scalar", "integers"],
)
def test_weights_of_classes_of_the_criterion(weight, words, frozen):
    net = of_classes(criterion__weight=torch.tensor(weight))
    net = FrozenEstimator(initialised(net)) if frozen else net
    refused_fit(for_classes(net), "criterion__weight", *words)


@pytest.mark.parametrize(
    ("value", "words"),
    [({0: 1.0, 5: 2.0}, ["[1, 2]"]), ({0: "a", 1: 1, 2: 1}, [])],
)
def test_weights_of_classes(value, words):
    refused_fit(for_classes(class_weight=value), "class_weight", *words)


@pytest.mark.parametrize("stratified", [False, True])
def test_train_split_of_few_rows(stratified):
    net = of_classes(train_split=ValidSplit(5, stratified=stratified))
    words = "train_split", "cannot split 4 samples", "ValidSplit(2)"
    refused_fit(for_classes(net), *words, data=(X[:4], Y[:4]))


def test_one_logit_where_a_probability_is_expected():
    net = initialised(binary_classifier(criterion=nn.BCELoss))
    with torch.no_grad():
        net.module_.head.bias.fill_(5.0)
    model, data = for_classes(FrozenEstimator(net)), (X, (Y > 0).astype(int))
    refused_fit(model, "BCELoss", "BCEWithLogitsLoss", data=data)


def test_double_softmax_is_warned_of_once():
    model = LaplaceClassifier(classifier(SoftmaxMLP, max_epochs=1))
    with pytest.warns(UserWarning, match="softmax of a softmax") as caught:
        model.fit(X, Y)
    assert len([w for w in caught if "softmax" in str(w.message)]) == 1


# ------------------------------------------------------------------------ the data
def case(name, *words, **fit):
    """Words of the message, and what `refused_fit` takes besides."""
    return pytest.param(words, fit, id=name)


def with_bad(values, bad=np.nan):
    values = values.copy()
    values.flat[7] = bad
    return values


def net_of(*layers):
    return of_classes(nn.Sequential(*layers, nn.Flatten()))


WORDS = np.array(["a", "b", "c"])[Y]
FEW_TARGETS = "60 rows", "30"
UNKNOWN = "has labels that y in fit does not"


class TestData:
    @pytest.mark.parametrize(
        ("words", "fit"),
        [
            # rows
            case("nan", "X contains", data=(with_bad(X), Y)),
            case("inf", "X contains", data=(with_bad(X, np.inf), Y)),
            case("sparse", "toarray", error=TypeError, data=(sparse.dok_array(X), Y)),
            case("text", "string", data=(np.array([["red", "big"]] * 60), Y)),
            case("complex", "Complex data", data=(X * 1j, Y)),
            case("empty", "0 sample(s)", data=(X[:0], Y[:0])),
            case("flat", "Expected 2D array", data=(X[:, 0], Y)),
            case("wide", "rows of shape (5,)", data=(np.ones((60, 5), "f4"), Y)),
            case("few-targets", "[60, 59]", data=(X, Y[:59])),
            case("few-targets-of-a-dict", *FEW_TARGETS, data=({"X": X}, Y[:30])),
            case("huge", "float32", "Scale X", data=(X.astype(float) * 1e39, Y)),
            # targets
            case("continuous", "Unknown label type: continuous", data=(X, Y_REG)),
            case("columns", "1d array", data=(X, np.eye(3)[Y])),
            # rows to tune on
            case("new-label", f"y_val {UNKNOWN}: [3]", X_val=X, y_val=Y + 1),
            case("nan-val", "NaN", X_val=with_bad(X), y_val=Y),
            case("few-targets-val", "[60, 3]", X_val=X, y_val=Y[:3]),
        ],
    )
    def test_of_a_classifier(self, words, fit):
        refused_fit(for_classes(), *words, **fit)

    @pytest.mark.parametrize(
        ("words", "fit"),
        [
            case(
                "huge", "float32", "Scale y", data=(X_REG, Y_REG.astype(float) * 1e60)
            ),
            case("words", "LaplaceClassifier", data=(X, WORDS)),
            case(
                "columns-val",
                "2 columns",
                "y has 1",
                X_val=X_REG,
                y_val=np.stack([Y_REG, Y_REG], 1),
            ),
        ],
    )
    def test_of_a_regressor(self, words, fit):
        refused_fit(for_numbers(), *words, **fit)

    @BOTH
    @pytest.mark.parametrize(
        ("words", "fit"),
        [
            case("no-targets", "requires y to be passed", data=(X, None)),
            case("nan", "y contains NaN", data=(X, with_bad(Y.astype(float)))),
            case("no-y_val", "y_val is missing", "Pass both", X_val=X),
            case("no-X_val", "X_val is missing", "Pass both", y_val=Y),
            *(
                case(f"weights-{word}", word, sample_weight=weights)
                for word, weights in (
                    ("Negative values", np.r_[-1.0, np.ones(59)]),
                    ("non-zero", np.zeros(60)),
                    ("(60,)", np.ones(3)),
                    ("1D array", np.ones((60, 1))),
                    ("NaN", np.full(60, np.nan)),
                )
            ),
        ],
    )
    def test_of_both(self, make, words, fit):
        refused_fit(make(), *words, **fit)

    def test_last_layer_that_is_none(self):
        net, data = net_of(nn.Conv1d(1, 3, 2)), (X[:, None, :], Y)
        refused_fit(for_classes(net), "Conv1d", "subset_of_weights='all'", data=data)

    def test_split_with_targets_of_its_own(self):
        net = classifier(train_split=predefined_split(Dataset(X[::2], Y[::2] + 1)))
        refused_fit(LaplaceClassifier(net), "train_split", data=(X, Y + 1))

    def test_misspelt_argument_of_a_frozen_net(self):
        model = LaplaceClassifier(FrozenEstimator(seeded(classifier(), X, Y)))
        with pytest.raises(TypeError, match=r"'sample_weigth'.*frozen"):
            model.fit(X, Y, sample_weigth=np.ones(len(X)))


# ---------------------------------------------------------------------- divergence
DIVERGING = {"optimizer": torch.optim.SGD, "lr": 1e12}


class TestDivergence:
    """Training that went wrong is called that, and the estimator stays unfitted."""

    @pytest.mark.parametrize(
        ("model", "data"),
        [
            (for_numbers(regressor(max_epochs=5, **DIVERGING)), (X_REG, Y_REG)),
            (
                for_classes(
                    classifier(ReLUNet, max_epochs=5, **{**DIVERGING, "lr": 1e20})
                ),
                (X, Y),
            ),
        ],
        ids=["regressor", "classifier-to-nan"],
    )
    def test_is_named(self, model, data):
        before = global_rng_states()
        with pytest.raises(ValueError, match=r"(?i)diverged") as caught:
            model.set_params(random_state=0).fit(*data)
        assert "learning rate" in str(caught.value)
        assert not hasattr(model, "posterior_")
        assert global_rng_states() == before

    # further warnings, as of the refit, may come before this one or after it
    @pytest.mark.filterwarnings("ignore::UserWarning")
    @pytest.mark.parametrize("module", [MLP, SoftmaxMLP])
    def test_of_a_classifier_to_huge_finite_logits(self, module):
        criterion = nn.CrossEntropyLoss if module is MLP else nn.NLLLoss
        net = classifier(module, criterion=criterion, callbacks=None, **DIVERGING)
        with pytest.warns(UserWarning, match=r"diverged|larger than|rose"):
            LaplaceClassifier(net, random_state=0).fit(X, Y)

    def test_of_a_frozen_net(self):
        net = seeded(classifier(), X, Y)
        with torch.no_grad():
            net.module_.head.weight[0, 0] = torch.nan
        model = for_classes(FrozenEstimator(net))
        refused_fit(model, "not finite", "weights were not loaded")


# -------------------------------------------------------------------------- predict
@pytest.fixture(scope="module")
def fitted():
    net = FrozenEstimator(seeded(classifier(), X, Y))
    return LaplaceClassifier(net, prior_precision=1.0).fit(X, Y)


@pytest.fixture(scope="module")
def numbers():
    """A fitted regressor."""
    net = FrozenEstimator(seeded(regressor(), X_REG, Y_REG[:, None]))
    model = LaplaceRegressor(net, prior_precision=1.0, sigma_noise=0.2)
    return model.fit(X_REG, Y_REG)


class TestPredict:
    METHODS = (
        "predict",
        "predict_proba",
        "predict_log_proba",
        "predict_dirichlet",
        "predict_uncertainty",
        "predict_set",
        "predict_top_k",
        "sample_proba",
        "latent_mean_and_variance",
    )

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize(
        ("rows", "word"),
        [
            (np.ones((3, 5)), "X has 5 features, but LaplaceClassifier is expecting 2"),
            (np.full((3, 2), np.nan), "NaN"),
            (np.ones(3), "Expected 2D array"),
            (np.ones((0, 2)), "0 sample"),
            (np.full((3, 2), 1e300), "float32"),
        ],
    )
    def test_rows(self, method, rows, word, fitted):
        refused(ValueError, [word], lambda: getattr(fitted, method)(rows), fitted)

    @pytest.mark.parametrize("value", [0, 1, 1.5, -0.1, np.nan, 90])
    def test_levels(self, value, numbers):
        for name, call in {
            "coverage": lambda: numbers.predict_interval(X, coverage=value),
            "alpha": lambda: numbers.predict_quantiles(X, [0.5, value]),
        }.items():
            message = refused(ValueError, [name, "between 0 and 1"], call, numbers)
            assert "share of the rows" not in message

    @pytest.mark.parametrize("name", ["link_approx", "pred_type"])
    def test_unknown_options_set_after_fit(self, name, fitted):
        model = LaplaceClassifier(fitted.estimator, prior_precision=1.0).fit(X, Y)
        model.set_params(**{name: "probitt"})
        refused(ValueError, [name, "'probitt'"], lambda: model.predict(X), model)


@pytest.mark.parametrize("name", ["prior_precision", "sigma_noise"])
@pytest.mark.parametrize("value", [0, np.nan, "marglik", [1.0, 2.0], []])
def test_evidence_under_other_values(name, value, fitted, numbers):
    ask = numbers.log_marginal_likelihood
    refused(ValueError, [name], lambda: ask(**{name: value}), numbers)
    with pytest.raises(ValueError, match="no observation noise"):
        fitted.log_marginal_likelihood(sigma_noise=1.0)


class TestSizes:
    """What cannot fit is refused with bytes and something cheaper."""

    @pytest.fixture
    def little_memory(self, monkeypatch):
        monkeypatch.setattr("sklaplace.core.budget.SMALL", 0)

        def leave(n_bytes):
            monkeypatch.setattr(
                "sklaplace.core.budget.free_bytes", lambda _device: n_bytes
            )

        return leave

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

    def test_questions(self, little_memory, fitted, numbers):
        model = LaplaceClassifier(fitted.estimator, prior_precision=1.0).fit(X, Y)
        little_memory(200)
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
    data = (X, Y) if kind is LaplaceClassifierCV else (X_REG, Y_REG)
    words = f"scoring={scoring!r} cannot score", *words, "scoring=None"
    refused_fit(kind(net(), scoring=scoring), *words, data=data)
