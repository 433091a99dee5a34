import pytest
import torch
from cases import CASES, Net, call, normal, tied
from contracts import SUBSET_OPTIONS, assert_equal, problem
from references import jacobian
from torch import nn
from zoo import ZOO

from sklaplace.curvature.jacobian import backpropagate
from sklaplace.curvature.subsets import (
    all_weights,
    last_layer,
    named,
    subnetwork,
    trainable,
)
from sklaplace.networks.forward import Forward

pytestmark = pytest.mark.usefixtures("rng_untouched")


def forward_of(run, **parts):
    """Return a float64 network of linear layers, or of the given modules."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = {k: nn.Linear(*v) if type(v) is tuple else v() for k, v in parts.items()}
    module = Net(run, **made).double().eval()
    forward = Forward(module, lambda x: call(module, x))
    module.requires_grad_(False)
    return forward


def names(layout):
    return [block.name for block in layout.blocks]


def assert_right(forward, x, layout):
    _, found = backpropagate(forward, x, layout)
    assert_equal(found.dense(), jacobian(forward, x, layout), 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_all_lists_every_parameter_in_order(case):
    found = problem(case)
    parameters = dict(found.forward.module.named_parameters())
    assert {block.name: block.shape for block in found.layout.blocks} == {
        name: tuple(parameter.shape) for name, parameter in parameters.items()
    }
    assert names(found.layout) == list(parameters)
    expected = nn.utils.parameters_to_vector(parameters.values())
    vector = found.layout.read(found.forward.module)
    assert torch.equal(vector, expected)
    vector += 1  # a copy
    assert torch.equal(found.layout.read(found.forward.module), expected)


@pytest.mark.parametrize("case", CASES)
def test_dense_rows_where_they_are_needed_and_only_there(case):
    blocks = problem(case).layout.blocks
    assert {block.name for block in blocks if block.layer is None} == CASES[case].dense


@pytest.mark.parametrize("case", CASES)
def test_last_layer_is_the_head(case):
    found = problem(case, subset="last_layer")
    every = list(dict(found.forward.module.named_parameters()))
    head = {name for name in every if name.startswith(("head.", "weight", "bias"))}
    expected = head or {name for name in every if name[0] == every[-1][0]}
    assert set(names(found.layout)) == expected
    assert all(block.layer is not None for block in found.layout.blocks)
    _, rows = backpropagate(found.forward, found.x, found.layout)
    assert_equal(rows.dense(), found.parts.J, 1e-12)


def test_last_layer_must_be_linear():
    parts = {"first": (2, 3), "norm": lambda: nn.LayerNorm(3)}
    forward = forward_of(lambda net, x: net.norm(net.first(x)), **parts)
    with pytest.raises(ValueError, match=r"here it is LayerNorm \('norm'\)"):
        last_layer(forward, normal(4, 2))


def test_network_without_parameters_has_no_last_layer():
    module = nn.Flatten()
    with pytest.raises(ValueError, match="subset_of_weights='last_layer' needs"):
        last_layer(Forward(module, module), normal(4, 2))


def test_network_that_gives_one_row_for_all_is_refused():
    forward = forward_of(lambda net, x: net.head(x).mean(0, keepdim=True), head=(2, 3))
    with pytest.raises(ValueError, match="one output per sample"):
        all_weights(forward, normal(4, 2))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("run", "head", "layers"),
    [
        # a subclass of a known layer
        (lambda net, x: net.head(x), lambda: Doubled(2, 3), [None, None]),
        # a weight that is also added directly to the outputs
        (
            lambda net, x: net.head(x) + net.head.weight.sum(1),
            (2, 3),
            [None, "head"],
        ),
    ],
    ids=["subclass", "used beside"],
)
def test_weights_without_the_form_of_a_layer_get_dense_rows(run, head, layers):
    forward = forward_of(run, head=head)
    layout = all_weights(forward, normal(4, 2))
    assert [block.layer for block in layout.blocks] == layers
    assert_right(forward, normal(4, 2), layout)


def test_last_layer_is_one_that_reaches_the_outputs():
    """skorch uses the first output; the last call belongs to another output."""

    def run(net, x):
        h = net.first(x).tanh()
        return net.head(h), net.auxiliary(h)

    forward = forward_of(run, first=(2, 3), head=(3, 2), auxiliary=(3, 4))
    assert names(last_layer(forward, normal(4, 2))) == ["head.weight", "head.bias"]


def test_last_layer_with_a_weight_of_another_layer():
    forward = forward_of(lambda net, x: net.part(x), part=lambda: tied(3)[:3])
    assert_right(forward, normal(4, 3), last_layer(forward, normal(4, 3)))


def test_tied_head_is_selected_whole_and_dense():
    """The head shares its weight with the first layer."""

    def run(net, x):
        return net.head(net.middle(net.first(x).tanh()).tanh())

    forward = forward_of(run, first=(4, 3, False), middle=(3, 4), head=(4, 3))
    forward.module.head.weight = forward.module.first.weight
    layout = last_layer(forward, torch.eye(4, dtype=torch.float64)[:3])
    layers = {block.name: block.layer for block in layout.blocks}
    assert layers == {"first.weight": None, "head.bias": "head"}


# -------------------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("case", "given", "expected"),
    [
        ("inplace", ["2"], ["2.weight", "2.bias"]),
        ("inplace", ["4.bias", "0.weight"], ["0.weight", "4.bias"]),
        ("attention", ["layer.norm1"], ["layer.norm1.weight", "layer.norm1.bias"]),
        ("bare_parameters", ["gain", "head"], ["gain", "head.weight", "head.bias"]),
        ("linear_only", [""], ["weight", "bias"]),
    ],
)
def test_names_of_parameters_and_of_modules(case, given, expected):
    forward, x = CASES[case].forward(), CASES[case].rows(4)
    layout = named(forward, x, given)
    assert names(layout) == expected
    assert_right(forward, x, layout)


KNOWN = r"'0\.bias', '0\.weight', '2\.bias', '2\.weight'\.$"


@pytest.mark.parametrize(
    ("case", "given", "words"),
    [
        ("mlp", ["0", "heda"], rf"^subset_of_weights=\['heda'\] .*{KNOWN}"),
        ("attention", ["heda"], r"' …\.$"),
        # no name is the beginning of another
        ("attention", ["layer.norm"], r"\['layer\.norm'\] is not known"),
    ],
)
def test_names_that_are_not_known_are_told_with_those_that_are(case, given, words):
    with pytest.raises(ValueError, match=words):
        named(CASES[case].forward(), CASES[case].rows(4), given)


def test_a_named_head_is_as_quick_as_the_last_layer():
    """The named head need not be the last layer with parameters."""
    forward, x = CASES["affine_head"].forward(), CASES["affine_head"].rows(4)
    assert named(forward, x, ["head"]).blocks == last_layer(forward, x).blocks
    assert named(forward, x, ["head"]).head is not None
    assert named(forward, x, ["first"]).head is None
    assert named(forward, x, ["head.bias"]).head is None

    def scaled(net, x):
        return net.temperature(net.head(net.first(x).tanh()))

    sizes = {"first": (2, 3), "head": (3, 3), "temperature": (3, 3, False)}
    forward = forward_of(scaled, **sizes)
    layout = named(forward, x, ["head"])
    assert layout.head is not None
    assert_right(forward, x, layout)


# ---------------------------------------------------------------------- trainable
def test_only_adapters_and_the_head_are_trainable():
    forward, x = ZOO["adapter"].forward(), ZOO["adapter"].rows(4)
    layout = trainable(forward, x)
    expected = ["down.weight", "up.weight", "head.weight", "head.bias"]
    assert names(layout) == expected
    assert_right(forward, x, layout)


def test_nothing_is_trainable():
    module = CASES["mlp"].forward().module
    with pytest.raises(ValueError, match=r"all are frozen\. Use 'last_layer'"):
        trainable(Forward(module, module), normal(4, 2))


# ------------------------------------------------------------------ single weights
@pytest.mark.parametrize("case", CASES)
def test_single_weights(case):
    found = problem(case, subset="subnetwork")
    assert_right(found.forward, found.x, found.layout)
    whole = problem(case).layout.read(found.forward.module)
    weights = found.layout.read(found.forward.module)
    assert torch.equal(weights, whole[SUBSET_OPTIONS["subnetwork"]["indices"]])
    changed = found.layout.unflatten(weights + 1, found.forward.module)
    for name, value in changed.items():
        own = found.forward.module.get_parameter(name)
        (block,) = [b for b in found.layout.blocks if b.name == name]
        expected = torch.zeros_like(own.flatten())
        expected[block.indices] = 1
        assert_equal((value - own).flatten(), expected, 1e-15)


def test_number_of_single_weights():
    forward, x = CASES["mlp"].forward(), CASES["mlp"].rows(4)
    assert subnetwork(forward, x).n_parameters == 21  # there are no more
    assert subnetwork(forward, x, n_weights=5).n_parameters == 5
    assert subnetwork(forward, x, indices=[1, 3]).n_parameters == 2
    with pytest.raises(ValueError, match="n_weights=22, but the network has 21"):
        subnetwork(forward, x, n_weights=22)
    with pytest.raises(ValueError, match="index 21, but the network has 21 weights"):
        subnetwork(forward, x, indices=[21])
