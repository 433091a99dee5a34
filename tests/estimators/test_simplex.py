"""Distributions over class probabilities, and predictions from them."""

import joblib
import numpy as np
import pytest
import segmentation
import tagging
import torch
from nets import (
    MLP,
    LinearModel,
    binary_classifier,
    blobs,
    classifier,
    initialised,
    seeded,
)
from scipy.special import expit
from scipy.stats import entropy
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator

from sklaplace import LaplaceClassifier, dirichlet
from sklaplace.dirichlet.logits import centre

pytestmark = pytest.mark.usefixtures("rng_untouched")

METHODS = list(dirichlet.APPROXIMATIONS)
every_method = pytest.mark.parametrize("method", METHODS)
ASKED = {
    name: lambda model, X, name=name, **options: getattr(model, name)(X, **options)
    for name in ("predict_dirichlet", "predict_uncertainty", "predict_set")
}
every_question = pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED.keys())
X, Y = blobs(dtype=np.float64)
FLOAT64 = {"module__dtype": torch.float64}


@pytest.fixture(scope="module")
def net():
    return seeded(classifier(**FLOAT64), X, Y)


@pytest.fixture(scope="module")
def binary_net():
    return seeded(binary_classifier(**FLOAT64), X, (Y > 0).astype(float))


def fitted(net, y=Y, **settings):
    settings = {"prior_precision": 0.1, "random_state": 0} | settings
    return LaplaceClassifier(FrozenEstimator(net), **settings).fit(X, y)


@pytest.fixture(scope="module")
def model(net):
    return fitted(net)


@pytest.fixture(scope="module")
def tags():
    """Return a classifier of a label matrix."""
    net = seeded(tagging.net(), tagging.X, tagging.Y.astype(float))
    return tagging.fitted(net)


@pytest.fixture(scope="module")
def maps():
    """Return a classifier of one label per position."""
    net = seeded(segmentation.net(), segmentation.X, segmentation.Y)
    return segmentation.fitted(net)


def gaussian_of(model, X):
    """Return means (n, K) and covariances (n, K, K) of the class logits."""
    mean, cov = model.latent_mean_and_variance(X, full_cov=True)
    return torch.as_tensor(mean), torch.as_tensor(cov)


# Concentrations


@every_method
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("structure", ["kron", "full"])
def test_equal_to_the_function_of_the_gaussian(net, method, subset, structure):
    model = fitted(net, subset_of_weights=subset, hessian_structure=structure)
    alpha = model.predict_dirichlet(X, method)
    assert alpha.shape == (60, 3)
    assert alpha.dtype == np.float64
    expected = dirichlet.APPROXIMATIONS[method](*gaussian_of(model, X))
    np.testing.assert_allclose(alpha, expected, rtol=1e-9)
    # as users would do it: of the centred Gaussian, or conditioned on a sum of zero
    mean, cov = (part.numpy() for part in gaussian_of(model, X))
    centring = np.eye(3) - 1 / 3
    gaussian = mean @ centring, centring @ cov @ centring
    if not dirichlet.APPROXIMATIONS[method].centred:
        gaussian = mean, cov
    if method == "projection":
        expected = dirichlet.kl_projection(*gaussian)
    else:
        norms = {"bridge_norm": "guarded", "bridge_norm_published": "published"}
        norms["bridge_norm_conditioned"] = "published"
        expected = dirichlet.laplace_bridge(*gaussian, norm=norms.get(method))
    np.testing.assert_allclose(alpha, expected, rtol=1e-9)


@every_method
def test_the_constructor_says_which_unless_the_call_does(net, model, method):
    alpha = model.predict_dirichlet(X, method)
    # a setting of predictions alone: it takes effect without a fit
    later = fitted(net).set_params(dirichlet_approx=method)
    for ask in ASKED.values():
        np.testing.assert_array_equal(ask(later, X), ask(model, X, method=method))
    np.testing.assert_array_equal(
        later.predict_dirichlet(X, "projection"), model.predict_dirichlet(X)
    )
    expected = dirichlet.uncertainty(alpha)
    np.testing.assert_array_equal(later.predict_uncertainty(X), expected)


# Uncertainty


def split(draws):
    """Return the uncertainty split of probabilities (n, K, s)."""
    total, aleatoric = entropy(draws.mean(-1), axis=1), entropy(draws, axis=1).mean(-1)
    return np.stack([total, aleatoric, total - aleatoric], -1)


