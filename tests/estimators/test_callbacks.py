import pickle

import numpy as np
import pytest
import torch
from cases import DOUBLE
from contracts import accumulate
from nets import (
    MLP,
    QUICK,
    BatchNormMLP,
    LinearModel,
    LogSoftmaxMLP,
    SigmoidMLP,
    SoftmaxMLP,
    SqueezedMLP,
    binary_classifier,
    blobs,
    classifier,
    initialised,
    regressor,
    seeded,
    waves,
)
from shared import Rows
from sklearn.base import clone
from sklearn.datasets import make_moons
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import BayesianRidge
from skorch import NeuralNet
from skorch.callbacks import Callback
from skorch.dataset import unpack_data
from torch import nn

from sklaplace import (
    LaplaceClassifier,
    LaplaceRegressor,
    MarglikTraining,
    PriorTraining,
)
from sklaplace.curvature.ggn import CURVATURES
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.data.dataset import TrainingData
from sklaplace.likelihoods import Gaussian, HeteroscedasticNLLLoss
from sklaplace.networks.outputs import as_forward
from sklaplace.networks.training import copied, training_run
from sklaplace.posterior.gaussian import GaussianPosterior, Hyperparameters
from sklaplace.posterior.tuning.evidence import marglik

DELTA, SIGMA, TEMPERATURE = 3.0, 0.6, 1.7
SGD = {"optimizer": torch.optim.SGD}
STILL = {"max_epochs": 1, "lr": 0.0, **SGD}
WIDE = {"module__dtype": DOUBLE}
X, Y = blobs()


class Note(Callback):
    """Record gradients of every batch, and the state of the net after every epoch."""

    def __init__(self):
        self.gradients_, self.sizes_, self.epochs_, self.modes_ = [], [], [], []

    def on_grad_computed(self, net, named_parameters, batch=None, **kwargs):
        flat = [p.grad.flatten().clone() for p in net.module_.parameters()]
        self.gradients_.append(torch.cat(flat))
        self.sizes_.append(len(unpack_data(batch)[1]))

    def on_epoch_end(self, net, **kwargs):
        state = net.module_.state_dict()
        self.epochs_.append({k: v.clone() for k, v in state.items()})
        flags = [module.training for module in net.module_.modules()]
        flags += [p.requires_grad for p in net.module_.parameters()]
        flags += [torch.get_rng_state().numpy().tobytes()]
        self.modes_.append(flags)


def flat(state):
    return torch.cat([value.flatten().double() for value in state.values()])


# ------------------------------------------------------------ the prior's gradient
def energy(kind, f, y, w):
    """Return the negative log-likelihood in nats, by torch's distributions."""
    known = torch.distributions
    if kind == "categorical":
        density = known.Categorical(logits=f)
    elif kind in ("bernoulli", "multilabel"):
        density = known.Bernoulli(logits=f.reshape(y.shape))
    elif kind == "poisson":
        density = known.Poisson(f.exp())
    elif kind == "heteroscedastic":
        mean, s = f.chunk(2, -1)
        density = known.Normal(mean, (s / 2).exp())
    else:
        density = known.Normal(f.reshape(y.shape), SIGMA)
    fit = density.log_prob(y).reshape(len(y), -1).sum(-1)
    return -(w * fit).sum() / TEMPERATURE


X64, LABELS = blobs(n=14, dtype=np.float64)
_, Y64 = waves(n=14, n_targets=2, dtype=np.float64)
BINARY = (LABELS % 2).astype(np.float64)
TWO = {"module__n_out": 2}
SOFTMAX = {"module": SoftmaxMLP, "criterion": nn.NLLLoss}
SIGMOID = {"module": SigmoidMLP, "criterion": nn.BCELoss}
VARIANCES = {"module__n_out": 4, "criterion": HeteroscedasticNLLLoss}

