import pytest
import torch
from cases import normal
from hypothesis import given
from hypothesis import strategies as st

from sklaplace.core.linalg import (
    conjugate_gradients,
    gram,
    solve_psd,
    symmetric_eigh,
    wide_root_eigh,
)

pytestmark = pytest.mark.numerical


def random_psd(n, rank, seed, scale=1.0):
    """Return a positive semidefinite float64 matrix of a given rank."""
    factor = normal(n, rank, seed=seed)
    return scale * factor @ factor.mT


@given(
    n=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-12, 12),
    data=st.data(),
)
def test_eigenvectors_restore_the_matrix(n, seed, exponent, data):
    rank = data.draw(st.integers(0, n))
    matrix = random_psd(n, rank, seed, 10.0**exponent)
    eigenvalues, eigenvectors = symmetric_eigh(matrix)
    tolerance = 1e-13 * n * float(matrix.abs().max())

    assert (eigenvalues >= 0).all()
    assert (eigenvalues.diff() >= 0).all()
    restored = eigenvectors @ eigenvalues.diag() @ eigenvectors.mT
    torch.testing.assert_close(restored, matrix, rtol=0, atol=tolerance)


def test_eigenvalues_of_rounding_size_are_not_negative():
    rank_one = torch.full((4, 4), 1e6)
    rank_one[0, 0] -= 1.0  # indefinite, as rounding may leave it
    assert (symmetric_eigh(rank_one)[0] >= 0).all()


@given(
    n=st.integers(1, 5),
    more=st.integers(1, 5),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-12, 12),
    data=st.data(),
)
def test_eigenvectors_of_a_wide_root_restore_the_product(n, more, seed, exponent, data):
    rank = data.draw(st.integers(0, n))
    p = n + more
    root = normal(n, rank, seed=seed) @ normal(rank, p, seed=seed + 1)
    root = 10.0**exponent * root
    eigenvalues, eigenvectors = wide_root_eigh(root)
    tolerance = 1e-13 * p * float(root.abs().max()) ** 2

    assert (eigenvalues[:more] == 0).all()
    assert (eigenvalues >= 0).all()
    assert (eigenvalues.diff() >= 0).all()
    restored = eigenvectors @ eigenvalues.diag() @ eigenvectors.mT
    torch.testing.assert_close(restored, root.mT @ root, rtol=0, atol=p * tolerance)
    one = torch.eye(p).double()
    torch.testing.assert_close(eigenvectors.mT @ eigenvectors, one, rtol=0, atol=1e-13)


def test_small_eigenvalues_of_a_wide_root_are_not_lost():
    root = torch.tensor([[1.0, 0, 0], [0, 1e-11, 0]]).double()
    found = wide_root_eigh(root @ symmetric_eigh(random_psd(3, 3, 1))[1])[0]
    torch.testing.assert_close(
        found[1], torch.tensor(1e-22).double(), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("p", [1, 255, 256, 257, 600])
def test_gram_of_narrow_and_wide_matrices(p):
    x = normal(5, p)
    torch.testing.assert_close(gram(x), x.T @ x, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gram(x), gram(x).T, rtol=0, atol=1e-14)


def test_only_the_symmetric_part_is_read():
    matrix = random_psd(3, 3, 0)
    skew = torch.tensor([[0.0, 1, 2], [-1, 0, 3], [-2, -3, 0]], dtype=torch.float64)
    torch.testing.assert_close(symmetric_eigh(matrix + skew), symmetric_eigh(matrix))


def test_float32_in_float64_out_and_batches_over_leading_axes():
    matrices = torch.stack([random_psd(3, 2, seed) for seed in range(4)]).float()
    before = matrices.clone()
    eigenvalues, eigenvectors = symmetric_eigh(matrices.view(2, 2, 3, 3))
    assert eigenvalues.shape == (2, 2, 3)
    assert eigenvectors.shape == (2, 2, 3, 3)
    assert eigenvalues.dtype == eigenvectors.dtype == torch.float64
    singly = torch.stack([symmetric_eigh(matrix)[0] for matrix in matrices])
    torch.testing.assert_close(eigenvalues.view(4, 3), singly)
    assert torch.equal(matrices, before)


# --------------------------------------------------------------- linear systems
@pytest.mark.parametrize("precision", [1e-2, 1e-10])
@pytest.mark.parametrize("diagonal", [False, True])
def test_conjugate_gradients_reach_the_relative_residual(diagonal, precision):
    n = 12
    matrix = random_psd(n, n, 1) + torch.linspace(1, 1e3, n).double().diag()
    b = random_psd(n, 1, 2)[0]
    inverse = 1 / matrix.diagonal() if diagonal else torch.ones(n).double()

    def solved(max_iterations):
        return conjugate_gradients(
            lambda v: matrix @ v, lambda v: inverse * v, b, max_iterations, precision
        )

    x, n_iterations = solved(100)
    residual = b - matrix @ x
    assert residual @ (inverse * residual) <= precision**2 * (b @ (inverse * b))
    assert 0 < n_iterations <= n + 3
    assert solved(n_iterations)[1] == n_iterations
    assert solved(n_iterations - 1)[1] is None


def test_conjugate_gradients_of_nothing_take_no_product():
    def product(v):
        raise AssertionError

    zero = torch.zeros(3)
    x, n_iterations = conjugate_gradients(product, lambda v: v, zero, 5, 0.0)
    assert torch.equal(x, zero)
    assert n_iterations == 0


@pytest.mark.parametrize("entry", [-1.0, float("nan")])
def test_conjugate_gradients_stop_where_the_matrix_is_not_positive(entry):
    x, n_iterations = conjugate_gradients(
        lambda v: entry * v, lambda v: v, torch.ones(3), 5, 0.0
    )
    assert torch.equal(x, torch.zeros(3))
    assert n_iterations is None


@pytest.mark.parametrize("rank", [4, 2])
def test_solution_of_regular_and_singular_systems(rank):
    matrix = random_psd(4, rank, 0)
    expected = random_psd(4, 4, 1)[0]
    b = matrix @ expected
    assert torch.allclose(matrix @ solve_psd(matrix, b), b, rtol=1e-9, atol=1e-9)
