"""Classification: output conventions, labels, inputs of all kinds, probabilities."""

import copy

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from nets import (
    MLP,
    CompilingClassifier,
    EmbeddingNet,
    FunctionalSoftmaxMLP,
    SharpMLP,
    SharpSigmoidMLP,
    SharpSoftmaxMLP,
    SigmoidMLP,
    SoftmaxMLP,
    SqueezedMLP,
    TinyCNN,
    TwoInputs,
    binary_classifier,
    blobs,
    classifier,
    initialised,
    seeded,
)
from scipy.special import expit, softmax
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import log_loss
from sklearn.utils.class_weight import compute_sample_weight
from skorch import NeuralNetClassifier
from skorch.dataset import Dataset
from skorch.helper import SliceDict
from torch import nn

from sklaplace import LaplaceClassifier, LaplaceClassifierCV
from sklaplace.dirichlet.links import LINKS

FLOAT64 = {"module__dtype": torch.float64}
SETTINGS = [
    {"prior_precision": 1.0},
    {"prior_precision": "marglik"},
    {"prior_precision": "marglik", "refine": True},
    {"prior_precision": 1.0, "hessian_structure": "diag"},
    {"prior_precision": 1.0, "subset_of_weights": "all"},
    {
        "prior_precision": 1.0,
        "subset_of_weights": "all",
        "hessian_structure": "full",
    },
]


@pytest.fixture(scope="module")
def rows():
    """Three classes, float64."""
    return blobs(dtype=np.float64)


@pytest.fixture(scope="module")
def two(rows):
    """Two classes, float64."""
    X, y = rows
    return X, (y > 0).astype(int)


@pytest.fixture(scope="module")
def logits_net(rows):
    return seeded(classifier(**FLOAT64), *rows)


@pytest.fixture(scope="module")
def binary_net(two):
    X, y = two
    return seeded(binary_classifier(**FLOAT64), X, y.astype(float))


def same_weights(net, other):
    """An initialised net that has the weights of the other one."""
    initialised(net).module_.load_state_dict(other.module_.state_dict())
    return net


def fitted(net, X, y, **settings):
    """Around a frozen net; the seed of the link's draws is always the same."""
    model = LaplaceClassifier(FrozenEstimator(net), random_state=0, **settings)
    return model.fit(X, y)


def predictions(model, X):
    return {
        "proba": model.predict_proba(X),
        "dirichlet": model.predict_dirichlet(X),
        "evidence": model.log_marginal_likelihood_value_,
        "samples": model.sample_proba(X, 3, random_state=1),
    }


def assert_same(model, other, X, names=("proba", "dirichlet", "evidence", "samples")):
    """Two ways of saying the same thing, up to the rounding of a logarithm."""
    mine, theirs = predictions(model, X), predictions(other, X)
    for name in names:
        np.testing.assert_allclose(
            mine[name], theirs[name], rtol=1e-8, atol=1e-10, err_msg=name
        )


# ------------------------------------------------------------------ conventions
@pytest.mark.parametrize("settings", SETTINGS)
class TestConventions:
    @pytest.mark.parametrize("module", [SoftmaxMLP, FunctionalSoftmaxMLP])
    def test_softmax_and_logits_agree(self, module, settings, rows, logits_net):
        net = classifier(module, criterion=nn.NLLLoss, **FLOAT64)
        softmax_net = same_weights(net, logits_net)
        expected = fitted(logits_net, *rows, **settings)
        assert_same(fitted(softmax_net, *rows, **settings), expected, rows[0])

    @pytest.mark.parametrize("module", [SigmoidMLP, SharpSigmoidMLP])
    def test_sigmoid_and_logit_agree(self, module, settings, two, binary_net):
        sharp = module is SharpSigmoidMLP
        logit_net = binary_classifier(SharpMLP if sharp else MLP, **FLOAT64)
        expected = fitted(same_weights(logit_net, binary_net), *two, **settings)
        net = binary_classifier(module, criterion=nn.BCELoss, **FLOAT64)
        found = fitted(same_weights(net, binary_net), *two, **settings)
        assert_same(found, expected, two[0])

    def test_squeezed_output(self, settings, two, binary_net):
        net = binary_classifier(SqueezedMLP, **FLOAT64)
        found = fitted(same_weights(net, binary_net), *two, **settings)
        assert_same(found, fitted(binary_net, *two, **settings), two[0])

    def test_compiled_module(self, settings, rows, logits_net):
        net = CompilingClassifier(
            MLP, criterion=nn.CrossEntropyLoss, callbacks="disable", **FLOAT64
        )
        initialised(net)
        net.module_._orig_mod.load_state_dict(logits_net.module_.state_dict())
        expected = fitted(logits_net, *rows, **settings)
        assert_same(fitted(net, *rows, **settings), expected, rows[0])

    def test_module_instance(self, settings, rows, logits_net):
        module = MLP(dtype=torch.float64)
        module.load_state_dict(logits_net.module_.state_dict())
        net = initialised(classifier(module))
        expected = fitted(logits_net, *rows, **settings)
        assert_same(fitted(net, *rows, **settings), expected, rows[0])


