import pytest
import references
import torch
from cases import positive
from contracts import problem

from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.curvature.priors import PRIOR_STRUCTURES, expand

every_prior = pytest.mark.parametrize("prior", PRIOR_STRUCTURES)


@every_prior
def test_expand(prior):
    layout = problem("cnn").layout
    delta = positive(*PRIOR_STRUCTURES[prior](layout))
    assert torch.equal(expand(delta, layout), references.expand(delta, layout))


def test_one_parameter_per_tensor():
    """With one parameter per tensor, layerwise and diagonal priors are equal."""
    layout = Layout((BlockSpec("a", ()), BlockSpec("b", (1,)), BlockSpec("c", (1, 1))))
    delta = positive(3)
    assert torch.equal(expand(delta, layout), delta)
