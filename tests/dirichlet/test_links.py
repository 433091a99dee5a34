import itertools
import math

import numpy as np
import pytest
import torch
from cases import DOUBLE, generator, normal
from gaussians import assert_slope, gaussian
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from sklaplace import dirichlet
from sklaplace.core.random import sobol_normals
from sklaplace.dirichlet import links
from sklaplace.dirichlet.links import LINKS, choose_link
from sklaplace.dirichlet.logits import centre

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("rng_untouched")]

every_link = pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())
# What depends on a common shift of the logits has tests of its own.
centring_links = pytest.mark.parametrize(
    "link", [link for link in LINKS.values() if link.centred]
)
# The Laplace bridge does not tend to the softmax.
exact_links = pytest.mark.parametrize(
    "name", sorted(LINKS.keys() - {"bridge", "bridge_norm", "probit_uncentred"})
)


def asked(link, mean, cov, n_samples=20):
    """Return probabilities, with the given number of points if the link uses points."""
    return link(mean, cov, sobol_normals(n_samples, mean.shape[-1], 0))


def plain_mc(mean, cov, n_draws, seed=0):
    """Return the average softmax over independent draws, and its standard error."""
    draws = normal(n_draws, mean.shape[-1], seed=seed)
    factor = torch.linalg.cholesky(cov)
    proba = (mean.unsqueeze(-2) + draws @ factor.mT).softmax(-1)  # (b, s, K)
    return proba.mean(-2), proba.std(-2) / math.sqrt(n_draws)


def error(proba, reference):
    """Return the absolute differences, summed over classes and averaged over rows."""
    return (proba - reference).abs().sum(-1).mean()


# Contracts: over the registry


@pytest.mark.parametrize("name", ["gumbel", "mc"])
@pytest.mark.parametrize(("offset", "variance"), [(1e6, 1), (1e39, 1), (1e6, 1e80)])
def test_scores_beyond_the_range_of_single_precision(name, variance, offset):
    mean = torch.tensor([[offset, offset - 3, 0.0]], dtype=DOUBLE)
    cov = variance * torch.eye(3, dtype=DOUBLE)[None]
    expected = asked(LINKS[name], mean, cov)
    found = asked(LINKS[name].score, mean, cov)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("sd", [0.1, 3.0])
@pytest.mark.parametrize("n_classes", [2, 10])
def test_links_for_scores_are_the_same_in_single_precision(name, sd, n_classes):
    mean, cov = gaussian(50, n_classes, sd=sd)
    expected = asked(LINKS[name], mean, cov)
    found = asked(LINKS[name].score, mean, cov)
    assert found.dtype == DOUBLE
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@every_link
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_classes", [1, 2, 3, 20])
def test_rows_are_probabilities_and_inputs_stay(link, n_classes, dtype):
    mean, cov = gaussian(7, n_classes, dtype=dtype)
    draws = sobol_normals(10, n_classes, 0)
    copies = [tensor.clone() for tensor in (mean, cov, draws)]
    proba = link(mean, cov, draws)
    assert proba.shape == (7, n_classes)
    assert proba.dtype == torch.float64
    assert (proba >= 0).all()
    torch.testing.assert_close(proba.sum(-1), torch.ones(7, dtype=DOUBLE))
    for tensor, copy in zip((mean, cov, draws), copies, strict=True):
        assert torch.equal(tensor, copy)


@centring_links
@pytest.mark.parametrize("n_classes", [2, 3, 10])
def test_what_the_softmax_ignores_changes_nothing(link, n_classes):
    mean, cov = gaussian(5, n_classes)
    expected = asked(link, mean, cov)
    for shift in (-30.0, 1e4):
        shifted = asked(link, mean + shift, cov)
        torch.testing.assert_close(shifted, expected, rtol=1e-9, atol=1e-9)
    for common in (1.0, 1e4):
        wider = asked(link, mean, cov + common)
        torch.testing.assert_close(wider, expected, rtol=1e-8, atol=1e-8)
    # A common shift that is correlated with the logits is no more visible.
    direction = 0.1 * mean
    tilted = cov + direction.unsqueeze(-1) + direction.unsqueeze(-2)
    torch.testing.assert_close(asked(link, mean, tilted), expected)
    torch.testing.assert_close(asked(link, *centre(mean, cov)), expected)


