"""Scores from pairs, compared with dense formulas."""

import pickle

import numpy as np
import pytest
import torch
from nets import QUIET, RecordTraining, initialised, seeded
from references import gradient_rows
from refusals import refused, refused_fit
from scipy.special import expit
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetBinaryClassifier
from torch import nn

from sklaplace import BradleyTerry, LaplaceRanker
from sklaplace.curvature.structures import STRUCTURES

pytestmark = pytest.mark.usefixtures("rng_untouched")

P, DELTA = 3, 0.7
TRUE = np.array([1.5, -1.0, 0.5])


def linear():
    return nn.Linear(P, 1, bias=False, dtype=torch.float64)


def deep():
    first, last = nn.Linear(P, 4), nn.Linear(4, 1, bias=False)
    return nn.Sequential(first, nn.Tanh(), last).double()


def comparisons(n=80):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 2, P))
    p = expit(2 * (X[:, 1] - X[:, 0]) @ TRUE)
    return X, (rng.random(n) < p).astype(int)


X, Y = comparisons()
ITEMS = np.random.default_rng(1).normal(size=(12, P))


FULL = {"optimizer": torch.optim.Adam, "batch_size": -1, **QUIET}


def net(scorer=linear, **params):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = {"module__scorer": scorer(), "max_epochs": 30, "lr": 0.1} | FULL
    return NeuralNetBinaryClassifier(BradleyTerry, **settings | params)


@pytest.fixture(scope="module", params=[linear, deep], ids=["linear", "deep"])
def trained(request):
    return seeded(net(request.param), X, Y.astype(np.float64))


def fitted(trained, **settings):
    fixed = {"prior_precision": DELTA, "random_state": 0}
    everything = {"subset_of_weights": "all", "hessian_structure": "full"}
    model = LaplaceRanker(FrozenEstimator(trained), **fixed | everything | settings)
    return model.fit(X, Y)


def gradients(trained, items):
    """Return scores (n,) and their gradients (n, P) in all weights."""
    scorer = trained.module_.scorer
    scores = scorer(torch.as_tensor(items)).flatten()
    rows = gradient_rows(scores, scorer.parameters())
    return scores.detach().numpy(), rows.numpy()


def of_differences(cov):
    """Return variances of the differences between two halves of the scores."""
    n = len(cov) // 2
    return cov.diagonal()[:n] + cov.diagonal()[n:] - 2 * cov.diagonal(n)


def covariance(trained):
    """Return the covariance of the weights for ``J = J(second) - J(first)``."""
    (first, J1), (second, J2) = (gradients(trained, X[:, k]) for k in (0, 1))
    J, p = J2 - J1, expit(second - first)
    H = J.T @ (J * (p * (1 - p))[:, None])
    return np.linalg.inv(H + DELTA * np.eye(len(H)))


def test_scores_and_pairs_are_those_of_the_dense_formula(trained):
    model, cov = fitted(trained), covariance(trained)
    scores, J = gradients(trained, ITEMS)
    expected = J @ cov @ J.T
    mean, std = model.predict_score(ITEMS, return_std=True)
    np.testing.assert_allclose(mean, scores, rtol=1e-8)
    np.testing.assert_allclose(std, np.sqrt(expected.diagonal()), rtol=1e-8)
    mean, joint = model.predict_score(ITEMS, return_cov=True)
    np.testing.assert_allclose(mean, scores, rtol=1e-8)
    np.testing.assert_allclose(joint, expected, rtol=1e-8, atol=1e-12)
    np.testing.assert_array_equal(model.predict_score(ITEMS), mean)
    in_graph = torch.tensor(ITEMS, requires_grad=True)
    np.testing.assert_array_equal(model.predict_score(in_graph), mean)
    # the logit of a pair is the difference of its scores
    pairs = np.stack([ITEMS[:6], ITEMS[6:]], 1)
    logits, variance = model.latent_mean_and_variance(pairs)
    np.testing.assert_allclose(logits[:, 1] - logits[:, 0], scores[6:] - scores[:6])
    difference = of_differences(expected)
    np.testing.assert_allclose(4 * variance[:, 1], difference, rtol=1e-8)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_swap_of_items_is_the_other_answer(trained, structure, subset):
    model = fitted(trained, subset_of_weights=subset, hessian_structure=structure)
    there, back = model.predict_proba(X), model.predict_proba(X[:, ::-1])
    np.testing.assert_allclose(there, back[:, ::-1], rtol=1e-9)
    same = np.stack([ITEMS, ITEMS], 1)
    np.testing.assert_allclose(model.predict_proba(same), 0.5)


