"""The residual of the outputs, which grows with the distance from the data."""

import pickle

import numpy as np
import pytest
import torch
from nets import (
    MLP,
    ReLUNet,
    SortedMLP,
    TinyCNN,
    binary_classifier,
    blobs,
    classifier,
    regressor,
    seeded,
    waves,
)
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats
from sklearn.frozen import FrozenEstimator
from skorch.dataset import Dataset
from torch import nn

from sklaplace import (
    LaplaceClassifier,
    LaplaceClassifierCV,
    LaplaceRanker,
    LaplaceRegressor,
)
from sklaplace.novelty.residual import LARGEST_RATIO, SPREADS, VARIANCE

KINDS = [LaplaceClassifier, LaplaceRegressor]
DOUBLE = {"module__dtype": torch.float64}


def data(kind, n=120, **options):
    make = blobs if kind is LaplaceClassifier else waves
    return make(n, dtype=np.float64, **options)


def model(kind, **params):
    make = classifier if kind is LaplaceClassifier else regressor
    net = make(**DOUBLE | params.pop("net", {}))
    return kind(net, **{"random_state": 0} | params)


def far(kind, distance=30.0, n=20):
    X, _ = data(kind)
    directions = np.random.default_rng(0).normal(size=(n, X.shape[1]))
    return distance * directions / np.linalg.norm(directions, axis=1, keepdims=True)


def added(fitted, X):
    """Return the average variance that the residual adds to a classifier's logits."""
    pair = fitted, without(fitted)
    with_it, alone = (m.latent_mean_and_variance(X)[1].mean() for m in pair)
    return with_it - alone


def without(fitted):
    """Return the model without its residual."""
    return pickle.loads(pickle.dumps(fitted)).set_params(residual="none")


# ------------------------------------------------------------------- its definition
def leverage(rows, groups, row, group, ridge):
    """Return the leverage of a row in its group, by the within-group covariance."""
    scatter = scatter_of(rows, groups)
    scatter = scatter + ridge * np.trace(scatter) / len(scatter) * np.eye(len(scatter))
    return leverage_of(rows, groups, row, group, scatter)


def scatter_of(rows, groups):
    means = {g: rows[groups == g].mean(0) for g in set(groups)}
    deviations = rows - np.stack([means[g] for g in groups])
    return deviations.T @ deviations


def leverage_of(rows, groups, row, group, scatter):
    own = rows[groups == group]
    difference = row - own.mean(0)
    return 1 / len(own) + difference @ np.linalg.solve(scatter, difference)


def left_out(rows, groups, ridge):
    """Return the leverages of training samples, each relative to the others."""
    scatter = scatter_of(rows, groups)
    size = ridge * np.trace(scatter) / len(scatter) * np.eye(len(scatter))
    found = []
    for i in range(len(rows)):
        others = np.arange(len(rows)) != i
        part = rows[others], groups[others]
        found.append(leverage_of(*part, rows[i], groups[i], scatter_of(*part) + size))
    return found


def quantile(values, weights, share):
    """Return the smallest value such that others with this weight do not exceed it."""
    order = values.argsort()
    totals = weights[order].cumsum()
    return values[order][np.searchsorted(totals, share * totals[-1])]


