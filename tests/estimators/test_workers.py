"""Parts and workers change neither the posterior nor predictions.

Workers are threads here, which start at once; tests/clients tests processes.
"""

import joblib
import numpy as np
import pytest
import torch
from nets import MLP, blobs, classifier
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetClassifier
from skorch.dataset import Dataset
from torch import nn

from sklaplace import LaplaceClassifier
from sklaplace.curvature.structures import STRUCTURES

METHODS = "predict_proba", "predict_dirichlet", "score_samples", "sample_latent"
SUBSETS = "last_layer", "all"
X, Y = blobs(45)
NET = FrozenEstimator(classifier(module__dtype=torch.float64).fit(X.astype(float), Y))
SMALL = {"batch_size": 4, "random_state": 0}


def numbers(model, X, methods):
    """Return the results of a fitted estimator, as arrays."""
    posterior = model.posterior_
    found = {"evidence": model.log_marginal_likelihood_value_}
    found |= {"mean": posterior.mean, "dense": posterior.structure.dense()}
    for name in methods:
        result = getattr(model, name)(X)
        parts = result if isinstance(result, tuple) else (result,)
        for k, part in enumerate(parts):
            found[f"{name} {k}"] = getattr(part, "concentration", part)
    return {name: np.asarray(value) for name, value in found.items()}


def computed(model, X, y, methods, n_jobs):
    """Return all results of an estimator fitted in threads, as arrays."""
    model = clone(model).set_params(n_jobs=n_jobs)
    with joblib.parallel_config(backend="threading"):
        return numbers(model.fit(X, y), X, methods)


def assert_workers_change_no_bit(model, X, y, methods):
    alone, found = (computed(model, X, y, methods, n) for n in (1, 2))
    assert found.keys() == alone.keys()
    for name, value in alone.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


# ----------------------------------------------------------------------- workers
@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("structure", sorted(STRUCTURES))
def test_workers_change_no_bit(structure, subset):
    kind = {"hessian_structure": structure, "subset_of_weights": subset}
    model = LaplaceClassifier(NET, **kind, **SMALL, prior_precision=1.0)
    assert_workers_change_no_bit(model, X, Y, METHODS)


@pytest.mark.parametrize("structure", sorted(STRUCTURES))
def test_the_number_of_parts_changes_nothing_but_rounding(structure):
    """Samples are split into parts of four batches, and one batch is one part."""
    kind = {"hessian_structure": structure, "subset_of_weights": "all"}
    model = LaplaceClassifier(NET, **kind, **SMALL, prior_precision=1.0)
    data = X.astype(float), Y, METHODS[:2], 1
    whole = computed(clone(model).set_params(batch_size=len(X)), *data)
    for name, value in computed(model, *data).items():
        np.testing.assert_allclose(value, whole[name], rtol=1e-7, atol=1e-9)


def test_a_thread_that_predicts_has_a_network_of_its_own():
    """Each thread needs its own network, because hooks and modes belong to a module."""
    model = LaplaceClassifier(NET, **SMALL, prior_precision=1.0, n_jobs=2)
    with joblib.parallel_config(backend="threading"):
        module = model.fit(X, Y).estimator_.module_
        hooks = [len(part._forward_hooks) for part in module.modules()]
        modes = [part.training for part in module.modules()]
        numbers(model, X, METHODS)
    assert hooks == [len(part._forward_hooks) for part in module.modules()]
    assert modes == [part.training for part in module.modules()]


class Scaling(NeuralNetClassifier):
    """A net whose datasets scale the inputs."""

    def get_dataset(self, X, y=None):
        return ScaledDataset(super().get_dataset(X, y))


class ScaledDataset(Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        x, y = self.dataset[index]
        return 0.3 * x, y


def test_workers_make_a_dataset_of_the_net_once():
    net = Scaling(MLP, criterion=nn.CrossEntropyLoss, max_epochs=2, verbose=0)
    model = LaplaceClassifier(net, prior_precision=1.0, random_state=0).fit(X, Y)
    expected = model.predict_proba(X), model.score_samples(X)
    model.set_params(n_jobs=1)
    found = model.predict_proba(X), model.score_samples(X)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


class Own(Dataset):
    """A dataset that halves every number, so its arrays cannot be read directly."""

    def transform(self, X, y):
        return super().transform(X / 2, y)


def test_workers_change_no_bit_of_a_dataset_of_the_user():
    """The dataset's own code computes its items in the worker."""
    model = LaplaceClassifier(NET, **SMALL, prior_precision=1.0)
    data = Own(X.astype(float), Y)
    assert_workers_change_no_bit(model, data, Y, METHODS[:2])
