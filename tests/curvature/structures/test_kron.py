from itertools import chain

import pytest
import references
import torch
from cases import Case, Net, normal, positive, rows
from contracts import N_ROWS, Problem, assert_equal, prior_precision, problem, scale
from costs import counted
from torch import nn

from sklaplace.curvature.blocks import Block
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.curvature.structures import kron
from sklaplace.curvature.structures.kron import KronAccumulator

pytestmark = pytest.mark.numerical


def wide_structure(monkeypatch, limit=2):
    """With a limit on the width of dense factors that small networks exceed."""
    monkeypatch.setattr(kron, "MAX_FACTOR", limit)
    found = problem("mlp")
    return found, found.structure("kron")


def test_wide_factors_keep_their_diagonal(monkeypatch):
    exact = problem("mlp").structure("kron")
    _, structure = wide_structure(monkeypatch)
    pairs = (chain.from_iterable(s.factors) for s in (structure, exact))
    for factor, dense in zip(*pairs, strict=True):
        expected = dense.dense()
        if len(expected) > 2:
            expected = expected.diagonal().diag()
        assert_equal(factor.dense(), expected, 1e-12)


def test_questions_with_wide_factors(monkeypatch):
    found, structure = wide_structure(monkeypatch)
    for prior in ("scalar", "layerwise"):
        delta = prior_precision(found.layout, prior)
        P = references.expand(delta, found.layout).diag()
        P = P + scale() * structure.dense()
        cov, J = torch.linalg.inv(P), found.parts.J
        precision = structure.precision(delta, scale())
        assert_equal(precision.logdet(), torch.logdet(P))
        functional = precision.functional_covariance(found.jacobian())
        assert_equal(functional, J @ cov @ J.mT)
        assert_equal(precision.variance(), cov.diagonal())
        root = precision.sample(torch.eye(len(P)).double()).T
        assert_equal(root @ root.T, cov)


def test_bytes_of_wide_factors(monkeypatch):
    layout = Layout((BlockSpec("a", (3, 100), "a"),))
    dense = KronAccumulator.n_bytes(layout)
    monkeypatch.setattr(kron, "MAX_FACTOR", 10)
    assert KronAccumulator.n_bytes(layout) < dense / 100


# ---------------------------------------------------- more inputs than samples
WIDTH = 10


def few_samples():
    """Samples of a layer with more inputs."""

    def make(c):
        first, head = nn.Linear(2, WIDTH), nn.Linear(WIDTH, c)
        return Net(lambda net, x: net.head(net.first(x).tanh()), first=first, head=head)

    return Problem(Case(make, rows(2)), "Categorical", "all")


def n_diagonalised(structure):
    """Sizes of the matrices whose eigenvectors are computed."""
    with counted() as costs:
        structure.eigenvalues  # noqa: B018, computes them
    return sorted(costs.eigh)


@pytest.mark.parametrize("sizes", [(6,), (1, 5), (2, 2, 2)], ids=str)
def test_factors_of_few_samples_are_those_of_the_reference(sizes):
    found = few_samples()
    structure = found.structure("kron", found.batches(*sizes))
    expected = references.kron(found.parts)
    assert_equal(structure.trace(), expected.trace())
    total = structure.factors[2][1].total()
    assert n_diagonalised(structure) == [1, 1, 2, 3, N_ROWS, WIDTH]
    assert_equal(structure.factors[2][1].total(), total)
    assert_equal(structure.dense(), expected)


def test_weighted_factors_of_few_samples_are_those_of_repeated_ones():
    found = few_samples()
    weights = torch.arange(N_ROWS).double()
    weighted = found.structure("kron", found.batches(2, 4, weights=weights))
    repeated = torch.arange(N_ROWS).repeat_interleave(weights.long())
    expected = found.structure("kron", [found.rows(repeated)])
    assert n_diagonalised(weighted) != n_diagonalised(expected)
    assert_equal(weighted.dense(), expected.dense())


def test_factors_are_dense_as_soon_as_samples_are_no_longer_few():
    found = few_samples()
    accumulator = found.accumulator("kron", found.batches(N_ROWS))
    once = accumulator.decompose()
    accumulator.merge(found.accumulator("kron", found.batches(2, 4)))
    twice = accumulator.decompose()
    assert n_diagonalised(once).count(WIDTH) < n_diagonalised(twice).count(WIDTH)
    assert_equal(twice.dense(), 2 * once.dense())
    once.resume(resumed := KronAccumulator(found.layout))
    found.accumulate(resumed, found.batches(1))
    expected = found.structure("kron", found.batches(6) + found.batches(1))
    assert_equal(resumed.decompose().dense(), expected.dense())


