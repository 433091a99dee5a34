"""Prior precision, noise and temperature, chosen after fit without training samples."""

import pickle

import numpy as np
import pytest
import torch
from nets import blobs, classifier, regressor, seeded, waves
from numpy.testing import assert_allclose
from refusals import refused
from sklearn.frozen import FrozenEstimator
from torch.autograd import gradcheck, gradgradcheck

from sklaplace import LaplaceClassifier, LaplaceRegressor

DOUBLE = {"module__dtype": torch.float64}
SETTINGS = {"refine": False, "random_state": 0}
SUBSETS = [
    ("last_layer", "kron", "scalar"),
    ("last_layer", "full", "layerwise"),
    ("all", "diag", "diag"),
    ("all", "lowrank", "scalar"),
]


def problem(kind, n_targets=None):
    """Return an estimator around a trained network, training and other samples."""
    if kind is LaplaceClassifier:
        X, y = blobs(120, dtype=np.float64)
        net, target = classifier(**DOUBLE), y
    else:
        X, y = waves(120, n_targets=n_targets, dtype=np.float64)
        net = regressor(**DOUBLE, module__n_out=n_targets or 1)
        target = y.reshape(120, -1)
    net = FrozenEstimator(seeded(net, X[:60], target[:60]))
    return kind(net, **SETTINGS), (X[:60], y[:60]), (X[60:], y[60:])


def fitted(kind, n_targets=None, **settings):
    """Return an estimator fitted with a fixed prior, and new samples."""
    model, train, held = problem(kind, n_targets)
    if kind is LaplaceRegressor:
        settings = {"sigma_noise": 0.3} | settings
    return model.set_params(**{"prior_precision": 5.0} | settings).fit(*train), held


@pytest.mark.parametrize("how", SUBSETS, ids="-".join)
@pytest.mark.parametrize("kind", [LaplaceClassifier, LaplaceRegressor])
@pytest.mark.parametrize("tuner", ["marglik", "validation"])
def test_equals_a_fit_that_tunes(kind, how, tuner):
    names = "subset_of_weights", "hessian_structure", "prior_structure"
    settings = dict(zip(names, how, strict=True))
    model, held = fitted(kind, **settings)
    model.tune(*held if tuner == "validation" else ())
    other, train, (X_val, y_val) = problem(kind)
    settings["prior_precision"] = tuner
    if kind is LaplaceRegressor:
        settings["sigma_noise"] = tuner
    given = {"X_val": X_val, "y_val": y_val} if tuner == "validation" else {}
    other.set_params(**settings).fit(*train, **given)
    assert_allclose(model.prior_precision_, other.prior_precision_, rtol=1e-5)
    for name in ("sigma_noise_", "log_marginal_likelihood_value_"):
        assert_allclose(getattr(model, name, 0), getattr(other, name, 0), rtol=1e-6)
    found = model.latent_mean_and_variance(X_val)
    assert_allclose(found, other.latent_mean_and_variance(X_val), rtol=1e-5)


def test_tunes_what_it_is_told_to():
    model, held = fitted(LaplaceRegressor)
    assert model.tune(*held, parameters="sigma_noise").prior_precision_ == 5
    noise = model.sigma_noise_
    assert noise != 0.3
    model.tune(parameters=["prior_precision"])
    assert model.sigma_noise_ == noise
    assert model.prior_precision_ != 5
    assert model.temperature_ == 1


def test_takes_no_pass_over_training_samples():
    model, held = fitted(LaplaceClassifier, residual="none")
    seen = []
    layer = model.estimator_.module_.hidden
    with layer.register_forward_hook(lambda _, x, out: seen.append(len(out))):
        model.tune()
        assert seen == []
        model.tune(*held)
        assert sum(seen) == 60


def scores(model, X, y):
    """Return mean negative log-likelihoods over a grid of temperatures."""
    posterior, found = model.posterior_, {}
    for temperature in np.exp(np.linspace(-5, 5, 41)):
        model.posterior_ = posterior.replace(temperature=torch.tensor(temperature))
        found[temperature] = -model._log_proba_of(X, y).mean()
    model.posterior_ = posterior
    return found


@pytest.mark.parametrize("kind", [LaplaceClassifier, LaplaceRegressor])
def test_temperature_minimises_the_score(kind):
    model, (X, y) = fitted(kind, prior_precision=0.05, residual="none")
    X = np.vstack([X, X[:6] + 4])  # beyond the training samples, where T matters
    y = np.concatenate([y, y[5::-1] + 2 * (kind is LaplaceRegressor)])
    grid = scores(model, X, y)
    model.tune(X, y, parameters="temperature")
    assert model.prior_precision_ == 0.05
    assert -model._log_proba_of(X, y).mean() <= min(grid.values()) + 1e-4
    best = min(grid, key=grid.get)
    assert abs(np.log(model.temperature_ / best)) < 0.3
    alone = -model._log_proba_of(X, y).mean()
    model.tune(X, y, parameters=["temperature", "prior_precision"])
    assert -model._log_proba_of(X, y).mean() <= alone + 1e-6
    assert model.temperature == 1  # the parameter


