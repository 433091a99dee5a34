"""Layer inputs: patches unfolded, and their second moment without unfolding."""

import pytest
import torch
from cases import normal, positive
from contracts import assert_equal
from costs import calls
from torch import nn

from sklaplace.curvature.patches import (
    LAYER_INPUTS,
    Patches,
    second_diagonal,
    second_moment,
)

# channels, height, width and arguments of the convolution
CONVOLUTIONS = {
    "same": (2, 11, 9, {"kernel_size": 3, "padding": 1}),
    "valid": (3, 9, 10, {"kernel_size": 3}),
    "wide": (2, 12, 11, {"kernel_size": 5, "padding": 2}),
    "oblong": (2, 9, 12, {"kernel_size": (2, 4), "padding": (1, 0)}),
    "more_padding": (1, 8, 8, {"kernel_size": 3, "padding": 2}),
    "reflected": (2, 9, 9, {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}),
    "line": (2, 9, 9, {"kernel_size": (1, 3), "padding": (0, 1)}),
    "strided": (2, 9, 9, {"kernel_size": 3, "stride": 2}),
    "dilated": (2, 11, 11, {"kernel_size": 3, "dilation": 2}),
    "pointwise": (3, 9, 9, {"kernel_size": 1}),
    "tiny": (2, 4, 4, {"kernel_size": 3, "padding": 1}),
}
EVEN = {"same", "valid", "wide", "oblong", "more_padding", "reflected", "line"}
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
def test_moment_is_that_of_the_patches(name, weighted, monkeypatch):
    monkeypatch.setattr("sklaplace.curvature.patches.MIN_PRODUCTS", 0)
    _, _, found = patches(name)
    w = positive(4) if weighted else None
    a = found.unfold()
    v = a if w is None else a * w.reshape(-1, 1, 1)
    expected = torch.einsum("bri,brj->ij", v, a)
    assert_equal(second_moment(found, w), expected, 1e-12)
    assert_equal(second_diagonal(found, w), expected.diagonal(), 1e-12)


@every_convolution
def test_autocorrelation_is_used_where_it_holds(name, monkeypatch):
    """Nothing is unfolded for stride one and enough positions."""
    monkeypatch.setattr("sklaplace.curvature.patches.MIN_PRODUCTS", 0)
    with calls(Patches, "unfold") as unfoldings:
        second_moment(patches(name)[2], None)
    assert bool(unfoldings) == (name not in EVEN)