@every_link
def test_rows_do_not_depend_on_each_other(link):
    mean, cov = gaussian(23, 4)
    together = asked(link, mean, cov, 50)
    singly = [asked(link, mean[[row]], cov[[row]], 50) for row in range(len(mean))]
    torch.testing.assert_close(together, torch.cat(singly), rtol=1e-12, atol=1e-14)


# Draws are not symmetric in the classes.
@pytest.mark.parametrize(
    "name", sorted(n for n, link in LINKS.items() if not link.draws)
)
def test_permuting_the_classes_permutes_the_probabilities(name):
    mean, cov = gaussian(5, 4)
    order = torch.tensor([2, 0, 3, 1])
    permuted = asked(LINKS[name], mean[:, order], cov[:, order][:, :, order])
    torch.testing.assert_close(permuted, asked(LINKS[name], mean, cov)[:, order])


@pytest.mark.slow
@every_link
@given(
    n_classes=st.integers(1, 5),
    rank=st.integers(0, 5),
    seed=st.integers(0, 2**31),
    log_mean=st.integers(-6, 6),
    log_scale=st.integers(-12, 12),
    log_common=st.integers(-12, 12),
)
def test_finite_over_many_orders_of_magnitude(
    link, n_classes, rank, seed, log_mean, log_scale, log_common
):
    source, shape = generator(seed), (1, n_classes, min(rank, n_classes))
    factor = torch.randn(shape, generator=source, dtype=DOUBLE)
    cov = 10.0**log_scale * factor @ factor.mT + 10.0**log_common
    mean = torch.randn(1, n_classes, generator=source, dtype=DOUBLE)
    mean *= 10.0**log_mean
    proba = asked(link, mean, cov, 4)
    assert proba.isfinite().all()
    assert (proba >= 0).all()
    assert abs(proba.sum() - 1) < 1e-12


@every_link
@pytest.mark.parametrize("n_classes", [2, 3, 6])
@pytest.mark.parametrize("sd", [0.1, 1.0, 3.0])
def test_derivatives_are_those_of_finite_differences(link, n_classes, sd):
    # Central differences err by step²/6 of a third derivative, of size one, and by
    # rounding of 1e-16/step. The quadrature of gumbel errs by up to 1e-3 on scales of
    # one, depending on its nodes, which are constants to autograd.
    mean, cov = gaussian(3, n_classes, seed=1, sd=sd)
    weights, move = normal(2, 3, n_classes, seed=2)
    turn = normal(*cov.shape, seed=3)
    turn = cov.mean() * (turn + turn.mT) / 4

    def value(step):
        return (weights * asked(link, mean + step * move, cov + step * turn)).sum()

    tolerance = 1e-3 if link is LINKS["gumbel"] else 1e-7
    assert_slope(value, tolerance, tolerance)


@every_link
@pytest.mark.parametrize("largest", [0.0, 40.0, 1e4])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_derivatives_are_finite(link, largest, scale):
    mean = torch.tensor([[largest, 0.0, -1.0, -largest]]).double().requires_grad_()
    cov = (scale * torch.diag(torch.tensor([1.0, 2, 3, 4])).double())[None]
    cov.requires_grad_()
    proba = asked(link, mean, cov)
    for gradient in torch.autograd.grad(proba[0, 0] - proba[0, 1], (mean, cov)):
        assert gradient.isfinite().all()


@every_link
@pytest.mark.parametrize("scale", [0.0, 1e-299, 1e299])
@pytest.mark.parametrize("largest", [0.0, 1e300])
def test_finite_at_the_limits_of_float64(link, scale, largest):
    mean = torch.tensor([[largest, -largest, 0]], dtype=DOUBLE)
    cov = scale * torch.eye(3, dtype=DOUBLE).expand(1, 3, 3)
    proba = asked(link, mean, cov)
    assert proba.isfinite().all()
    assert abs(proba.sum() - 1) < 1e-12


# What single links claim


