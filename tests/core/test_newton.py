import warnings
from dataclasses import replace

import pytest
import references
import torch
from cases import DOUBLE, normal, positive
from contracts import assert_equal
from costs import calls
from sklearn.exceptions import ConvergenceWarning
from tuning_problems import N_ROWS, fit

from sklaplace.core import newton
from sklaplace.posterior import last_layer
from sklaplace.posterior.last_layer import LastLayerModel

every_likelihood = pytest.mark.parametrize("likelihood", references.CONVEX)
every_case = pytest.mark.parametrize("case", ["mlp", "without_bias", "affine_head"])

pytestmark = pytest.mark.usefixtures("rng_untouched")


def problem(likelihood, case="mlp", dtype=DOUBLE):
    """Return a head with its outputs, and one precision per weight."""
    head = fit(likelihood, case=case, weights=positive(N_ROWS)).linear_model
    object.__setattr__(head, "dtype", dtype)
    theta = head.weights + 0.3 * normal(len(head.weights), seed=3)
    return head, head.at(theta), positive(len(head.weights), seed=4)


def minimum(head, rho):
    zero = torch.zeros_like(rho)
    return newton.minimum(head, rho, zero, head.weights, newton.ROUNDING)


def assert_flat(head, found, rho):
    _, slope, _ = head.objective(found, rho, torch.zeros_like(rho))
    assert slope.abs().max() < 1e-6


@every_likelihood
@every_case
def test_products_are_those_of_the_dense_curvature(case, likelihood):
    head, f, rho = problem(likelihood, case)
    v = normal(len(rho), seed=5)
    dense = head.dense_curvature_at(f, rho)
    assert_equal(head.curvature_at(f, rho, DOUBLE)(v), dense @ v, 1e-12)


@every_likelihood
@every_case
def test_preconditioner_inverts_the_block_of_each_output(case, likelihood, monkeypatch):
    monkeypatch.setattr(last_layer, "SAMPLES_PER_INPUT", N_ROWS)
    head, f, rho = problem(likelihood, case)
    o, i = head.layout.blocks[0].factor_shape
    dense = head.dense_curvature_at(f, rho)
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
def test_rows_left_out_of_the_blocks_leave_their_size(likelihood, monkeypatch):
    head, f, rho = problem(likelihood)
    v = normal(len(rho), seed=5)
    monkeypatch.setattr(last_layer, "SAMPLES_PER_INPUT", N_ROWS)
    exact = head.preconditioner_at(f, rho, DOUBLE)(v)
    monkeypatch.setattr(last_layer, "SAMPLES_PER_INPUT", 5)
    rough = head.preconditioner_at(f, rho, DOUBLE)(v)
    assert not torch.equal(exact, rough)
    assert 0.5 < float(exact @ rough / (exact @ exact)) < 2


@every_likelihood
@every_case
def test_quick_preconditioner_inverts_a_diagonal(case, likelihood, monkeypatch):
    """The diagonal is that of ``H + ρ`` in the eigenbasis of the inputs, per output."""
    monkeypatch.setattr(last_layer, "SAMPLES_PER_INPUT", N_ROWS)
    head, f, _ = problem(likelihood, case)
    rho = torch.full_like(head.weights, 0.3)
    o, n_weights = head.layout.blocks[0].factor_shape[0], len(rho)
    ones = torch.ones(N_ROWS, len(head.layout.blocks) - 1, dtype=DOUBLE)
    inputs = torch.cat([head.features, ones], 1)
    basis = torch.linalg.eigh(inputs.T @ inputs)[1]
    monkeypatch.setattr(LastLayerModel, "_with_null_space", lambda self, m, *_: m)
    apply = head.quick_preconditioner_at(f, rho, DOUBLE)
    dense = head.dense_curvature_at(f, rho)
    # weights of all outputs, then biases, from one row for each output
    order = head.from_outputs(torch.arange(n_weights).reshape(o, -1))
    rotation = torch.block_diag(*[basis] * o)[order]
    diagonal = (rotation.T @ dense @ rotation).diagonal()
    v = normal(n_weights, seed=6)
    expected = rotation @ ((rotation.T @ v) / diagonal)
    assert_equal(apply(v), expected, 1e-8)


