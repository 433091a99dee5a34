"""The held-out samples of a net show whether the evidence harms predictions."""

import warnings

import numpy as np
import pytest
import torch
from nets import MLP, classifier, regressor, seeded
from references import LIKELIHOODS
from scipy.stats import norm
from sklearn.metrics import log_loss
from skorch.callbacks import Callback
from skorch.dataset import Dataset
from skorch.helper import predefined_split
from torch import nn

from sklaplace import LaplaceClassifier, LaplaceRegressor, MarglikTraining
from sklaplace.posterior.tuning.comparison import means_if_worse, network_losses

pytestmark = pytest.mark.usefixtures("rng_untouched")


def stripes(n, seed):
    """Return noisy images of stripes in four directions, and the directions."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 4, n)
    angle, grid = (y * np.pi / 4)[:, None, None], np.linspace(-6, 6, 8)
    along = grid[:, None] * np.cos(angle) + grid * np.sin(angle)
    X = np.cos(along + rng.uniform(0, 2 * np.pi, (n, 1, 1)))
    return (X + rng.normal(size=X.shape))[:, None].astype("float32"), y


def curve(n, seed):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-3, 3, (n, 1)).astype("float32")
    return X, (np.sin(2 * X) + 0.2 * rng.normal(size=(n, 1))).astype("float32")


def cnn():
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 12, 3)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)),
    )


IMAGES, SEEN_IMAGES = stripes(300, seed=1), stripes(120, seed=0)
POINTS, SEEN_POINTS = curve(200, seed=1), curve(150, seed=0)
ADAM = {"lr": 0.01, "batch_size": 32, "max_epochs": 30}


def image_net(held_out=IMAGES, **params):
    split = predefined_split(Dataset(*held_out)) if held_out else None
    return classifier(cnn, train_split=split, **ADAM | params)


def point_net(held_out=POINTS):
    split = predefined_split(Dataset(*held_out)) if held_out else None
    settings = ADAM | {"module__n_in": 1, "max_epochs": 80}
    return regressor(MLP, train_split=split, **settings)


BY_EVIDENCE = {"prior_precision": "marglik", "random_state": 0}
ALL = BY_EVIDENCE | {"subset_of_weights": "all", "residual": "none"}


def messages(fit, *args, **kwargs):
    """Return the messages of comparisons in the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(*args, **kwargs)
    found = [str(w.message) for w in caught]
    return [m for m in found if "worse than the network" in m or "mean loss" in m]


def alone(model, X):
    """Return the outputs of the network."""
    with torch.no_grad():
        return model.estimator_.module_.eval()(torch.tensor(X)).double()


# ------------------------------------------------------- the evidence after training
@pytest.mark.parametrize(
    "structure", ["diag", pytest.param("kron", marks=pytest.mark.slow)]
)
def test_classes_of_images(structure):
    """The numbers are the log losses of two predictions of the held-out samples."""
    X, y = IMAGES
    model = LaplaceClassifier(image_net(), hessian_structure=structure, **ALL)
    (message,) = messages(model.fit, *SEEN_IMAGES)
    found = log_loss(y, model.predict_proba(X))
    expected = log_loss(y, alone(model, X).softmax(1))
    assert found > expected + 0.1
    assert f"{found:.3f} nats instead of {expected:.3f}. Use prior_prec" in message
    assert "subset_of_weights='last_layer'" in message
    # the held-out samples influence no prediction
    passed = LaplaceClassifier(image_net(None), hessian_structure=structure, **ALL)
    assert messages(passed.fit, *SEEN_IMAGES, X_val=X, y_val=y) == [message]
    silent = LaplaceClassifier(image_net(None), hessian_structure=structure, **ALL)
    assert not messages(silent.fit, *SEEN_IMAGES)
    assert np.array_equal(silent.predict_proba(X), model.predict_proba(X))
    assert np.array_equal(silent.predict_proba(X), passed.predict_proba(X))


@pytest.mark.parametrize(
    ("sigma_noise", "expected"), [("marglik", 1), ("homoscedastic", 0), (0.2, 0)]
)
def test_numbers(sigma_noise, expected):
    """Only noise that is chosen with the prior is too small here."""
    settings = ALL | {"hessian_structure": "diag", "sigma_noise": sigma_noise}
    model = LaplaceRegressor(point_net(), **settings)
    found = messages(model.fit, *SEEN_POINTS)
    assert len(found) == expected
    (X, y), squares = POINTS, (alone(model, POINTS[0]).numpy() - POINTS[1]) ** 2
    nll = -norm.logpdf(y[:, 0], *(v.ravel() for v in model.predict(X, return_std=True)))
    best = np.log(2 * np.pi * np.e * squares.mean()) / 2
    for message in found:
        assert f"{nll.mean():.3f} nats instead of {best:.3f}" in message
        assert "prior_precision='validation' with sigma_noise='auto'" in message