@exact_links
@pytest.mark.parametrize("n_classes", [2, 3, 50])
def test_zero_covariance_gives_the_softmax(name, n_classes):
    mean, cov = gaussian(5, n_classes)
    for nothing in (0 * cov, torch.full_like(cov, 1e12)):
        proba = asked(LINKS[name], mean, nothing)
        torch.testing.assert_close(proba, mean.softmax(-1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("n_classes", [2, 3, 10])
def test_mc_agrees_with_plain_sampling(n_classes):
    mean, cov = gaussian(8, n_classes, sd=1.5)
    reference, standard_error = plain_mc(mean, cov, 40_000)
    proba = asked(links.mc, mean, cov, 8192)
    # Points that cover space evenly err less than as many random ones, so the
    # error is at most that of two independent estimates, five deviations wide.
    bound = 5 * standard_error * (1 + math.sqrt(40_000 / 8192))
    assert ((proba - reference).abs() <= bound).all()


@pytest.mark.parametrize("n_classes", [3, 10, 16])
@pytest.mark.parametrize("common", [1e4, 1e8])
def test_mc_keeps_the_order_of_classes_under_a_large_common_variance(n_classes, common):
    """All classes are nearly equal, and a hundred plain draws would shuffle them."""
    mean, cov = gaussian(50, n_classes, sd=1.5)
    mean = mean.argsort(1).argsort(1).to(mean)  # clear differences
    for shift in (0, 1e3):  # a common shift of all logits changes nothing
        wide = cov + common * torch.eye(n_classes) + shift
        proba = asked(links.mc, mean, wide.to(cov), 100)
        assert (proba.argmax(1) == mean.argmax(1)).all()
        assert (proba - 1 / n_classes).abs().max() < n_classes / common**0.5


def test_mc_with_and_without_a_closed_form_agree():
    """The number of draws decides which part of a common variance is drawn."""
    mean, cov = gaussian(50, 4, sd=1.5)
    wide = cov + 60 * torch.eye(4, dtype=cov.dtype)
    reference = asked(links.mc, mean, wide, 8192)  # draws everything
    errors = [error(asked(links.mc, mean, wide, n), reference) for n in (32, 8192 // 4)]
    # The closed form is exact only for small and for equal means.
    assert errors[0] < 0.05
    assert errors[1] < 0.01


@pytest.mark.parametrize("n_classes", range(2, 8))
def test_common_scales_are_those_of_the_expected_maximum(n_classes):
    x, weights = np.polynomial.hermite_e.hermegauss(150)
    density = n_classes * norm.cdf(x) ** (n_classes - 1) / math.sqrt(2 * math.pi)
    factor = ((1 - 1 / n_classes) / (weights @ (x * density))) ** 2
    assert links._COMMON_SCALES[n_classes] == pytest.approx(factor, abs=6e-5)


@pytest.mark.parametrize("sd", [1.0, 4.0])
def test_mean_field_is_near_exact_for_two_classes(sd):
    mean, cov = gaussian(50, 2, sd=sd)
    reference = asked(links.mc, mean, cov, 8192)
    # MacKay's approximation of the logistic-Gaussian integral errs by up to .02
    # per class.
    proba = asked(links.mean_field, mean, cov)
    assert (proba - reference).abs().max() < 0.02
    assert error(proba, reference) < 0.01


@pytest.mark.parametrize("n_classes", [2, 3, 10])
def test_the_published_probit_is_the_formula_of_logits_as_they_are(n_classes):
    mean, cov = gaussian(5, n_classes)
    variances = cov.diagonal(dim1=-2, dim2=-1)
    for common in (0.0, 10.0):
        scale = (1 + math.pi / 8 * (variances + common)).sqrt()
        expected = (mean / scale).softmax(-1)
        for moments in (cov + common, variances + common):
            proba = asked(links.probit_uncentred, mean, moments)
            torch.testing.assert_close(proba, expected)
    proba = asked(links.probit_uncentred, mean, 0 * cov)
    torch.testing.assert_close(proba, mean.softmax(-1))
    centred = centre(mean, cov)
    torch.testing.assert_close(
        asked(links.probit_uncentred, *centred), asked(links.probit, mean, cov)
    )


def test_closed_forms_equal_their_formulas():
    mean, cov = gaussian(1, 3)
    m, s = (tensor[0] for tensor in centre(mean, cov))
    expected = (m / (1 + math.pi / 8 * s.diagonal()).sqrt()).softmax(-1)
    torch.testing.assert_close(asked(links.probit, mean, cov)[0], expected)
    odds = torch.zeros(3, dtype=DOUBLE)
    for k, j in itertools.product(range(3), repeat=2):
        spread = s[k, k] + s[j, j] - 2 * s[k, j]
        odds[k] += torch.exp(-(m[k] - m[j]) / (1 + math.pi / 8 * spread).sqrt())
    expected = (1 / odds) / (1 / odds).sum()
    torch.testing.assert_close(asked(links.mean_field, mean, cov)[0], expected)
    mean, cov = gaussian(1, 3, sd=0.3)
    p, v = mean[0].softmax(-1), cov[0].diagonal()
    expected = p * (1 + p @ cov[0] @ p - cov[0] @ p + v / 2 - p @ v / 2)
    torch.testing.assert_close(asked(links.sodpp, mean, cov)[0], expected)


@pytest.mark.parametrize(
    ("name", "norm"), [("bridge", None), ("bridge_norm", "guarded")]
)
@pytest.mark.parametrize("sd", [0.1, 5.0])
def test_bridges_are_means_of_the_dirichlet(name, norm, sd):
    mean, cov = gaussian(6, 4, sd=sd)
    alpha = dirichlet.laplace_bridge(*centre(mean, cov), norm=norm)
    proba = asked(LINKS[name], mean, cov)
    torch.testing.assert_close(proba, dirichlet.mean(alpha))


# Choice


def test_choice_is_a_link_and_follows_the_rule():
    small = [(k, n) for k in (3, 16) for n in (1, 49)]
    rule = {
        "mean_field": [(1,), (2,), (2, 1), (2, 49), (2, 50)],
        "mc": [(3,), (16,), (3, 50), (16, 50)],
        "gumbel": [(17,), (1000,), *small, (17, 1), (17, 49), (17, 50)],
    }
    assert rule.keys() <= LINKS.keys()
    for name, cases in rule.items():
        assert {choose_link(*case) for case in cases} == {name}


KINDS = {
    # nothing in common, and variances that differ; few factors; random matrices; those
    # of a last layer whose curvature is that of a softmax
    "diagonal": lambda A, p: torch.diag_embed((0.5 * A[:, 0]).exp()),
    "factors": lambda A, p: A[..., :3] @ A[..., :3].mT / 3 + 0.05 * torch.eye(len(p)),
    "wishart": lambda A, p: A @ A.mT / len(p),
    "softmax": lambda A, p: torch.linalg.inv(
        len(p) * (torch.diag(p) - torch.outer(p, p)) + 0.1 * torch.eye(len(p))
    ).expand(len(A), -1, -1),
}


def kind_of_gaussian(kind, rows, n_classes, sd, mean_scale=2):
    """Return means (b, K) and covariances (b, K, K) with mean centred variance sd²."""
    A = normal(rows, n_classes, n_classes, seed=n_classes)
    p = normal(n_classes, seed=n_classes + 1).softmax(-1)
    mean = mean_scale * normal(rows, n_classes, seed=n_classes + 2)
    cov = centre(mean, KINDS[kind](A, p).double())[1]
    variances = cov.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return mean, sd**2 * cov / variances


def assert_no_worse_than_probit(mean, cov, n_samples, points):
    n_classes = mean.shape[-1]
    reference = links.mc(mean, cov, sobol_normals(points, n_classes, 1))
    chosen, probit = (
        error(asked(LINKS[name], mean, cov, n_samples), reference)
        for name in (choose_link(n_classes, n_samples), "probit")
    )
    assert chosen <= probit + 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mean_scale", [2, 10])
@pytest.mark.parametrize("n_classes", [2, 3, 10, 16, 17, 60, 256])
def test_choice_is_never_worse_than_probit(kind, n_classes, mean_scale):
    # the reference errs, too: for many classes and large variances by .1, far below
    # what the links differ by
    for sd in (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0):
        rows = 40 if n_classes <= 20 else 6
        mean, cov = kind_of_gaussian(kind, rows, n_classes, sd, mean_scale)
        points = 8192 if n_classes <= 20 else 2048
        for n_samples in (4, 16, 100) if n_classes <= 16 else (100,):
            assert_no_worse_than_probit(mean, cov, n_samples, points)


@pytest.mark.parametrize("n_classes", [2, 3, 30])
def test_sodpp_errs_by_the_square_of_the_covariance(n_classes):
    mean, cov = gaussian(10, n_classes)
    draws = sobol_normals(4096, n_classes, 1)
    errors = [
        error(asked(links.sodpp, mean, small), links.mc(mean, small, draws))
        for small in (0.01 * cov, 0.04 * cov)
    ]
    assert errors[0] < 1e-4
    assert 10 < errors[1] / errors[0] < 20  # 16 in the limit
