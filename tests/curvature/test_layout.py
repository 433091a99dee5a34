import torch
from cases import CASES, normal
from contracts import problem

from sklaplace.curvature.layout import BlockSpec, Layout

BLOCKS = (
    BlockSpec("conv.weight", (4, 2, 3, 3), "conv"),
    BlockSpec("conv.bias", (4,), "conv", is_bias=True),
    BlockSpec("norm.weight", (5,)),
    BlockSpec("gain", ()),
)


def test_sizes():
    layout = Layout(BLOCKS)
    assert layout.sizes == (72, 4, 5, 1)
    assert layout.n_parameters == 82
    assert layout.layers == ["conv"]
    assert [block.factor_shape for block in BLOCKS] == [(4, 18), (4, 1), (5, 1), (1, 1)]


def test_split_and_unflatten():
    layout, vector = Layout(BLOCKS), torch.arange(82.0)
    shapes = [piece.shape for piece in layout.split(vector.repeat(2, 1))]
    assert shapes == [(2, 72), (2, 4), (2, 5), (2, 1)]
    parameters = layout.unflatten(vector)
    assert {name: tuple(p.shape) for name, p in parameters.items()} == {
        block.name: block.shape for block in BLOCKS
    }
    assert parameters["gain"] == 81
    assert torch.equal(torch.cat([p.flatten() for p in parameters.values()]), vector)


def test_read_gives_a_copy_in_the_order_of_parameters():
    module = CASES["cnn"].forward().module
    layout = problem("cnn").layout
    vector = layout.read(module)
    expected = torch.nn.utils.parameters_to_vector(module.parameters())
    assert torch.equal(vector, expected)
    vector += normal(len(vector))
    assert torch.equal(layout.read(module), expected)
