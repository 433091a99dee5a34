"""Subsets, structures, curvatures and likelihoods, compared with references.

The references provide the factor of the curvature if possible. Drawn targets come from
the package; `test_ggn` checks their distribution.
"""

from dataclasses import replace

import pytest
import references
import torch
from contracts import N_ROWS, accumulate, assert_equal, problem, scale

from sklaplace.core.random import row_hash
from sklaplace.curvature.ggn import CURVATURES
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.curvature.subsets import SUBSETS

pytestmark = pytest.mark.usefixtures("rng_untouched")

APPROXIMATE = [name for name, kind in CURVATURES.items() if not kind.is_exact]


def factor(found, curvature):
    """Return ``S`` (b, c, k) of every row."""
    f = found.forward(found.x).detach()
    if curvature == "ggn_mc":
        kind = CURVATURES[curvature]
        return kind(found.likelihood, f, found.y, keys=row_hash(found.x)).factor()
    if curvature == "identity":
        return torch.eye(f.shape[1], dtype=f.dtype).expand(len(f), -1, -1)
    leaf = f.clone().requires_grad_()
    one = torch.ones((), dtype=f.dtype)
    total = references.log_likelihood(found.likelihood, leaf, found.y, one).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return gradient.unsqueeze(-1)


@pytest.mark.parametrize("likelihood", references.LIKELIHOODS)
@pytest.mark.parametrize("curvature", APPROXIMATE)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("case", ["inplace", "cnn"])
def test_matrix_and_covariance(case, subset, structure, curvature, likelihood):
    found = problem(case, likelihood, subset)
    parts = found.parts
    if curvature != "ggn":
        S = factor(found, curvature)
        parts = replace(parts, L=S @ S.mT)
    accumulator = STRUCTURES[structure][0](found.layout)
    kind = CURVATURES[curvature]
    batches = found.batches(N_ROWS - 2, 2)
    accumulate(found.forward, batches, found.likelihood, kind, accumulator)
    fitted = accumulator.decompose()
    expected = references.STRUCTURES[structure](parts)
    assert_equal(fitted.dense(), expected)
    delta, s = torch.tensor(0.7, dtype=torch.float64), scale()
    P = s * expected + delta * torch.eye(len(expected)).double()
    cov = torch.einsum("ncp,pq,ndq->ncd", parts.J, torch.linalg.inv(P), parts.J)
    precision = fitted.precision(delta, s)
    assert_equal(precision.functional_covariance(found.jacobian()), cov)
    assert_equal(precision.logdet(), torch.logdet(P))
