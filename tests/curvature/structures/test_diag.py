import pytest
import torch
from contracts import assert_equal, problem

from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.rows import Block, LayerRows
from sklaplace.curvature.structures.diag import Diag, DiagAccumulator

pytestmark = pytest.mark.numerical


class DenseRows(Diag):
    """The same structure; its rotated rows do not share gradients."""

    keeps_factors = False

    def rotated_layers(self, jacobian):
        for rows in jacobian.tensors():
            yield LayerRows((Block(rows.dense().unsqueeze(2)),))


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_variances_of_dense_rows(subset):
    last = problem("mlp", subset=subset)
    structure, jacobian = last.structure("diag"), last.jacobian()
    one = torch.ones((), dtype=torch.float64)
    dense = DenseRows(structure.layout, structure.diagonal).precision(one, one)
    variances = structure.precision(one, one).functional_variance(jacobian)
    assert_equal(dense.functional_variance(jacobian), variances)


def test_single_precision_rows_are_summed_in_double():
    found = problem("mlp")
    layers = [
        layer.map_factors(torch.Tensor.float, lambda a: a.float())
        for layer in found.jacobian().layers
    ]
    accumulator = DiagAccumulator(found.layout)
    for _ in range(3):
        accumulator.update(Jacobian(layers))
    diagonal = accumulator.decompose().diagonal
    assert diagonal.dtype == torch.float64
    # a few roundings of 6e-8 each
    assert_equal(diagonal, 3 * (found.parts.J**2).sum((0, 1)), 1e-6)
