"""Features of a skorch net beyond its module."""

from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from nets import (
    MLP,
    BatchNormMLP,
    RecordTraining,
    binary_classifier,
    blobs,
    classifier,
    regressor,
    waves,
)
from refusals import CLASSIFIERS, REGRESSORS, refused, refused_fit
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetClassifier
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import predefined_split
from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler, WeightedRandomSampler

from sklaplace import (
    DeepEnsembleClassifier,
    DeepEnsembleRegressor,
    LaplaceClassifier,
    LaplaceRegressor,
    MarglikTraining,
    MCDropoutClassifier,
    VariationalClassifier,
)
from sklaplace.likelihoods import Categorical
from sklaplace.networks.net_checks import check_nonlinearity, check_wrapper

X, Y = blobs()


class WithEncoder(NeuralNetClassifier):
    """A net with two modules, both of which may affect the outputs."""

    uses_both = True

    def initialize_module(self):
        super().initialize_module()
        self.enc_ = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        return self

    def infer(self, x, **fit_params):
        return super().infer(self.enc_(x) if self.uses_both else x, **fit_params)


class WithUnusedEncoder(WithEncoder):
    uses_both = False


def two_modules(kind):
    return kind(MLP, criterion=nn.CrossEntropyLoss, max_epochs=1, verbose=0)


class OnMPS(MLP):
    """A module whose parameters claim to be on Apple's GPU."""

    def parameters(self, recurse=True):
        yield SimpleNamespace(device=torch.device("mps", 0))


DEVICES = [
    {"device": "mps"},
    {"device": "mps:0"},
    {"device": torch.device("mps")},
    {"module": OnMPS(), "device": None},
]
ESTIMATORS = [
    LaplaceClassifier,
    DeepEnsembleClassifier,
    MCDropoutClassifier,
    VariationalClassifier,
]
MPS = "'mps'", "no float64", "use 'cpu' or ", "device='cpu'"


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("params", DEVICES)
def test_a_device_without_float64_is_refused_before_training(estimator, params):
    net = classifier(callbacks=[RecordTraining()], **params)
    refused_fit(estimator(net), *MPS, data=(X, Y))


def test_a_frozen_net_on_a_device_without_float64_is_refused():
    net = classifier(module__n_in=2).initialize()
    net.module_ = OnMPS()
    refused_fit(LaplaceClassifier(FrozenEstimator(net)), *MPS, data=(X, Y))


def test_a_callback_refuses_a_device_without_float64():
    callbacks = [MarglikTraining(), RecordTraining()]
    net = classifier(module__n_in=2, callbacks=callbacks).initialize()
    net.module_ = OnMPS()
    refused(ValueError, MPS, lambda: net.partial_fit(X, Y))


class Mixed(NeuralNetClassifier):
    """A stand-in for a net with skorch's AccelerateMixin."""

    def __init__(self, *args, precision="bf16", unwrap_after_train=False, **params):
        super().__init__(*args, **params)
        self.precision, self.unwrap_after_train = precision, unwrap_after_train

    @property
    def accelerator(self):
        return SimpleNamespace(mixed_precision=self.precision)


@pytest.mark.parametrize("estimator", [LaplaceClassifier, MCDropoutClassifier])
def test_a_wrapper_that_copies_lose_is_refused_before_training(estimator):
    net = Mixed(MLP, criterion=nn.CrossEntropyLoss, callbacks=[RecordTraining()])
    words = "unwrap_after_train=False", "mixed_precision='bf16'", "torch.autocast"
    refused_fit(estimator(net), *words, data=(X, Y))
    for options in ({"unwrap_after_train": True}, {"precision": "no"}):
        check_wrapper(Mixed(MLP, criterion=nn.CrossEntropyLoss, **options))


def test_a_second_module_is_refused_before_training():
    model = LaplaceClassifier(two_modules(WithEncoder))
    refused_fit(model, "also calls enc_", "one torch.nn.Module", data=(X, Y))