# a net, its targets, and their distribution
KINDS = {
    "cross_entropy": (classifier(**WIDE), LABELS, "categorical"),
    "nll": (classifier(**SOFTMAX, **WIDE), LABELS, "categorical"),
    "nll_of_logarithms": (
        NeuralNet(LogSoftmaxMLP, nn.NLLLoss, **QUICK | WIDE),
        LABELS,
        "categorical",
    ),
    "bce": (binary_classifier(**WIDE), BINARY, "bernoulli"),
    "bce_squeezed": (binary_classifier(SqueezedMLP, **WIDE), BINARY, "bernoulli"),
    "bce_probabilities": (binary_classifier(**SIGMOID, **WIDE), BINARY, "bernoulli"),
    "multilabel": (
        regressor(criterion=nn.BCEWithLogitsLoss, **TWO, **WIDE),
        (Y64 > 0).astype(np.float64),
        "multilabel",
    ),
    "mse": (regressor(**TWO, **WIDE), Y64, "normal"),
    "mse_squeezed": (regressor(SqueezedMLP, **WIDE), Y64[:, 0], "normal"),
    "poisson": (
        regressor(criterion=nn.PoissonNLLLoss, **TWO, **WIDE),
        np.abs(np.round(3 * Y64)),
        "poisson",
    ),
    "heteroscedastic": (regressor(**VARIANCES, **WIDE), Y64, "heteroscedastic"),
}


def unit_of(density, y, reduction, total):
    """Return the ratio of the criterion to nats for all rows."""
    per_loss = 2 * SIGMA**2 if density == "normal" else 1.0
    columns = y.shape[1] if y.ndim > 1 else 1
    rows = total * columns if reduction == "mean" else 1.0
    return TEMPERATURE * per_loss / rows


def with_prior(nats, net):
    """Return the gradient of the negative log-posterior in all weights."""
    theta = list(net.module_.parameters())
    total = nats + DELTA / 2 * sum((p**2).sum() for p in theta)
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, theta)])


def logits(net, X, density):
    """Return the outputs before the module's softmax or sigmoid."""
    module = net.module_
    if isinstance(module, SoftmaxMLP | SigmoidMLP):
        return module.head(torch.tanh(module.hidden(X)))
    return module(X)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("batch_size", [-1, 5])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_are_those_of_the_log_posterior(
    kind, reduction, batch_size, weighted
):
    """The gradients are summed over an epoch of steps of length zero."""
    net, y, density = KINDS[kind]
    w = np.linspace(0.5, 2.5, len(y)) if weighted else None
    note = Note()
    prior = MarglikTraining(
        prior_precision=DELTA, sigma_noise=SIGMA, temperature=TEMPERATURE
    )
    net = clone(net).set_params(criterion__reduction=reduction, **STILL)
    net.callbacks, net.batch_size = [prior, note], batch_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        with training_run(net, TrainingData(X64, y, w)):
            net.fit(X64, y)
    weights = torch.ones(len(y)).double() if w is None else torch.tensor(w)
    f = logits(net, torch.tensor(X64), density)
    expected = with_prior(energy(density, f, torch.tensor(y), weights), net)
    expected = expected * unit_of(density, y, reduction, weights.sum())
    sizes = torch.tensor(note.sizes_).double()
    shares = sizes / len(y) if reduction == "mean" else torch.ones_like(sizes)
    found = shares @ torch.stack(note.gradients_)
    # skorch adds eps to probabilities before it takes their logarithm
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_under_class_weights_and_smoothing(reduction):
    class_weights = torch.tensor([0.5, 1.0, 4.0], dtype=DOUBLE)
    note, prior = Note(), MarglikTraining(prior_precision=DELTA)
    net = classifier(
        callbacks=[prior, note],
        criterion__weight=class_weights,
        criterion__label_smoothing=0.1,
        criterion__reduction=reduction,
        **STILL,
        **WIDE,
    )
    seeded(net, X64, LABELS)
    y = torch.tensor(LABELS)
    loss = nn.CrossEntropyLoss(class_weights, label_smoothing=0.1, reduction="sum")
    expected = with_prior(loss(net.module_(torch.tensor(X64)), y), net)
    if reduction == "mean":
        expected = expected / class_weights[y].sum()
    torch.testing.assert_close(note.gradients_[0], expected, rtol=1e-10, atol=1e-10)


