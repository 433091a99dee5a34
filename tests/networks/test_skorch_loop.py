"""skorch's unmodified training loop, around a net with drawn weights."""

import pickle
from typing import ClassVar

import numpy as np
import pytest
import torch
from nets import (
    MLP,
    BatchNormMLP,
    Compiled,
    SoftmaxMLP,
    blobs,
    classifier,
    regressor,
    waves,
)
from skorch import NeuralNetClassifier
from skorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    EpochScoring,
)
from skorch.dataset import Dataset, ValidSplit
from torch import nn
from torch.utils.data import default_collate

from sklaplace import VariationalClassifier, VariationalRegressor
from sklaplace.variational.module import StochasticModule

X, Y = blobs()
SPLIT = {"train_split": ValidSplit(3), "callbacks": None}


def fitted(net, data=(X, Y), **settings):
    model = VariationalClassifier(net, n_samples=5, random_state=0, **settings)
    return model.fit(*data)


# ---------------------------------------------------------------------- callbacks
class Notes(Callback):
    """Callback that records a function of the net after each epoch."""

    seen: ClassVar[list] = []

    def __init__(self, find):
        self.find = find

    def on_epoch_end(self, net, **kwargs):
        Notes.seen.append(self.find(net))


@pytest.fixture(autouse=True)
def _no_notes():
    Notes.seen.clear()


def medians(net):
    return net.module_.posterior.median().detach().clone()


def noise(net):
    return float(net._elbo.noise(net.module_))


class Escapes(Callback):
    """Callback that keeps the net, and raises in the second epoch."""

    net: ClassVar[list] = []

    def on_epoch_end(self, net, **kwargs):
        Escapes.net[:] = [net]
        if len(net.history) == 2:
            raise KeyError("stop")


def flat(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def best_epoch(model):
    return int(np.argmin(model.estimator_.history[:, "valid_loss"]))


class TestCallbacks:
    def test_history_has_what_skorch_records_and_more(self):
        scoring = EpochScoring("accuracy", name="own", on_train=True)
        net = classifier(**SPLIT | {"callbacks": [scoring]})
        history = fitted(net).estimator_.history
        for name in ("train_loss", "valid_loss", "valid_acc", "own", "kl", "elbo"):
            assert np.isfinite(history[:, name]).all()
        assert len(history) == 20

    def test_weights_that_were_best_are_loaded(self):
        stopping = EarlyStopping("valid_loss", patience=4, load_best=True)
        net = classifier(max_epochs=200, lr=0.2, **SPLIT)
        net.set_params(callbacks=[Notes(medians), ("stopping", stopping)])
        model = fitted(net)
        assert best_epoch(model) < len(model.estimator_.history) - 1 < 199
        best = Notes.seen[best_epoch(model)]
        assert torch.equal(flat(model.estimator_.module_), best)
        assert torch.equal(model.posterior_.distribution.median(), best)

    @pytest.mark.parametrize("way", ["stopping", "checkpoint"])
    def test_noise_belongs_to_the_weights_that_are_loaded(self, way, tmp_path):
        if way == "stopping":
            loading = EarlyStopping(patience=4, load_best=True)
        else:
            loading = Checkpoint(dirname=str(tmp_path), load_best=True)
        net = regressor(max_epochs=60, lr=0.2, **SPLIT)
        net.set_params(callbacks=[Notes(noise), ("loading", loading)])
        model = VariationalRegressor(net, sigma_noise="learned", random_state=0)
        best = best_epoch(model.fit(*waves()))
        assert best < len(Notes.seen) - 1
        assert model.sigma_noise_ == Notes.seen[best] != Notes.seen[-1]

    def test_checkpoints_are_loaded_and_nets_stored(self, tmp_path):
        options = {"f_pickle": "net.pkl", "load_best": True}
        checkpoint = Checkpoint(dirname=str(tmp_path), **options)
        net = classifier(max_epochs=40, lr=0.3, **SPLIT)
        net.set_params(callbacks=[Notes(medians), ("checkpoint", checkpoint)])
        model = fitted(net)
        best = Notes.seen[best_epoch(model)]
        assert torch.equal(flat(model.estimator_.module_), best)
        stored = pickle.loads((tmp_path / "net.pkl").read_bytes())
        assert type(stored) is NeuralNetClassifier
        assert isinstance(stored.module_, StochasticModule)
        np.testing.assert_allclose(
            stored.predict_proba(X), model.estimator_.predict_proba(X), atol=1e-6
        )


# --------------------------------------------------------------------------- nets
class OwnInfer(NeuralNetClassifier):
    """A net that doubles the inputs in every call of the module."""

    def infer(self, x, **fit_params):
        return super().infer(2 * x, **fit_params)


def of_kind(kind, **params):
    given = classifier(**params).get_params(deep=False)
    return kind(**{k: v for k, v in given.items() if k != "classes"})


class TestNets:
    def test_own_infer(self):
        model = fitted(of_kind(OwnInfer, **SPLIT))
        assert type(model.estimator_) is OwnInfer
        halved = fitted(classifier(**SPLIT), (2 * X, Y))
        np.testing.assert_allclose(
            model.predict_proba(X), halved.predict_proba(2 * X), atol=1e-6
        )

    @pytest.mark.parametrize("module", [Compiled(MLP()), MLP()])
    def test_module_instances(self, module):
        before = {k: v.clone() for k, v in module.state_dict().items()}
        model = fitted(classifier(module))
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name])
        assert all(p.requires_grad for p in module.parameters())
        assert model.posterior_.layout.n_parameters == 39

    def test_batch_norm_learns_its_buffers_in_training_alone(self):
        model = fitted(classifier(BatchNormMLP, max_epochs=7))
        norm = model.estimator_.module_.norm
        assert norm.num_batches_tracked == 7
        mean = norm.running_mean.clone()
        model.predict_proba(X)
        model.sample_proba(X, 3)
        assert norm.num_batches_tracked == 7
        assert torch.equal(norm.running_mean, mean)

    def test_logits_before_a_softmax_are_used_in_training_and_validation(self):
        net = classifier(SoftmaxMLP, criterion=nn.NLLLoss, **SPLIT)
        history = fitted(net).estimator_.history
        plain = fitted(classifier(**SPLIT)).estimator_.history
        for name in ("train_loss", "valid_loss"):
            np.testing.assert_allclose(history[:, name], plain[:, name], rtol=1e-5)


