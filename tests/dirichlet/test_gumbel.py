import math

import pytest
import torch
from cases import DOUBLE, normal
from gaussians import assert_slope

from sklaplace.dirichlet import gumbel, links, logits
from sklaplace.dirichlet.gumbel import argmax_proba
from sklaplace.dirichlet.logits import independent_variances


def filled(like, *first, rest):
    """Return variances whose first columns are given."""
    variances = torch.full_like(like, rest)
    variances[:, : len(first)] = torch.tensor(first, dtype=like.dtype)
    return variances


VARIANCES = {
    "narrow": lambda z: filled(z, rest=0.09),
    "medium": lambda z: filled(z, rest=16.0),
    "wide": lambda z: filled(z, rest=1e6),
    "log-normal": lambda z: (2 * z).exp(),
    "one wide": lambda z: filled(z, 1e4, rest=0.1),
    "one very wide": lambda z: filled(z, 1e8, rest=0.1),
    "one extremely wide": lambda z: filled(z, 1e12, rest=0.1),
    "two wide": lambda z: filled(z, 1e8, 1e3, rest=0.1),
    "few wide": lambda z: filled(z, *[100.0] * (1 + z.shape[1] // 60), rest=0.1),
    "one narrow": lambda z: filled(z, 0.01, rest=1e4),
}


@pytest.mark.parametrize("kind", VARIANCES)
@pytest.mark.parametrize("mean_scale", [2, 10, 20])
@pytest.mark.parametrize("n_classes", [2, 3, 10, 300, 1000])
def test_agrees_with_a_fine_quadrature(kind, mean_scale, n_classes):
    mean = mean_scale * normal(2, n_classes)
    variances = VARIANCES[kind](normal(2, n_classes, seed=1))
    proba = argmax_proba(mean, variances)
    fine = argmax_proba(mean, variances, 2048)
    # what the first nodes may miss, for gains and losses of single classes
    assert (proba - fine).abs().sum(-1).max() < 1e-3


@pytest.mark.parametrize("kind", VARIANCES)
@pytest.mark.parametrize("mean_scale", [2, 20])
@pytest.mark.parametrize("n_classes", [2, 10, 300, 1500])
def test_single_precision(kind, mean_scale, n_classes):
    mean = mean_scale * normal(20, n_classes)
    variances = VARIANCES[kind](normal(20, n_classes, seed=1))
    single = argmax_proba(mean, variances, dtype=torch.float32)
    error = (single - argmax_proba(mean, variances)).abs().sum(-1)
    # a sample whose sum is at the limit may be computed with twice as many nodes
    assert single.dtype == torch.float64
    assert error.max() < 1e-3
    assert error.median() < 1e-4


@pytest.mark.parametrize("kind", VARIANCES)
@pytest.mark.parametrize("mean_scale", [2, 10, 20])
@pytest.mark.parametrize("n_classes", [2, 10, 100])
def test_agrees_with_plain_sampling(kind, mean_scale, n_classes):
    mean = mean_scale * normal(1, n_classes)
    variances = VARIANCES[kind](normal(1, n_classes, seed=1))
    n_draws = 20_000
    drawn = (mean + variances.sqrt() * normal(n_draws, n_classes, seed=2)).softmax(-1)
    # a probability that is seen in no draw at all may still be a few in n_draws
    standard_error = drawn.std(0) / math.sqrt(n_draws) + 1 / n_draws
    difference = (argmax_proba(mean, variances)[0] - drawn.mean(0)).abs()
    assert (difference <= 0.003 + 5 * standard_error).all()


@pytest.mark.parametrize(
    ("mean", "variances", "expected"),
    [
        # a wide logit is the largest, or by far the smallest
        ([0, 0, 0], [1e6, 1, 1], [0.5, 0.25, 0.25]),
        ([0, 0, 0], [1e8, 0.1, 0.1], [0.5, 0.25, 0.25]),
        ([0, 20, 0], [1e8, 0.1, 0.1], [0.5, 0.5, 0.0]),
        ([-1e4, 20, 0], [1e8, 0.1, 0.1], [0.158, 0.842, 0.0]),
        ([0, 0, 0], [1e12, 1e12, 1e-3], [0.375, 0.375, 0.25]),
    ],
)
def test_wide_logits_among_narrow_ones(mean, variances, expected):
    mean, variances, expected = (
        torch.tensor([row], dtype=torch.float64) for row in (mean, variances, expected)
    )
    found = argmax_proba(mean, variances)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.003)


@pytest.mark.parametrize(
    ("gap", "variance"), [(50, 9), (100, 25), (200, 25), (500, 100), (40, 0)]
)
@pytest.mark.parametrize("n_others", [0, 5])
def test_small_probabilities_are_those_of_the_integral(gap, variance, n_others):
    """The tail of a single logit is no longer exponential here."""
    exact = torch.tensor(-float(gap), dtype=DOUBLE)
    if variance:
        # the difference of the two logits
        f = torch.linspace(-gap, gap, 40_001, dtype=DOUBLE)
        log_density = -((f + gap) ** 2) / (4 * variance)
        log_density -= math.log(4 * math.pi * variance) / 2 - (f[1] - f[0]).log()
        exact = (log_density + torch.nn.functional.logsigmoid(f)).logsumexp(0)
    # classes that are as improbable change nothing
    mean = torch.tensor([[0.0, -gap] + [-3.0 * gap] * n_others], dtype=DOUBLE)
    proba = argmax_proba(mean, torch.full_like(mean, variance))
    assert abs(proba[0, 1].log() - exact) < 0.1


def test_a_sample_depends_on_no_other():
    mean = 10 * normal(40, 30)
    variances = VARIANCES["log-normal"](normal(40, 30, seed=1))
    expected = torch.cat(
        [argmax_proba(m[None], v[None]) for m, v in zip(mean, variances, strict=True)]
    )
    torch.testing.assert_close(
        argmax_proba(mean, variances), expected, rtol=1e-12, atol=0
    )
    mean[7] = math.nan
    found = argmax_proba(mean, variances)
    assert found[7].isnan().all()
    rest = torch.arange(40) != 7
    torch.testing.assert_close(found[rest], expected[rest], rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", VARIANCES)
@pytest.mark.parametrize("n_classes", [2, 3, 30])
def test_derivatives_are_those_of_finite_differences(kind, n_classes):
    mean = 2 * normal(2, n_classes)
    variances = VARIANCES[kind](normal(2, n_classes, seed=1))
    weights, move = normal(2, n_classes, seed=2), normal(2, n_classes, seed=3)
    turn = variances * normal(2, n_classes, seed=4) / 4

    def value(step):
        moved = mean + step * move, variances + step * turn
        return (weights * argmax_proba(*moved, n_nodes=512)).sum()

    # Beyond the nodes there are probabilities of 1e-4, whose fraction in each class
    # changes with the ends, which autograd takes as constants.
    assert_slope(value, rtol=0, atol=2e-4)


@pytest.mark.parametrize("n_classes", [2, 3, 8])
def test_independent_variances_are_recovered(n_classes):
    variances = normal(5, n_classes).exp()
    _, centred = logits.centre(variances, torch.diag_embed(variances))
    found = independent_variances(centred.diagonal(dim1=-2, dim2=-1))
    if n_classes == 2:  # only their sum is determined
        found, variances = found.sum(-1), variances.sum(-1)
    torch.testing.assert_close(found, variances)


# ------------------------------------------------------------------- many classes
@pytest.mark.parametrize("variance", [1e-3, 0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("scale", [0, 1.5, 4])
def test_improbable_classes_are_taken_together(scale, variance):
    """The joint treatment is as precise as quadrature for each class."""
    n_classes = 6_000
    mean = scale * normal(3, n_classes)
    spread = (0.3 * normal(3, n_classes, seed=1)).exp()
    variances = variance * spread
    expected = gumbel._by_nodes(mean - mean.amax(1, keepdim=True), variances, 64)
    found = argmax_proba(mean, variances)
    assert (found - expected).abs().sum(1).max() < 1.5e-3
    probable = expected > 1e-9
    assert (found / expected - 1)[probable].abs().max() < 0.015


def test_without_variances_many_classes_have_their_softmax():
    mean = 3 * normal(2, 3_000)
    found = argmax_proba(mean, torch.zeros_like(mean))
    assert (found - mean.softmax(1)).abs().sum(1).max() < 3e-3


@pytest.mark.parametrize("kind", VARIANCES)
def test_many_classes_of_any_variances_agree_with_quadrature(kind):
    mean = 3 * normal(2, 2_000)
    variances = VARIANCES[kind](normal(2, 2_000, seed=1))
    expected = gumbel._by_nodes(mean - mean.amax(1, keepdim=True), variances, 64)
    assert (argmax_proba(mean, variances) - expected).abs().sum(1).max() < 2e-3


def test_many_classes_are_predicted_whatever_the_batch():
    mean = 3 * normal(5, 2_000)
    variances = (normal(5, 2_000, seed=1) - 1).exp()
    together = links.gumbel(mean, variances, mean[:0])
    rows = zip(mean.split(1), variances.split(1), strict=True)
    alone = [links.gumbel(*row, mean[:0]) for row in rows]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-11, atol=0)
    assert_slope_of_many(mean[:1], variances[:1])


def assert_slope_of_many(mean, variances):
    """Check gradients of leading and other classes against finite differences."""
    mean, step = mean.clone().requires_grad_(), 1e-5
    chosen = [int(mean.argmax()), int(mean.argmin())]
    for index in chosen:
        proba = argmax_proba(mean, variances)[0, index]
        (slope,) = torch.autograd.grad(proba, mean)
        moved = [mean.detach().clone() for _ in range(2)]
        moved[0][0, index] -= step
        moved[1][0, index] += step
        low, high = (argmax_proba(m, variances)[0, index] for m in moved)
        assert slope[0, index] == pytest.approx(float((high - low) / (2 * step)), 1e-4)