def test_only_selected_weights_have_the_prior():
    X, y = blobs(dtype=np.float64)
    plain, prior = Note(), Note()
    settings = STILL | WIDE
    seeded(classifier(callbacks=[plain], **settings), X, y)
    callback = MarglikTraining("last_layer", prior_precision=DELTA)
    net = seeded(classifier(callbacks=[callback, prior], **settings), X, y)
    expected = torch.zeros_like(plain.gradients_[0])
    head = torch.cat([p.detach().flatten() for p in net.module_.head.parameters()])
    expected[-len(head) :] = DELTA / len(X) * head
    found = prior.gradients_[0] - plain.gradients_[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_frozen_parameters_stay():
    net = initialised(classifier(callbacks=[MarglikTraining()]))
    hidden = net.module_.hidden.requires_grad_(False)
    before = hidden.weight.clone()
    net.partial_fit(X, Y)
    assert torch.equal(net.module_.hidden.weight, before)
    assert net.module_.hidden.weight.grad is None


# -------------------------------------------------------------- evidence in training
def linear_data(n=40):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 4))
    return X, (X @ [1.0, -2.0, 0.5, 0.0] + 0.5 * rng.normal(size=n))[:, None]


def linear_net(callback, **params):
    settings = {"module__n_in": 4, "module__bias": False, "max_epochs": 300, "lr": 0.1}
    return regressor(LinearModel, callbacks=[callback], **SGD, **settings | params)


def textbook_maximum(X, y):
    """Return the maximum of the evidence by MacKay's fixed point."""
    flat = dict.fromkeys(("alpha_1", "alpha_2", "lambda_1", "lambda_2"), 0)
    steps = {"tol": 1e-13, "max_iter": 10_000, "compute_score": True}
    model = BayesianRidge(fit_intercept=False, **flat, **steps).fit(X, y[:, 0])
    return model.lambda_, model.alpha_**-0.5, model.scores_[-1], model.coef_


@pytest.mark.slow
@pytest.mark.parametrize("damping", [0.0, 0.5])
@pytest.mark.parametrize("batch_size", [-1, 20])
def test_a_linear_model_ends_at_the_maximum_of_the_evidence(damping, batch_size):
    X, y = linear_data()
    callback = MarglikTraining(
        hessian_structure="full", prior_structure="scalar", damping=damping
    )
    # rows of equal products, so that batches have the gradient of all
    X, y = np.concatenate([X[:20]] * 2), np.concatenate([y[:20]] * 2)
    net = linear_net(callback, batch_size=batch_size, iterator_train__shuffle=False)
    net = seeded(net, X, y)
    precision, noise, evidence, coefficients = textbook_maximum(X, y)
    assert callback.prior_precision_ == pytest.approx(precision, rel=1e-5)
    assert callback.sigma_noise_ == pytest.approx(noise, rel=1e-5)
    assert callback.log_marginal_likelihood_ == pytest.approx(evidence, rel=1e-8)
    found = net.module_.head.weight.detach().numpy()[0]
    np.testing.assert_allclose(found, coefficients, atol=1e-5)


def posterior_by_hand(net, X, y, state, structure, delta, sigma):
    """Return a regressor's posterior at given weights, from all rows at once."""
    net = copied(net)
    net.module_.load_state_dict(state)
    forward = as_forward(net)
    with forward.frozen():
        x = torch.tensor(X)
        layout = SUBSETS["all"](forward, x)
        accumulator = STRUCTURES[structure][0](layout)
        batches = [(x, torch.tensor(y), None)]
        likelihood = Gaussian()
        fit = accumulate(forward, batches, likelihood, CURVATURES["ggn"], accumulator)
    weights, kept = layout.read(forward.module), accumulator.decompose()
    numbers = (torch.as_tensor(v, dtype=DOUBLE) for v in (delta, 0.0, sigma, 1.0))
    chosen = Hyperparameters(*numbers)
    return GaussianPosterior(weights, weights, kept, layout, likelihood, fit, chosen)


class Spoil(Callback):
    """Callback that overwrites the weights before the last epoch."""

    def on_epoch_begin(self, net, **kwargs):
        if len(net.history) == net.max_epochs:
            with torch.no_grad():
                for parameter in net.module_.parameters():
                    parameter.add_(3.0)


