"""Closed forms, compared with the dense Hessian."""

import pytest
import references
import torch
from cases import normal, positive
from contracts import assert_equal

from sklaplace.likelihoods import Categorical
from sklaplace.likelihoods.output_hessian import Factored

N, WIDTH = 7, 4
every_likelihood = pytest.mark.parametrize("name", references.LIKELIHOODS)
every_map = pytest.mark.parametrize("mapped", [False, True], ids=["identity", "map"])
every_form = pytest.mark.parametrize("form", ["closed", "factored"])


def problem(name, form, mapped):
    """Return a weighted Hessian, its dense form ``MᵀΛM``, and M."""
    likelihood = references.LIKELIHOODS[name]
    known = references.reference(likelihood)
    f, w = 2 * normal(N, known.n_outputs, seed=1), positive(N, seed=2)
    dense = references.loss_hessian(likelihood, f, known.targets(N))
    dense = w.reshape(-1, 1, 1) * dense
    found = likelihood.hessian(f)
    if form == "factored":
        found = Factored(likelihood.hessian_factor(f))
    m = normal(known.n_outputs, WIDTH, seed=3) if mapped else None
    return found.weigh_samples(w), dense if m is None else m.T @ dense @ m, m


@every_likelihood
@every_form
@every_map
def test_parts_are_those_of_the_dense_hessian(name, form, mapped):
    found, dense, m = problem(name, form, mapped)
    assert_equal(found.moment(m), dense.sum(0), 1e-12)
    assert_equal(found.diagonals(m), dense.diagonal(dim1=1, dim2=2), 1e-12)
    assert_equal(found.matrices(m), dense, 1e-12)
    rows = found.rows(m)
    assert_equal(rows.mT @ rows, dense, 1e-12)
    for u in (normal(N, dense.shape[1], 3), normal(1, dense.shape[1], 3)):
        assert_equal(found.products(m, u), dense @ u, 1e-12)
    if m is None:
        assert found.n_outputs == dense.shape[1]
        assert_equal(found.total(), dense.sum(0), 1e-12)


@every_likelihood
@every_form
def test_no_weights_change_nothing(name, form):
    found, _, _ = problem(name, form, mapped=False)
    assert found.weigh_samples(None) is found


@every_likelihood
def test_dtype_of_large_parts_is_that_of_the_outputs(name):
    likelihood = references.LIKELIHOODS[name]
    f = normal(N, references.reference(likelihood).n_outputs).float()
    hessian = likelihood.hessian(f).weigh_samples(positive(N))
    assert hessian.factor().dtype == torch.float32
    assert hessian.diagonals(None).dtype == torch.float32
    assert hessian.matrices(None).dtype == torch.float32


def test_grams_of_a_certain_network_are_not_rounding():
    """``1 - p`` would round to zero, although the other probabilities are positive."""
    f = torch.tensor([[40.0, 0.0, -3.0], [0.0, 90.0, 2.0]], dtype=torch.float64)
    p = f.softmax(1)
    others = torch.stack([p[:, [1, 2]], p[:, [0, 2]], p[:, [0, 1]]], 1).sum(2)
    expected = -p.unsqueeze(1) * p.unsqueeze(2)
    expected.diagonal(dim1=1, dim2=2).copy_(p * others)
    found = Categorical().hessian(f).matrices(None)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


def test_curvature_of_a_certain_network_is_not_rounding():
    """Probabilities that float32 rounds to one still have nonzero curvature."""
    f = torch.tensor([[20.0, 0.0, -3.0], [0.0, 19.0, 2.0]])
    exact = Categorical().hessian(f.double())
    found = Categorical().hessian(f)
    expected = exact.total()
    assert ((found.total() - expected).abs() <= 1e-5 * expected.abs()).all()
    assert (found.total().diagonal() > 0).all()
    expected = exact.diagonals(None)
    assert ((found.diagonals(None) - expected).abs() <= 1e-6 * expected).all()
    u = normal(2, 3, 4)
    products = exact.products(None, u)
    # as sums p_i p_j (u_i - u_j), none of which is a small difference
    p = f.double().softmax(1)
    pairs = torch.einsum("bi,bj,bijq->biq", p, p, u.unsqueeze(2) - u.unsqueeze(1))
    assert ((products - pairs).abs() <= 1e-12 * pairs.abs()).all()
