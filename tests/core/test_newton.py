from dataclasses import replace

import pytest
import references
import torch
from cases import DOUBLE, normal, positive
from contracts import assert_equal
from sklearn.exceptions import ConvergenceWarning
from tuning_problems import N_ROWS, fit

from sklaplace.core import newton

every_likelihood = pytest.mark.parametrize("likelihood", references.CONVEX)
every_case = pytest.mark.parametrize("case", ["mlp", "without_bias", "affine_head"])

pytestmark = pytest.mark.usefixtures("rng_untouched")


def problem(likelihood, case="mlp", dtype=DOUBLE):
    """Return a head with its outputs, and one precision per weight."""
    head = fit(likelihood, case=case, weights=positive(N_ROWS)).linear_model
    object.__setattr__(head, "dtype", dtype)
    theta = head.weights + 0.3 * normal(len(head.weights), seed=3)
    return head, head.at(theta), positive(len(head.weights), seed=4)


def minimum(head, rho, tolerance=newton.ROUNDING):
    zero = torch.zeros_like(rho)
    return newton.minimum(head, rho, zero, head.weights, tolerance)


def assert_flat(head, found, rho):
    _, slope, _ = head.objective(found, rho, torch.zeros_like(rho), DOUBLE)
    assert slope.abs().max() < 1e-6


# with so many inputs the preconditioner takes all samples
@every_likelihood
@pytest.mark.parametrize("case", ["mlp", "affine_head"])
def test_products_and_preconditioner_are_those_of_the_dense_curvature(case, likelihood):
    """The preconditioner inverts the block of each output."""
    head, f, rho = problem(likelihood, case)
    v = normal(len(rho), seed=5)
    dense = head.dense_curvature_at(f, rho)
    assert_equal(head.curvature_at(f, rho, DOUBLE)(v), dense @ v, 1e-12)
    o, i = head.layout.blocks[0].factor_shape
    apply = head.preconditioner_at(f, rho, DOUBLE)
    for output in range(o):
        mine = torch.arange(output * i, (output + 1) * i)
        if len(head.layout.blocks) > 1:
            mine = torch.cat([mine, torch.tensor([o * i + output])])
        v = torch.zeros(len(rho), dtype=DOUBLE)
        v[mine] = normal(len(mine), seed=6)
        expected = torch.zeros_like(v)
        expected[mine] = torch.linalg.solve(dense[mine][:, mine], v[mine])
        assert_equal(apply(v), expected, 1e-10)