@pytest.fixture
def spoilt():
    """Return a trained net, its callback, and the records."""
    X, y = waves(dtype=np.float64)
    y = y[:, None]
    note = Note()
    callback = MarglikTraining(hessian_structure="diag", damping=0.25)
    net = regressor(MLP, callbacks=[Spoil(), callback, note], max_epochs=9, **WIDE)
    return seeded(net, X, y), X, y, callback, note


def test_what_is_recorded_is_the_evidence_of_that_epoch(spoilt):
    net, X, y, callback, note = spoilt
    recorded = net.history[:, "log_marginal_likelihood"]
    best = int(np.argmax(recorded))
    assert callback.best_epoch_ == best + 1
    assert callback.log_marginal_likelihood_ == recorded[best]
    found = callback.prior_precision_, callback.sigma_noise_
    posterior = posterior_by_hand(net, X, y, note.epochs_[best], "diag", *found)
    value = float(posterior.log_marginal_likelihood())
    assert recorded[best] == pytest.approx(value, rel=1e-10)


def test_a_step_goes_a_share_of_the_way_to_the_maximum(spoilt):
    """The first step starts from the initial settings."""
    net, X, y, _, note = spoilt
    start = {"delta": np.ones(4), "sigma": 1.0}
    posterior = posterior_by_hand(net, X, y, note.epochs_[0], "diag", **start)
    best = marglik(posterior).hyperparameters
    moved = posterior.replace(
        prior_precision=best.prior_precision**0.75, sigma_noise=best.sigma_noise**0.75
    )
    first = net.history[0, "log_marginal_likelihood"]
    assert first == pytest.approx(float(moved.log_marginal_likelihood()), rel=1e-10)


def test_the_best_weights_come_back_and_not_the_last(spoilt):
    net, _, _, callback, note = spoilt
    assert callback.best_epoch_ < net.max_epochs
    best = note.epochs_[callback.best_epoch_ - 1]
    assert torch.equal(flat(net.module_.state_dict()), flat(best))
    assert not torch.equal(flat(note.epochs_[-1]), flat(best))


def test_burn_in_and_pauses():
    callback = MarglikTraining(n_burnin=3, every=2)
    net = seeded(classifier(callbacks=[callback], max_epochs=8), X, Y)
    recorded = np.array(net.history[:, "log_marginal_likelihood"])
    assert np.isfinite(recorded).tolist() == [0, 0, 0, 1, 0, 1, 0, 1]
    assert callback.best_epoch_ in (4, 6, 8)


def test_a_training_that_ends_in_the_burn_in_warns():
    callback = MarglikTraining(n_burnin=9, prior_precision=2.0)
    net = classifier(callbacks=[callback], max_epochs=3)
    with pytest.warns(UserWarning, match="ended after 3 epochs, before the evidence"):
        seeded(net, X, Y)
    assert callback.prior_precision_.tolist() == [2.0] * 4