@pytest.mark.parametrize(
    ("kind", "subset", "low", "high"),
    [
        (LaplaceRegressor, "last_layer", 0, 1 / 256),
        (LaplaceClassifier, "all", 256, np.inf),
    ],
    ids=["lowest", "highest"],
)
def test_warns_of_a_temperature_at_an_end_of_the_search(kind, subset, low, high):
    model, held = fitted(kind, subset_of_weights=subset)
    with pytest.warns(UserWarning, match="training samples, or too few.*Pass more"):
        model.tune(*held, parameters="temperature")
    assert low < model.temperature_ < high


def test_loaded_estimators_and_later_samples_keep_what_was_chosen():
    model, (X, y) = fitted(LaplaceRegressor)
    loaded = pickle.loads(pickle.dumps(model))
    for each in (model, loaded):
        each.recalibrate(X, y).tune(X, y)
        assert each.sigma_scaling_ == 1
    assert loaded.prior_precision_ == model.prior_precision_
    before = model.prior_precision_, model.sigma_noise_
    model.partial_fit(X, y)
    assert (model.prior_precision_, model.sigma_noise_) == before
    assert_allclose(model.posterior_.hyperparameters.sigma_noise, before[1])


def test_noise_of_normalised_targets_is_in_their_units():
    X, y = waves(120, dtype=np.float64)
    net = regressor(**DOUBLE)
    options = SETTINGS | {"prior_precision": 5.0, "sigma_noise": 30.0}
    model = LaplaceRegressor(net, normalize_y=True, **options).fit(X[:60], 100 * y[:60])
    model.tune(X[60:], 100 * y[60:])
    residual = np.std(100 * y[60:] - model.predict(X[60:]))
    assert 0.5 * residual < model.sigma_noise_ < 1.5 * residual


SAMPLES = blobs(dtype=np.float64)
REFUSED = {
    "no such parameter": ({"parameters": "prior"}, ["prior_precision", "parameters"]),
    "no name": ({"parameters": 3}, ["parameters=3", "temperature"]),
    "none": ({"parameters": []}, ["parameters", "empty"]),
    "no noise": ({"parameters": "sigma_noise"}, ["sigma_noise", "no observation"]),
    "tempered evidence": ({"parameters": "temperature"}, ["Pass X and y"]),
    "targets alone": ({"y": SAMPLES[1]}, ["passed without X"]),
    "weights alone": ({"sample_weight": np.ones(3)}, ["sample_weight", "without X"]),
    "inputs alone": ({"X": SAMPLES[0]}, ["y is missing"]),
    "lengths": ({"X": SAMPLES[0], "y": SAMPLES[1][:9]}, ["inconsistent"]),
    "features": ({"X": SAMPLES[0][:, :1], "y": SAMPLES[1]}, ["features"]),
    "labels": ({"X": SAMPLES[0], "y": SAMPLES[1] + 9}, ["y", "classes"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_with_everything_as_it_was(case):
    given, words = REFUSED[case]
    model, _ = fitted(LaplaceClassifier)
    refused(ValueError, words, lambda: model.tune(**given), model)


def test_a_later_task_has_nothing_to_tune():
    model, (X, y) = fitted(LaplaceClassifier)
    options = {"prior_precision": "auto", "prior": model.posterior_}
    second = problem(LaplaceClassifier)[0].set_params(**options).fit(X, y)
    refused(ValueError, ["earlier task"], second.tune, second)


# ---------------------------------------------------------------- gradients
@pytest.mark.parametrize("structure", ["kron", "full", "diag"])
def test_evidence_is_differentiable(structure):
    model, _ = fitted(LaplaceRegressor, hessian_structure=structure)
    start = torch.tensor([3.0, 0.2], dtype=torch.float64, requires_grad=True)

    def evidence(values):
        return model.log_marginal_likelihood(values[0], values[1])

    assert evidence(start).dtype == torch.float64
    expected = model.log_marginal_likelihood(3.0, 0.2)
    assert isinstance(expected, float)
    assert evidence(start).item() == pytest.approx(expected, rel=1e-13)
    assert gradcheck(evidence, start)
    assert gradgradcheck(evidence, start)
    again = pickle.loads(pickle.dumps(model))  # nothing of the graph is kept
    assert again.posterior_.prior_precision.requires_grad is False


@pytest.mark.parametrize("value", [-1.0, 0.0, torch.nan, torch.inf])
def test_refuses_tensors_that_are_no_precision(value):
    model, _ = fitted(LaplaceClassifier)
    given = torch.tensor(value, requires_grad=True)
    words = ["prior_precision", "positive"]
    refused(ValueError, words, lambda: model.log_marginal_likelihood(given), model)


# ------------------------------------------------------------------- bad values
