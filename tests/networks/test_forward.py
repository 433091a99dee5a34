import pytest
import torch
from cases import CASES, DOUBLE, normal
from torch import nn

from sklaplace.core.trees import tree_rows
from sklaplace.networks.forward import OUTPUT_MAPS, Forward, first_tensor

pytestmark = pytest.mark.usefixtures("rng_untouched")


def network(c=3):
    return CASES["mlp"].forward(c).module


def test_outputs_have_two_axes():
    module = network(1)
    x = normal(5, 2)
    squeezed = Forward(module, lambda rows: module(rows).squeeze(-1))
    assert torch.equal(squeezed(x), module(x))
    assert torch.equal(Forward(module, module)(x), module(x))


def test_first_of_several_outputs():
    module, x = network(), normal(5, 2)
    forward = Forward(module, lambda rows: (module(rows), None, "more"))
    assert torch.equal(forward(x), module(x))
    assert first_tensor((x, 1)) is x
    assert first_tensor(x) is x


@pytest.mark.parametrize("output_map", OUTPUT_MAPS)
def test_output_maps_undo_the_last_activation(output_map):
    f = 3 * normal(6, 4)
    undone = {"identity": f, "log": f.softmax(-1), "logit": f.sigmoid()}[output_map]
    expected = f.log_softmax(-1) if output_map == "log" else f
    torch.testing.assert_close(OUTPUT_MAPS[output_map](undone), expected)


@pytest.mark.parametrize("output_map", ["log", "logit"])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_certain_outputs_stay_finite(output_map, dtype):
    certain = torch.tensor([[0.0, 1.0]], dtype=dtype)
    logits = OUTPUT_MAPS[output_map](certain)
    assert logits.isfinite().all()
    assert logits[0, 0] < -15
    assert logits[0, 1] >= 0


def test_a_logit_layer_returns_the_logits_before_a_softmax():
    module = nn.Sequential(network(), nn.Softmax(-1))
    x = 500 * normal(5, 2)
    at_layer = Forward(module, module, logit_layer="0")
    assert torch.equal(at_layer(x), module[0](x))
    assert not any(m._forward_hooks for m in module.modules())
    logs = Forward(module, module, "log")
    torch.testing.assert_close(logs(x), module(x).clamp(min=1.2e-38).log())


def flags(module):
    modes = [m.training for m in module.modules()]
    return modes, [p.requires_grad for p in module.parameters()]


def test_frozen_restores_modes_and_gradients():
    module = nn.Sequential(network(), nn.Dropout(), nn.Flatten())
    module.train().requires_grad_(True)
    module[0].eval()
    module[0][0].bias.requires_grad_(False)
    before = flags(module)
    forward = Forward(module, module)
    with forward.frozen():
        assert not any(flags(module)[0])
        assert not any(flags(module)[1])
    assert flags(module) == before
    with pytest.raises(KeyError), forward.frozen():
        raise KeyError
    assert flags(module) == before


def test_rows_of_nested_batches():
    x = {"a": torch.arange(5), "b": [torch.arange(10).reshape(5, 2), (torch.ones(5),)]}
    cut = tree_rows(x, slice(1, 3))
    assert cut["a"].tolist() == [1, 2]
    assert cut["b"][0].tolist() == [[2, 3], [4, 5]]
    assert isinstance(cut["b"][1], tuple)
    assert cut["b"][1][0].shape == (2,)
    assert tree_rows(torch.arange(4), slice(2, 3)).tolist() == [2]