class TestLogOfProbabilities:
    """A softmax whose logits no layer puts out: they are log p, up to a shift."""

    def both(self, rows, logits_net, **settings):
        net = classifier(SharpSoftmaxMLP, criterion=nn.NLLLoss, **FLOAT64)
        logits = classifier(SharpMLP, **FLOAT64)
        return [
            fitted(same_weights(n, logits_net), *rows, **settings)
            for n in (net, logits)
        ]

    @pytest.mark.parametrize("subset", ["last_layer", "all"])
    @pytest.mark.parametrize("structure", ["full", "kron", "diag"])
    def test_agrees_with_logits(self, subset, structure, rows, logits_net):
        settings = {
            "prior_precision": 1.0,
            "subset_of_weights": subset,
            "hessian_structure": structure,
        }
        # The curvature of the loss is that of the same function, and a shift
        # common to all classes reaches neither links nor Dirichlets.
        names = ("proba", "dirichlet", "evidence", "samples")
        assert_same(*self.both(rows, logits_net, **settings), rows[0], names)

    def test_certain_rows_stay_finite(self, rows, logits_net):
        X, y = rows
        net = classifier(SharpSoftmaxMLP, criterion=nn.NLLLoss, **FLOAT64)
        model = fitted(same_weights(net, logits_net), X, y, prior_precision=1.0)
        assert np.isfinite(model.predict_proba(X * 1e4)).all()


class TestTrainedConventions:
    """The same networks, trained inside ``fit``."""

    def test_softmax_net_as_skorch_has_it(self, rows):
        X, y = rows
        net = NeuralNetClassifier(SoftmaxMLP, lr=0.5, max_epochs=30, verbose=0)
        model = LaplaceClassifier(net, random_state=0).fit(X, y)
        assert model.score(X, y) > 0.6

    @pytest.mark.parametrize("module", [MLP, SqueezedMLP, SigmoidMLP])
    def test_binary(self, module):
        X, y = blobs(n_classes=2, seed=3)  # hardly overlapping
        criterion = nn.BCELoss if module is SigmoidMLP else nn.BCEWithLogitsLoss
        net = binary_classifier(module, criterion=criterion)
        model = LaplaceClassifier(net, random_state=0).fit(X, np.array(["a", "b"])[y])
        assert model.predict_proba(X).shape == (60, 2)
        assert model.score(X, np.array(["a", "b"])[y]) > 0.9

    @pytest.mark.parametrize("module", [MLP, SqueezedMLP])
    def test_binary_criterion_in_a_plain_classifier(self, module):
        X, y = blobs(n_classes=2, seed=3)  # hardly overlapping
        net = classifier(module, module__n_out=1, criterion=nn.BCEWithLogitsLoss)
        model = LaplaceClassifier(net, random_state=0).fit(X, y)
        assert model.score(X, y) > 0.9

    def test_compiled(self, rows):
        X, y = rows
        net = CompilingClassifier(
            MLP, criterion=nn.CrossEntropyLoss, callbacks="disable", verbose=0
        )
        model = LaplaceClassifier(net, random_state=0).fit(X, y)
        assert type(model.estimator_.module_).__name__ == "Compiled"
        assert model.predict_proba(X).shape == (60, 3)

    def test_module_instance_is_trained_as_a_copy(self, rows):
        X, y = rows
        module = MLP()
        before = module.head.weight.detach().clone()
        model = LaplaceClassifier(classifier(module), random_state=0).fit(X, y)
        torch.testing.assert_close(module.head.weight, before, rtol=0, atol=0)
        assert not torch.equal(model.estimator_.module_.head.weight, before)


class TestThreshold:
    def test_is_honoured(self, two, binary_net):
        X, y = two
        proba = fitted(binary_net, X, y, prior_precision=1.0).predict_proba(X)[:, 1]
        threshold = float(np.median(proba))
        net = same_weights(
            binary_classifier(threshold=threshold, **FLOAT64), binary_net
        )
        model = fitted(net, X, y, prior_precision=1.0)
        np.testing.assert_array_equal(model.predict(X), proba > threshold)
        assert 0 < model.predict(X).mean() < 1

    def test_of_half_is_the_most_probable_class(self, two, binary_net):
        X, y = two
        model = fitted(binary_net, X, y, prior_precision=1.0)
        np.testing.assert_array_equal(
            model.predict(X), model.predict_proba(X).argmax(1)
        )


