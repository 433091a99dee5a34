from types import SimpleNamespace

import pytest
import torch

from sklaplace.posterior.tuning import path_search
from sklaplace.posterior.tuning.candidate import Candidate
from sklaplace.posterior.tuning.path_search import MIDDLE, best_unrefitted
from sklaplace.posterior.tuning.problem import HeldOutScore

N_POINTS = 21


@pytest.fixture
def visited(monkeypatch):
    """Return the scored indices of a path that consists of indices."""
    found = []

    def scored(problem, path):
        indices = [int(ratio) for ratio in path]
        found.extend(indices)
        return [Candidate(None, problem.score_at(index), 1.0) for index in indices]

    monkeypatch.setattr(path_search, "scored", scored)
    return found


def search(score_at, **changes):
    problem = {
        "score_at": score_at,
        "score": HeldOutScore(log_proba=object()),
        "parts": [SimpleNamespace(validation=[])],
        **changes,
    }
    path = list(torch.arange(N_POINTS))
    return best_unrefitted(SimpleNamespace(**problem), path).score


@pytest.mark.parametrize("best", range(N_POINTS))
@pytest.mark.parametrize("rise", [1.0, 30.0])
def test_the_lowest_of_scores_with_one_minimum_is_found(best, rise, visited):
    def score(index):
        return abs(index - best) * (rise if index > best else 1.0)

    assert search(score) == 0
    assert len(visited) <= 13


def test_the_weakest_priors_are_left_out_after_a_rise(visited):
    """Weak priors are the most expensive, because wide logits need many nodes."""
    assert search(lambda index: 10.0 * abs(index - 6)) == 0
    assert max(visited) == 12
    assert len(visited) == len(set(visited)) <= 10


def test_no_score_that_is_no_number_is_taken(visited):
    """Outputs may overflow under weak priors."""
    assert search(lambda i: float("inf") if i > MIDDLE else 10.0 - i) == 10 - MIDDLE


@pytest.mark.parametrize(
    "score",
    [
        lambda i: 10.0 - i if i < 4 else float("inf"),
        lambda i: float(i) if i > 12 else float("inf"),
        lambda i: float(min(i, 3)),
    ],
)
def test_scores_that_are_equal_or_infinite_around_the_middle(score, visited):
    assert search(score) == min(map(score, range(N_POINTS)))


@pytest.mark.parametrize(
    "changes",
    [
        {"score": HeldOutScore()},
        {"score": HeldOutScore(log_proba=object(), is_cheap=True)},
        {"parts": [SimpleNamespace(validation=iter([]))]},
    ],
)
def test_all_are_scored_where_that_is_cheap(changes, visited):
    assert search(lambda index: -index % 5, **changes) == 0
    assert visited == list(range(N_POINTS))


# Scores of refitted models with two minima, the better of which lies on the other side.
TWO_MINIMA = [103.7, 103.4, 103.1, 102.3, 100.2, 99.1, 98.5, 98.9, 100.3, 100.8, 100.2]
TWO_MINIMA += [100.4, 100.5, 101.6, 102.5, 103.1, 103.5, 103.7, 103.8, 103.9, 104.0]


@pytest.fixture
def search_refits(monkeypatch):
    """Return a search among refitted models with given scores, and the refits."""
    refits = []

    def refitted(problem, ratio, start, tolerance):
        refits.append(int(ratio))
        return Candidate([None], scores[int(ratio)], 1.0)

    def search(of_path):
        scores[:] = of_path
        path = list(torch.arange(len(scores)))
        return path_search.best_refitted(problem, path).score, refits

    scores = []
    monkeypatch.setattr(path_search, "refitted", refitted)
    problem = SimpleNamespace(
        parts=[SimpleNamespace(posterior=None)],
        score=HeldOutScore(),
        free_prior=False,
        posterior=SimpleNamespace(
            likelihood=SimpleNamespace(has_noise=True),
            prior_precision=torch.ones(()),
        ),
    )
    return search


@pytest.mark.parametrize("scores", [TWO_MINIMA, TWO_MINIMA[16::-1]])
def test_the_better_of_two_minima_around_the_middle_is_found(scores, search_refits):
    assert search_refits(scores)[0] == min(scores)


@pytest.mark.parametrize("best", range(N_POINTS))
def test_the_neighbour_on_the_better_side_is_refitted(best, search_refits):
    found, refits = search_refits([float((i - best) ** 2) for i in range(N_POINTS)])
    assert found == 0
    # every second point from the middle on, the points around it, and the last two
    assert len(refits) <= abs(best - MIDDLE) // 2 + 6


def test_a_single_point_is_refitted(search_refits):
    """A given prior and noise leave one point."""
    assert search_refits([3.0])[0] == 3
