"""score_samples: samples unlike the training samples have lower scores."""

from functools import partial

import numpy as np
import pytest
import torch
from nets import (
    ReLUNet,
    SortedMLP,
    TinyCNN,
    blobs,
    classifier,
    regressor,
    seeded,
    waves,
)
from sklearn.frozen import FrozenEstimator
from torch import nn

from sklaplace import (
    DeepEnsembleClassifier,
    DeepEnsembleRegressor,
    LaplaceClassifier,
    LaplaceClassifierCV,
    LaplaceRanker,
    LaplaceRegressor,
    LaplaceRegressorCV,
    VariationalRegressor,
)
from sklaplace.likelihoods import HeteroscedasticNLLLoss
from sklaplace.novelty.batch import MAX_KEPT

X, Y = blobs()
X_REG, Y_REG = waves()
# tanh units are bounded: far samples have features like others
of_classes, of_numbers = partial(classifier, ReLUNet), partial(regressor, ReLUNet)
FEW = {"cv": 2, "prior_precisions": [0.1, 1.0]}
KINDS = {
    LaplaceClassifier: (of_classes, {}, (X, Y)),
    LaplaceClassifierCV: (of_classes, FEW, (X, Y)),
    LaplaceRegressor: (of_numbers, {}, (X_REG, Y_REG)),
    LaplaceRegressorCV: (of_numbers, FEW, (X_REG, Y_REG)),
    DeepEnsembleClassifier: (of_classes, {}, (X, Y)),
    DeepEnsembleRegressor: (of_numbers, {}, (X_REG, Y_REG)),
    VariationalRegressor: (of_numbers, {}, (X_REG, Y_REG)),
}


def fitted(kind):
    net, options, data = KINDS[kind]
    return kind(net(), random_state=0, **options).fit(*data)


def frozen(net, X, y):
    return FrozenEstimator(seeded(net, X, y))


def same(found, expected, rtol=1e-9):
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-12)


# ------------------------------------------------------------------------ all kinds
@pytest.mark.parametrize("kind", [k for k in KINDS if k is not DeepEnsembleClassifier])
def test_far_samples_have_lower_scores(kind):
    X, model = KINDS[kind][2][0], fitted(kind)
    normal, far = model.score_samples(X), model.score_samples(10 * X + 10)
    assert np.median(far) < np.quantile(normal, 0.05)


def test_pairs_of_items_have_scores():
    rng = np.random.default_rng(0)
    pairs = rng.normal(size=(100, 2, 3))
    model = LaplaceRanker(random_state=0)
    model.fit(pairs, pairs[:, 1].sum(1) > pairs[:, 0].sum(1))
    assert np.median(model.score_samples(9 * pairs)) < model.score_samples(pairs).min()


# ---------------------------------------------------------------- sampling estimators
def test_classes_are_scored_by_mutual_information():
    model = fitted(DeepEnsembleClassifier)
    expected = -model.predict_uncertainty(X, "mc")[:, 2]
    np.testing.assert_array_equal(model.score_samples(X), expected)


def test_numbers_are_scored_by_variance_in_units_of_the_noise():
    X, y = waves(n_targets=2)
    y = y * [1, 100]
    noise = np.array([0.1, 10])
    net = regressor(module__n_out=2)
    model = DeepEnsembleRegressor(net, sigma_noise=noise, random_state=0).fit(X, y)
    _, variance = model.latent_mean_and_variance(X)
    same(model.score_samples(X), -(variance / noise**2).mean(1))


def test_outputs_for_the_noise_do_not_count():
    net = regressor(module__n_out=2, criterion=HeteroscedasticNLLLoss)
    model = DeepEnsembleRegressor(net, random_state=0).fit(X_REG, Y_REG)
    _, variance = model.latent_mean_and_variance(X_REG)
    same(model.score_samples(X_REG), -variance[:, 0])


# -------------------------------------------------------------------------- samples


def big(n=3 * MAX_KEPT):
    X, y = blobs(n)
    return X, y, frozen(classifier(), X, y)