# ------------------------------------------------------------------------ labels
class TestLabels:
    @pytest.mark.parametrize(
        "names",
        [
            np.array(["zebra", "ant", "mole"]),
            np.array([10, -3, 7]),
            np.array([2.0, 0.0, 1.0]),
            np.array(["b", "a", "c"], dtype=object),
        ],
    )
    def test_come_back_as_given(self, names, rows):
        X, y = rows
        plain = LaplaceClassifier(classifier(), random_state=0).fit(
            X, np.argsort(np.argsort(names))[y]
        )
        model = LaplaceClassifier(classifier(), random_state=0).fit(X, names[y])
        np.testing.assert_array_equal(model.classes_, np.sort(names))
        assert set(model.predict(X)) <= set(names)
        np.testing.assert_allclose(model.predict_proba(X), plain.predict_proba(X))

    def test_booleans(self, two):
        X, y = two
        model = LaplaceClassifier(random_state=0).fit(X, y.astype(bool))
        assert model.predict(X).dtype == bool

    @pytest.mark.parametrize(
        "net",
        [
            None,
            classifier(module__n_out=1),
            classifier(SoftmaxMLP, criterion=nn.NLLLoss, module__n_out=1),
            binary_classifier(),
        ],
        ids=["default", "logits", "softmax", "binary"],
    )
    def test_one_class(self, net, rows):
        X, _ = rows
        model = LaplaceClassifier(net, random_state=0).fit(X, np.full(60, "only"))
        np.testing.assert_array_equal(model.predict_proba(X), np.ones((60, 1)))
        np.testing.assert_array_equal(model.predict(X), np.full(60, "only"))
        assert model.predict_dirichlet(X).shape == (60, 1)
        np.testing.assert_allclose(model.sample_proba(X, 2), np.ones((60, 1, 2)))

    def test_frozen_net_knows_classes_that_the_rows_lack(self, rows):
        X, y = rows
        net = seeded(classifier(), X.astype(np.float32), y)
        some = y != 1
        model = fitted(net, X[some], y[some], prior_precision=1.0)
        np.testing.assert_array_equal(model.classes_, [0, 1, 2])
        assert model.predict_proba(X).shape == (60, 3)

    def test_column_vector_warns_as_everywhere(self, rows):
        X, y = rows
        with pytest.warns(UserWarning, match="column-vector y was passed"):
            LaplaceClassifier(random_state=0).fit(X, y[:, None])


# ------------------------------------------------------------------------ inputs
class TestInputs:
    @pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
    @pytest.mark.parametrize("net", [None, classifier()], ids=["default", "own"])
    def test_frames(self, frame, net, rows):
        X, y = rows
        table = frame({"height": X[:, 0], "width": X[:, 1]})
        model = LaplaceClassifier(net, random_state=0).fit(table, y)
        plain = LaplaceClassifier(net, random_state=0).fit(X, y)
        np.testing.assert_array_equal(model.feature_names_in_, ["height", "width"])
        # frames keep columns together, so that sums are taken in another order
        np.testing.assert_allclose(
            model.predict_proba(table), plain.predict_proba(X), rtol=1e-9
        )
        with pytest.raises(ValueError, match="feature names"):
            model.predict(frame({"width": X[:, 1], "height": X[:, 0]}))

    def test_series_as_target_and_weights(self, rows):
        X, y = rows
        weights = pd.Series(np.linspace(1, 2, 60), index=range(100, 160))
        target = pd.Series(y, index=range(100, 160), dtype="category")
        model = LaplaceClassifier(random_state=0).fit(X, target, sample_weight=weights)
        assert model.score(X, y) > 0.6

    def test_lists(self, rows):
        X, y = rows
        model = LaplaceClassifier(random_state=0).fit(X.tolist(), y.tolist())
        other = LaplaceClassifier(random_state=0).fit(X, y)
        np.testing.assert_array_equal(
            model.predict_proba(X.tolist()), other.predict_proba(X)
        )

    @pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, bool])
    def test_numbers_are_cast_to_the_dtype_of_the_net(self, dtype, rows):
        X, y = rows
        X = (X * 2).astype(dtype)
        model = LaplaceClassifier(classifier(), random_state=0).fit(X, y)
        other = LaplaceClassifier(classifier(), random_state=0)
        other.fit(X.astype(np.float32), y)
        np.testing.assert_array_equal(
            model.predict_proba(X), other.predict_proba(X.astype(np.float32))
        )

    def test_float64_net_is_not_rounded(self, rows):
        X, y = rows
        model = LaplaceClassifier(classifier(**FLOAT64), random_state=0).fit(X, y)
        shifted = model.predict_proba(X + 1e-12)
        assert np.any(shifted != model.predict_proba(X))

    def test_read_only_and_strided_arrays(self, rows):
        X, y = rows
        wide = np.repeat(X, 2, axis=1)[:, ::2]
        wide.setflags(write=False)
        model = LaplaceClassifier(classifier(), random_state=0).fit(wide, y)
        other = LaplaceClassifier(classifier(), random_state=0).fit(X, y)
        np.testing.assert_array_equal(model.predict_proba(wide), other.predict_proba(X))

    @pytest.mark.parametrize("subset", ["last_layer", "all"])
    def test_images(self, subset, rows):
        _, y = rows
        noise = np.random.default_rng(0).normal(size=(60, 1, 6, 6))
        images = (noise + y[:, None, None, None]).astype(np.float32)
        before = images.copy()
        net = classifier(TinyCNN, max_epochs=60)
        model = LaplaceClassifier(net, subset_of_weights=subset, prior_precision=1.0)
        model.set_params(random_state=0).fit(images, y)
        assert model.score(images, y) > 0.7
        np.testing.assert_array_equal(images, before)
        # dropout is off: two calls agree
        np.testing.assert_array_equal(
            model.predict_proba(images), model.predict_proba(images)
        )

    @pytest.mark.parametrize("subset", ["last_layer", "all"])
    @pytest.mark.parametrize("module", [EmbeddingNet, EmbeddingNet()])
    def test_tokens(self, subset, module):
        rng = np.random.default_rng(0)
        y = np.arange(60) % 2
        tokens = rng.integers(0, 5, size=(60, 4)) + 5 * y[:, None]
        model = LaplaceClassifier(
            classifier(module), subset_of_weights=subset, prior_precision=1.0
        )
        assert model.fit(tokens, y).score(tokens, y) > 0.9
        as_int32 = tokens.astype(np.int32)
        np.testing.assert_array_equal(
            model.predict_proba(tokens), model.predict_proba(as_int32)
        )


