"""Classification: output conventions, labels, kinds of inputs, probabilities."""

import copy
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from nets import (
    MLP,
    QUICK,
    CompilingClassifier,
    DropoutMLP,
    FunctionalSoftmaxMLP,
    LogSoftmaxMLP,
    SharpLogSoftmaxMLP,
    SharpMLP,
    SharpSigmoidMLP,
    SharpSoftmaxMLP,
    SigmoidMLP,
    SoftmaxMLP,
    SqueezedMLP,
    binary_classifier,
    blobs,
    classifier,
    initialised,
    seeded,
)
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import expit
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import log_loss
from sklearn.utils.class_weight import compute_sample_weight
from skorch import NeuralNet, NeuralNetBinaryClassifier, NeuralNetClassifier
from torch import nn

from sklaplace import (
    DeepEnsembleClassifier,
    LaplaceClassifier,
    LaplaceClassifierCV,
    MCDropoutClassifier,
    SWAGClassifier,
    VariationalClassifier,
)
from sklaplace.dirichlet.links import LINKS
from sklaplace.likelihoods import Categorical

FLOAT64 = {"module__dtype": torch.float64}
FIXED = {"prior_precision": 1.0, "random_state": 0}
ALL = {"subset_of_weights": "all"}
FULL = {"hessian_structure": "full"}
SETTINGS = [
    {"prior_precision": 1.0},
    {"prior_precision": "marglik"},
    {"prior_precision": "marglik", "refine": True},
    {"prior_precision": 1.0, "hessian_structure": "diag"},
    {"prior_precision": 1.0, **ALL},
    {"prior_precision": 1.0, **ALL, **FULL},
]


@pytest.fixture(scope="module")
def rows():
    """Return float64 samples of three classes."""
    return blobs(dtype=np.float64)


@pytest.fixture(scope="module")
def two(rows):
    """Return float64 samples of two classes."""
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
    """Return an initialised net with the weights of another net."""
    net = initialised(clone(net))
    module = getattr(net.module_, "_orig_mod", net.module_)
    module.load_state_dict(other.module_.state_dict())
    return net


def fitted(net, X, y, **settings):
    """Return an estimator around a frozen net, with a fixed seed for the link."""
    return LaplaceClassifier(FrozenEstimator(net), **FIXED | settings).fit(X, y)


def trained(net, X, y, sample_weight=None, **settings):
    """Return an estimator that trained its net."""
    return LaplaceClassifier(net, random_state=0, **settings).fit(X, y, sample_weight)


def assert_same(model, other, X):
    """Check that two estimators are equal, up to rounding of a logarithm."""
    for answer in (
        lambda m: m.predict_proba(X),
        lambda m: m.predict_dirichlet(X),
        lambda m: m.log_marginal_likelihood_value_,
        lambda m: m.sample_proba(X, 3, random_state=1),
    ):
        assert_allclose(answer(model), answer(other), rtol=1e-8, atol=1e-10)


# ------------------------------------------------------------------ conventions
def of_probabilities(module, make=classifier, criterion=nn.NLLLoss):
    return make(module, criterion=criterion, **FLOAT64)


class TakesLogarithm(NeuralNet):
    """A net that takes the logarithm of the outputs itself."""

    def get_loss(self, y_pred, y_true, *args, **kwargs):
        return super().get_loss(torch.log(y_pred), y_true, *args, **kwargs)


class TakesNoLogarithm(NeuralNetClassifier):
    """A classifier that passes the outputs to the criterion unchanged."""

    def get_loss(self, y_pred, y_true, X=None, training=False):
        return self.criterion_(y_pred, y_true)