def reduced(found, *sizes, weights=None):
    accumulator = KronAccumulator(found.layout, weight_sharing="reduce")
    found.accumulate(accumulator, found.batches(*sizes, weights=weights))
    return accumulator.decompose()


@pytest.mark.parametrize("case", ["mlp", "cnn", "conv1d", "sequence", "called_twice"])
def test_reduced_positions(case):
    """The mean of inputs and the sum of gradients, as if there were one position."""
    found = problem(case)
    expected = references.kron(found.parts, reduces=True)
    for sizes in ((N_ROWS,), (1, 5), (2, 2, 2)):
        assert_equal(reduced(found, *sizes).dense(), expected)
    expanded = found.structure("kron").dense()
    assert torch.allclose(expected, expanded) == (case == "mlp")


def test_reducing_is_exact_where_positions_are_averaged():
    """One row of a head on every position; expanding is not."""
    found = problem("head_on_positions", subset="last_layer")
    row = torch.tensor([1.0, 0, 0, 0, 0, 0], dtype=torch.float64)
    H = found.structure("full", found.batches(N_ROWS, weights=row)).dense()
    n = found.layout.blocks[0].size  # the weight; the bias is a block of its own
    weight = reduced(found, N_ROWS, weights=row).dense()[:n, :n]
    assert_equal(weight, H[:n, :n])
    expanded = found.structure("kron", found.batches(N_ROWS, weights=row)).dense()
    assert (expanded[:n, :n] - H[:n, :n]).abs().max() > 1e-2 * H.abs().max()


def test_exact_for_a_single_row():
    """For one row and one output a Linear layer's block is a Kronecker product."""
    found = problem("mlp", "Bernoulli")
    first = [found.rows(slice(0, 1))]
    blocks = [2 * 3, 3, 3, 1]
    exact, kept = (found.structure(name, first).dense() for name in ("full", "kron"))
    mask = torch.block_diag(*[torch.ones(n, n).double() for n in blocks])
    assert_equal(kept, exact * mask, 1e-12)


def test_basis_and_back():
    structure = problem("cnn").structure("kron")
    weights = normal(3, structure.layout.n_parameters)
    assert_equal(structure.from_basis(structure.to_basis(weights)), weights, 1e-12)


def test_inputs_are_weighted_as_rows():
    """A row of weight zero has no part in the mean of ``a aᵀ``."""
    layout = Layout((BlockSpec("w", (2, 3), "w"),))
    a, g = normal(4, 5, 3), normal(4, 2, 5, 2, seed=1)
    w = positive(4)
    w[2] = 0
    accumulator = KronAccumulator(layout)
    weighted = g * w.sqrt().reshape(-1, 1, 1, 1)
    accumulator.update(Jacobian([Block(weighted, a)], w))
    kept = torch.tensor([0, 1, 3])
    mean = torch.einsum("n,nri,nrj->ij", w[kept], a[kept], a[kept])
    B = torch.einsum("n,nkro,nkrp->op", w, g, g)
    expected = torch.kron(B, mean / (5 * w.sum()))
    assert_equal(accumulator.decompose().dense(), expected, 1e-12)


def test_weight_and_bias_part_where_positions_come_up():
    """At one position they share a factor; a longer sequence ends that."""
    layer = BlockSpec("w", (2, 3), "l"), BlockSpec("b", (2,), "l", is_bias=True)
    accumulator = KronAccumulator(Layout(layer))
    outputs = weights = torch.zeros(2, 2, dtype=torch.float64)
    for positions in (1, 4, 1):
        g, a = normal(5, 2, positions, 2, seed=1), normal(5, positions, 3, seed=2)
        bias = g if positions == 1 else g.sum(2, keepdim=True)
        accumulator.update(Jacobian([Block(g, a), Block(bias)]))
        flat, summed = g.flatten(0, 2), bias.flatten(0, 2)
        weights = weights + flat.T @ flat
        outputs = outputs + summed.T @ summed
    (b_weight, _), (b_bias, _) = accumulator.decompose().factors
    assert_equal(b_weight.dense(), weights, 1e-12)
    assert_equal(b_bias.dense(), outputs, 1e-12)
