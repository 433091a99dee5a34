"""Ctrl-C during training: skorch ends the training without an exception."""

import contextlib
import signal

import joblib
import numpy as np
import pytest
import torch
from nets import MLP, DropoutMLP, blobs, classifier, regressor, waves
from sklearn.base import RegressorMixin, is_regressor
from skorch.callbacks import Callback, EarlyStopping

from sklaplace import (
    DeepEnsembleClassifier,
    DeepEnsembleRegressor,
    LaplaceClassifier,
    LaplaceClassifierCV,
    LaplaceRegressor,
    LaplaceRegressorCV,
    MCDropoutClassifier,
    SWAGRegressor,
    VariationalRegressor,
)
from sklaplace.estimators.training.laplace import FEW, FEW_FOR_NOISE

NUMBERS, CLASSES = waves(FEW_FOR_NOISE), blobs(FEW)  # no networks of folds
WARNING = r"Training was interrupted in epoch 3 of 9, .* Fit again"


def press(*, is_ignored=False):
    """Choose whether Ctrl-C raises, as at a prompt or in a notebook."""
    handlers = signal.default_int_handler, signal.SIG_IGN
    return signal.signal(signal.SIGINT, handlers[is_ignored])


@pytest.fixture(autouse=True)
def ctrl_c_raises(rng_untouched):
    before = press()
    yield
    signal.signal(signal.SIGINT, before)


class CtrlC(torch.optim.Adam):
    """Adam that raises Ctrl-C in its third step, which is in the third epoch."""

    n_steps = 0

    def step(self, closure):
        self.n_steps += 1
        if self.n_steps == 3:
            signal.raise_signal(signal.SIGINT)
        return super().step(closure)


class Stops(Callback):
    """Callback that stops training in the third epoch, as skorch callbacks do."""

    def on_batch_end(self, net, **kwargs):
        if len(net.history) == 3:
            raise KeyboardInterrupt


class StopsLater(Callback):
    """Callback that stops training in the fifth epoch."""

    def on_epoch_end(self, net, **kwargs):
        if len(net.history) == 5:
            raise KeyboardInterrupt


class Presses(Callback):
    """Callback during which Ctrl-C is pressed, at the end of the third epoch."""

    def on_epoch_end(self, net, **kwargs):
        if len(net.history) == 3:
            signal.raise_signal(signal.SIGINT)


class Interrupts(CtrlC):
    """Adam that is interrupted in its third step without a signal."""

    def step(self, closure):
        if self.n_steps == 2:
            raise KeyboardInterrupt
        self.n_steps += 1
        return torch.optim.Adam.step(self, closure)


class Catches(Presses):
    """Callback that catches the Ctrl-C during it."""

    def on_epoch_end(self, net, **kwargs):
        with contextlib.suppress(KeyboardInterrupt):
            super().on_epoch_end(net, **kwargs)


def model_of(kind, *callbacks, module=MLP, net=(), **params):
    make = regressor if issubclass(kind, RegressorMixin) else classifier
    settings = {"max_epochs": 9, "callbacks": [*callbacks], **dict(net)}
    return kind(make(module, **settings), random_state=0, **params)


def fitted(model, **options):
    data = NUMBERS if is_regressor(model) else CLASSES
    return model.fit(*data, **options)


def interrupted(model, **options):
    with pytest.warns(UserWarning, match=WARNING):
        return fitted(model, **options)


def n_entries(folder):
    return len(joblib.Memory(folder, verbose=0).store_backend.get_items())


# ----------------------------------------------------------------------- one network
KINDS = [
    LaplaceClassifier,
    LaplaceRegressor,
    MCDropoutClassifier,
    SWAGRegressor,
    VariationalRegressor,
]


@pytest.mark.parametrize("kind", KINDS)
def test_one_network_keeps_what_it_has_learned(kind):
    module = DropoutMLP if kind is MCDropoutClassifier else MLP
    model = interrupted(model_of(kind, module=module, net={"optimizer": CtrlC}))
    assert len(model.estimator_.history) == 3
    assert np.isfinite(model.predict(CLASSES[0])).all()


def test_ctrl_c_within_a_callback_counts():
    assert interrupted(model_of(LaplaceClassifier, Presses())).n_iter_ == 3


def test_interruptions_without_a_signal_count():
    model = model_of(LaplaceClassifier, net={"optimizer": Interrupts})
    assert len(interrupted(model).estimator_.history) == 3


def test_ctrl_c_that_a_callback_catches_does_not_count(tmp_path):
    model = model_of(LaplaceClassifier, Catches(), memory=tmp_path)
    assert fitted(model).n_iter_ == 9
    assert n_entries(tmp_path) == 1
    # an earlier, caught signal does not make a stop an interruption
    model = model_of(LaplaceClassifier, Catches(), StopsLater())
    assert fitted(model).n_iter_ == 5


# -------------------------------------------------------------------- what is stored
def test_interrupted_networks_are_not_in_memory(tmp_path):
    model = model_of(LaplaceRegressor, net={"optimizer": CtrlC}, memory=tmp_path)
    assert interrupted(model).n_iter_ == 3
    assert n_entries(tmp_path) == 0
    press(is_ignored=True)
    assert fitted(model).n_iter_ == 9
    assert n_entries(tmp_path) == 1
    press()  # nothing is trained any more
    assert fitted(model).n_iter_ == 9


STOPPING = EarlyStopping("train_loss", patience=2, sink=len)


@pytest.mark.parametrize("callback", [STOPPING, Stops()], ids=["skorch", "own"])
def test_callbacks_that_stop_early_do_not_count(callback, tmp_path):
    net = {"lr": 0.0}
    model = model_of(LaplaceClassifier, callback, net=net, memory=tmp_path)
    assert fitted(model).n_iter_ == 3
    assert n_entries(tmp_path) == 1
    assert fitted(model_of(DeepEnsembleClassifier, callback, net=net)).n_iter_ == 3


# ------------------------------------------------------------------ several networks
SEVERAL = [
    LaplaceClassifierCV,
    LaplaceRegressorCV,
    DeepEnsembleClassifier,
    DeepEnsembleRegressor,
]


@pytest.mark.parametrize("kind", SEVERAL)
def test_an_interrupt_of_one_of_several_networks_ends_fit(kind):
    model = model_of(kind, net={"optimizer": CtrlC})
    before = dict(vars(model))
    with pytest.raises(KeyboardInterrupt):
        fitted(model)
    assert vars(model) == before
