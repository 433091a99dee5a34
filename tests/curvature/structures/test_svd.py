"""Very low noise and a wide prior, compared with 60-digit arithmetic."""

import mpmath
import pytest
import torch
from cases import normal
from contracts import assert_equal, problem

from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.rows import Block, LayerRows
from sklaplace.curvature.structures.dual import Dual
from sklaplace.curvature.structures.root import DenseRoot
from sklaplace.curvature.structures.svd import SVDPrecision

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("rng_untouched")]

N = 6
# the prior precision and 1/σ² of a regression with a noise of 1e-6
DELTA, SCALE = torch.tensor(1e-4).double(), torch.tensor(1e12).double()


def graded(found):
    """Return rows (N, P) with singular values from 1 to 1e-10."""
    p = found.layout.n_parameters
    left, right = (torch.linalg.qr(normal(n, N, seed=n)).Q for n in (N, p))
    return (left * torch.logspace(0, -10, N).double()) @ right.T


def structure():
    found = problem("mlp")
    return Dual(found.layout, DenseRoot(found.layout, graded(found)))


def exact_inverse(rows, delta):
    """Return ``(SCALE·RᵀR + diag δ)⁻¹``, (P, P)."""
    with mpmath.workdps(60):
        r = mpmath.matrix(rows.tolist())
        inverse_delta = mpmath.diag([1 / mpmath.mpf(x) for x in delta.tolist()])
        gram = mpmath.eye(len(rows)) / mpmath.mpf(float(SCALE))
        right = inverse_delta * r.T
        inverse = inverse_delta - right * mpmath.inverse(gram + r * right) * right.T
        values = [[float(x) for x in row] for row in inverse.tolist()]
        return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("prior", ["scalar", "diag"])
def test_variances_keep_their_digits(prior):
    """With R Rᵀ in float64, digits are lost or the Cholesky decomposition fails."""
    dual = structure()
    p = dual.layout.n_parameters
    delta = DELTA if prior == "scalar" else DELTA * (1 + torch.arange(p).double() / p)
    precision = dual.precision(delta, SCALE)
    assert isinstance(precision, SVDPrecision)
    expected = exact_inverse(dual.root.rows, delta.expand(p))
    identity = torch.eye(p).double()
    assert_equal(precision.solve(identity[0]), expected[0], 1e-6)
    assert_equal(precision.variance(), expected.diagonal(), 1e-6)
    root = precision.sample(identity)
    assert_equal(root.T @ root, expected, 1e-6)
    if prior == "scalar":  # the symmetric root
        assert_equal(root, root.T, 1e-9)
    # in directions that are nearly, and not at all, known from the data
    right = torch.linalg.svd(dual.root.rows, full_matrices=True).Vh
    rows = right[[2, N - 1, N]].unsqueeze(1)
    blocks = (Block(x.unsqueeze(2)) for x in dual.layout.split(rows))
    jacobian = Jacobian([LayerRows((block,)) for block in blocks])
    known = (rows @ expected @ rows.mT).squeeze(-1)
    assert_equal(precision.functional_variance(jacobian)[1:], known[1:], 1e-6)
    for found in (
        precision.functional_covariance(jacobian),
        precision.covariance_of_rows(rows),
        precision.whiten(jacobian) @ precision.whiten(jacobian).mT,
    ):
        assert_equal(found[1:], known[1:].unsqueeze(-1), 1e-6)


def test_determinant_and_effective_dimension():
    dual = structure()
    precision = dual.precision(DELTA, SCALE)
    k = float(SCALE / DELTA) * torch.logspace(0, -20, N).double()
    p = dual.layout.n_parameters
    expected = p * DELTA.log() + k.log1p().sum()
    assert_equal(precision.logdet(), expected, 1e-5)
    assert_equal(precision.effective_dimension(), (k / (1 + k)).sum(), 1e-5)
