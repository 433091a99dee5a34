import pytest
import torch
from cases import normal, positive
from contracts import assert_equal, problem, scale
from costs import counted

from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.curvature.rows import HeadBlock, LayerRows
from sklaplace.curvature.structures.lowrank import LowRankAccumulator
from sklaplace.likelihoods import Categorical

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("rng_untouched")]


def lowrank(found, **options):
    accumulator = LowRankAccumulator(found.layout, **options)
    found.accumulate(accumulator, found.batches(4, 2))
    return accumulator.decompose()


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_a_small_rank_keeps_the_leading_eigenvectors(rank, subset):
    """The sketch has ten extra columns; it is exact if these cover the rest."""
    found = problem("inplace", "Gaussian", subset)
    H = found.structure("full").dense()
    values = torch.linalg.eigvalsh(H)
    structure = lowrank(found, rank=rank)
    assert structure.root.rows.shape == (rank, len(H))
    kept = structure.dense()
    # Nyström's approximation never exceeds H, and is close to the best of its rank
    assert torch.linalg.eigvalsh(H - kept)[0] > -1e-9 * values[-1]
    best = values[:-rank].sum()
    assert (H - kept).trace() <= 1.1 * best + 1e-9 * values[-1]
    assert_equal(
        structure.eigenvalues[-rank:], structure.root.rows.pow(2).sum(1).flip(0)
    )


def test_exact_where_the_rank_suffices():
    found = problem("mlp")
    H = found.structure("full").dense()
    rank = int(torch.linalg.matrix_rank(H, hermitian=True, rtol=1e-12))
    assert rank < len(H)
    assert_equal(lowrank(found, rank=rank).dense(), H, 1e-9)
    assert len(lowrank(found, rank=len(H)).root.rows) <= rank + 1


def test_tolerance_drops_small_eigenvalues():
    found = problem("inplace")
    values = torch.linalg.eigvalsh(found.structure("full").dense())
    kept = lowrank(found, tolerance=1e-2).root.rows
    assert len(kept) == int((values > 1e-2 * values[-1]).sum())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mapped", [False, True], ids=["identity", "map"])
def test_many_classes_take_no_matrix_over_pairs_of_them(mapped, bias):
    """The sketch has fewer columns than the factor of the Hessian."""
    n, i, classes, outputs = 50, 4, 60, 50 if mapped else 60
    hessian = Categorical().hessian(normal(n, classes)).weigh_samples(positive(n))
    m = normal(classes, outputs, seed=2) if mapped else None
    inputs = [normal(n, 1, i, seed=3), None][: 1 + bias]
    jacobian = Jacobian([LayerRows(tuple(HeadBlock(hessian, m, a) for a in inputs))])
    specs = (
        BlockSpec("w", (outputs, i), "head"),
        BlockSpec("b", (outputs,), "head", True),
    )
    accumulator = LowRankAccumulator(Layout(specs[: 1 + bias]), rank=5)
    with counted() as costs:
        accumulator.update(jacobian)
    assert costs.largest <= n * classes * 15
    rows = jacobian.dense().flatten(0, 1)
    expected = rows.T @ rows @ accumulator.omega(rows.device)
    assert_equal(accumulator.sums, expected, 1e-12)


def test_no_curvature_at_all():
    found = problem("mlp")
    accumulator = LowRankAccumulator(found.layout)
    jacobian = found.jacobian()
    for g in jacobian.gradients():
        g.zero_()
    accumulator.update(jacobian)
    structure = accumulator.decompose()
    delta = positive(seed=1)
    precision = structure.precision(delta, scale())
    assert_equal(precision.logdet(), found.layout.n_parameters * delta.log())
    noise = normal(2, found.layout.n_parameters)
    assert_equal(precision.sample(noise), noise / delta.sqrt())
    prior = found.jacobian().gram(1 / delta.expand(found.layout.n_parameters))
    assert_equal(precision.functional_covariance(found.jacobian()), prior, 1e-6)
    some = found.jacobian()
    nothing = some.rmatmul(normal(some.n_samples, some.n_columns, 0))
    assert nothing.shape == (found.layout.n_parameters, 0)
