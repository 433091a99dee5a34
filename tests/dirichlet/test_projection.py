"""The projection: the Dirichlet closest to Gaussian logits.

`test_dirichlet` tests the properties that the Laplace bridge shares.
"""

import numpy as np
import pytest
import torch
from cases import normal
from gaussians import KINDS, arrays, sampled_gap
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import digamma, gammaln, log_softmax, polygamma, softmax

from sklaplace import dirichlet
from sklaplace.dirichlet import kl_projection, laplace_bridge, logits
from sklaplace.dirichlet.links import mc

pytestmark = pytest.mark.usefixtures("rng_untouched")


def expected_logs(alpha):
    """Return ``E[log π]`` of a Dirichlet."""
    return digamma(alpha) - digamma(alpha.sum(-1, keepdims=True))


# What defines it


@pytest.mark.parametrize("n_classes", [2, 3, 10, 65, 66, 300])
@pytest.mark.parametrize("sd", [0.01, 0.3, 1.0, 8.0, 1e3, 1e10])
def test_expected_logarithms_are_those_of_the_arrays(n_classes, sd):
    """They agree up to one number per row, the approximation of E[logsumexp]."""
    mean, cov = arrays(10, n_classes, sd=sd)
    centred = logits.centre(torch.tensor(mean), torch.tensor(cov))
    log_proba = centred[0].log_softmax(-1)
    gap = logits.logsumexp_gap(log_proba, logits.centred_factor(centred[1])).numpy()
    wanted = log_proba.numpy() - gap
    found = expected_logs(kl_projection(mean, cov))
    # Newton's last step leaves the square of 1e-4; where totals are large, rounding
    # of log α = 1e-16 · 20 is multiplied by α / (A - α) · (K - 1) / A, below one
    np.testing.assert_allclose(found, wanted, rtol=1e-7, atol=1e-13)


