"""Bad input: refused before training, in words that help, everything left alone."""

import numpy as np
import pytest
import torch
from conftest import global_rng_states
from nets import (
    MLP,
    LogSoftmaxMLP,
    RecordTraining,
    ReLUNet,
    SigmoidMLP,
    SoftmaxMLP,
    TwoInputs,
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
from sklearn.ensemble import RandomForestClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from skorch.dataset import Dataset
from skorch.helper import predefined_split
from torch import nn

from sklaplace import LaplaceClassifier, LaplaceRegressor

X, Y = blobs()
X_REG, Y_REG = waves()
RECORD = {"callbacks": [RecordTraining()]}
OPTIONS = [
    "subset_of_weights",
    "hessian_structure",
    "curvature",
    "prior_structure",
    "pred_type",
    "link_approx",
]


def for_classes(net=None, **settings):
    """Estimator around a net that records its training."""
    return LaplaceClassifier(classifier(**RECORD) if net is None else net, **settings)


def for_numbers(net=None, **settings):
    return LaplaceRegressor(regressor(**RECORD) if net is None else net, **settings)


# ------------------------------------------------------------------------ options
class TestOptions:
    @pytest.mark.parametrize("name", OPTIONS)
    @pytest.mark.parametrize("value", ["kronecker", None, 1, ["kron"]])
    def test_unknown_values(self, name, value):
        model = for_classes(**{name: value})
        refused_fit(model, f"{name}={value!r} is not known. Choose one of '")

    @pytest.mark.parametrize("name", OPTIONS[:-1])
    def test_unknown_values_of_the_regressor(self, name):
        refused_fit(for_numbers(**{name: "x"}), f"{name}='x' is not known")

    def test_a_near_miss_is_named(self):
        message = refused_fit(for_classes(hessian_structure="kronecker"))
        assert message == (
            "hessian_structure='kronecker' is not known. Choose one of 'diag', "
            "'full', 'gp', 'kron', 'lowrank', 'nystrom', 'variational'. "
            "Did you mean 'kron'?"
        )

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (
                {"rank": 3},
                ["has 'rank'", "'kron' does not take", "It takes 'weight_sharing'."],
            ),
            ({"n_draws": 3}, ["It takes 'weight_sharing'."]),
            ({"weight_sharing": "sum"}, ["'sum'", "'expand', 'reduce'"]),
        ],
    )
    def test_options_of_another_structure(self, options, words):
        refused_fit(for_classes(structure_params=options), "structure_params", *words)
        refused_fit(for_classes(curvature_params={"rank": 1}), "It takes none.")

    @pytest.mark.parametrize(
        ("option", "value"),
        [("rank", 0), ("rank", 2.5), ("tolerance", 1), ("tolerance", "small")],
    )
    def test_values_of_options(self, option, value):
        model = for_classes(
            hessian_structure="lowrank", structure_params={option: value}
        )
        refused_fit(model, f"structure_params['{option}']={value!r}", "Choose")

    def test_unknown_options(self):
        lowrank = {"hessian_structure": "lowrank"}
        model = for_classes(structure_params={"rang": 3}, **lowrank)
        refused_fit(model, "has 'rang'", "It takes 'rank', 'tolerance'.")
        model = for_classes(structure_params=3, **lowrank)
        refused_fit(model, "is of type int", "Pass a dict", error=TypeError)
        model = for_classes(curvature="ggn_mc", curvature_params={"n_draws": 0})
        refused_fit(model, "curvature_params['n_draws']=0")

    @pytest.mark.parametrize(
        ("subset", "options", "words"),
        [
            ([], None, ["is not a list of names"]),
            ([1], None, ["is not a list of names"]),
            (["output"], None, ["['output'] is not known"]),
            ("all", {"by": "random"}, ["'all' does not take", "takes none"]),
            (["head"], {"by": "random"}, ["a list of names does not take"]),
            ("subnetwork", {"by": "size"}, ["'magnitude', 'random', 'swag'"]),
            ("subnetwork", {"by": 3}, ["subset_params['by']=3"]),
            ("subnetwork", {"n_weights": 0}, ["subset_params['n_weights']=0"]),
            ("subnetwork", {"n_weights": 10**6}, ["but the network has"]),
            ("subnetwork", {"indices": [0.5]}, ["not a list of integers"]),
            ("subnetwork", {"indices": []}, ["not a list of integers"]),
            ("subnetwork", {"indices": [-1]}, ["negative"]),
            ("subnetwork", {"indices": [3, 1]}, ["ascending order"]),
            ("subnetwork", {"indices": [1, 1]}, ["repeat"]),
            ("subnetwork", {"indices": [1], "by": "random"}, ["Leave out 'by'"]),
        ],
    )
    def test_options_of_the_subset(self, subset, options, words):
        model = for_classes(subset_of_weights=subset, subset_params=options)
        refused_fit(model, *words)

    @pytest.mark.parametrize("value", ["even", {9: 2.0}, 3])
    def test_class_weight(self, value):
        error = TypeError if value == 3 else ValueError
        refused_fit(for_classes(class_weight=value), "class_weight", error=error)

    @pytest.mark.parametrize("structure", ["kron", "diag", "lowrank"])
    def test_exact_hessian_needs_the_full_structure(self, structure):
        model = for_classes(curvature="hessian", hessian_structure=structure)
        refused_fit(model, f"'{structure}'. Choose hessian_structure='full'")

    @pytest.mark.parametrize("noise", ["auto", "validation"])
    def test_empirical_fisher_with_noise_on_held_out_rows(self, noise):
        model = for_numbers(curvature="ef", refine=True, sigma_noise=noise)
        refused_fit(model, "refine=True cannot be used with curvature='ef'")

    @pytest.mark.parametrize("value", [0, -1.0, np.nan, np.inf, None, True])
    @pytest.mark.parametrize("name", ["prior_precision", "temperature"])
    def test_numbers_that_must_be_positive(self, name, value):
        refused_fit(
            for_classes(**{name: value}), f"{name}={value}", "Choose a positive"
        )

    @pytest.mark.parametrize("value", [0, -1.0, np.nan, np.inf, None, True])
    def test_noise_must_be_positive(self, value):
        message = refused_fit(for_numbers(sigma_noise=value), f"sigma_noise={value}")
        assert "array" not in message

    @pytest.mark.parametrize("name", ["prior_precision", "sigma_noise"])
    def test_unknown_tuner(self, name):
        refused_fit(
            for_numbers(**{name: "marglick"}),
            f"{name}='marglick'",
            "'auto', 'marglik', 'validation'",
            "Did you mean 'marglik'?",
        )

    def test_conflicting_tuners(self):
        model = for_numbers(prior_precision="marglik", sigma_noise="validation")
        refused_fit(model, "prior_precision='marglik'", "sigma_noise='validation'")

    @pytest.mark.parametrize("shape", [(3,), (1, 1), (21,), (2,), (0,)])
    def test_prior_precision_of_another_shape_than_scalar(self, shape):
        model = for_classes(prior_precision=np.ones(shape))
        message = refused_fit(model, "prior_precision")
        assert shape == (0,) or f"shape {shape}" in message
        if shape == (21,):
            assert "'diag'" in message
        if shape == (2,):
            assert "'layerwise'" in message

    @pytest.mark.parametrize("structure", ["layerwise", "diag"])
    def test_prior_precision_of_another_shape(self, structure):
        model = for_classes(
            prior_precision=np.ones(4),
            prior_structure=structure,
            hessian_structure="diag",
        )
        expected = {"layerwise": "(2,)", "diag": "(21,)"}[structure]
        refused_fit(model, "shape (4,)", f"{structure!r}", expected)

    def test_prior_precision_with_one_bad_entry(self):
        model = for_classes(prior_precision=[1.0, -2.0], prior_structure="layerwise")
        refused_fit(model, "-2")

    def test_diagonal_prior_with_kron(self):
        refused_fit(
            for_classes(prior_structure="diag"),
            "prior_structure='diag'",
            "hessian_structure='kron'",
            "'layerwise', 'scalar'",
        )

    @pytest.mark.parametrize("value", [np.ones(2), [], np.ones((60, 1))])
    def test_noise_is_one_number_or_one_per_column(self, value):
        words = (
            ["sigma_noise has shape"] if len(value) else ["sigma_noise=", "positive"]
        )
        refused_fit(for_numbers(sigma_noise=value), *words)

    @pytest.mark.parametrize("value", [np.nan, "a", None, [0.0, np.inf]])
    def test_prior_mean_that_is_no_number(self, value):
        refused_fit(for_classes(prior_mean=value), "prior_mean=")

    def test_prior_mean_of_another_shape(self):
        refused_fit(for_classes(prior_mean=np.zeros(5)), "(5,)", "(21,)")

    @pytest.mark.parametrize("value", ["yes", 1, 0, None, np.array([True, False])])
    def test_refine(self, value):
        refused_fit(for_classes(refine=value), "refine=", "True, False or 'auto'")

    @pytest.mark.parametrize("value", [True, np.True_])
    def test_refine_of_all_weights_and_draws_of_them(self, value):
        model = for_classes(refine=value, subset_of_weights="all", pred_type="nn")
        refused_fit(model, "refine=True", "pred_type='nn'", "pred_type='glm'")

    @pytest.mark.parametrize("value", [0, 1, 5, -0.1, np.nan, "a", None, True])
    def test_validation_fraction(self, value):
        refused_fit(
            for_classes(validation_fraction=value), "validation_fraction=", "0.2"
        )

    @pytest.mark.parametrize("name", ["n_samples", "batch_size"])
    @pytest.mark.parametrize("value", [0, -1, 1.5, "a", True])
    def test_counts(self, name, value):
        refused_fit(for_classes(**{name: value}), f"{name}={value!r}", "1 or more")

    @pytest.mark.parametrize("value", ["a", -1, 1.5, np.random.default_rng(0)])
    def test_random_state(self, value):
        refused_fit(for_classes(random_state=value), "random_state")

    @pytest.mark.parametrize("value", ["x", -1, None])
    def test_verbose(self, value):
        refused_fit(for_classes(verbose=value), "verbose=")

    def test_validation_without_rows(self):
        model = for_classes(prior_precision="validation")
        refused_fit(model, "X_val", "marglik", data=(X[:40], Y[:40]))

    def test_validation_without_rows_for_a_frozen_net(self):
        net = FrozenEstimator(initialised(classifier()))
        refused_fit(for_classes(net, prior_precision="validation"), "X_val and y_val")


