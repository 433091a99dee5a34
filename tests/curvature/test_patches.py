"""Layer inputs: unfolded patches and their second moment."""

import pytest
import torch
from cases import normal, positive
from contracts import assert_equal
from torch import nn

from sklaplace.curvature.patches import (
    LAYER_INPUTS,
    second_diagonal,
    second_moment,
)

# channels, height, width and arguments of the convolution
CONVOLUTIONS = {
    "same": (2, 11, 9, {"kernel_size": 3, "padding": 1}),
    "valid": (3, 9, 10, {"kernel_size": 3}),
    "reflected": (2, 9, 9, {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}),
    "strided": (2, 9, 9, {"kernel_size": 3, "stride": 2}),
    "dilated": (2, 11, 11, {"kernel_size": 3, "dilation": 2}),
    "pointwise": (3, 9, 9, {"kernel_size": 1}),
}
every_convolution = pytest.mark.parametrize("name", CONVOLUTIONS)


def patches(name):
    channels, height, width, options = CONVOLUTIONS[name]
    layer = nn.Conv2d(channels, 3, **options).double()
    x = normal(4, channels, height, width, seed=7)
    return layer, x, LAYER_INPUTS[nn.Conv2d](layer, x)


@every_convolution
def test_patches_times_weights_are_the_convolution(name):
    layer, x, found = patches(name)
    a = found.unfold()
    assert a.shape == found.shape
    expected = layer(x).detach()
    out = a @ layer.weight.detach().flatten(1).T + layer.bias.detach()
    assert_equal(out.mT.reshape(expected.shape), expected, 1e-12)


@every_convolution
@pytest.mark.parametrize("weighted", [False, True])
def test_moment_is_that_of_the_patches(name, weighted):
    _, _, found = patches(name)
    w = positive(4) if weighted else None
    a = found.unfold()
    v = a if w is None else a * w.reshape(-1, 1, 1)
    expected = torch.einsum("bri,brj->ij", v, a)
    assert_equal(second_moment(found, w), expected, 1e-12)
    assert_equal(second_diagonal(found, w), expected.diagonal(), 1e-12)