def refit(net, X, y, **options):
    options = {"prior_precision": 1.0, **options}
    return LaplaceClassifier(net, random_state=0, **options).fit(X, y)


@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("n", [MAX_KEPT - 56, 3 * MAX_KEPT])
def test_fits_depend_on_neither_batches_nor_order_nor_parts(n, refine):
    X, y, net = big(n)
    expected = refit(net, X, y).score_samples(X)
    same(refit(net, X[::-1], y[::-1]).score_samples(X), expected, rtol=1e-5)
    same(refit(net, X, y, batch_size=100).score_samples(X), expected, rtol=1e-5)
    model = refit(net, X[:300], y[:300], refine=refine).partial_fit(X[300:], y[300:])
    same(model.score_samples(X), expected, rtol=1e-5)


@pytest.mark.parametrize("subset", ["last_layer", "all", "subnetwork", ["layers.0"]])
@pytest.mark.parametrize("structure", ["kron", "full", "diag", "lowrank", "gp"])
def test_weights_and_structure_do_not_matter(subset, structure):
    X, y = blobs()
    net = frozen(classifier(Layers), X, y)
    given = {"subset_of_weights": subset, "hessian_structure": structure}
    if subset == "subnetwork":
        given |= {"subset_params": {"n_weights": 5}, "hessian_structure": "full"}
    expected = refit(net, X, y).score_samples(X)
    same(refit(net, X, y, **given).score_samples(X), expected, rtol=1e-5)


# ------------------------------------------------------------------------- networks
class Layers(nn.Module):
    def __init__(self, n_in=2, n_out=3):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_in, 6), nn.ReLU(), nn.Linear(6, n_out))

    def forward(self, X):
        return self.layers(X)


class Heads(nn.Module):
    """A module with means and log-variances from two parallel layers."""

    def __init__(self, n_out=1):
        super().__init__()
        self.first = nn.Linear(2, 5)
        self.mean, self.log_variance = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, X):
        hidden = torch.relu(self.first(X))
        return torch.cat([self.mean(hidden), self.log_variance(hidden)], 1)


class ConvolutionalHead(nn.Module):
    """A convolutional head whose logits are averaged over positions."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 3, 1)

    def forward(self, X):
        return self.head(torch.relu(self.first(X))).mean((2, 3))


class EmbeddedHead(nn.Module):
    """A module whose only layer is an embedding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 3)

    def forward(self, X):
        return self.table(X).mean(1)


def novel(model, normal, far):
    lowest = np.quantile(model.score_samples(normal), 0.05)
    return np.median(model.score_samples(far)) < lowest


def test_heads_side_by_side_share_their_features():
    net = regressor(Heads, criterion=HeteroscedasticNLLLoss)
    model = LaplaceRegressor(net, random_state=0).fit(X_REG, Y_REG)
    assert model._novelty.samples.features.shape[1] == 5
    assert novel(model, X_REG, X_REG * 10 + 10)


@pytest.mark.parametrize("module", [TinyCNN, ConvolutionalHead])
def test_convolutions(module):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 1, 6, 6)).astype("float32")
    y = np.arange(60) % 3
    model = LaplaceClassifier(
        classifier(module), subset_of_weights="all", random_state=0
    ).fit(X, y)
    assert novel(model, X, X * 30)


def test_networks_that_reorder_samples_are_refused_in_words():
    model = LaplaceClassifier(classifier(SortedMLP), prior_precision=1.0).fit(X, Y)
    with pytest.raises(ValueError, match="one input per sample"):
        model.score_samples(X)


def test_networks_without_features_are_refused_in_words():
    X = np.arange(120).reshape(60, 2) % 10
    model = LaplaceClassifier(
        classifier(EmbeddedHead), subset_of_weights="all", prior_precision=1.0
    ).fit(X, np.arange(60) % 3)
    with pytest.raises(ValueError, match=r"score_samples needs features.*Linear"):
        model.score_samples(X)