# ----------------------------------------------------------------- the estimator
class TestEstimator:
    @pytest.mark.parametrize(
        ("value", "words"),
        [
            (NeuralNetClassifier, ["class NeuralNetClassifier", "instance"]),
            (MLP, ["class MLP", "NeuralNetClassifier(MLP)"]),
            (MLP(), ["got MLP", "NeuralNetClassifier"]),
            (make_pipeline(StandardScaler(), classifier()), ["got Pipeline"]),
            (LogisticRegression(), ["got LogisticRegression"]),
            (RandomForestClassifier, ["class RandomForestClassifier"]),
            ("mlp", ["got str"]),
            (LaplaceClassifier(), ["got LaplaceClassifier"]),
            (
                FrozenEstimator(make_pipeline(StandardScaler(), classifier())),
                ["got Pipeline"],
            ),
        ],
        ids=[
            "net-class",
            "module-class",
            "module",
            "pipeline",
            "other",
            "other-class",
            "text",
            "laplace",
            "frozen-pipeline",
        ],
    )
    def test_of_another_type(self, value, words):
        refused_fit(LaplaceClassifier(value), *words, error=TypeError)

    def test_frozen_without_weights(self):
        net = FrozenEstimator(classifier())
        refused_fit(for_classes(net), "no weights", "net.initialize()")

    @pytest.mark.parametrize("frozen", [True, False])
    def test_trimmed(self, frozen):
        net = seeded(classifier(), X, Y)
        net.trim_for_prediction()
        net = FrozenEstimator(net) if frozen else net
        refused_fit(for_classes(net), "trimmed for prediction")


