"""Elbo: the terms of the objective, compared with an independent computation."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from nets import (
    MLP,
    QUICK,
    LogSoftmaxMLP,
    SharpSigmoidMLP,
    SharpSoftmaxMLP,
    SigmoidMLP,
    SoftmaxMLP,
    binary_classifier,
    classifier,
    regressor,
)
from objectives import (
    DOUBLE,
    EXACT,
    LABELS,
    NUMBERS,
    ROUNDED,
    Steps,
    X,
    agrees,
    double,
    entropy,
    normal,
    reference,
)
from skorch import NeuralNet, NeuralNetRegressor
from skorch.callbacks import EpochScoring
from skorch.dataset import ValidSplit
from torch import nn
from torch.distributions import Normal, Poisson
from torch.nn import functional

from sklaplace import VariationalClassifier, VariationalRegressor
from sklaplace.likelihoods import HeteroscedasticNLLLoss
from sklaplace.variational.elbo import KL_SCHEDULES, blundell, uniform


# ------------------------------------------------------------------- likelihoods
class Maps(nn.Module):
    """A network with logits of three classes at two positions, (b, 3, 2)."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.head = nn.Linear(2, 6, dtype=dtype)

    def forward(self, X):
        return self.head(X).reshape(-1, 3, 2)


@dataclass
class Case:
    """A net, its targets, and an independent mean loss of outputs."""

    net: object
    y: np.ndarray
    nll: object
    settings: dict = field(default_factory=dict)
    keep: object = ...

    @property
    def module(self):
        return self.net.module(**self.net.get_params_for("module"))

    @property
    def tolerance(self):
        """Return the tolerance; losses of probabilities are less precise."""
        return ROUNDED if self.net.criterion in (nn.NLLLoss, nn.BCELoss) else EXACT

    def fit(self, **settings):
        regresses = isinstance(self.net, NeuralNetRegressor)
        kind = VariationalRegressor if regresses else VariationalClassifier
        return kind(self.net, **settings, **self.settings).fit(X, self.y)


IGNORING = np.where(np.arange(20) % 5 == 0, -1, LABELS)
BINARY = np.arange(20) % 2
MANY = (np.random.default_rng(1).random((20, 3)) > 0.5).astype(int)
TWO = np.random.default_rng(3).normal(size=(20, 2))
COUNTS = np.random.default_rng(4).poisson(2.0, size=20)
CLASS_WEIGHT = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
WEIGHED = 1 + 2.0 * (LABELS == 1)


def of_net(make, module=MLP, **params):
    settings = {**DOUBLE, "callbacks": [Steps()], "max_epochs": 3} | params
    return make(module, **settings)


def logits(y=BINARY, **options):
    target = torch.tensor(y, dtype=torch.float64)
    loss = partial(functional.binary_cross_entropy_with_logits, reduction="sum")
    return lambda f: loss(f.reshape(target.shape), target, **options) / len(target)


def of_probabilities(p):
    return -p.log()[torch.arange(20), torch.tensor(LABELS)].mean()


def of_probability(p):
    y = torch.tensor(BINARY, dtype=torch.float64)
    return functional.binary_cross_entropy(p[:, 0], y)


def heteroscedastic(f):
    mean, log_variance = f.chunk(2, 1)
    target = torch.tensor(NUMBERS.reshape(20, 1))
    return -Normal(mean, (log_variance / 2).exp()).log_prob(target).mean()


def counts(f):
    return -Poisson(f[:, 0].exp()).log_prob(torch.tensor(COUNTS).double()).mean()


KNOWN = IGNORING >= 0
PAIRS = np.stack([LABELS, LABELS[::-1]], 1)
SIGMAS = torch.tensor([0.3, 0.8], dtype=torch.float64)
NOISE = {"sigma_noise": 0.3}
SMOOTHED = {"criterion__weight": CLASS_WEIGHT, "criterion__label_smoothing": 0.2}
MULTILABEL = partial(NeuralNet, criterion=nn.BCEWithLogitsLoss, **QUICK)


