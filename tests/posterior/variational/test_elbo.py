"""Elbo: the objective, term by term, against a computation of its own."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from nets import (
    MLP,
    FunctionalSoftmaxMLP,
    SharpSigmoidMLP,
    SharpSoftmaxMLP,
    SigmoidMLP,
    SoftmaxMLP,
    SqueezedMLP,
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
from skorch import NeuralNet
from skorch.callbacks import EpochScoring
from skorch.dataset import ValidSplit
from torch import nn
from torch.distributions import Normal, Poisson
from torch.nn import functional

from sklaplace import VariationalClassifier, VariationalRegressor
from sklaplace.likelihoods import HeteroscedasticNLLLoss
from sklaplace.posterior.variational.elbo import KL_SCHEDULES, blundell, uniform


# ------------------------------------------------------------------- likelihoods
class Maps(nn.Module):
    """Logits of three classes at each of two positions, (b, 3, 2)."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.head = nn.Linear(2, 6, dtype=dtype)

    def forward(self, X):
        return self.head(X).reshape(-1, 3, 2)


@dataclass
class Case:
    """A net, targets and the mean loss of outputs, by other means than ours."""

    net: object
    y: np.ndarray
    nll: object
    settings: dict = field(default_factory=dict)
    keep: np.ndarray | slice = slice(None)

    @property
    def module(self):
        own = {k[8:]: v for k, v in self.net.get_params(False).items() if "__" in k}
        return self.net.module(**{k: v for k, v in own.items() if k in ("dtype", "n_out")})


IGNORING = np.where(np.arange(20) % 5 == 0, -1, LABELS)
BINARY = np.arange(20) % 2
MANY = (np.random.default_rng(1).random((20, 3)) > 0.5).astype(int)
TWO = np.random.default_rng(3).normal(size=(20, 2))
COUNTS = np.random.default_rng(4).poisson(2.0, size=20)
CLASS_WEIGHT = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
WEIGHED = 1 + 2.0 * (LABELS == 1)


def of_net(make, module=MLP, **params):
    return make(module, **DOUBLE, callbacks=[Steps()], max_epochs=3, **params)


