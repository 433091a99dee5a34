import contracts
import pytest
import references
import torch
from cases import normal, positive
from contracts import N_ROWS, assert_equal, problem

from sklaplace.curvature import CURVATURES, accumulate, ggn
from sklaplace.hessians import Factored
from sklaplace.structures import STRUCTURES

every_curvature = pytest.mark.parametrize("name", CURVATURES)
every_likelihood = pytest.mark.parametrize("likelihood", references.LIKELIHOODS)

pytestmark = pytest.mark.usefixtures("rng_untouched")


@every_curvature
@every_likelihood
def test_factor(name, likelihood):
    contracts.check_factor(name, likelihood)


@every_likelihood
def test_ggn_is_the_hessian_of_the_loss(likelihood):
    known = references.LIKELIHOODS[likelihood]
    reference = references.reference(known)
    f, y = normal(N_ROWS, reference.n_outputs), reference.targets(N_ROWS)
    S = ggn(known, f, y)
    assert_equal(S @ S.mT, references.loss_hessian(known, f, y), 1e-12)


def test_weights_multiply_the_hessian():
    S, w = normal(4, 3, 2), positive(4)
    found = Factored(S).weighted(w).factor()
    assert_equal(found @ found.mT, w.reshape(-1, 1, 1) * (S @ S.mT), 1e-14)
    assert Factored(S).weighted(None).factor() is S
    assert Factored(S.float()).weighted(w).factor().dtype == torch.float32


@every_likelihood
def test_data_fit(likelihood):
    found = problem("cnn", likelihood)
    w = positive(N_ROWS)
    one = torch.tensor(1.0, dtype=torch.float64)
    f = found.forward(found.x).detach()
    log_prob = references.log_likelihood(found.likelihood, f, found.y, one)
    normalizer = found.likelihood.log_normalizer(one)
    for weights in (None, w):
        batches = found.batches(4, 2, weights=weights)
        _, data_fit = found.accumulator("diag", batches)
        row_weights = torch.ones(N_ROWS).double() if weights is None else weights
        n = row_weights.sum() * found.likelihood.n_targets(f.shape[1])
        assert_equal(data_fit.n_targets, n, 1e-12)
        expected = -row_weights @ log_prob - n * normalizer
        assert_equal(data_fit.loss, expected, 1e-12)


def test_observer_sees_every_batch():
    found, seen = problem("mlp"), []
    w = positive(N_ROWS)
    accumulator = STRUCTURES["diag"][0](found.layout)
    accumulate(
        found.forward,
        found.batches(4, 2, weights=w),
        found.likelihood,
        ggn,
        accumulator,
        lambda *batch: seen.append(batch),
    )
    f = torch.cat([batch[0] for batch in seen])
    assert_equal(f, found.forward(found.x).detach(), 1e-14)
    S = torch.cat([batch[1].factor() for batch in seen])
    assert_equal(S @ S.mT, w.reshape(-1, 1, 1) * found.parts.L, 1e-12)
    rows = torch.cat([batch[2].dense() for batch in seen])
    assert_equal(rows, torch.einsum("nck,ncp->nkp", S, found.parts.J), 1e-12)
    assert torch.equal(torch.cat([batch[3] for batch in seen]), found.y)
    assert torch.equal(torch.cat([batch[4] for batch in seen]), w)


def test_outputs_must_be_finite():
    found = problem("mlp", "Gaussian")
    x = found.x.clone()
    x[3] = torch.nan
    accumulator = STRUCTURES["diag"][0](found.layout)
    with pytest.raises(ValueError, match="outputs are not finite"):
        accumulate(
            found.forward, [(x, found.y, None)], found.likelihood, ggn, accumulator
        )