@pytest.fixture(scope="module")
def dicts():
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    left = rng.normal(size=(60, 2)) + y[:, None]
    right = rng.normal(size=(60, 3)) - y[:, None]
    entries = {"left": left.astype(np.float32), "right": right.astype(np.float32)}
    return entries, y


class TestOpaqueInputs:
    @pytest.mark.parametrize("wrap", [dict, lambda X: SliceDict(**X)])
    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize(
        "settings", [{}, {"subset_of_weights": "all", "prior_precision": 1.0}]
    )
    def test_dicts(self, wrap, weighted, settings, dicts):
        X, y = dicts
        model = LaplaceClassifier(
            classifier(TwoInputs, batch_size=16), random_state=0, **settings
        )
        weights = np.linspace(0, 2, 60) if weighted else None
        model.fit(wrap(X), y, sample_weight=weights)
        assert model.score(wrap(X), y) > 0.8
        one = {name: value[:1] for name, value in X.items()}
        np.testing.assert_allclose(
            model.predict_proba(wrap(one)),
            model.predict_proba(wrap(X))[:1],
            atol=2e-6,  # float32, as in test_base
        )

    def test_dict_and_array_agree(self, rows):
        X, y = rows
        settings = {"prior_precision": 1.0, "random_state": 0}
        plain = LaplaceClassifier(classifier(**FLOAT64), **settings).fit(X, y)
        model = LaplaceClassifier(classifier(**FLOAT64), **settings).fit({"X": X}, y)
        np.testing.assert_allclose(
            model.predict_proba({"X": X}), plain.predict_proba(X), rtol=1e-10
        )

    @pytest.mark.parametrize("weighted", [False, True])
    def test_torch_dataset(self, weighted, rows):
        X, y = rows
        X = X.astype(np.float32)
        data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(y))
        weights = np.linspace(0.5, 2, 60) if weighted else None
        settings = {"prior_precision": 1.0, "random_state": 0}
        model = LaplaceClassifier(classifier(), **settings)
        model.fit(data, y, sample_weight=weights)
        plain = LaplaceClassifier(classifier(), **settings)
        plain.fit(X, y, sample_weight=weights)
        np.testing.assert_allclose(
            model.predict_proba(data), plain.predict_proba(X), atol=1e-6
        )

    def test_skorch_dataset_with_a_split_and_labels(self, rows):
        X, y = rows
        X = X.astype(np.float32)
        labels = np.array(["a", "b", "c"])[y]
        net = NeuralNetClassifier(SoftmaxMLP, verbose=0, max_epochs=2)
        model = LaplaceClassifier(net, random_state=0).fit(Dataset(X, y), labels)
        plain = LaplaceClassifier(net, random_state=0).fit(X, labels)
        np.testing.assert_allclose(
            model.predict_proba(Dataset(X)), plain.predict_proba(X), atol=1e-6
        )
        assert set(model.predict(Dataset(X))) <= {"a", "b", "c"}

    def test_dict_as_validation_rows(self, dicts):
        X, y = dicts
        net = classifier(TwoInputs)
        model = LaplaceClassifier(net, random_state=0, prior_precision="validation")
        model.fit(X, y, X_val=X, y_val=y)
        assert model.prior_precision_ > 0