def test_drawn_uncertainty_is_that_of_many_draws(net):
    model = fitted(net, n_samples=4096)
    expected = split(model.sample_proba(X, 10_000))
    found = model.predict_uncertainty(X, "mc")
    # five standard errors of 10,000 entropies with deviations below 0.3
    np.testing.assert_allclose(found, expected, atol=5 * 0.3 / 100)
    # of which the total is the entropy of predict_proba by the same points
    model.set_params(link_approx="mc")
    proba = model.predict_proba(X)
    np.testing.assert_allclose(found[:, 0], entropy(proba, axis=1), rtol=1e-10)
    # and the projection is near:
    closed = model.predict_uncertainty(X)
    # it is another distribution: .042 on average and .093 at most measured
    assert np.abs(closed - found).mean() < 0.06
    assert np.abs(closed - found).max() < 0.15


def test_drawn_networks_are_split_by_their_draws(net):
    model = fitted(net, subset_of_weights="all", pred_type="nn", n_samples=50)
    expected = split(model.sample_proba(X, 50, random_state=model._seed))
    np.testing.assert_allclose(model.predict_uncertainty(X), expected, atol=1e-12)
    np.testing.assert_allclose(model.predict_uncertainty(X, "mc"), expected, atol=1e-12)
    # a Dirichlet is had from the moments of the draws
    closed = model.predict_uncertainty(X, "projection")
    of_moments = dirichlet.uncertainty(model.predict_dirichlet(X))
    np.testing.assert_array_equal(closed, of_moments)
    assert np.abs(closed - expected).max() < 0.2


def test_more_data_removes_epistemic_uncertainty(net):
    few = fitted(net, residual="none")
    many = clone(few).fit(np.tile(X, (50, 1)), np.tile(Y, 50))
    epistemic = [m.predict_uncertainty(X)[:, 2].mean() for m in (few, many)]
    # in proportion to the rows, where the prior does not matter
    assert epistemic[1] < 0.1 * epistemic[0]


# Sets


@pytest.mark.parametrize("reference", ["top", "previous"])
@pytest.mark.parametrize("method", [None, *METHODS])
def test_sets_are_those_of_the_dirichlet(model, reference, method):
    found = model.predict_set(X, 0.1, 2, reference=reference, method=method)
    assert found.shape == (60, 3)
    assert found.dtype == bool
    alpha = model.predict_dirichlet(X, method)
    expected = dirichlet.plausible_classes(alpha, 0.1, 2, reference)
    np.testing.assert_array_equal(found, expected)
    assert set(found.sum(1)) == {1, 2}


# Other targets


def test_labels_of_a_matrix(tags):
    rows = tagging.X
    mean, variance = tags.latent_mean_and_variance(rows)
    for method in METHODS:
        alpha = tags.predict_dirichlet(rows, method)
        assert alpha.shape == (90, 3, 2)
        for label in range(3):
            f, v = mean[:, label], variance[:, label]
            sides = np.array([-0.5, 0.5])
            m, S = f[:, None] * sides, v[:, None, None] * np.outer(sides, sides)
            alone = dirichlet.APPROXIMATIONS[method](torch.tensor(m), torch.tensor(S))
            np.testing.assert_allclose(alpha[:, label], alone, rtol=1e-9)
    # the second is that of labels that are one
    proba = dirichlet.mean(tags.predict_dirichlet(rows))[..., 1]
    assert np.abs(proba - tags.predict_proba(rows)).max() < 0.05


@pytest.mark.parametrize("method", [None, "mc", "bridge"])
@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_uncertainty_of_a_matrix(tags, method, pred_type):
    options = {"pred_type": pred_type, "n_samples": 500, "residual": "none"}
    model = clone(tags).set_params(**options)
    model.fit(tagging.X, tagging.Y)
    found = model.predict_uncertainty(tagging.X, method)
    assert found.shape == (90, 3, 3)
    np.testing.assert_allclose(found[..., 0], found[..., 1:].sum(-1), rtol=1e-14)
    assert (found >= 0).all()
    assert (found <= np.log(2) * (1 + 1e-12)).all()
    ones = model.sample_proba(tagging.X, 2000)  # (n, L, s)
    both = np.stack([ones, 1 - ones], 2).reshape(-1, 2, 2000)
    # five standard errors of 500 entropies with deviations below 0.2, and more of a
    # bridge, which is another distribution
    allowed = 0.15 if method == "bridge" else 5 * 0.2 / 500**0.5
    np.testing.assert_allclose(found.reshape(-1, 3), split(both), atol=allowed)