@every_likelihood
@every_case
def test_weights_common_to_all_classes_are_left_to_the_prior(case, likelihood):
    head, f, _ = problem(likelihood, case)
    rho = torch.full_like(head.weights, 0.3)
    apply = head.preconditioner_at(f, rho, DOUBLE)
    # a preconditioner is symmetric and positive definite
    u, v = normal(2, len(rho), seed=6)
    assert float(u @ apply(v)) == pytest.approx(float(v @ apply(u)), rel=1e-10)
    assert u @ apply(u) > 0
    if case == "affine_head" or not head.likelihood.is_shift_invariant:
        return
    n_rows, n_inputs = head.by_output(rho).shape
    n_groups = head.likelihood.n_blocks
    rows = normal(n_groups, 1, n_inputs, seed=5)
    rows = rows.expand(-1, n_rows // n_groups, -1).flatten(0, 1)
    common = head.from_outputs(rows)
    assert_equal(head.dense_curvature_at(f, rho) @ common, 0.3 * common, 1e-12)
    assert_equal(apply(common), common / 0.3, 1e-12)


@every_likelihood
@every_case
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("prior", ["scalar", "diag", "orders of magnitude"])
def test_the_gradient_vanishes_at_the_minimum(prior, dtype, case, likelihood):
    head, _, rho = problem(likelihood, case, dtype)
    if prior == "scalar":
        rho = torch.full_like(rho, 0.3)
    elif prior == "orders of magnitude":
        rho = 10.0 ** torch.linspace(-6, 8, len(rho), dtype=DOUBLE)
    assert_flat(head, minimum(head, rho), rho)


@every_likelihood
@pytest.mark.parametrize("prior", [0.3, None])
@pytest.mark.parametrize("tolerance", [0.2, 1e-1, 1e-4])
def test_loose_tolerances_bound_the_excess_of_the_loss(tolerance, prior, likelihood):
    head, _, rho = problem(likelihood, dtype=torch.float32)
    rho = rho if prior is None else torch.full_like(rho, prior)
    zero = torch.zeros_like(rho)
    loss, least = (
        float(head.objective(minimum(head, rho, t), rho, zero, DOUBLE)[0])
        for t in (tolerance, newton.ROUNDING)
    )
    assert -1e-9 <= (loss - least) / (1 + abs(least)) <= tolerance


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rho", [1e-7, 1e-12, 1e-16])
@pytest.mark.parametrize("tolerance", [0.2, newton.ROUNDING])
def test_a_prior_below_rounding_errors_is_no_obstacle(tolerance, rho):
    """The prior on the null space is too small to distinguish from rounding errors."""
    head, _, _ = problem("Categorical", "without_bias", dtype=torch.float32)
    rho = torch.full_like(head.weights, rho)
    found = minimum(head, rho, tolerance)
    if tolerance == newton.ROUNDING:
        assert_flat(head, found, rho)


def test_losses_beyond_the_range_of_single_precision():
    head, _, rho = problem("Poisson", dtype=torch.float32)
    head = replace(head, outputs=head.outputs + 95)
    zero = torch.zeros_like(rho)
    start = head.weights
    assert not head.objective(start, rho, zero, torch.float32)[0].isfinite()
    found = minimum(head, rho, 0.2)
    before, after = (head.objective(w, rho, zero, DOUBLE)[0] for w in (start, found))
    assert after < 1e-6 * before


@pytest.mark.parametrize("unit", [1e-8, 1e-4, 1.0, 1e6])
def test_unit_of_the_targets_changes_nothing(unit):
    head, _, rho = problem("Gaussian")
    expected = minimum(head, rho)
    names = "targets", "outputs", "weights"
    scaled = replace(head, **{name: unit * getattr(head, name) for name in names})
    assert_equal(minimum(scaled, rho) / unit, expected, 1e-9)


# --------------------------------------------------------------- awkward problems
class Squares:
    """Half the sum of squares of weighted weights, plus a prior term.

    The preconditioner is poor. The gradient has a sign, and products have a factor.
    """

    def __init__(self, scales, dtype=DOUBLE, sign=1.0, factor=1.0):
        self.scales, self.dtype, self.sign, self.factor = scales, dtype, sign, factor
        self.weights = torch.ones_like(scales)
        self.dtypes = set()

    def objective(self, theta, rho, prior_mean, dtype):
        offset = theta - prior_mean
        f = self.scales * theta
        value = (f @ f + rho @ offset**2) / 2
        return value, self.sign * (self.scales * f + rho * offset), f

    def dense_curvature_at(self, f, rho):
        return (self.scales**2 + rho).diag()

    def curvature_at(self, f, rho, dtype):
        self.dtypes.add(dtype)
        diagonal = self.factor * (self.scales**2 + rho).to(dtype)
        return lambda v: diagonal * v

    def preconditioner_at(self, f, rho, dtype):
        return lambda v: v

    def quick_preconditioner_at(self, f, rho, dtype):
        return None


def test_dense_steps_where_conjugate_gradients_do_not_arrive():
    problem = Squares(10 ** torch.linspace(-3, 3, 900, dtype=DOUBLE))
    rho = torch.full_like(problem.scales, 1e-7)
    assert_flat(problem, minimum(problem, rho), rho)


def test_double_precision_where_single_does_not_hold_the_squares():
    """Problems of this size cannot fall back on a dense matrix."""
    problem = Squares(torch.full((newton.MAX_DENSE + 1,), 1e22).double(), torch.float32)
    rho = torch.full_like(problem.scales, 1e44)
    found = minimum(problem, rho)
    assert problem.dtypes == {torch.float32, DOUBLE}
    assert found.abs().max() < 1e-12


@pytest.mark.parametrize("wrong", [{"sign": -1.0}, {"factor": 0.0}])
def test_warns_where_no_step_can_be_made(wrong):
    """A wrong gradient leads uphill, as rounding may do."""
    problem = Squares(torch.ones(newton.MAX_DENSE + 1, dtype=DOUBLE), **wrong)
    with pytest.warns(ConvergenceWarning, match="could not be refitted"):
        minimum(problem, torch.ones_like(problem.scales))