@pytest.mark.parametrize("prior", ["auto", "marglik"])
def test_a_known_ranking(prior):
    model = LaplaceRanker(prior_precision=prior, random_state=0)
    X, y = comparisons(300)
    names = np.where(y == 1, "second", "first")
    model.fit(X, names)
    assert model.classes_.tolist() == ["first", "second"]
    assert model.score(X, names) > 0.8
    scores, std = model.predict_score(ITEMS, return_std=True)
    assert np.corrcoef(scores, ITEMS @ TRUE)[0, 1] > 0.95
    assert (std > 0).all()
    far = model.predict_score(10 * ITEMS, return_std=True)[1]
    assert (far > std).all()
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_score(ITEMS), scores)


def test_abilities_of_players():
    """Items are numbers, as in Bradley and Terry's model."""
    rng = np.random.default_rng(0)
    ability = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    pairs = rng.integers(5, size=(400, 2))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    won = rng.random(len(pairs)) < expit(ability[pairs[:, 1]] - ability[pairs[:, 0]])
    players = net(lambda: nn.Embedding(6, 1), max_epochs=200)
    settings = {"prior_precision": 1.0, "subset_of_weights": "all", "random_state": 0}
    model = LaplaceRanker(players, **settings).fit(pairs, won)
    mean, std = model.predict_score(np.arange(6), return_std=True)
    assert (np.argsort(mean[:5]) == np.arange(5)).all()
    assert std[5] == pytest.approx(1.0)  # who never played has the prior
    assert (std[:5] < 0.7).all()


def test_draws_of_weights(trained):
    model = fitted(trained, pred_type="nn", n_samples=4000)
    plain = fitted(trained)
    if isinstance(trained.module_.scorer, nn.Linear):
        mean, std = plain.predict_score(ITEMS, return_std=True)
        drawn, spread = model.predict_score(ITEMS, return_std=True)
        np.testing.assert_allclose(drawn, mean, atol=0.1)
        np.testing.assert_allclose(spread, std, rtol=0.1)
    assert model.predict_score(ITEMS, return_cov=True)[1].shape == (12, 12)


def test_pairs_of_an_earlier_task(trained):
    frozen = FrozenEstimator(trained)
    first = LaplaceRanker(frozen, prior_precision=DELTA).fit(X[:40], Y[:40])
    second = LaplaceRanker(frozen, prior=first.posterior_).fit(X[40:], Y[40:])
    found = second.predict_score(ITEMS, return_std=True)
    expected = fitted(trained).predict_score(ITEMS, return_std=True)
    np.testing.assert_allclose(found, expected, rtol=1e-8)


class Named(nn.Module):
    """A reward model with named inputs that returns logits among other outputs."""

    def __init__(self):
        super().__init__()
        self.scorer = linear()

    def forward(self, item, mask):
        return {"logits": self.scorer(item * mask[:, None]), "other": item}


def as_dict(X):
    return {"item": X, "mask": np.ones(X.shape[:-1])}


