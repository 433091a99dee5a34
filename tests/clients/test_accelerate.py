"""Accelerate: nets trained with skorch's mixin."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from nets import MLP, QUICK, blobs, classifier
from shared import HANGS
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetClassifier
from skorch.hf import AccelerateMixin
from torch import nn

from sklaplace import DeepEnsembleClassifier, LaplaceClassifier

accelerate = pytest.importorskip("accelerate")

X, Y = blobs()
TESTS = Path(__file__).parent.parent


class AcceleratedClassifier(AccelerateMixin, NeuralNetClassifier):
    """A classifier on the device that Accelerate chooses."""


def net():
    accelerator = accelerate.Accelerator(cpu=True)
    options = {"accelerator": accelerator, "criterion": nn.CrossEntropyLoss}
    return AcceleratedClassifier(MLP, **options, **QUICK)


@pytest.mark.parametrize("kind", [LaplaceClassifier, DeepEnsembleClassifier])
@pytest.mark.parametrize("weights", [None, np.linspace(0.5, 1.5, 60)])
def test_predicts_as_without(kind, weights, figure):
    found = kind(net(), random_state=0).fit(X, Y, weights).predict_proba(X)
    plain = kind(classifier(), random_state=0).fit(X, Y, weights).predict_proba(X)
    np.testing.assert_allclose(found, plain, atol=1e-6)
    figure(largest_difference=np.abs(found - plain).max())


@pytest.mark.filterwarnings("ignore:Setting self.device")  # by skorch
def test_pickles():
    model = LaplaceClassifier(net(), random_state=0).fit(X, Y)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))


@pytest.mark.slow
def test_two_processes_train_together(tmp_path):
    """Both processes have the posterior that one process has at the same weights."""
    port = str(free_port())
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env |= {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    env |= {"WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, str(TESTS / "clients/accelerated_fit.py")]
    processes = [
        subprocess.Popen(
            [*command, str(tmp_path / str(rank))],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(HANGS) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    first, second = (np.load(tmp_path / f"{rank}.npz") for rank in range(2))
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name])
    for name in ("mean", "dense"):
        scale = 1e-12 * np.abs(first[name]).max()
        np.testing.assert_allclose(first[name], first[f"{name} alone"], 0, scale)
    assert first["n_seen"] == len(X) / 2  # by each process in an epoch


def free_port():
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


@pytest.fixture
def other_precision():
    """Skip if Accelerate already has another precision in this process."""
    state = accelerate.state.AcceleratorState
    state._reset_state(reset_partial_state=True)
    yield
    state._reset_state(reset_partial_state=True)


def mixed(**params):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    options = {"accelerator": accelerator, "criterion": nn.CrossEntropyLoss}
    return AcceleratedClassifier(MLP, **options, **QUICK, **params)


@pytest.mark.usefixtures("other_precision")
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_nets_trained_in_mixed_precision_predict_in_full(subset):
    trained = mixed().fit(X, Y)
    model = LaplaceClassifier(FrozenEstimator(trained), prior_precision=1.0)
    model.set_params(subset_of_weights=subset, random_state=0)
    found = model.fit(X, Y).predict_proba(X)
    plain = classifier().initialize()
    plain.module_.load_state_dict(trained.module_.state_dict())
    expected = model.set_params(estimator=FrozenEstimator(plain)).fit(X, Y)
    np.testing.assert_array_equal(found, expected.predict_proba(X))
    assert found.dtype == np.float64