def relative_variances(fitted, seen, held_out, new):
    """Return residual variances in units of the scale, by definition."""
    module = fitted.estimator_.module_
    is_classifier = isinstance(fitted, LaplaceClassifier)

    def of_rows(X):
        """Return pairs of samples and groups, for features and for inputs."""
        with torch.no_grad():
            h = torch.tanh(module.hidden(torch.as_tensor(X))).numpy()
            groups = module(torch.as_tensor(X)).numpy().argmax(1)
        groups = groups if is_classifier else 0 * groups
        return (h, groups), (X / seen.std(0), groups)

    known, *others = map(of_rows, (seen, held_out, new))
    # the training samples count for the samples that are missing from 20
    n_missing = max(20 - len(held_out), 0)
    weights = np.repeat([n_missing / len(seen), 1], [len(seen), len(held_out)])
    t_known, t_new = 0, 0
    # features, in a single group only with the small ridge, and inputs
    for part, ridge in [(0, 1e-3), (0, 1.0), (1, 1e-2)]:
        if ridge == 1.0 and not is_classifier:
            continue
        logs, logs_of_new = (
            np.log(
                [
                    leverage(*known[part], *pair, ridge)
                    for pair in zip(*rows, strict=True)
                ]
            )
            for rows in (other[part] for other in others)
        )
        logs = np.concatenate([np.log(left_out(*known[part], ridge)), logs])
        mean = np.average(logs, weights=weights)
        std = np.average((logs - mean) ** 2, weights=weights) ** 0.5
        scale = {"loc": mean, "scale": std}
        t_known = t_known - stats.norm.logsf(logs, **scale)
        t_new = t_new - stats.norm.logsf(logs_of_new, **scale)
    n_terms = 3 if is_classifier else 2
    usual = quantile(t_known, weights, 0.95 if is_classifier else 0.99)
    above = weights * (t_known > usual)
    excess = (above @ (t_known - usual) + 30 * n_terms) / (above.sum() + 30)
    powers = np.where(t_new < usual, 2, fitted.residual_steepness_)
    variances = np.exp(powers * (t_new - usual) / excess)
    if not is_classifier:
        return variances
    largest = module(torch.as_tensor(new)).detach().numpy().astype(float)
    return np.minimum(variances, LARGEST_RATIO * (1 + (largest**2).max(1)))


