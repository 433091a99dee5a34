"""Contracts for every registry entry, checked against dense references.

The checks accept the names of entries, so tests run over the registries. A new entry is
tested as soon as it is listed and has a line in ``references``.
"""

from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import references
import torch
from cases import CASES, Case, positive
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from sklaplace.core.random import row_hash
from sklaplace.core.trees import tree_rows
from sklaplace.curvature import accumulation
from sklaplace.curvature.ggn import CURVATURES, GGN, Curvature
from sklaplace.curvature.jacobian import Jacobian, backpropagate
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.priors import PRIOR_STRUCTURES
from sklaplace.curvature.structures import STRUCTURES, Accumulator, Precision, Structure
from sklaplace.curvature.subsets import SUBSETS
from sklaplace.likelihoods.base import DataFit, Likelihood
from sklaplace.networks.forward import Forward
from sklaplace.posterior.gaussian import GaussianPosterior, Hyperparameters

N_ROWS = 6
# weights of several tensors, some of which have none
SUBSET_OPTIONS = {"subnetwork": {"indices": [0, 2, 3, 7, 8, 11]}}

# structure x prior structure, where the structure supports it
STRUCTURES_AND_PRIORS = [
    (structure, prior)
    for structure, (_, kind) in STRUCTURES.items()
    for prior in PRIOR_STRUCTURES
    if prior in kind.priors
]


# -------------------------------------------------------------------- problems
@dataclass(frozen=True)
class Network:
    """A trained network whose datasets are lists of batches."""

    function: Forward
    spec: Any
    device: str = "cpu"
    train: Any = None

    def forward(self) -> Forward:
        return self.function

    def batches(self, dataset: Any, batch_size: int | None) -> Any:
        return dataset


def accumulate(
    forward: Forward,
    batches: Any,
    likelihood: Likelihood,
    curvature: Curvature,
    accumulator: Accumulator,
    observe: Any = lambda rows: None,
) -> DataFit:
    """Add batches, as one part, to a possibly non-empty accumulator."""

    class Observing(accumulation.Recorder):
        def observe(self, rows):
            observe(rows)

    network = Network(forward, SimpleNamespace(likelihood=likelihood))
    given = network, [batches], curvature, accumulator
    sums = accumulation.accumulate(*given, recorder=Observing)
    vars(accumulator).update(vars(sums.accumulator))
    return sums.data_fit


class Problem:
    """A network with rows, targets and selected weights."""

    def __init__(self, case: Case, likelihood: str, subset: str) -> None:
        self.likelihood: Likelihood = references.LIKELIHOODS[likelihood]
        known = references.reference(self.likelihood)
        self.forward: Forward = case.forward(known.n_outputs)
        self.x, self.y = case.rows(N_ROWS), known.targets(N_ROWS)
        options = SUBSET_OPTIONS.get(subset, {})
        self.layout: Layout = SUBSETS[subset](self.forward, self.x, **options)
        self.parts = references.curvature(
            self.forward, self.x, self.layout, self.likelihood, self.y
        )

    def batches(self, *sizes: int, weights: Tensor | None = None) -> list[Any]:
        """Return the rows in order, split into batches."""
        ends = torch.tensor(sizes).cumsum(0).tolist()
        cuts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        return [self.rows(cut, weights) for cut in cuts]

    def rows(self, rows: Any, weights: Tensor | None = None) -> Any:
        w = None if weights is None else weights[rows]
        return tree_rows(self.x, rows), self.y[rows], w

    def accumulate(
        self, accumulator: Accumulator, batches: Any, curvature: Curvature = GGN
    ) -> DataFit:
        return accumulate(
            self.forward, batches, self.likelihood, curvature, accumulator
        )

    def accumulator(
        self, name: str, batches: Any, curvature: Curvature = GGN
    ) -> Accumulator:
        accumulator = STRUCTURES[name][0](self.layout)
        self.accumulate(accumulator, batches, curvature)
        return accumulator

    def structure(
        self, name: str, batches: Any = None, curvature: Curvature = GGN
    ) -> Structure:
        batches = self.batches(N_ROWS) if batches is None else batches
        return self.accumulator(name, batches, curvature).decompose()

    def jacobian(self) -> Jacobian:
        return backpropagate(self.forward, self.x, self.layout)[1]

    def posterior(
        self, name: str, prior: str = "scalar", batches: Any = None
    ) -> GaussianPosterior:
        """Return a posterior whose hyperparameters are neither zero nor one."""
        batches = self.batches(N_ROWS) if batches is None else batches
        accumulator = STRUCTURES[name][0](self.layout)
        data_fit = self.accumulate(accumulator, batches)
        weights = self.layout.read(self.forward.module)
        return GaussianPosterior(
            mean=weights,
            weights=weights,
            structure=accumulator.decompose(),
            layout=self.layout,
            likelihood=self.likelihood,
            data_fit=data_fit,
            hyperparameters=hyperparameters(
                prior_precision=prior_precision(self.layout, prior),
                prior_mean=0.3,
                sigma_noise=0.7,
                temperature=1.3,
            ),
        )


