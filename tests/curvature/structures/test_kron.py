from itertools import chain

import contracts
import pytest
import references
import torch
from cases import Case, Net, normal, positive, rows
from contracts import (
    N_ROWS,
    Problem,
    accumulate,
    assert_equal,
    problem,
    scale,
)
from costs import counted
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sklaplace.curvature.ggn import GGN
from sklaplace.curvature.jacobian import Jacobian, backpropagate
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.curvature.rows import Block, GroupedBlock, LayerRows
from sklaplace.curvature.structures import STRUCTURES, kron
from sklaplace.curvature.structures.kron import KronAccumulator

pytestmark = pytest.mark.numerical


def wide_structure(monkeypatch, limit=2):
    """Return a structure whose width limit for dense factors is very low."""
    monkeypatch.setattr(kron, "MAX_DENSE_WIDTH", limit)
    found = problem("mlp")
    return found, found.structure("kron")


def test_wide_factors_keep_their_diagonal(monkeypatch):
    exact = problem("mlp").structure("kron")
    _, structure = wide_structure(monkeypatch)
    pairs = (chain.from_iterable(s.factors) for s in (structure, exact))
    for factor, dense in zip(*pairs, strict=True):
        (expected,) = dense.dense()
        if len(expected) > 2:
            expected = expected.diagonal().diag()
        assert_equal(factor.dense().squeeze(0), expected, 1e-12)


def test_questions_with_wide_factors(monkeypatch):
    found, structure = wide_structure(monkeypatch)
    for prior in ("scalar", "layerwise"):
        contracts.check_answers(found, structure, prior, structure.dense())


# ---------------------------------------------------- more inputs than samples
WIDTH = 10


def few_samples():
    """Return fewer samples than the layer has inputs."""

    def make(c):
        first, head = nn.Linear(2, WIDTH), nn.Linear(WIDTH, c)
        return Net(lambda net, x: net.head(net.first(x).tanh()), first=first, head=head)

    return Problem(Case(make, rows(2)), "Categorical", "all")


def n_diagonalised(structure):
    """Record the sizes of the matrices whose eigenvectors are computed."""
    with counted() as costs:
        structure.eigenvalues  # noqa: B018, computes them
    return sorted(costs.eigh)


@pytest.mark.parametrize("sizes", [(6,), (1, 5), (2, 2, 2)], ids=str)
def test_factors_of_few_samples_are_those_of_the_reference(sizes):
    found = few_samples()
    structure = found.structure("kron", found.batches(*sizes))
    expected = references.kron(found.parts)
    assert_equal(structure.trace(), expected.trace())
    total = structure.factors[2][1].matrix()
    assert n_diagonalised(structure) == [1, 1, 2, 3, N_ROWS, WIDTH]
    assert_equal(structure.factors[2][1].matrix(), total)
    assert_equal(structure.dense(), expected)


def test_factors_are_dense_as_soon_as_samples_are_no_longer_few():
    found = few_samples()
    accumulator = found.accumulator("kron", found.batches(N_ROWS))
    once = accumulator.decompose()
    accumulator.merge(found.accumulator("kron", found.batches(2, 4)))
    twice = accumulator.decompose()
    assert n_diagonalised(once).count(WIDTH) < n_diagonalised(twice).count(WIDTH)
    assert_equal(twice.dense(), 2 * once.dense())
    once.add_to(resumed := KronAccumulator(found.layout))
    found.accumulate(resumed, found.batches(1))
    expected = found.structure("kron", found.batches(6) + found.batches(1))
    assert_equal(resumed.decompose().dense(), expected.dense())


def test_factors_of_few_gradients_keep_the_gradients():
    """A parameter outside Linear and convolution layers has one output per entry."""
    layout, width = Layout((BlockSpec("w", (10, 3), None),)), 30
    accumulator, seen = KronAccumulator(layout), []
    for n, is_dense in ((5, False), (9, False), (16, True)):
        seen.append(normal(n, 1, 1, width, seed=n))
        accumulator.update(Jacobian([LayerRows((Block(seen[-1]),))]))
        structure, rows = accumulator.decompose(), torch.cat(seen).flatten(0, 2)
        assert (width in n_diagonalised(structure)) == is_dense
        assert_equal(structure.dense(), rows.T @ rows)


def reduced(found, *sizes, weights=None):
    accumulator = KronAccumulator(found.layout, weight_sharing="reduce")
    found.accumulate(accumulator, found.batches(*sizes, weights=weights))
    return accumulator.decompose()


@pytest.mark.parametrize(
    "case",
    [
        "mlp",
        "cnn",
        "conv1d",
        "conv3d",
        "sequence",
        "called_twice",
        "grouped",
        "depthwise",
    ],
)
def test_reduced_positions(case):
    """Reducing takes the mean of inputs and the sum of gradients over positions."""
    found = problem(case)
    expected = references.kron(found.parts, reduces=True)
    for sizes in ((N_ROWS,), (1, 5), (2, 2, 2)):
        assert_equal(reduced(found, *sizes).dense(), expected)
    expanded = found.structure("kron").dense()
    assert torch.allclose(expected, expanded) == (case == "mlp")