@pytest.mark.parametrize("n_held_out", [5, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_its_variance_is_that_of_its_definition(kind, n_held_out):
    X, y = data(kind)
    known = slice(None, None, len(X) // n_held_out)
    X_val = 1.2 * X[known]
    fitted = model(kind, net={"train_split": None})
    fitted.fit(X, y, X_val=X_val, y_val=y[known])
    new = np.vstack([X[:5], far(kind, 4.0)])
    mean, variance = fitted.latent_mean_and_variance(new)
    alone_mean, alone = without(fitted).latent_mean_and_variance(new)
    assert_array_equal(mean, alone_mean)
    relative = relative_variances(fitted, X, X_val, new)[:, None]
    if kind is LaplaceClassifier:
        assert_allclose(variance, alone + VARIANCE * relative, rtol=1e-8)
        return
    noise = fitted.sigma_noise_**2
    bound = SPREADS**2 * (y.var() + noise)
    added = alone + VARIANCE * noise * relative
    assert_allclose(variance, added / (1 + added / bound), rtol=1e-8)


# --------------------------------------------------------------- what is predicted


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_have_its_moments(kind, pred_type):
    fitted = model(kind, pred_type=pred_type, n_samples=4000).fit(*data(kind))
    X = np.vstack([data(kind)[0][:3], far(kind, 6.0, 3)])
    draws = fitted.sample_latent(X, n_samples=4000, random_state=1)
    if kind is LaplaceRegressor and draws.ndim == 2:
        draws = draws[:, None]
    _, variance = fitted.latent_mean_and_variance(X)
    assert_allclose(draws.var(-1), variance, rtol=0.15)
    _, joint = fitted.latent_mean_and_variance(X, joint=True)
    rows = draws.reshape(-1, draws.shape[-1])
    sizes = np.sqrt(np.outer(*[joint.diagonal()] * 2))
    assert_allclose(np.cov(rows) / sizes, joint / sizes, atol=0.12)
    alone = fitted.sample_latent(X[3:], n_samples=4000, random_state=1)
    assert_allclose(alone.reshape(draws[3:].shape), draws[3:], rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_differences(kind):
    fitted = model(kind).fit(*data(kind))
    x = torch.as_tensor(far(kind, 3.0, 2)).requires_grad_()

    def total(x):
        mean, cov = fitted.predictive(x)
        return mean.sum() + cov.diagonal(dim1=1, dim2=2).log().sum()

    assert torch.autograd.gradcheck(total, x, eps=1e-6, atol=1e-4)


def test_far_from_the_data_nothing_is_known_about_classes():
    fitted = model(LaplaceClassifier).fit(*data(LaplaceClassifier))
    for distance in (30.0, 1e3, 1e6, 1e12, 1e36):
        X = far(LaplaceClassifier, distance)
        assert fitted.predict_proba(X).max() < 0.4
        assert fitted.predict_dirichlet(X).max() < 0.1
        total, aleatoric, epistemic = fitted.predict_uncertainty(X).T
        assert (epistemic > 0.9 * np.log(3)).all()
        assert_allclose(aleatoric + epistemic, total, atol=1e-9)
        assert fitted.predict_set(X).all()
    X, _ = data(LaplaceClassifier)
    near, alone = fitted.predict_proba(X), without(fitted).predict_proba(X)
    assert np.median(np.abs(near - alone).max(1)) < 0.01


def test_far_bands_are_as_wide_as_the_targets_vary():
    X, y = data(LaplaceRegressor)
    for settings in ({}, {"prior_precision": 1e-6, "residual": VARIANCE}):
        fitted = model(LaplaceRegressor, **settings).fit(X, y)
        for distance in (30.0, 1e3, 1e9):
            _, std = fitted.predict(far(LaplaceRegressor, distance), return_std=True)
            assert (np.std(y) < std).all()
            assert (std < 3 * np.std(y)).all()


# ------------------------------------------------------------------- where there is one
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prior", ["auto", 1.0, "marglik", "validation"])
def test_all_prior_precisions_have_one(kind, prior):
    noise = {"sigma_noise": 0.5} if kind is LaplaceRegressor else {}
    X, y = data(kind)
    fitted = model(kind, prior_precision=prior, **noise).fit(X, y)
    new = far(kind)
    alone = without(fitted).latent_mean_and_variance(new)[1]
    assert (fitted.latent_mean_and_variance(new)[1] > alone).all()
    steepness = 2 if kind is LaplaceClassifier else 1.25
    assert f"residual 0.5 (steepness {steepness})" in fitted._summary()


def test_earlier_tasks_have_none():
    X, y = data(LaplaceClassifier)
    first = model(LaplaceClassifier).fit(X, y)
    later = model(LaplaceClassifier, prior=first.posterior_).fit(X, y)
    new = far(LaplaceClassifier)
    found = later.latent_mean_and_variance(new)[1]
    assert_array_equal(found, without(later).latent_mean_and_variance(new)[1])


def test_networks_without_features_have_none():
    X, y = blobs(120)
    with pytest.warns(
        UserWarning, match="Held-out rows .* this network has no residual"
    ):
        fitted = LaplaceClassifier(classifier(SortedMLP), random_state=0).fit(X, y)
    assert "weights hardly uncertain" in fitted._summary()
    new = far(LaplaceClassifier).astype(np.float32)
    found = fitted.predict_proba(new)
    assert_array_equal(found, without(fitted).predict_proba(new))
    with pytest.warns(UserWarning, match=r"residual=0\.3 has no effect"):
        fitted.set_params(residual=0.3).fit(X, y)


@pytest.mark.filterwarnings("ignore:Held-out rows are predicted best with no")
def test_counts_have_none():
    X, y = waves(120)
    counts = np.round(np.exp(y)).astype(np.float32)
    net = regressor(criterion=nn.PoissonNLLLoss)
    fitted = LaplaceRegressor(net, random_state=0).fit(X, counts)
    found = fitted.predict(X, return_std=True)
    assert_array_equal(found, without(fitted).predict(X, return_std=True))


@pytest.mark.parametrize("link", ["auto", "mc", "probit", "mean_field", "gumbel"])
@pytest.mark.parametrize("y", ["binary", "one logit", "labels", "many"])
def test_all_kinds_of_classes_have_one(y, link):
    X, labels = blobs(200, n_classes=40 if y == "many" else 2)
    net = classifier(module__n_out=40 if y == "many" else 2)
    if y == "one logit":
        net = binary_classifier()
    elif y == "labels":
        net = classifier(module__n_out=2, criterion=nn.BCEWithLogitsLoss)
        labels = np.stack([labels, X[:, 0] > 0], 1).astype(np.float32)
    fitted = LaplaceClassifier(net, link_approx=link, random_state=0).fit(X, labels)
    proba = fitted.predict_proba(far(LaplaceClassifier, 1e3).astype(np.float32))
    n_classes = 1 / 0.5 if y == "labels" else proba.shape[1]
    assert_allclose(proba, 1 / n_classes, atol=0.05)


def test_samples_alone_in_their_class_count_for_nothing():
    X, y = blobs(40)
    X = np.vstack([X, [[9.0, 9.0]]]).astype(np.float32)
    fitted = LaplaceClassifier(random_state=0).fit(X, [*y, 3])
    assert np.isfinite(fitted.predict_proba(X)).all()
    assert fitted.predict_proba(X * 100).max() < 0.6


# ------------------------------------------------------------------ same numbers


@pytest.mark.parametrize("kind", KINDS)
def test_further_samples_are_no_longer_far(kind):
    X, y = data(kind)
    fitted = model(kind).fit(X, y)
    new = np.tile(far(kind, 6.0, 8), (10, 1)) + np.random.default_rng(0).normal(
        size=(80, X.shape[1])
    )
    before = added(fitted, new)
    fitted.partial_fit(new, y[:80])
    assert added(fitted, new) < before / 100


def test_held_out_samples_that_are_farther_count():
    X, y = data(LaplaceClassifier)
    net, new = {"train_split": None}, far(LaplaceClassifier, 5.0)
    near, farther = (
        model(LaplaceClassifier, net=net).fit(X, y, X_val=factor * X[:30], y_val=y[:30])
        for factor in (1, 3)
    )
    assert added(farther, new) < added(near, new) / 100
    farther.tune(X[:30], y[:30])
    assert_allclose(added(farther, new), added(near, new), rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_held_out_samples_do_not_make_others_unusual(kind, n):
    X, y = data(kind)
    held_out = slice(1, 1 + n)
    fitted = model(kind, net={"train_split": None})
    fitted.fit(X, y, X_val=X[held_out], y_val=y[held_out])
    pair = fitted, without(fitted)
    with_it, alone = (m.latent_mean_and_variance(X[60:])[1] for m in pair)
    assert np.median(with_it - alone) < 0.1 * VARIANCE


def test_searches_score_with_it():
    X, y = data(LaplaceClassifier)
    net = classifier(**DOUBLE)
    options = {"prior_precisions": [0.1, 10.0], "cv": 2, "random_state": 0}
    options["refine"] = False
    plain = LaplaceClassifierCV(net, **options).fit(X, y)
    wide = LaplaceClassifierCV(net, residual=30.0, **options).fit(X, y)
    assert wide.best_score_ != plain.best_score_
    assert wide.predict_proba(X).max() < plain.predict_proba(X).max()


# ----------------------------------------------------------------------- bad input


def test_pairs_have_none():
    pairs = np.random.default_rng(0).normal(size=(60, 2, 3))
    y = pairs[:, 1].sum(1) > pairs[:, 0].sum(1)
    with pytest.raises(ValueError, match=r"residual=0\.1 cannot be used for pairs"):
        LaplaceRanker(residual=0.1).fit(pairs, y)
    fitted = LaplaceRanker(random_state=0).fit(pairs, y)
    with pytest.raises(ValueError, match="cannot be used for pairs"):
        fitted.set_params(residual="auto").predict_proba(pairs)


# ------------------------------------------------------------------- what is not far
@pytest.mark.parametrize("kind", KINDS)
def test_rare_categories_are_not_far(kind, full_training):
    rng = np.random.default_rng(0)
    codes = rng.choice(4, 480, p=[0.5, 0.4, 0.07, 0.03])
    X = np.eye(4)[codes]
    if kind is LaplaceClassifier:
        y = (rng.random(480) < np.array([0.1, 0.9, 0.1, 0.9])[codes]).astype(int)
    else:
        y = np.array([0.0, 1.0, 2.0, 3.0])[codes] + 0.5 * rng.normal(size=480)
    fitted = kind(random_state=0).fit(X, y)
    if kind is LaplaceClassifier:
        assert_allclose(
            fitted.predict_proba(np.eye(4))[:, 1], [0.1, 0.9, 0.1, 0.9], atol=0.2
        )
    else:
        pair = fitted, without(fitted)
        std, alone = (m.predict(np.eye(4), return_std=True)[1] for m in pair)
        assert (std < 1.5 * alone).all()


def pad(samples):
    """Make a batch of rows with different lengths, padded with zeros."""
    rows, targets = zip(*samples, strict=True)
    longest = max(int(np.count_nonzero(row)) for row in rows)
    X = torch.stack([torch.as_tensor(row[:longest]) for row in rows])
    return X, torch.as_tensor(np.array(targets))


class OfLengths(nn.Module):
    """A network on the sum and the mean square of a sequence."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, X):
        return self.head(torch.stack([X.sum(1), X.square().sum(1)], 1))


def test_padded_sequences_are_no_table():
    """Batches have different widths, in any order."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 9)).astype(np.float32)
    X[np.arange(9) >= np.repeat([3, 9, 6, 5], 30)[:, None]] = 0
    y = (X.sum(1) > 0).astype(int)
    net = classifier(OfLengths, iterator_train__collate_fn=pad, batch_size=10)
    net.set_params(iterator_valid__collate_fn=pad, iterator_train__shuffle=False)
    found = []
    for n in (30, 120):
        fitted = LaplaceClassifier(net, batch_size=n, random_state=0).fit(X, y)
        found.append(fitted.latent_mean_and_variance(100 * X)[1])
    assert (found[0] > 1e3).all()
    assert_allclose(found[1], found[0], rtol=1e-4)


def test_inputs_of_another_kind_are_refused():
    class Casting(MLP):
        def forward(self, X):
            return super().forward(X.float())

    X, y = data(LaplaceClassifier)
    fitted = LaplaceClassifier(classifier(Casting), random_state=0).fit(
        X.astype(np.float32), y
    )
    for call in fitted.predict_proba, fitted.sample_proba:
        with pytest.raises(ValueError, match="inputs of X must be"):
            call(Dataset(X.astype(int), y))


@pytest.mark.parametrize("link", ["mc", "probit", "gumbel"])
@pytest.mark.parametrize("factor", [1e2, 1e7])
def test_the_most_probable_class_far_away_is_that_of_the_outputs(link, factor):
    X, y = blobs()
    net = FrozenEstimator(seeded(classifier(ReLUNet), X, y))
    options = {"prior_precision": 1.0, "link_approx": link, "random_state": 0}
    fitted = LaplaceClassifier(net, **options).fit(X, y)
    proba, outputs = fitted.predict_proba(factor * X), net.predict_proba(factor * X)
    assert_allclose(proba, 1 / 3, atol=1e-3)
    assert_array_equal(proba.argmax(1), outputs.argmax(1))


def test_images_of_another_kind_are_unusual():
    rng = np.random.default_rng(0)
    y = np.arange(240) % 3
    images = rng.normal(size=(240, 1, 20, 20)).astype("f4") / 9
    images[np.arange(240), 0, y] += 1  # a line
    known, others = images[:200], images[200:]
    fitted = LaplaceClassifier(classifier(TinyCNN), random_state=0)
    fitted.fit(known, y[:200])
    rotated = others.transpose(0, 1, 3, 2)
    near, far = (fitted.score_samples(X) for X in (others, rotated))
    assert far.max() < near.min()
    assert fitted.predict_proba(rotated).max() < 0.35
    with pytest.raises(ValueError, match=r"\(1, 20, 20\).*the shape \(1, 20, 19\)"):
        fitted.predict_proba(others[..., :-1])
    fitted.set_params(residual="none").predict_proba(others[..., :-1])