@cache
def problem(case: str, likelihood: str = "Categorical", subset: str = "all") -> Problem:
    return Problem(CASES[case], likelihood, subset)


def prior_precision(layout: Layout, prior: str) -> Tensor:
    return positive(*PRIOR_STRUCTURES[prior](layout), seed=5)


def hyperparameters(**values: float | Tensor) -> Hyperparameters:
    """Return float64 hyperparameters: one by default, zero for the prior mean."""
    names = "prior_precision", "sigma_noise", "temperature"
    values = {**dict.fromkeys(names, 1.0), "prior_mean": 0.0, **values}
    tensors = {k: torch.as_tensor(v, dtype=torch.float64) for k, v in values.items()}
    return Hyperparameters(**tensors)


def scale() -> Tensor:
    return torch.tensor(1.7, dtype=torch.float64)


# ------------------------------------------------------------------ comparison
def assert_equal(found: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    """Check equality up to a tolerance relative to the largest entry, or to one."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    allowed = tolerance * max(1.0, float(expected.abs().max()))
    worst = float((found - expected).abs().max())
    assert worst <= allowed, f"off by {worst:.1e}, {allowed:.1e} is allowed"


# ----------------------------------------------------------- checks: structures
def check_dense(problem: Problem, name: str) -> None:
    """Check that ``H`` equals the reference and has no negative eigenvalues."""
    structure = problem.structure(name)
    expected = references.STRUCTURES[name](problem.parts)
    assert_equal(structure.trace(), expected.trace())
    assert_equal(structure.dense(), expected)
    assert (structure.eigenvalues >= 0).all()
    assert_equal(structure.trace(), expected.trace())


def check_questions(
    problem: Problem, name: str, prior: str, curvature: str = "ggn"
) -> None:
    """Check every method of a structure against the reference approximation."""
    expected = references.STRUCTURES[name](parts(problem, curvature))
    structure = problem.structure(name, curvature=CURVATURES[curvature])
    assert_equal(structure.dense(), expected)
    check_answers(problem, structure, prior, expected)


def parts(problem: Problem, curvature: str) -> references.Curvature:
    """Return the reference with the curvature of the outputs by another rule.

    Drawn targets come from the package; `test_ggn` checks their distribution.
    """
    f = problem.forward(problem.x).detach()
    if curvature == "ggn":
        return problem.parts
    if curvature == "identity":
        S = torch.eye(f.shape[1], dtype=f.dtype).expand(len(f), -1, -1)
    elif curvature == "ef":
        S = loss_gradient(problem.likelihood, f, problem.y).unsqueeze(-1)
    else:
        draw, keys = CURVATURES[curvature], row_hash(problem.x)
        S = draw(problem.likelihood, f, problem.y, keys=keys).factor()
    return replace(problem.parts, L=S @ S.mT)


def loss_gradient(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Return the gradient (b, c) of the reference loss in the outputs."""
    leaf = f.clone().requires_grad_()
    one = torch.ones((), dtype=f.dtype)
    total = -references.log_likelihood(likelihood, leaf, y, one).sum()
    return torch.autograd.grad(total, leaf)[0]


def check_answers(
    problem: Problem, structure: Structure, prior: str, hessian: Tensor
) -> None:
    """Check every method against the dense posterior precision."""
    jacobian = problem.jacobian()
    delta, s = prior_precision(problem.layout, prior), scale()
    P = s * hessian + references.expand(delta, problem.layout).diag()
    cov, J = torch.linalg.inv(P), problem.parts.J
    expected = torch.einsum("ncp,pq,ndq->ncd", J, cov, J)
    variances = expected.diagonal(dim1=1, dim2=2)
    precision, projected = structure.precision(delta, s), structure.project(jacobian)
    assert_equal(precision.logdet(), torch.logdet(P))
    assert_equal(precision.functional_covariance(jacobian), expected)
    assert_equal(precision.functional_variance(jacobian), variances)
    assert_equal(projected.covariance(precision), expected)
    assert_equal(projected.covariance(precision, diagonal=True), variances)
    assert_equal(precision.variance(), cov.diagonal())
    v = torch.linspace(-1, 2, len(P), dtype=P.dtype)
    assert_equal(precision.solve(v), cov @ v)
    gamma = 1 - references.expand(delta, problem.layout) * cov.diagonal()
    assert_equal(precision.effective_parameters(), gamma)
    # A root F of the covariance: the draws are F ε for noise ε, in rows.
    identity = torch.eye(len(P), dtype=P.dtype)
    root = precision.sample(identity).T
    assert_equal(root @ root.T, cov)
    R = precision.whiten(jacobian)
    across = torch.einsum("ncp,mdp->ncmd", R, R)
    assert_equal(across, torch.einsum("ncp,pq,mdq->ncmd", J, cov, J))


def check_gradients(problem: Problem, name: str, prior: str) -> None:
    """Check gradients in prior precision and scale, twice for the log-determinant."""
    structure, jacobian = problem.structure(name), problem.jacobian()
    delta = prior_precision(problem.layout, prior).requires_grad_()
    inputs = delta, scale().requires_grad_()
    noise = torch.eye(problem.layout.n_parameters, dtype=torch.float64)[:2]
    P = structure.precision
    with torch.random.fork_rng(devices=[]):  # gradgradcheck draws cotangents
        assert gradgradcheck(lambda d, s: P(d, s).logdet(), inputs)
    assert gradcheck(lambda d, s: P(d, s).logdet(), inputs)
    assert gradcheck(lambda d, s: P(d, s).functional_covariance(jacobian), inputs)
    assert gradcheck(lambda d, s: P(d, s).variance(), inputs)
    assert gradcheck(lambda d, s: P(d, s).sample(noise), inputs)


# Sums in another order differ by rounding only, some 1e-15 of the largest entry.
ROUNDING = 1e-10


def check_batches(problem: Problem, name: str) -> None:
    """Check that batch sizes and the order of rows do not matter."""
    expected = problem.structure(name).dense()
    for sizes in ((1,) * N_ROWS, (4, 2), (1, 5)):
        found = problem.structure(name, problem.batches(*sizes)).dense()
        assert_equal(found, expected, ROUNDING)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    batches = [problem.rows(order[:4]), problem.rows(order[4:])]
    assert_equal(problem.structure(name, batches).dense(), expected, ROUNDING)


def check_merge(problem: Problem, name: str) -> None:
    """Check that merging equals joint updates, also with an empty accumulator.

    What was decomposed before stays.
    """
    expected = problem.structure(name).dense()
    first, second = problem.batches(2, 4)
    left, right = (problem.accumulator(name, [part]) for part in (first, second))
    before, seen = left.decompose(), right.decompose().dense()
    dense = before.dense().clone()
    left.merge(right)
    assert_equal(left.decompose().dense(), expected, ROUNDING)
    assert_equal(before.dense(), dense, 0)
    assert_equal(right.decompose().dense(), seen, 0)
    empty = STRUCTURES[name][0](problem.layout)
    left.merge(empty)
    assert_equal(left.decompose().dense(), expected, ROUNDING)
    empty.merge(left)
    assert_equal(empty.decompose().dense(), expected, ROUNDING)
    empty.merge(left)
    assert_equal(left.decompose().dense(), expected, ROUNDING)


def check_resumed(problem: Problem, name: str) -> None:
    """Check that resuming from a structure equals accumulating all rows at once."""
    expected = problem.structure(name).dense()
    first, second = problem.batches(2, 4)
    for decomposed in (False, True):
        seen = problem.structure(name, [first])
        if decomposed:
            seen.precision(torch.tensor(0.7, dtype=torch.float64), scale()).logdet()
        before = seen.dense().clone()
        resumed = STRUCTURES[name][0](problem.layout)
        seen.add_to(resumed)
        problem.accumulate(resumed, [second])
        assert_equal(resumed.decompose().dense(), expected, ROUNDING)
        assert_equal(seen.dense(), before, ROUNDING)


def check_scaled(problem: Problem, name: str) -> None:
    """Check that scaling equals a sample weight on all rows, also after resuming."""
    factor = torch.tensor(2.5, dtype=torch.float64)
    structure = problem.structure(name)
    expected = factor * structure.dense()
    scaled = structure.scaled(factor)
    assert_equal(scaled.dense(), expected, ROUNDING)
    assert type(scaled) is type(structure)
    resumed = STRUCTURES[name][0](problem.layout)
    scaled.add_to(resumed)
    assert_equal(resumed.decompose().dense(), expected, ROUNDING)
    # what has been scaled goes on with further rows as weighted rows do
    if structure.is_additive:
        weights = torch.tensor([2.5, 2.5, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
        first, second = problem.batches(2, 4)
        resumed = STRUCTURES[name][0](problem.layout)
        problem.structure(name, [first]).scaled(factor).add_to(resumed)
        problem.accumulate(resumed, [second])
        weighted = problem.structure(name, problem.batches(2, 4, weights=weights))
        assert_equal(resumed.decompose().dense(), weighted.dense(), ROUNDING)


def check_product(problem: Problem, name: str) -> None:
    """Check products ``H v`` without ``H``, also of a scaled structure."""
    structure = problem.structure(name)
    v = torch.linspace(-1, 2, problem.layout.n_parameters, dtype=torch.float64)
    assert_equal(structure.product(v), structure.dense() @ v)
    scaled = structure.scaled(scale())
    assert_equal(scaled.product(v), scale() * structure.dense() @ v)


def check_weights(problem: Problem, name: str, prior: str) -> None:
    """Check that weights count rows: integers repeat a row, zero removes the row."""
    weights = torch.tensor([1.0, 2.0, 0.0, 3.0, 1.0, 2.0], dtype=torch.float64)
    repeated = torch.arange(N_ROWS).repeat_interleave(weights.long())
    weighted = problem.batches(2, 4, weights=weights)
    with_weights = problem.posterior(name, prior, weighted)
    with_copies = problem.posterior(name, prior, [problem.rows(repeated)])
    H = with_copies.structure.dense()
    assert_equal(with_weights.structure.dense(), H, ROUNDING)
    evidence = with_copies.log_marginal_likelihood()
    assert_equal(with_weights.log_marginal_likelihood(), evidence, ROUNDING)


def check_pure(problem: Problem, name: str, prior: str) -> None:
    """Check that no method changes results, structure, rows or arguments."""
    structure, jacobian = problem.structure(name), problem.jacobian()
    delta, s = prior_precision(problem.layout, prior), scale()
    before = [t.clone() for t in (structure.dense(), jacobian.dense(), delta, s)]
    noise = torch.ones(2, problem.layout.n_parameters, dtype=torch.float64)

    def answers(precision: Precision) -> list[Tensor]:
        return [
            precision.logdet(),
            precision.functional_covariance(jacobian),
            precision.sample(noise),
            precision.variance(),
            precision.whiten(jacobian),
        ]

    kept = structure.precision(delta, s)
    first = answers(kept)
    structure.precision(10 * delta, 3 * s).logdet()
    for precision in (kept, structure.precision(delta, s)):
        for once, again in zip(first, answers(precision), strict=True):
            assert torch.equal(once, again)
    after = structure.dense(), jacobian.dense(), delta, s
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)


# ----------------------------------------------------------- checks: likelihoods
def check_derivatives(name: str, f: Tensor, y: Tensor) -> None:
    """Check gradient and Hessian factor against the reference log-likelihood."""
    likelihood = references.LIKELIHOODS[name]
    assert_equal(likelihood.gradient(f, y), loss_gradient(likelihood, f, y), 1e-12)
    S = likelihood.hessian_factor(f)
    assert S.shape[:2] == f.shape
    assert_equal(S @ S.mT, references.loss_hessian(likelihood, f, y), 1e-12)
