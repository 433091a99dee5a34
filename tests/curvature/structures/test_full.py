import contracts
import pytest
import torch
from cases import CASES, normal
from contracts import N_ROWS, accumulate, assert_equal, problem
from torch import nn

from sklaplace.curvature.ggn import GGN
from sklaplace.curvature.jacobian import Centring, backpropagate
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import full
from sklaplace.curvature.structures.dual import Dual
from sklaplace.curvature.structures.full import Full, FullAccumulator
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.likelihoods import Categorical
from sklaplace.networks.forward import Forward

pytestmark = pytest.mark.numerical

every_prior = pytest.mark.parametrize("prior", PRIOR_STRUCTURES)
some_cases = pytest.mark.parametrize("case", ["inplace", "cnn", "called_twice"])


@pytest.fixture(params=[Full, Dual], ids=["primal", "dual"])
def form(request, monkeypatch):
    """Force one form of the structure, for any number of rows."""
    share = 0 if request.param is Full else 1e9
    monkeypatch.setattr(full, "MAX_ROWS_PER_PARAMETER", share)
    return request.param


@some_cases
@every_prior
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("likelihood", ["Categorical", "Gaussian"])
def test_both_forms_answer_alike(form, case, prior, subset, likelihood):
    found = problem(case, likelihood, subset)
    assert type(found.structure("full")) is form
    contracts.check_dense(found, "full")
    contracts.check_questions(found, "full", prior)
    contracts.check_pure(found, "full", prior)
    contracts.check_weights(found, "full", prior)


@every_prior
def test_both_forms_are_differentiable(form, prior):
    contracts.check_gradients(problem("without_bias", "Gaussian"), "full", prior)


def test_rows_become_a_matrix_where_they_are_many():
    """The last layer has fewer weights than there are rows."""
    few = problem("inplace", subset="all").structure("full")
    assert isinstance(few, Dual)
    found = problem("inplace", subset="last_layer")
    many = found.batches(N_ROWS) * 20
    assert isinstance(found.structure("full", many), Full)
    assert_equal(
        found.structure("full", many).dense(), 20 * found.structure("full").dense()
    )


def single_head(n_rows=50, n_inputs=20, n_outputs=6):
    """Return structure and Jacobian of a float32 last layer with centred rows."""
    module = nn.Linear(n_inputs, n_outputs)
    module.weight.data = normal(n_outputs, n_inputs, seed=1).float()
    module.bias.data = normal(n_outputs, seed=2).float()
    forward, x = Forward(module, module), 3 * normal(n_rows, n_inputs).float()
    layout = SUBSETS["last_layer"](forward, x)
    accumulator = FullAccumulator(layout)
    y = torch.arange(n_rows) % n_outputs
    accumulate(forward, [(x, y, None)], Categorical(), GGN, accumulator)
    _, jacobian = backpropagate(forward, x, layout, Centring())
    return accumulator.decompose(), jacobian


# under the last one the form would not be precise enough
@pytest.mark.parametrize("delta", [1.0, 1e-3, 1e-7, 1e-12])
def test_covariances_of_a_single_precision_layer_are_precise(delta):
    structure, jacobian = single_head()
    precision = structure.precision(torch.tensor(delta).double(), torch.ones(()))
    rows = precision.whiten(jacobian)
    found, expected = precision.functional_covariance(jacobian), rows @ rows.mT
    scales = expected.diagonal(dim1=1, dim2=2).sqrt()
    errors = (found - expected) / scales.unsqueeze(1) / scales.unsqueeze(2)
    assert errors.abs().max() < 1e-5
    # of all outputs but one, as rows that are centred sum to zero
    leading = torch.linalg.eigvalsh(found[:, 1:, 1:])[:, 0]
    torch.testing.assert_close(
        leading, torch.linalg.eigvalsh(expected[:, 1:, 1:])[:, 0], rtol=1e-4, atol=0
    )


# ------------------------------------------------------------- single precision
@pytest.mark.parametrize("delta", [1e-8, 1e-4, 1.0])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("cuts", [[40], [7] * 5 + [5]])
def test_single_precision_networks_have_the_variances_of_double(cuts, subset, delta):
    """Under a weak prior, rounding errors of row products would dominate."""
    answers = []
    for dtype in (torch.float32, torch.float64):
        forward = CASES["mlp"].forward(3)
        # the same numbers in both
        forward.module.float().to(dtype)
        x = (30 * CASES["mlp"].rows(40)).float().to(dtype)
        layout = SUBSETS[subset](forward, x[:3])
        accumulator = FullAccumulator(layout)
        parts = zip(x.split(cuts), (torch.arange(40) % 3).split(cuts), strict=True)
        batches = [(rows, y, None) for rows, y in parts]
        accumulate(forward, batches, Categorical(), GGN, accumulator)
        structure = accumulator.decompose()
        jacobian = backpropagate(forward, x, layout, Centring())[1]
        precision = structure.precision(*torch.tensor([delta, 1.0]).double())
        answers.append(
            [
                precision.functional_variance(jacobian),
                structure.project(jacobian).covariance(precision, diagonal=True),
                precision.logdet(),
            ]
        )
    for narrow, wide in zip(*answers, strict=True):
        # the network itself is rounded to 1e-7 in one of them
        torch.testing.assert_close(narrow, wide, rtol=2e-2, atol=0)


def test_a_precision_that_rounding_makes_indefinite():
    """A prior far below the rounding of the curvature still bounds the variances."""
    rows = torch.ones(6, 4, dtype=torch.float64) * torch.tensor([1e9, 1, 1, 1]).double()
    layout = Layout((BlockSpec("w", (4,)),))
    hessian = rows.T @ rows - 1e-2 * torch.eye(4, dtype=torch.float64)
    structure = Full(layout, hessian)
    delta, one = torch.tensor([1e-3, 1.0]).double()
    precision = structure.precision(delta, one)
    assert precision.variance().max() <= 1.01 / delta
    assert precision.logdet().isfinite()