def test_two_classes_by_a_solver():
    """The reference is E[log sigmoid] by Gauss-Hermite quadrature with many nodes."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    weights = weights / weights.sum()
    for gap, sd in [(0.0, 0.3), (1.0, 1.0), (-3.0, 2.0), (5.0, 0.1)]:
        f = gap + sd * nodes
        wanted = weights @ np.stack([-np.logaddexp(0, -f), -np.logaddexp(0, f)], 1)
        mean, cov = np.array([gap, 0]), np.diag([sd**2, 0])
        # six points err by 1 % of E[logsumexp] - logsumexp for the widest
        found = expected_logs(kl_projection(mean, cov))
        softest = log_softmax(mean)
        np.testing.assert_allclose(found - softest, wanted - softest, rtol=0.02)


@pytest.mark.parametrize("n_classes", [2, 3, 50, 100])
def test_mean_tends_to_the_softmax(n_classes):
    mean, cov = arrays(6, n_classes, seed=1)
    plain = softmax(mean, axis=-1)
    errors = [
        np.abs(dirichlet.mean(kl_projection(mean, scale * cov)) / plain - 1).max()
        for scale in (1e-4, 1e-6)
    ]
    # in proportion to the covariance
    assert errors[0] < 0.2
    assert errors[0] / errors[1] == pytest.approx(100, rel=0.05)
    nothing = kl_projection(mean, 0 * cov)
    # where the cap acts, each concentration has half of one too many: 5e-10 of it
    np.testing.assert_allclose(dirichlet.mean(nothing), plain, rtol=1e-6, atol=1e-9)
    # the cap: rounding of digamma there is 1e-15 of what decides on the total, 1e-9
    np.testing.assert_allclose(nothing.sum(-1), 1e9, rtol=1e-5)


def test_total_tends_to_that_of_small_covariances():
    """In the limit ``A ≈ (K − 1) / (2 gap)``, and the gap is half the curvature."""
    mean, cov = arrays(6, 4, sd=1e-3)
    p = softmax(mean, axis=-1)
    own = np.einsum("bk,bkk->b", p, cov)
    gap = (own - np.einsum("bi,bij,bj->b", p, cov, p)) / 2
    total = kl_projection(mean, cov).sum(-1)
    np.testing.assert_allclose(total, 3 / (2 * gap), rtol=1e-4)


@given(
    n_classes=st.integers(2, 70),
    seed=st.integers(0, 2**31),
    log_mean=st.floats(-6, 6),
    log_scale=st.floats(-12, 12),
)
def test_most_probable_class_stays(n_classes, seed, log_mean, log_scale):
    rng = np.random.default_rng(seed)
    mean = 10**log_mean * rng.normal(size=n_classes)
    factor = rng.normal(size=(n_classes, n_classes))
    alpha = kl_projection(mean, 10**log_scale * factor @ factor.T)
    # where the means differ by rounding of what is subtracted from them, so may these
    assert alpha[mean.argmax()] >= alpha.max() * (1 - 1e-12)
    order = mean.argsort()
    assert (np.diff(alpha[order]) >= -1e-12 * alpha.max()).all()


@pytest.mark.parametrize("n_classes", [2, 3, 20, 80])
def test_what_the_softmax_ignores_changes_nothing(n_classes):
    mean, cov = arrays(5, n_classes)
    expected = kl_projection(mean, cov)
    tilt = 0.1 * mean
    for other in (
        (mean - 30, cov),
        (mean + 1e4, cov),
        (mean, cov + 1e4),
        # with a common variance that keeps it positive semidefinite
        (mean, cov + tilt[:, :, None] + tilt[:, None] + 100),
    ):
        # rounding of 1e4 against one
        np.testing.assert_allclose(kl_projection(*other), expected, rtol=1e-8)


# Input and output


@pytest.mark.parametrize("n_classes", [3, 70])
def test_rows_do_not_depend_on_each_other(n_classes):
    mean, cov = arrays(40, n_classes)
    cov *= np.logspace(-4, 6, 40)[:, None, None]  # some settle later than others
    together = kl_projection(mean, cov)
    order = np.random.default_rng(1).permutation(40)
    np.testing.assert_allclose(
        kl_projection(mean[order], cov[order]), together[order], rtol=1e-10
    )
    singly = [kl_projection(*row) for row in zip(mean, cov, strict=True)]
    np.testing.assert_allclose(singly, together, rtol=1e-10)


@pytest.mark.parametrize("n_classes", [3, 70])
def test_gradients_are_finite_without_covariance(n_classes):
    mean = torch.tensor(arrays(2, n_classes)[0], requires_grad=True)
    cov = torch.zeros(2, n_classes, n_classes).double().requires_grad_()
    share = dirichlet.mean(kl_projection(mean, cov))[:, 0]
    gradients = torch.autograd.grad(share.sum(), (mean, cov))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    # those of the softmax
    (expected,) = torch.autograd.grad(mean.softmax(-1)[:, 0].sum(), mean)
    torch.testing.assert_close(gradients[0], expected, rtol=1e-6, atol=1e-12)


# How close it is


def inverse_digamma(y):
    """Invert digamma by five Newton steps from Minka's start, to 14 digits."""
    x = np.where(y >= -2.22, np.exp(y) + 0.5, -1 / (y - digamma(1)))
    for _ in range(6):
        x = x - (digamma(x) - y) / polygamma(1, x)
    return x


def closest(expected):
    """Solve ``ψ(α) − ψ(A) = E[log π]`` for the concentrations, by bisection for A."""

    def excess(log_total):
        alpha = inverse_digamma(digamma(np.exp(log_total)) + expected)
        return np.log(alpha.sum()) - log_total

    total = np.exp(brentq(excess, -25, 25, xtol=1e-12))
    return inverse_digamma(digamma(total) + expected)


def kl(alpha, expected, entropy):
    """Return ``KL(p ‖ Dir(α))`` for a distribution with this ``E[log π]``, in nats."""
    normaliser = gammaln(alpha).sum() - gammaln(alpha.sum())
    return -entropy + normaliser - (alpha - 1) @ expected


def entropy_of(cov, expected):
    """Return the entropy of the softmax of a Gaussian in the first K − 1 probabilities.

    The entropy follows from the differences to the last logit. The Jacobian is the
    product of all probabilities.
    """
    differences = cov[:-1, :-1] - cov[-1, :-1] - cov[:-1, -1:] + cov[-1, -1]
    _, log_volume = np.linalg.slogdet(2 * np.pi * np.e * differences)
    return log_volume / 2 + expected.sum()