def test_a_second_module_that_outputs_do_not_depend_on():
    model = LaplaceClassifier(two_modules(WithUnusedEncoder), prior_precision=1.0)
    assert model.fit(X, Y).predict_proba(X).shape == (60, 3)


SOFTMAX = partial(torch.softmax, dim=-1)


@pytest.mark.parametrize(
    ("net", "nonlinearity"),
    [
        (classifier, "auto"),
        (classifier, None),
        (classifier, SOFTMAX),
        (binary_classifier, torch.sigmoid),
    ],
)
def test_nonlinearities_of_the_criterion(net, nonlinearity):
    rows = blobs(n_classes=2) if net is binary_classifier else (X, Y)
    made = net(predict_nonlinearity=nonlinearity)
    plain, same = (
        LaplaceClassifier(n, prior_precision=1.0, random_state=0).fit(*rows)
        for n in (net(), made)
    )
    assert (plain.predict_proba(rows[0]) == same.predict_proba(rows[0])).all()


def sharper(f):
    return (3 * f).softmax(-1)


def test_other_nonlinearities_are_refused_before_training():
    words = "predict_nonlinearity", "'auto'"
    net = classifier(predict_nonlinearity=sharper)
    refused_fit(LaplaceClassifier(net), *words, "CrossEntropyLoss", data=(X, Y))
    net = regressor(predict_nonlinearity=torch.exp)
    refused_fit(LaplaceRegressor(net), *words, "MSELoss", data=waves())


def own_softmax(f):
    return f.exp() / f.exp().sum(-1, keepdim=True)


def failing(f):
    raise TypeError("expected a string")


def test_nonlinearities_that_cannot_be_applied_are_refused_in_words():
    net = classifier(predict_nonlinearity=failing)
    words = "predict_nonlinearity", "expected a string", "'auto'"
    refused_fit(LaplaceClassifier(net), *words, data=(X, Y))


def test_nonlinearities_are_compared_within_the_rounding_of_the_network():
    raw = 3 * torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        net = classifier(predict_nonlinearity=own_softmax).initialize()
        check_nonlinearity(net, raw.to(dtype), Categorical())
    net = classifier(predict_nonlinearity=sharper).initialize()
    with pytest.raises(ValueError, match="contradicts criterion"):
        check_nonlinearity(net, raw.to(torch.bfloat16), Categorical())


def test_counts_whose_rate_is_the_exponential_of_the_output():
    net = regressor(criterion=nn.PoissonNLLLoss, predict_nonlinearity=torch.exp)
    X, y = waves()
    model = LaplaceRegressor(net, prior_precision=1.0).fit(X, (abs(y) * 3).round())
    assert (model.predict(X) > 0).all()


# ------------------------------------------------------- batches of held-out splits
class Recorded(BatchNormMLP):
    """A network that records the sizes of its training batches."""

    sizes: ClassVar[list] = []

    def forward(self, X):
        if self.training:
            Recorded.sizes.append(len(X))
        return super().forward(X)


class RecordedAlone(MLP):
    """The same records without batch norm."""

    def forward(self, X):
        if self.training:
            Recorded.sizes.append(len(X))
        return super().forward(X)


CHEAP = {"prior_precisions": [1.0, 10.0], "n_snapshots": 5, "steps_per_snapshot": 2}
CHEAP |= {"n_samples": 5, "n_estimators": 1}


def cheap(kind, module, n, **params):
    """Return an estimator that trains for one epoch, and its samples."""
    is_classifier = kind in CLASSIFIERS
    make, data = (classifier, blobs(n)) if is_classifier else (regressor, waves(n))
    model = kind(make(module, max_epochs=1, **params), random_state=0)
    names = CHEAP.keys() & model.get_params(deep=False).keys()
    return model.set_params(**{name: CHEAP[name] for name in names}), data


def batches(kind, module, n, **params):
    """Return the sizes of all training batches of a fit."""
    model, data = cheap(kind, module, n, **params)
    Recorded.sizes.clear()
    model.fit(*data)
    return list(Recorded.sizes)


