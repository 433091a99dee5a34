"""The use of samples for training, tuning and weighting, and later samples."""

import copy

import numpy as np
import pytest
import torch
from nets import (
    RowsSeen,
    TwoInputs,
    blobs,
    classifier,
    initialised,
    regressor,
    seeded,
    waves,
)
from numpy.testing import assert_allclose
from sklearn.frozen import FrozenEstimator
from skorch.dataset import ValidSplit

from sklaplace import LaplaceClassifier, LaplaceRegressor

KINDS = [LaplaceClassifier, LaplaceRegressor]
NETS = {LaplaceClassifier: classifier, LaplaceRegressor: regressor}
DOUBLE = {"module__dtype": torch.float64}
ALL = {"subset_of_weights": "all"}
FULL = {"hessian_structure": "full"}
every_kind = pytest.mark.parametrize("kind", KINDS)


def data_of(kind, n=60, **params):
    return (blobs if kind is LaplaceClassifier else waves)(n, **params)


def assert_same(model, other, X, tolerance=0.0):
    """Check that moments and evidence are equal."""
    for found, expected in zip(
        (*model.latent_mean_and_variance(X), model.log_marginal_likelihood_value_),
        (*other.latent_mean_and_variance(X), other.log_marginal_likelihood_value_),
        strict=True,
    ):
        assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def frozen(kind, **settings):
    """Return an estimator around a trained float64 net, and its samples."""
    X, y = data_of(kind, dtype=np.float64)
    target = y if kind is LaplaceClassifier else y[:, None]
    net = FrozenEstimator(seeded(NETS[kind](**DOUBLE), X, target))
    noise = {} if kind is LaplaceClassifier else {"sigma_noise": 0.2}
    return kind(net, **{"prior_precision": 1.0, **noise, **settings}).fit(X, y), X, y


# ---------------------------------------------------------------- samples of training
# Training multiplies rounding: by 1.3 in each of 35 steps of L-BFGS.
@pytest.mark.filterwarnings("ignore:There are no held-out samples")
@pytest.mark.parametrize("own_net", [True, False])
@pytest.mark.parametrize("are_counts", [True, False])
@every_kind
def test_weights_repeat_samples_of_any_order_in_full_batch_training(
    kind, are_counts, own_net
):
    X, y = data_of(kind, dtype=np.float64)
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 4, 60)
    counts = counts if are_counts else np.minimum(counts, 1)
    model = kind(NETS[kind](**DOUBLE) if own_net else None, random_state=0)
    rows = rng.permutation(np.arange(60).repeat(counts))
    repeated = copy.copy(model).fit(X[rows], y[rows])
    assert_same(model.fit(X, y, counts.astype(float)), repeated, X, 1e-8)


@every_kind
def test_samples_of_weight_zero_are_not_looked_at(kind):
    X, y = data_of(kind)
    weights = np.where(np.arange(len(X)) < 5, 0.0, 1.0)
    wild = np.where(weights[:, None] > 0, X, np.float32(1e30))
    net = NETS[kind](max_epochs=2)
    models = [kind(net, random_state=0).fit(Z, y, weights) for Z in (X, wild)]
    assert_same(*models, X)


# ----------------------------------------------- which samples serve which purpose
def recorded(kind, y=None, n=60, train_split=None, held_out=(), **settings):
    """Return a model, and the samples used for its training and its curvature."""
    RowsSeen.trained.clear()
    X, targets = data_of(kind)
    net = NETS[kind](max_epochs=1, callbacks=[RowsSeen()], train_split=train_split)
    model = kind(net, random_state=0, **settings)
    model.fit(X[:n], (targets if y is None else y)[:n], **dict(held_out))
    trained = {tuple(row) for row in RowsSeen.trained}
    assert len(trained) == model.posterior_.data_fit.n_targets
    assert trained <= set(map(tuple, X[:n].tolist()))
    return model, trained


def changed(kind, y):
    return (y + 1) % 3 if kind is LaplaceClassifier else y + 5


@pytest.mark.parametrize(
    ("n", "settings", "n_trained"),
    [
        (60, {"prior_precision": 1.0}, 60),
        (40, {"prior_precision": "marglik"}, 40),
        (60, {"validation_fraction": 0.3}, 42),
    ],
    ids=["fixed", "marglik", "validation"],
)
@every_kind
def test_as_many_as_stated_are_kept_from_training(kind, n, settings, n_trained):
    if kind is LaplaceRegressor and "prior_precision" in settings:
        value = settings["prior_precision"]
        settings = settings | {"sigma_noise": value}
    assert len(recorded(kind, n=n, **settings)[1]) == n_trained


@every_kind
def test_samples_of_train_split_are_tuned_on(kind):
    split = ValidSplit(4, stratified=False)
    model, trained = recorded(kind, train_split=split)
    assert len(trained) == 45
    # the first of four folds is held out; only its targets are changed
    y = data_of(kind)[1].copy()
    y[:15] = y[:15][::-1] if kind is LaplaceClassifier else y[:15] + 5
    other, _ = recorded(kind, y, train_split=split)
    weights = (m.estimator_.module_.parameters() for m in (model, other))
    assert all(map(torch.equal, *weights))
    assert other.prior_precision_ != model.prior_precision_