class Conventions:
    """Nets whose outputs or criterion cannot be right, with words of the message."""

    cases = (
        (classifier(module__n_out=2, **RECORD), ["2 outputs", "3 classes", "to 3"]),
        (classifier(module__n_out=7, **RECORD), ["7 outputs", "3 classes", "to 3"]),
        (classifier(module__n_out=1, **RECORD), ["1 output,", "3 classes"]),
        (
            classifier(LogSoftmaxMLP, criterion=nn.NLLLoss, **RECORD),
            ["NLLLoss", "softmax", "CrossEntropyLoss"],
        ),
        (
            classifier(criterion=nn.NLLLoss, **RECORD),
            ["NLLLoss", "softmax", "CrossEntropyLoss"],
        ),
        (binary_classifier(**RECORD), ["3 classes", "CrossEntropyLoss"]),
        (
            classifier(criterion__ignore_index=2, **RECORD),
            ["criterion__ignore_index=2", "negative", "-1"],
        ),
        (classifier(criterion__reduction="none", **RECORD), ["criterion__reduction"]),
        (
            regressor(module__n_out=3, **RECORD),
            ["MSELoss", "LaplaceRegressor"],
        ),
        (classifier(criterion=nn.MultiMarginLoss, **RECORD), ["MultiMarginLoss"]),
        (classifier(module__n_in=5, **RECORD), ["shape (2,)"]),
    )