@pytest.mark.parametrize("kind", CLASSIFIERS + REGRESSORS)
def test_splits_leave_no_batch_of_one_sample_to_batch_norm(kind):
    """A fifth of 161 samples leaves 129, which are two batches of 64 and a sample."""
    found = batches(kind, Recorded, 161, batch_size=64)
    assert 64 in found
    assert 1 not in found


def test_a_sample_is_left_out_only_where_batch_norm_needs_it():
    kind = partial(DeepEnsembleRegressor, n_estimators=1)
    assert sum(batches(kind, Recorded, 161, batch_size=64)) == 128
    assert sum(batches(kind, RecordedAlone, 161, batch_size=64)) == 129
    dropped = batches(
        kind, Recorded, 161, batch_size=64, iterator_train__drop_last=True
    )
    assert dropped == [64, 64]
    assert sum(batches(kind, Recorded, 160, batch_size=64)) == 128
    assert sum(batches(kind, Recorded, 161, batch_size=-1)) == 129


def test_classes_and_groups_stay_whole_if_more_samples_are_held_out():
    x, y = blobs(161)
    seen = []
    net = classifier(Recorded, batch_size=64, callbacks=[RecordTraining()])
    model = LaplaceClassifier(net, random_state=0)
    groups = np.r_[0, np.repeat(np.arange(80), 2) + 1]
    for given in (None, groups):
        RecordTraining.steps.clear()
        model.fit(x, y, groups=given)
        seen.append(sum(RecordTraining.steps) / model.n_iter_)
    assert all(n % 64 != 1 for n in seen)
    assert all(100 < n < 130 for n in seen)


def test_folds_leave_no_batch_of_one_sample_to_batch_norm():
    """Folds of 82 samples leave 65 or 66, and batches have 16."""
    found = batches(LaplaceRegressor, Recorded, 82, batch_size=16, callbacks=None)
    assert 1 not in found
    assert sum(found) == 82 + 2 * 64 + 3 * 66


# -------------------------------------------------------------------------- samplers
SAMPLERS = {
    "sampler": {"iterator_train__sampler": WeightedRandomSampler(np.ones(160), 160)},
    "batch_sampler": {
        "iterator_train__batch_sampler": BatchSampler(
            SequentialSampler(range(160)), 16, False
        ),
        "iterator_train__batch_size": 1,  # torch requires this size
    },
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("kind", CLASSIFIERS + REGRESSORS)
def test_samplers_of_all_rows_are_refused_if_fit_holds_out_some(kind, name):
    options = {**SAMPLERS[name], "callbacks": [RecordTraining()]}
    model, data = cheap(kind, BatchNormMLP, 160, **options)
    if kind in CLASSIFIERS and not isinstance(model, LaplaceClassifier):
        model.fit(*data)  # holds out no rows
    else:
        words = f"iterator_train__{name}", "X_val", "sample_weight"
        refused_fit(model, *words, data=data)
        if not hasattr(model, "cv"):
            X_val, y_val = (values[:40] for values in data)
            model.fit(*data, X_val=X_val, y_val=y_val)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("kind", CLASSIFIERS + REGRESSORS)
def test_samplers_are_refused_if_the_train_split_of_the_net_holds_out_rows(kind, name):
    options = {"train_split": ValidSplit(5), "callbacks": [RecordTraining()]}
    model, data = cheap(kind, BatchNormMLP, 160, **SAMPLERS[name], **options)
    words = f"iterator_train__{name}", "train_split=None", "sample_weight"
    refused_fit(model, *words, data=data)
    X_val, y_val = (values[:40] for values in data)
    split = predefined_split(Dataset(X_val, y_val))
    model.set_params(estimator__train_split=split)
    if kind in CLASSIFIERS and not hasattr(model, "cv"):
        model.fit(*data)  # trains on all rows


def test_a_sampler_is_refused_before_training_if_folds_follow():
    sampler = WeightedRandomSampler(np.ones(60), 60)
    net = classifier(iterator_train__sampler=sampler, max_epochs=1)
    refused_fit(LaplaceClassifier(net), "iterator_train__sampler", data=(X, Y))
