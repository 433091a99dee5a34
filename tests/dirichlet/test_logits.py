"""Gaussians over logits: centring, factors, chunks and the integral over logits."""

import pytest
import torch
from cases import normal
from gaussians import gaussian, sampled_gap, second_order
from hypothesis import given
from hypothesis import strategies as st

from sklaplace.dirichlet import logits
from sklaplace.dirichlet.logits import (
    centre,
    centred_factor,
    centred_moments,
    gap_of_many,
    logsumexp_gap,
)

pytestmark = pytest.mark.usefixtures("rng_untouched")

every_kind = pytest.mark.parametrize("kind", ["wishart", "diagonal", "low rank"])


def gap_of(mean, cov):
    """Return `logsumexp_gap` (b,) of an uncentred Gaussian."""
    mean, centred = centre(mean, cov)
    factor = centred_factor(centred, cov)
    return logsumexp_gap(mean.log_softmax(-1), factor).squeeze(-1)


# Centring


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_classes", [1, 2, 6])
def test_centre_multiplies_by_the_centring_matrix(n_classes, dtype):
    mean, cov = gaussian(4, n_classes, dtype=dtype)
    centring = torch.eye(n_classes, dtype=torch.float64) - 1 / n_classes
    centred_mean, centred_cov = centre(mean, cov)
    torch.testing.assert_close(centred_mean, mean.double() @ centring)
    torch.testing.assert_close(centred_cov, centring @ cov.double() @ centring)
    again = centre(centred_mean, centred_cov)
    torch.testing.assert_close(again, (centred_mean, centred_cov))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("common", [0.1, 1e12 / 3])
