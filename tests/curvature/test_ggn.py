import contracts
import pytest
import references
import torch
from cases import normal, positive
from contracts import N_ROWS, assert_equal, problem

from sklaplace.curvature.ggn import CURVATURES, GGN
from sklaplace.curvature.structures import STRUCTURES
from sklaplace.likelihoods import Bernoulli, Categorical, CategoricalMap

every_likelihood = pytest.mark.parametrize("likelihood", references.LIKELIHOODS)

pytestmark = pytest.mark.usefixtures("rng_untouched")


@every_likelihood
@pytest.mark.parametrize("name", CURVATURES)
def test_factors_are_finite_and_pure(name, likelihood):
    known = references.LIKELIHOODS[likelihood]
    reference = references.reference(known)
    y = reference.targets(N_ROWS)
    f = torch.linspace(-3, 3, N_ROWS * reference.n_outputs, dtype=torch.float64)
    f = f.reshape(N_ROWS, -1)
    before = f.clone(), y.clone()
    S = CURVATURES[name](known, f, y).factor()
    assert S.shape[:2] == f.shape
    assert S.isfinite().all()
    assert S.dtype == f.dtype
    assert torch.equal(CURVATURES[name](known, f, y).factor(), S)
    assert torch.equal(f, before[0])
    assert torch.equal(y, before[1])


@every_likelihood
def test_empirical_fisher_is_that_of_the_gradients(likelihood):
    """The empirical Fisher matrix has a higher order in the noise than the loss."""
    found = problem("inplace", likelihood)
    sigma = torch.tensor(0.6, dtype=torch.float64)
    f = found.forward(found.x).detach()
    leaf = f.clone().requires_grad_()
    total = references.log_likelihood(found.likelihood, leaf, found.y, sigma).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    rows = torch.einsum("nc,ncp->np", gradient, found.parts.J)
    ef = CURVATURES["ef"]
    structure = found.structure("full", found.batches(4, 2), ef)
    scale = found.likelihood.scale(sigma) ** ef.order
    assert_equal(scale * structure.dense(), rows.T @ rows, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "likelihood",
    [
        *references.LIKELIHOODS.values(),
        # what a criterion adds is not in drawn targets
        Categorical(label_smoothing=0.4),
        Categorical((0.5, 2.0, 1.0), 0.4),
        Bernoulli(3.0),
    ],
    ids=repr,
)
def test_sampled_fisher_tends_to_the_ggn(likelihood):
    """The standard error is ``2 / √draws`` of the largest entry for these outputs."""
    reference = references.reference(likelihood)
    f, y = normal(40, reference.n_outputs), reference.targets(40)
    n_draws = 4000
    sampled_ggn = CURVATURES["ggn_mc"].configured({"n_draws": n_draws}, seed=3)
    S = sampled_ggn(likelihood, f, y).factor()
    G = GGN(likelihood, f, y).factor()
    error = ((S @ S.mT - G @ G.mT) ** 2).mean().sqrt() / (G @ G.mT).abs().max()
    assert 0 < error < 2 / n_draws**0.5


def sampled(found, batches, seed=0):
    curvature = CURVATURES["ggn_mc"].configured({"n_draws": 3}, seed)
    return found.structure("full", batches, curvature).dense()


@pytest.mark.parametrize("case", ["mlp", "cnn", "dictionary"])
def test_what_a_row_draws_is_its_own(case):
    found = problem(case)
    expected = sampled(found, found.batches(N_ROWS))
    for sizes in ((1,) * N_ROWS, (4, 2)):
        assert_equal(sampled(found, found.batches(*sizes)), expected, 1e-12)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    batches = [found.rows(order[:4]), found.rows(order[4:])]
    assert_equal(sampled(found, batches), expected, 1e-12)
    assert not torch.allclose(sampled(found, found.batches(6), seed=1), expected)