class TestConventions:
    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize(("net", "words"), Conventions.cases)
    def test_of_classifiers(self, net, words, frozen):
        if frozen:
            net = FrozenEstimator(initialised(net))
        refused_fit(for_classes(net), *words)

    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize(
        ("net", "words"),
        [
            (regressor(module__n_out=2, **RECORD), ["2 outputs", "1 column.", "to 1"]),
            (regressor(criterion=nn.L1Loss, **RECORD), ["L1Loss", "MSELoss"]),
            (regressor(criterion=nn.HuberLoss, **RECORD), ["HuberLoss", "MSELoss"]),
            (classifier(**RECORD), ["CrossEntropyLoss", "LaplaceClassifier"]),
        ],
    )
    def test_of_regressors(self, net, words, frozen):
        if frozen:
            net = FrozenEstimator(initialised(net))
        refused_fit(for_numbers(net), *words)

    def test_frozen_net_with_fewer_classes(self):
        labels = (Y > 0).astype(int)
        net = FrozenEstimator(seeded(classifier(module__n_out=2), X, labels))
        refused_fit(for_classes(net), "2 outputs", "3 classes")

    def test_one_logit_where_a_probability_is_expected(self):
        net = initialised(binary_classifier(criterion=nn.BCELoss))
        with torch.no_grad():
            net.module_.head.bias.fill_(5.0)
        data = X, (Y > 0).astype(int)
        model = for_classes(FrozenEstimator(net))
        refused_fit(model, "BCELoss", "BCEWithLogitsLoss", data=data)

    def test_double_softmax_is_warned_of_once(self):
        model = LaplaceClassifier(classifier(SoftmaxMLP, max_epochs=1))
        with pytest.warns(UserWarning, match="softmax of a softmax") as caught:
            model.fit(X, Y)
        assert len([w for w in caught if "softmax" in str(w.message)]) == 1

    def test_last_layer_that_is_none(self):
        net = classifier(nn.Sequential(nn.Conv1d(1, 3, 2), nn.Flatten()), **RECORD)
        data = X[:, None, :], Y
        refused_fit(for_classes(net), "Conv1d", "subset_of_weights='all'", data=data)

    def test_sigmoid_outputs_with_three_classes(self):
        net = classifier(SigmoidMLP, criterion=nn.NLLLoss, **RECORD)
        refused_fit(for_classes(net), "NLLLoss", "softmax")