# ----------------------------------------------------------------- probabilities
@pytest.fixture(scope="module")
def model(rows, logits_net):
    """Last layer under a fixed prior."""
    return fitted(logits_net, *rows, prior_precision=1.0)


@pytest.fixture(scope="module")
def model_of_all(rows, logits_net):
    """All weights under a fixed prior."""
    return fitted(logits_net, *rows, prior_precision=1.0, subset_of_weights="all")


class TestProbabilities:
    @pytest.mark.parametrize("link", ["auto", *sorted(LINKS)])
    def test_of_every_link_sum_to_one(self, link, rows, logits_net):
        X, y = rows
        model = fitted(logits_net, X, y, prior_precision=1.0, link_approx=link)
        proba = model.predict_proba(X)
        np.testing.assert_allclose(proba.sum(1), 1, rtol=1e-14)
        assert (proba >= 0).all()
        np.testing.assert_array_equal(model.predict(X), model.classes_[proba.argmax(1)])

    def test_are_the_links_of_the_latent_moments(self, rows, logits_net):
        X, y = rows
        model = fitted(logits_net, X, y, prior_precision=1.0, link_approx="probit")
        moments = model.latent_mean_and_variance(X, full_cov=True)
        expected = LINKS["probit"](*map(torch.tensor, moments), None)
        np.testing.assert_allclose(model.predict_proba(X), expected, rtol=1e-12)

    def test_log(self, model, rows):
        X, _ = rows
        np.testing.assert_array_equal(
            model.predict_log_proba(X), np.log(model.predict_proba(X))
        )

    def test_tight_prior_gives_the_networks_own(self, rows, logits_net):
        X, y = rows
        model = fitted(logits_net, X, y, prior_precision=1e12)
        expected = logits_net.predict_proba(X)
        np.testing.assert_allclose(model.predict_proba(X), expected, atol=1e-9)

    def test_binary_equals_its_two_logits(self, two, binary_net):
        X, y = two
        model = fitted(binary_net, X, y, prior_precision=1e12)
        with torch.no_grad():
            f = binary_net.module_(torch.tensor(X)).numpy()[:, 0]
        np.testing.assert_allclose(model.predict_proba(X)[:, 1], expit(f), atol=1e-9)
        mean, variance = model.latent_mean_and_variance(X)
        np.testing.assert_allclose(mean, np.stack([-f, f], 1) / 2, rtol=1e-12)
        assert variance.shape == (60, 2)

    def test_dirichlet(self, model, rows):
        X, _ = rows
        alpha = model.predict_dirichlet(X)
        assert alpha.shape == (60, 3)
        assert (alpha > 0).all()
        far = model.predict_dirichlet(X * 100)
        assert np.isfinite(far).all()

    def test_latent_variance_is_the_diagonal(self, model, rows):
        X, _ = rows
        mean, variance = model.latent_mean_and_variance(X)
        again, cov = model.latent_mean_and_variance(X, full_cov=True)
        np.testing.assert_array_equal(mean, again)
        diagonal = np.diagonal(cov, axis1=1, axis2=2)
        # sums of the same terms in another order
        np.testing.assert_allclose(variance, diagonal, rtol=1e-14)

    def test_weaker_prior_is_less_certain(self, rows, logits_net):
        X, y = rows
        entropies = []
        for precision in (100.0, 1.0, 0.01):
            model = fitted(logits_net, X, y, prior_precision=precision)
            proba = model.predict_proba(X)
            entropies.append(-(proba * np.log(proba)).sum(1).mean())
        assert entropies == sorted(entropies)

    def test_temperature_sharpens(self, rows, logits_net):
        X, y = rows
        variances = [
            fitted(logits_net, X, y, prior_precision=1.0, temperature=t)
            .latent_mean_and_variance(X)[1]
            .mean()
            for t in (0.01, 1.0, 100.0)
        ]
        assert variances == sorted(variances)


@pytest.mark.parametrize("link", ["auto", "mc"])
@pytest.mark.parametrize("n_samples", [2.5, 0, None])
def test_number_of_draws_is_checked_when_set_after_fit(
    rows, logits_net, link, n_samples
):
    X, y = rows
    model = fitted(logits_net, X, y, prior_precision=1.0, link_approx=link)
    model.set_params(n_samples=n_samples)
    with pytest.raises(ValueError, match=f"n_samples={n_samples} is not an integer"):
        model.predict_proba(X)


def test_points_of_mc_are_the_same_in_every_batch(rows, logits_net):
    X, y = rows
    model = fitted(logits_net, X, y, prior_precision=1.0, link_approx="mc")
    whole = model.predict_proba(X)
    model.set_params(batch_size=7)
    np.testing.assert_allclose(model.predict_proba(X), whole, rtol=1e-5)