def test_several_precisions_have_no_quick_preconditioner():
    head, f, rho = problem("Categorical")
    assert head.quick_preconditioner_at(f, rho, DOUBLE) is None


@every_likelihood
@every_case
@pytest.mark.parametrize("budget", [0, 2**30])
def test_weights_common_to_all_classes_are_left_to_the_prior(
    budget, case, likelihood, monkeypatch
):
    monkeypatch.setattr(last_layer, "BUDGET", budget)
    head, f, _ = problem(likelihood, case)
    rho = torch.full_like(head.weights, 0.3)
    apply = head.preconditioner_at(f, rho, DOUBLE)
    if case == "affine_head" or not head.likelihood.is_shift_invariant:
        assert head._with_null_space(torch.neg, rho, DOUBLE) is torch.neg
        return
    n_rows, n_inputs = head.by_output(rho).shape
    n_groups = head.likelihood.n_blocks
    rows = normal(n_groups, 1, n_inputs, seed=5)
    rows = rows.expand(-1, n_rows // n_groups, -1).flatten(0, 1)
    common = head.from_outputs(rows)
    assert_equal(head.dense_curvature_at(f, rho) @ common, 0.3 * common, 1e-12)
    assert_equal(apply(common), common / 0.3, 1e-12)
    # a preconditioner is symmetric and positive definite
    u, v = normal(2, len(rho), seed=6)
    assert float(u @ apply(v)) == pytest.approx(float(v @ apply(u)), rel=1e-10)
    assert u @ apply(u) > 0


def test_the_null_space_saves_iterations(monkeypatch):
    head, _, _ = problem("Categorical")
    rho = torch.full_like(head.weights, 1e-3)

    def n_products():
        with calls(LastLayerModel, "backward") as products:
            assert_flat(head, minimum(head, rho), rho)
        return len(products)

    found = n_products()
    monkeypatch.setattr(LastLayerModel, "_with_null_space", lambda self, m, *_: m)
    assert found < 0.8 * n_products()


def test_precisions_that_differ_between_classes_mix_with_the_null_space():
    head, _, rho = problem("Categorical")
    assert head._with_null_space(torch.neg, rho, DOUBLE) is torch.neg


@every_likelihood
@pytest.mark.parametrize(
    ("tolerance", "dtype"), [(1e-1, torch.float32), (1e-4, DOUBLE)]
)
def test_loose_tolerances_need_the_networks_precision_only(
    tolerance, dtype, likelihood
):
    head, _, rho = problem(likelihood, dtype=torch.float32)
    zero = torch.zeros_like(rho)
    with calls(LastLayerModel, "objective") as objectives:
        found = newton.minimum(head, rho, zero, head.weights, tolerance)
    assert {call[-1] for call in objectives} == {dtype}
    loss, least = (
        float(head.objective(w, rho, zero)[0]) for w in (found, minimum(head, rho))
    )
    assert -1e-9 <= (loss - least) / (1 + abs(least)) <= tolerance


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rho", [1e-7, 1e-12, 1e-16])
@pytest.mark.parametrize("tolerance", [0.2, newton.ROUNDING])
def test_a_prior_below_rounding_errors_takes_no_more_iterations(
    tolerance, rho, monkeypatch
):
    """The prior on the null space is too small to distinguish from rounding errors."""
    head, _, _ = problem("Categorical", "without_bias", dtype=torch.float32)
    rho = torch.full_like(head.weights, rho)

    def n_products():
        zero = torch.zeros_like(rho)
        with calls(LastLayerModel, "backward") as products:
            newton.minimum(head, rho, zero, head.weights, tolerance)
        return len(products)

    found = n_products()
    monkeypatch.setattr(LastLayerModel, "_with_null_space", lambda self, m, *_: m)
    assert found <= n_products() + 10


def test_losses_beyond_the_range_of_single_precision():
    head, _, rho = problem("Poisson", dtype=torch.float32)
    head = replace(head, outputs=head.outputs + 95)
    zero = torch.zeros_like(rho)
    start = head.weights
    assert not head.objective(start, rho, zero, torch.float32)[0].isfinite()
    found = newton.minimum(head, rho, zero, start, 0.2)
    assert (
        head.objective(found, rho, zero)[0] < 1e-6 * head.objective(start, rho, zero)[0]
    )


@every_likelihood
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("budget", [0, 2**30])
def test_minimum_is_the_same_with_any_preconditioner_and_dtype(
    budget, dtype, likelihood, monkeypatch
):
    monkeypatch.setattr(last_layer, "BUDGET", budget)
    head, _, rho = problem(likelihood, dtype=dtype)
    found = minimum(head, rho)
    assert_flat(head, found, rho)
    monkeypatch.setattr(newton, "MAX_CG_IF_DENSE", 0)  # dense steps
    expected = minimum(head, rho)
    # a gradient of 1e-6 over the smallest precision
    assert_equal(found, expected, 1e-6 / float(rho.min()))


@every_likelihood
def test_precisions_that_differ_by_orders_of_magnitude(likelihood):
    """The mean of all precisions would be a poor preconditioner."""
    head, _, rho = problem(likelihood)
    rho = 10.0 ** torch.linspace(-6, 8, len(rho), dtype=DOUBLE)
    with (
        calls(LastLayerModel, "backward") as products,
        calls(LastLayerModel, "dense_curvature_at") as dense,
    ):
        found = minimum(head, rho)
    assert_flat(head, found, rho)
    assert dense == []
    assert len(products) < 150


@every_likelihood
def test_dense_steps_where_conjugate_gradients_do_not_arrive(likelihood, monkeypatch):
    monkeypatch.setattr(newton, "MAX_CG_IF_DENSE", 1)
    monkeypatch.setattr(last_layer, "BUDGET", 0)
    head, _, rho = problem(likelihood)
    with calls(LastLayerModel, "dense_curvature_at") as dense:
        found = minimum(head, rho)
    assert_flat(head, found, rho)
    assert dense != []


@every_likelihood
def test_double_precision_where_single_does_not_hold_the_squares(
    likelihood, monkeypatch
):
    """Large heads cannot fall back on a dense matrix."""
    monkeypatch.setattr(newton, "MAX_DENSE", 0)
    head, _, rho = problem(likelihood, "without_bias", dtype=torch.float32)
    rho, zero = 1e44 * rho, torch.zeros_like(rho)
    rows = {"features": 1e22 * head.features, "outputs": 0 * head.outputs}
    head = replace(head, weights=zero, **rows)
    with calls(LastLayerModel, "curvature_at") as products:
        found = newton.minimum(head, rho, zero, zero, newton.ROUNDING)
    before, _, _ = head.objective(zero, rho, zero)
    after, slope, _ = head.objective(found, rho, zero)
    assert {args[-1] for args in products} == {torch.float32, DOUBLE}
    assert after < before
    assert slope.abs().max() < 1e-6 * 1e22  # the unit of the features


def test_warns_where_no_step_can_be_made(monkeypatch):
    monkeypatch.setattr(newton, "MAX_DENSE", 0)
    head, _, rho = problem("Categorical")
    monkeypatch.setattr(LastLayerModel, "curvature_at", lambda *_: torch.zeros_like)
    with pytest.warns(ConvergenceWarning, match="could not be refitted"):
        minimum(head, rho)


@pytest.mark.parametrize("unit", [1e-8, 1e-4, 1.0, 1e6])
def test_unit_of_the_targets_changes_nothing(unit):
    head, _, rho = problem("Gaussian")
    expected = minimum(head, rho)
    names = "targets", "outputs", "weights"
    scaled = replace(head, **{name: unit * getattr(head, name) for name in names})
    assert_equal(minimum(scaled, rho) / unit, expected, 1e-9)


def test_warns_where_rounding_stops_the_descent(monkeypatch):
    """A wrong gradient leads uphill."""
    head, _, rho = problem("Categorical")
    objective = LastLayerModel.objective

    def wrong(self, theta, rho, mean, dtype):
        value, gradient, f = objective(self, theta, rho, mean, dtype)
        return value, -gradient, f

    monkeypatch.setattr(LastLayerModel, "objective", wrong)
    with pytest.warns(ConvergenceWarning, match="could not be refitted"):
        minimum(head, rho)
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        minimum(head, rho)