# ------------------------------------------------------------------------ the data
def with_nan(values):
    values = values.copy()
    values[3] = np.nan
    return values


class TestRows:
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_not_finite(self, bad):
        rows = X.copy()
        rows[3, 1] = bad
        refused_fit(for_classes(), "X contains", data=(rows, Y))

    @pytest.mark.parametrize(
        "make", [sparse.csr_array, sparse.coo_matrix, sparse.dok_array]
    )
    def test_sparse(self, make):
        message = refused_fit(for_classes(), error=TypeError, data=(make(X), Y))
        assert "Sparse data was passed" in message
        assert "toarray" in message

    def test_text(self):
        rows = np.array([["red", "big"]] * 60)
        refused_fit(for_classes(), "string", data=(rows, Y))

    def test_complex(self):
        refused_fit(for_classes(), "Complex data", data=(X * 1j, Y))

    def test_empty_and_flat(self):
        refused_fit(for_classes(), "0 sample(s)", data=(X[:0], Y[:0]))
        refused_fit(for_classes(), "Expected 2D array", data=(X[:, 0], Y))

    def test_of_other_number_than_targets(self):
        refused_fit(for_classes(), "[60, 59]", data=(X, Y[:59]))
        data = Dataset(X, Y), Y[:30]
        refused_fit(for_classes(), "60 rows", "30", data=data)
        data = {"X": X}, Y[:30]
        refused_fit(for_classes(), "60 rows", "30", data=data)

    @pytest.mark.parametrize("scale", [1e30, 1e300])
    def test_too_large_for_float32(self, scale):
        rows = X.astype(np.float64) * scale
        if scale == 1e30:
            rows *= 1e9
        refused_fit(for_classes(), "float32", "Scale X", data=(rows, Y))
        target = Y_REG.astype(np.float64) * 1e60
        refused_fit(for_numbers(), "float32", "Scale y", data=(X_REG, target))

    def test_of_another_width_than_the_net(self):
        data = np.ones((60, 5), np.float32), Y
        refused_fit(for_classes(), "rows of shape (5,)", data=data)

    def test_tokens_given_as_numbers(self):
        net = classifier(nn.Sequential(nn.Embedding(9, 4), nn.Flatten()), **RECORD)
        data = np.ones((60, 2)), Y
        refused_fit(for_classes(net), "integers", data=data)


class TestTargets:
    @pytest.mark.parametrize("make", [for_classes, for_numbers])
    def test_none(self, make):
        refused_fit(make(), "requires y to be passed", data=(X, None))

    def test_continuous_labels(self):
        refused_fit(for_classes(), "Unknown label type: continuous", data=(X, Y_REG))

    def test_several_columns_of_labels(self):
        refused_fit(for_classes(), "1d array", data=(X, np.eye(3)[Y]))

    def test_words_for_a_regressor(self):
        words = np.array(["a", "b", "c"])[Y]
        refused_fit(for_numbers(), "LaplaceClassifier", data=(X, words))

    @pytest.mark.parametrize("make", [for_classes, for_numbers])
    def test_not_finite(self, make):
        refused_fit(make(), "y contains NaN", data=(X, with_nan(Y.astype(float))))


class TestWeights:
    @pytest.mark.parametrize(
        ("weights", "word"),
        [
            (-np.ones(60), "Negative values"),
            (np.r_[-1.0, np.ones(59)], "Negative values"),
            (np.zeros(60), "non-zero"),
            (np.ones(3), "(60,)"),
            (np.ones((60, 1)), "1D array"),
            (np.full(60, np.nan), "NaN"),
        ],
    )
    @pytest.mark.parametrize("make", [for_classes, for_numbers])
    def test_are_refused(self, weights, word, make):
        refused_fit(make(), word, sample_weight=weights)


