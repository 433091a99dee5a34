"""Novelty: tails and kept samples, compared with their definitions."""

import numpy as np
import pytest
import torch
from scipy import stats

from sklaplace.likelihoods import Gaussian
from sklaplace.likelihoods.classification import Categorical, MultilabelBernoulli
from sklaplace.posterior.novelty import (
    MAX_KEPT,
    RIDGES,
    FeatureBatch,
    Novelty,
    finite_moments,
)

N, WIDTH, K = 60, 4, 3


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def batch(likelihood, n=N, c=K, seed=0, keys=None):
    features, f = normal(n, WIDTH, seed=seed), 3 * normal(n, c, seed=seed + 1)
    keys = torch.arange(n) if keys is None else keys
    return FeatureBatch.of(likelihood, features, f, None, keys), f


def novelty(likelihood, **options):
    found, f = batch(likelihood, **options)
    return Novelty.of(likelihood, found, f.shape[1])


def test_infinite_values_are_left_out_of_tails():
    values = normal(30, 1)
    known = finite_moments(values, torch.ones(30))
    more = torch.cat([values, torch.full((2, 1), torch.inf)])
    found = finite_moments(more, torch.ones(32))
    torch.testing.assert_close(found, known)


def test_scores_are_sums_of_log_tail_probabilities():
    likelihood = Categorical()
    known, f = batch(likelihood)
    model = Novelty.of(likelihood, known, K)
    groups = f.argmax(1)
    left_out = model.leverage.left_out(known.features, groups).log()
    undecided = f.log_softmax(1).mean(1, keepdim=True)
    reference = torch.cat([left_out, undecided], 1).numpy()
    new, f = normal(7, WIDTH, seed=5), normal(7, K, seed=6)
    values = torch.cat(
        [
            model.leverage(new, f.argmax(1)).log(),
            f.log_softmax(1).mean(1, keepdim=True),
        ],
        1,
    )
    assert values.shape[1] == len(RIDGES) + 1
    expected = stats.norm.logsf(values.numpy(), reference.mean(0), reference.std(0))
    found = model.log_tail_probability(new, f)
    np.testing.assert_allclose(found, expected.sum(1), rtol=1e-9)


@pytest.mark.parametrize("likelihood", [Gaussian(), MultilabelBernoulli()])
def test_numbers_and_several_labels_have_one_group(likelihood):
    model = novelty(likelihood)
    assert model.leverage.ridges == RIDGES[:1]
    assert model.moments.counts.tolist() == [N]
    n_quantities = 1 if isinstance(likelihood, Gaussian) else 2
    assert model.usual[0].shape == (n_quantities,)


def test_many_classes_have_one_group(monkeypatch):
    """All classes share one group if separate features need too much memory."""
    likelihood = Categorical()
    expected = novelty(MultilabelBernoulli())
    assert len(novelty(likelihood).moments.counts) == K
    monkeypatch.setattr("sklaplace.posterior.novelty.MAX_SUMS", K * WIDTH - 1)
    model = novelty(likelihood)
    assert model.moments.sums.shape == (1, WIDTH)
    assert not model.samples.groups.any()
    assert model.leverage.ridges == RIDGES[:1]
    found, f = batch(likelihood, seed=5)
    of_one = expected.leverage(found.features, torch.zeros(N, dtype=torch.long))
    assert torch.equal(model.leverage(found.features, found.groups), of_one)
    assert model.log_tail_probability(found.features, f).isfinite().all()
    later = model.merged(Novelty.of(likelihood, found, K)).merged(model)
    assert later.moments.counts.tolist() == [3 * N]


def test_logits_beyond_exp_are_finite():
    model = novelty(Categorical())
    f = torch.tensor([[1e30, 0, -1e30]]).double()
    assert model.log_tail_probability(normal(1, WIDTH), f).isfinite().all()


def test_the_smallest_hashes_are_kept_whatever_the_batches():
    n = 4 * MAX_KEPT
    generator = torch.Generator().manual_seed(3)
    keys = torch.randint(-(2**62), 2**62, (n // 2,), generator=generator)
    keys = torch.cat([keys, keys[: n // 4], keys[: n // 4]])
    whole, _ = batch(Gaussian(), n=n, keys=keys)

    def taken(rows):
        return FeatureBatch(**{k: v[rows] for k, v in vars(whole).items()})

    model = None
    for rows in torch.randperm(n, generator=generator).split(77):
        new = Novelty.of(Gaussian(), taken(rows), K)
        model = new if model is None else model.merged(new)
    found, counts = keys.unique(return_counts=True)
    assert torch.equal(model.samples.keys, found[:MAX_KEPT])
    assert torch.equal(model.samples.weights, counts[:MAX_KEPT].double())
    assert model.moments.counts.item() == n
