import torch
from cases import normal
from contracts import N_ROWS, assert_equal, prior_precision, problem, scale

from sklaplace.structures.full import FullAccumulator


def test_hessian_is_symmetric_to_the_last_bit():
    for case in ("cnn", "called_twice", "norms"):
        H = problem(case).structure("full").dense()
        assert torch.equal(H, H.T)


def test_priors_of_equal_entries_are_the_same_prior():
    """The Cholesky factor and the eigenbasis answer alike."""
    found = problem("cnn", "Gaussian")
    structure, jacobian = found.structure("full"), found.jacobian()
    scalar = torch.tensor(0.8, dtype=torch.float64)
    noise = normal(2, found.layout.n_parameters)
    for prior in ("layerwise", "diag"):
        same = scalar.expand(prior_precision(found.layout, prior).shape)
        assert_equal(structure.logdet(same, scale()), structure.logdet(scalar, scale()))
        assert_equal(
            structure.covariance(jacobian, same, scale()),
            structure.covariance(jacobian, scalar, scale()),
        )
        assert_equal(
            structure.variance(same, scale()), structure.variance(scalar, scale())
        )
        assert structure.sample(noise, same, scale()).shape == noise.shape


def test_rank_is_no_more_than_the_rows_allow():
    """Directions that no row sees have the prior's variance exactly."""
    found = problem("inplace", "Bernoulli")
    e = found.structure("full").eigenvalues
    assert (e[:-N_ROWS] < 1e-12 * e[-1]).all()
    assert (e >= 0).all()


def test_bytes_are_those_of_the_hessian_at_least():
    layout = problem("cnn").layout
    assert FullAccumulator.n_bytes(layout) >= 8 * layout.n_parameters**2
