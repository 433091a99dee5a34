"""GPU: agreement with the CPU, unchanged state, loading without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from conftest import global_rng_states
from device_matrix import ALL, CASES, FIXED, brief, fitted, trained_there
from nets import MLP, blobs, classifier
from shared import HANGS
from sklearn.frozen import FrozenEstimator
from torch import nn

from sklaplace import LaplaceClassifier

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parents[1]
# Outputs of about 5 in float32 differ by 1e-6 between the devices, and the curvature
# relatively as much; 1e-4 leaves room for TF32 convolutions being off by default.
TOLERANCE = 1e-4
CLOSE = {"rtol": 10 * TOLERANCE, "atol": TOLERANCE}


@pytest.mark.filterwarnings("ignore::UserWarning")  # advice, which differs by case
@pytest.mark.parametrize("name", CASES)
def test_matrix(name):
    case = CASES[name]
    found = case.run("cuda")
    if case.trained_there:
        assert all(np.isfinite(values).all() for values in found)
        return
    for values, expected in zip(found, case.run("cpu"), strict=True):
        np.testing.assert_allclose(values, expected, **CLOSE)


@pytest.mark.parametrize("name", ["LaplaceClassifier", "LaplaceRegressor"])
def test_trains_and_tunes_and_leaves_every_generator_alone(name):
    torch.rand(3, device="cuda")
    before = global_rng_states()
    models = [trained_there(name, "cuda") for _ in range(2)]
    answers = [brief(*model) for model in models]
    assert global_rng_states() == before
    for found, expected in zip(*answers, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=TOLERANCE)


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
    model = LaplaceClassifier(net, hessian_structure="full", subset_of_weights="all")
    with pytest.raises(ValueError, match=r"needs .* [TP]iB"):
        model.fit(X, y)


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
    """Return means and variances of outputs from a process without a GPU."""
    joblib.dump((model, X), folder / "model.joblib")
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TESTS.parent), str(TESTS), str(folder)],
        check=True,
        timeout=HANGS,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    return np.load(folder / "latent.npy")


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss, nn.MSELoss])
@pytest.mark.parametrize("settings", [FIXED, ALL])
def test_loads_on_a_machine_without_a_gpu(criterion, settings, tmp_path):
    gpu, X = fitted("cuda", criterion, **settings)
    found, expected = without_a_gpu(gpu, X, tmp_path), gpu.latent_mean_and_variance(X)
    np.testing.assert_allclose(found, expected, **CLOSE)


def test_default_network_stays_on_the_cpu():
    X, y = blobs()
    model = LaplaceClassifier(random_state=0).fit(X, y)
    assert not next(model.estimator_.module_.parameters()).is_cuda
