"""The same on a GPU: agreement with the CPU, state left alone, storage without one."""

import os
import subprocess
import sys
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from conftest import global_rng_states
from device_matrix import CASES
from nets import (
    MLP,
    TinyCNN,
    binary_classifier,
    blobs,
    classifier,
    regressor,
    seeded,
    waves,
)
from sklearn.base import clone, is_classifier
from sklearn.frozen import FrozenEstimator
from torch import nn

from sklaplace import (
    DeepEnsembleClassifier,
    DeepEnsembleRegressor,
    LaplaceClassifier,
    LaplaceRegressor,
    MCDropoutClassifier,
    MCDropoutRegressor,
    SWAGClassifier,
    SWAGRegressor,
    VariationalClassifier,
    VariationalRegressor,
)
from sklaplace.posterior.variational import POSTERIORS

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parents[1]
# Outputs of about 5 in float32 differ by 1e-6 between the devices, and the curvature
# relatively as much; 1e-4 leaves room for TF32 convolutions being off by default.
TOLERANCE = 1e-4

FIXED = {"prior_precision": 1.0, "random_state": 0}
TUNED = {"prior_precision": "validation", "random_state": 0}
EVIDENCE = {"prior_precision": "marglik", "random_state": 0}
ALL = {"subset_of_weights": "all"}
SETTINGS = [
    FIXED,
    EVIDENCE,
    EVIDENCE | {"refine": True},
    TUNED,
    FIXED | ALL,
    FIXED | ALL | {"hessian_structure": "full"},
    FIXED | ALL | {"hessian_structure": "diag", "prior_structure": "diag"},
    EVIDENCE | {"prior_structure": "layerwise"},
    *(
        FIXED | ALL | {"hessian_structure": structure}
        for structure in ("gp", "nystrom", "variational", "lowrank")
    ),
]


def images():
    _, y = blobs()
    noise = np.random.default_rng(0).normal(size=(60, 1, 6, 6))
    return (noise + y[:, None, None, None]).astype(np.float32), y


def problem(kind):
    """Untrained net, rows, and extra settings."""
    if kind == "regressor":
        return LaplaceRegressor, regressor(), waves()
    if kind == "binary":
        X, y = blobs(n_classes=2)
        return LaplaceClassifier, binary_classifier(), (X, y)
    if kind == "images":
        return LaplaceClassifier, classifier(TinyCNN), images()
    return LaplaceClassifier, classifier(), blobs()


KINDS = ["classifier", "binary", "images", "regressor"]


def on_both(kind, settings):
    """The same trained weights under both devices."""
    estimator, net, (X, y) = problem(kind)
    target = y[:, None] if estimator is LaplaceRegressor else y
    if kind == "binary":
        target = target.astype(np.float32)
    seeded(net, X, target)
    other = clone(net).set_params(device="cuda").initialize()
    other.module_.load_state_dict(net.module_.state_dict())
    prior = settings["prior_precision"]
    if estimator is LaplaceRegressor:
        noise = prior if isinstance(prior, str) else 0.2
        settings = {"sigma_noise": noise, **settings}
    held = {"X_val": X[::2], "y_val": y[::2]}
    validation = held if prior == "validation" else {}
    models = [
        estimator(FrozenEstimator(n), **settings).fit(X, y, **validation)
        for n in (net, other)
    ]
    return *models, X


def answers(model, X):
    found = model.latent_mean_and_variance(X)
    if isinstance(model, LaplaceClassifier):
        drawn = model.sample_proba(X, 3, random_state=1)
        return [*found, model.predict_proba(X), model.predict_dirichlet(X), drawn]
    found = [*found, model.predict(X), *model.predict(X, return_cov=True)]
    return [*found, model.sample_y(X, 3)]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_cpu(kind, settings):
    cpu, gpu, X = on_both(kind, settings)
    assert next(gpu.estimator_.module_.parameters()).is_cuda
    assert gpu.posterior_.mean.is_cuda
    evidence = cpu.log_marginal_likelihood_value_
    assert gpu.log_marginal_likelihood_value_ == pytest.approx(evidence, rel=TOLERANCE)
    np.testing.assert_allclose(
        gpu.prior_precision_, cpu.prior_precision_, rtol=10 * TOLERANCE
    )
    for found, expected in zip(answers(gpu, X), answers(cpu, X), strict=True):
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, expected, rtol=10 * TOLERANCE, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore::UserWarning")  # advice, which differs by case
@pytest.mark.parametrize("name", CASES)
def test_matrix(name):
    case = CASES[name]
    found = case.run("cuda")
    if case.trained_there:
        assert all(np.isfinite(values).all() for values in found)
        return
    for values, expected in zip(found, case.run("cpu"), strict=True):
        np.testing.assert_allclose(
            values, expected, rtol=10 * TOLERANCE, atol=TOLERANCE
        )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_trains_and_tunes_and_leaves_every_generator_alone(kind, weighted):
    estimator, net, (X, y) = problem(kind)
    net.set_params(device="cuda")
    torch.rand(3, device="cuda")
    before = global_rng_states()
    weights = np.linspace(0, 2, 60) if weighted else None
    model = estimator(net, random_state=0).fit(X, y, sample_weight=weights)
    first = answers(model, X)
    again = answers(clone(model).fit(X, y, sample_weight=weights), X)
    assert global_rng_states() == before
    for found, expected in zip(again, first, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=TOLERANCE)
    assert model.log_marginal_likelihood(2.0) != model.log_marginal_likelihood(3.0)


