"""Leverage, compared with explicit linear regressions."""

import pytest
import torch

from sklaplace.novelty.leverage import (
    MAX_FEATURES,
    FeatureMoments,
    Leverage,
    sketched,
)

N, WIDTH, K = 40, 5, 3
TINY = 1e-13
ONES = torch.ones(N)


def rows(seed=0, n=N):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)
    features = features * torch.tensor([10.0, 3, 1, 0.3, 0.1]) + 2
    groups = torch.arange(n) % K
    return features + groups.unsqueeze(1), groups


def leverage(features, groups, weights=None, ridges=(TINY,), n_groups=K):
    weights = torch.ones(len(features)) if weights is None else weights
    moments = FeatureMoments.of(features, groups, weights, n_groups)
    return Leverage(moments, ridges)


def design(features, groups, n_groups=K):
    """Return features and an indicator for each group."""
    indicators = torch.nn.functional.one_hot(groups, n_groups).double()
    return torch.cat([indicators, features.double()], 1)


def dense(known, new):
    """Return the leverages of rows of a design by the dense formula."""
    return torch.einsum("bi,ij,bj->b", new, torch.linalg.inv(known.T @ known), new)


def within(features, groups, n_groups=K):
    """Return within-group scatter by a loop over samples, and group means."""
    means = torch.stack([features[groups == k].mean(0) for k in range(n_groups)])
    scatter = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for row, k in zip(features, groups, strict=True):
        scatter += torch.outer(row - means[k], row - means[k])
    return scatter, means


@pytest.mark.parametrize("n_groups", [1, K])
def test_is_that_of_a_regression_with_indicators(n_groups):
    known, groups = rows()
    new, its_groups = rows(1)
    groups, its_groups = groups % n_groups, its_groups % n_groups
    model = leverage(known, groups, n_groups=n_groups)
    expected = dense(design(known, groups, n_groups), design(new, its_groups, n_groups))
    found = model(new, its_groups)
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-8, atol=1e-10)


def test_ridges_are_fractions_of_the_mean_eigenvalue():
    known, groups = rows()
    new, its_groups = rows(1)
    scatter, means = within(known, groups)
    found = leverage(known, groups, ridges=(0.1, 2.0))(new, its_groups)
    for column, ridge in enumerate((0.1, 2.0)):
        penalty = (
            ridge * scatter.trace() / WIDTH * torch.eye(WIDTH, dtype=torch.float64)
        )
        shifts = new - means[its_groups]
        inverse = torch.linalg.inv(scatter + penalty)
        expected = 1 / groups.bincount()[its_groups].double() + dense_form(
            shifts, inverse
        )
        torch.testing.assert_close(found[:, column], expected, rtol=1e-9, atol=1e-12)


def dense_form(shifts, inverse):
    return torch.einsum("bi,ij,bj->b", shifts, inverse, shifts)


def test_left_out_under_a_ridge_that_stays():
    known, groups = rows()
    scatter, _ = within(known, groups)
    ridge = 0.5 * scatter.trace() / WIDTH
    found = leverage(known, groups, ridges=(0.5,)).leave_one_out(known, groups, ONES)[
        :, 0
    ]
    for n in range(0, N, 7):
        others = torch.arange(N) != n
        rest, means = within(known[others], groups[others])
        shift = (known[n] - means[groups[n]]).unsqueeze(0)
        inverse = torch.linalg.inv(rest + ridge * torch.eye(WIDTH, dtype=torch.float64))
        count = (groups[others] == groups[n]).sum()
        expected = 1 / count.double() + dense_form(shift, inverse)
        torch.testing.assert_close(found[n : n + 1], expected, rtol=1e-8, atol=0)


def test_weights_are_counts():
    known, groups = rows()
    counts = torch.arange(N) % 3 + 1
    repeated = known.repeat_interleave(counts, 0), groups.repeat_interleave(counts)
    new, its_groups = rows(1)
    weighted = leverage(known, groups, counts.float())
    model = leverage(*repeated)
    torch.testing.assert_close(weighted(new, its_groups), model(new, its_groups))
    each = weighted.leave_one_out(known, groups, counts).repeat_interleave(counts, 0)
    expected = model.leave_one_out(*repeated, torch.ones(len(each)))
    torch.testing.assert_close(each, expected)


def test_float32_agrees_with_float64_under_a_ridge():
    known, groups = rows()
    model = leverage(known, groups, ridges=(1e-3, 1.0))
    new, its_groups = rows(1)
    found = model(new.float(), its_groups)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, model(new, its_groups), rtol=1e-4, atol=1e-6)


def test_a_sample_alone_in_its_group_cannot_be_left_out():
    known, _ = rows()
    groups = torch.zeros(N, dtype=torch.long)
    groups[0] = 1
    found = leverage(known, groups).leave_one_out(known, groups, ONES)
    assert found[0].isinf().all()
    assert found[1:].isfinite().all()


def test_a_group_without_samples_is_at_the_mean_of_all():
    known, _ = rows()
    groups = torch.zeros(N, dtype=torch.long)
    model = leverage(known, groups)
    mean = known.mean(0, keepdim=True)
    assert model(mean, torch.tensor([1])).item() == pytest.approx(1)


@pytest.mark.parametrize("value", [0.0, 3.0, 1e8])
def test_constant_features_have_finite_leverages(value):
    known = torch.full((N, WIDTH), value)
    groups = torch.arange(N) % K
    model = leverage(known, groups, ridges=(1e-3, 1.0))
    for new in (known, known + 1, known + 1e20):
        assert model(new, groups).isfinite().all()
    assert model.leave_one_out(known, groups, ONES).isfinite().all()
    assert (model(known + 1, groups) >= model(known, groups)).all()


def test_hashed_features_keep_products_on_average():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 20_000, generator=generator, dtype=torch.float64)
    found = sketched(x)
    assert found.shape == (4, MAX_FEATURES)
    gram = x @ x.T / 20_000
    assert (found @ found.T / 20_000 - gram).abs().max() < 0.1
    torch.testing.assert_close(sketched(x), found, rtol=0, atol=0)
    # every column is used, even if there are hardly more features than columns
    assert (sketched(x[:, : MAX_FEATURES + 1]) != 0).any(0).all()