# ------------------------------------------------------------------ leaves no trace
@pytest.mark.parametrize("curvature", ["ggn", "ggn_mc", "ef", "identity"])
def test_the_network_the_generators_and_the_mode_are_left_alone(curvature):
    """The callback changes nothing except the prior."""
    before, after, without = Note(), Note(), Note()
    settings = {"batch_size": 16, "max_epochs": 4}
    callback = MarglikTraining(curvature=curvature)
    # skorch puts callbacks of one name side by side
    chain = [("before", before), ("prior", callback), ("after", after)]
    seeded(classifier(BatchNormMLP, callbacks=chain, **settings), X, Y)
    seeded(classifier(BatchNormMLP, callbacks=[without], **settings), X, Y)
    for one, other in zip(before.epochs_, after.epochs_, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert before.modes_ == after.modes_ == without.modes_
    assert not torch.equal(before.gradients_[0], after.gradients_[0])


@pytest.mark.usefixtures("rng_untouched")
def test_within_an_estimator():
    X, y = blobs(n=80)
    net = classifier(callbacks=[MarglikTraining()], batch_size=16)
    model = LaplaceClassifier(net, prior_precision="marglik", random_state=0)
    weights = np.linspace(0.5, 2, len(X))
    first = model.fit(X, y, weights)
    again = clone(model).fit(X, y, weights)
    assert np.array_equal(first.predict_proba(X), again.predict_proba(X))
    callback = dict(first.estimator_.callbacks_)["MarglikTraining"]
    assert not hasattr(net.callbacks[0], "prior_precision_")
    copy = pickle.loads(pickle.dumps(first))
    assert np.array_equal(copy.predict_proba(X), first.predict_proba(X))
    # the evidence is that of the estimator around the same network and prior
    prior = {"prior_structure": "layerwise", "subset_of_weights": "all"}
    prior["prior_precision"] = callback.prior_precision_
    model = LaplaceClassifier(FrozenEstimator(first.estimator_), **prior)
    value = model.fit(X, y, weights).log_marginal_likelihood()
    assert callback.log_marginal_likelihood_ == pytest.approx(value, rel=1e-4)


# ------------------------------------------------------------------------- refusals
def refused(words, callbacks=(), data=(X, Y), **params):
    """Check that the error comes before the first step."""
    note = Note()
    net = classifier(callbacks=[*(callbacks or [MarglikTraining()]), note], **params)
    with pytest.raises(ValueError, match=words):
        seeded(net, *data)
    assert not note.gradients_


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hessian_structure": "kronecker"}, "'hessian_structure' parameter"),
        ({"curvature": "hessian"}, "'curvature' parameter.*Got 'hessian'"),
        ({"prior_structure": "diag"}, "prior_structure='diag' cannot be used with"),
        ({"subset_of_weights": "subnetwork"}, "'subset_of_weights' parameter"),
        ({"subset_of_weights": ["tail"]}, "tail"),
        ({"prior_precision": -1.0}, "'prior_precision' parameter.*-1.0"),
        ({"prior_precision": "marglik"}, "'prior_precision' parameter.*Got 'm"),
        ({"prior_precision": [1.0, 2.0]}, "prior_precision has shape"),
        ({"sigma_noise": 0.0}, "'sigma_noise' parameter.*Got 0.0"),
        ({"temperature": "cold"}, "must be a positive number. Got 'cold'"),
        ({"n_burnin": -1}, r"'n_burnin' .* range \[0, inf"),
        ({"every": 0}, r"'every' .* range \[1, inf"),
        ({"damping": 1.0}, r"'damping' .*\[0.0, 1.0\)"),
    ],
)
def test_bad_settings_are_refused_before_the_first_step(settings, words):
    refused(words, [MarglikTraining(**settings)])


LBFGS = {"optimizer": torch.optim.LBFGS}
LBFGS["optimizer__line_search_fn"] = "strong_wolfe"


def held_out(rows, y=None):
    """Return all samples except the first five for training, and these five."""
    kept = torch.utils.data.Subset(rows, range(5, len(rows)))
    return kept, torch.utils.data.Subset(rows, range(5))


def several(*subsets):
    return {"callbacks": [MarglikTraining(subset) for subset in subsets]}


def ignoring(y, index, **params):
    return {"data": (X, y), "criterion__ignore_index": index, **params}