@every_method
def test_positions_are_rows_of_their_own(maps, method):
    mean, cov = gaussian_of(maps, segmentation.X)
    alpha = maps.predict_dirichlet(segmentation.X, method)
    for place in np.ndindex(segmentation.POSITIONS):
        here = (..., *place)
        alone = dirichlet.APPROXIMATIONS[method](mean[here], cov[here])
        np.testing.assert_allclose(alpha[here], alone, rtol=1e-8)


@every_method
def test_one_logit_is_a_beta(binary_net, method):
    model = fitted(binary_net, np.where(Y > 0, "yes", "no"))
    alpha = model.predict_dirichlet(X, method)
    assert alpha.shape == (60, 2)
    with torch.no_grad():
        f = binary_net.module_(torch.tensor(X)).numpy()[:, 0]
    if method == "projection":
        # the mean of "yes" is that of a sigmoid, and the same side is favoured
        draws = model.sample_proba(X, 4000)
        np.testing.assert_allclose(dirichlet.mean(alpha), draws.mean(-1), atol=0.05)
        np.testing.assert_array_equal(alpha[:, 1] > alpha[:, 0], f > 0)
    elif method == "bridge":
        np.testing.assert_allclose(dirichlet.mean(alpha)[:, 1], expit(f), rtol=1e-9)
    found = model.predict_uncertainty(X, method)
    assert (found[:, 0] <= np.log(2)).all()


NETS_OF_ONE = {"binary": binary_classifier()}
NETS_OF_ONE["logits"] = classifier(module__n_out=1)


@pytest.mark.parametrize("name", NETS_OF_ONE)
@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_one_class_is_certain(name, pred_type):
    rows = X.astype(np.float32)
    model = LaplaceClassifier(NETS_OF_ONE[name], random_state=0, pred_type=pred_type)
    model.fit(rows, np.full(60, "only"))
    for method in METHODS:
        assert (model.predict_dirichlet(rows, method) > 0).all()
    for method in (None, "mc", *METHODS):
        found = model.predict_uncertainty(rows, method)
        np.testing.assert_array_equal(found, np.zeros((60, 3)))
    np.testing.assert_array_equal(model.predict_set(rows), np.ones((60, 1)))
    np.testing.assert_allclose(model.sample_proba(rows, 3), np.ones((60, 1, 3)))


def test_many_classes_need_no_covariances(little_memory):
    """Bridges of centred logits need only variances; other methods need covariances."""
    rows, y = blobs(80, n_classes=40, dtype=np.float64)
    frozen = FrozenEstimator(initialised(classifier(LinearModel, module__n_out=40)))
    model = LaplaceClassifier(frozen, prior_precision=1.0).fit(rows, y)
    little_memory(20_000)
    for method in METHODS:
        if dirichlet.APPROXIMATIONS[method].diagonal:
            model.predict_dirichlet(rows, method)
        else:
            with pytest.raises(ValueError, match="covariance between 40 outputs"):
                model.predict_dirichlet(rows, method)


CONFUSED = torch.arange(104) % 26  # four classes in each of 26 places