LOGITS, LOGIT = classifier(**FLOAT64), binary_classifier(**FLOAT64)
# each with the net of logits that it must agree with
CONVENTIONS = {
    "softmax": (of_probabilities(SoftmaxMLP), LOGITS),
    "softmax by a function": (of_probabilities(FunctionalSoftmaxMLP), LOGITS),
    "log-softmax": (NeuralNet(LogSoftmaxMLP, nn.NLLLoss, **FLOAT64, **QUICK), LOGITS),
    "compiled": (
        CompilingClassifier(
            MLP, criterion=nn.CrossEntropyLoss, callbacks="disable", **FLOAT64
        ),
        LOGITS,
    ),
    "instance": (classifier(MLP(dtype=torch.float64)), LOGITS),
    "sigmoid": (of_probabilities(SigmoidMLP, binary_classifier, nn.BCELoss), LOGIT),
    "sigmoid of no layer": (
        of_probabilities(SharpSigmoidMLP, binary_classifier, nn.BCELoss),
        binary_classifier(SharpMLP, **FLOAT64),
    ),
    "squeezed": (binary_classifier(SqueezedMLP, **FLOAT64), LOGIT),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("net", "expected"), CONVENTIONS.values(), ids=CONVENTIONS.keys()
)
def test_every_convention_agrees_with_logits(
    net, expected, settings, rows, two, logits_net, binary_net
):
    is_binary = isinstance(net, NeuralNetBinaryClassifier)
    weights, (X, y) = (binary_net, two) if is_binary else (logits_net, rows)
    models = (
        fitted(same_weights(n, weights), X, y, **settings) for n in (net, expected)
    )
    assert_same(*models, X)


@pytest.mark.parametrize(
    "settings", [{}, {**ALL, **FULL}, {"hessian_structure": "diag"}], ids=str
)
@pytest.mark.parametrize("module", [SharpSoftmaxMLP, SharpLogSoftmaxMLP])
def test_log_of_probabilities_agrees_with_logits(settings, module, rows, logits_net):
    """No layer returns the logits; they are log p up to a shift."""
    kind = classifier if module is SharpSoftmaxMLP else partial(NeuralNet, **QUICK)
    nets = of_probabilities(module, kind), classifier(SharpMLP, **FLOAT64)
    models = (fitted(same_weights(n, logits_net), *rows, **settings) for n in nets)
    assert_same(*models, rows[0])


class TestTrainedConventions:
    """The output conventions for networks trained inside ``fit``."""

    @pytest.mark.parametrize(
        "net",
        [
            binary_classifier(),
            binary_classifier(SqueezedMLP),
            binary_classifier(SigmoidMLP, criterion=nn.BCELoss),
            classifier(module__n_out=1, criterion=nn.BCEWithLogitsLoss),
            classifier(SqueezedMLP, module__n_out=1, criterion=nn.BCEWithLogitsLoss),
        ],
        ids=["logit", "squeezed", "sigmoid", "plain", "plain-squeezed"],
    )
    def test_binary(self, net):
        X, y = blobs(n_classes=2, seed=3)  # hardly overlapping
        labels = np.array(["a", "b"])[y]
        model = trained(net, X, labels)
        assert model.predict_proba(X).shape == (60, 2)
        assert model.score(X, labels) > 0.9

    @pytest.mark.parametrize(
        ("kind", "module"),
        [
            (NeuralNet, LogSoftmaxMLP),
            (TakesLogarithm, SoftmaxMLP),
            (TakesNoLogarithm, LogSoftmaxMLP),
        ],
    )
    @pytest.mark.parametrize("weights", [None, np.ones(60)])
    def test_what_the_net_does_to_the_output_decides(self, kind, module, weights):
        X, y = blobs(dtype=np.float64)
        net = kind(module, criterion=nn.NLLLoss, **FLOAT64, **QUICK)
        model = trained(net, X, y, weights, prior_precision=1.0)
        logits = NeuralNet(MLP, nn.CrossEntropyLoss, **FLOAT64, **QUICK)
        other = trained(logits, X, y, weights, prior_precision=1.0)
        assert_allclose(model.predict_proba(X), other.predict_proba(X), rtol=1e-4)

    def test_a_class_without_weight_does_not_decide_about_the_logarithm(self):
        weight = torch.tensor([0.0, 1.0, 1.0])
        net = classifier(SoftmaxMLP, criterion=nn.NLLLoss, criterion__weight=weight)
        X, y = blobs()
        X, y = X[y > 0], y[y > 0]
        model = LaplaceClassifier(net, **FIXED).partial_fit(X, y, classes=[0, 1, 2])
        assert model.score(X, y) > 0.8

    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize("kind", [NeuralNet, TakesNoLogarithm])
    @pytest.mark.parametrize("module", [SoftmaxMLP, MLP])
    def test_nets_without_a_logarithm_need_one_in_the_module(
        self, kind, module, frozen
    ):
        net = kind(module, criterion=nn.NLLLoss, **QUICK)
        net = FrozenEstimator(initialised(net)) if frozen else net
        words = "NLLLoss needs a module that returns log-probabilities.*log_softmax"
        with pytest.raises(ValueError, match=words):
            LaplaceClassifier(net).fit(*blobs())

    def test_module_instance_is_trained_as_a_copy(self, rows):
        module = MLP()
        before = module.head.weight.detach().clone()
        model = trained(classifier(module), *rows)
        torch.testing.assert_close(module.head.weight, before, rtol=0, atol=0)
        assert not torch.equal(model.estimator_.module_.head.weight, before)


