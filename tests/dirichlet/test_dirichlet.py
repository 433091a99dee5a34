"""Dirichlet approximations of Gaussian logits: contracts, and the Laplace bridge."""

import numpy as np
import pytest
import torch
from dirichlets import APPROXIMATIONS
from gaussians import arrays
from hypothesis import given
from hypothesis import strategies as st

from sklaplace import dirichlet
from sklaplace.dirichlet import inverse_bridge, kl_projection, laplace_bridge

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("rng_untouched")]

CORRELATED = [[1, 0, 0.5], [0, 2, 0.3], [0.5, 0.3, 0.5]]
every_approximation = pytest.mark.parametrize(
    "approximate", APPROXIMATIONS.values(), ids=APPROXIMATIONS
)
either = pytest.mark.parametrize("approximate", [laplace_bridge, kl_projection])


# All of them


@either
@pytest.mark.parametrize("n_classes", [2, 4])
@pytest.mark.parametrize("sd", [0.05, 1.0, 20.0])
def test_tensors_stay_differentiable(approximate, n_classes, sd):
    mean, cov = map(torch.tensor, arrays(2, n_classes))
    factor = torch.linalg.cholesky(cov)
    assert torch.autograd.gradcheck(
        lambda m, F: approximate(m, sd**2 * F @ F.mT).log(),
        (mean.requires_grad_(), factor.requires_grad_()),
    )


@either
@pytest.mark.parametrize(
    ("mean", "cov", "message"),
    [
        ((4, 3), (3, 3), r"\(3, 3\), but mean has shape \(4, 3\).*shape \(4, 3, 3\)"),
        ((3,), (3,), r"cov has shape \(3,\), but mean has .*have shape \(3, 3\)"),
        ((2, 3), (2, 4, 4), r"have shape \(2, 3, 3\)"),
        ((3,), (1, 3, 3), r"have shape \(3, 3\)"),
        ((), (), r"mean is a scalar. Pass logits of shape \(\.\.\., K\)"),
    ],
)
def test_bad_shapes(approximate, mean, cov, message):
    with pytest.raises(ValueError, match=message):
        approximate(np.ones(mean), np.ones(cov))


@either
@pytest.mark.parametrize(
    ("mean", "cov", "message"),
    [
        ([0, np.nan, 0], np.eye(3), "mean has entries that are not finite"),
        ([0, np.inf, 0], np.eye(3), "mean has entries that are not finite"),
        ([0, 0, 0], np.full((3, 3), np.nan), "cov has entries that are not finite"),
        ([0, 0, 0], np.diag([1, np.inf, 1]), "cov has entries that are not finite"),
        ([0, 0, 0], [[1, np.nan, 0], [np.nan, 1, 0], [0, 0, 1]], "cov .* not finite"),
        ([0, 0, 0], -np.eye(3), "cov is not positive semidefinite"),
        ([0, 0], [[1, 2], [2, 1]], "cov is not positive semidefinite"),
    ],
)
def test_gaussians_must_be_gaussians(approximate, mean, cov, message):
    with pytest.raises(ValueError, match=message):
        approximate(np.array(mean, dtype=float), np.array(cov, dtype=float))