@pytest.fixture(scope="module")
def confused():
    """Return rows, and a net that was trained on classes that are easily confused."""
    rng = np.random.default_rng(0)
    y = rng.permutation(np.tile(np.arange(104), 10))
    rows = 3 * rng.normal(size=(26, 8))[CONFUSED[y]] + rng.normal(size=(len(y), 8))
    sizes = {"module__n_in": 8, "module__n_out": 104, "module__width": 24}
    net = seeded(classifier(MLP, **sizes, max_epochs=40, lr=0.3, **FLOAT64), rows, y)
    return rows, y, net


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"residual": "none"},
        {"hessian_structure": "diag"},
        {"prior_precision": 10.0},
    ],
    ids=str,
)
def test_many_classes(confused, settings):
    """Above 100 classes, covariances are used among the most probable classes only.

    The largest difference measured is 27 %, of a confident prediction for which the
    covariances of all classes lead to an error of 19 %.
    """
    rows, y, net = confused
    settings = {"prior_precision": 0.1, "random_state": 0} | settings
    model = LaplaceClassifier(FrozenEstimator(net), **settings).fit(rows, y)
    some = np.concatenate([rows[:9], 3 * rows[9:12]])
    expected = dirichlet.kl_projection(*gaussian_of(model, some)).numpy()
    alpha = model.predict_dirichlet(some)
    assert not np.array_equal(alpha, expected)
    ratio = alpha.sum(1) / expected.sum(1)
    np.testing.assert_allclose(ratio, 1, rtol=0.35)
    np.testing.assert_allclose(np.median(ratio), 1, rtol=0.06)
    np.testing.assert_array_equal(alpha.argmax(1), expected.argmax(1))
    uncertainty = model.predict_uncertainty(some)
    np.testing.assert_allclose(uncertainty, dirichlet.uncertainty(alpha))
    # a sample's distribution depends neither on the others nor on workers
    np.testing.assert_allclose(model.predict_dirichlet(some[8:]), alpha[8:], rtol=1e-6)
    far = model.predict_dirichlet(1e6 * some)
    assert np.isfinite(far).all()
    model.set_params(batch_size=5, n_jobs=2)
    with joblib.parallel_config(backend="threading"):
        np.testing.assert_allclose(model.predict_dirichlet(some), alpha, rtol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"subset_of_weights": "all"},
        {"subset_of_weights": ["hidden"]},
        {"pred_type": "nn"},
    ],
    ids=str,
)
def test_many_classes_that_share_weights(confused, settings):
    """All logits are correlated, so all covariances are used."""
    rows, y, net = confused
    settings = {"prior_precision": 0.1, "random_state": 0} | settings
    model = LaplaceClassifier(FrozenEstimator(net), **settings).fit(rows, y)
    expected = dirichlet.kl_projection(*gaussian_of(model, rows[:5]))
    np.testing.assert_allclose(model.predict_dirichlet(rows[:5]), expected, rtol=1e-6)


def test_covariances_among_some_outputs(confused):
    """They are entries of the covariance of the centred outputs."""
    rows, y, net = confused
    for settings in ({}, {"residual": "none"}, {"hessian_structure": "diag"}):
        model = LaplaceClassifier(FrozenEstimator(net), prior_precision=0.1, **settings)
        mean, cov = gaussian_of(model.fit(rows, y), rows[:5])
        cov = centre(mean, cov)[1]
        _, _, leading, among = (
            torch.as_tensor(part)
            for part in model._outputs().map_gaussian(
                rows[:5],
                lambda *parts: parts,
                diagonal=True,
                centred=True,
                n_leading=4,
            )
        )
        assert torch.equal(leading, mean.topk(4).indices)
        expected = cov.take_along_dim(leading.unsqueeze(2), 1)
        expected = expected.take_along_dim(leading.unsqueeze(1), 2)
        torch.testing.assert_close(among, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_classes", [100, 101])
def test_the_number_of_classes_decides(n_classes, little_memory):
    rows, y = blobs(2 * n_classes, n_classes=n_classes)
    net = initialised(classifier(LinearModel, module__n_out=n_classes))
    model = LaplaceClassifier(FrozenEstimator(net), prior_precision=1.0).fit(rows, y)
    expected = model.predict_dirichlet(rows)
    little_memory(30_000)  # less than covariances need
    if n_classes == 100:
        with pytest.raises(ValueError, match="covariance between 100 outputs"):
            model.predict_dirichlet(rows)
    else:
        np.testing.assert_allclose(model.predict_dirichlet(rows), expected, rtol=1e-6)


# Bad input


@every_question
@pytest.mark.parametrize("value", ["project", 3, "", ["bridge"]])
def test_unknown_methods(model, ask, value):
    with pytest.raises(ValueError, match=r"method=.* is not known. Choose one of") as e:
        ask(model, X, method=value)
    assert all(repr(method) in str(e.value) for method in METHODS)


@pytest.mark.parametrize("name", ["predict_dirichlet", "predict_set"])
def test_draws_are_no_dirichlet(model, name):
    with pytest.raises(ValueError, match=r"method='mc' is not known"):
        ASKED[name](model, X, method="mc")


@pytest.mark.parametrize(
    "options", [{"q": 0}, {"q": 1}, {"k_max": 0}, {"reference": "next"}]
)
def test_options_of_sets(model, options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value!r} is not"):
        model.predict_set(X, **options)


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_uncertainty_of_a_single_draw_is_refused(net, pred_type):
    model = fitted(net, pred_type=pred_type).set_params(n_samples=1)
    with pytest.raises(ValueError, match="n_samples=1 has no variance"):
        model.predict_uncertainty(X[:2], "mc")
