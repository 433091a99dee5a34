"""Scores from pairs, against dense formulas."""

import pickle

import numpy as np
import pytest
import torch
from nets import RecordTraining, classifier, initialised, seeded
from scipy.special import expit
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from skorch import NeuralNetBinaryClassifier
from test_bad_input import refused, refused_fit
from torch import nn

from sklaplace import BradleyTerry, LaplaceRanker
from sklaplace.structures import STRUCTURES

pytestmark = pytest.mark.usefixtures("rng_untouched")

P, DELTA = 3, 0.7
TRUE = np.array([1.5, -1.0, 0.5])


def linear():
    return nn.Linear(P, 1, bias=False, dtype=torch.float64)


def deep():
    return nn.Sequential(
        nn.Linear(P, 4, dtype=torch.float64),
        nn.Tanh(),
        nn.Linear(4, 1, bias=False, dtype=torch.float64),
    )


def comparisons(n=80):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 2, P))
    p = expit(2 * (X[:, 1] - X[:, 0]) @ TRUE)
    return X, (rng.random(n) < p).astype(int)


X, Y = comparisons()
ITEMS = np.random.default_rng(1).normal(size=(12, P))


def net(scorer=linear, **params):
    settings = {
        "max_epochs": 30,
        "lr": 0.1,
        "optimizer": torch.optim.Adam,
        "batch_size": -1,
        "train_split": None,
        "callbacks": "disable",
        "verbose": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings["module__scorer"] = scorer()
    return NeuralNetBinaryClassifier(BradleyTerry, **settings | params)


@pytest.fixture(scope="module", params=[linear, deep], ids=["linear", "deep"])
def trained(request):
    return seeded(net(request.param), X, Y.astype(np.float64))


def fitted(trained, **settings):
    settings = {
        "prior_precision": DELTA,
        "random_state": 0,
        "subset_of_weights": "all",
        "hessian_structure": "full",
    } | settings
    return LaplaceRanker(FrozenEstimator(trained), **settings).fit(X, Y)


def gradients(trained, items):
    """Scores (n,), and their gradients (n, P) in all weights."""
    scorer = trained.module_.scorer
    scores = scorer(torch.as_tensor(items)).flatten()
    rows = [
        torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(
                    s, list(scorer.parameters()), retain_graph=True
                )
            ]
        )
        for s in scores
    ]
    return scores.detach().numpy(), torch.stack(rows).numpy()


def covariance(trained):
    """Of the weights: ``J = J(second) - J(first)``."""
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
    # the logit of a pair is the difference of its scores
    pairs = np.stack([ITEMS[:6], ITEMS[6:]], 1)
    logits, variance = model.latent_mean_and_variance(pairs)
    difference = expected.diagonal()[:6] + expected.diagonal()[6:]
    difference = difference - 2 * expected.diagonal(6)
    np.testing.assert_allclose(logits[:, 1] - logits[:, 0], scores[6:] - scores[:6])
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
    """Items that are numbers: Bradley and Terry's own case."""
    rng = np.random.default_rng(0)
    ability = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    pairs = rng.integers(5, size=(400, 2))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    won = rng.random(len(pairs)) < expit(ability[pairs[:, 1]] - ability[pairs[:, 0]])
    players = net(lambda: nn.Embedding(6, 1), max_epochs=200)
    model = LaplaceRanker(
        players, prior_precision=1.0, subset_of_weights="all", random_state=0
    ).fit(pairs, won)
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


def test_more_pairs_and_batches(trained):
    model = fitted(trained)
    expected = model.predict_score(ITEMS, return_std=True)
    parts = clone(model).set_params(batch_size=7)
    parts.partial_fit(X[:40], Y[:40]).partial_fit(X[40:], Y[40:])
    found = parts.predict_score(ITEMS, return_std=True)
    np.testing.assert_allclose(found, expected, rtol=1e-8)


class TestBadInput:
    def model(self, **params):
        return LaplaceRanker(net(callbacks=[RecordTraining()], **params))

    @pytest.mark.parametrize("rows", [X[:, 0], X[:, :1], Y, np.ones((80, 3, P))])
    def test_rows_that_are_no_pairs(self, rows):
        refused_fit(self.model(), str(rows.shape), "(n, 2, ...)", data=(rows, Y))

    @pytest.mark.parametrize(
        "y", [np.arange(80) % 3, np.zeros(80, dtype=int), np.stack([Y, Y], 1)]
    )
    def test_labels(self, y):
        refused_fit(self.model(), "one of two labels", data=(X, y))

    def test_another_criterion(self):
        scorer = net().module__scorer
        other = classifier(
            BradleyTerry, module__scorer=scorer, callbacks=[RecordTraining()]
        )
        model = LaplaceRanker(other)
        refused_fit(model, "CrossEntropyLoss", "BCEWithLogitsLoss", data=(X, Y))

    def test_a_scorer_of_two_numbers(self):
        model = self.model(scorer=lambda: nn.Linear(P, 2, dtype=torch.float64))
        refused_fit(model, "(2,) per item", "one number", data=(X, Y))

    def test_items(self):
        model = fitted(seeded(net(), X, Y.astype(np.float64)))
        for items in (ITEMS[:, :2], X):
            refused(
                ValueError,
                ["items of shape", f"({P},)"],
                lambda items=items: model.predict_score(items),
                model,
            )
        wide = np.ones((4, 2, P + 1))
        refused(
            ValueError, ["items of shape"], lambda: model.predict_proba(wide), model
        )
        refused(
            ValueError,
            ["Ask for one"],
            lambda: model.predict_score(ITEMS, return_std=True, return_cov=True),
            model,
        )


def test_single_items_and_pairs():
    module = initialised(net(deep)).module_
    pairs = torch.as_tensor(X)
    single = [module(pairs[:, k : k + 1]) for k in (0, 1)]
    torch.testing.assert_close(module(pairs), single[1] - single[0])
    with pytest.raises(ValueError, match="neither pairs"):
        module(torch.ones(4, 3, P, dtype=torch.float64))