def logits(y=BINARY, **options):
    target = torch.tensor(y, dtype=torch.float64)
    return lambda f: (
        functional.binary_cross_entropy_with_logits(
            f.reshape(target.shape), target, reduction="none", **options
        )
        .reshape(len(target), -1)
        .sum(1)
        .mean()
    )


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
MULTILABEL = NeuralNet(
    MLP,
    criterion=nn.BCEWithLogitsLoss,
    optimizer=torch.optim.Adam,
    lr=0.05,
    verbose=0,
    train_split=None,
    batch_size=-1,
    max_epochs=3,
    callbacks=[Steps()],
    **DOUBLE,
)
CASES = {
    "classes": Case(of_net(classifier), double(), LABELS, entropy(), {}),
    "criterion_weight": Case(
        of_net(classifier, criterion__weight=CLASS_WEIGHT),
        double(),
        LABELS,
        entropy(weight=CLASS_WEIGHT),
        {},
    ),
    "label_smoothing": Case(
        of_net(
            classifier, criterion__weight=CLASS_WEIGHT, criterion__label_smoothing=0.2
        ),
        double(),
        LABELS,
        entropy(weight=CLASS_WEIGHT, label_smoothing=0.2),
        {},
    ),
    "ignore_index": Case(
        of_net(classifier, criterion__ignore_index=-1),
        double(),
        IGNORING,
        entropy(IGNORING[KNOWN]),
        {},
        keep=KNOWN,
    ),
    "class_weight": Case(
        of_net(classifier),
        double(),
        LABELS,
        lambda f: (
            entropy(weight=torch.tensor([1.0, 3, 1]).double())(f) / WEIGHED.mean()
        ),
        {"class_weight": {0: 1.0, 1: 3.0, 2: 1.0}},
    ),
    "softmax": Case(
        of_net(classifier, SoftmaxMLP, criterion=nn.NLLLoss),
        double(SoftmaxMLP),
        LABELS,
        of_probabilities,
        {},
        tolerance=ROUNDED,
    ),
    "softmax_function": Case(
        of_net(classifier, FunctionalSoftmaxMLP, criterion=nn.NLLLoss),
        double(FunctionalSoftmaxMLP),
        LABELS,
        of_probabilities,
        {},
        tolerance=ROUNDED,
    ),
    "softmax_of_no_layer": Case(
        of_net(classifier, SharpSoftmaxMLP, criterion=nn.NLLLoss),
        double(SharpSoftmaxMLP),
        LABELS,
        of_probabilities,
        {},
        tolerance=ROUNDED,
    ),
    "one_logit": Case(of_net(binary_classifier), double(n_out=1), BINARY, logits(), {}),
    "one_logit_without_axis": Case(
        of_net(binary_classifier, SqueezedMLP),
        double(SqueezedMLP, n_out=1),
        BINARY,
        logits(),
        {},
    ),
    "pos_weight": Case(
        of_net(binary_classifier, criterion__pos_weight=torch.tensor(3.0)),
        double(n_out=1),
        BINARY,
        logits(pos_weight=torch.tensor(3.0)),
        {},
    ),
    "sigmoid": Case(
        of_net(binary_classifier, SigmoidMLP, criterion=nn.BCELoss),
        double(SigmoidMLP, n_out=1),
        BINARY,
        of_probability,
        {},
        tolerance=ROUNDED,
    ),
    "sigmoid_of_no_layer": Case(
        of_net(binary_classifier, SharpSigmoidMLP, criterion=nn.BCELoss),
        double(SharpSigmoidMLP, n_out=1),
        BINARY,
        of_probability,
        {},
        tolerance=ROUNDED,
    ),
    "multilabel": Case(MULTILABEL, double(), MANY, logits(MANY), {}),
    "maps": Case(
        of_net(classifier, Maps, criterion__weight=CLASS_WEIGHT),
        double(Maps),
        PAIRS,
        lambda f: entropy(PAIRS, weight=CLASS_WEIGHT, reduction="sum")(f) / 20,
        {},
    ),
    "numbers": Case(
        of_net(regressor),
        double(n_out=1),
        NUMBERS,
        normal(NUMBERS, 0.3),
        {"sigma_noise": 0.3},
        VariationalRegressor,
    ),
    "numbers_without_axis": Case(
        of_net(regressor, SqueezedMLP),
        double(SqueezedMLP, n_out=1),
        NUMBERS,
        normal(NUMBERS, 0.3),
        {"sigma_noise": 0.3},
        VariationalRegressor,
    ),
    "columns": Case(
        of_net(regressor, module__n_out=2),
        double(n_out=2),
        TWO,
        normal(TWO, SIGMAS),
        {"sigma_noise": SIGMAS.numpy()},
        VariationalRegressor,
    ),
    "counts": Case(
        of_net(regressor, criterion=nn.PoissonNLLLoss),
        double(n_out=1),
        COUNTS,
        counts,
        {},
        VariationalRegressor,
    ),
    "heteroscedastic": Case(
        of_net(regressor, criterion=HeteroscedasticNLLLoss, module__n_out=2),
        double(n_out=2),
        NUMBERS,
        heteroscedastic,
        {},
        VariationalRegressor,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_written_out(name):
    case = CASES[name]
    settings = {"kl_weight": 0.7, "prior_scale": 0.5, "random_state": 0}
    model = case.kind(case.net, **settings, **case.settings).fit(X, case.y)
    steps, history = list(Steps.seen), model.estimator_.history
    rows = X if case.keep is None else X[case.keep]
    n = WEIGHED.sum() if "class_weight" in case.settings else len(rows)
    tolerance = case.tolerance or EXACT
    assert len(steps) == 3
    for epoch, step in enumerate(steps):
        np.testing.assert_array_equal(step["X"], rows)
        agrees(step, case.module, case.nll, 0.7 / n, tolerance, prior_scale=0.5)
        *_, nll, kl = reference(step, case.module, case.nll, 0.7 / n, prior_scale=0.5)
        assert history[epoch, "train_loss"] == pytest.approx(step["loss"])
        assert history[epoch, "kl"] == pytest.approx(kl)
        assert history[epoch, "elbo"] == pytest.approx(-n * nll - kl)


# ----------------------------------------------------------------------- batches
def per_batch(step):
    target = step["y"]
    return lambda f: functional.cross_entropy(f, target)


@pytest.mark.parametrize("schedule", KL_SCHEDULES)
def test_batches_share_the_divergence(schedule):
    net = classifier(**DOUBLE, callbacks=[Steps()], max_epochs=2, batch_size=6)
    settings = {"kl_schedule": schedule, "kl_weight": 0.5, "random_state": 0}
    VariationalClassifier(net, **settings).fit(X, LABELS)
    assert [len(step["X"]) for step in Steps.seen] == [6, 6, 6, 2] * 2
    for number, step in enumerate(Steps.seen):
        factor = KL_SCHEDULES[schedule](number % 4, 4)
        agrees(step, double(), per_batch(step), factor * 0.5 / 20)


def test_rows_are_counted_after_the_nets_own_split():
    callbacks = [Steps(), EpochScoring("accuracy", on_train=True, use_caching=False)]
    net = classifier(
        **DOUBLE,
        callbacks=callbacks,
        max_epochs=2,
        train_split=ValidSplit(0.3, random_state=0),
    )
    VariationalClassifier(net, kl_weight=0.5, random_state=0).fit(X, LABELS)
    for step in Steps.seen:
        assert len(step["X"]) == 14
        agrees(step, double(), per_batch(step), 0.5 / 14)


def test_weights_of_rows_in_batches():
    weight = np.linspace(0.5, 2, 20)
    net = classifier(**DOUBLE, callbacks=[Steps()], max_epochs=1, batch_size=6)
    settings = {"kl_weight": 0.5, "random_state": 0}
    VariationalClassifier(net, **settings).fit(X, LABELS, sample_weight=weight)
    for number, step in enumerate(Steps.seen):
        own = torch.tensor(weight[6 * number : 6 * number + 6] / weight.mean())
        target = step["y"]

        def nll(f, own=own, target=target):
            return (own * functional.cross_entropy(f, target, reduction="none")).mean()

        agrees(step, double(), nll, 0.5 / weight.sum())


def test_recorded_elbo_counts_the_weights_of_training_rows_alone():
    weight = np.r_[np.full(10, 1.0), np.full(10, 9.0)]
    split = ValidSplit(2)
    net = classifier(**DOUBLE, max_epochs=2, train_split=split, callbacks=[Steps()])
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
    first, second = (np.asarray(part.indices) for part in splits(net))
    assert len(first) == len(second) == 10
    f = model.estimator_.forward(X[second])
    expected = functional.cross_entropy(f, torch.tensor(LABELS[second]))
    found = model.estimator_.history[-1, "valid_loss"]
    np.testing.assert_allclose(found, expected, **EXACT)


def splits(net):
    dataset = net.get_dataset(X, LABELS)
    return net.train_split(dataset, LABELS)


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