MAPS = {
    "data": (X, np.zeros((len(X), 2, 2), dtype=np.int64)),
    "module": nn.Sequential(nn.Linear(X.shape[1], 12), nn.Unflatten(1, (3, 2, 2))),
}
SEVENTH = np.where(np.arange(len(Y)) % 7 == 0, -1, Y)
LAST = np.where(np.arange(len(Y)) < len(Y) - 3, Y, -100)
IN_ORDER = {"batch_size": 8, "iterator_train__shuffle": False}
NEGATIVE = "Some labels are negative"
AMONG = "MarglikTraining among the callbacks has a"
UNFIT = {
    "weight decay": ({"optimizer__weight_decay": 0.1}, "=0.1, a second prior"),
    "criterion": ({"criterion": nn.MultiMarginLoss}, "=MultiMarginLoss is not supp"),
    "line search": (LBFGS, "compares losses without the prior"),
    "maps": (MAPS, r"returns maps, of shape \(3, 2, 2\) per row"),
    "equal subsets": (several("all", "all"), AMONG),
    "subsets that overlap": (several("last_layer", "all"), AMONG),
    "ignored labels": (ignoring(SEVENTH, -1), NEGATIVE),
    "ignored class": (ignoring(SEVENTH % 10, 9), "ignored by the criterion"),
    "last labels": ({"data": (X, LAST), **IN_ORDER}, NEGATIVE),
    "of a dataset": ({"data": (Rows(X, LAST), None), **IN_ORDER}, NEGATIVE),
    "of a split": (
        {"data": (X, LAST), "train_split": held_out, **IN_ORDER},
        NEGATIVE,
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_nets_and_samples_that_do_not_fit_are_refused(case):
    params, words = UNFIT[case]
    refused(words, **params)


def test_labels_that_are_ignored_are_left_out():
    net = classifier(callbacks=[MarglikTraining()], criterion__ignore_index=-1)
    model = LaplaceClassifier(net, prior_precision=1.0, random_state=0)
    model.fit(X, SEVENTH)
    assert model.posterior_.data_fit.n_targets == (SEVENTH >= 0).sum()


def test_priors_over_different_weights_go_together():
    net = initialised(classifier())
    names = [name for name, _ in net.module_.named_parameters()]
    callbacks = [MarglikTraining(names[:2]), MarglikTraining(names[2:])]
    seeded(classifier(callbacks=callbacks, max_epochs=1), X, Y)
    assert all(callback.best_epoch_ == 1 for callback in callbacks)


def test_the_prior_of_a_task_goes_with_no_other():
    net = FrozenEstimator(initialised(classifier()))
    settings = {"subset_of_weights": "all", "prior_precision": 1.0}
    earlier = LaplaceClassifier(net, **settings).fit(X, Y).posterior_
    callbacks = [PriorTraining(earlier), MarglikTraining()]
    refused("PriorTraining among the callbacks has a", callbacks)


# --------------------------------------------------------------------- does it help


@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diag"])
def test_the_default_keeps_the_prior_that_was_learned(structure):
    X, y = make_moons(200, noise=0.3, random_state=0)
    net = classifier(module__n_out=2, callbacks=[MarglikTraining()], max_epochs=8)
    model = LaplaceClassifier(
        net, hessian_structure="diag", prior_structure=structure, random_state=0
    ).fit(X.astype(np.float32), y)
    callback = next(c for _, c in model.estimator_.callbacks_ if hasattr(c, "every"))
    names = [block.name for block in model.posterior_.layout.blocks]
    sizes = model.posterior_.layout.sizes
    learned = np.array([callback.precisions_[name] for name in names])
    expected = {
        "scalar": np.exp(np.average(np.log(learned), weights=sizes)),
        "layerwise": learned,
        "diag": learned.repeat(sizes),
    }
    np.testing.assert_allclose(model.prior_precision_, expected[structure], rtol=1e-6)
    assert not model.posterior_.is_refitted
    every = dict(zip(callback.precisions_, callback.prior_precision_, strict=True))
    assert callback.precisions_ == pytest.approx(every)
    chosen = LaplaceClassifier(net, prior_precision="validation", random_state=0)
    chosen.fit(X.astype(np.float32), y)
    assert chosen.prior_precision_ != pytest.approx(expected["scalar"], rel=1e-3)


def test_noise_is_chosen_under_the_prior_that_was_learned():
    X, y = waves(200)
    net = regressor(callbacks=[MarglikTraining(prior_structure="scalar")], max_epochs=8)
    model = LaplaceRegressor(net, random_state=0).fit(X, y)
    callback = next(c for _, c in model.estimator_.callbacks_ if hasattr(c, "every"))
    assert model.prior_precision_ == pytest.approx(callback.prior_precision_, rel=1e-6)
    given = LaplaceRegressor(
        net, prior_precision=model.prior_precision_, sigma_noise="validation"
    )
    given.set_params(random_state=0, refine=False).fit(X, y)
    assert model.sigma_noise_ == pytest.approx(given.sigma_noise_, rel=1e-6)