@pytest.mark.filterwarnings("ignore:No prior precision predicts")
@every_kind
def test_given_samples_are_tuned_on_and_nothing_else(kind):
    X, y = (values[60:] for values in data_of(kind, 120))
    found = [
        recorded(kind, held_out={"X_val": X, "y_val": targets})
        for targets in (y, changed(kind, y))
    ]
    assert all(len(trained) == 60 for _, trained in found)
    assert found[0][0].prior_precision_ != found[1][0].prior_precision_


# ---------------------------------------------------------------- what a fit leaves
def test_an_initialised_net_counts_as_trained():
    net = initialised(classifier())
    model = LaplaceClassifier(FrozenEstimator(net), prior_precision=1.0).fit(*blobs())
    assert model.n_iter_ == 1
    weights = (n.module_.parameters() for n in (model.estimator_, net))
    assert all(map(torch.equal, *weights))


def test_names_of_an_earlier_fit_are_forgotten():
    X, y = blobs()
    model = LaplaceClassifier(classifier(), random_state=0).fit(X, y)
    assert model.n_features_in_ == 2
    both = {"left": X, "right": np.ones((len(X), 3), "f4")}
    model.set_params(estimator=classifier(TwoInputs, module__n_out=3)).fit(both, y)
    assert not hasattr(model, "n_features_in_")


# ---------------------------------------------------------- weights that are drawn
@every_kind
def test_drawn_weights_of_a_linear_head_are_those_of_the_linearised_network(kind):
    settings = {"prior_precision": 3.0, "residual": "none"}
    model, X, _ = frozen(kind, pred_type="nn", random_state=0, **settings)
    linearised = copy.copy(model).set_params(pred_type="glm")
    draws = linearised.sample_latent(X, model.n_samples, model._seed)
    if kind is LaplaceClassifier:
        proba = linearised.sample_proba(X, model.n_samples, model._seed)
        assert_allclose(model.predict_proba(X), proba.mean(-1), atol=1e-12)
        return
    mean, variance = model.latent_mean_and_variance(X)
    assert_allclose(mean, draws.mean(-1), atol=1e-12)
    assert_allclose(variance, draws.var(-1, ddof=1), atol=1e-12)
    # a variance of a hundred draws has a relative error of √(2/99) = .14
    ratio = variance / linearised.latent_mean_and_variance(X)[1]
    assert 0.4 < ratio.min() < 1 < ratio.max() < 1.9


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda X: X, TypeError, "needs tensors"),
        (lambda X: torch.tensor(X[:0]), ValueError, "no rows"),
        (lambda X: torch.tensor(X[:, :1]), ValueError, "cannot be applied"),
        (lambda X: torch.tensor(X / 0), ValueError, "not finite"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_rows_in_the_graph_that_cannot_be(wrong, error, words):
    model, X, _ = frozen(LaplaceRegressor)
    with pytest.raises(error, match=words):
        model.predictive(wrong(X))
    assert model.predictive(torch.tensor(X).float())[0].dtype == torch.float64
    model.set_params(pred_type="nn")
    words = r"pred_type='nn' does not yield Gaussian outputs.*'glm'"
    with pytest.raises(ValueError, match=words):
        model.predictive(torch.tensor(X))


# -------------------------------------------------------------------- more samples
@every_kind
def test_partial_fit_of_a_refitted_head_is_at_that_head(kind):
    """Adding the same samples again doubles curvature and loss at the refitted head."""
    model, X, y = frozen(kind, prior_precision=3.0, refine=True, **FULL)
    before = model.posterior_
    assert before.is_refitted
    after = model.partial_fit(X, y).posterior_
    dense, loss = after.structure.dense(), after.data_fit.loss
    twice = 2 * before.structure.dense()
    torch.testing.assert_close(dense, twice, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loss, 2 * before.data_fit.loss)
    assert torch.equal(after.mean, before.mean)


INDICES = np.delete(np.arange(1200), 600)


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({}, {"hessian_structure": "diag"}),
        ({}, {"curvature": "ef"}),
        ({}, ALL),
        ({}, {"hessian_structure": "lowrank", "structure_params": {"rank": 3}}),
        # arrays of more than a thousand entries are printed in part
        (
            {
                "subset_of_weights": "subnetwork",
                "subset_params": {"indices": INDICES},
                "hessian_structure": "diag",
            },
            {"subset_params": {"indices": np.delete(np.arange(1200), 601)}},
        ),
    ],
)
def test_partial_fit_after_a_change_of_settings(settings, change):
    X, y = blobs()
    net = FrozenEstimator(initialised(classifier(module__width=500)))
    model = LaplaceClassifier(net, prior_precision=1.0, **settings).fit(X, y)
    if settings:
        model.set_params(subset_params={"indices": INDICES.copy()}).partial_fit(X, y)
    model.set_params(**change)
    with pytest.raises(ValueError, match=f"'{next(iter(change))}'.* changed since"):
        model.partial_fit(X, y)


@every_kind
def test_partial_fit_that_leaves_no_gaussian(kind):
    """The test adds curvature until its negative eigenvalues exceed the prior."""
    settings = {**ALL, **FULL, "curvature": "hessian"}
    posterior = frozen(kind, prior_precision=1e4, **settings)[0].posterior_
    lowest = float(posterior.scale * posterior.structure.eigenvalues[0])
    assert lowest < 0
    model, X, y = frozen(kind, prior_precision=-1.5 * lowest, **settings)
    before = model.posterior_
    with pytest.raises(ValueError, match="not positive definite"):
        model.partial_fit(X, y)
    assert model.posterior_ is before