def test_the_threshold_is_honoured(two, binary_net):
    X, y = two
    proba = fitted(binary_net, X, y).predict_proba(X)[:, 1]
    threshold = float(np.median(proba))
    net = binary_classifier(threshold=threshold, **FLOAT64)
    predicted = fitted(same_weights(net, binary_net), X, y).predict(X)
    assert_array_equal(predicted, proba > threshold)
    assert 0 < predicted.mean() < 1


@pytest.mark.parametrize("options", [{"label_smoothing": 0.2}, {"reduction": "sum"}])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_likelihood_is_compared_with_the_loss(options, frozen, rows):
    net = classifier(criterion=nn.CrossEntropyLoss(**options), **FLOAT64)
    net = FrozenEstimator(seeded(net, *rows)) if frozen else net
    model = LaplaceClassifier(net, likelihood=Categorical(), **FIXED)
    if "reduction" in options:
        model.fit(*rows)
    else:
        with pytest.warns(UserWarning, match="CrossEntropyLoss.*Categorical"):
            model.fit(*rows)


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
        plain = trained(classifier(), X, np.argsort(np.argsort(names))[y])
        model = trained(classifier(), X, names[y])
        assert_array_equal(model.classes_, np.sort(names))
        assert set(model.predict(X)) <= set(names)
        assert_allclose(model.predict_proba(X), plain.predict_proba(X))

    def test_frozen_net_knows_classes_that_the_rows_lack(self, rows):
        X, y = rows
        net = seeded(classifier(), X.astype(np.float32), y)
        model = fitted(net, X[y != 1], y[y != 1])
        assert_array_equal(model.classes_, [0, 1, 2])
        assert model.predict_proba(X).shape == (60, 3)


# ------------------------------------------------------------------------ inputs
def test_a_float64_net_is_not_rounded(rows):
    X, _ = rows
    model = trained(classifier(**FLOAT64), *rows)
    assert np.any(model.predict_proba(X + 1e-12) != model.predict_proba(X))


class Joined(MLP):
    """An MLP whose inputs are columns by name."""

    def forward(self, left, right):
        return super().forward(torch.cat([left, right], 1))


class TestDicts:
    @pytest.mark.parametrize("settings", [{}, ALL])
    @pytest.mark.parametrize("weights", [None, np.linspace(0, 2, 60)])
    def test_agree_with_arrays(self, settings, weights, rows):
        X, y = rows
        # the residual compares single inputs
        settings = {"prior_precision": 1.0, "residual": "none", **settings}
        plain = trained(classifier(**FLOAT64), X, y, weights, **settings)
        columns = {"left": X[:, :1], "right": X[:, 1:]}
        model = trained(classifier(Joined, **FLOAT64), columns, y, weights, **settings)
        expected = plain.predict_proba(X)
        assert_allclose(model.predict_proba(columns), expected, rtol=1e-10)
        one = {name: values[:1] for name, values in columns.items()}
        assert_allclose(model.predict_proba(one), expected[:1], rtol=1e-10)

    @pytest.mark.parametrize("other", [[], ["mask"], ["masks", "extra"]])
    def test_keys_are_those_of_fit(self, other, rows):
        class Lenient(MLP):
            """Network that ignores unknown keys, as models in transformers do."""

            def forward(self, x, mask=1.0, **_):
                return super().forward(x * mask)

        X, y = rows[0].astype(np.float32), rows[1]
        given = {"x": X, "mask": np.ones_like(X[:, :1]), "extra": X}
        model = trained(classifier(Lenient), given, y, prior_precision=1.0)
        words = r"X has keys \[.*\]. Pass the keys \['extra', 'mask', 'x'\] of fit"
        with pytest.raises(ValueError, match=words):
            model.predict(dict.fromkeys(["x", *other], X))