class TestData:
    @pytest.mark.parametrize("weighted", [False, True])
    def test_data_sets(self, weighted):
        expected = fitted(classifier(**SPLIT)).predict_proba(X)
        net = classifier(**SPLIT, iterator_train__collate_fn=default_collate)
        model = VariationalClassifier(net, n_samples=5, random_state=0)
        weight = np.ones(60) if weighted else None
        model.fit(Dataset(X, Y), Y, sample_weight=weight)
        found = model.predict_proba(X)
        np.testing.assert_allclose(found, expected, atol=1e-5)


# --------------------------------------------------------------------- afterwards
class TestEstimator:
    @pytest.fixture
    def model(self):
        return fitted(classifier(**SPLIT))

    def test_is_a_plain_net_with_medians(self, model):
        net = model.estimator_
        assert type(net) is NeuralNetClassifier
        assert type(net.module_) is MLP
        distribution = model.posterior_.distribution
        assert torch.equal(flat(net.module_), distribution.median().detach())
        assert all(p.requires_grad for p in net.module_.parameters())
        assert not any(p.requires_grad for p in distribution.parameters())

    def test_can_be_trained_on(self, model):
        net, before = model.estimator_, flat(model.estimator_.module_)
        expected = model.posterior_.mean
        seeded_net = pickle.loads(pickle.dumps(net))
        seeded_net.partial_fit(X, Y)
        assert not torch.equal(flat(seeded_net.module_), before)
        assert len(seeded_net.history) == 40
        assert "kl" not in seeded_net.history[-1]
        assert torch.equal(model.posterior_.mean, expected)

    def test_class_is_the_nets_own_when_training_raises(self, rng_untouched):
        with pytest.raises(KeyError):
            fitted(classifier(callbacks=[Escapes()]))
        (net,) = Escapes.net
        assert type(net) is NeuralNetClassifier
        assert net.train_split is None