ADVICE = ALL | {"prior_precision": "validation"}


@pytest.mark.parametrize("settings", [BY_EVIDENCE, ADVICE])
def test_a_last_layer_and_the_advice_are_silent(settings):
    assert not messages(LaplaceClassifier(image_net(), **settings).fit, *SEEN_IMAGES)


def test_memory_keeps_the_held_out_samples(tmp_path):
    """A fit without a comparison stores no held-out samples."""
    settings = ALL | {"memory": tmp_path}
    fixed = settings | {"prior_precision": 1.0}
    LaplaceClassifier(image_net(), **fixed).fit(*SEEN_IMAGES)
    fits = [LaplaceClassifier(image_net(), **settings).fit for _ in range(2)]
    first, second = (messages(fit, *SEEN_IMAGES) for fit in fits)
    assert first == second != []


# -------------------------------------------------------------- evidence in training
DIAG = {"hessian_structure": "diag", "damping": 0.0, "n_burnin": 15}


class KeepLosses(Callback):
    """Record the losses of the validation samples after every epoch."""

    def __init__(self):
        self.losses_ = []

    def on_epoch_end(self, net, dataset_valid=None, **kwargs):
        proba = net.forward(dataset_valid.X).softmax(1)
        self.losses_.append(log_loss(dataset_valid.y, proba))


def test_training_that_harms():
    callback, losses = MarglikTraining(**DIAG), KeepLosses()
    net = image_net(callbacks=[callback, losses])
    (message,) = messages(seeded, net, *SEEN_IMAGES)
    before, after = losses.losses_[15], losses.losses_[callback.best_epoch_ - 1]
    assert after > before + 0.1
    assert f"samples from {before:.3f} to {after:.3f} nats. Use hessian" in message


@pytest.mark.parametrize(
    ("params", "settings"),
    [
        pytest.param({"held_out": None}, DIAG, id="nothing held out"),
        pytest.param({"max_epochs": 16}, DIAG, id="within noise"),
        pytest.param({}, {"n_burnin": 15}, id="kron", marks=pytest.mark.slow),
        pytest.param({}, {}, id="default", marks=pytest.mark.slow),
    ],
)
def test_training_that_is_silent(params, settings):
    net = image_net(callbacks=[MarglikTraining(**settings)], **params)
    assert not messages(seeded, net, *SEEN_IMAGES)


def test_a_learned_prior_is_compared():
    """'auto' keeps the prior that the callback learned by the evidence."""
    settings = ALL | {"prior_precision": "auto"}
    net = image_net(callbacks=[MarglikTraining()])
    (message,) = messages(LaplaceClassifier(net, **settings).fit, *SEEN_IMAGES)
    assert "prior_precision='validation'" in message


# ------------------------------------------------------------------------ the measure
@pytest.mark.parametrize(
    ("excess", "is_shown"),
    [
        ([0.02, 0.03, 0.01, 0.02], True),
        ([0.009, 0.009, 0.009, 0.009], False),  # small
        ([0.5, -0.4, 0.3, -0.3], False),  # within one standard error
        ([1.0], False),  # no standard error
    ],
)
def test_small_and_random_differences_are_not_shown(excess, is_shown):
    excess = torch.tensor(excess).double()
    means = means_if_worse(excess + 1, torch.ones_like(excess), 3 * excess**0)
    assert (means is not None) == is_shown
    if means:
        assert means == pytest.approx((1.02, 1.0))


@pytest.mark.parametrize("name", ["Categorical", "Bernoulli", "Poisson", "Gaussian"])
def test_losses_of_the_network_alone(name):
    f = torch.linspace(-1, 2, 12).double().reshape(6, 2)
    y, known = (f[:, :1] > 0.3).long(), torch.distributions
    y = {"Gaussian": f.flip(0), "Poisson": torch.arange(12).reshape(6, 2)}.get(name, y)
    if name == "Bernoulli":
        f = f[:, :1]
    if name == "Categorical":
        y, density = y[:, 0], known.Categorical(logits=f)
    elif name == "Gaussian":
        density = known.Normal(f, (f - y).square().mean(0).sqrt())
    else:
        density = known.Bernoulli(logits=f) if name == "Bernoulli" else None
        density = density or known.Poisson(f.exp())
    targets = y.double() if name == "Bernoulli" else y
    expected = -density.log_prob(targets).reshape(6, -1).sum(1)
    batches = [(f[cut], y[cut], None) for cut in (slice(4), slice(4, 6))]
    losses, weights = network_losses(LIKELIHOODS[name], batches)
    torch.testing.assert_close(losses, expected)
    assert torch.equal(weights, torch.ones(6).double())