# ----------------------------------------------------------------- probabilities


class TestProbabilities:
    @pytest.mark.parametrize("link", ["probit", "probit_uncentred"])
    def test_are_the_links_of_the_latent_moments(self, rows, logits_net, link):
        X, y = rows
        model = fitted(logits_net, X, y, link_approx=link)
        moments = model.latent_mean_and_variance(X, full_cov=True)
        expected = LINKS[link](*map(torch.tensor, moments), None)
        assert_allclose(model.predict_proba(X), expected, rtol=1e-12)

    @pytest.mark.parametrize("link", ["probit", "probit_uncentred"])
    def test_of_the_link_are_what_held_out_samples_are_scored_by(
        self, rows, logits_net, link
    ):
        def loss(precision):
            model = fitted(
                logits_net, X, y, link_approx=link, prior_precision=precision
            )
            return log_loss(y_val, model.predict_proba(X_val))

        X, y = rows
        # one label in eight is wrong, so that the best prior is not the narrowest
        X_val, y_val = 2 * X, np.where(np.arange(60) % 8 == 0, (y + 1) % 3, y)
        net = FrozenEstimator(logits_net)
        tuned = LaplaceClassifier(net, refine=False, link_approx=link, random_state=0)
        precision = tuned.fit(X, y, X_val=X_val, y_val=y_val).prior_precision_
        others = [loss(factor * precision) for factor in (0.3, 3)]
        assert loss(precision) < min(others) + 1e-4

    def test_tight_prior_gives_the_networks_own(self, rows, logits_net):
        X, y = rows
        options = {"prior_precision": 1e12, "residual": "none"}
        found = fitted(logits_net, X, y, **options).predict_proba(X)
        assert_allclose(found, logits_net.predict_proba(X), atol=1e-9)

    def test_binary_equals_its_two_logits(self, two, binary_net):
        X, y = two
        model = fitted(binary_net, X, y, prior_precision=1e12, residual="none")
        with torch.no_grad():
            f = binary_net.module_(torch.tensor(X)).numpy()[:, 0]
        assert_allclose(model.predict_proba(X)[:, 1], expit(f), atol=1e-9)
        mean, variance = model.latent_mean_and_variance(X)
        assert_allclose(mean, np.stack([-f, f], 1) / 2, rtol=1e-12)
        assert variance.shape == (60, 2)


def test_few_draws_are_not_the_choice_of_auto(rows, logits_net):
    X, y = rows
    model = fitted(logits_net, X, y).set_params(n_samples=8)
    few = model.predict_proba(X)
    assert_array_equal(few, model.set_params(link_approx="gumbel").predict_proba(X))


# -------------------------------------------------------------------- the default


class TestPartialFit:
    def test_classes_of_a_frozen_net_that_was_not_fitted(self):
        """For example, the net may have loaded weights and outputs for more classes."""
        X, y = blobs()
        net = FrozenEstimator(classifier(module__n_out=5).initialize())
        model = LaplaceClassifier(net, **FIXED)
        with pytest.raises(ValueError, match=r"stratified folds.*partial_fit"):
            model.fit(X, y)
        model.partial_fit(X, y, classes=range(5))
        assert model.predict_proba(X).shape == (len(X), 5)

    def test_classes_that_come_later(self):
        X, y = blobs()
        rows = y != 2
        model = LaplaceClassifier(classifier(callbacks=[]), **FIXED)
        model.partial_fit(X[rows], y[rows], classes=[0, 1, 2])
        assert model.classes_.tolist() == [0, 1, 2]
        model.partial_fit(X[~rows], y[~rows])
        model.partial_fit(X[~rows], y[~rows], classes=[0, 1, 2])
        assert model.posterior_.data_fit.n_targets == len(y) + (~rows).sum()
        assert not hasattr(model, "_announced")

    def test_unknown_labels(self):
        X, y = blobs()
        model = LaplaceClassifier(classifier(), **FIXED)
        with pytest.raises(ValueError, match=r"labels that are not in classes: \[2\]"):
            model.partial_fit(X, y, classes=[0, 1])
        assert not hasattr(model, "posterior_")
        model.fit(X, y)
        words = r"y has labels that y in fit does not have: \[7\]"
        with pytest.raises(ValueError, match=words):
            model.partial_fit(X[:1], [7])
        with pytest.raises(ValueError, match="differ from the classes of the first"):
            model.partial_fit(X[:1], y[:1], classes=[0, 1, 2, 3])


