import pytest
import torch
from contracts import assert_equal, problem

from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.structures.diag import DiagAccumulator

pytestmark = pytest.mark.numerical


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