def test_batch_size_changes_nothing():
    X, y = blobs(dtype=np.float64)
    net = classifier(device="cuda", module__dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net.fit(X, y)
    model = LaplaceClassifier(FrozenEstimator(net), **FIXED)
    expected = clone(model).fit(X, y).predict_proba(X)
    for batch_size in (1, 7):
        found = model.set_params(batch_size=batch_size).fit(X, y).predict_proba(X)
        np.testing.assert_allclose(found, expected, atol=1e-10)


def test_device_of_none_is_that_of_the_module():
    X, y = blobs()
    module = MLP().to("cuda")
    net = classifier(module, device=None).initialize()
    data = torch.utils.data.TensorDataset(
        torch.tensor(X, device="cuda"), torch.tensor(y, device="cuda")
    )
    model = LaplaceClassifier(FrozenEstimator(net), **FIXED).fit(data, y)
    assert model.predict_proba(data).shape == (60, 3)


def test_too_large_for_the_gpu():
    X, y = blobs(60_000)
    net = classifier(module__width=1_000_000, device="cuda")
    model = LaplaceClassifier(net, hessian_structure="full", **ALL)
    with pytest.raises(ValueError, match=r"needs .* [TP]iB"):
        model.fit(X, y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [FIXED, EVIDENCE | {"refine": True}, FIXED | ALL])
def test_loads_on_the_gpu_again(kind, settings, tmp_path):
    _, gpu, X = on_both(kind, settings)
    joblib.dump(gpu, tmp_path / "model.joblib")
    loaded = joblib.load(tmp_path / "model.joblib")
    assert loaded.posterior_.mean.is_cuda
    for found, expected in zip(answers(loaded, X), answers(gpu, X), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:3]
import joblib, numpy as np, torch
assert not torch.cuda.is_available()
model, X = joblib.load(sys.argv[3] + "/model.joblib")
if "Laplace" in type(model).__name__:
    assert model.posterior_.mean.device.type == "cpu"
model.predict(X)
np.save(sys.argv[3] + "/latent.npy", model.latent_mean_and_variance(X))
"""


def without_a_gpu(model, X, folder):
    """Means and variances of outputs, from a process that sees no GPU."""
    joblib.dump((model, X), folder / "model.joblib")
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TESTS.parent), str(TESTS), str(folder)],
        check=True,
        timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    return np.load(folder / "latent.npy")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [FIXED, FIXED | ALL])
def test_loads_on_a_machine_without_a_gpu(kind, settings, tmp_path):
    _, gpu, X = on_both(kind, settings)
    found, expected = without_a_gpu(gpu, X, tmp_path), gpu.latent_mean_and_variance(X)
    np.testing.assert_allclose(found, expected, rtol=10 * TOLERANCE, atol=TOLERANCE)


def test_default_network_stays_on_the_cpu():
    X, y = blobs()
    model = LaplaceClassifier(random_state=0).fit(X, y)
    assert not next(model.estimator_.module_.parameters()).is_cuda


def test_half_of_the_net_is_frozen_on_the_gpu():
    X, y = blobs()
    net = classifier(criterion=nn.CrossEntropyLoss, device="cuda").initialize()
    net.module_.hidden.requires_grad_(False)
    model = LaplaceClassifier(FrozenEstimator(net), **FIXED, **ALL).fit(X, y)
    assert model.posterior_.layout.n_parameters == 39
    assert not net.module_.hidden.weight.requires_grad


class Dropping(MLP):
    """Dropout before the head."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dropout = nn.Dropout(0.2)

    def forward(self, X):
        return self.head(self.dropout(torch.tanh(self.hidden(X))))


SAMPLING = [
    *[VariationalClassifier(posterior=name) for name in POSTERIORS],
    VariationalRegressor(prior="scale_mixture"),
    MCDropoutClassifier(),
    MCDropoutRegressor(),
    DeepEnsembleClassifier(n_estimators=2),
    DeepEnsembleRegressor(n_estimators=2),
    SWAGClassifier(n_snapshots=5),
    SWAGRegressor(n_snapshots=5),
]


@pytest.mark.parametrize("estimator", SAMPLING, ids=repr)
def test_estimators_that_predict_from_draws(estimator, tmp_path):
    classifies = is_classifier(estimator)
    net = classifier(Dropping) if classifies else regressor(Dropping)
    X, y = blobs() if classifies else waves()
    model = clone(estimator).set_params(estimator=net, random_state=0)
    model.set_params(estimator__device="cuda")
    torch.rand(3, device="cuda")
    before = global_rng_states()
    model.fit(X, y)
    ask = model.predict_proba if classifies else model.predict
    answer = ask(X)
    assert global_rng_states() == before
    assert next(model.estimator_.module_.parameters()).is_cuda
    assert np.isfinite(answer).all()
    expected = model.predict(X)
    np.testing.assert_allclose(clone(model).fit(X, y).predict(X), expected, 1e-3)
    mean = model.latent_mean_and_variance(X)[0]
    found, _ = without_a_gpu(model, X, tmp_path)
    np.testing.assert_allclose(found, mean, rtol=10 * TOLERANCE, atol=TOLERANCE)
    loaded, _ = joblib.load(tmp_path / "model.joblib")
    np.testing.assert_allclose(loaded.predict(X), expected, 1e-6)