def weighed(f):
    return entropy(weight=torch.tensor([1.0, 3, 1]).double())(f) / WEIGHED.mean()


def of_maps(f):
    return entropy(PAIRS, weight=CLASS_WEIGHT, reduction="sum")(f) / 20


def of_simplex(module):
    return Case(
        of_net(classifier, module, criterion=nn.NLLLoss), LABELS, of_probabilities
    )


def of_sigmoid(module):
    net = of_net(binary_classifier, module, criterion=nn.BCELoss)
    return Case(net, BINARY, of_probability)


CASES = {
    "classes": Case(of_net(classifier), LABELS, entropy()),
    "label_smoothing": Case(
        of_net(classifier, **SMOOTHED),
        LABELS,
        entropy(weight=CLASS_WEIGHT, label_smoothing=0.2),
    ),
    "ignore_index": Case(
        of_net(classifier, criterion__ignore_index=-1),
        IGNORING,
        entropy(IGNORING[KNOWN]),
        keep=KNOWN,
    ),
    "class_weight": Case(
        of_net(classifier), LABELS, weighed, {"class_weight": {0: 1.0, 1: 3.0, 2: 1.0}}
    ),
    "softmax": of_simplex(SoftmaxMLP),
    "softmax_of_no_layer": of_simplex(SharpSoftmaxMLP),
    "log_softmax": Case(
        of_net(partial(NeuralNet, criterion=nn.NLLLoss, **QUICK), LogSoftmaxMLP),
        LABELS,
        entropy(),
    ),
    "one_logit": Case(of_net(binary_classifier), BINARY, logits()),
    "pos_weight": Case(
        of_net(binary_classifier, criterion__pos_weight=torch.tensor(3.0)),
        BINARY,
        logits(pos_weight=torch.tensor(3.0)),
    ),
    "sigmoid": of_sigmoid(SigmoidMLP),
    "sigmoid_of_no_layer": of_sigmoid(SharpSigmoidMLP),
    "multilabel": Case(of_net(MULTILABEL), MANY, logits(MANY)),
    "maps": Case(
        of_net(classifier, Maps, criterion__weight=CLASS_WEIGHT), PAIRS, of_maps
    ),
    "numbers": Case(of_net(regressor), NUMBERS, normal(NUMBERS, 0.3), NOISE),
    "columns": Case(
        of_net(regressor, module__n_out=2),
        TWO,
        normal(TWO, SIGMAS),
        {"sigma_noise": SIGMAS.numpy()},
    ),
    "counts": Case(of_net(regressor, criterion=nn.PoissonNLLLoss), COUNTS, counts),
    "heteroscedastic": Case(
        of_net(regressor, criterion=HeteroscedasticNLLLoss, module__n_out=2),
        NUMBERS,
        heteroscedastic,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_written_out(name):
    case = CASES[name]
    model = case.fit(kl_weight=0.7, prior_scale=0.5, random_state=0)
    steps, history = list(Steps.seen), model.estimator_.history
    rows = X[case.keep]
    n = WEIGHED.sum() if "class_weight" in case.settings else len(rows)
    assert len(steps) == 3
    for epoch, step in enumerate(steps):
        np.testing.assert_array_equal(step["X"], rows)
        written_out = case.module, case.nll, 0.7 / n
        agrees(step, *written_out, case.tolerance, prior_scale=0.5)
        *_, nll, kl = reference(step, *written_out, prior_scale=0.5)
        assert history[epoch, "train_loss"] == pytest.approx(step["loss"])
        assert history[epoch, "kl"] == pytest.approx(kl)
        assert history[epoch, "elbo"] == pytest.approx(-n * nll - kl)


# ----------------------------------------------------------------------- batches
def per_batch(step):
    target = step["y"]
    return lambda f: functional.cross_entropy(f, target)


@pytest.mark.parametrize("schedule", KL_SCHEDULES)
def test_batches_share_the_divergence(schedule):
    net = of_net(classifier, max_epochs=2, batch_size=6)
    settings = {"kl_schedule": schedule, "kl_weight": 0.5, "random_state": 0}
    VariationalClassifier(net, **settings).fit(X, LABELS)
    assert [len(step["X"]) for step in Steps.seen] == [6, 6, 6, 2] * 2
    for number, step in enumerate(Steps.seen):
        factor = KL_SCHEDULES[schedule](number % 4, 4)
        agrees(step, double(), per_batch(step), factor * 0.5 / 20)


def test_rows_are_counted_after_the_nets_own_split():
    scoring = EpochScoring("accuracy", on_train=True, use_caching=False)
    split = ValidSplit(0.3, random_state=0)
    net = of_net(classifier, callbacks=[Steps(), scoring], train_split=split)
    VariationalClassifier(net, kl_weight=0.5, random_state=0).fit(X, LABELS)
    for step in Steps.seen:
        assert len(step["X"]) == 14
        agrees(step, double(), per_batch(step), 0.5 / 14)


def test_weights_of_rows_in_batches():
    weight = np.linspace(0.5, 2, 20)
    net = of_net(classifier, max_epochs=1, batch_size=6)
    settings = {"kl_weight": 0.5, "random_state": 0}
    VariationalClassifier(net, **settings).fit(X, LABELS, sample_weight=weight)
    for number, step in enumerate(Steps.seen):
        own = torch.tensor(weight[6 * number : 6 * number + 6] / weight.mean())

        def nll(f, own=own, y=step["y"]):
            return (own * functional.cross_entropy(f, y, reduction="none")).mean()

        agrees(step, double(), nll, 0.5 / weight.sum())


def test_recorded_elbo_counts_the_weights_of_training_rows_alone():
    weight = np.r_[np.full(10, 1.0), np.full(10, 9.0)]
    split = ValidSplit(2)
    net = of_net(classifier, train_split=split)
    model = VariationalClassifier(net, kl_weight=0.5, random_state=0)
    model.fit(X, LABELS, sample_weight=weight)
    rows = Steps.seen[-1]["X"].numpy()
    own = weight[[int(np.flatnonzero((row == X).all(1))[0]) for row in rows]]
    assert own.mean() != weight.mean()
    last = model.estimator_.history[-1]
    nll = last["train_loss"] - 0.5 * last["kl"] / own.sum()
    assert last["elbo"] == pytest.approx(-own.sum() * nll - last["kl"])


def test_validation_loss_is_that_of_the_medians():
    net = classifier(**DOUBLE, max_epochs=3, train_split=ValidSplit(2), callbacks=None)
    model = VariationalClassifier(net, random_state=0).fit(X, LABELS)
    split = net.train_split(net.get_dataset(X, LABELS), LABELS)
    first, second = (np.asarray(part.indices) for part in split)
    assert len(first) == len(second) == 10
    f = model.estimator_.forward(X[second])
    expected = functional.cross_entropy(f, torch.tensor(LABELS[second]))
    found = model.estimator_.history[-1, "valid_loss"]
    np.testing.assert_allclose(found, expected, **EXACT)


# --------------------------------------------------------------------- schedules
class TestSchedules:
    @pytest.mark.parametrize("schedule", KL_SCHEDULES)
    @pytest.mark.parametrize("m", [1, 2, 7, 60, 2000])
    def test_mean_is_one(self, schedule, m):
        factors = [KL_SCHEDULES[schedule](batch, m) for batch in range(m)]
        assert np.mean(factors) == pytest.approx(1, rel=1e-12)
        assert np.isfinite(factors).all()
        assert min(factors) >= 0

    @pytest.mark.parametrize("m", [1, 2, 5, 40])
    def test_blundell_is_the_published_formula(self, m):
        for i in range(1, m + 1):
            published = 2 ** (m - i) / (2**m - 1)
            assert blundell(i - 1, m) == pytest.approx(m * published, rel=1e-12)

    def test_uniform_is_one(self):
        assert {uniform(batch, 5) for batch in range(5)} == {1.0}