def test_pairs_in_a_dict():
    """The scorer accepts several named inputs."""
    trained = seeded(net(), X, Y.astype(np.float64))
    named = initialised(net(Named))
    named.module_.scorer.scorer.load_state_dict(trained.module_.scorer.state_dict())
    expected, fixed = fitted(trained), {"prior_precision": DELTA, "random_state": 0}
    model = LaplaceRanker(FrozenEstimator(named), **fixed).fit(as_dict(X), Y)
    for found, known in zip(
        model.predict_score(as_dict(ITEMS), return_cov=True),
        expected.predict_score(ITEMS, return_cov=True),
        strict=True,
    ):
        np.testing.assert_allclose(found, known, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(
        model.predict_proba(as_dict(X)), expected.predict_proba(X), rtol=1e-10
    )
    one = LaplaceRanker(net(Named, max_epochs=3), random_state=0).fit(as_dict(X), Y)
    other = LaplaceRanker(net(max_epochs=3), random_state=0).fit(X, Y)
    np.testing.assert_allclose(
        one.predict_score(as_dict(ITEMS)), other.predict_score(ITEMS), rtol=1e-6
    )


def recorded(**params):
    return LaplaceRanker(net(callbacks=[RecordTraining()], **params))


class MeanOfItems(nn.Module):
    """A module whose output is not a difference of scores."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(P, 1, dtype=torch.float64)

    def forward(self, X):
        return self.layer(X.mean(1))


def flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * P, 1, dtype=torch.float64))


class TestBadInput:
    @pytest.mark.parametrize("rows", [X[:, 0], X[:, :1], Y, np.ones((80, 3, P))])
    def test_rows_that_are_no_pairs(self, rows):
        refused_fit(recorded(), str(rows.shape), "(n, 2, ...)", data=(rows, Y))

    @pytest.mark.parametrize(
        "rows",
        [
            as_dict(X[:, 0]),
            as_dict(X[:, :1]),
            as_dict(X) | {"mask": np.ones(80)},
        ],
    )
    def test_dicts_that_are_no_pairs(self, rows):
        model = recorded(scorer=Named)
        refused_fit(model, str(rows["mask"].shape), "(n, 2, ...)", data=(rows, Y))
        trained = LaplaceRanker(net(Named, max_epochs=1)).fit(as_dict(X), Y)
        ask = lambda: trained.predict_proba(rows)  # noqa: E731
        refused(ValueError, ["pairs"], ask, trained)

    def test_dicts_of_items(self):
        model = LaplaceRanker(net(Named, max_epochs=1)).fit(as_dict(X), Y)
        few = as_dict(ITEMS) | {"mask": np.ones(3)}
        for words, items in (
            (["items", "different numbers of rows"], few),
            (["items", "Pass the keys"], {"item": ITEMS}),
            (["items", "cannot be applied"], as_dict(X)),
        ):
            ask = lambda items=items: model.predict_score(items)  # noqa: E731
            refused(ValueError, words, ask, model)

    def test_a_scorer_of_two_numbers(self):
        model = recorded(scorer=lambda: nn.Linear(P, 2, dtype=torch.float64))
        refused_fit(model, "(2,) per item", "one number", data=(X, Y))

    @pytest.mark.parametrize("module", [MeanOfItems, flat])
    def test_networks_that_are_no_difference_of_scores(self, module):
        params = QUIET | {"callbacks": [RecordTraining()]}
        model = LaplaceRanker(NeuralNetBinaryClassifier(module, **params))
        refused_fit(model, "BradleyTerry", data=(X, Y))

    def test_reduced_gradients_of_a_pair(self):
        model = recorded().set_params(hessian_structure="kron")
        model.set_params(structure_params={"weight_sharing": "reduce"})
        refused_fit(model, "opposite signs", "'expand'", data=(X, Y))

    def test_items(self):
        model = fitted(seeded(net(), X, Y.astype(np.float64)))
        both = {"return_std": True, "return_cov": True}
        wide = np.ones((4, 2, P + 1))
        for words, ask in (
            (["items of shape", f"({P},)"], lambda: model.predict_score(ITEMS[:, :2])),
            (["items of shape", f"({P},)"], lambda: model.predict_score(X)),
            (["items of shape"], lambda: model.predict_proba(wide)),
            (["both be True"], lambda: model.predict_score(ITEMS, **both)),
        ):
            refused(ValueError, words, ask, model)


def test_the_defaults_cover_true_differences():
    """The target is 90 %, but all differences depend on three numbers per seed."""
    hits = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        pairs = rng.normal(size=(200, 2, P))
        y = rng.random(200) < expit((pairs[:, 1] - pairs[:, 0]) @ TRUE)
        items = rng.normal(size=(2, 200, P))
        model = LaplaceRanker(random_state=seed).fit(pairs, y)
        mean, cov = model.predict_score(items.reshape(-1, P), return_cov=True)
        error = mean[200:] - mean[:200] - (items[1] - items[0]) @ TRUE
        hits.append(np.abs(error) < 1.645 * np.sqrt(of_differences(cov)))
    trace_correction = 2 * np.sqrt(0.9 * 0.1 / (3 * P))
    assert np.mean(hits) > 0.9 - trace_correction


def test_single_items_and_pairs():
    module = initialised(net(deep)).module_
    pairs = torch.as_tensor(X)
    single = [module(pairs[:, k : k + 1]) for k in (0, 1)]
    torch.testing.assert_close(module(pairs), single[1] - single[0])
    with pytest.raises(ValueError, match="neither pairs"):
        module(torch.ones(4, 3, P, dtype=torch.float64))


def test_a_scorer_that_is_no_module_is_refused():
    with pytest.raises(TypeError, match="scorer is a str"):
        BradleyTerry("a")
