"""Novelty: tails and kept samples, compared with their definitions."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.distance import cdist

from sklaplace.likelihoods import Gaussian
from sklaplace.likelihoods.classification import Categorical, MultilabelBernoulli
from sklaplace.novelty.batch import MAX_KEPT, FeatureBatch
from sklaplace.novelty.novelty import RIDGES, ROW_RIDGE, Novelty
from sklaplace.novelty.scale import finite_moments

N, WIDTH, K = 60, 4, 3


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def batch(likelihood, n=N, c=K, seed=0, keys=None, x=None):
    features, f = normal(n, WIDTH, seed=seed), 3 * normal(n, c, seed=seed + 1)
    keys = torch.arange(n) if keys is None else keys
    return FeatureBatch.of(likelihood, features, f, x, keys=keys), f


def novelty(likelihood, **options):
    return Novelty.of(likelihood, batch(likelihood, **options)[0])


def class_terms(f):
    """Indecision and energy of logits f."""
    terms = f.log_softmax(1).mean(1), -f.logsumexp(1)
    return torch.stack(terms, 1)


def test_infinite_values_are_left_out_of_tails():
    values = normal(30, 1)
    known = finite_moments(values, torch.ones(30))
    more = torch.cat([values, torch.full((2, 1), torch.inf)])
    found = finite_moments(more, torch.ones(32))
    torch.testing.assert_close(found, known)


def nearest_distances(new, inputs, groups):
    """Mahalanobis distances from the nearest of different inputs, from SciPy."""
    scale = inputs.double().numpy().std(0)
    new, inputs = (part.double().numpy() / scale for part in (new, inputs))
    means = np.stack([inputs[groups == k].mean(0) for k in range(K)])
    centred = inputs - means[groups]
    scatter = centred.T @ centred
    ridge = ROW_RIDGE * scatter.trace() / len(scatter) * np.eye(len(scatter))
    metric = {"metric": "mahalanobis", "VI": np.linalg.inv(scatter + ridge)}
    distances = cdist(new, inputs, **metric)
    return np.where(distances == 0, np.inf, distances).min(1, keepdims=True)


def test_scores_are_sums_of_log_tail_probabilities():
    likelihood, x = Categorical(), normal(N, 3, seed=9) * torch.tensor([1, 10, 0.1])
    known, f = batch(likelihood, x=x)
    model = Novelty.of(likelihood, known)
    groups = f.argmax(1)
    of_features, of_inputs = (distance.leverage for distance in model.distances)
    reference = np.hstack(
        [
            of_features.leave_one_out(known.features, groups, torch.ones(N)).log(),
            of_inputs.leave_one_out(x, groups, torch.ones(N)).log(),
            class_terms(f),
            np.log(nearest_distances(x, x, groups)),
        ]
    )
    new, f, new_x = normal(7, WIDTH, seed=5), normal(7, K, seed=6), normal(7, 3, seed=7)
    distances, groups = nearest_distances(new_x, x, groups), f.argmax(1)
    values = np.hstack(
        [
            of_features(new, groups).log(),
            of_inputs(new_x, groups).log(),
            class_terms(f),
            np.log(distances),
        ]
    )
    assert values.shape[1] == len(RIDGES) + 4
    expected = stats.norm.logsf(values, reference.mean(0), reference.std(0))
    found = model.log_tail_probability(new, f, new_x)
    np.testing.assert_allclose(found, expected.sum(1), rtol=1e-9)


@pytest.mark.parametrize("shape", [(3,), (300,), (2, 5, 5), (3, 20, 20)])
def test_inputs_of_every_shape_are_compared(shape):
    x = normal(N, *shape, seed=9)
    model = novelty(Gaussian(), x=x)
    features, f = normal(N, WIDTH), normal(N, K)
    near, far = (model.log_tail_probability(features, f, a * x) for a in (1, 5))
    assert (far < near).all()
    with pytest.raises(ValueError, match=r"shape \(.*\) per sample, as in fit"):
        model.log_tail_probability(features, f, x.unsqueeze(-1))


def test_units_of_columns_do_not_matter():
    likelihood, x = Categorical(), normal(N, 3, seed=9)
    x[:, 2] = 4.0  # a constant column has no unit
    new_x = normal(7, 3, seed=7)
    units = torch.tensor([2.0**40, 2.0**-20, 1.0])
    new, f = normal(7, WIDTH, seed=5), normal(7, K, seed=6)
    model, other = (novelty(likelihood, x=rows) for rows in (x, x * units))
    expected = model.log_tail_probability(new, f, new_x)
    found = other.log_tail_probability(new, f, new_x * units)
    torch.testing.assert_close(found, expected)
    assert (found < model.log_tail_probability(new, f, x[:7])).all()


@pytest.mark.parametrize(
    "x",
    [
        None,
        normal(N),
        normal(N, 5, 2),  # sequences
        torch.ones(N, 3, dtype=torch.long),
        {"a": normal(N, 3), "b": normal(N, 3)},
    ],
)
def test_other_inputs_are_ignored(x):
    model = novelty(Categorical(), x=x)
    assert [distance.name for distance in model.distances] == ["features"]
    assert model.nearest is None
    assert model.n_residual_terms == len(RIDGES) + 1


def test_repeated_inputs_do_not_count_as_their_own_neighbours():
    x, keys = normal(N // 2, 3, seed=9).repeat(2, 1), torch.arange(N // 2).repeat(2)
    twice = novelty(Gaussian(), x=x, keys=keys)
    once = novelty(Gaussian(), n=N // 2, x=x[: N // 2])
    # the scatter of the inputs, a sum, is twice as large
    expected = once.nearest.training_logs.repeat(2, 1) - math.log(2) / 2
    torch.testing.assert_close(twice.nearest.training_logs, expected)
    assert novelty(Gaussian(), x=torch.ones(N, 3)).nearest is None


@pytest.mark.parametrize("likelihood", [Gaussian(), MultilabelBernoulli()])
def test_numbers_and_several_labels_have_one_group(likelihood):
    model = novelty(likelihood)
    assert model.leverage.ridges == RIDGES[:1]
    assert model.moments.counts.tolist() == [N]
    n_quantities = 1 if isinstance(likelihood, Gaussian) else 3
    assert model.moments_of_logs[0].shape == (n_quantities,)


def test_many_classes_have_one_group():
    """All classes share one group if separate features need too much memory."""
    n, c, width = 4, 2**12, 2**11
    features, f = normal(n, width), normal(n, c, seed=1)
    keys, likelihood = torch.arange(n), Categorical()
    found = FeatureBatch.of(likelihood, features, f, None, keys=keys)
    model = Novelty.of(likelihood, found)
    assert model.moments.sums.shape == (1, width)
    assert not model.samples.groups.any()
    assert model.leverage.ridges == RIDGES[:1]
    assert model.log_tail_probability(features, f, None).isfinite().all()
    later = model.merged(Novelty.of(likelihood, found)).merged(model)
    assert later.moments.counts.tolist() == [3 * n]


def test_logits_beyond_exp_are_finite():
    model = novelty(Categorical())
    f = torch.tensor([[1e30, 0, -1e30]]).double()
    assert model.log_tail_probability(normal(1, WIDTH), f, None).isfinite().all()


def test_the_smallest_hashes_are_kept_whatever_the_batches():
    n = 4 * MAX_KEPT
    generator = torch.Generator().manual_seed(3)
    keys = torch.randint(-(2**62), 2**62, (n // 2,), generator=generator)
    keys = torch.cat([keys, keys[: n // 4], keys[: n // 4]])
    whole, _ = batch(Gaussian(), n=n, keys=keys)

    def taken(rows):
        tensors = {k: v[rows] for k, v in whole._tensors.items()}
        return replace(whole, **tensors)

    model = None
    for rows in torch.randperm(n, generator=generator).split(77):
        new = Novelty.of(Gaussian(), taken(rows))
        model = new if model is None else model.merged(new)
    found, counts = keys.unique(return_counts=True)
    assert torch.equal(model.samples.keys, found[:MAX_KEPT])
    assert torch.equal(model.samples.weights, counts[:MAX_KEPT].double())
    assert model.moments.counts.item() == n