def frozen(make=classifier, **params):
    """Return a trained net, a copy with a plain criterion, and rows."""
    X, y = blobs() if make is classifier else blobs(n_classes=2)
    net = seeded(make(**params), X, y if make is classifier else y.astype(np.float32))
    plain = copy.deepcopy(net)
    plain.criterion_ = type(net.criterion_)()
    return FrozenEstimator(net), FrozenEstimator(plain), X, y


WEIGHED = {"prior_precision": 0.7, "random_state": 0, **FULL}


class TestClassesThatWeigh:
    def same(self, model, other, X):
        assert_allclose(model.predict_proba(X), other.predict_proba(X), atol=1e-7)
        values = [m.log_marginal_likelihood_value_ for m in (model, other)]
        assert_allclose(*values, rtol=1e-5)

    @pytest.mark.parametrize("refine", [False, True])
    def test_weights_of_a_criterion_are_sample_weights(self, refine):
        w = torch.tensor([0.5, 2.0, 1.5])
        net, plain, X, y = frozen(criterion__weight=w)
        model = LaplaceClassifier(net, refine=refine, **WEIGHED).fit(X, y)
        other = LaplaceClassifier(plain, refine=refine, **WEIGHED)
        self.same(model, other.fit(X, y, w[y].numpy()), X)

    def test_weight_of_the_second_class(self):
        pos_weight = torch.tensor([3.0])
        net, plain, X, y = frozen(binary_classifier, criterion__pos_weight=pos_weight)
        model = LaplaceClassifier(net, **WEIGHED).fit(X, y)
        other = LaplaceClassifier(plain, **WEIGHED).fit(X, y, 1 + 2.0 * y)
        self.same(model, other, X)

    def test_smoothing_leaves_the_curvature(self):
        net, plain, X, y = frozen(criterion__label_smoothing=0.2)
        model = LaplaceClassifier(net, **WEIGHED).fit(X, y)
        other = LaplaceClassifier(plain, **WEIGHED).fit(X, y)
        assert_allclose(model.predict_proba(X), other.predict_proba(X))
        loss, unsmoothed = (m.posterior_.data_fit.loss for m in (model, other))
        logits = torch.tensor(net.estimator.forward(X).numpy())
        criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum")
        expected = float(criterion(logits, torch.tensor(y)))
        assert loss == pytest.approx(expected, rel=1e-5)
        assert loss != unsmoothed

    @pytest.mark.parametrize("value", ["balanced", {"a": 3.0, "c": 0.2}])
    def test_class_weight_is_sample_weight(self, value):
        X, y = blobs(n=70)
        labels = np.array(["a", "b", "c"])[y]
        held = {"X_val": X[50:], "y_val": labels[50:]}
        net, kept = frozen()[0], {"refine": False, "residual": "none"}
        model = LaplaceClassifier(net, class_weight=value, **WEIGHED, **kept)
        assert model.fit(X, labels, **held).class_weight == value
        other = LaplaceClassifier(net, **WEIGHED, **kept)
        self.same(model, other.fit(X, labels, compute_sample_weight(value, labels)), X)
        model.set_params(prior_precision="validation").fit(X, labels, **held)
        assert model.class_weight == value

    def test_class_weight_trains_the_network(self):
        X, y = blobs()
        w = compute_sample_weight({0: 5.0}, y)
        model = LaplaceClassifier(classifier(), class_weight={0: 5.0}, **FIXED)
        other = LaplaceClassifier(classifier(), **FIXED).fit(X, y, w)
        self.same(model.fit(X, y), other, X)

    def test_partial_fit_keeps_the_weights_of_the_first_fit(self):
        net, _, X, y = frozen()
        model = LaplaceClassifier(net, class_weight="balanced", **WEIGHED)
        weights = model.fit(X[:40], y[:40])._targets.class_weights
        model.partial_fit(X[40:], y[40:])
        expected = LaplaceClassifier(net, **WEIGHED).fit(X, y, weights[y])
        self.same(model, expected, X)

    @pytest.mark.parametrize("scale", [1.0, 30.0])
    def test_weighted_training_is_that_of_the_criterion(self, scale):
        """Unit weights and the scale of the criterion's weights change nothing."""
        X, y = blobs()
        outputs = []
        for factor, sample_weight in ((scale, np.ones(len(y))), (1.0, None)):
            w = factor * torch.tensor([1.0, 2.0, 3.0])
            model = LaplaceClassifier(classifier(criterion__weight=w), **FIXED)
            net = model.fit(X, y, sample_weight=sample_weight).estimator_
            outputs.append(net.forward(X).numpy())
        assert_allclose(*outputs, rtol=1e-3, atol=1e-4)