def test_few_draws_are_not_the_choice_of_auto(rows, logits_net):
    X, y = rows
    model = fitted(logits_net, X, y, prior_precision=1.0)
    model.set_params(n_samples=8)
    few = model.predict_proba(X)
    model.set_params(link_approx="gumbel")
    np.testing.assert_array_equal(few, model.predict_proba(X))


class TestSampleProba:
    def test_shape_and_rows(self, model_of_all, rows):
        draws = model_of_all.sample_proba(rows[0], 5)
        assert draws.shape == (60, 3, 5)
        np.testing.assert_allclose(draws.sum(1), 1, rtol=1e-12)

    def test_mean_is_predict_proba(self, rows, logits_net):
        X, y = rows
        model = fitted(logits_net, X, y, prior_precision=1.0, link_approx="mc")
        model.set_params(n_samples=4000)
        draws = model.sample_proba(X, 4000)
        # five standard errors of a mean of 4000 values with deviations below 0.5
        np.testing.assert_allclose(
            draws.mean(-1), model.predict_proba(X), atol=5 * 0.5 / 4000**0.5
        )

    def test_moments_of_the_logits(self, model_of_all, rows):
        X = rows[0][:8]
        proba = model_of_all.sample_proba(X, 20_000)
        logits = np.log(proba) - np.log(proba).mean(1, keepdims=True)
        mean, cov = model_of_all.latent_mean_and_variance(X, full_cov=True)
        centre = np.eye(3) - 1 / 3
        cov = centre @ cov @ centre
        sd = np.sqrt(np.diagonal(cov, axis1=1, axis2=2))
        # five standard errors of mean and variance with 20,000 draws
        error = np.abs(logits.mean(-1) - mean @ centre) / sd
        assert error.max() < 5 / 20_000**0.5
        ratio = logits.var(-1) / sd**2
        np.testing.assert_allclose(ratio, 1, atol=5 * (2 / 20_000) ** 0.5)

    def test_each_draw_is_one_function(self, model_of_all, rows):
        X = np.repeat(rows[0][:1], 2, axis=0)
        draws = model_of_all.sample_proba(X, 10)
        np.testing.assert_allclose(draws[0], draws[1], rtol=1e-12)

    def test_seed(self, model_of_all, rows):
        X = rows[0]
        same = [model_of_all.sample_proba(X, 2, random_state=3) for _ in range(2)]
        np.testing.assert_array_equal(*same)
        other = model_of_all.sample_proba(X, 2, random_state=4)
        assert not np.allclose(same[0], other)
        fresh = [model_of_all.sample_proba(X, 2, random_state=None) for _ in range(2)]
        assert not np.allclose(*fresh)
        state = np.random.RandomState(0)
        drawn = [model_of_all.sample_proba(X, 2, random_state=state) for _ in range(2)]
        assert not np.allclose(*drawn)

    def test_batches_share_the_function(self, model_of_all, rows):
        X = rows[0]
        whole = model_of_all.sample_proba(X, 4)
        parts = [model_of_all.sample_proba(X[i : i + 7], 4) for i in range(0, 60, 7)]
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-10)


# -------------------------------------------------------------------- the default
class TestDefault:
    def test_predicts_better_than_chance(self):
        X, y = blobs(400, seed=1)
        model = LaplaceClassifier(random_state=0).fit(X[:200], y[:200])
        assert model.score(X[200:], y[200:]) > 0.6
        loss = log_loss(y[200:], model.predict_proba(X[200:]))
        assert loss < np.log(3)

    def test_is_less_certain_than_its_mean(self, rows):
        X, y = rows
        model = LaplaceClassifier(random_state=0, prior_precision=1.0).fit(X, y)
        mean, _ = model.latent_mean_and_variance(X)
        plain = softmax(mean, axis=1).max(1)
        assert model.predict_proba(X).max(1).mean() < plain.mean()


class TestPartialFit:
    def test_classes_that_come_later(self):
        X, y = blobs()
        net = classifier(callbacks=[])
        rows = y != 2
        model = LaplaceClassifier(net, prior_precision=1.0, random_state=0)
        model.partial_fit(X[rows], y[rows], classes=[0, 1, 2])
        assert model.classes_.tolist() == [0, 1, 2]
        model.partial_fit(X[~rows], y[~rows])
        model.partial_fit(X[~rows], y[~rows], classes=[0, 1, 2])
        assert model.posterior_.data_fit.n_targets == len(y) + (~rows).sum()
        assert not hasattr(model, "_announced")

    def test_unknown_labels(self):
        X, y = blobs()
        model = LaplaceClassifier(classifier(), prior_precision=1.0, random_state=0)
        with pytest.raises(ValueError, match=r"labels that classes lacks: \[2\]"):
            model.partial_fit(X, y, classes=[0, 1])
        assert not hasattr(model, "posterior_")
        model.fit(X, y)
        with pytest.raises(
            ValueError, match=r"y has labels that y in fit does not: \[7\]"
        ):
            model.partial_fit(X[:1], [7])
        with pytest.raises(ValueError, match="not those of the first call"):
            model.partial_fit(X[:1], y[:1], classes=[0, 1, 2, 3])