class TestValidationRows:
    @pytest.mark.parametrize("make", [for_classes, for_numbers])
    def test_come_with_targets(self, make):
        refused_fit(make(), "y_val is missing", "Pass both", X_val=X)
        refused_fit(make(), "X_val is missing", "Pass both", y_val=Y)

    def test_have_known_labels(self):
        refused_fit(for_classes(), "y_val", "[3]", X_val=X, y_val=Y + 1)
        words = np.array(["a", "b", "c"])[Y]
        refused_fit(for_classes(), "y_val", "'a'", X_val=X, y_val=words)

    def test_look_like_the_training_rows(self):
        refused_fit(for_classes(), "1 features", X_val=X[:, :1], y_val=Y)
        refused_fit(for_classes(), "NaN", X_val=with_nan(X), y_val=Y)
        refused_fit(for_classes(), "[60, 3]", X_val=X, y_val=Y[:3])
        both = np.stack([Y_REG, Y_REG], 1)
        refused_fit(for_numbers(), "2 columns", "y has 1", X_val=X_REG, y_val=both)


# ---------------------------------------------------------------------- divergence
class TestDivergence:
    """Training that went wrong is called that, and the estimator stays unfitted."""

    def diverged(self, estimator, net, data):
        before = global_rng_states()
        model = estimator(net, random_state=0)
        with pytest.raises(ValueError, match=r"(?i)diverged") as caught:
            model.fit(*data)
        assert "learning rate" in str(caught.value)
        assert not hasattr(model, "posterior_")
        assert global_rng_states() == before

    @pytest.mark.parametrize("max_epochs", [5, 50])
    def test_of_a_regressor(self, max_epochs):
        net = regressor(optimizer=torch.optim.SGD, lr=1e12, max_epochs=max_epochs)
        self.diverged(LaplaceRegressor, net, (X_REG, Y_REG))

    def test_of_a_classifier_to_nan(self):
        net = classifier(ReLUNet, optimizer=torch.optim.SGD, lr=1e20, max_epochs=5)
        self.diverged(LaplaceClassifier, net, (X, Y))

    # further warnings, as of the refit, may come before this one or after it
    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("module", [MLP, SoftmaxMLP])
    def test_of_a_classifier_to_huge_finite_logits(self, module):
        criterion = nn.CrossEntropyLoss if module is MLP else nn.NLLLoss
        net = classifier(
            module,
            criterion=criterion,
            optimizer=torch.optim.SGD,
            lr=1e12,
            callbacks=None,
        )
        model = LaplaceClassifier(net, random_state=0)
        with pytest.warns(UserWarning, match=r"diverged|larger than|rose") as caught:
            model.fit(X, Y)
        assert len(caught) >= 1

    def test_of_a_frozen_net(self):
        net = seeded(classifier(), X, Y)
        with torch.no_grad():
            net.module_.head.weight[0, 0] = torch.nan
        model = for_classes(FrozenEstimator(net))
        refused_fit(model, "not finite", "weights were not loaded")

    def test_on_some_rows_only(self):
        net = seeded(classifier(ReLUNet), X, Y)
        rows = X.copy()
        rows[40] = 1e37
        # Each term of the first layer is infinite, however these are added, and the
        # difference of such terms in the second is no number.
        with torch.no_grad():
            net.module_.first.weight.fill_(100)
            net.module_.second.weight[:, ::2] = -1
            net.module_.second.weight[:, 1::2] = 1
            finite = net.module_(torch.as_tensor(rows)).isfinite().all(1)
        assert (~finite).nonzero().tolist() == [[40]]
        model = for_classes(FrozenEstimator(net))
        refused_fit(model, "not finite", data=(rows, Y))


# -------------------------------------------------------------------------- predict
@pytest.fixture(scope="module")
def fitted():
    net = FrozenEstimator(seeded(classifier(), X, Y))
    return LaplaceClassifier(net, prior_precision=1.0).fit(X, Y)