def with_index(kind, index):
    """Return a net whose criterion has the index, as an instance, class or partial."""
    if kind == "instance":
        return classifier(criterion=nn.CrossEntropyLoss(ignore_index=index))
    if kind == "partial":
        return classifier(criterion=partial(nn.CrossEntropyLoss, ignore_index=index))
    options = {} if index == -100 else {"criterion__ignore_index": index}
    return classifier(**options)


IGNORED = [("instance", -100), ("class", -100), ("instance", 255), ("class", -1)]
OTHERS = [
    LaplaceClassifierCV(prior_precisions=[1.0], cv=2),
    DeepEnsembleClassifier(n_estimators=2),
    MCDropoutClassifier(n_samples=5),
    VariationalClassifier(n_samples=5),
    SWAGClassifier(n_samples=5, n_snapshots=3, steps_per_snapshot=2),
]


class TestLabelsThatTheCriterionIgnores:
    """The label -100 is ignored if all other labels are whole numbers from zero."""

    def rows(self, index, n=60):
        X, y = blobs(n=n)
        return X, np.where(np.arange(n) % 5, y, index)

    @pytest.mark.parametrize("weights", [None, {0: 1, 1: 2, 2: 3}])
    @pytest.mark.parametrize(("kind", "index"), IGNORED)
    def test_ignored_rows_change_nothing(self, kind, index, weights):
        (X, y), net = self.rows(index), with_index(kind, index)
        kept, options = y != index, {"class_weight": weights, **FIXED}
        model = LaplaceClassifier(net, **options).fit(X, y)
        other = LaplaceClassifier(classifier(), **options).fit(X[kept], y[kept])
        assert model.classes_.tolist() == [0, 1, 2]
        assert_allclose(model.predict_proba(X), other.predict_proba(X), atol=1e-6)
        assert model.score(X, y) == other.score(X[kept], y[kept])
        sets = [
            m.conformalize(X[rows], y[rows]).predict_set(X, method="conformal")
            for m, rows in ((model, slice(None)), (other, kept))
        ]
        assert_array_equal(*sets)
        model.tune(X, y)
        other.tune(X[kept], y[kept])
        assert_allclose(model.prior_precision_, other.prior_precision_)
        counts = [
            m.partial_fit(X[rows], y[rows]).posterior_.data_fit.n_targets
            for m, rows in ((model, slice(None)), (other, kept))
        ]
        assert counts[0] == counts[1] >= 2 * kept.sum()
        before = model.predict_proba(X)
        model.partial_fit(X[~kept], y[~kept])
        assert_array_equal(model.predict_proba(X), before)
        w = 1.0 + np.arange(len(y)) % 2
        found = model.fit(X, y, w).predict_proba(X)
        expected = other.fit(X[kept], y[kept], w[kept]).predict_proba(X)
        assert_allclose(found, expected, atol=1e-6)
        model.fit(X[kept], y[kept], X_val=X, y_val=y)
        fresh = LaplaceClassifier(net, **FIXED).partial_fit(X, y, classes=[0, 1, 2])
        assert fresh.classes_.tolist() == [0, 1, 2]
        if isinstance(net.criterion, nn.Module):
            assert net.criterion.ignore_index == index
        with pytest.raises(ValueError, match="All rows have the label"):
            LaplaceClassifier(net).fit(X[~kept], y[~kept])

    @pytest.mark.parametrize(("kind", "index"), IGNORED)
    def test_frozen_nets(self, kind, index):
        X, y = self.rows(index)
        net = seeded(with_index(kind, index), X, y)
        model = LaplaceClassifier(FrozenEstimator(net), **FIXED).fit(X, y)
        assert model.classes_.tolist() == [0, 1, 2]
        assert_array_equal(model.predict(X), net.forward(X).argmax(1))
        assert net.criterion_.ignore_index == index

    @pytest.mark.parametrize("model", OTHERS, ids=lambda model: type(model).__name__)
    @pytest.mark.parametrize(("kind", "index"), [*IGNORED, ("partial", -7)])
    def test_every_classifier(self, kind, index, model):
        X, y = self.rows(index)
        module = DropoutMLP if isinstance(model, MCDropoutClassifier) else MLP
        net = with_index(kind, index).set_params(module=module, max_epochs=5)
        known = {"likelihood": Categorical()} if kind == "partial" else {}
        model = clone(model).set_params(estimator=net, random_state=0, **known)
        model.fit(X, y)
        assert model.classes_.tolist() == [0, 1, 2]
        assert model.score(X, y) == model.score(X[y != index], y[y != index])

    @pytest.mark.parametrize(
        ("labels", "make"),
        [
            ([-100, -50, 0], np.array),
            ([-100.0, 0.0, 1.0], np.array),
            (["-100", "0", "1"], np.array),
            ([-100.0, 0.0, 1.0], partial(pd.Series, dtype=float)),
            ([-100.0, 0.0, 1.0], partial(pd.Series, dtype="Float64")),
        ],
    )
    def test_labels_that_are_classes(self, labels, make):
        X, codes = blobs()
        model = LaplaceClassifier(with_index("class", -100), **FIXED)
        y = make(np.array(labels)[codes])
        assert model.fit(X, y).classes_.tolist() == labels
        first = codes == codes[0]  # without the other classes
        assert model.score(X[first], y[first]) > 0
        model.partial_fit(X[first], y[first])
        assert model.posterior_.data_fit.n_targets == len(y) + first.sum()

    @pytest.mark.parametrize("dtype", ["Int64", "Int8", "int16"])
    @pytest.mark.parametrize("kind", [pd.Series, pd.array])
    def test_whole_numbers_of_pandas(self, kind, dtype):
        X, y = self.rows(-100)
        labels = kind(y, dtype=dtype)
        model = LaplaceClassifier(with_index("class", -100), **FIXED).fit(X, labels)
        assert model.classes_.tolist() == [0, 1, 2]
        assert model.predict(X).dtype.kind == "i"
        assert model.score(X, labels) == model.score(X, y)

    def test_the_default_network_ignores_no_label(self):
        X, y = self.rows(-100)
        assert LaplaceClassifier(**FIXED).fit(X, y).classes_.tolist() == [-100, 0, 1, 2]

    def test_named_classes_are_not_ignored(self):
        X, y = blobs()
        model = LaplaceClassifier(classifier(), **FIXED)
        y = np.array([-100, 0, 1])[y]
        model.partial_fit(X, y, classes=[-100, 0, 1])
        assert model.classes_.tolist() == [-100, 0, 1]
        assert model.posterior_.data_fit.n_targets == len(y)

    def test_held_out_labels_that_are_all_ignored_are_refused(self):
        X, y = blobs()
        model = LaplaceClassifier(classifier(), **FIXED)
        words = "ignores all labels of y_val, .* Pass some rows with other labels"
        with pytest.raises(ValueError, match=words):
            model.fit(X, y, X_val=X.copy(), y_val=np.full(len(y), -100))
        with pytest.raises(ValueError, match="ignores all labels of y, "):
            model.fit(X, y).tune(X, np.full(len(y), -100))

    def test_labels_to_ignore_only_after_fit(self):
        X, y = blobs()
        model = LaplaceClassifier(classifier(), **FIXED).fit(X, y)
        other = np.where(np.arange(len(y)) % 3, y, -100)
        assert model.score(X, other) == model.score(X[other >= 0], other[other >= 0])
        assert model.fit(X, y, X_val=X.copy(), y_val=other).classes_.tolist() == [
            0,
            1,
            2,
        ]
