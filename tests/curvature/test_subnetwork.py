from types import SimpleNamespace

import pytest
import references
import torch
from cases import positive
from contracts import N_ROWS, Network, problem
from skorch import NeuralNet
from skorch.dataset import Dataset
from torch import nn

from sklaplace.core.trees import tree_rows
from sklaplace.curvature.descent import Descent
from sklaplace.curvature.subnetwork import SCORES, SelectionProblem, choose

pytestmark = pytest.mark.usefixtures("rng_untouched")


def selection(found, batches=None, seed=0, order=None, criterion=nn.CrossEntropyLoss):
    batches = found.batches(4, 2) if batches is None else batches
    order = torch.arange(N_ROWS) if order is None else order
    net = NeuralNet(found.forward.module, criterion, verbose=0).initialize()
    dataset = Dataset(tree_rows(found.x, order), found.y[order])
    descent = Descent(net, dataset, {}, seed)
    spec = SimpleNamespace(likelihood=found.likelihood)
    network = Network(found.forward, spec, train=batches)
    return SelectionProblem(network, found.layout, descent, None, seed)


@pytest.mark.parametrize("by", SCORES)
@pytest.mark.parametrize("case", ["mlp", "cnn", "norms", "dictionary"])
def test_scores_depend_on_rows_and_seed_alone(case, by):
    found = problem(case)
    scores = SCORES[by](selection(found))
    assert scores.shape == (found.layout.n_parameters,)
    assert scores.isfinite().all()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    shuffled = [found.rows(order[:1]), found.rows(order[1:])]
    again = SCORES[by](selection(found, shuffled, order=order))
    torch.testing.assert_close(again, scores, rtol=1e-9, atol=1e-12)
    other = SCORES[by](selection(found, seed=1))
    assert torch.equal(other, scores) == (by in ("magnitude", "variance"))


def test_largest_weights():
    found = problem("mlp")
    weights = found.layout.read(found.forward.module).abs()
    chosen = choose(selection(found), "magnitude", 4)
    assert chosen.tolist() == sorted(chosen.tolist())
    others = torch.ones_like(weights, dtype=torch.bool)
    others[chosen] = False
    assert weights[chosen].min() >= weights[others].max()


def test_largest_posterior_variances():
    found = problem("inplace")
    w = positive(N_ROWS)
    parts = references.curvature(
        found.forward, found.x, found.layout, found.likelihood, found.y, w
    )
    variances = 1 / (references.full(parts).diagonal() + 0.7)
    chosen = choose(selection(found, found.batches(6, weights=w)), "variance", 5)
    expected = torch.sort(variances, descending=True, stable=True).indices[:5]
    assert chosen.tolist() == sorted(expected.tolist())


def test_of_equal_scores_the_first_and_what_no_prediction_feels_last():
    found = problem("bare_parameters")  # two weights are not used
    n = found.layout.n_parameters
    names = [block.name for block in found.layout.blocks]
    unused = sum(found.layout.sizes[: names.index("unused")])
    others = [place for place in range(n) if place not in (unused, unused + 1)]
    assert choose(selection(found), "variance", n - 2).tolist() == others
    chosen = choose(selection(found), "variance", n - 1).tolist()
    assert chosen == sorted([*others, unused])
    assert choose(selection(found), "random", n).tolist() == list(range(n))


def test_weights_that_run_away_are_no_choice():
    found = problem("linear_only", "Gaussian")
    far = selection(found, criterion=nn.MSELoss)
    with pytest.raises(ValueError, match=r"'by'\]='swag' has no finite.*'lr'"):
        choose(far, "swag", 2, lr=1e6, n_snapshots=1000)


def test_swag_moves_where_the_loss_slopes():
    """Only weights that affect the loss move."""
    scores = SCORES["swag"](selection(problem("bare_parameters")))
    layout = problem("bare_parameters").layout
    pieces = dict(
        zip([b.name for b in layout.blocks], layout.split(scores), strict=True)
    )
    assert (pieces.pop("unused") == 0).all()
    assert all((piece > 0).all() for piece in pieces.values())
