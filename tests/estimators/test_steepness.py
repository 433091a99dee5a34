"""What held-out samples choose under every prior precision: refit and steepness."""

import numpy as np
import pytest
import torch
from nets import MLP, blobs, classifier, regressor, waves
from scipy import stats
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from skorch.dataset import Dataset
from skorch.helper import predefined_split

from sklaplace import LaplaceClassifier, LaplaceRegressor
from sklaplace.estimators.predicting.closed_forms import log_upper_tail
from sklaplace.novelty.steepness import (
    FEW_SAMPLES,
    STEEPNESSES_CLASSES,
    STEEPNESSES_NUMBERS,
    TOLERANCE,
)
from sklaplace.posterior.tuning.path_search import MARGIN

KINDS = [LaplaceClassifier, LaplaceRegressor]
VALUES = {LaplaceClassifier: STEEPNESSES_CLASSES, LaplaceRegressor: STEEPNESSES_NUMBERS}


def frozen(kind, n=150, max_epochs=5):
    """Return a frozen net, its training samples and further samples."""
    is_classifier = kind is LaplaceClassifier
    make, draw = (classifier, blobs) if is_classifier else (regressor, waves)
    X, y = draw(n + 2 * FEW_SAMPLES, dtype=np.float64)
    order = np.random.default_rng(0).permutation(len(X))
    X, y = X[order], y[order]
    options = {"module__dtype": torch.float64, "train_split": None}
    net = make(MLP, max_epochs=max_epochs, **options)
    torch.manual_seed(0)
    net.fit(X[:n], (y if is_classifier else y[:, None])[:n])
    return FrozenEstimator(net), (X[:n], y[:n]), (X[n:], y[n:])


def fitted(kind, net, seen, held_out=None, **settings):
    noise = {"sigma_noise": 0.3} if kind is LaplaceRegressor else {}
    options = {"link_approx": "probit"} if kind is LaplaceClassifier else {}
    settings = {"prior_precision": 1.0, "random_state": 0} | noise | options | settings
    passed = dict(zip(("X_val", "y_val"), held_out or (), strict=False))
    return kind(net, **settings).fit(*seen, **passed)


def loss(model, X, y, steepness):
    model.residual_steepness_ = steepness
    return -model._log_proba_of(X, y).mean()


# --------------------------------------------------------------------- the steepness
@pytest.mark.parametrize("n", [20, 2 * FEW_SAMPLES])
@pytest.mark.parametrize("spread", [1.0, 1.5])
@pytest.mark.parametrize("prior", [1.0, "auto", "marglik"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_that_costs_little_is_chosen(kind, prior, spread, n):
    net, seen, (X, y) = frozen(kind)
    X, y = spread * X[:n], y[:n]  # farther samples are predicted worse
    model = fitted(kind, net, seen, (X, y), prior_precision=prior, refine=False)
    chosen = model.residual_steepness_
    losses = {a: loss(model, X, y, a) for a in VALUES[kind]}
    best = min(losses.values())
    price = TOLERANCE * max(FEW_SAMPLES / n, 1)
    assert chosen == max(a for a in losses if losses[a] <= best + price)


@pytest.mark.parametrize("kind", KINDS)
def test_without_held_out_samples_the_largest_is_chosen(kind):
    net, seen, _ = frozen(kind)
    model = fitted(kind, net, seen)
    assert model.residual_steepness_ == VALUES[kind][-1]
    assert f"steepness {VALUES[kind][-1]:g}" in model._summary()


def test_tuning_chooses_again():
    kind = LaplaceClassifier
    net, seen, (X, y) = frozen(kind)
    model = fitted(kind, net, seen, refine=False)
    before = model.residual_steepness_
    model.tune(parameters="prior_precision")  # by the evidence
    assert model.residual_steepness_ == before
    model.tune(X, y)
    expected = fitted(kind, net, seen, (X, y), refine=False, prior_precision="auto")
    assert model.residual_steepness_ == expected.residual_steepness_
    np.testing.assert_allclose(model.predict_proba(X), expected.predict_proba(X))


# ------------------------------------------------------------------------- the refit
@pytest.mark.parametrize("kind", KINDS)
def test_held_out_samples_decide_about_the_refit(kind):
    """The layer of a net trained for a few epochs is far from its optimum."""
    for max_epochs in (1, 60):
        net, seen, held_out = frozen(kind, max_epochs=max_epochs)
        scores = {
            refine: fitted(kind, net, seen, held_out, refine=refine, residual="none")
            ._log_proba_of(*held_out)
            .sum()
            for refine in (True, False)
        }
        model = fitted(kind, net, seen, held_out)
        gains = scores[True] - scores[False]
        assert model.posterior_.is_refitted == (gains > MARGIN)
        assert not fitted(kind, net, seen).posterior_.is_refitted


@pytest.mark.parametrize("prior", [0.5, 20.0])
@pytest.mark.parametrize("kind", KINDS)
def test_without_both_held_out_samples_change_no_bit(kind, prior):
    """A number with ``refine=False, residual="none"`` uses training samples alone."""
    net, (X, y), held_out = frozen(kind)
    kept = {"refine": False, "residual": "none", "prior_precision": prior}
    alone = fitted(kind, net, (X, y), **kept)
    passed = fitted(kind, net, (X, y), held_out, **kept)
    inner = clone(net.estimator).set_params(
        train_split=predefined_split(Dataset(*held_out))
        if kind is LaplaceClassifier
        else predefined_split(Dataset(held_out[0], held_out[1][:, None]))
    )
    split = fitted(kind, inner, (X, y), **kept)
    own = FrozenEstimator(split.estimator_)
    for pair in ((alone, passed), (split, fitted(kind, own, (X, y), **kept))):
        found, expected = (m.latent_mean_and_variance(X) for m in pair)
        assert all(map(np.array_equal, found, expected))
        evidence, other = (m.log_marginal_likelihood() for m in pair)
        assert evidence == other


# ------------------------------------------------------------------ its exported form
def test_tails_by_the_operators_of_onnx():
    z = np.concatenate([np.linspace(-37, 60, 2001), [0.0, 2.0, -2.0, 1e4]])
    found = log_upper_tail(torch.tensor(z)).numpy()
    expected = stats.norm.logsf(z)
    # a tail probability near one is rounded to float64
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    wide = torch.linspace(-30, 30, 14, dtype=torch.float64).requires_grad_()
    torch.autograd.gradcheck(log_upper_tail, wide)