class TestClassesThatWeigh:
    def settings(self, **options):
        plain = {"prior_precision": 0.7, "hessian_structure": "full"}
        return {**plain, "random_state": 0, **options}

    def frozen(self, net=classifier, **params):
        X, y = blobs() if net is classifier else blobs(n_classes=2)
        targets = y if net is classifier else y.astype(np.float32)
        return FrozenEstimator(seeded(net(**params), X, targets)), X, y

    def same(self, model, other, X):
        np.testing.assert_allclose(
            model.predict_proba(X), other.predict_proba(X), atol=1e-7
        )
        values = [m.log_marginal_likelihood_value_ for m in (model, other)]
        np.testing.assert_allclose(*values, rtol=1e-5)

    @pytest.mark.parametrize("refine", [False, True])
    def test_weights_of_a_criterion_are_sample_weights(self, refine):
        w = torch.tensor([0.5, 2.0, 1.5])
        net, X, y = self.frozen(criterion__weight=w)
        settings = self.settings(refine=refine)
        model = LaplaceClassifier(net, **settings).fit(X, y)
        plain = copy.deepcopy(net.estimator)
        plain.criterion_ = torch.nn.CrossEntropyLoss()
        other = LaplaceClassifier(FrozenEstimator(plain), **settings)
        self.same(model, other.fit(X, y, w[y].numpy()), X)

    def test_weight_of_the_second_class(self):
        net, X, y = self.frozen(
            binary_classifier, criterion__pos_weight=torch.tensor([3.0])
        )
        model = LaplaceClassifier(net, **self.settings()).fit(X, y)
        plain = copy.deepcopy(net.estimator)
        plain.criterion_ = torch.nn.BCEWithLogitsLoss()
        other = LaplaceClassifier(FrozenEstimator(plain), **self.settings())
        self.same(model, other.fit(X, y, 1 + 2.0 * y), X)

    def test_smoothing_leaves_the_curvature(self):
        net, X, y = self.frozen(criterion__label_smoothing=0.2)
        model = LaplaceClassifier(net, **self.settings()).fit(X, y)
        plain = copy.deepcopy(net.estimator)
        plain.criterion_ = torch.nn.CrossEntropyLoss()
        other = LaplaceClassifier(FrozenEstimator(plain), **self.settings()).fit(X, y)
        np.testing.assert_allclose(model.predict_proba(X), other.predict_proba(X))
        loss, unsmoothed = (m.posterior_.data_fit.loss for m in (model, other))
        logits = torch.tensor(net.estimator.forward(X).numpy())
        criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum")
        assert loss == pytest.approx(
            float(criterion(logits, torch.tensor(y))), rel=1e-5
        )
        assert loss != unsmoothed

    @pytest.mark.parametrize("value", ["balanced", {"a": 3.0, "c": 0.2}])
    def test_class_weight_is_sample_weight(self, value):
        X, y = blobs(n=70)
        labels = np.array(["a", "b", "c"])[y]
        w = compute_sample_weight(value, labels)
        held = {"X_val": X[50:], "y_val": labels[50:]}
        for settings in (self.settings(), {"prior_precision": "validation"}):
            own = self.frozen()[0]
            model = LaplaceClassifier(own, class_weight=value, **settings)
            model.fit(X, labels, **held)
            assert model.class_weight == value
            if settings["prior_precision"] != "validation":
                other = LaplaceClassifier(own, **settings).fit(X, labels, w)
                self.same(model, other, X)

    def test_class_weight_trains_the_network(self):
        X, y = blobs()
        options = {"prior_precision": 1.0, "random_state": 0}
        w = compute_sample_weight({0: 5.0}, y)
        model = LaplaceClassifier(classifier(), class_weight={0: 5.0}, **options)
        other = LaplaceClassifier(classifier(), **options).fit(X, y, w)
        self.same(model.fit(X, y), other, X)

    def test_partial_fit_keeps_the_weights_of_the_first_fit(self):
        net, X, y = self.frozen()
        settings = self.settings(class_weight="balanced")
        model = LaplaceClassifier(net, **settings).fit(X[:40], y[:40])
        weights = model._targets.class_weights
        model.partial_fit(X[40:], y[40:])
        expected = LaplaceClassifier(net, **self.settings()).fit(X, y, weights[y])
        self.same(model, expected, X)

    def test_rows_to_ignore_are_not_there(self):
        X, y = blobs()
        y = y.copy()
        y[::7] = -1
        kept = y >= 0
        options = {"prior_precision": 1.0, "random_state": 0}
        model = LaplaceClassifier(classifier(criterion__ignore_index=-1), **options)
        other = LaplaceClassifier(classifier(), **options).fit(X[kept], y[kept])
        assert model.fit(X, y).classes_.tolist() == [0, 1, 2]
        assert model.posterior_.data_fit.n_targets == kept.sum()
        self.same(model, other, X)
        w = 1.0 + np.arange(len(y)) % 2
        self.same(model.fit(X, y, w), other.fit(X[kept], y[kept], w[kept]), X)
        labels = LaplaceClassifier(classifier(module__n_out=4), **options).fit(X, y)
        assert labels.classes_.tolist() == [-1, 0, 1, 2]

    def test_labels_to_ignore_are_known_everywhere(self):
        X, y = blobs()
        y = np.where(np.arange(len(y)) % 7 == 0, -1, y)
        kept = y >= 0
        options = {"prior_precision": 1.0, "random_state": 0}
        ignoring = classifier(criterion__ignore_index=-1)
        trained = FrozenEstimator(seeded(clone(ignoring), X, y))
        assert -1 in trained.classes_
        model = LaplaceClassifier(trained, **options).fit(X, y)
        assert model.classes_.tolist() == [0, 1, 2]
        before = model.predict_proba(X)
        ignored = model.partial_fit(X[~kept], y[~kept]).predict_proba(X)
        np.testing.assert_array_equal(ignored, before)
        model = LaplaceClassifier(ignoring, **options)
        model.partial_fit(X, y, classes=[0, 1, 2])
        grid = {"prior_precisions": [0.1, 1.0], "cv": 2, "random_state": 0}
        found = LaplaceClassifierCV(ignoring, **grid).fit(X, y)
        expected = LaplaceClassifierCV(classifier(), **grid).fit(X[kept], y[kept])
        for name in ("mean_test_score", "split1_test_score"):
            np.testing.assert_allclose(
                found.cv_results_[name], expected.cv_results_[name], rtol=1e-5
            )
        with pytest.raises(ValueError, match="All rows have the label"):
            LaplaceClassifier(ignoring).fit(X[~kept], y[~kept])

    def test_a_class_that_comes_later_has_its_weight(self):
        net, X, y = self.frozen()
        order = np.argsort(y, kind="stable")
        X, y = X[order], y[order]
        first = y < 2
        settings = self.settings(class_weight={0: 1.0, 1: 2.0, 2: 9.0})
        model = LaplaceClassifier(net, **settings)
        model.partial_fit(X[first], y[first], classes=[0, 1, 2])
        model.partial_fit(X[~first], y[~first])
        self.same(model, LaplaceClassifier(net, **settings).fit(X, y), X)

    @pytest.mark.parametrize("scale", [1.0, 30.0])
    def test_weighted_training_is_that_of_the_criterion(self, scale):
        """Weights of one change nothing, nor does the scale of a criterion's."""
        X, y = blobs()
        options = {"prior_precision": 1.0, "random_state": 0}

        def outputs(scale, **fit):
            w = scale * torch.tensor([1.0, 2.0, 3.0])
            model = LaplaceClassifier(classifier(criterion__weight=w), **options)
            return model.fit(X, y, **fit).estimator_.forward(X).numpy()

        plain = outputs(1.0)
        ones = np.ones(len(y))
        np.testing.assert_allclose(
            outputs(scale, sample_weight=ones), plain, rtol=1e-3, atol=1e-4
        )

    def test_weights_that_cannot_be(self):
        X, y = blobs()
        for value in ({0: -1.0, 1: 1.0, 2: 1.0}, {0: np.nan, 1: 1.0, 2: 1.0}):
            with pytest.raises(ValueError, match=r"class_weight=.*not finite, or neg"):
                LaplaceClassifier(classifier(), class_weight=value).fit(X, y)
        net = classifier(criterion__weight=torch.tensor([-1.0, 1.0, 1.0]))
        with pytest.raises(ValueError, match="criterion__weight has entries"):
            LaplaceClassifier(net).fit(X, y)


def test_latent_variances_of_one_logit_are_those_of_both_classes():
    X, y = blobs(40, n_classes=2)
    net = seeded(binary_classifier(), X, y.astype(np.float32))
    model = LaplaceClassifier(FrozenEstimator(net), prior_precision=1.0).fit(X, y)
    _, variance = model.latent_mean_and_variance(X)
    _, cov = model.latent_mean_and_variance(X, full_cov=True)
    assert cov.shape == (40, 2, 2)
    np.testing.assert_allclose(variance, np.einsum("nkk->nk", cov), rtol=1e-6)