def test_reducing_is_exact_where_positions_are_averaged():
    """Reducing is exact for one row of a head at every position; expanding is not."""
    found = problem("head_on_positions", subset="last_layer")
    row = torch.tensor([1.0, 0, 0, 0, 0, 0], dtype=torch.float64)
    H = found.structure("full", found.batches(N_ROWS, weights=row)).dense()
    n = found.layout.blocks[0].size  # the weight; the bias is a block of its own
    weight = reduced(found, N_ROWS, weights=row).dense()[:n, :n]
    assert_equal(weight, H[:n, :n])
    expanded = found.structure("kron", found.batches(N_ROWS, weights=row)).dense()
    assert (expanded[:n, :n] - H[:n, :n]).abs().max() > 1e-2 * H.abs().max()


def test_inputs_are_weighted_as_rows():
    """A row of weight zero does not count in the mean of ``a aᵀ``."""
    layout = Layout((BlockSpec("w", (2, 3), "w"),))
    a, g = normal(4, 5, 3), normal(4, 2, 5, 2, seed=1)
    w = positive(4)
    w[2] = 0
    accumulator = KronAccumulator(layout)
    weighted = g * w.sqrt().reshape(-1, 1, 1, 1)
    accumulator.update(Jacobian([LayerRows((Block(weighted, a),))], w))
    kept = torch.tensor([0, 1, 3])
    mean = torch.einsum("n,nri,nrj->ij", w[kept], a[kept], a[kept])
    B = torch.einsum("n,nkro,nkrp->op", w, g, g)
    expected = torch.kron(B, mean / (5 * w.sum()))
    assert_equal(accumulator.decompose().dense(), expected, 1e-12)


def test_weight_and_bias_part_where_positions_come_up():
    """Weight and bias share a factor for one position, but not for longer sequences."""
    layer = BlockSpec("w", (2, 3), "l"), BlockSpec("b", (2,), "l", is_bias=True)
    accumulator = KronAccumulator(Layout(layer))
    outputs = weights = torch.zeros(2, 2, dtype=torch.float64)
    for positions in (1, 4, 1):
        g, a = normal(5, 2, positions, 2, seed=1), normal(5, positions, 3, seed=2)
        bias = g if positions == 1 else g.sum(2, keepdim=True)
        layer = LayerRows((Block(g, a), Block(bias)))
        accumulator.update(Jacobian([layer] if positions == 1 else layer.split()))
        flat, summed = g.flatten(0, 2), bias.flatten(0, 2)
        weights = weights + flat.T @ flat
        outputs = outputs + summed.T @ summed
    (b_weight, _), (b_bias, _) = accumulator.decompose().factors
    assert_equal(b_weight.dense().squeeze(0), weights, 1e-12)
    assert_equal(b_bias.dense().squeeze(0), outputs, 1e-12)


# ------------------------------------------------------------ grouped convolutions


@pytest.mark.parametrize("case", ["grouped", "depthwise"])
def test_grouped_convolutions(case):
    for prior in ("scalar", "layerwise"):
        contracts.check_questions(problem(case), "kron", prior)
    contracts.check_weights(problem(case), "kron", "scalar")


@pytest.mark.parametrize("n_positions", [2, 40], ids="{} positions".format)
def test_grouped_inputs_or_rows_are_rotated_whichever_are_fewer(n_positions):
    b, k, r, G, o, i = 2, 3, n_positions, 4, 2, 5
    g, a, basis = normal(b, k, r, G, o), normal(b, r, G, i, seed=1), normal(G, i, i)
    block = GroupedBlock(g.flatten(-2), a.flatten(-2), G, basis)
    expected = torch.einsum("bkrgo,brgi,gij->bkgoj", g, a, basis).flatten(2)
    with FlopCounterMode(display=False) as flops:
        found = block.dense()
    assert_equal(found, expected, 1e-12)
    rotation = min(r, k * o) * b * G * i * i
    assert flops.get_total_flops() == 2 * (rotation + b * G * k * o * r * i)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("groups", [1, 2])
def test_one_sample_of_a_convolution_alone(groups, structure):
    """The rows are sums over positions, even if no sample shares gradients."""
    layer = nn.Conv2d(2, 2, 2, groups=groups, bias=False)

    def make(c):
        net = Net(lambda net, x: net.head(net.layer(x).flatten(1)), layer=layer)
        net.head = nn.Linear(8, c)
        return net

    found = Problem(Case(make, rows(2, 3, 3)), "Categorical", "all")
    layout = Layout(found.layout.blocks[:1])
    accumulator = STRUCTURES[structure][0](layout)
    batches = found.batches(N_ROWS)
    accumulate(found.forward, batches, found.likelihood, GGN, accumulator)
    delta = torch.tensor(0.7).double()
    precision = accumulator.decompose().precision(delta, scale())
    together, alone = (
        precision.functional_variance(backpropagate(found.forward, x, layout)[1])
        for x in (found.x, found.x[:1])
    )
    assert_equal(alone, together[:1], 1e-10)