# classes, rows for each standard deviation, points
SIZES = [(2, 3, 4096), (3, 3, 4096), (5, 2, 4096), (10, 2, 4096), (30, 1, 2048)]
SIZES += [(65, 1, 1024), (66, 1, 1024), (200, 1, 512)]
SDS = [0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n_classes", "rows", "n_points"), [*SIZES, (1000, 1, 256)], ids=str
)
def test_is_close_to_the_closest(kind, n_classes, rows, n_points):
    """In 606 cases, the result is within 1 % or 0.02 nats of the optimum.

    A Laplace bridge is therefore never better by more than this.
    """
    rng = np.random.default_rng(n_classes)
    for sd in SDS if n_classes < 1000 else [0.1, 2.0, 8.0]:
        mean = torch.tensor(2 * rng.normal(size=(rows, n_classes)))
        A = torch.tensor(rng.normal(size=(rows, n_classes, n_classes)))
        cov = sd**2 * KINDS[kind](A)
        gaps, errors = sampled_gap(mean, cov, n_points).numpy()
        mean, cov = mean.numpy(), cov.numpy()
        found = kl_projection(mean, cov)
        bridged = [laplace_bridge(mean, cov, project=p) for p in (False, True)]
        for i in range(rows):
            expected = log_softmax(mean[i]) - gaps[i]
            entropy = entropy_of(cov[i], expected)
            best = kl(closest(expected), expected, entropy)
            allowed = max(0.01 * best, 0.02)
            # a relative error in the gap costs (K - 1) / 4 times its square, at most
            assert n_classes / 4 * (errors[i] / gaps[i]) ** 2 < 0.1 * allowed
            assert best > 0
            here = kl(found[i], expected, entropy)
            assert best - 1e-6 <= here + 1e-8 * abs(best) <= best + allowed
            for other in bridged:
                assert here <= kl(other[i], expected, entropy) + allowed


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("n_classes", [3, 10, 100])
def test_singular_covariances_in_single_precision(rank, n_classes):
    """For example, a small ensemble's covariance is indefinite after rounding."""
    generator = torch.Generator().manual_seed(rank)
    A = torch.randn(6, n_classes, rank, generator=generator)
    mean = torch.randn(6, n_classes, generator=generator)
    cov = A @ A.mT / rank
    exact = A.double() @ A.double().mT / rank
    found, expected = kl_projection(mean, cov), kl_projection(mean.double(), exact)
    # entries of cov are off by 1e-7; a root of that is what the points may move by
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("diagonal", [[1.0, 1.0, -0.5], [-1.0, -1.0, -1.0]])
def test_negative_variances_are_refused_before_centring_hides_them(diagonal):
    """The second covariances belong to a common shift, which affects no class."""
    cov = np.full((3, 3), min(diagonal)) if diagonal[0] < 0 else np.diag(diagonal)
    with pytest.raises(ValueError, match="cov is not positive semidefinite"):
        kl_projection(np.zeros(3), cov)


@pytest.mark.parametrize(("dtype", "exponent"), [("float32", 6), ("float64", 14)])
def test_a_huge_common_variance_is_not_taken_for_a_negative_one(dtype, exponent):
    """Centring leaves rounding errors of the common variance."""
    roots = np.random.default_rng(0).normal(size=(40, 5, 2))
    cov = (roots @ roots.swapaxes(1, 2) + 10.0**exponent).astype(dtype)
    assert np.isfinite(kl_projection(np.zeros((40, 5), dtype), cov)).all()
    proba = mc(*map(torch.from_numpy, (np.zeros((40, 5), dtype), cov)), normal(20, 5))
    assert proba.isfinite().all()


def test_gradients_after_inference_mode():
    """No other test uses this number of classes, so its points are not yet cached."""
    mean, root = normal(2, 29), normal(2, 29, 29, seed=1)
    cov = root @ root.mT
    with torch.inference_mode():
        kl_projection(mean.clone(), cov.clone())
    mean.requires_grad_()
    kl_projection(mean, cov).log().sum().backward()
    assert mean.grad.isfinite().all()
