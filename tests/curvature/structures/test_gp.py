from functools import partial

import contracts
import pytest
import torch
from cases import generator, normal
from contracts import N_ROWS, ROUNDING, assert_equal, prior_precision, problem, scale

from sklaplace.core.random import row_hash
from sklaplace.curvature.ggn import CURVATURES, GGN
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.structures.function_space import PointsAccumulator

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("rng_untouched")]

FEW = 3


def accumulated(found, batches, curvature=GGN):
    accumulator = PointsAccumulator(found.layout, FEW)
    found.accumulate(accumulator, batches, curvature)
    return accumulator


def chosen_rows(found):
    """Return the indices of the rows with the smallest keys."""
    return row_hash(found.x).argsort()[:FEW].sort().values


@pytest.mark.parametrize("subset", ["all", "last_layer", "subnetwork"])
@pytest.mark.parametrize("case", ["mlp", "inplace", "cnn"])
def test_the_curvature_is_that_of_the_points(case, subset):
    """The curvature uses the points' full likelihood Hessian, and no other rows."""
    found = problem(case, subset=subset)
    expected = found.structure("full", [found.rows(chosen_rows(found))]).dense()
    structure = accumulated(found, found.batches(4, 2)).decompose()
    assert_equal(structure.dense(), expected)
    assert not torch.allclose(expected, found.structure("full").dense())


@pytest.mark.parametrize("case", ["mlp", "inplace", "cnn"])
def test_contracts_hold_for_few_points(case, monkeypatch):
    """Added rows displace points, and equal rows are one point."""
    _, kind = STRUCTURES["gp"]
    few = partial(PointsAccumulator, n_points=FEW)
    monkeypatch.setitem(STRUCTURES, "gp", (few, kind))
    found = problem(case)
    contracts.check_batches(found, "gp")
    contracts.check_merge(found, "gp")
    contracts.check_resumed(found, "gp")
    contracts.check_weights(found, "gp", "scalar")


@pytest.mark.parametrize("curvature", ["ggn", "ef", "ggn_mc"])
def test_points_do_not_depend_on_batches_and_order(curvature):
    found, kind = problem("mlp"), CURVATURES[curvature]
    whole = accumulated(found, found.batches(N_ROWS), curvature=kind).decompose()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    shuffled = [found.rows(order[:1]), found.rows(order[1:])]
    other = accumulated(found, shuffled, curvature=kind).decompose()
    assert_equal(other.dense(), whole.dense(), ROUNDING)
    # in the order of their keys, so that draws under a layerwise prior are the same
    delta = prior_precision(found.layout, "layerwise")
    noise = normal(2, found.layout.n_parameters)
    drawn = [s.precision(delta, scale()).sample(noise) for s in (whole, other)]
    assert_equal(drawn[1], drawn[0], ROUNDING)


@pytest.mark.parametrize("curvature", ["ggn", "ggn_mc", "ef"])
def test_copies_take_no_memory(curvature):
    """Copies share a point; copies with different targets may take a few points."""
    found = problem("mlp")
    copies = torch.arange(N_ROWS).repeat(50)
    x, y, _ = found.rows(copies)
    y = torch.randint(3, y.shape, generator=generator(5)) if curvature == "ef" else y
    batches = [(x[:120], y[:120], None), (x[120:], y[120:], None)]
    kind = CURVATURES[curvature]
    structure = accumulated(found, batches, curvature=kind).decompose()
    n_rows = sum(point.n_samples for point in structure.points.jacobians)
    assert n_rows <= FEW * (3 if curvature == "ef" else 1)
    kept = torch.isin(copies, chosen_rows(found))
    full = found.structure("full", [(x[kept], y[kept], None)], kind)
    assert_equal(structure.dense(), full.dense(), 1e-9)