@pytest.fixture(scope="module")
def fitted_numbers():
    net = FrozenEstimator(seeded(regressor(), X_REG, Y_REG[:, None]))
    settings = {"prior_precision": 1.0, "sigma_noise": 0.2}
    return LaplaceRegressor(net, **settings).fit(X_REG, Y_REG)


class TestPredict:
    METHODS = (
        "predict",
        "predict_proba",
        "predict_log_proba",
        "predict_dirichlet",
        "predict_uncertainty",
        "predict_set",
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

    @pytest.mark.parametrize("make", [sparse.csr_array, sparse.dok_array])
    def test_sparse(self, make, fitted):
        refused(TypeError, ["Sparse"], lambda: fitted.predict(make(X)), fitted)

    def test_outputs_that_overflow(self, fitted):
        net = seeded(classifier(), X, Y)
        with torch.no_grad():
            net.module_.head.weight.mul_(1e30)
        model = LaplaceClassifier(FrozenEstimator(net), prior_precision=1.0)
        with pytest.warns(UserWarning, match="larger than that of guessing"):
            model.fit(X, Y)
        with torch.no_grad():
            model.estimator_.module_.head.weight.mul_(1e30)
        refused(ValueError, ["not finite"], lambda: model.predict(X), model)

    @pytest.mark.parametrize("value", [0, 1, 1.5, -0.1, np.nan, 90])
    def test_levels(self, value, fitted_numbers):
        model = fitted_numbers
        for name, call in {
            "coverage": lambda: model.predict_interval(X, coverage=value),
            "alpha": lambda: model.predict_quantiles(X, [0.5, value]),
        }.items():
            message = refused(ValueError, [name, "between 0 and 1"], call, model)
            assert "share of the rows" not in message

    def test_levels_that_are_no_numbers(self, fitted_numbers):
        model = fitted_numbers
        refused(ValueError, ["alpha"], lambda: model.predict_quantiles(X, "a"), model)

    def test_std_and_covariance_at_once(self, fitted_numbers):
        model = fitted_numbers
        refused(
            RuntimeError,
            ["return_std", "return_cov"],
            lambda: model.predict(X, return_std=True, return_cov=True),
            model,
        )

    @pytest.mark.parametrize("value", [0, -1, 1.5, None])
    def test_number_of_samples(self, value, fitted, fitted_numbers):
        for call, model in (
            (lambda: fitted.sample_proba(X, value), fitted),
            (lambda: fitted_numbers.sample_y(X, value), fitted_numbers),
        ):
            refused(ValueError, [f"n_samples={value!r}"], call, model)

    @pytest.mark.parametrize("value", ["a", -1, 1.5])
    def test_random_state(self, value, fitted, fitted_numbers):
        for call, model in (
            (lambda: fitted.sample_proba(X, 2, value), fitted),
            (lambda: fitted_numbers.sample_y(X, 2, value), fitted_numbers),
        ):
            refused(ValueError, ["random_state"], call, model)

    def test_unknown_options_set_after_fit(self, fitted):
        model = LaplaceClassifier(fitted.estimator, prior_precision=1.0).fit(X, Y)
        model.set_params(link_approx="probitt")
        refused(ValueError, ["link_approx='probitt'"], lambda: model.predict(X), model)
        model.set_params(link_approx="auto", pred_type="gml")
        refused(ValueError, ["pred_type='gml'"], lambda: model.predict(X), model)


class TestEvidence:
    @pytest.mark.parametrize("value", [0, -1, np.nan, "marglik", [1.0, 2.0], []])
    def test_prior_precision(self, value, fitted):
        call = lambda: fitted.log_marginal_likelihood(value)  # noqa: E731
        refused(ValueError, ["prior_precision"], call, fitted)

    @pytest.mark.parametrize("value", [0, -1, np.nan, "marglik", [1.0, 2.0]])
    def test_noise(self, value, fitted_numbers):
        call = lambda: fitted_numbers.log_marginal_likelihood(  # noqa: E731
            sigma_noise=value
        )
        refused(ValueError, ["sigma_noise"], call, fitted_numbers)

    def test_noise_of_a_classifier(self, fitted):
        call = lambda: fitted.log_marginal_likelihood(sigma_noise=1.0)  # noqa: E731
        refused(ValueError, ["sigma_noise"], call, fitted)


def test_misspelt_argument_of_a_frozen_net():
    model = LaplaceClassifier(FrozenEstimator(seeded(classifier(), X, Y)))
    with pytest.raises(TypeError, match=r"'sample_weigth'.*frozen"):
        model.fit(X, Y, sample_weigth=np.ones(len(X)))


def test_split_with_targets_of_its_own():
    labels = Y + 1
    rows = Dataset(X[::2], labels[::2])
    net = classifier(train_split=predefined_split(rows))
    refused_fit(LaplaceClassifier(net), "train_split", data=(X, labels))


def test_no_rows():
    both = {"left": np.ones((9, 2), "f4"), "right": np.ones((9, 3), "f4")}
    net = seeded(classifier(TwoInputs, module__n_out=2), both, np.arange(9) % 2)
    model = LaplaceClassifier(FrozenEstimator(net), prior_precision=1.0)
    model.fit(both, np.arange(9) % 2)
    with pytest.raises(ValueError, match="X has 0 rows"):
        model.predict({name: rows[:0] for name, rows in both.items()})


class TestSizes:
    """What cannot fit is refused with bytes and something cheaper."""

    @pytest.fixture
    def little_memory(self, monkeypatch):
        def leave(n_bytes):
            monkeypatch.setattr(
                "sklaplace.core.budget.free_bytes", lambda _device: n_bytes
            )

        return leave

    @pytest.mark.parametrize("structure", ["full", "kron"])
    def test_structures(self, structure, little_memory):
        little_memory(100)
        model = LaplaceClassifier(
            classifier(**RECORD), subset_of_weights="all", hessian_structure=structure
        )
        words = [structure, "parameters needs", "100 bytes are free", "'diag'"]
        words += ["subset_of_weights='last_layer'"]
        refused(ValueError, words, lambda: model.fit(X, Y), model)

    def test_full_structures_of_few_rows_are_small(self, little_memory):
        """In the dual form a matrix of parameters by parameters never exists."""
        net = classifier(module__width=400, train_split=None)
        model = LaplaceClassifier(
            net, subset_of_weights="all", hessian_structure="full", prior_precision=1.0
        )
        n_parameters = 2 * 400 + 400 + 400 * 3 + 3
        little_memory(4 * 8 * n_parameters**2 // 2)
        model.fit(X[:20], Y[:20])
        assert model.posterior_.layout.n_parameters == n_parameters

    def test_rows_to_refit_on(self, little_memory):
        little_memory(3_000)
        model = LaplaceClassifier(
            classifier(**RECORD), hessian_structure="diag", refine=True
        )
        words = ["refitting the last layer on", "rows needs", "refine=False"]
        refused(ValueError, words, lambda: model.fit(X, Y), model)
        model.set_params(refine=False, prior_precision=1.0).fit(X, Y)

    def test_questions(self, little_memory):
        model = LaplaceClassifier(classifier(), prior_precision=1.0).fit(X, Y)
        line = LaplaceRegressor(regressor(), prior_precision=1.0, sigma_noise=1.0)
        line.fit(X_REG, Y_REG)
        little_memory(200)
        questions = {
            "full_cov=False": lambda: model.latent_mean_and_variance(X, full_cov=True),
            "draw fewer": lambda: model.sample_proba(X, n_samples=1000),
            "link_approx='probit'": lambda: model.predict_proba(X),
            "use return_std=True": lambda: line.predict(X_REG, return_cov=True),
        }
        for advice, ask in questions.items():
            refused(ValueError, ["200 bytes are free", advice], ask, model, line)
        model.latent_mean_and_variance(X)
        model.set_params(link_approx="probit").predict_proba(X)
        line.predict(X_REG, return_std=True)