@every_likelihood
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_identity_ignores_the_loss(subset, likelihood):
    """The curvature is ``Σ w JᵀJ``, which equals the GGN for a Gaussian likelihood."""
    found, w = problem("cnn", likelihood, subset), positive(N_ROWS)
    batches, kind = found.batches(4, 2, weights=w), CURVATURES["identity"]
    dense = found.structure("full", batches, kind).dense()
    J = found.parts.J
    assert_equal(dense, torch.einsum("n,ncp,ncq->pq", w, J, J), 1e-12)
    gap = dense - found.structure("full", batches).dense()
    if likelihood == "Gaussian":
        assert not gap.any()
    elif found.likelihood.is_classification:
        assert torch.linalg.eigvalsh(gap)[0] > -1e-12 * dense.trace()
    assert kind.order == GGN.order


def test_identity_leaves_out_ignored_positions():
    likelihood = CategoricalMap((2,))
    found = CURVATURES["identity"](likelihood, normal(1, 6), torch.tensor([[2, -1]]))
    S, kept = found.factor(), torch.tensor([1, 1, 1, 0, 0, 0]).double()
    assert torch.equal(S @ S.mT, kept.diag().unsqueeze(0))


@every_likelihood
@pytest.mark.parametrize("case", ["inplace", "cnn", "norms", "bare_parameters"])
def test_exact_hessian(case, likelihood):
    """Compare with the Hessian of the loss as a function of all weights."""
    found = problem(case, likelihood)
    module, w = found.forward.module, positive(N_ROWS)
    one = torch.tensor(1.0, dtype=torch.float64)

    def loss(flat):
        state = found.layout.unflatten(flat)
        f = torch.func.functional_call(module, state, (found.x,))
        log_prob = references.log_likelihood(found.likelihood, f, found.y, one)
        return -(w @ log_prob)

    flat = found.layout.read(module)
    expected = torch.autograd.functional.hessian(loss, flat)
    batches = found.batches(4, 2, weights=w)
    structure = found.structure("full", batches, CURVATURES["hessian"])
    assert_equal(structure.dense(), expected, 1e-10)
    lowest = torch.linalg.eigvalsh(expected)[0]
    assert lowest < -1e-3  # a network that is not trained
    assert_equal(structure.eigenvalues[0], lowest, 1e-10)
    weak, strong = (-lowest * factor for factor in (0.9, 1.1))
    with pytest.raises(ValueError, match=r"not positive definite.*curvature='ggn'"):
        structure.precision(weak, one).logdet()
    P = expected + strong * torch.eye(len(expected)).double()
    precision, jacobian = structure.precision(strong, one), found.jacobian()
    assert_equal(precision.logdet(), torch.logdet(P))
    J = found.parts.J
    cov = torch.einsum("ncp,pq,ndq->ncd", J, torch.linalg.inv(P), J)
    assert_equal(precision.functional_covariance(jacobian), cov)
    assert_equal(structure.project(jacobian).covariance(precision), cov)


@every_likelihood
def test_data_fit(likelihood):
    found = problem("cnn", likelihood)
    one = torch.tensor(1.0, dtype=torch.float64)
    f = found.forward(found.x).detach()
    log_prob = references.log_likelihood(found.likelihood, f, found.y, one)
    normalizer = found.likelihood.log_normalizer(one)
    for weights in (None, positive(N_ROWS)):
        batches = found.batches(4, 2, weights=weights)
        data_fit = found.accumulate(STRUCTURES["diag"][0](found.layout), batches)
        row_weights = torch.ones(N_ROWS).double() if weights is None else weights
        n = row_weights.sum() * found.likelihood.n_targets(f.shape[1])
        assert_equal(data_fit.n_targets, n, 1e-12)
        expected = -row_weights @ log_prob - n * normalizer
        assert_equal(data_fit.loss, expected, 1e-12)


def test_outputs_must_be_finite():
    found = problem("mlp", "Gaussian")
    x = found.x.clone()
    x[3] = torch.nan
    with pytest.raises(ValueError, match="outputs are not finite"):
        found.structure("diag", [(x, found.y, None)])


def test_exact_hessian_of_single_weights():
    whole, part = (
        problem("inplace", "Gaussian", subset)
        .structure("full", curvature=CURVATURES["hessian"])
        .dense()
        for subset in ("all", "subnetwork")
    )
    places = torch.tensor(contracts.SUBSET_OPTIONS["subnetwork"]["indices"])
    assert_equal(part, whole[places][:, places], 1e-12)