def test_centre_leaves_nothing_of_a_common_shift(common, dtype):
    cov = torch.full((2, 1000, 1000), common, dtype=dtype)
    assert torch.equal(centre(cov[:, 0], cov)[1], torch.zeros_like(cov).double())
    _, variances = centred_moments(cov[:, 0], cov)
    assert torch.equal(variances, torch.zeros(2, 1000, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_classes", [1, 2, 6])
def test_moments_are_those_of_the_centred_gaussian(n_classes, dtype):
    mean, cov = gaussian(4, n_classes, dtype=dtype)
    centred_mean, centred_cov = centre(mean, cov)
    found_mean, variances = centred_moments(mean, cov)
    torch.testing.assert_close(found_mean, centred_mean)
    diagonal = centred_cov.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(variances, diagonal)
    # variances alone are taken as those of centred logits
    torch.testing.assert_close(centred_moments(mean, diagonal)[1], diagonal)


# Factors


@every_kind
@pytest.mark.parametrize("n_classes", [1, 2, 3, 20])
def test_factor_is_a_root(n_classes, kind):
    _, cov = centre(*gaussian(5, n_classes, kind))
    factor = centred_factor(cov)
    assert factor.shape == (5, n_classes, n_classes - 1)
    # each entry of the diagonal has a jitter of 1e-10 of the largest, and the last by
    # K - 1 of them
    largest = float(cov.diagonal(dim1=-2, dim2=-1).max())
    bound = 1.01e-10 * n_classes * largest
    torch.testing.assert_close(factor @ factor.mT, cov, rtol=0, atol=bound)
    assert (factor.sum(-2).abs() <= 1e-12 * largest**0.5).all()


@given(
    n_classes=st.integers(2, 8),
    rank=st.integers(0, 7),
    seed=st.integers(0, 2**31),
    log_scale=st.integers(-150, 298),
)
def test_factor_of_singular_matrices(n_classes, rank, seed, log_scale):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(1, n_classes, rank, generator=generator, dtype=torch.float64)
    A = A - A.mean(-2, keepdim=True)
    cov = 10.0 ** (log_scale / 2) * A @ (10.0 ** (log_scale / 2) * A.mT)
    factor = centred_factor(cov)
    assert factor.isfinite().all()
    bound = 2e-10 * n_classes * float(cov.abs().max()) + 1e-199
    torch.testing.assert_close(factor @ factor.mT, cov, rtol=0, atol=bound)


# Chunks


# The gap


@every_kind
@pytest.mark.parametrize("n_classes", [2, 3, 10, 64, 65, 66, 100, 300])
def test_small_gaps_are_half_the_curvature(n_classes, kind):
    """Above 65 classes this needs the control variate."""
    mean, cov = gaussian(6, n_classes, kind, sd=1e-3)
    # what follows is smaller by Σ, 1e-6 times a kurtosis: 1e-6 measured for Wishart
    # matrices, 7e-5 for variances that differ by a factor of a thousand
    torch.testing.assert_close(
        gap_of(mean, cov), second_order(*centre(mean, cov)), rtol=2e-4, atol=0
    )


# Fractions of the gap. Errors measured are .03, .09, .10 and .11 of it: few points err
# where few directions matter, and where logsumexp is a maximum, which has kinks.
BOUNDS = {0.1: 0.05, 1.0: 0.14, 4.0: 0.15, 8.0: 0.17}


@every_kind
@pytest.mark.parametrize("sd", BOUNDS)
@pytest.mark.parametrize("n_classes", [2, 3, 10, 100])
def test_gap_is_near_that_of_many_draws(n_classes, sd, kind):
    mean, cov = gaussian(20, n_classes, kind, sd)
    found = gap_of(mean, cov)
    n_points = 4096 if n_classes <= 10 else 1024
    expected, error = sampled_gap(mean, cov, n_points)
    off = (found - expected).abs() - 3 * error
    assert (off <= BOUNDS[sd] * expected).all()
    # on average nearer: .042 measured, for two classes and the largest variance
    bias = ((found - expected) / expected).mean()
    assert bias.abs() <= BOUNDS[sd] / 3 + (error / expected).mean()


def clustered(rows, n_classes, sd, seed=0):
    """Return means and covariances with strong correlations within groups of four.

    The classes of a group are equally probable, as classes that are easily confused.
    """
    mean, cov = gaussian(rows, n_classes, "diagonal", sd, seed=seed)
    group = torch.arange(n_classes) // 4
    common = sd**2 * (group == group.unsqueeze(1)).double()
    return 2 * mean[:, 4 * group], cov / 10 + common


def gap_of_leading(mean, cov, n_leading=16):
    """Return `gap_of_many` with the covariances among the most probable classes."""
    leading = mean.topk(n_leading).indices
    rows = torch.arange(len(mean))[:, None, None]
    among = cov[rows, leading.unsqueeze(2), leading.unsqueeze(1)]
    variances = cov.diagonal(dim1=-2, dim2=-1)
    return gap_of_many(mean.log_softmax(-1), variances, leading, among).squeeze(-1)


@pytest.mark.parametrize("kind", ["clustered", "diagonal", "isotropic", "two wide"])
@pytest.mark.parametrize("sd", BOUNDS)
@pytest.mark.parametrize("n_classes", [101, 300])
def test_gap_of_many_classes(n_classes, sd, kind):
    """The largest error measured is 0.09, and as a mean over samples 0.05."""
    if kind == "clustered":
        mean, cov = clustered(10, n_classes, sd)
    else:
        mean, cov = gaussian(10, n_classes, kind, sd)
    found = gap_of_leading(mean, cov)
    expected, error = sampled_gap(mean, cov, 1024)
    assert ((found - expected).abs() <= BOUNDS[sd] * expected + 3 * error).all()
    bias = ((found - expected) / expected).mean()
    assert bias.abs() <= 0.07 + (error / expected).mean()


def test_small_gaps_of_many_classes_are_half_the_curvature():
    mean, cov = gaussian(6, 120, "diagonal", sd=1e-3)
    # correlated among the leading classes only, so that nothing is left out
    leading = mean.topk(16).indices
    root = torch.zeros_like(mean).scatter(1, leading, 1e-3).unsqueeze(-1)
    cov = cov + root @ root.mT
    expected = second_order(mean, cov)
    torch.testing.assert_close(gap_of_leading(mean, cov), expected, rtol=2e-4, atol=0)


def test_gap_of_many_classes_in_any_basis():
    """Equal eigenvalues have many eigenvectors, among which rounding chooses."""
    mean, cov = gaussian(3, 120, "isotropic", sd=4.0)
    rounded = cov + 1e-15 * normal(3, 120, 120)
    torch.testing.assert_close(
        gap_of_leading(mean, rounded + rounded.mT), gap_of_leading(mean, 2 * cov)
    )


def test_gap_of_a_hundred_thousand_classes():
    """No matrix over all classes is formed."""
    mean = normal(1, 100_000)
    among = torch.eye(16).double().unsqueeze(0)
    leading = mean.topk(16).indices
    gap = gap_of_many(mean.log_softmax(-1), torch.ones_like(mean), leading, among)
    # of so many independent logits, the sum of exponentials hardly varies
    assert float(gap) == pytest.approx(0.5, abs=0.01)


@given(
    n_classes=st.sampled_from([2, 3, 7, 66, 80]),
    rank=st.integers(0, 7),
    seed=st.integers(0, 2**31),
    log_mean=st.integers(-6, 6),
    log_scale=st.integers(-12, 12),
    log_common=st.integers(-12, 12),
)
def test_gap_is_not_negative(n_classes, rank, seed, log_mean, log_scale, log_common):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(1, n_classes, rank, generator=generator, dtype=torch.float64)
    mean = torch.randn(1, n_classes, generator=generator, dtype=torch.float64)
    mean *= 10.0**log_mean
    gap = gap_of(mean, 10.0**log_scale * A @ A.mT + 10.0**log_common)
    assert gap.isfinite().all()
    # rounding of the logarithms of improbable classes
    assert gap >= -1e-14 * max(1, float(mean.abs().max()))


@pytest.mark.parametrize("n_classes", [2, 3, 65, 66, 300])
@pytest.mark.parametrize("scale", [1e60, 1e100, 1e150])
def test_gap_is_finite_for_huge_factors(n_classes, scale):
    mean, cov = gaussian(3, n_classes)
    factor = centred_factor(centre(mean, cov)[1])
    log_proba = mean.log_softmax(-1)
    gap = logsumexp_gap(log_proba, scale * factor)
    assert gap.isfinite().all()
    # there logsumexp is the maximum, which grows with the factor
    twice = logsumexp_gap(log_proba, 2 * scale * factor)
    torch.testing.assert_close(twice, 2 * gap)
    one_hot = torch.full_like(log_proba, -1e100)
    one_hot[:, 0] = 0
    assert logsumexp_gap(one_hot, scale * factor).isfinite().all()


def test_gap_with_control_variate_is_differentiable():
    mean, cov = centre(*gaussian(1, 67))
    factor = centred_factor(cov)

    def gap(scale):
        return logsumexp_gap(mean.log_softmax(-1), scale * factor)

    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gap, [scale])


# Its points


def test_independent_points_fill_all_intervals():
    """Each coordinate has one point, or its negative, in each of 128 intervals."""
    half, weights = logits._latin_hypercube(300)
    points = torch.cat([half, -half])
    ranks = (128 * torch.special.ndtr(points)).floor().sort(0).values
    expected = torch.arange(128).double().unsqueeze(1).expand(-1, 300)
    torch.testing.assert_close(ranks, expected)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-14)
    # coordinates are independent: the largest of 300 · 299 / 2 correlations
    correlations = torch.corrcoef(points.T).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / 64**0.5
    # every process has the same points, in any mode and with any default device
    with torch.inference_mode(), torch.device("meta"):
        again, _ = logits._latin_hypercube.__wrapped__(300)
    assert torch.equal(again, half)
    assert not again.is_inference()


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 9, 30, 64, 65, 200])
def test_points_integrate_what_they_claim(dim):
    points, weights = logits._rule(dim)
    assert points.dtype == weights.dtype == torch.float64
    assert (weights > 0).all()
    assert float(weights.sum()) == pytest.approx(1, abs=1e-14)
    squares = points.square().sum(-1)
    # moments of χ²: the rule is exact to degree 2n - 1 in r²
    moment = 1.0
    for power in range(1, 6 if dim <= 8 else 4):
        moment *= dim + 2 * (power - 1)
        assert float(weights @ squares**power) == pytest.approx(moment, rel=1e-12)
    if dim <= 64:
        second = torch.einsum("s,si,sj->ij", weights, points, points)
        identity = torch.eye(dim, dtype=torch.float64)
        torch.testing.assert_close(second, identity, rtol=0, atol=1e-13)
