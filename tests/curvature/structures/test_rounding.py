import pytest
import torch
from contracts import problem

from sklaplace.curvature.structures.rounding import variance_error


@pytest.mark.parametrize("name", ["full", "kron", "gp"])
def test_error_of_variances_is_bounded(name):
    """In float64, the error is nil for ordinary priors, total for vanishing priors."""
    built = problem("mlp").structure(name)
    ordinary, vanishing = (
        built.precision(torch.tensor(delta).double(), torch.tensor(1.0).double())
        for delta in (1.0, 1e-30)
    )
    eps = torch.finfo(torch.float64).eps
    assert variance_error(ordinary, eps) < 1e-6
    assert not variance_error(vanishing, torch.finfo(torch.float32).eps) < 0.1
