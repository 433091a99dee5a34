from itertools import product

import contracts
import pytest
import torch
from cases import CASES, normal, positive
from contracts import assert_equal, problem

from sklaplace.curvature import rows as layer_rows
from sklaplace.curvature.jacobian import backpropagate
from sklaplace.curvature.rows import Block
from sklaplace.curvature.subsets import SUBSETS

every_case = pytest.mark.parametrize("case", CASES)

pytestmark = pytest.mark.usefixtures("rng_untouched")


# ------------------------------------------------------------- backpropagation
def refuse(*_args, **_kwargs):
    raise RuntimeError("no batching rule")


@every_case
def test_rows_are_those_of_autograd(case):
    found = problem(case)
    f, jacobian = backpropagate(found.forward, found.x, found.layout)
    assert_equal(jacobian.dense(), found.parts.J, 1e-12)
    assert_equal(f, found.forward(found.x).detach(), 1e-12)


@every_case
def test_columns_are_combinations_of_outputs(case):
    found = problem(case)
    S = normal(contracts.N_ROWS, 3, 2, seed=4)
    seen = []

    def cotangents(f):
        seen.append(f)
        return S

    f, jacobian = backpropagate(found.forward, found.x, found.layout, cotangents)
    expected = torch.einsum("nck,ncp->nkp", S, found.parts.J)
    assert_equal(jacobian.dense(), expected, 1e-12)
    assert len(seen) == 1
    assert torch.equal(seen[0], f)
    assert not f.requires_grad


def n_hooks(module):
    """Return the number of hooks of each part."""
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]


@every_case
def test_module_and_rows_stay_as_they_were(case):
    forward, x = CASES[case].forward(), CASES[case].rows(4)
    module = forward.module
    before = {name: value.clone() for name, value in module.state_dict().items()}
    parameters = list(module.parameters())
    hooks = n_hooks(module)
    for select in SUBSETS.values():
        backpropagate(forward, x, select(forward, x))
    after = module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert not any(p.requires_grad or p.grad is not None for p in parameters)
    assert n_hooks(module) == hooks


def test_hooks_are_removed_when_the_network_raises():
    forward = CASES["mlp"].forward()
    layout = problem("mlp").layout
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        backpropagate(forward, normal(4, 5), layout)
    assert not any(n_hooks(forward.module))


def test_gradients_stop_at_the_lowest_selected_layer():
    """The backbone keeps no graph if only the last layer is selected."""
    found = problem("mlp", subset="last_layer")
    needed = []
    handle = found.forward.module[1].register_forward_hook(
        lambda _m, _i, out: needed.append(out.requires_grad)
    )
    backpropagate(found.forward, found.x, found.layout)
    handle.remove()
    assert needed == [False]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    "case", ["conv_same", "norms", "embedding", "bare_parameters", "tied"]
)
def test_no_batching_rule_is_needed(case, monkeypatch):
    """Column-by-column and row-by-row results equal the batched result."""
    found = problem(case)
    monkeypatch.setattr("sklaplace.curvature.derivatives.vmap", refuse)
    _, jacobian = backpropagate(found.forward, found.x, found.layout)
    assert_equal(jacobian.dense(), found.parts.J, 1e-12)


def test_rows_in_several_chunks(monkeypatch):
    monkeypatch.setattr("sklaplace.curvature.derivatives.CHUNK_ELEMENTS", 100)
    monkeypatch.setattr(layer_rows, "CHUNK_ELEMENTS", 100)
    monkeypatch.setattr(layer_rows, "DENSE_CHUNK_ELEMENTS", 100)
    monkeypatch.setattr(layer_rows, "PRODUCT_CHUNK_ELEMENTS", 10)
    for case in ("cnn", "norms", "called_twice"):
        found, v = problem(case), positive(problem(case).layout.n_parameters)
        _, jacobian = backpropagate(found.forward, found.x, found.layout)
        J = found.parts.J
        assert_equal(jacobian.dense(), J, 1e-12)
        assert_equal(jacobian.gram(v), (J * v) @ J.mT, 1e-12)
        squares = torch.cat([block.squares() for block in jacobian.tensors()])
        assert_equal(squares, (J**2).sum((0, 1)), 1e-12)


# ---------------------------------------------------------------------- blocks
BLOCKS = {
    "linear": Block(normal(4, 3, 1, 2, seed=1), normal(4, 1, 5, seed=2)),
    "positions": Block(normal(4, 3, 6, 2, seed=1), normal(4, 6, 5, seed=2)),
    "bias": Block(normal(4, 3, 1, 10, seed=1)),
}
every_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())


def dense(block):
    """Return dense rows, computed with loops."""
    b, k, r, _ = block.g.shape
    a = torch.ones(b, r, 1).double() if block.a is None else block.a
    rows = [
        sum(torch.outer(block.g[n, j, t], a[n, t]) for t in range(r)).flatten()
        for n, j in product(range(b), range(k))
    ]
    return torch.stack(rows).unflatten(0, (b, k))


@every_block
def test_contractions_are_those_of_dense_rows(block):
    rows, v, V = dense(block), positive(10), normal(10, 3)
    assert block.n_parameters == 10
    assert_equal(block.dense(), rows, 1e-12)
    assert_equal(block.squares(), (rows**2).sum((0, 1)), 1e-12)
    assert_equal(block.gram(v), (rows * v) @ rows.mT, 1e-12)
    assert_equal(block.matmul(V), rows @ V, 1e-12)


@every_block
def test_rotation_multiplies_by_a_kronecker_product(block):
    o, i = block.g.shape[-1], 1 if block.a is None else block.a.shape[-1]
    inputs = normal(i, i, seed=4)
    both = torch.kron(torch.eye(o).double(), inputs if i > 1 else torch.eye(1))
    assert_equal(block.rotate(inputs).dense(), dense(block) @ both, 1e-12)
    assert block.rotate(None).dense().equal(block.dense())