@every_approximation
@given(
    n_classes=st.sampled_from([1, 2, 3, 4, 5, 6, 10, 66]),
    seed=st.integers(0, 2**31),
    rank=st.integers(0, 7),
    log_mean=st.integers(-12, 12),
    log_scale=st.integers(-12, 12),
    log_common=st.integers(-12, 12),
    shift=st.sampled_from([0.0, 1e-6, -1e6, 1e12]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_finite_positive_and_bounded(
    approximate, n_classes, seed, rank, log_mean, log_scale, log_common, shift, dtype
):
    rng = np.random.default_rng(seed)
    factor = rng.normal(size=(n_classes, min(rank, n_classes)))
    cov = 10.0**log_scale * factor @ factor.T + 10.0**log_common
    mean = 10.0**log_mean * rng.normal(size=n_classes) + shift
    alpha = approximate(mean.astype(dtype), cov.astype(dtype))
    assert alpha.dtype == np.float64
    assert np.isfinite(alpha).all()
    assert (alpha > 0).all()
    assert alpha.sum() <= 1e9 * (1 + (1e-9 if approximate is kl_projection else 1e-12))
    np.testing.assert_allclose(dirichlet.mean(alpha).sum(), 1)
    split = dirichlet.uncertainty(alpha)
    assert np.isfinite(split).all()
    assert (split >= 0).all()


@every_approximation
@pytest.mark.parametrize("n_classes", [2, 3, 64, 66, 200])
@pytest.mark.parametrize("scale", [0.0, 1e-299, 1e160, 1e299])
@pytest.mark.parametrize("largest", [0.0, 1e300])
@pytest.mark.parametrize("kind", ["diagonal", "one direction", "common"])
def test_finite_at_the_limits_of_float64(approximate, n_classes, scale, largest, kind):
    mean = np.zeros(n_classes)
    mean[:2] = largest, -largest
    direction = np.cos(np.arange(n_classes))
    cov = {
        "diagonal": scale * np.eye(n_classes),
        "one direction": scale * np.outer(direction, direction),
        "common": np.full((n_classes, n_classes), scale),
    }[kind]
    alpha = approximate(mean, cov)
    assert np.isfinite(alpha).all()
    assert (alpha > 0).all()
    assert alpha.sum() <= 1e9 * (1 + 1e-9)
    if approximate is kl_projection:
        assert alpha[0] == alpha.max()


# The Laplace bridge


@pytest.mark.parametrize(
    ("mean", "cov", "expected"),
    [
        ([0, 0, 0], 0.1 * np.eye(3), [6.667, 6.667, 6.667]),
        ([2, -1, -1], np.eye(3), [4.908, 0.561, 0.561]),
        ([1, 1, -2], CORRELATED, [2.787, 1.394, 0.911]),
    ],
)
def test_published_gaussians_have_published_concentrations(mean, cov, expected):
    # The paper's figures are those of the Gaussians as printed, not projected.
    alpha = laplace_bridge(np.array(mean), np.array(cov), project=False)
    np.testing.assert_allclose(alpha, expected, atol=5e-4)


@pytest.mark.parametrize("n_classes", [2, 3, 7])
def test_bridge_equals_its_formula(n_classes):
    mean, cov = (values[0] for values in arrays(1, n_classes, seed=1))
    # given a sum of zero, as the formulas are printed
    ones = np.ones(n_classes)
    total = ones @ cov @ ones
    m = mean - cov @ ones * (ones @ mean) / total
    s = cov - np.outer(cov @ ones, ones @ cov) / total
    constant = 1 - 2 / n_classes + np.exp(m) * np.exp(-m).sum() / n_classes**2
    np.testing.assert_allclose(laplace_bridge(mean, cov), constant / s.diagonal())
    c = s.diagonal().mean() / np.sqrt(n_classes / 2)
    for norm, divisor in (("published", c), ("guarded", max(c, 1))):
        expected = laplace_bridge(m / np.sqrt(divisor), s / divisor, project=False)
        np.testing.assert_allclose(laplace_bridge(mean, cov, norm=norm), expected)


@given(
    alpha=st.integers(2, 8).flatmap(
        lambda k: st.lists(st.floats(-4, 4), min_size=k, max_size=k)
    )
)
def test_round_trip_from_concentrations(alpha):
    alpha = 10.0 ** np.array(alpha)
    mean, cov = inverse_bridge(alpha)
    for project in (False, True):
        found = laplace_bridge(mean, cov, project=project)
        np.testing.assert_allclose(found, alpha, rtol=1e-12)


def test_inverse_bridge_is_centred_and_semidefinite():
    alpha = np.array([0.3, 2.0, 5.0, 40.0])
    mean, cov = inverse_bridge(alpha)
    assert abs(mean.sum()) < 1e-14
    np.testing.assert_allclose(cov.sum(axis=0), 0, atol=1e-14)
    np.testing.assert_array_equal(cov, cov.T)
    assert np.linalg.eigvalsh(cov).min() > -1e-14
    for array, twin in zip(
        (mean, cov), inverse_bridge(torch.tensor(alpha)), strict=True
    ):
        assert isinstance(array, np.ndarray)
        assert isinstance(twin, torch.Tensor)
        np.testing.assert_array_equal(array, twin.numpy())


def test_projection_leaves_centred_gaussians_alone():
    mean, cov = arrays(6, 5)
    centring = np.eye(5) - 1 / 5
    mean, cov = mean @ centring, centring @ cov @ centring
    alpha = laplace_bridge(mean, cov)
    unprojected = laplace_bridge(mean, cov, project=False)
    np.testing.assert_allclose(alpha, unprojected, rtol=1e-12)
    # In float32 the sums that should vanish are larger, and must not be divided by.
    single = laplace_bridge(mean.astype("f4"), cov.astype("f4"))
    np.testing.assert_allclose(single, alpha, rtol=1e-5)


def test_two_classes_keep_the_softmax():
    mean, cov = arrays(20, 2)
    odds = np.exp(mean[:, 0] - mean[:, 1])
    p = dirichlet.mean(laplace_bridge(mean, cov, project=False))
    np.testing.assert_allclose(p[:, 0] / p[:, 1], odds * cov[:, 1, 1] / cov[:, 0, 0])
    centring = np.eye(2) - 0.5
    centred = dirichlet.mean(laplace_bridge(mean, centring @ cov @ centring))
    np.testing.assert_allclose(centred[:, 0], odds / (1 + odds))


def test_unknown_norms_and_negative_variances_are_refused():
    known = r"norm='guard' is not known.*'guarded', 'published'"
    with pytest.raises(ValueError, match=known):
        laplace_bridge(np.ones(3), np.ones((3, 3)), norm="guard")
    for cov, project in (
        (np.diag([1, -0.1, 1]), True),
        (np.array([1, -0.1, 1]), False),
    ):
        with pytest.raises(ValueError, match="cov is not positive semidefinite"):
            laplace_bridge(np.zeros(3), cov, project=project)
